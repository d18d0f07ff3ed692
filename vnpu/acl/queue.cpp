#include "queue.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"
#include "python.h"

namespace vnpu {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSignals = std::chrono::milliseconds(100);  // between two looks for signals

class Queue {
public:
    // Never destroyed: its thread outlives main().
    static Queue& the() {
        static auto* queue = new Queue;
        return *queue;
    }

    uint64_t Put(std::shared_ptr<Work> work, const void* stream) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!started_) std::thread([this] { Serve(); }).detach();
        started_ = true;
        works_.push_back({++put_, stream, std::move(work)});
        changed_.notify_all();
        return put_;
    }

    bool HasRun(uint64_t last) {
        std::lock_guard<std::mutex> lock(mutex_);
        return Ran(last);
    }

    uint64_t Last() {
        std::lock_guard<std::mutex> lock(mutex_);
        return put_;
    }

    AclError WaitForAll(const char* function) {
        const uint64_t last = Last();
        return Wait([=] { return Oldest() > last; }, function);
    }
    AclError WaitFor(uint64_t last, const char* function) {
        return Wait([=] { return Ran(last); }, function);
    }

private:
    struct Entry {
        uint64_t number;
        const void* stream;
        std::shared_ptr<Work> work;
    };

    // Until ended(), called under the lock.
    template <typename Ended>
    AclError Wait(const Ended& ended, const char* function) {
        if (serving_) return kSuccess;  // work that waits for its own queue would never end
        if (std::lock_guard<std::mutex> lock(mutex_); ended()) return kSuccess;
        const YieldedGil yielded;
        std::unique_lock<std::mutex> lock(mutex_);
        uint64_t before = done_;
        Clock::time_point moved = Clock::now();
        while (!ended()) {
            changed_.wait_for(lock, kSignals);
            if (done_ != before) {
                before = done_;
                moved = Clock::now();
            }
            if (ended()) break;
            if (Clock::now() - moved > Limit()) return TimedOut(function);
            lock.unlock();
            if (!RunSignalHandlers()) return Interrupted(function);
            lock.lock();
        }
        return kSuccess;
    }

    // Of what has not run, the first number; one that nothing has if all has run.
    uint64_t Oldest() const {
        if (running_) return works_.empty() ? running_ : std::min(running_, works_.front().number);
        return works_.empty() ? put_ + 1 : works_.front().number;
    }
    bool Ran(uint64_t number) const {
        if (number == running_) return number == 0;
        const auto earlier = [](const Entry& entry, uint64_t wanted) { return entry.number < wanted; };
        const auto found = std::lower_bound(works_.begin(), works_.end(), number, earlier);
        return found == works_.end() || found->number != number;
    }

    // The first work that waits for nothing and whose stream does not wait; end() if there is none.
    std::deque<Entry>::iterator Ready() {
        std::vector<const void*> waiting;
        return std::find_if(works_.begin(), works_.end(), [&](const Entry& entry) {
            if (std::find(waiting.begin(), waiting.end(), entry.stream) != waiting.end()) return false;
            const Work& work = *entry.work;
            if (Ran(work.after) && (!work.ready || work.ready())) return true;
            waiting.push_back(entry.stream);
            return false;
        });
    }

    void Serve() {
        serving_ = true;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            std::deque<Entry>::iterator next;
            changed_.wait(lock, [&] { return (next = Ready()) != works_.end(); });
            std::shared_ptr<Work> work = std::move(next->work);
            running_ = next->number;
            works_.erase(next);
            lock.unlock();
            vnpu::Run(*work);
            work.reset();  // what it held is given back before anyone who waits goes on
            lock.lock();
            running_ = 0;
            ++done_;
            changed_.notify_all();
        }
    }

    // Longer than a collective in the queue may wait, which says more when it fails.
    static std::chrono::seconds Limit() {
        return std::chrono::seconds(static_cast<int64_t>(vnpu_timeout_seconds()) + 60);
    }

    AclError TimedOut(const char* function) const {
        vnpu_error(
            "%s: of %llu queued calls %llu have run, and none has ended for %lld s (ASCEND_MOE_TIMEOUT_S plus 60)%s",
            function, static_cast<unsigned long long>(put_), static_cast<unsigned long long>(done_),
            static_cast<long long>(Limit().count()),
            running_ ? "" : "; the first waits for a value that nothing has written (an external event's record)");
        return kQueueTimeout;
    }
    static AclError Interrupted(const char* function) {
        vnpu_error("%s: the handler of a signal has raised while this call waited for the device", function);
        return kQueueTimeout;
    }

    static thread_local bool serving_;  // whether this is the queue's own thread
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Entry> works_;  // by number
    bool started_ = false;
    uint64_t put_ = 0, running_ = 0, done_ = 0;  // running_: its number, or 0
};

thread_local bool Queue::serving_ = false;

}  // namespace

void Run(const Work& work) {
    if (work.needs == kNeedsNothing) return work.run();
    if (!PythonRuns()) {
        vnpu_error(
            "the virtual NPU computes with Python, which is shutting down or absent; synchronize the device before the "
            "script ends");
        return vnpu_fault();
    }
    const HeldGil gil;
    work.run();
}

uint64_t Put(std::shared_ptr<Work> work, const void* stream) { return Queue::the().Put(std::move(work), stream); }
bool HasRun(uint64_t last) { return Queue::the().HasRun(last); }
AclError WaitFor(uint64_t last, const char* function) { return Queue::the().WaitFor(last, function); }
AclError WaitForAll(const char* function) { return Queue::the().WaitForAll(function); }

}  // namespace vnpu

VNPU_EXPORT int vnpu_wait(void) { return vnpu::WaitForAll(); }

// ---- the start and the end of ACL in this process, and of a device in a thread

using namespace vnpu;

static std::atomic<bool> initialised{false};

VNPU_EXPORT AclError aclInit(const char*) {
    if (initialised.exchange(true)) return 100002;  // ACL_ERROR_REPEAT_INITIALIZE, which callers expect
    return kSuccess;
}

VNPU_EXPORT AclError aclFinalize() {
    initialised = false;
    return WaitForAll();
}

VNPU_EXPORT AclError aclrtResetDevice(int32_t device) {
    if (device < 0 || device >= DeviceCount()) return kInvalidDevice;
    LeaveDevice(device);
    return WaitForAll();
}
