// The C ABI of a library of kernels: what the Python launcher mirrors field by field.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// One GM range of a launch. `name` outlives the launch.
struct TwinRange {
    const void* begin;
    uint64_t bytes;
    const char* name;
    uint32_t* doorbell;
    int32_t kind;  // twin::GmKind
    int32_t atomic_blocks;
    int32_t owner;  // the rank whose window it is, or -1
    int32_t reserved;
};

// The windows of one group of ranks: arrays of `world` addresses.
struct TwinGroup {
    uint32_t layout;  // twin::hccl::Layout
    uint32_t world;
    uint64_t window_bytes;
    uint64_t exp_bytes;
    uint64_t workspace_bytes;
    const uint64_t* windows_in;
    const uint64_t* windows_out;
    const uint64_t* windows_exp;
    const char* name;
};

// One rank's launch.
struct TwinLaunch {
    void* entry;
    const uint64_t* arguments;
    uint32_t argument_count;
    uint32_t block_dim;
    uint64_t tiling_key;
    const TwinRange* ranges;
    uint32_t range_count;
    uint32_t reserved;
    void* contexts[2];   // blobs that twin_context_fill has filled, or null
    uint32_t* doorbell;  // this rank's, or null
    double deadline_s;   // nothing moves this long: a hang. 0: wait for ever
};

// How the checked engine runs; the fast one has no choices.
struct TwinOptions {
    uint64_t seed;
    uint64_t max_steps;
    uint32_t policy;  // twin::Policy
    uint32_t unordered;
    uint32_t explicit_sync;
    uint32_t pct_depth;
};

// What came of it. `finding` is empty where the kernel threw something else than a fault.
struct TwinOutcome {
    int32_t rank;  // that failed
    int32_t reserved;
    uint64_t steps;
    uint64_t trace_hash;
    char finding[64];
    char text[4096];
};

uint32_t twin_abi();
const char* twin_engine();
// The names of the checked engine's policies, in the order of their numbers: "late,random,...".
const char* twin_policies();

// `world` ranks that share windows, kept between launches.
void* twin_world_create(uint32_t world);
void twin_world_destroy(void* world);
// Launches all ranks together; returns when all have ended. 0, or 1 with *outcome filled by the first
// failure.
int twin_world_run(void* world, const TwinLaunch* launches, const TwinOptions* options, TwinOutcome* outcome);
// Launches one rank on the calling thread; the others are other threads' calls.
int twin_world_run_rank(void* world, uint32_t rank, const TwinLaunch* launch, TwinOutcome* outcome);

// A context blob is the twin's header, the context, and what it points at. `workspace` is memory of the
// blob's owner; the context is at blob + twin_context_offset().
uint64_t twin_context_bytes(uint32_t layout, uint32_t world);
uint64_t twin_context_offset();
void twin_context_fill(const TwinGroup* group, uint32_t rank, void* blob, uint64_t workspace);
}
#pragma GCC visibility pop
