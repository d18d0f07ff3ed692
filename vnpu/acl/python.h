// Python, with its lock (the GIL), as seen from the virtual NPU's libraries. Its functions are looked up by name: the
// build needs no Python, and one library serves every Python version.
#pragma once

#include <dlfcn.h>

namespace vnpu {

struct Python {
    template <typename Function>
    static Function* Find(const char* name) {
        return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
    }
    static const Python& the() {
        static const Python python;
        return python;
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
    void* (*import_module)(const char*) = Find<void*(const char*)>("PyImport_ImportModule");
    void* (*call_method)(void*, const char*, const char*,
                         ...) = Find<void*(void*, const char*, const char*, ...)>("PyObject_CallMethod");
    const char* (*as_utf8)(void*) = Find<const char*(void*)>("PyUnicode_AsUTF8");
    void (*release_object)(void*) = Find<void(void*)>("Py_DecRef");
    void (*print_error)() = Find<void()>("PyErr_Print");
};

// Whether this process runs a Python that is not shutting down.
inline bool PythonRuns() {
    const Python& python = Python::the();
    if (python.is_initialized == nullptr || !python.is_initialized()) return false;
    const auto finalizing = python.is_finalizing != nullptr ? python.is_finalizing : python.was_finalizing;
    return finalizing != nullptr && finalizing() == 0;
}

// Holds the GIL while it lives. Only where PythonRuns().
class HeldGil {
public:
    HeldGil() : state_(Python::the().ensure()) {}
    ~HeldGil() { Python::the().release(state_); }
    HeldGil(const HeldGil&) = delete;
    HeldGil& operator=(const HeldGil&) = delete;

private:
    int state_;
};

// Lets other threads have the GIL while it lives, if this thread holds it.
class YieldedGil {
public:
    YieldedGil() {
        if (PythonRuns() && Python::the().check()) thread_ = Python::the().save();
    }
    ~YieldedGil() {
        if (thread_ != nullptr) Python::the().restore(thread_);
    }
    YieldedGil(const YieldedGil&) = delete;
    YieldedGil& operator=(const YieldedGil&) = delete;

private:
    void* thread_ = nullptr;  // result of PyEval_SaveThread
};

// Runs the handlers of pending signals on the main thread. Returns false if one of them has raised.
inline bool RunSignalHandlers() {
    if (!PythonRuns()) return true;
    const HeldGil gil;
    return Python::the().check_signals() == 0;
}

}  // namespace vnpu
