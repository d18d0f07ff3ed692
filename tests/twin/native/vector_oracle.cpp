// The vector arithmetic of the twin behind a C ABI, for tests that compare it with numpy. Element types and
// ops are numbered as `Types` and the op lists have them. Functions return 0 for what A2/A3 lack.
#include <tuple>

#include "twin/math/array_ops.h"

namespace {

using namespace twin;  // NOLINT

using Types =
    std::tuple<half, bfloat16_t, float, int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t>;
using BinaryOps = std::tuple<AddOp, SubOp, MulOp, DivOp, MaxOp, MinOp, AndOp, OrOp, LeakyReluOp, ShiftLeftOp,
                             ShiftRightOp, ShiftRightRoundOp>;
using UnaryOps = std::tuple<AbsOp, ReluOp, NotOp, SqrtOp, ReciprocalOp, RsqrtOp, ExpOp, LnOp>;

// Calls body with a T{} of the list's element number `which`, if there is one.
template <class List, size_t kAt = 0, class Body>
int Pick(int which, Body&& body) {
    if constexpr (kAt == std::tuple_size_v<List>) {
        return 0;
    } else {
        if (which != static_cast<int>(kAt)) return Pick<List, kAt + 1>(which, body);
        return body(std::tuple_element_t<kAt, List>{});
    }
}

template <class T>
T* As(void* p) {
    return static_cast<T*>(p);
}
template <class T>
const T* As(const void* p) {
    return static_cast<const T*>(p);
}

// The same for half and float alone, by index into Types.
template <class Body>
int PickReal(int type, Body&& body) {
    return Pick<Types>(type, [&](auto t) {
        if constexpr (kRealType<decltype(t)>) {
            body(t);
            return 1;
        } else {
            return 0;
        }
    });
}

// Strides and a mask as the test passes them: {block, repeat}, {low, high}.
Strides StridesOf(const uint32_t* raw) { return {raw[0], raw[1]}; }
LaneMask MaskOf(const uint64_t* raw) { return {{raw[0], raw[1]}}; }

}  // namespace

extern "C" {

int oracle_binary(int op, int type, void* dst, const void* a, const void* b, uint32_t n) {
    return Pick<BinaryOps>(op, [&](auto o) {
        return Pick<Types>(type, [&](auto t) {
            using Op = decltype(o);
            using T = decltype(t);
            if constexpr (Op::template kLegal<T>) {
                BinaryArray<Op>(As<T>(dst), As<T>(a), As<T>(b), n);
                return 1;
            } else {
                return 0;
            }
        });
    });
}

int oracle_scalar(int op, int type, void* dst, const void* src, const void* scalar, uint32_t n) {
    return Pick<BinaryOps>(op, [&](auto o) {
        return Pick<Types>(type, [&](auto t) {
            using Op = decltype(o);
            using T = decltype(t);
            if constexpr (Op::template kLegal<T>) {
                ScalarArray<Op>(As<T>(dst), As<T>(src), *As<T>(scalar), n);
                return 1;
            } else {
                return 0;
            }
        });
    });
}

int oracle_unary(int op, int type, void* dst, const void* src, uint32_t n) {
    return Pick<UnaryOps>(op, [&](auto o) {
        return Pick<Types>(type, [&](auto t) {
            using Op = decltype(o);
            using T = decltype(t);
            if constexpr (Op::template kLegal<T>) {
                UnaryArray<Op>(As<T>(dst), As<T>(src), n);
                return 1;
            } else {
                return 0;
            }
        });
    });
}

// b null: Axpy with the scalar.
int oracle_multiply_add(int dst_type, int src_type, void* dst, const void* a, const void* b,
                        const void* scalar, uint32_t n) {
    return Pick<Types>(dst_type, [&](auto d) {
        return Pick<Types>(src_type, [&](auto s) {
            using D = decltype(d);
            using S = decltype(s);
            if constexpr (kMultiplyAddLegal<D, S>) {
                if (b == nullptr) {
                    AxpyArray(As<D>(dst), As<S>(a), *As<S>(scalar), n);
                } else {
                    MulAddDstArray(As<D>(dst), As<S>(a), As<S>(b), n);
                }
                return 1;
            } else {
                return 0;
            }
        });
    });
}

int oracle_fill(int type, void* dst, const void* value, uint32_t n) {
    return Pick<Types>(type, [&](auto t) {
        using T = decltype(t);
        if constexpr (kDuplicateType<T>) {
            FillArray(As<T>(dst), *As<T>(value), n);
            return 1;
        } else {
            return 0;
        }
    });
}

// Add in its mask form: what a wrapper does with ForEachLane and LaneOffset.
void oracle_add_repeats(float* dst, const float* a, const half* b, const uint64_t* mask, uint32_t repeats,
                        const uint32_t* dst_strides, const uint32_t* a_strides, const uint32_t* b_strides) {
    ForEachLane(kLanes<float>, MaskOf(mask), repeats, [&](uint32_t r, uint32_t lane) {
        const float other = LoadAt(b, LaneOffset<half>(r, lane, StridesOf(b_strides)));
        BinaryArray<AddOp>(dst + LaneOffset<float>(r, lane, StridesOf(dst_strides)),
                           a + LaneOffset<float>(r, lane, StridesOf(a_strides)), &other, 1);
    });
}

void oracle_first_lanes(uint64_t* bits, uint32_t n) {
    const LaneMask mask = LaneMask::First(n);
    bits[0] = mask.bits[0];
    bits[1] = mask.bits[1];
}

// ---- reductions: op 0 sum, 1 maximum, 2 minimum ----

int oracle_reduce(int op, int type, void* dst, const void* src, uint32_t n, int with_index) {
    return PickReal(type, [&](auto t) {
        using T = decltype(t);
        if (op == 0) ReduceSumArray(As<T>(dst), As<T>(src), n);
        if (op == 1) ReduceExtremeArray<true>(As<T>(dst), As<T>(src), n, with_index != 0);
        if (op == 2) ReduceExtremeArray<false>(As<T>(dst), As<T>(src), n, with_index != 0);
    });
}

int oracle_sum_rows(int type, void* dst, const void* src, uint32_t rows, uint32_t inner, uint32_t n) {
    return PickReal(type, [&](auto t) {
        using T = decltype(t);
        SumRows(As<T>(dst), As<T>(src), rows, inner, n);
    });
}

int oracle_reduce_sum_repeats(int type, void* dst, const void* src, const uint64_t* mask, uint32_t repeats,
                              uint32_t stride) {
    return PickReal(type, [&](auto t) {
        using T = decltype(t);
        ReduceSumRepeats(As<T>(dst), As<T>(src), MaskOf(mask), repeats, stride);
    });
}

int oracle_whole(int op, int type, void* dst, const void* src, const uint64_t* mask, uint32_t repeats,
                 uint32_t dst_stride, const uint32_t* strides, int order) {
    return PickReal(type, [&](auto t) {
        using T = decltype(t);
        const auto by = static_cast<ReduceOrder>(order);
        T* to = As<T>(dst);
        const T* from = As<T>(src);
        if (op == 0) WholeSum(to, from, MaskOf(mask), repeats, dst_stride, StridesOf(strides));
        if (op == 1) WholeExtreme<true>(to, from, MaskOf(mask), repeats, dst_stride, StridesOf(strides), by);
        if (op == 2) WholeExtreme<false>(to, from, MaskOf(mask), repeats, dst_stride, StridesOf(strides), by);
    });
}

// op 3: PairReduceSum
int oracle_block(int op, int type, void* dst, const void* src, const uint64_t* mask, uint32_t repeats,
                 uint32_t dst_stride, const uint32_t* strides) {
    return PickReal(type, [&](auto t) {
        using T = decltype(t);
        T* to = As<T>(dst);
        const T* from = As<T>(src);
        const Strides s = StridesOf(strides);
        if (op == 0) BlockReduce<BlockOp::kSum>(to, from, MaskOf(mask), repeats, dst_stride, s);
        if (op == 1) BlockReduce<BlockOp::kMax>(to, from, MaskOf(mask), repeats, dst_stride, s);
        if (op == 2) BlockReduce<BlockOp::kMin>(to, from, MaskOf(mask), repeats, dst_stride, s);
        if (op == 3) PairSum(to, from, MaskOf(mask), repeats, dst_stride, s);
    });
}

// ---- masks and moves ----

// 2: the type is comparable, but not in this mode.
int oracle_compare(int type, int mode, uint8_t* dst, const void* a, const void* b, uint32_t n, int scalar) {
    return Pick<Types>(type, [&](auto t) {
        using T = decltype(t);
        if constexpr (kCompareLegal<T>) {
            const auto cmp = static_cast<CMPMODE>(mode);
            if (scalar != 0) {
                CompareScalarArray(dst, As<T>(a), *As<T>(b), cmp, n);
            } else {
                CompareArray(dst, As<T>(a), As<T>(b), cmp, n);
            }
            return CompareModeLegal<T>(cmp) ? 1 : 2;
        } else {
            return 0;
        }
    });
}

int oracle_select(int type, int mode, void* dst, const uint8_t* mask, const void* a, const void* b,
                  uint32_t n) {
    return PickReal(type, [&](auto t) {
        using T = decltype(t);
        const auto how = static_cast<SELMODE>(mode);
        if (how == SELMODE::VSEL_TENSOR_SCALAR_MODE) {
            SelectScalarArray(As<T>(dst), mask, As<T>(a), *As<T>(b), n);
        } else {
            SelectArray(As<T>(dst), mask, As<T>(a), As<T>(b), how, n);
        }
    });
}

// bits null: the fixed pattern. shape: lanes, repeats, source block and repeat stride, bits stride.
// Returns -1 for a type that A2/A3 lack.
int64_t oracle_gather(int type, void* dst, const void* src, int pattern, const void* bits,
                      const uint32_t* shape) {
    int64_t kept = -1;
    Pick<Types>(type, [&](auto t) {
        using T = decltype(t);
        if constexpr (kGatherMaskLegal<T>) {
            const GatherShape walk{shape[0], shape[1], {shape[2], shape[3]}, shape[4]};
            if (bits == nullptr) {
                kept = static_cast<int64_t>(
                    GatherPattern(As<T>(dst), As<T>(src), static_cast<uint8_t>(pattern), walk));
            } else {
                kept = static_cast<int64_t>(GatherBits(As<T>(dst), As<T>(src), As<BitsOf<T>>(bits), walk));
            }
        }
        return 0;
    });
    return kept;
}

int oracle_brcb(int type, void* dst, const void* src, uint32_t repeats, const uint32_t* strides) {
    return Pick<Types>(type, [&](auto t) {
        using T = decltype(t);
        if constexpr (kDuplicateType<T>) {
            BroadcastBlocks(As<T>(dst), As<T>(src), repeats, StridesOf(strides));
            return 1;
        } else {
            return 0;
        }
    });
}

// step null: CreateVecIndex.
int oracle_progression(int type, void* dst, const void* first, const void* step, uint32_t n) {
    return Pick<Types>(type, [&](auto t) {
        using T = decltype(t);
        if constexpr (kIndexType<T>) {
            if (step == nullptr) {
                IndexArray(As<T>(dst), *As<T>(first), n);
            } else {
                ProgressionArray(As<T>(dst), *As<T>(first), *As<T>(step), n);
            }
            return 1;
        } else {
            return 0;
        }
    });
}

// ---- sorting ----

int oracle_sort(int type, void* dst, void* tmp, const void* score, const uint32_t* index, uint32_t repeats,
                int full) {
    return PickReal(type, [&](auto t) {
        using T = decltype(t);
        if (full != 0) {
            FullSortArray(As<T>(dst), As<T>(tmp), As<T>(score), index, repeats);
        } else {
            Sort32Array(As<T>(dst), As<T>(score), index, repeats);
        }
    });
}

int oracle_merge(int type, void* dst, const void* const* src, const uint16_t* length, uint32_t lists,
                 int suspend, uint32_t repeats, uint32_t* used) {
    return PickReal(type, [&](auto t) {
        using T = decltype(t);
        const T* from[4] = {};
        for (uint32_t i = 0; i < lists; ++i) from[i] = As<T>(src[i]);
        MergeSortArray(As<T>(dst), from, length, lists, suspend != 0, repeats, used);
    });
}

int oracle_extract(int type, void* score, uint32_t* index, const void* entries, uint32_t repeats) {
    return PickReal(type, [&](auto t) {
        using T = decltype(t);
        ExtractArray(As<T>(score), index, As<T>(entries), repeats);
    });
}

}  // extern "C"
