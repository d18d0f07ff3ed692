// A page that is opened from a disk may start no web worker, so its search runs in a hidden frame, which may load scripts.
// mkdocs-material knows such a stand-in by the name IFrameWorker, and waits for what importScripts returns.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = "<!doctype html>"
      this.started = new Promise(resolve => { this.frame.onload = resolve }).then(() => {
        const inside = this.frame.contentWindow
        const load = address => new Promise((resolve, reject) => {
          const script = inside.document.createElement("script")
          script.src = address
          script.onload = resolve
          script.onerror = () => reject(new Error(`${address} does not load`))
          inside.document.body.append(script)
        })
        inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
        inside.importScripts = async (...addresses) => {
          for (const address of addresses) await load(address)
        }
        return load(new URL(url, location)).then(() => inside)
      })
      document.body.append(this.frame)
    }

    postMessage(data) {
      this.started.then(inside => inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
