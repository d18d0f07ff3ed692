// The device qualifiers of AscendC, as a host compiler sees them, constants and type traits. Each qualifier
// may be overridden on the command line (an address-space check defines __gm__ and __ubuf__ as attributes).
#pragma once

#include <cstdint>
#include <type_traits>

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

#ifndef likely
#define likely(x) __builtin_expect(!!(x), 1)
#endif
#ifndef unlikely
#define unlikely(x) __builtin_expect(!!(x), 0)
#endif

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

namespace AscendC {

constexpr uint16_t ONE_BLK_SIZE = 32;          // bytes
constexpr int32_t ONE_REPEAT_BYTE_SIZE = 256;  // of a repeat
constexpr int32_t DEFAULT_BLOCK_SIZE = 256;
constexpr int32_t DEFAULT_BLK_NUM = 8;  // blocks of a repeat
constexpr int32_t DEFAULT_BLK_STRIDE = 1;
constexpr uint8_t DEFAULT_REPEAT_STRIDE = 8;
constexpr int32_t MAX_REPEAT_TIMES = 255;
constexpr int32_t ONE_BYTE_BIT_SIZE = 8;
constexpr uint64_t FULL_MASK = 0xffffffffffffffff;
constexpr uint32_t CACHE_LINE_SIZE = 64;  // bytes
constexpr uint32_t TOTAL_UB_SIZE = 192 * 1024;
constexpr int32_t TOTAL_VEC_LOCAL_SIZE = 184 * 1024;  // without the scratch of some calls
constexpr uint32_t TMP_UB_OFFSET = 184 * 1024;        // where that scratch begins

template <class A, class B>
struct IsSameType {
    static constexpr bool value = std::is_same<A, B>::value;
};
template <bool condition, class A, class B>
using Conditional = std::conditional<condition, A, B>;
// The element type of a tensor's type argument.
template <class T>
using PrimT = T;

namespace Std {
template <class A, class B>
using IsSame = std::is_same<A, B>;
template <class A, class B>
constexpr auto max(const A& a, const B& b) {
    return a > b ? a : b;
}
template <class A, class B>
constexpr auto min(const A& a, const B& b) {
    return a > b ? b : a;
}
using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::decay_t;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_convertible;
using std::is_floating_point;
using std::is_integral;
using std::is_same;
using std::is_same_v;
using std::remove_cv_t;
using std::remove_reference_t;
using std::true_type;
}  // namespace Std

}  // namespace AscendC
