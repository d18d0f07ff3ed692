#include "comm.h"

#include <cmath>
#include <cstring>
#include <type_traits>

namespace vnpu {
namespace {

float FromBits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
uint32_t ToBits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct Bf16 {
    uint16_t bits;
};
struct Fp16 {
    uint16_t bits;
};

float Load(Bf16 value) { return FromBits(static_cast<uint32_t>(value.bits) << 16); }

float Load(Fp16 value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t exponent = value.bits >> 10 & 31u;
    const uint32_t fraction = value.bits & 0x3ffu;
    if (exponent == 31) return FromBits(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0) {
        const float magnitude = std::ldexp(static_cast<float>(fraction), -24);
        return sign ? -magnitude : magnitude;
    }
    return FromBits(sign | (exponent + 112) << 23 | fraction << 13);
}

template <typename T>
T Load(T value) {
    return value;
}

void Store(float value, Bf16* out) {
    const uint32_t bits = ToBits(value);
    if (std::isnan(value)) {
        out->bits = static_cast<uint16_t>(bits >> 16 | 0x40u);
        return;
    }
    out->bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

void Store(float value, Fp16* out) {
    const uint32_t bits = ToBits(value);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u | (magnitude >> 13 & 0x1ffu);
    } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24
        half = static_cast<uint32_t>(std::nearbyint(std::ldexp(FromBits(magnitude), 24)));
    } else {
        half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    }
    out->bits = static_cast<uint16_t>(sign | half);
}

template <typename T>
void Store(T value, T* out) {
    *out = value;
}

template <typename T>
bool IsNan(T value) {
    if constexpr (std::is_floating_point_v<T>) return std::isnan(value);
    return false;
}

template <typename T>
T Combine(ReduceOp op, T a, T b) {
    if (op == ReduceOp::kMax || op == ReduceOp::kMin) {
        if (IsNan(a)) return a;
        if (IsNan(b)) return b;
        return (op == ReduceOp::kMax ? b > a : b < a) ? b : a;
    }
    if constexpr (std::is_integral_v<T>) {
        const auto x = static_cast<uint64_t>(a);
        const auto y = static_cast<uint64_t>(b);
        return static_cast<T>(op == ReduceOp::kSum ? x + y : x * y);
    } else {
        return op == ReduceOp::kSum ? a + b : a * b;
    }
}

template <typename T>
void ReduceAs(ReduceOp op, void* out, const void* const* sources, int ranks, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
        auto total = Load(static_cast<const T*>(sources[0])[i]);
        for (int r = 1; r < ranks; ++r)
            total = Combine(op, total, Load(static_cast<const T*>(sources[r])[i]));
        Store(total, static_cast<T*>(out) + i);
    }
}

}  // namespace

uint32_t SizeOf(DataType type) {
    switch (type) {
        case DataType::kInt8:
        case DataType::kUint8:
        case DataType::kHif8:
        case DataType::kFp8E4M3:
        case DataType::kFp8E5M2:
        case DataType::kFp8E8M0: return 1;
        case DataType::kInt16:
        case DataType::kUint16:
        case DataType::kFp16:
        case DataType::kBf16: return 2;
        case DataType::kInt32:
        case DataType::kUint32:
        case DataType::kFp32: return 4;
        case DataType::kInt64:
        case DataType::kUint64:
        case DataType::kFp64: return 8;
        case DataType::kInt128: return 16;
    }
    return 0;
}

const char* NameOf(DataType type) {
    static const char* const names[] = {"int8",   "int16", "int32",  "fp16",    "fp32",    "int64",
                                        "uint64", "uint8", "uint16", "uint32",  "fp64",    "bf16",
                                        "int128", "?",     "hif8",   "fp8e4m3", "fp8e5m2", "fp8e8m0"};
    const int index = static_cast<int>(type);
    return index >= 0 && index < 18 ? names[index] : "?";
}

const char* NameOf(ReduceOp op) {
    static const char* const names[] = {"sum", "prod", "max", "min"};
    const int index = static_cast<int>(op);
    return index >= 0 && index < 4 ? names[index] : "?";
}

bool Reducible(DataType type) { return static_cast<int>(type) >= 0 && type <= DataType::kBf16; }

void Reduce(DataType type, ReduceOp op, void* out, const void* const* sources, int ranks, uint64_t count) {
    switch (type) {
        case DataType::kInt8: return ReduceAs<int8_t>(op, out, sources, ranks, count);
        case DataType::kUint8: return ReduceAs<uint8_t>(op, out, sources, ranks, count);
        case DataType::kInt16: return ReduceAs<int16_t>(op, out, sources, ranks, count);
        case DataType::kUint16: return ReduceAs<uint16_t>(op, out, sources, ranks, count);
        case DataType::kInt32: return ReduceAs<int32_t>(op, out, sources, ranks, count);
        case DataType::kUint32: return ReduceAs<uint32_t>(op, out, sources, ranks, count);
        case DataType::kInt64: return ReduceAs<int64_t>(op, out, sources, ranks, count);
        case DataType::kUint64: return ReduceAs<uint64_t>(op, out, sources, ranks, count);
        case DataType::kFp16: return ReduceAs<Fp16>(op, out, sources, ranks, count);
        case DataType::kBf16: return ReduceAs<Bf16>(op, out, sources, ranks, count);
        case DataType::kFp32: return ReduceAs<float>(op, out, sources, ranks, count);
        case DataType::kFp64: return ReduceAs<double>(op, out, sources, ranks, count);
        default: return;  // Reducible() has been asked
    }
}

}  // namespace vnpu
