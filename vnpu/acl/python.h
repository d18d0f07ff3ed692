// Python's lock (the GIL) as seen from the virtual NPU's libraries. Its functions are looked up by name: the build
// needs no Python, and one library serves every Python version.
#pragma once

namespace vnpu {

// Whether this process runs a Python that is not shutting down.
bool PythonRuns();

// Holds the GIL while it lives. Only where PythonRuns().
class HeldGil {
public:
    HeldGil();
    ~HeldGil();
    HeldGil(const HeldGil&) = delete;
    HeldGil& operator=(const HeldGil&) = delete;

private:
    int state_;
};

// Lets other threads have the GIL while it lives, if this thread holds it.
class YieldedGil {
public:
    YieldedGil();
    ~YieldedGil();
    YieldedGil(const YieldedGil&) = delete;
    YieldedGil& operator=(const YieldedGil&) = delete;

private:
    void* thread_ = nullptr;  // what PyEval_SaveThread gave
};

// Runs the handlers of signals that have arrived, on the main thread. False: one of them has raised.
bool RunSignalHandlers();

}  // namespace vnpu
