// What the engines share: the GM that a launch may touch, by address; flags between its cores; the state that
// a core must be in when its kernel ends; faults.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "twin/engine/launch.h"

namespace twin {

class GmMap {
public:
    void Assign(const std::vector<GmRange>& ranges);
    // The range that holds [address, address + bytes), or a kOutOfBounds fault.
    const GmRange& Find(uintptr_t address, uint64_t bytes, const Loc& loc) const;
    // The name of the range that holds the address, else of the nearest one.
    const char* NameAt(uintptr_t address) const;

private:
    std::vector<GmRange>::const_iterator After(uintptr_t address) const;  // the first range that begins behind it
    std::vector<GmRange> ranges_;  // sorted by address; tensors that overlap are one
};

// CrossCoreSetFlag and CrossCoreWaitFlag of one launch: a counter a core and flag id.
class CrossFlags {
public:
    static constexpr int kIds = 16;

    // Returns how many times the core has set `id`.
    uint32_t Set(uint32_t core, uint32_t cores, int mode, int id, const Loc& loc) {
        Check(id, loc);
        TWIN_RAISE_IF(mode != 0 && mode != 1, kBadArgument, loc,
                      "CrossCoreSetFlag mode %d: a vector core has modes 0 (all cores) and 1 (its sub-blocks); "
                      "mode 2 needs a cube core",
                      mode);
        TWIN_RAISE_IF(mode == 1 && cores % 2 != 0, kBadArgument, loc,
                      "CrossCoreSetFlag mode 1 with an odd number of cores, %u", cores);
        Table().mode[id] = mode;
        return ++Table().sets[id][core];
    }
    // The first of the cores that a set of `id` is for: all from there on, or two.
    uint32_t First(uint32_t core, int id) const { return counters_->mode[id] == 1 ? core / 2 * 2 : 0; }
    // The number of sets that this core's next wait on `id` needs.
    uint32_t Expect(uint32_t core, int id, const Loc& loc) {
        Check(id, loc);
        return ++Table().waits[id][core];
    }
    bool Passed(uint32_t core, uint32_t cores, int id, uint32_t target) const {
        if (counters_ == nullptr) return target == 0;
        const bool pairs = counters_->mode[id] == 1;
        const uint32_t first = First(core, id);
        const uint32_t end = pairs ? first + 2 : cores;
        for (uint32_t i = first; i < end; ++i) {
            if (counters_->sets[id][i] < target) return false;
        }
        return true;
    }

private:
    static void Check(int id, const Loc& loc) {
        TWIN_RAISE_IF(id < 0 || id >= kIds, kEventMisuse, loc, "cross-core flag %d is outside 0..%d", id, kIds - 1);
    }
    struct Counters {
        int mode[kIds] = {};
        uint32_t sets[kIds][kMaxCores] = {};
        uint32_t waits[kIds][kMaxCores] = {};
    };
    Counters& Table() {
        if (counters_ == nullptr) counters_ = std::make_unique<Counters>();
        return *counters_;
    }
    std::unique_ptr<Counters> counters_;  // most launches have no such flag
};

// A launch, as its cores see it.
struct LaunchState {
    const LaunchSpec* spec = nullptr;
    const std::function<void()>* kernel = nullptr;
    GmMap ranges;
    CrossFlags cross;
    uint32_t live = 0;  // cores that have not left the kernel

    void Begin(const LaunchSpec& launched, const std::function<void()>& run) {
        spec = &launched;
        kernel = &run;
        ranges.Assign(launched.ranges);
        cross = CrossFlags();
        live = launched.block_dim;
    }
};

// What a core waits for.
enum class CoreStatus : uint8_t { kDone, kReady, kFlag, kDrain, kBarrier, kPolling, kCross };

void CheckCleanExit(const Core& core);

// UB of some cores: zeroed memory, of which only touched pages are allocated.
uint8_t* MapUb(size_t cores);
void UnmapUb(uint8_t* ub, size_t cores);

// ---- faults, in the words of all engines ----

// "x.h:120".
std::string PlaceOf(const Loc& loc);
// The exception that Raise would throw for a core that is not running.
std::exception_ptr FaultOf(const Core& core, Finding kind, const Loc& loc, const std::string& text);
// What an exception says; a fault also sets *kind.
std::string TextOf(std::exception_ptr failure, Finding* kind);
// "rank 0 core 1 polls at x.h:120".
std::string StandOf(const Core& core, CoreStatus status);

}  // namespace twin
