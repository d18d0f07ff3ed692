// Reduction of one stretch of elements over the ranks.
#pragma once

#include <cstdint>

#include "abi.h"

namespace vnpu {

// True when `op` over `type` is defined: the integers, fp16, bf16, fp32 and fp64.
bool Reducible(DataType type);

// out[i] = sources[0][i] op sources[1][i] op ..., in this order, so that every rank gets the same bits. fp16
// and bf16 are reduced in fp32 and rounded once, to nearest even. Integers wrap. A NaN stays a NaN in max and
// min.
void Reduce(DataType type, ReduceOp op, void* out, const void* const* sources, int ranks, uint64_t count);

}  // namespace vnpu
