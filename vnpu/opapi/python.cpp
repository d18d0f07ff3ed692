// Calls into the Python that runs the caller's script. Its functions are looked up by name: the build needs
// no Python, and one library serves every Python version.
#include "call.h"

#include <dlfcn.h>

namespace vnpu {
namespace {

constexpr const char* kModule = "ascend_moe.vnpu.operators";

struct Python {
    int (*ensure)() = nullptr;
    void (*release)(int) = nullptr;
    int (*initialized)() = nullptr;
    int (*finalizing)() = nullptr;  // may be absent: Py_IsFinalizing came with 3.13, _Py_IsFinalizing before
    void* (*import)(const char*) = nullptr;
    void* (*call_method)(void*, const char*, const char*, ...) = nullptr;
    const char* (*text)(void*) = nullptr;
    void* (*str)(void*) = nullptr;
    void (*drop)(void*) = nullptr;
    void (*fetch)(void**, void**, void**) = nullptr;
    void (*clear)() = nullptr;

    bool complete() const {
        return ensure && release && initialized && import && call_method && text && str && drop && fetch &&
               clear;
    }
};

template <typename F>
void look_up(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
}

const Python& python() {
    static const Python api = [] {
        Python p;
        look_up(p.ensure, "PyGILState_Ensure");
        look_up(p.release, "PyGILState_Release");
        look_up(p.initialized, "Py_IsInitialized");
        look_up(p.finalizing, "Py_IsFinalizing");
        if (p.finalizing == nullptr) look_up(p.finalizing, "_Py_IsFinalizing");
        look_up(p.import, "PyImport_ImportModule");
        look_up(p.call_method, "PyObject_CallMethod");
        look_up(p.text, "PyUnicode_AsUTF8");
        look_up(p.str, "PyObject_Str");
        look_up(p.drop, "Py_DecRef");
        look_up(p.fetch, "PyErr_Fetch");
        look_up(p.clear, "PyErr_Clear");
        return p;
    }();
    return api;
}

// The pending exception's text; the GIL is held.
std::string pending_error(const Python& p) {
    void *type = nullptr, *value = nullptr, *trace = nullptr;
    p.fetch(&type, &value, &trace);
    std::string text = "unknown Python error";
    if (void* described = value == nullptr ? nullptr : p.str(value)) {
        if (const char* utf8 = p.text(described)) text = utf8;
        p.drop(described);
    }
    p.clear();
    for (void* object : {type, value, trace}) {
        if (object != nullptr) p.drop(object);
    }
    return text;
}

// The error, or empty when there is none; the GIL is held.
std::string call_python(const Python& p, const Call& call) {
    void* module = p.import(kModule);
    if (module == nullptr) return std::string("cannot import ") + kModule + ": " + pending_error(p);
    void* answer = p.call_method(module, "run", "sKK", call.name,
                                 reinterpret_cast<unsigned long long>(call.words.data()),
                                 static_cast<unsigned long long>(call.words.size()));
    p.drop(module);
    if (answer == nullptr) return pending_error(p);
    const char* utf8 = p.text(answer);
    std::string problem = utf8 == nullptr ? "run() gave no text" : utf8;
    p.drop(answer);
    return problem;
}

}  // namespace

std::string run_in_python(const Call& call) {
    const Python& p = python();
    const std::string name = call.name;
    if (!p.complete() || !p.initialized()) {
        return name + ": the virtual NPU computes with Python, and this process runs none";
    }
    if (p.finalizing != nullptr && p.finalizing()) {
        return name + ": Python is shutting down; synchronize the device before the script ends";
    }
    const int state = p.ensure();
    const std::string problem = call_python(p, call);
    p.release(state);
    return problem.empty() ? problem : name + ": " + problem;
}

}  // namespace vnpu
