// Runs the cores of one device: every core is a fiber, all on the calling thread.
#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "cross_flags.h"
#include "fiber.h"
#include "runtime.h"
#include "twin/engine/launch.h"

namespace twin {

class Scheduler {
public:
    explicit Scheduler(Device& device);
    ~Scheduler();
    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;

    void Run(const LaunchSpec& spec, const std::function<void()>& kernel);

    // Called from fibers.
    void SyncAll(const Loc& loc);
    void Poll(const Loc& loc);
    void GiveWay(const Loc& loc);
    void CrossWait(int id, const Loc& loc);
    CrossFlags& cross() { return cross_; }
    const GmMap& ranges() const { return ranges_; }
    const LaunchSpec& spec() const { return *spec_; }
    int rank() const { return device_.rank(); }

private:
    enum class State : uint8_t { kReady, kAtBarrier, kPolling, kCrossWait, kDone };
    struct Slot {
        Core core;
        Fiber fiber;
        State state = State::kDone;
        bool started = false;
    };
    struct Unwind {};

    static void Enter(void* slot);
    void RunCore(Slot& slot);
    void Resume(Slot& slot);
    bool Pass();
    void ReleaseBarrier();
    void CheckDivergence();
    void Idle(uint32_t fruitless);
    void FailHanging();
    void UnwindAll();
    void Block(Slot& slot, State state, const Loc& loc);
    Slot& Current();

    Device& device_;
    uint8_t* ub_ = nullptr;
    std::vector<std::unique_ptr<Slot>> slots_;
    GmMap ranges_;
    CrossFlags cross_;
    const LaunchSpec* spec_ = nullptr;
    const std::function<void()>* kernel_ = nullptr;
    std::exception_ptr failure_;
    bool unwinding_ = false;
    const bool forwards_;  // copies may be deferred: not with ASCEND_MOE_FORWARD=0
    uint32_t live_ = 0;
    uint32_t doorbell_seen_ = 0;
    int64_t idle_since_ = 0;
    int64_t last_idle_call_ = 0;
};

}  // namespace twin
