// Faults as both engines word them.
#pragma once

#include <exception>
#include <string>

#include "twin/engine/core.h"

namespace twin {

// "x.h:120".
std::string PlaceOf(const Loc& loc);
// What Raise throws, on behalf of a core that is not running.
std::exception_ptr FaultOf(const Core& core, Finding kind, const Loc& loc, const std::string& text);
// Some cores ("0,2") have left the kernel while this one waits in SyncAll: an NPU would hang.
std::exception_ptr DivergenceOf(const Core& waiting, const std::string& gone);

}  // namespace twin
