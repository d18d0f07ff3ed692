#include "stubs.h"

#include "stubs_table.h"

// Options are kept by CANN; here 0 is what every one of them says.
VNPU_EXPORT int aclrtGetSysParamOpt(int, int64_t* value) {
    if (!value) return vnpu::kParamInvalid;
    *value = 0;
    return 0;
}
