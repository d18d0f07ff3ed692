// The GM that a launch may touch, by address; the state that a core must be in when its kernel ends; faults.
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

// ---- faults, in the words of all engines ----

// "x.h:120".
std::string PlaceOf(const Loc& loc);
// The exception that Raise would throw for a core that is not running.
std::exception_ptr FaultOf(const Core& core, Finding kind, const Loc& loc, const std::string& text);
// Some cores ("0,2") have left the kernel while this one waits in SyncAll: an NPU would hang.
std::exception_ptr DivergenceOf(const Core& waiting, const std::string& gone);

}  // namespace twin
