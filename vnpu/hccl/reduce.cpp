#include "comm.h"

#include <cmath>
#include <type_traits>

#include "twin/math/numeric.h"

namespace vnpu {
namespace {

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

// Elements of T, reduced as Wide.
template <typename T, typename Wide = T>
void ReduceAs(ReduceOp op, void* out, const void* const* sources, int ranks, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
        auto total = static_cast<Wide>(static_cast<const T*>(sources[0])[i]);
        for (int r = 1; r < ranks; ++r)
            total = Combine(op, total, static_cast<Wide>(static_cast<const T*>(sources[r])[i]));
        static_cast<T*>(out)[i] = static_cast<T>(total);
    }
}

// By DataType; types without a reduction are moved only.
constexpr struct {
    uint32_t bytes;
    const char* name;
    void (*reduce)(ReduceOp, void*, const void* const*, int, uint64_t);
} kTypes[] = {{1, "int8", ReduceAs<int8_t>},
              {2, "int16", ReduceAs<int16_t>},
              {4, "int32", ReduceAs<int32_t>},
              {2, "fp16", ReduceAs<half, float>},
              {4, "fp32", ReduceAs<float>},
              {8, "int64", ReduceAs<int64_t>},
              {8, "uint64", ReduceAs<uint64_t>},
              {1, "uint8", ReduceAs<uint8_t>},
              {2, "uint16", ReduceAs<uint16_t>},
              {4, "uint32", ReduceAs<uint32_t>},
              {8, "fp64", ReduceAs<double>},
              {2, "bf16", ReduceAs<bfloat16_t, float>},
              {16, "int128", nullptr},
              {0, "?", nullptr},
              {1, "hif8", nullptr},
              {1, "fp8e4m3", nullptr},
              {1, "fp8e5m2", nullptr},
              {1, "fp8e8m0", nullptr}};
constexpr size_t kNone = 13;

const auto& RowOf(DataType type) {
    const auto index = static_cast<size_t>(type);
    return kTypes[index < std::size(kTypes) ? index : kNone];
}

}  // namespace

uint32_t SizeOf(DataType type) { return RowOf(type).bytes; }
const char* NameOf(DataType type) { return RowOf(type).name; }
bool Reducible(DataType type) { return RowOf(type).reduce != nullptr; }

const char* NameOf(ReduceOp op) {
    static const char* const names[] = {"sum", "prod", "max", "min"};
    const auto index = static_cast<size_t>(op);
    return index < std::size(names) ? names[index] : "?";
}

void Reduce(DataType type, ReduceOp op, void* out, const void* const* sources, int ranks, uint64_t count) {
    RowOf(type).reduce(op, out, sources, ranks, count);
}

}  // namespace vnpu
