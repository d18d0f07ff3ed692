// Loops in one instance instead of one for each vector width: without optimisation they are all the same.
#pragma once

#define RunBest RunWidest
#include_next "twin/engine/host_cpu.h"
#undef RunBest

namespace twin {
template <class Loop>
void RunBest(Loop loop) {
    CallLoop(loop, VectorBytes<64>());
}
}  // namespace twin
