#include "queue.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

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

    uint64_t Put(std::shared_ptr<Work> work) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!started_) std::thread([this] { Serve(); }).detach();
        started_ = true;
        works_.push_back(std::move(work));
        changed_.notify_all();
        return ++put_;
    }

    bool HasRun(uint64_t last) {
        std::lock_guard<std::mutex> lock(mutex_);
        return done_ >= last;
    }

    uint64_t Last() {
        std::lock_guard<std::mutex> lock(mutex_);
        return put_;
    }

    AclError WaitFor(uint64_t last, const char* function) {
        if (HasRun(last) || serving_) return kSuccess;  // work that waits for its own queue would never end
        const YieldedGil yielded;
        std::unique_lock<std::mutex> lock(mutex_);
        uint64_t before = done_;
        Clock::time_point moved = Clock::now();
        while (done_ < last) {
            changed_.wait_for(lock, kSignals);
            if (done_ != before) {
                before = done_;
                moved = Clock::now();
            }
            if (done_ >= last) break;
            if (Clock::now() - moved > Limit()) return TimedOut(function);
            lock.unlock();
            if (!RunSignalHandlers()) return Interrupted(function);
            lock.lock();
        }
        return kSuccess;
    }

private:
    void Serve() {
        serving_ = true;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return !works_.empty(); });
            std::shared_ptr<Work> work = std::move(works_.front());
            works_.pop_front();
            lock.unlock();
            Run(*work);
            work.reset();  // what it held is given back before anyone who waits goes on
            lock.lock();
            ++done_;
            changed_.notify_all();
        }
    }

    static void Run(const Work& work) {
        if (work.needs == kNeedsNothing) return work.Run();
        if (!PythonRuns()) {
            vnpu_error(
                "the virtual NPU computes with Python, which is shutting down or absent; synchronize the device "
                "before the script ends");
            return vnpu_fault();
        }
        const HeldGil gil;
        work.Run();
    }

    // Longer than a collective in the queue may wait, which says more when it fails.
    static std::chrono::seconds Limit() {
        return std::chrono::seconds(static_cast<int64_t>(vnpu_timeout_seconds()) + 60);
    }

    AclError TimedOut(const char* function) const {
        vnpu_error(
            "%s: of %llu queued calls %llu have run, and none has ended for %lld s (ASCEND_MOE_TIMEOUT_S plus 60)",
            function, static_cast<unsigned long long>(put_), static_cast<unsigned long long>(done_),
            static_cast<long long>(Limit().count()));
        return kQueueTimeout;
    }
    static AclError Interrupted(const char* function) {
        vnpu_error("%s: the handler of a signal has raised while this call waited for the device", function);
        return kQueueTimeout;
    }

    static thread_local bool serving_;  // whether this is the queue's own thread
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Work>> works_;
    bool started_ = false;
    uint64_t put_ = 0, done_ = 0;
};

thread_local bool Queue::serving_ = false;

}  // namespace

uint64_t Put(std::shared_ptr<Work> work) { return Queue::the().Put(std::move(work)); }
bool HasRun(uint64_t last) { return Queue::the().HasRun(last); }
AclError WaitFor(uint64_t last, const char* function) { return Queue::the().WaitFor(last, function); }
AclError WaitForAll(const char* function) { return Queue::the().WaitFor(Queue::the().Last(), function); }

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
