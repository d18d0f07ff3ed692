// The fast engine's scheduler.
#if !defined(TWIN_CHECKED) && !defined(TWIN_TIMED)

#include "scheduler.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "twin/engine/atomic_store.h"
#include "twin/engine/host_cpu.h"

namespace twin {

namespace {

constexpr int64_t kNanosPerCycle = 20;            // 50 cycles a microsecond
constexpr int64_t kYieldNanos = 200 * 1000;       // sched_yield this long before sleeping
constexpr int64_t kSleepNanos = 2 * 1000 * 1000;  // longest sleep between two looks
constexpr int64_t kIdleCallNanos = 20 * 1000 * 1000;

int64_t NowNanos() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

bool MayForward() {
    const char* setting = std::getenv("ASCEND_MOE_FORWARD");
    return setting == nullptr || strcmp(setting, "0") != 0;
}

// Nothing is deferred in kernels that do not declare their polls, where a copy agent moves bytes beside the
// cores, and where a timeline records how long each copy took.
bool ForwardsIn(const LaunchSpec& spec) {
    if (spec.watch_polls || spec.timeline != nullptr) return false;
    for (const GmRange& range : spec.ranges) {
        if (range.kind == GmKind::kWindowData && range.doorbell != nullptr) return false;
    }
    return true;
}

// Sleeps until the doorbell moves on from `seen`, or for kSleepNanos.
void SleepOn(uint32_t* doorbell, uint32_t seen) {
    const timespec limit{0, kSleepNanos};
    if (doorbell == nullptr) {
        nanosleep(&limit, nullptr);
        return;
    }
    uint32_t* sleepers = doorbell - 1;
    __atomic_fetch_add(sleepers, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, doorbell, FUTEX_WAIT, seen, &limit, nullptr, 0);
    __atomic_fetch_sub(sleepers, 1, __ATOMIC_SEQ_CST);
}

}  // namespace

void SyncAllCores(const Loc& loc) { g_current_core->scheduler->SyncAll(loc); }
void PollYield(const Loc& loc) { g_current_core->scheduler->Poll(loc); }
void SuspectedPoll(const Loc& loc) { g_current_core->scheduler->Poll(loc); }
void Yield(const Loc& loc, bool idle) { g_current_core->scheduler->Yield(loc, idle); }
void CrossCoreSet(int mode, Pipe, int id, const Loc& loc) {
    g_current_core->launch->cross.Set(g_current_core->index, BlockNum(), mode, id, loc);
}
void CrossCoreWait(int id, const Loc& loc) { g_current_core->scheduler->CrossWait(id, loc); }
int64_t SystemCycle() { return NowNanos() / kNanosPerCycle; }

Scheduler::Scheduler(Device& device) : device_(device), ub_(MapUb(kMaxCores)), forwards_(MayForward()) {}
Scheduler::~Scheduler() { UnmapUb(ub_, kMaxCores); }

void Scheduler::BeginKernel(FastCore& slot) {
    if (slot.core.recorder != nullptr) slot.core.recorder->CoreBegins(slot.core);
}
void Scheduler::EndKernel(FastCore& slot) {
    if (slot.core.recorder != nullptr) slot.core.recorder->CoreEnds(slot.core);
}

void Scheduler::Block(CoreStatus status, const Loc& loc) {
    if (current_->core.forward.Any()) ForwardComplete(current_->core.forward);
    LeaveFiber(*current_, status, loc);
}

void Scheduler::SyncAll(const Loc& loc) {
    Core& core = current_->core;
    ++core.sync_all_calls;
    const double began = core.recorder != nullptr ? RecordedNow() : 0;
    Block(CoreStatus::kBarrier, loc);
    if (core.recorder != nullptr) core.recorder->SyncAll(core, began);
}

void Scheduler::Poll(const Loc& loc) {
    Core& core = current_->core;
    if (core.recorder != nullptr) core.recorder->PollBegins(core);
    Block(CoreStatus::kPolling, loc);
    if (core.recorder != nullptr) core.recorder->PollEnds(core);
}
void Scheduler::Yield(const Loc& loc, bool idle) {
    FastCore& slot = *current_;
    slot.repeats = idle;
    Block(CoreStatus::kReady, loc);
    slot.repeats = false;
}

void Scheduler::CrossWait(int id, const Loc& loc) {
    const uint32_t index = g_current_core->index;
    const uint32_t target = launch_.cross.Expect(index, id, loc);
    while (!launch_.cross.Passed(index, launch_.spec->block_dim, id, target)) Block(CoreStatus::kCross, loc);
}

// One round over all cores, and what happened besides fruitless polling.
Scheduler::Passed Scheduler::Pass() {
    Passed passed = Passed::kNothing;
    for (auto& slot : slots_) {
        if (slot->status == CoreStatus::kDone || slot->status == CoreStatus::kBarrier) continue;
        const bool was_polling = slot->status != CoreStatus::kReady;
        Resume(*slot);
        if (failure_) return Passed::kProgress;
        if (slot->repeats) {
            passed = std::max(passed, Passed::kRepeats);
        } else if (!was_polling || (slot->status != CoreStatus::kPolling && slot->status != CoreStatus::kCross)) {
            passed = Passed::kProgress;
        }
    }
    return passed;
}

// Whether nothing has moved for too long: then the launch fails.
bool Scheduler::Overdue(int64_t now) {
    if (idle_since_ == 0) idle_since_ = now;
    const double deadline_s = launch_.spec->deadline_s;
    if (deadline_s <= 0 || static_cast<double>(now - idle_since_) <= deadline_s * 1e9) return false;
    char how[64];
    snprintf(how, sizeof(how), "nothing has moved for %.1f s", deadline_s);
    FailHanging(slots_, how, [](const FastCore&) { return true; });
    return true;
}

// All cores poll in vain: spin, then give the processor away, then sleep until a peer rings.
void Scheduler::Idle(uint32_t fruitless) {
    const IdlePolicy& policy = device_.idle_;
    if (fruitless <= policy.spins) {
        Pause();
        return;
    }
    const int64_t now = NowNanos();
    if (Overdue(now)) return;
    if (now - idle_since_ < kYieldNanos) {
        sched_yield();
        return;
    }
    if (policy.on_idle != nullptr && now - last_idle_call_ >= kIdleCallNanos) {
        last_idle_call_ = now;
        policy.on_idle(policy.on_idle_argument);
    }
    SleepOn(policy.doorbell, doorbell_seen_);
}

void Scheduler::Run(const LaunchSpec& spec, const std::function<void()>& kernel) {
    launch_.Begin(spec, kernel);
    std::unique_ptr<Recorder> recorder;
    if (spec.timeline != nullptr)
        recorder = std::make_unique<Recorder>(*spec.timeline, spec.name, device_.rank(), spec.block_dim);
    const bool forward = forwards_ && ForwardsIn(spec);
    while (slots_.size() < spec.block_dim) slots_.push_back(std::make_unique<FastCore>());
    for (uint32_t i = 0; i < spec.block_dim; ++i) {
        FastCore& slot = *slots_[i];
        StartFiber(slot, i, device_.rank(), ub_ + static_cast<size_t>(i) * kUbBytes, launch_);
        slot.core.scheduler = this;
        slot.core.recorder = recorder.get();
        slot.core.forward.enabled = forward;
        slot.core.stores = &stores_;
        slot.repeats = false;
    }
    RunFibers(slots_, [&] { Loop(); });
    StreamFence();
    stores_.LaunchEnds();
    device_.traffic_ = Traffic();
    for (uint32_t i = 0; i < spec.block_dim; ++i) device_.traffic_.Add(slots_[i]->core.traffic);
    if (failure_) std::rethrow_exception(failure_);
}

void Scheduler::Loop() {
    uint32_t fruitless = 0;
    idle_since_ = last_idle_call_ = 0;
    while (launch_.live > 0 && !failure_) {
        if (device_.idle_.doorbell != nullptr)
            doorbell_seen_ = __atomic_load_n(device_.idle_.doorbell, __ATOMIC_SEQ_CST);
        const Passed passed = Pass();
        if (failure_) return;
        const uint32_t met = AllAtBarrier(slots_, 0, launch_.spec->block_dim);
        for (uint32_t i = 0; i < met; ++i) slots_[i]->status = CoreStatus::kReady;
        if (passed == Passed::kProgress) {
            fruitless = 0;
            idle_since_ = 0;
        } else if (passed == Passed::kRepeats) {
            Overdue(NowNanos());
        } else {
            Idle(++fruitless);
        }
    }
}

void Device::JoinGroup(const void*, uint32_t) {}

Device::Device(int rank) : rank_(rank), scheduler_(std::make_unique<Scheduler>(*this)) {}
Device::~Device() = default;

void Device::Launch(const LaunchSpec& spec, const std::function<void()>& kernel) { scheduler_->Run(spec, kernel); }

}  // namespace twin

#endif  // the fast engine
