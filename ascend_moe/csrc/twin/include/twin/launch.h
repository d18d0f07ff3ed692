// The host side of the twin: a Device is one rank's NPU. It runs a kernel on some cores to the end.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "twin/core.h"

namespace twin {

class Scheduler;

// What a launch needs besides the kernel. All addresses a kernel may touch are listed in `ranges`.
struct LaunchSpec {
    uint32_t block_dim = 1;
    uint64_t tiling_key = 0;
    uintptr_t hccl_context[2] = {0, 0};
    std::vector<GmRange> ranges;
};

// How a rank waits when all its cores poll in vain.
struct IdlePolicy {
    uint32_t spins = 2000;             // passes before the first sched_yield
    uint32_t* doorbell = nullptr;      // peers ring it; null: sleep by the clock
    void (*on_idle)(void*) = nullptr;  // called about every 20 ms of waiting: look whether peers live
    void* on_idle_argument = nullptr;
};

class Device {
public:
    explicit Device(int rank);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    // Runs `kernel` once on every core, on the calling thread. Rethrows the first core's exception after all
    // other cores have unwound. One launch at a time.
    void Launch(const LaunchSpec& spec, const std::function<void()>& kernel);

    IdlePolicy& idle() { return idle_; }
    // Bytes moved by the last launch, all cores.
    const Traffic& traffic() const { return traffic_; }
    int rank() const { return rank_; }

private:
    friend class Scheduler;
    int rank_;
    IdlePolicy idle_;
    Traffic traffic_ = {};
    std::unique_ptr<Scheduler> scheduler_;
};

}  // namespace twin
