#include "error.h"

#include <cstdarg>
#include <cstdio>
#include <set>
#include <string>

namespace vnpu {
namespace {

constexpr AclError kVectorCoreException = 507035;

thread_local std::string last_error;

// An error of the launch itself would make torch_npu's task queue drop all further work without a word, so the next
// call that waits returns it.
struct Fault {
    std::string text;  // empty: none
};

}  // namespace

AclError TakeFault() {
    const Locked<Fault> fault;
    if (fault->text.empty()) return kSuccess;
    last_error = fault->text;
    fault->text.clear();
    return kVectorCoreException;
}

AclError Unsupported(const char* function) {
    const Locked<std::set<std::string>> named;
    last_error = std::string(function) + ": the virtual NPU does not have this function";
    if (named->insert(function).second) std::fprintf(stderr, "ascend_moe vnpu: %s\n", last_error.c_str());
    return kNotSupported;
}

}  // namespace vnpu

using namespace vnpu;

VNPU_EXPORT void vnpu_error(const char* format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    std::vsnprintf(text, sizeof text, format, args);
    va_end(args);
    last_error = text;
    std::fprintf(stderr, "ascend_moe vnpu: %s\n", text);
}

VNPU_EXPORT void vnpu_fault(void) {
    const Locked<Fault> fault;
    if (fault->text.empty()) fault->text = last_error;  // the first one is the cause of what follows
}

VNPU_EXPORT const char* aclGetRecentErrMsg() {
    // As in CANN the text is the calling thread's and is taken by being read.
    static thread_local std::string taken;
    taken = std::move(last_error);
    last_error.clear();
    return taken.empty() ? nullptr : taken.c_str();
}
