// Errors of the virtual NPU (ACL's codes, the text of this thread's last error, faults of the device) and state of the
// process. All libraries of the virtual NPU use it; the functions are in libascendcl.so, which the others link.
#pragma once

#include <mutex>

#define VNPU_EXPORT extern "C" __attribute__((visibility("default")))

// VNPU_EVERY(form, given, names...): form(name, given) for every name.
#define VNPU_EVERY(form, given, ...) VNPU_NAMES1(VNPU_NEXT_NAME(form, given, __VA_ARGS__))
#define VNPU_NEXT_NAME(form, given, name, ...) \
    form(name, given) __VA_OPT__(VNPU_LATER_NAME VNPU_NO_NAME(form, given, __VA_ARGS__))
#define VNPU_LATER_NAME() VNPU_NEXT_NAME
#define VNPU_NO_NAME ()
#define VNPU_NAMES1(...) VNPU_NAMES2(VNPU_NAMES2(VNPU_NAMES2(VNPU_NAMES2(__VA_ARGS__))))
#define VNPU_NAMES2(...) VNPU_NAMES3(VNPU_NAMES3(VNPU_NAMES3(VNPU_NAMES3(__VA_ARGS__))))
#define VNPU_NAMES3(...) VNPU_NAMES4(VNPU_NAMES4(VNPU_NAMES4(VNPU_NAMES4(__VA_ARGS__))))
#define VNPU_NAMES4(...) __VA_ARGS__

// Sets the text of aclGetRecentErrMsg (this thread's, printf format, one line) and prints it once on stderr.
VNPU_EXPORT void vnpu_error(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Called by running work that has failed on the device: the next call that waits returns 507035 (a vector core
// exception), with the text of this thread's last vnpu_error.
VNPU_EXPORT void vnpu_fault(void);

namespace vnpu {

using AclError = int;
using Handle = void*;

constexpr AclError kSuccess = 0;
constexpr AclError kParamInvalid = 107000;
constexpr AclError kInvalidDevice = 107001;
constexpr AclError kContextNull = 107002;
constexpr AclError kEventTimestampInvalid = 107006;
constexpr AclError kInvalidHandle = 107017;
constexpr AclError kModelCaptured = 107026;
constexpr AclError kStreamCaptured = 107027;
constexpr AclError kEventCaptured = 107028;
constexpr AclError kStreamNotCaptured = 107029;
constexpr AclError kCaptureUnmatched = 107036;
constexpr AclError kCaptureNotSupported = 107030;
constexpr AclError kNotSupported = 207000;
constexpr AclError kOutOfMemory = 207001;
constexpr AclError kQueueTimeout = 507046;  // ACL_ERROR_RT_STREAM_SYNC_TIMEOUT

// The error of work that has failed on the device, returned once and with its text, or kSuccess; see vnpu_fault.
AclError TakeFault();

// Prints one line on stderr for each missing function, once; returns kNotSupported.
AclError Unsupported(const char* function);

// The T of this process, locked while this object lives. Never destroyed: threads may outlive main().
template <typename T>
class Locked {
public:
    T& operator*() const { return the().value; }
    T* operator->() const { return &the().value; }

private:
    struct Guarded {
        std::mutex mutex;
        T value = {};
    };
    static Guarded& the() {
        static auto* guarded = new Guarded;
        return *guarded;
    }
    std::lock_guard<std::mutex> lock_{the().mutex};
};

}  // namespace vnpu
