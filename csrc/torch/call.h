// A call of an op: from torch's stack to a prepared call (prepare.cpp), which equal calls share (cache.cpp), to its
// outputs (run.cpp).
#pragma once

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "abi/ascend_moe.h"
#include "api.h"
#include "handle.h"
#include "op.h"
#include "rules/check.h"

namespace ascend_moe_torch {

void UsePython(const AmTorchPython& python);
const AmTorchPython& python();

// An error that Python keeps for this thread; torch turns this into a RuntimeError of the same text.
struct Raised : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// Throws Raised if a function of AmTorchPython has returned a text.
inline void Raise(const char* text) {
    if (text != nullptr) throw Raised(text);
}

// ---- the C functions that the binding calls in other libraries, looked up when Python names the file ----

constexpr uint64_t kMostRecordWords = 64;  // that a launch has room for

// Of csrc/abi, in the library of the engine that runs the CPU ops.
// clang-format off
#define AM_ENGINE_FUNCTIONS(X)                                                              \
    X(plan_create) X(plan_destroy) X(plan_info) X(call_output) X(comm_algorithm) X(run)     \
    X(spec_bytes) X(check_bytes) X(error_record_words) X(registered_use)
// clang-format on
struct Engine {
#define AM_FUNCTION(name) decltype(&am_##name) name;
    AM_ENGINE_FUNCTIONS(AM_FUNCTION)
#undef AM_FUNCTION
};

inline Engine the_engine = {};
// Of csrc/npu, in the adapter to the torch_npu that is installed.
inline decltype(&am_npu_launch) npu_launch = nullptr;

class Library {
public:
    explicit Library(const char* path) : path_(path), handle_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
        if (handle_ == nullptr) throw std::runtime_error(dlerror());
    }
    template <class Function>
    void Find(const char* name, Function& function) const {
        function = reinterpret_cast<Function>(dlsym(handle_, name));
        if (function == nullptr) throw std::runtime_error(path_ + " has no function " + name + ": build it again");
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
#define AM_FUNCTION(name) library.Find("am_" #name, engine.name);
    AM_ENGINE_FUNCTIONS(AM_FUNCTION)
#undef AM_FUNCTION
    if (engine.spec_bytes() != sizeof(moe::CallSpec) || engine.check_bytes() != sizeof(moe::CheckResult) ||
        engine.error_record_words() > kMostRecordWords)
        throw std::runtime_error(std::string(path) + " is of another version: build both libraries again");
    the_engine = engine;
}

inline void UseAdapter(const char* path) {
    if (npu_launch == nullptr) Library(path).Find("am_npu_launch", npu_launch);
}

inline const Engine& engine() { return the_engine; }

// ---- prepared calls, checked and planned for one communicator handle, by keys that equal calls share ----

// All that checks, plans and look-ups read of a call.
class Key {
public:
    // `valid` is false if nothing distinguishes this call from others: too long texts, tensors of many dimensions.
    Key(const Op& op, const Arguments& arguments, const Device& device, uint32_t part);

    bool valid() const { return valid_; }
    std::string_view bytes() const { return {reinterpret_cast<const char*>(words_.data()), size_ * sizeof(uint64_t)}; }

private:
    bool Add(uint64_t word) {
        if (size_ == words_.size()) return false;
        words_[size_++] = word;
        return true;
    }
    bool AddText(std::string_view text);
    bool AddVariables();
    bool AddTensor(AtenTensorHandle tensor);

    std::array<uint64_t, 256> words_;
    size_t size_ = 0;
    bool valid_;
};

// Environment variables that every call depends on, separated by blanks; before the first call. os.environ
// hands each change on to the C environment, which is read here.
void Watch(const char* names);

// Which rank of which LocalCluster the calling thread is; 0: none.
void SetPlace(uint64_t place);

struct Output {
    int32_t dtype;
    int64_t rank;
    int64_t sizes[2];
};

struct Prepared {
    std::string key;  // its bytes
    std::shared_ptr<CommHandle> handle;
    CallText text;
    std::shared_ptr<void> plan;    // of the engine's library
    std::shared_ptr<void> finish;  // plan of the second launch in split mode
    std::vector<Output> outputs;
    // NPU: the texts and times that the launch hands on.
    std::string group_ep, group_tp, comm_alg;
    int64_t timeout_us = 0, first_timeout_us = 0;
    uint32_t algorithm = 0;
};

// A number that Forget changes: what was looked up before it is not remembered after it.
uint64_t Generation();
std::shared_ptr<const Prepared> Find(const Key& key);
void Remember(uint64_t generation, std::shared_ptr<const Prepared> call);
void Forget();

// ---- from the stack to the outputs ----

// Throws Raised: the call breaks a rule, or its group cannot be opened.
std::shared_ptr<Prepared> Prepare(const Op& op, const Arguments& arguments, const Device& device, bool on_npu,
                                  uint32_t part);

CallText TextOf(const Op& op, const Arguments& arguments);

// The call as passed to Python; the texts are those of `arguments`, and `op`'s name.
AmTorchCall Describe(const Op& op, const Arguments& arguments, const Device& device, bool on_npu);

// The device of all tensors. Throws Raised if there is more than one, a tensor is not dense, or an int is out of range.
Device OneDevice(const Op& op, const Arguments& arguments, bool on_npu);

}  // namespace ascend_moe_torch
