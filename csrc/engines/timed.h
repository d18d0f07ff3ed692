// The timed engine across the C ABI: one op of all ranks of a world in this process, with modelled times.
#pragma once

#include <cstdint>

extern "C" {

// One op of one rank.
struct am_timed_step {
    int32_t rank;
    int32_t kernel;  // 0: the plan's own; 1: the model of a CANN-style kernel (csrc/models)
    void* plan;
    const void* const* inputs;
    void* const* outputs;
};

struct am_timed_options {
    uint64_t payload_bytes;  // copies of rows from this size on are left out; 0: none
    double limit_ns;
    uint64_t events;
};

struct am_timed_result {
    double total_ns;
    uint64_t instructions, switches, status_stores, looks, events;
    uint32_t failed;
    char message[1020];
};

}  // extern "C"
