// Timelines of this process's launches, while somebody has asked for them.
#pragma once

#include "twin/engine/launch.h"
#include "twin/engine/timeline.h"

namespace ops {

// Around a launch: gives it a timeline when one is wanted, and keeps the events when it is over.
class TracedLaunch {
public:
    explicit TracedLaunch(twin::LaunchSpec& spec);
    ~TracedLaunch();
    TracedLaunch(const TracedLaunch&) = delete;
    TracedLaunch& operator=(const TracedLaunch&) = delete;

private:
    twin::LaunchSpec& spec_;
    twin::Timeline timeline_;
    uint64_t session_ = 0;
};

}  // namespace ops
