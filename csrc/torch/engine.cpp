#include "engine.h"

#include <dlfcn.h>

#include "rules/check.h"

namespace ascend_moe_torch {

namespace {

Engine the_engine = {};
Adapter the_adapter = {};

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

}  // namespace

void UseEngine(const char* path) {
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

void UseAdapter(const char* path) {
    if (the_adapter.launch != nullptr) return;
    const Library library(path);
    Adapter adapter;
    library.Find("am_npu_launch", adapter.launch);
    the_adapter = adapter;
}

const Engine& engine() { return the_engine; }
const Adapter& adapter() { return the_adapter; }

}  // namespace ascend_moe_torch
