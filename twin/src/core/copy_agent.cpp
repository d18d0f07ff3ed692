#include "twin/engine/copy_agent.h"

#if !defined(TWIN_CHECKED) && !defined(TWIN_TIMED)

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace twin {

namespace {

constexpr uint32_t kPiecesAtOnce = 64;  // of one peer, before the next one's turn

// The fast engine's agent is a thread: on an NPU the server is a processor of its own beside the cores.
class ThreadAgent final : public CopyAgent {
public:
    ~ThreadAgent() override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        if (thread_.joinable()) thread_.join();
    }
    uint32_t Post(std::vector<CopyItem> items, const Loc&) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
        const uint32_t task = queues_.Add(std::move(items));
        wake_.notify_all();
        return task;
    }
    uint32_t Finished() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        return queues_.Finished();
    }
    void Begin() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        queues_.Clear();
    }
    void End(bool failed) override {
        std::unique_lock<std::mutex> lock(mutex_);
        if (failed) queues_.Clear();
        idle_.wait(lock, [this] { return !queues_.Pending(); });
    }

private:
    void Run() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!stop_) {
            if (!queues_.Pending()) {
                idle_.notify_all();
                wake_.wait(lock);
                continue;
            }
            for (uint32_t peer = 0; peer < queues_.peers(); ++peer) {
                for (uint32_t i = 0; i < kPiecesAtOnce && queues_.Pending(peer); ++i) queues_.Step(peer);
            }
            lock.unlock();  // cores may post, and ask
            std::this_thread::yield();
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable idle_;
    std::thread thread_;
    CopyQueues queues_;
    bool stop_ = false;
};

}  // namespace

std::unique_ptr<CopyAgent> MakeCopyAgent() { return std::make_unique<ThreadAgent>(); }

}  // namespace twin

#elif defined(TWIN_CHECKED)

namespace twin {

namespace checked {
uint32_t ScalarClock();
void AddAgent(CopyQueues* queues);
}  // namespace checked

namespace {

// The checked engine's agent: the schedule moves the copies, and the end of the launch moves the rest.
class ScheduledAgent final : public CopyAgent {
public:
    uint32_t Post(std::vector<CopyItem> items, const Loc&) override {
        const uint32_t clock = checked::ScalarClock();  // until the end of the run
        for (CopyItem& item : items) item.clock = clock;
        const uint32_t task = queues_.Add(std::move(items));
        checked::AddAgent(&queues_);
        return task;
    }
    uint32_t Finished() override { return queues_.Finished(); }
    void Begin() override { queues_.Clear(); }
    void End(bool) override {}

private:
    CopyQueues queues_;
};

}  // namespace

std::unique_ptr<CopyAgent> MakeCopyAgent() { return std::make_unique<ScheduledAgent>(); }

}  // namespace twin

#endif
