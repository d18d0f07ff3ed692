#include "without_gil.h"

#include <dlfcn.h>

namespace ascend_moe_torch {

namespace {

// Looked up in the running interpreter, so that this library belongs to no version of Python.
struct Python {
    int (*holds)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    void* (*save)() = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    void (*restore)(void*) = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
};
const Python python;

}  // namespace

WithoutGil::WithoutGil() {
    if (python.holds != nullptr && python.save != nullptr && python.restore != nullptr && python.holds() != 0)
        thread_ = python.save();
}

WithoutGil::~WithoutGil() {
    if (thread_ != nullptr) python.restore(thread_);
}

}  // namespace ascend_moe_torch
