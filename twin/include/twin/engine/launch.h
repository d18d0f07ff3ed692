// The host side of the twin: a Device is one rank's NPU. It launches kernels and returns when all cores have
// ended.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "twin/engine/core.h"

namespace twin {

class Scheduler;
class Group;
struct Timeline;

// What a launch needs besides the kernel. All addresses a kernel may touch are listed in `ranges`.
struct LaunchSpec {
    uint32_t block_dim = 1;
    uint64_t tiling_key = 0;
    uintptr_t hccl_context[2] = {0, 0};
    std::vector<GmRange> ranges;
    bool watch_polls = false;                   // the kernel does not declare its polls: notice repeated reads
    const char* name = "";                      // of the op, for timelines
    Timeline* timeline = nullptr;               // fast engine: where to record events, or null
    std::set<std::string>* warnings = nullptr;  // where broken rules (fault.h) are listed, or null: they are findings
    bool lists_all = false;                     // those that documents forbid, too
    double deadline_s = 0;  // all cores polling in vain this long is a hang; 0: the kernel has its own
    // Checked engine: a reason why this rank must not touch these window bytes now, or null.
    std::function<const char*(uintptr_t begin, uint64_t bytes, bool write)> window_rule;
};

// How a rank waits when all its cores poll in vain.
struct IdlePolicy {
    uint32_t spins = 2000;             // passes before the first sched_yield
    uint32_t* doorbell = nullptr;      // peers ring it; null: sleep by the clock
    void (*on_idle)(void*) = nullptr;  // called about every 20 ms of waiting: look whether peers live
    void* on_idle_argument = nullptr;
    bool (*peer_gone)(void*) = nullptr;  // whether some rank will never come, of the same argument
};

class Device {
public:
    explicit Device(int rank);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    // Runs `kernel` once on every core, on the calling thread. Rethrows the first core's exception after all
    // other cores have unwound. One launch at a time.
    // Checked engine: the launches of all ranks of a group meet, and one of the calling threads runs them.
    void Launch(const LaunchSpec& spec, const std::function<void()>& kernel);

    // Checked engine: the ranks that share windows name the same key, and are threads of one process. The
    // fast engine needs no group.
    void JoinGroup(const void* key, uint32_t world);

    IdlePolicy& idle() { return idle_; }
    // Bytes moved by the last launch, all cores.
    const Traffic& traffic() const { return traffic_; }
    int rank() const { return rank_; }

private:
    friend class Scheduler;
    friend class Group;
    int rank_;
    uint32_t slot_ = 0;  // in its group
    IdlePolicy idle_;
    Traffic traffic_ = {};
    std::unique_ptr<Scheduler> scheduler_;
    std::shared_ptr<Group> group_;
};

}  // namespace twin
