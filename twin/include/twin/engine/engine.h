// Every instruction of the API passes through Issue: its pipe, what it reads and writes, what it costs, and
// its effect. API headers build Instructions and know no engine; the engine decides when the effect happens.
// This file selects the engine at compile time.
#pragma once

#include <cstdint>

#include "twin/engine/core.h"

namespace twin {

// `count` pieces of `bytes` each, `stride` bytes apart.
struct Access {
    uintptr_t begin = 0;
    uint64_t bytes = 0;
    uint32_t count = 1;
    uint64_t stride = 0;
    bool gm = false;
};

// What an instruction moves or computes, in the units a cost table needs.
struct Cost {
    uint64_t bytes = 0;     // MTE pipes: bytes moved
    uint64_t elements = 0;  // V: elements; S: 1
};

struct Instruction {
    const char* name;
    Pipe pipe;
    Loc loc;
    Cost cost;
    Access write;
    Access reads[3];
    Access clobber = {};     // UB whose bytes are undefined afterwards
    bool atomic = false;     // read-modify-write of GM
    bool continues = false;  // a further part of the same call: no hazard with the parts before
};

}  // namespace twin

#if defined(TWIN_CHECKED)
#include "twin/engine/checked.h"
#elif defined(TWIN_TIMED)
#include "twin/engine/timed.h"
#else
#include "twin/engine/fast.h"
#endif

#ifndef TWIN_FORWARDS  // this engine defers no copies
namespace twin {

template <class Effect>
inline void IssueExact(const Instruction& instruction, Effect&& effect) {
    Issue(instruction, static_cast<Effect&&>(effect));
}
template <class Effect>
inline void IssueSourced(const Instruction& instruction, Effect&& effect) {
    Issue(instruction, static_cast<Effect&&>(effect));
}
inline void UbFreed(uint32_t, uint32_t) {}
inline void UbExposed() {}

}  // namespace twin
#endif
