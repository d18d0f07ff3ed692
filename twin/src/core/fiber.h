// Fibers: stacks that can be left and entered again (the switch is written by hand, for x86-64 and aarch64);
// and cores as fibers of one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>

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

// Enters a fiber, parks it and, after a failure, unwinds it. The engines derive from this class.
// `World` has EndKernel(CoreState&), what an engine does when a kernel has returned; it may throw.
// `CoreState` has core, fiber, host, started, rank (with step and live) and status.
template <typename World, typename CoreState>
class FiberHost {
protected:
    void StartFiber(CoreState& core) {
        core.started = false;
        core.host = this;
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
    template <typename Status>
    void LeaveFiber(CoreState& core, Status status, const Loc& loc) {
        core.status = status;
        core.core.blocked_at = loc;
        core.fiber.Leave(false);
        if (unwinding_) throw Unwind();
    }
    // Ends the fibers of the first `count` cores, those that have begun by an exception.
    template <typename Cores>
    void UnwindFibers(Cores& cores, size_t count) {
        unwinding_ = true;
        for (size_t i = 0; i < count; ++i) {
            CoreState& core = *cores[i];
            if (core.status == Done(core)) continue;
            if (core.started) Resume(core);
            core.status = Done(core);
        }
        unwinding_ = false;
    }
    // The first failure counts.
    void Fail(std::exception_ptr failure) {
        if (!failure_) failure_ = failure;
    }

    CoreState* current_ = nullptr;  // whose fiber runs
    bool unwinding_ = false;
    std::exception_ptr failure_;

private:
    struct Unwind {};

    static auto Done(const CoreState& core) { return decltype(core.status)::kDone; }

    // Everything a core throws ends here: no exception may leave a fiber, none may be in flight at a switch.
    static void Enter(void* argument) {
        CoreState& core = *static_cast<CoreState*>(argument);
        World& world = static_cast<World&>(*static_cast<FiberHost*>(core.host));
        try {
            core.rank->step->kernel();
            CheckCleanExit(core.core);
            world.EndKernel(core);
        } catch (const Unwind&) {
        } catch (...) {
            world.Fail(std::current_exception());
        }
        core.status = Done(core);
        --core.rank->live;
        core.fiber.Leave(true);
    }
};

}  // namespace twin
