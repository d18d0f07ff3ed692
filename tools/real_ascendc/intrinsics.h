// Our models of the instructions that asc-devkit's headers call and CANN keeps closed: what its documentation says
// of a vector core of the A2 and A3 (dav_c220). asc-devkit includes this file as stub_fun.h. A pipe runs an
// instruction at once and in program order, so a missing event is not found here; the checked twin finds those.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>

#include "stub_def.h"

#include "../ascendc_enums.h"
#include "core.h"

namespace real {

// ---- lanes ----

// Calls f(repeat, lane) for the lanes that are on; `lanes` are 256 bytes of the widest operand. With a counter the
// mask is how many elements there are in all.
template <class F>
void ForLanes(int lanes, int repeats, F f) {
    if (g_core.counter) {
        for (uint64_t i = 0; i < g_core.mask[0]; ++i)
            f(static_cast<int>(i / static_cast<uint64_t>(lanes)), static_cast<int>(i % static_cast<uint64_t>(lanes)));
        return;
    }
    for (int repeat = 0; repeat < repeats; ++repeat)
        for (int lane = 0; lane < lanes; ++lane)
            if (g_core.mask[lane / 64] >> lane % 64 & 1) f(repeat, lane);
}

// An operand of a vector instruction: blocks of 32 bytes at strides counted in blocks.
template <class T>
struct Operand {
    T* base;
    int block_stride, repeat_stride;
    const char* name;
    Operand(const char* instruction, T* address, int block, int repeat)
        : base(address), block_stride(block), repeat_stride(repeat), name(instruction) {
        Aligned(name, address);
    }
    T* At(int repeat, int lane) const {
        constexpr int kLanes = 32 / static_cast<int>(sizeof(T));
        T* at = base + (repeat * repeat_stride + lane / kLanes * block_stride) * kLanes + lane % kLanes;
        return Ub(name, at, sizeof(T)), at;
    }
};

template <class... T>
constexpr int Lanes() {
    return 256 / static_cast<int>(std::max({sizeof(T)...}));
}

// A repeat reads all of its lanes before it writes the first, repeats follow one another.
template <class D, class F>
void ByRepeat(int lanes, int repeats, const Operand<D>& to, F f) {
    D results[256];
    int last = 0, count = 0, at[256];
    const auto store = [&] {
        for (int i = 0; i < count; ++i) memcpy(to.At(last, at[i]), &results[i], sizeof(D));
        count = 0;
    };
    ForLanes(lanes, repeats, [&](int repeat, int lane) {
        if (repeat != last) store();
        last = repeat;
        at[count] = lane;
        results[count++] = f(repeat, lane);
    });
    store();
}

template <class T, class F>
void Binary(const char* name, T* to, T* a, T* b, int repeats, int db, int ab, int bb, int dr, int ar, int br, F f) {
    const Operand<T> d(name, to, db, dr), x(name, a, ab, ar), y(name, b, bb, br);
    ByRepeat(Lanes<T>(), repeats, d, [&](int r, int i) { return f(*x.At(r, i), *y.At(r, i)); });
}
template <class D, class S, class F>
void Unary(const char* name, D* to, S* from, int repeats, int db, int sb, int dr, int sr, F f) {
    const Operand<D> d(name, to, db, dr);
    const Operand<S> s(name, from, sb, sr);
    ByRepeat(Lanes<D, S>(), repeats, d, [&](int r, int i) { return f(*s.At(r, i)); });
}

// ---- numbers ----

// To an integer: r to even, a away from zero, f down, c up, z towards zero, o to odd.
inline double ToInteger(double value, char mode) {
    switch (mode) {
        case 'a': return std::round(value);
        case 'f': return std::floor(value);
        case 'c': return std::ceil(value);
        case 'z': return std::trunc(value);
        case 'o': {
            const double down = std::floor(value);
            return down == value || std::fmod(down, 2) != 0 ? down : down + 1;
        }
        default: return std::nearbyint(value);
    }
}
// To a format with so many bits behind the point, and exponents down to `least` and up to `most`.
inline float ToFormat(float value, int bits, int least, int most, char mode) {
    if (!std::isfinite(value) || value == 0) return value;
    const int exponent = std::max(std::ilogb(value), least);
    const double rounded =
        std::ldexp(ToInteger(std::ldexp(static_cast<double>(value), bits - exponent), mode), exponent - bits);
    const double limit = std::ldexp(2 - std::ldexp(1, -bits), most);
    if (std::fabs(rounded) <= limit) return static_cast<float>(std::copysign(rounded, value));
    const bool cut = mode == 'z' || mode == 'o' || (mode == 'f' && value > 0) || (mode == 'c' && value < 0);
    return std::copysign(cut ? static_cast<float>(limit) : INFINITY, value);
}
template <class Bits, class T>
Bits BitsOf(const T& value) {
    Bits bits;
    static_assert(sizeof(bits) == sizeof(value));
    return memcpy(&bits, &value, sizeof(bits)), bits;
}
template <class T, class Bits>
T FromBits(Bits bits) {
    T value;
    static_assert(sizeof(bits) == sizeof(value));
    return memcpy(static_cast<void*>(&value), &bits, sizeof(bits)), value;
}
inline float Value(const half& value) {
    const uint16_t bits = BitsOf<uint16_t>(value);
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                      : std::ldexp(static_cast<float>(exponent != 0 ? fraction + 1024 : fraction),
                                                   std::max(exponent, 1) - 25);
    return bits >> 15 != 0 ? -size : size;
}
inline half Half(float value, char mode) {
    const float rounded = ToFormat(value, 10, -14, 15, mode);
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return FromBits<half>(static_cast<uint16_t>(0x7E00));
    if (std::isinf(rounded)) return FromBits<half>(static_cast<uint16_t>(sign | 0x7C00));
    const float size = std::fabs(rounded);
    const int exponent = size < 0x1p-14f ? 0 : std::ilogb(size) + 15;
    const int fraction = static_cast<int>(std::ldexp(size, exponent == 0 ? 24 : 25 - exponent)) & 1023;
    return FromBits<half>(static_cast<uint16_t>(sign | exponent << 10 | fraction));
}
inline float Value(const bfloat16_t& value) {
    return FromBits<float>(static_cast<uint32_t>(BitsOf<uint16_t>(value)) << 16);
}
inline bfloat16_t Bf16(float value, char mode) {
    if (std::isnan(value)) return FromBits<bfloat16_t>(static_cast<uint16_t>(0x7FC0));
    return FromBits<bfloat16_t>(static_cast<uint16_t>(BitsOf<uint32_t>(ToFormat(value, 7, -126, 127, mode)) >> 16));
}
inline float Value(float value) { return value; }
inline int32_t Value(int32_t value) { return value; }  // exact: a float has 24 bits
// Saturates; NaN is 0.
template <class I>
I Integer(float value, char mode) {
    if (std::isnan(value)) return 0;
    const double whole = ToInteger(value, mode);
    constexpr double kLeast = static_cast<double>(std::numeric_limits<I>::min());
    constexpr double kMost = static_cast<double>(std::numeric_limits<I>::max());
    return whole <= kLeast  ? std::numeric_limits<I>::min()
           : whole >= kMost ? std::numeric_limits<I>::max()
                            : static_cast<I>(whole);
}
template <class I, class F>
I Wrap(I a, I b, F f) {  // arithmetic on int32 wraps
    return static_cast<I>(f(static_cast<std::make_unsigned_t<I>>(a), static_cast<std::make_unsigned_t<I>>(b)));
}
template <class T, class F>
T Compute(T a, T b, F f) {
    if constexpr (std::is_integral_v<T>)
        return Wrap(a, b, f);
    else
        return f(a, b);
}

// ---- reductions of a repeat ----

inline bool On(int repeat, int lane, int lanes) {
    return g_core.counter ? static_cast<uint64_t>(repeat * lanes + lane) < g_core.mask[0]
                          : (g_core.mask[lane / 64] >> lane % 64 & 1) != 0;
}

// The value at place 0 and its lane at place 1 of each repeat's result, equal values by the lowest lane. Numbers win
// over NaN, as on the twin: no document says what an NPU does.
template <class T, class Better>
void Extreme(const char* name, T* to, T* from, int repeats, int dr, int sb, int sr, Order_t order, Better better) {
    const Operand<T> s(name, from, sb, sr);
    for (int r = 0; r < repeats; ++r) {
        int best = -1;
        for (int i = 0; i < Lanes<T>(); ++i) {
            const bool on = On(r, i, Lanes<T>());
            if (on && (best < 0 || std::isnan(Value(*s.At(r, best))) || better(*s.At(r, i), *s.At(r, best)))) best = i;
        }
        if (best < 0) continue;
        const T value = *s.At(r, best);
        const bool both = order == VALUE_INDEX || order == INDEX_VALUE;
        T* at = to + r * dr * (both ? 2 : 1);
        Ub(name, at, sizeof(T) * (both ? 2 : 1));
        using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
        const T lane = FromBits<T>(static_cast<Bits>(best));
        if (order != ONLY_INDEX) at[order == INDEX_VALUE ? 1 : 0] = value;
        if (order != ONLY_VALUE) at[order == VALUE_INDEX ? 1 : 0] = lane;
    }
}

// One value a block of 32 bytes, the blocks of a repeat behind one another.
template <class T, class Better>
void ExtremeOfBlocks(const char* name, T* to, T* from, int repeats, int dr, int sb, int sr, Better better) {
    constexpr int kBlocks = 8, kInBlock = 32 / static_cast<int>(sizeof(T));
    const Operand<T> s(name, from, sb, sr);
    for (int r = 0; r < repeats; ++r) {
        for (int block = 0; block < kBlocks; ++block) {
            const T* best = nullptr;
            for (int i = block * kInBlock; i < (block + 1) * kInBlock; ++i) {
                if (!On(r, i, Lanes<T>())) continue;
                const T* value = s.At(r, i);
                if (best == nullptr || std::isnan(Value(*best)) || better(*value, *best)) best = value;
            }
            if (best == nullptr) continue;
            T* at = to + r * dr * kBlocks + block;
            Ub(name, at, sizeof(T));
            *at = *best;
        }
    }
}

// ---- comparisons: a bit an element, without gaps; on these chips they ignore the mask ----

template <class T, class F>
void Compare(const char* name, uint8_t* to, T* from, int repeats, int sb, int sr, F holds) {
    const Operand<T> s(name, from, sb, sr);
    if (g_core.counter) Fail("%s: a comparison with a counter is not modelled", name);
    for (int r = 0; r < repeats; ++r)
        for (int i = 0; i < Lanes<T>(); ++i) {
            uint8_t* at = to + (r * Lanes<T>() + i) / 8;
            Ub(name, at, 1);
            *at = static_cast<uint8_t>((*at & ~(1 << i % 8)) | (holds(r, i, *s.At(r, i)) ? 1 << i % 8 : 0));
        }
}

}  // namespace real

// ---- vector arithmetic ----

#define REAL_BINARY(name, expression)                                                                             \
    template <class T>                                                                                            \
    void name(T* to, T* a, T* b, int repeats, int db, int ab, int bb, int dr, int ar, int br) {                   \
        real::Binary(#name, to, a, b, repeats, db, ab, bb, dr, ar, br, [](T x, T y) -> T { return expression; }); \
    }
#define REAL_SCALAR(name, expression)                                                                         \
    template <class T>                                                                                        \
    void name(T* to, T* from, T y, int repeats, int db, int sb, int dr, int sr, bool = false, bool = false) { \
        real::Unary(#name, to, from, repeats, db, sb, dr, sr, [y](T x) -> T { return expression; });          \
    }
#define REAL_COMPUTE(op) (real::Compute(x, y, [](auto p, auto q) { return p op q; }))
REAL_BINARY(vadd, REAL_COMPUTE(+))
REAL_BINARY(vsub, REAL_COMPUTE(-))
REAL_BINARY(vmul, REAL_COMPUTE(*))
REAL_BINARY(vdiv, REAL_COMPUTE(/))
REAL_BINARY(vmax, x > y ? x : y)
REAL_BINARY(vmin, x < y ? x : y)
REAL_SCALAR(vadds, REAL_COMPUTE(+))
REAL_SCALAR(vmuls, REAL_COMPUTE(*))
REAL_SCALAR(vmaxs, x > y ? x : y)
REAL_SCALAR(vmins, x < y ? x : y)
#undef REAL_BINARY
#undef REAL_SCALAR
#undef REAL_COMPUTE

template <class T>
void vabs(T* to, T* from, int repeats, int db, int sb, int dr, int sr) {
    if constexpr (std::is_same_v<T, float>)
        real::Unary("vabs", to, from, repeats, db, sb, dr, sr, [](float x) { return std::fabs(x); });
    else
        real::Fail("vabs of half is not modelled");
}
template <class T>
void vexp(T* to, T* from, int repeats, int db, int sb, int dr, int sr) {
    if constexpr (std::is_same_v<T, float>)
        real::Unary("vexp", to, from, repeats, db, sb, dr, sr,
                    [](float x) { return static_cast<float>(std::exp(static_cast<double>(x))); });
    else
        real::Fail("vexp of half is not modelled");
}
template <class T, class S>
void vector_dup(T* to, S value, int repeats, int db, int, int dr, int) {
    const real::Operand<T> d("vector_dup", to, db, dr);
    const T filled = static_cast<T>(value);
    real::ByRepeat(real::Lanes<T>(), repeats, d, [&](int, int) { return filled; });
}
template <class T>
void vbrcb(T* to, T* from, int db, int dr, int repeats) {
    for (int i = 0; i < repeats * 8; ++i) {
        real::Ub("vbrcb", from + i, sizeof(T));
        T* at = to + (i / 8 * dr + i % 8 * db) * (32 / static_cast<int>(sizeof(T)));
        real::Ub("vbrcb", at, 32);
        std::fill_n(at, 32 / sizeof(T), from[i]);
    }
}

// ---- conversions ----

#define REAL_CONVERT(name, D, S, expression)                                                               \
    inline void name(D* to, S* from, int repeats, int db, int sb, int dr, int sr) {                        \
        real::Unary(#name, to, from, repeats, db, sb, dr, sr, [](const S& x) -> D { return expression; }); \
    }
#define REAL_ROUNDED(name, D, S, function)        \
    REAL_CONVERT(name##a, D, S, function(x, 'a')) \
    REAL_CONVERT(name##c, D, S, function(x, 'c')) \
    REAL_CONVERT(name##f, D, S, function(x, 'f')) \
    REAL_CONVERT(name##r, D, S, function(x, 'r')) \
    REAL_CONVERT(name##z, D, S, function(x, 'z'))
#define REAL_F16_S8(x, mode) real::Integer<int8_t>(real::Value(x), mode)
#define REAL_F32_S32(x, mode) real::Integer<int32_t>(x, mode)
#define REAL_F32_F32(x, mode) static_cast<float>(real::ToInteger(x, mode))
#define REAL_S32_F32(x, mode) static_cast<float>(x)  // nothing that our kernels convert needs rounding
REAL_CONVERT(vconv_bf162f32, float, bfloat16_t, real::Value(x))
REAL_CONVERT(vconv_f162f32, float, half, real::Value(x))
REAL_CONVERT(vconv_s82f16, half, int8_t, real::Half(x, 'r'))
REAL_CONVERT(vconv_s322f32, float, int32_t, static_cast<float>(x))
REAL_CONVERT(vconv_f162s8, int8_t, half, REAL_F16_S8(x, 'r'))
REAL_CONVERT(vconv_f322f16, half, float, real::Half(x, 'r'))
REAL_CONVERT(vconv_f322f16o, half, float, real::Half(x, 'o'))
REAL_CONVERT(vconv_deq, half, int32_t, real::Half(static_cast<float>(x) * real::g_core.deq_scale, 'r'))
REAL_ROUNDED(vconv_f162s8, int8_t, half, REAL_F16_S8)
REAL_ROUNDED(vconv_f322f16, half, float, real::Half)
REAL_ROUNDED(vconv_f322bf16, bfloat16_t, float, real::Bf16)
REAL_ROUNDED(vconv_f322s32, int32_t, float, REAL_F32_S32)
REAL_ROUNDED(vconv_f322f32, float, float, REAL_F32_F32)
REAL_ROUNDED(vconv_s322f32, float, int32_t, REAL_S32_F32)
#undef REAL_CONVERT
#undef REAL_ROUNDED
inline void set_deqscale(const half& scale) { real::g_core.deq_scale = real::Value(scale); }
inline void set_deqscale(uint64_t) { real::Fail("set_deqscale of a vector is not modelled"); }

// ---- reductions, comparisons ----

template <class T>
void vcmax(T* to, T* from, int repeats, int dr, int sb, int sr, Order_t order) {
    real::Extreme("vcmax", to, from, repeats, dr, sb, sr, order,
                  [](T a, T b) { return real::Value(a) > real::Value(b); });
}
template <class T>
void vcmin(T* to, T* from, int repeats, int dr, int sb, int sr, Order_t order) {
    real::Extreme("vcmin", to, from, repeats, dr, sb, sr, order,
                  [](T a, T b) { return real::Value(a) < real::Value(b); });
}
template <class T>
void vcgmax(T* to, T* from, int repeats, int dr, int sb, int sr) {
    real::ExtremeOfBlocks("vcgmax", to, from, repeats, dr, sb, sr,
                          [](T a, T b) { return real::Value(a) > real::Value(b); });
}
#define REAL_COMPARE(name, op)                                                                            \
    template <class T>                                                                                    \
    void vcmpvs_##name(uint8_t* to, T* from, T value, int repeats, int, int sb, int, int sr) {            \
        real::Compare("vcmpvs_" #name, to, from, repeats, sb, sr,                                         \
                      [&](int, int, T x) { return real::Value(x) op real::Value(value); });               \
    }                                                                                                     \
    template <class T>                                                                                    \
    void vcmpv_##name(uint8_t* to, T* a, T* b, int repeats, int, int ab, int bb, int, int ar, int br) {   \
        const real::Operand<T> other("vcmpv_" #name, b, bb, br);                                          \
        real::Compare("vcmpv_" #name, to, a, repeats, ab, ar,                                             \
                      [&](int r, int i, T x) { return real::Value(x) op real::Value(*other.At(r, i)); }); \
    }
REAL_COMPARE(eq, ==)
REAL_COMPARE(ne, !=)
REAL_COMPARE(lt, <)
REAL_COMPARE(le, <=)
REAL_COMPARE(gt, >)
REAL_COMPARE(ge, >=)
#undef REAL_COMPARE

// ---- gathering and sorting ----

// Keeps the elements whose bit is set. With a counter the mask is how many elements a repeat has.
template <class T>
void vreducev2(T* to, T* from, T* pattern, int repeats, int block, int mode, int sr, int pr) {
    static const uint8_t kFixed[8] = {0, 0x55, 0xAA, 0x11, 0x22, 0x44, 0x88, 0xFF};
    const real::Operand<T> s("vreducev2", from, block, sr);
    const uint64_t lanes = real::g_core.counter ? real::g_core.mask[0] : real::Lanes<T>();
    uint64_t kept = 0;
    for (int r = 0; r < repeats; ++r)
        for (uint64_t i = 0; i < lanes; ++i) {
            const uint8_t* bits = reinterpret_cast<const uint8_t*>(pattern) + r * pr * 32 + i / 8;
            if (mode == 0) real::Ub("vreducev2", bits, 1);
            if (((mode == 0 ? *bits : kFixed[mode]) >> i % 8 & 1) == 0) continue;
            real::Ub("vreducev2", to + kept, sizeof(T));
            to[kept++] = *s.At(r, static_cast<int>(i));
        }
    real::g_core.kept = kept;
}
inline int64_t get_rsvd_cnt() { return static_cast<int64_t>(real::g_core.kept); }

// The instruction has 32 bits of the address of what it gathers from; asc-devkit gives the whole of it before.
template <class T>
void vgather(T* to, uint32_t* offsets, uint32_t, int dr, int repeats) {
    const real::Operand<T> d("vgather", to, 1, dr);
    real::ByRepeat(real::Lanes<T>(), repeats, d, [&](int r, int i) {
        const uint32_t* offset = offsets + r * real::Lanes<T>() + i;
        real::Ub("vgather", offset, sizeof(*offset));
        const uint64_t at = real::g_core.gather_base + *offset;
        if (*offset % sizeof(T) != 0) real::Fail("vgather: offset %u", *offset);
        real::Ub("vgather", reinterpret_cast<void*>(at), sizeof(T));
        return *reinterpret_cast<const T*>(at);
    });
}

// (value, index) pairs of 32 values a repeat; the largest first, equal ones by index.
struct RealPair {
    float value;
    uint32_t index;
};
inline void vbitsort(float* to, float* values, uint32_t* indices, int repeats) {
    for (int r = 0; r < repeats; ++r) {
        RealPair pairs[32];
        real::Ub("vbitsort", values + r * 32, 128), real::Ub("vbitsort", indices + r * 32, 128);
        for (int i = 0; i < 32; ++i) pairs[i] = {values[r * 32 + i], indices[r * 32 + i]};
        std::stable_sort(pairs, pairs + 32, [](const RealPair& a, const RealPair& b) { return a.value > b.value; });
        real::Ub("vbitsort", to + r * 64, sizeof(pairs));
        memcpy(to + r * 64, pairs, sizeof(pairs));
    }
}
// Up to four sorted queues; repeats follow one another where all four are equally long and contiguous.
inline void vmrgsort4(float* to, float** queues, uint64_t lengths, uint64_t config) {
    const int repeats = static_cast<int>(config & 0xFF), valid = static_cast<int>(config >> 8 & 0xF);
    if (config >> 12 & 1) real::Fail("vmrgsort4: suspension is not modelled");
    uint64_t step = 0;
    for (int r = 0; r < repeats; ++r) {
        RealPair* out = reinterpret_cast<RealPair*>(to) + step;
        const RealPair *next[4], *end[4];
        uint64_t all = 0;
        for (int q = 0; q < 4; ++q) {
            const uint64_t length = valid >> q & 1 ? lengths >> 16 * q & 0xFFFF : 0;
            next[q] = length != 0 ? reinterpret_cast<const RealPair*>(queues[q]) + step : nullptr;
            end[q] = next[q] + length;
            if (length != 0) real::Ub("vmrgsort4", next[q], length * sizeof(RealPair));
            all += length;
        }
        real::Ub("vmrgsort4", out, all * sizeof(RealPair));
        for (uint64_t i = 0; i < all; ++i) {
            int best = -1;
            for (int q = 0; q < 4; ++q)
                if (next[q] != end[q] && (best < 0 || next[q]->value > next[best]->value)) best = q;
            out[i] = *next[best]++;
        }
        step += all;
    }
}

// ---- copies ----

inline void copy_gm_to_ubuf(void* to, void* from, int, int count, int blocks, int gap, int to_gap) {
    real::Load("copy_gm_to_ubuf", to, from, count, blocks * 32u, gap * 32u, to_gap * 32u, 0, 0, 1);
}
inline void copy_ubuf_to_gm(void* to, void* from, int, int count, int blocks, int gap, int to_gap) {
    real::Store("copy_ubuf_to_gm", to, from, count, blocks * 32u, gap * 32u, to_gap * 32u);
}
#define REAL_ALIGN(bits)                                                                                       \
    template <class T>                                                                                         \
    void copy_gm_to_ubuf_align_b##bits(T* to, T* from, int, int count, uint32_t bytes, int left, int right,    \
                                       uint32_t gap, uint32_t to_gap) {                                        \
        real::Load("copy_gm_to_ubuf_align", to, from, count, bytes, gap, to_gap * 32u, left, right, bits / 8); \
    }                                                                                                          \
    template <class T>                                                                                         \
    void copy_ubuf_to_gm_align_b##bits(T* to, T* from, int, int count, uint32_t bytes, int, int, uint32_t gap, \
                                       uint32_t to_gap) {                                                      \
        real::Store("copy_ubuf_to_gm_align", to, from, count, bytes, gap * 32u, to_gap);                       \
    }
REAL_ALIGN(8)
REAL_ALIGN(16)
REAL_ALIGN(32)
#undef REAL_ALIGN
inline void copy_ubuf_to_ubuf(void* to, void* from, int, int count, int blocks, int gap, int to_gap) {
    uint8_t* d = static_cast<uint8_t*>(to);
    const uint8_t* s = static_cast<const uint8_t*>(from);
    const uint32_t bytes = blocks * 32u;
    real::Aligned("copy_ubuf_to_ubuf", to), real::Aligned("copy_ubuf_to_ubuf", from);
    for (int i = 0; i < count; ++i, d += bytes + to_gap * 32, s += bytes + gap * 32) {
        real::Ub("copy_ubuf_to_ubuf", s, bytes), real::Ub("copy_ubuf_to_ubuf", d, bytes);
        memmove(d, s, bytes);
    }
}

// ---- state and order ----

inline void set_vector_mask(uint64_t high, uint64_t low) { real::g_core.mask[1] = high, real::g_core.mask[0] = low; }
inline void set_mov_pad_val(uint64_t value) { real::g_core.pad = value; }
inline void set_mask_count() { real::g_core.counter = true; }
inline void set_mask_norm() { real::g_core.counter = false; }
inline void set_flag(pipe_t from, pipe_t to, event_t id) { real::SetEvent(from, to, id); }
inline void wait_flag(pipe_t from, pipe_t to, event_t id) { real::WaitEvent(from, to, id); }
inline void ffts_cross_core_sync(pipe_t, uint64_t message) { real::Meet(static_cast<uint32_t>(message)); }
inline void wait_flag_dev(uint32_t id) { real::Await(id); }
inline void pipe_barrier(pipe_t) {}
inline void dsb(mem_dsb_t) {}
template <class... A>
void dcci(A&&...) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline uint64_t sbitset0(uint64_t value, int64_t bit) { return value & ~(1ull << bit); }
inline uint64_t sbitset1(uint64_t value, int64_t bit) { return value | 1ull << bit; }
inline int64_t sff0(uint64_t value) { return ~value == 0 ? -1 : __builtin_ctzll(~value); }
inline int64_t get_ctrl() { return static_cast<int64_t>(real::g_core.control); }
inline void set_ctrl(uint64_t value) { real::g_core.control = value; }
// What TPipe sets once, and no vector instruction that our kernels use reads; where CANN's own CPU library follows
// each buffer, and we need not.
#define REAL_NOTHING(name) \
    template <class... A>  \
    void name(A&&...) {}
REAL_NOTHING(set_atomic_none)
REAL_NOTHING(set_l1_3d_size)
REAL_NOTHING(set_padding)
REAL_NOTHING(AscendCBufAbsAddr)
REAL_NOTHING(AscendCBufAlloc)
REAL_NOTHING(AscendCBufDeque)
REAL_NOTHING(AscendCBufEnque)
REAL_NOTHING(AscendCBufFree)
REAL_NOTHING(AscendCBufGet)
REAL_NOTHING(AscendCBufInit)
REAL_NOTHING(AscendCQueCreate)
REAL_NOTHING(AscendCRecordPoolHierarchy)
REAL_NOTHING(AscendCTBufPoolInit)
REAL_NOTHING(AscendCTBufPoolResetCheck)
REAL_NOTHING(AscendCUpdateTbufPoolStatus)
#undef REAL_NOTHING

// ---- the rest: declared, so that the headers compile ----

#define REAL_REST(name)                       \
    template <class... A>                     \
    int64_t name(A&&...) {                    \
        real::Fail(#name " is not modelled"); \
    }
#define REAL_ROUNDINGS(name) \
    REAL_REST(name##a) REAL_REST(name##c) REAL_REST(name##f) REAL_REST(name##r) REAL_REST(name##z)
// clang-format off
REAL_REST(vaxpy) REAL_REST(vcadd) REAL_REST(vcgadd) REAL_REST(vcgmin) REAL_REST(vcpadd) REAL_REST(vln)
REAL_REST(vlrelu) REAL_REST(vrec) REAL_REST(vrsqrt) REAL_REST(vsqrt) REAL_ROUNDINGS(vconv_bf162s32)
REAL_ROUNDINGS(vconv_f162s16) REAL_ROUNDINGS(vconv_f162s32) REAL_ROUNDINGS(vconv_f162s4) REAL_ROUNDINGS(vconv_f162u8)
REAL_ROUNDINGS(vconv_f322s16) REAL_ROUNDINGS(vconv_f322s64) REAL_ROUNDINGS(vconv_s162f16)
REAL_ROUNDINGS(vconv_s642f32) REAL_REST(vaddrelu) REAL_REST(vaddreluconv_f162s8) REAL_REST(vaddreluconv_f322f16)
REAL_REST(vaddreluconv_s162s8) REAL_REST(vaddreluconv_vdeqs162b8) REAL_REST(vand) REAL_REST(vcmp_eq)
REAL_REST(vcmp_ge) REAL_REST(vcmp_gt) REAL_REST(vcmp_le) REAL_REST(vcmp_lt) REAL_REST(vcmp_ne)
REAL_REST(vconv_deqs162b8h) REAL_REST(vconv_deqs162b8l) REAL_REST(vconv_f162s4) REAL_REST(vconv_f162u8)
REAL_REST(vconv_s162f16) REAL_REST(vconv_s162f32) REAL_REST(vconv_s322s16) REAL_REST(vconv_s322s64)
REAL_REST(vconv_s42f16) REAL_REST(vconv_s642s32) REAL_REST(vconv_u82f16) REAL_REST(vconv_vdeqs162b8h)
REAL_REST(vconv_vdeqs162b8l) REAL_REST(vcopy) REAL_REST(vgatherb) REAL_REST(vld_va_reg) REAL_REST(vmadd)
REAL_REST(vmaddrelu) REAL_REST(vmla) REAL_REST(vmulconv_f162s8) REAL_REST(vmulconv_f162u8) REAL_REST(vnot)
REAL_REST(vor) REAL_REST(vrelu) REAL_REST(vsel) REAL_REST(vshl) REAL_REST(vshr) REAL_REST(vsubrelu)
REAL_REST(vsubreluconv_f162s8) REAL_REST(vsubreluconv_f322f16) REAL_REST(vsubreluconv_s162s8) REAL_REST(vtranspose)
REAL_REST(copy_cbuf_to_bt) REAL_REST(copy_cbuf_to_fbuf) REAL_REST(copy_cbuf_to_gm) REAL_REST(copy_gm_to_cbuf)
REAL_REST(copy_gm_to_cbuf_multi_nd2nz_b16) REAL_REST(copy_gm_to_cbuf_multi_nd2nz_b32s)
REAL_REST(copy_gm_to_cbuf_multi_nd2nz_b8) REAL_REST(copy_matrix_cbuf_to_cc) REAL_REST(copy_matrix_cc_to_cbuf)
REAL_REST(copy_matrix_cc_to_gm) REAL_REST(create_ca_matrix) REAL_REST(create_ca_matrix_bf16)
REAL_REST(create_cb_matrix) REAL_REST(create_cb_matrix_bf16) REAL_REST(create_cbuf_matrix)
REAL_REST(create_cbuf_matrix_bf16) REAL_REST(img2colv2_cbuf_to_ca) REAL_REST(img2colv2_cbuf_to_ca_s4)
REAL_REST(img2colv2_cbuf_to_cb) REAL_REST(load_cbuf_to_ca) REAL_REST(load_cbuf_to_ca_s4)
REAL_REST(load_cbuf_to_ca_transpose) REAL_REST(load_cbuf_to_cb) REAL_REST(load_cbuf_to_cb_s4)
REAL_REST(load_cbuf_to_cb_sp) REAL_REST(load_cbuf_to_cb_transpose) REAL_REST(load_cbuf_to_cb_transpose_s4)
REAL_REST(load_gm_to_ca) REAL_REST(load_gm_to_cb) REAL_REST(load_gm_to_cbuf) REAL_REST(mad) REAL_REST(mad_s4)
REAL_REST(mad_sp) REAL_REST(scatter_vnchwconv_b16) REAL_REST(scatter_vnchwconv_b32) REAL_REST(scatter_vnchwconv_b8)
REAL_REST(bcnt0) REAL_REST(bcnt1) REAL_REST(clz) REAL_REST(conv_f322f16o) REAL_REST(conv_f322s32a)
REAL_REST(conv_f322s32c) REAL_REST(conv_f322s32f) REAL_REST(conv_f322s32r) REAL_REST(dc_preload)
REAL_REST(get_acc_val) REAL_REST(get_arch_ver) REAL_REST(get_block_idx) REAL_REST(get_block_num)
REAL_REST(get_cmpmask) REAL_REST(get_coreid) REAL_REST(get_ffts_base_addr) REAL_REST(get_fpc)
REAL_REST(get_icache_prl_st) REAL_REST(get_imm) REAL_REST(get_max_min_cnt) REAL_REST(get_overflow_status)
REAL_REST(get_pc) REAL_REST(get_st_atomic_cfg) REAL_REST(get_status) REAL_REST(get_subblockdim)
REAL_REST(get_subblockid) REAL_REST(get_vms4_sr) REAL_REST(hset_flag) REAL_REST(hwait_flag) REAL_REST(ld_dev)
REAL_REST(preload) REAL_REST(set_aipp_spr_0) REAL_REST(set_aipp_spr_1) REAL_REST(set_aipp_spr_18)
REAL_REST(set_aipp_spr_19) REAL_REST(set_aipp_spr_2) REAL_REST(set_aipp_spr_20) REAL_REST(set_aipp_spr_21)
REAL_REST(set_aipp_spr_3) REAL_REST(set_aipp_spr_4) REAL_REST(set_aipp_spr_5) REAL_REST(set_aipp_spr_6)
REAL_REST(set_aipp_spr_7) REAL_REST(set_aipp_spr_8) REAL_REST(set_aipp_spr_9) REAL_REST(set_atomic_add)
REAL_REST(set_atomic_bf16) REAL_REST(set_atomic_f16) REAL_REST(set_atomic_f32) REAL_REST(set_atomic_max)
REAL_REST(set_atomic_min) REAL_REST(set_atomic_s16) REAL_REST(set_atomic_s32) REAL_REST(set_atomic_s8)
REAL_REST(set_cmpmask) REAL_REST(set_data_exp_0) REAL_REST(set_data_exp_1) REAL_REST(set_data_exp_2)
REAL_REST(set_data_exp_3) REAL_REST(set_ffts_base_addr) REAL_REST(set_fmatrix) REAL_REST(set_fmatrix_b)
REAL_REST(set_fpc) REAL_REST(set_l3d_rpt) REAL_REST(set_lrelu_alpha) REAL_REST(set_nd_para) REAL_REST(set_quant_pre)
REAL_REST(set_st_atomic_cfg) REAL_REST(set_va_reg_sb) REAL_REST(sff1) REAL_REST(sflbits) REAL_REST(st_dev)
REAL_REST(trap) REAL_REST(__ib_set_stub) REAL_REST(__ib_wait_stub) REAL_REST(__sync_all_stub)
// clang-format on
#undef REAL_REST
#undef REAL_ROUNDINGS
