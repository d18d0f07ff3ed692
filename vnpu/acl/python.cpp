#include "python.h"

#include <dlfcn.h>

namespace vnpu {
namespace {

struct Python {
    template <typename Function>
    static Function* Find(const char* name) {
        return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
    }
    int (*is_initialized)() = Find<int()>("Py_IsInitialized");
    int (*is_finalizing)() = Find<int()>("Py_IsFinalizing");    // since 3.13
    int (*was_finalizing)() = Find<int()>("_Py_IsFinalizing");  // before
    int (*ensure)() = Find<int()>("PyGILState_Ensure");
    void (*release)(int) = Find<void(int)>("PyGILState_Release");
    int (*check)() = Find<int()>("PyGILState_Check");
    void* (*save)() = Find<void*()>("PyEval_SaveThread");
    void (*restore)(void*) = Find<void(void*)>("PyEval_RestoreThread");
    int (*check_signals)() = Find<int()>("PyErr_CheckSignals");
};

const Python& ThePython() {
    static const Python python;
    return python;
}

}  // namespace

bool PythonRuns() {
    const Python& python = ThePython();
    if (python.is_initialized == nullptr || !python.is_initialized()) return false;
    const auto finalizing = python.is_finalizing != nullptr ? python.is_finalizing : python.was_finalizing;
    return finalizing != nullptr && finalizing() == 0;
}

HeldGil::HeldGil() : state_(ThePython().ensure()) {}
HeldGil::~HeldGil() { ThePython().release(state_); }

YieldedGil::YieldedGil() {
    if (PythonRuns() && ThePython().check()) thread_ = ThePython().save();
}
YieldedGil::~YieldedGil() {
    if (thread_ != nullptr) ThePython().restore(thread_);
}

bool RunSignalHandlers() {
    if (!PythonRuns()) return true;
    const HeldGil gil;
    return ThePython().check_signals() == 0;
}

}  // namespace vnpu
