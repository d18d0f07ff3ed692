// One line of error from the host side of the ops, wherever CANN shows it: the log, and the text that
// aclGetRecentErrMsg returns where that is a public interface (else the standard error stream).
#ifndef ASCEND_MOE_DISTRIBUTE_CANN_LOG_H
#define ASCEND_MOE_DISTRIBUTE_CANN_LOG_H

#include <cstdint>
#include <cstdio>

#if defined(__has_include)
#if __has_include("base/err_msg.h")
#include "base/err_msg.h"
#define ASCEND_MOE_HAS_ERR_MSG 1
#endif
#endif

// CANN's log, without its headers: they differ between versions, the symbol does not.
extern "C" __attribute__((weak)) void DlogRecord(int32_t module, int32_t level, const char* format, ...);

namespace moe {

// `op` is the op type, `message` one line without its name. Always false, so that a caller can return it.
inline bool ReportError(const char* op, const char* message) {
    constexpr int32_t kModuleOp = 63, kLevelError = 3;
    if (DlogRecord != nullptr) DlogRecord(kModuleOp, kLevelError, "%s: %s", op, message);
#ifdef ASCEND_MOE_HAS_ERR_MSG
    if (ge::ReportUserDefinedErrMsg != nullptr) {
        ge::ReportUserDefinedErrMsg("EU0001", "%s: %s", op, message);
        return false;
    }
#endif
    fprintf(stderr, "%s: %s\n", op, message);
    return false;
}

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_CANN_LOG_H
