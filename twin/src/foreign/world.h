// The ranks of one Python-side launcher, between launches and in them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "foreign.h"
#include "twin/engine/copy_agent.h"
#include "twin/engine/launch.h"
#ifdef TWIN_CHECKED
#include "twin/engine/explore.h"
#endif

namespace twin::foreign {

constexpr uint32_t kGroups = 2;

// Pointers and integers of up to 8 bytes are passed alike on x86-64 and aarch64, whatever their type.
void CallEntry(const TwinLaunch& launch);
LaunchSpec SpecOf(const TwinLaunch& launch);

struct Rank {
    explicit Rank(int number) : device(number) {}
    Device device;
    std::unique_ptr<CopyAgent> agents[kGroups];

    void BeginAgents(const TwinLaunch& launch);
    void EndAgents(const TwinLaunch& launch, bool failed);
};

class World {
public:
    explicit World(uint32_t world);
    uint32_t size() const { return static_cast<uint32_t>(ranks_.size()); }
    bool Run(const TwinLaunch* launches, const TwinOptions& options, TwinOutcome* outcome);
    bool RunRank(uint32_t rank, const TwinLaunch& launch, TwinOutcome* outcome,
                 const std::atomic<bool>* stop = nullptr);

private:
    std::vector<std::unique_ptr<Rank>> ranks_;
#ifdef TWIN_CHECKED
    Explorer explorer_;
#endif
};

}  // namespace twin::foreign
