// Stand-in for CANN's header of this name: the message goes to whoever called the stand-in.
#pragma once

#include <cstdint>

namespace ge {

__attribute__((weak, visibility("hidden"), format(printf, 2, 3))) int32_t
ReportUserDefinedErrMsg(const char* code, const char* format, ...);

}  // namespace ge
