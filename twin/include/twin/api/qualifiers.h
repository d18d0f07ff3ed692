// The device qualifiers of AscendC, as a host compiler sees them. Each may be overridden on the command
// line (an address-space check defines __gm__ and __ubuf__ as attributes).
#pragma once

#include <cstdint>

#ifndef __gm__
#define __gm__
#endif
#ifndef __ubuf__
#define __ubuf__
#endif
#ifndef __aicore__
#define __aicore__
#endif
#ifndef __global__
#define __global__
#endif
#ifndef __inout_pipe__
#define __inout_pipe__(...)
#endif

// A macro, as in CANN: `GM_ADDR a, b;` declares one pointer only.
#define GM_ADDR __gm__ uint8_t*

#define ASCEND_IS_AIV (true)
#define ASCEND_IS_AIC (false)

namespace twin {

// The only bridges between address spaces: through an integer, so that a lost qualifier elsewhere is a
// compile error under the address-space check.
template <class T>
inline T* HostOf(__gm__ T* p) {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p));
}
template <class T>
inline __gm__ T* GmOf(T* p) {
    return reinterpret_cast<__gm__ T*>(reinterpret_cast<uintptr_t>(p));
}

}  // namespace twin
