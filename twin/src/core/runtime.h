// The GM that a launch may touch, found by address; and what a core must have put right when its kernel ends.
#pragma once

#include <exception>
#include <string>
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

// ---- Faults as both engines word them.

// "x.h:120".
std::string PlaceOf(const Loc& loc);
// What Raise throws, on behalf of a core that is not running.
std::exception_ptr FaultOf(const Core& core, Finding kind, const Loc& loc, const std::string& text);
// Some cores ("0,2") have left the kernel while this one waits in SyncAll: an NPU would hang.
std::exception_ptr DivergenceOf(const Core& waiting, const std::string& gone);

}  // namespace twin
