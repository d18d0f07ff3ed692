// The file that the driver writes and the runner maps at kBase: all GM of all ranks, and what they run. 64-bit words.
#pragma once
#include <cstdint>

namespace real {

constexpr uint64_t kBase = 0x200000000000;
constexpr uint64_t kFlags = 16;
constexpr uint64_t kArguments = 24;  // room for those of any kernel
enum Kind : uint64_t { kInput, kOutput, kWindow };

struct Range {
    uint64_t begin, end, kind;
    char name[24];
};
struct Step {
    uint64_t rank, op, tiling_key, cores, context, ranges, range_count;
    uint64_t lent;  // the generation of the lent block in which a combine's rows lie; 0: they lie in no lent block
    uint64_t arguments[kArguments];
    uint64_t arrived[kFlags];  // the runner's: cores that set a flag, since the step began
};
struct Job {
    uint64_t bytes, world, steps, step_count, poison, seconds;
    uint64_t failed, lock;  // the runner's
};

}  // namespace real
