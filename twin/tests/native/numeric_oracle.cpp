// The element conversions and half arithmetic of the twin behind a C ABI, for tests that compare them with
// numpy and ml_dtypes. Types are numbered in the order of `Types`.
#include <tuple>

#include "twin/math/cast.h"

namespace {

using Types = std::tuple<half, bfloat16_t, float, int8_t, uint8_t, int16_t, int32_t, int64_t>;
constexpr int kTypes = std::tuple_size_v<Types>;

// 1: done; 0: the pair has no such mode; -1: there is no such pair.
template <class D, class S>
int CastTyped(twin::RoundMode mode, void* dst, const void* src, uint32_t n, float scale) {
    if constexpr (!twin::kCastLegal<D, S>) {
        return -1;
    } else {
        if (!twin::CastModeLegal<D, S>(mode)) return 0;
        twin::CastArray(static_cast<D*>(dst), static_cast<const S*>(src), mode, n, scale);
        return 1;
    }
}

template <int kPair = 0>
int CastAny(int pair, twin::RoundMode mode, void* dst, const void* src, uint32_t n, float scale) {
    if constexpr (kPair == kTypes * kTypes) {
        return -1;
    } else {
        if (pair != kPair) return CastAny<kPair + 1>(pair, mode, dst, src, n, scale);
        using S = std::tuple_element_t<kPair / kTypes, Types>;
        using D = std::tuple_element_t<kPair % kTypes, Types>;
        return CastTyped<D, S>(mode, dst, src, n, scale);
    }
}

half Operate(int op, half a, half b) {
    switch (op) {
        case 0: return a + b;
        case 1: return a - b;
        case 2: return a * b;
        default: return a / b;
    }
}

}  // namespace

extern "C" {

int oracle_cast(int src_type, int dst_type, int mode, void* dst, const void* src, uint32_t n, float scale) {
    return CastAny(src_type * kTypes + dst_type, static_cast<twin::RoundMode>(mode), dst, src, n, scale);
}

void oracle_half_arithmetic(int op, half* dst, const half* a, const half* b, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) dst[i] = Operate(op, a[i], b[i]);
}

// One bit each: == != < <= > >=, and the same against float(b).
void oracle_half_compare(uint16_t* dst, const half* a, const half* b, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
        const half x = a[i];
        const half y = b[i];
        const float f = y;
        const int same = (x == y) | (x != y) << 1 | (x < y) << 2 | (x <= y) << 3 | (x > y) << 4 | (x >= y) << 5;
        const int wide = (x == f) | (x != f) << 1 | (x < f) << 2 | (x <= f) << 3 | (x > f) << 4 | (x >= f) << 5;
        dst[i] = static_cast<uint16_t>(same | wide << 6);
    }
}

void oracle_half_from_double(half* dst, const double* src, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) dst[i] = src[i];
}

void oracle_half_from_int(half* dst, const int64_t* src, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) dst[i] = half(src[i]);
}

void oracle_bf16_from_double(bfloat16_t* dst, const double* src, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) dst[i] = bfloat16_t(src[i]);
}

int32_t oracle_scalar_cast(float x, int mode) {
    using AscendC::RoundMode;
    switch (mode) {
        case 1: return AscendC::ScalarCast<float, int32_t, RoundMode::CAST_RINT>(x);
        case 2: return AscendC::ScalarCast<float, int32_t, RoundMode::CAST_FLOOR>(x);
        case 3: return AscendC::ScalarCast<float, int32_t, RoundMode::CAST_CEIL>(x);
        case 4: return AscendC::ScalarCast<float, int32_t, RoundMode::CAST_ROUND>(x);
        default: return AscendC::ScalarCast<float, half, RoundMode::CAST_ODD>(x).bits;
    }
}

}  // extern "C"
