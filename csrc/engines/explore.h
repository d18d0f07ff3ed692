// Explore mode across the C ABI: a world of ranks in this process, programs of ops, many schedules.
#pragma once

#include <cstdint>

extern "C" {

// One op of one rank. Ops of a rank run in the order in which they are listed.
struct am_explore_step {
    int32_t rank;
    int32_t compare;  // whether the outputs are compared when the op succeeds
    void* plan;
    const void* const* inputs;
    void* const* outputs;
    const void* const* expected;     // by output; null: not compared
    const uint64_t* expected_bytes;  // of each output, from its start
    const uint64_t* output_bytes;
    uint32_t outputs_count;
    uint32_t accepted;  // error codes that are no finding, one bit each; bit 0: success
    uint32_t lent;      // kLent...: where a combine's expand_x lies
    uint32_t reserved;
};

struct am_explore_options {
    uint64_t seed;         // of the first schedule; each one after it has the next
    uint64_t schedules;    // how many
    uint64_t max_steps;    // of one schedule
    uint32_t policy;       // twin::Policy, or kMixedPolicy
    uint32_t store_order;  // 0 in order, 1 unordered, 2 by seed
    uint32_t explicit_sync;
    uint32_t hang_is_finding;
    uint32_t pct_depth;   // 0: 2 or 3 by seed
    uint32_t epoch;       // that the first op follows
    uint32_t vary_epoch;  // by seed: fresh windows, or just before the wrap
    uint32_t trace;
    const uint16_t* choices;
    uint64_t choice_count;
    int32_t kill_rank, stall_rank, slow_rank, slow_core, slow_link;
    uint32_t corrupt_word, corrupt_xor, corrupt_how;  // 0 xor, 1 stale, 2 torn
    uint64_t kill_step, stall_step, corrupt_block;
};

struct am_explore_result {
    uint64_t schedules;  // that ran
    uint64_t steps;
    uint64_t instructions;
    uint64_t switches;
    uint64_t status_blocks;
    uint64_t last_hash;
    uint64_t choices;  // of the last schedule
    uint64_t failed_seed;
    uint32_t failed;  // 0 none, 1 a finding, 2 another result than expected, 3 another error than accepted
    uint32_t time_passed;
    char kind[64];
    char message[1024];
};

}  // extern "C"

namespace ops {
// The host copies the rows that `inputs` names into a block of its lent area, before the op, and gives the
// block back after it. Early: as if its bytes were free at once, not one op later.
constexpr uint32_t kLentNot = 0, kLentRows = 1, kLentEarly = 2;
constexpr uint32_t kMixedPolicy = 100;  // half PCT, three tenths random, two tenths lazy
}  // namespace ops
