// The GM that a launch may touch, found by address; and what a core must have put right when its kernel ends.
#pragma once

#include <vector>

#include "twin/engine/core.h"

namespace twin {

class GmMap {
public:
    void Assign(const std::vector<GmRange>& ranges);
    // The range that holds [address, address + bytes), or a kOutOfBounds fault.
    const GmRange& Find(Core& core, uintptr_t address, uint64_t bytes, const Loc& loc) const;

private:
    std::vector<GmRange> ranges_;  // sorted by address
};

void CheckCleanExit(const Core& core);

}  // namespace twin
