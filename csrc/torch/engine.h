// The C functions that the binding calls in other libraries, looked up when Python names the file.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "npu/launch.h"
#include "rules/check.h"

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

inline Engine the_engine = {};
inline Adapter the_adapter = {};

class Library {
public:
    explicit Library(const char* path) : path_(path), handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
        if (handle_ == nullptr) throw std::runtime_error(dlerror());
    }
    template <class Function>
    void Find(const char* name, Function& function) const {
        function = reinterpret_cast<Function>(dlsym(handle_, name));
        if (function == nullptr) throw std::runtime_error(path_ + " has no function " + name);
    }

private:
    std::string path_;
    void* handle_;  // never closed: prepared calls live as long as the process
};

// Both throw std::runtime_error where a function is missing; a second file is not opened.
inline void UseEngine(const char* path) {
    if (the_engine.run != nullptr) return;
    const Library library(path);
    Engine engine;
    library.Find("am_plan_create", engine.plan_create);
    library.Find("am_plan_destroy", engine.plan_destroy);
    library.Find("am_plan_info", engine.plan_info);
    library.Find("am_call_output", engine.call_output);
    library.Find("am_comm_algorithm", engine.comm_algorithm);
    library.Find("am_run", engine.run);
    library.Find("am_spec_bytes", engine.spec_bytes);
    library.Find("am_check_bytes", engine.check_bytes);
    library.Find("am_error_record_words", engine.error_record_words);
    if (engine.spec_bytes() != sizeof(moe::CallSpec) || engine.check_bytes() != sizeof(moe::CheckResult) ||
        engine.error_record_words() > kMostRecordWords)
        throw std::runtime_error(std::string(path) + " describes calls differently");
    the_engine = engine;
}

inline void UseAdapter(const char* path) {
    if (the_adapter.launch != nullptr) return;
    const Library library(path);
    Adapter adapter;
    library.Find("am_npu_launch", adapter.launch);
    the_adapter = adapter;
}

inline const Engine& engine() { return the_engine; }
inline const Adapter& adapter() { return the_adapter; }

}  // namespace ascend_moe_torch
