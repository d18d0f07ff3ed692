// The C functions that the binding calls in other libraries, looked up when Python names the file.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "npu/launch.h"

namespace ascend_moe_torch {

constexpr uint64_t kMostRecordWords = 64;  // that a launch has room for

// Of csrc/abi, in the library of the engine that runs the CPU ops. Rules and plans are the same in all of
// them.
struct Engine {
    void* (*plan_create)(const void* spec, void* check);
    void (*plan_destroy)(void* plan);
    uint64_t (*plan_info)(const void* plan, uint64_t* out, uint64_t count);
    int (*call_output)(const void* spec, int index, int64_t* out);
    int (*comm_algorithm)(const char* name);
    int (*run)(void* comm, void* plan, const void* const* inputs, void* const* outputs, int32_t* record,
               char* fault, uint64_t fault_bytes);
    uint64_t (*spec_bytes)();
    uint64_t (*check_bytes)();
    uint64_t (*error_record_words)();
};

// Of csrc/npu, in the adapter to the torch_npu that is installed.
struct Adapter {
    decltype(&am_npu_launch) launch;
};

// Both throw std::runtime_error where a function is missing; a second file is not opened.
void UseEngine(const char* path);
void UseAdapter(const char* path);

const Engine& engine();
const Adapter& adapter();

}  // namespace ascend_moe_torch
