// The fast engine's scheduler.
#if !defined(TWIN_CHECKED) && !defined(TWIN_TIMED)

#include "scheduler.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "runtime.h"
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

const GmRange& SearchGm(Core& core, uintptr_t address, uint64_t bytes, const Loc& loc) {
    return core.scheduler->ranges().Find(core, address, bytes, loc);
}
void SyncAllCores(const Loc& loc) { g_current_core->scheduler->SyncAll(loc); }
void PollYield(const Loc& loc) { g_current_core->scheduler->Poll(loc); }
void SuspectedPoll(const Loc& loc) { g_current_core->scheduler->Poll(loc); }
void GiveWay(const Loc& loc) { g_current_core->scheduler->GiveWay(loc); }
void CrossCoreSet(int mode, Pipe, int id, const Loc& loc) {
    Scheduler& scheduler = *g_current_core->scheduler;
    scheduler.cross().Set(g_current_core->index, scheduler.spec().block_dim, mode, id, loc);
}
void CrossCoreWait(int id, const Loc& loc) { g_current_core->scheduler->CrossWait(id, loc); }
int64_t SystemCycle() { return NowNanos() / kNanosPerCycle; }
uint32_t BlockNum() { return g_current_core->scheduler->spec().block_dim; }
uint64_t TilingKey() { return g_current_core->scheduler->spec().tiling_key; }
uintptr_t HcclContext(int index) { return g_current_core->scheduler->spec().hccl_context[index]; }

Scheduler::Scheduler(Device& device) : device_(device), forwards_(MayForward()) {
    void* mapped = mmap(nullptr, static_cast<size_t>(kMaxCores) * kUbBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    ub_ = static_cast<uint8_t*>(mapped);
}

Scheduler::~Scheduler() { munmap(ub_, static_cast<size_t>(kMaxCores) * kUbBytes); }

Scheduler::Slot& Scheduler::Current() { return *slots_[g_current_core->index]; }

void Scheduler::Enter(void* argument) {
    Slot* slot = static_cast<Slot*>(argument);
    slot->core.scheduler->RunCore(*slot);
    slot->fiber.Leave(true);
}

// Everything a core throws ends here: no exception may leave a fiber, none may be in flight at a switch.
void Scheduler::RunCore(Slot& slot) {
    try {
        if (slot.core.recorder != nullptr) slot.core.recorder->CoreBegins(slot.core);
        (*kernel_)();
        if (slot.core.recorder != nullptr) slot.core.recorder->CoreEnds(slot.core);
        CheckCleanExit(slot.core);
    } catch (const Unwind&) {
    } catch (...) {
        if (!failure_) failure_ = std::current_exception();
    }
    slot.state = State::kDone;
    --live_;
}

void Scheduler::Resume(Slot& slot) {
    g_current_core = &slot.core;
    slot.started = true;
    slot.fiber.Enter();
    g_current_core = nullptr;
}

void Scheduler::Block(Slot& slot, State state, const Loc& loc) {
    slot.state = state;
    slot.core.blocked_at = loc;
    if (slot.core.forward.Any()) ForwardSettle(slot.core.forward);
    slot.fiber.Leave(false);
    if (unwinding_) throw Unwind();
}

void Scheduler::SyncAll(const Loc& loc) {
    Slot& slot = Current();
    ++slot.core.sync_all_calls;
    Recorder* recorder = slot.core.recorder;
    const double began = recorder != nullptr ? RecordedNow() : 0;
    Block(slot, State::kAtBarrier, loc);
    if (recorder != nullptr) recorder->SyncAll(slot.core, began);
}

void Scheduler::Poll(const Loc& loc) {
    Slot& slot = Current();
    Recorder* recorder = slot.core.recorder;
    if (recorder != nullptr) recorder->PollBegins(slot.core);
    Block(slot, State::kPolling, loc);
    if (recorder != nullptr) recorder->PollEnds(slot.core);
}
void Scheduler::GiveWay(const Loc& loc) { Block(Current(), State::kReady, loc); }

void Scheduler::CrossWait(int id, const Loc& loc) {
    const uint32_t index = g_current_core->index;
    const uint32_t target = cross_.Expect(index, id, loc);
    while (!cross_.Passed(index, spec_->block_dim, id, target)) Block(Current(), State::kCrossWait, loc);
}

// One round over all cores. True when anything but fruitless polling happened.
bool Scheduler::Pass() {
    bool progress = false;
    for (auto& slot : slots_) {
        if (slot->state == State::kDone || slot->state == State::kAtBarrier) continue;
        const bool was_polling = slot->state != State::kReady;
        Resume(*slot);
        if (failure_) return true;
        if (!was_polling || (slot->state != State::kPolling && slot->state != State::kCrossWait))
            progress = true;
    }
    return progress;
}

void Scheduler::ReleaseBarrier() {
    uint32_t waiting = 0;
    for (const auto& slot : slots_) waiting += slot->state == State::kAtBarrier;
    if (waiting == 0 || waiting != live_) return;
    if (live_ != spec_->block_dim) CheckDivergence();
    for (auto& slot : slots_) {
        if (slot->state == State::kAtBarrier) slot->state = State::kReady;
    }
}

// Some cores wait in SyncAll while others have left the kernel: an NPU would hang.
void Scheduler::CheckDivergence() {
    std::string gone;
    const Slot* waiting = nullptr;
    for (const auto& slot : slots_) {
        if (slot->core.index >= spec_->block_dim) continue;
        if (slot->state == State::kDone) gone += (gone.empty() ? "" : ",") + std::to_string(slot->core.index);
        if (slot->state == State::kAtBarrier && waiting == nullptr) waiting = slot.get();
    }
    failure_ = DivergenceOf(waiting->core, gone);
}

// Every live core has polled in vain for the whole deadline.
void Scheduler::FailHanging() {
    std::string where;
    const Slot* first = nullptr;
    for (const auto& slot : slots_) {
        if (slot->core.index >= spec_->block_dim || slot->state == State::kDone) continue;
        if (first == nullptr) first = slot.get();
        const char* what = slot->state == State::kAtBarrier ? "waits in SyncAll" : "polls";
        if (where.size() < 300) {
            where += (where.empty() ? "core " : ", core ") + std::to_string(slot->core.index) + " " + what +
                     " at " + PlaceOf(slot->core.blocked_at);
        }
    }
    char waited[64];
    snprintf(waited, sizeof(waited), "nothing has moved for %.1f s: ", spec_->deadline_s);
    failure_ = FaultOf(first->core, Finding::kHang, first->core.blocked_at, waited + where);
}

// All cores poll in vain: spin, then give the processor away, then sleep until a peer rings.
void Scheduler::Idle(uint32_t fruitless) {
    const IdlePolicy& policy = device_.idle_;
    if (fruitless <= policy.spins) {
        Pause();
        return;
    }
    const int64_t now = NowNanos();
    if (idle_since_ == 0) idle_since_ = now;
    if (spec_->deadline_s > 0 && static_cast<double>(now - idle_since_) > spec_->deadline_s * 1e9) {
        FailHanging();
        return;
    }
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

void Scheduler::UnwindAll() {
    unwinding_ = true;
    for (auto& slot : slots_) {
        if (slot->state == State::kDone) continue;
        if (!slot->started) {  // nothing to unwind
            slot->state = State::kDone;
            --live_;
            continue;
        }
        Resume(*slot);
    }
    unwinding_ = false;
}

void Scheduler::Run(const LaunchSpec& spec, const std::function<void()>& kernel) {
    spec_ = &spec;
    kernel_ = &kernel;
    failure_ = nullptr;
    ranges_.Assign(spec.ranges);
    std::unique_ptr<Recorder> recorder;
    if (spec.timeline != nullptr)
        recorder = std::make_unique<Recorder>(*spec.timeline, spec.name, device_.rank(), spec.block_dim);
    const bool forward = forwards_ && ForwardsIn(spec);
    while (slots_.size() < spec.block_dim) slots_.push_back(std::make_unique<Slot>());
    live_ = spec.block_dim;
    for (uint32_t i = 0; i < slots_.size(); ++i) {
        Slot& slot = *slots_[i];
        slot.state = State::kDone;
        if (i >= spec.block_dim) {
            slot.core.index = kMaxCores;
            continue;
        }
        slot.core = Core();
        slot.core.index = i;
        slot.core.rank = device_.rank();
        slot.core.ub = ub_ + static_cast<size_t>(i) * kUbBytes;
        slot.core.scheduler = this;
        slot.core.recorder = recorder.get();
        slot.core.forward.enabled = forward;
        if (spec.watch_polls) slot.core.watch = std::make_unique<PollWatch>();
        slot.started = false;
        slot.fiber.Prepare(&Scheduler::Enter, &slot);
        slot.state = State::kReady;
    }
    cross_ = CrossFlags();
    uint32_t fruitless = 0;
    idle_since_ = last_idle_call_ = 0;
    while (live_ > 0 && !failure_) {
        if (device_.idle_.doorbell != nullptr)
            doorbell_seen_ = __atomic_load_n(device_.idle_.doorbell, __ATOMIC_SEQ_CST);
        const bool progress = Pass();
        if (failure_) break;
        ReleaseBarrier();
        if (progress) {
            fruitless = 0;
            idle_since_ = 0;
        } else {
            Idle(++fruitless);
        }
    }
    if (failure_) UnwindAll();
    StreamFence();
    device_.traffic_ = Traffic();
    for (uint32_t i = 0; i < spec.block_dim; ++i) {
        device_.traffic_.ub_peak = std::max(device_.traffic_.ub_peak, slots_[i]->core.traffic.ub_peak);
        for (int kind = 0; kind < static_cast<int>(GmKind::kKinds); ++kind) {
            device_.traffic_.read[kind] += slots_[i]->core.traffic.read[kind];
            device_.traffic_.written[kind] += slots_[i]->core.traffic.written[kind];
        }
    }
    spec_ = nullptr;
    kernel_ = nullptr;
    if (failure_) std::rethrow_exception(failure_);
}

void Device::JoinGroup(const void*, uint32_t) {}

Device::Device(int rank) : rank_(rank), scheduler_(std::make_unique<Scheduler>(*this)) {}
Device::~Device() = default;

void Device::Launch(const LaunchSpec& spec, const std::function<void()>& kernel) {
    scheduler_->Run(spec, kernel);
}

}  // namespace twin

#endif  // the fast engine
