// Fibers: stacks that can be left and entered again (the switch is written by hand, for x86-64 and aarch64);
// and cores as fibers of one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

#include "runtime.h"
#include "twin/engine/core.h"

#if defined(__SANITIZE_ADDRESS__)
#define TWIN_ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define TWIN_TSAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TWIN_ASAN 1
#elif __has_feature(thread_sanitizer)
#define TWIN_TSAN 1
#endif
#endif

namespace twin {

class Fiber {
public:
    using Entry = void (*)(void*);
    Fiber();
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // Prepares the stack so that the first Enter() calls entry(argument). `entry` must end with a last
    // Leave().
    void Prepare(Entry entry, void* argument);
    void Enter();           // from the scheduler: runs until Leave()
    void Leave(bool last);  // from the fiber: back to the scheduler

private:
    static void Start(Fiber* self);
    void ToFiber();
    void ToHome();
    uint8_t* stack_;
    Entry entry_ = nullptr;
    void* argument_ = nullptr;
    void* own_sp_ = nullptr;
    void* home_sp_ = nullptr;
#if defined(TWIN_ASAN)
    // Where AddressSanitizer keeps the frames of the stack that is left.
    void* own_fake_ = nullptr;
    void* home_fake_ = nullptr;
    const void* home_bottom_ = nullptr;
    size_t home_size_ = 0;
#elif defined(TWIN_TSAN)
    // What ThreadSanitizer takes for threads: the stack of this fiber, and the one it was entered from.
    void* own_thread_ = nullptr;
    void* home_thread_ = nullptr;
    bool ended_ = false;
#endif
};

// A core and the fiber that runs its kernel.
struct FiberCore {
    Core core;
    Fiber fiber;
    void* host = nullptr;  // whose fiber it is
    CoreStatus status = CoreStatus::kDone;
    bool started = false;
};

// Enters a fiber, parks it and, after a failure, unwinds it. The engines derive from this class.
// `World` may have BeginKernel(CoreState&) and EndKernel(CoreState&), around a kernel; they may throw.
// `CoreState` is a FiberCore.
template <typename World, typename CoreState>
class FiberHost {
public:
    // From a fiber: the state of its core, and the engine that runs it.
    static CoreState& Here() { return *static_cast<CoreState*>(g_current_core->fiber_state); }
    static World& Running() { return static_cast<World&>(*static_cast<FiberHost*>(Here().host)); }
    // Calls a method for the running core, unless that core is being unwound.
    template <class... P, class... A>
    static void Call(void (World::*method)(CoreState&, P...), A&&... arguments) {
        if (!Running().unwinding_) (Running().*method)(Here(), arguments...);
    }

protected:
    // The core begins the kernel of a launch when it is resumed.
    void StartFiber(CoreState& core, uint32_t index, int rank, uint8_t* ub, LaunchState& launch) {
        core.core = Core();
        core.core.index = index;
        core.core.rank = rank;
        core.core.ub = ub;
        core.core.launch = &launch;
        core.core.sync_cores = launch.spec->block_dim;
        if (launch.spec->watch_polls) core.core.watch = std::make_unique<PollWatch>();
        core.core.abandon = &FiberHost::Abandon;
        core.core.fiber_state = &core;
        core.started = false;
        core.host = this;
        core.status = CoreStatus::kReady;
        core.fiber.Prepare(&FiberHost::Enter, &core);
    }
    void Resume(CoreState& core) {
        g_current_core = &core.core;
        current_ = &core;
        core.started = true;
        core.fiber.Enter();
        current_ = nullptr;
        g_current_core = nullptr;
    }
    // From the core's fiber: back to the scheduler until it is resumed.
    void LeaveFiber(CoreState& core, CoreStatus status, const Loc& loc) {
        core.status = status;
        core.core.blocked_at = loc;
        core.fiber.Leave(false);
        if (unwinding_) throw Unwind();
    }
    // Runs `body`; afterwards no fiber is left: those that have begun end by an exception.
    template <typename Cores, typename Body>
    void RunFibers(Cores& cores, Body&& body) {
        Core* const outer = g_current_core;
        failure_ = nullptr;
        try {
            body();
        } catch (...) {
            Fail(std::current_exception());
        }
        unwinding_ = true;
        for (auto& core : cores) {
            if (core->status == CoreStatus::kDone) continue;
            if (core->started) Resume(*core);
            core->status = CoreStatus::kDone;
        }
        unwinding_ = false;
        g_current_core = outer;
    }
    // How many of `count` cores, the first ones, all wait in a SyncAll of so many; 0: none. Where some have left the
    // kernel instead, or wait in a SyncAll of more cores, an NPU would hang.
    template <typename Cores>
    uint32_t AllAtBarrier(const Cores& cores, uint32_t first, uint32_t count) {
        const Core* waiting = nullptr;  // in the SyncAll of the fewest
        for (uint32_t i = first; i < first + count; ++i) {
            const CoreState& core = *cores[i];
            if (core.status == CoreStatus::kBarrier &&
                (waiting == nullptr || core.core.sync_cores < waiting->sync_cores))
                waiting = &core.core;
        }
        if (waiting == nullptr) return 0;
        std::string gone, others;
        for (uint32_t i = first; i < first + waiting->sync_cores; ++i) {
            const CoreState& core = *cores[i];
            const bool done = core.status == CoreStatus::kDone;
            if (!done && core.status != CoreStatus::kBarrier) return 0;
            if (!done && core.core.sync_cores == waiting->sync_cores) continue;
            std::string& list = done ? gone : others;
            list += (list.empty() ? "" : ",") + std::to_string(core.core.index);
        }
        if (gone.empty() && others.empty()) return waiting->sync_cores;
        Fail(
            FaultOf(*waiting, Finding::kSyncDivergence, waiting->blocked_at,
                    "core " + std::to_string(waiting->index) + " waits in SyncAll call " +
                        std::to_string(waiting->sync_all_calls) + ", but cores " +
                        (gone.empty() ? others + " wait in a SyncAll of more cores" : gone + " have left the kernel")));
        return 0;
    }
    // A hang, with the places of all cores that wait, of those for which counts(core). False: there are none.
    template <typename Cores, typename Counts>
    bool FailHanging(const Cores& cores, const std::string& how, Counts&& counts) {
        std::string where;
        const Core* first = nullptr;
        for (const auto& core : cores) {
            if (core->status == CoreStatus::kDone || !counts(*core)) continue;
            if (first == nullptr) first = &core->core;
            if (where.size() < 280) where += (where.empty() ? "" : "; ") + StandOf(core->core, core->status);
        }
        if (first != nullptr) Fail(FaultOf(*first, Finding::kHang, first->blocked_at, how + ": " + where));
        return first != nullptr;
    }
    // The first failure counts.
    void Fail(std::exception_ptr failure) {
        if (!failure_) failure_ = failure;
    }

    CoreState* current_ = nullptr;  // whose fiber runs
    bool unwinding_ = false;
    std::exception_ptr failure_;

    void BeginKernel(CoreState&) {}
    void EndKernel(CoreState&) {}

private:
    struct Unwind {};

    static void Abandon(Core& core, std::exception_ptr failure) {
        CoreState& state = *static_cast<CoreState*>(core.fiber_state);
        static_cast<FiberHost*>(state.host)->Fail(failure);
        End(state);
    }
    static void End(CoreState& core) {
        core.status = CoreStatus::kDone;
        --core.core.launch->live;
        core.fiber.Leave(true);
    }

    // Everything a core throws ends here: no exception may leave a fiber, none may be in flight at a switch.
    static void Enter(void* argument) {
        CoreState& core = *static_cast<CoreState*>(argument);
        World& world = static_cast<World&>(*static_cast<FiberHost*>(core.host));
        try {
            world.BeginKernel(core);
            (*core.core.launch->kernel)();
            CheckCleanExit(core.core);
            world.EndKernel(core);
        } catch (const Unwind&) {
        } catch (...) {
            world.Fail(std::current_exception());
        }
        End(core);
    }
};

}  // namespace twin
