// Launches of ranks that are threads: they synchronize, and the last to come runs them all.
#ifdef TWIN_CHECKED

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>

#include "world.h"

namespace twin {

class Scheduler {};

namespace {
constexpr std::chrono::milliseconds kLook{20};
}

class Group {
public:
    explicit Group(uint32_t world) : entries_(world) {}

    void Launch(Device& device, uint32_t slot, const LaunchSpec& spec, const std::function<void()>& kernel) {
        std::unique_lock<std::mutex> lock(mutex_);
        Entry mine{&device, &spec, &kernel, nullptr, false};
        entries_[slot] = &mine;
        ++waiting_;
        if (waiting_ == entries_.size()) {
            RunAll();
        } else {
            // When some ranks do not come, the others run without them, and the finding names the missing
            // ranks.
            const double seconds = spec.deadline_s > 0 ? spec.deadline_s : 60.0;
            const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
            const IdlePolicy& idle = device.idle();
            while (!met_.wait_for(lock, kLook, [&] { return mine.done; })) {
                const bool gone = idle.peer_gone != nullptr && idle.peer_gone(idle.on_idle_argument);
                if (gone || std::chrono::steady_clock::now() > end) RunAll();
            }
        }
        if (mine.failure) std::rethrow_exception(mine.failure);
    }

private:
    struct Entry {
        Device* device;
        const LaunchSpec* spec;
        const std::function<void()>* kernel;
        std::exception_ptr failure;
        bool done;
    };

    void RunAll() {
        std::vector<RankProgram> programs;
        std::vector<ProgramStep> steps(entries_.size());
        std::vector<Entry*> ran;
        for (size_t i = 0; i < entries_.size(); ++i) {
            Entry* entry = entries_[i];
            if (entry == nullptr) continue;
            steps[i].spec = *entry->spec;
            steps[i].kernel = *entry->kernel;
            RankProgram program;
            program.rank = entry->device->rank();
            program.idle = &entry->device->idle();
            program.steps = {&steps[i]};
            programs.push_back(program);
            ran.push_back(entry);
        }
        RunOptions options;
        options.hang_is_finding = false;
        options.explicit_sync = true;
        for (const Entry* entry : ran) options.explicit_sync = options.explicit_sync && !entry->spec->watch_polls;
        if (const char* seed = getenv("ASCEND_MOE_SEED")) {
            options.seed = strtoull(seed, nullptr, 10) + ++runs_;
            options.policy = Policy::kRandom;
        }
        const RunResult result = explorer_.Run(programs, options);
        for (size_t i = 0; i < ran.size(); ++i) {
            ran[i]->device->traffic_ = programs[i].traffic;
            if (result.failed) ran[i]->failure = std::make_exception_ptr(Fault(result.kind, result.message));
            ran[i]->done = true;
        }
        for (Entry*& entry : entries_) entry = nullptr;
        waiting_ = 0;
        met_.notify_all();
    }

    std::mutex mutex_;
    std::condition_variable met_;
    std::vector<Entry*> entries_;
    size_t waiting_ = 0;
    uint64_t runs_ = 0;
    Explorer explorer_;
};

namespace {
// Ranks belong to one group because they share windows; nothing else connects them.
std::mutex g_groups_mutex;
std::map<const void*, std::weak_ptr<Group>> g_groups;
}  // namespace

Device::Device(int rank) : rank_(rank), group_(std::make_shared<Group>(1)) {}
Device::~Device() = default;

void Device::JoinGroup(const void* key, uint32_t world) {
    const std::lock_guard<std::mutex> lock(g_groups_mutex);
    for (auto entry = g_groups.begin(); entry != g_groups.end();)
        entry = entry->second.expired() ? g_groups.erase(entry) : std::next(entry);
    group_ = g_groups[key].lock();
    if (group_ == nullptr) g_groups[key] = group_ = std::make_shared<Group>(world);
    slot_ = static_cast<uint32_t>(rank_);
}

void Device::Launch(const LaunchSpec& spec, const std::function<void()>& kernel) {
    group_->Launch(*this, slot_, spec, kernel);
}

Explorer::Explorer() : world_(std::make_unique<World>()) {}
Explorer::~Explorer() = default;
RunResult Explorer::Run(std::vector<RankProgram>& programs, const RunOptions& options) {
    return world_->Run(programs, options);
}
void Explorer::ForEachWrittenPage(const std::function<void(uintptr_t, uint64_t)>& visit) const {
    world_->ForEachPage([&](const Page& page) {
        if (page.written) visit(page.begin, kPageBytes);
    });
}

}  // namespace twin

#endif  // TWIN_CHECKED
