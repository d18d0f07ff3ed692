// Errors on purpose: proof that a sanitized build notices them. In any other build there is nothing here.
#include "ascend_moe.h"

#ifdef ASCEND_MOE_SANITIZE

#include <climits>
#include <memory>

// 0: nothing wrong. 1: reads past the end of a heap block. 2: overflows a signed int.
int am_sanitizer_control(int which) {
    volatile int index = which == 1 ? 4 : 0;  // volatile: the compiler must not see the error coming
    volatile int large = which == 2 ? INT_MAX : 0;
    const std::unique_ptr<int[]> block(new int[4]());
    return block[static_cast<size_t>(index)] + (large + 1);
}

#endif
