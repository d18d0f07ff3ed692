// Cast, Duplicate and Copy in their count and mask forms.
#pragma once

#include "twin/api/copy.h"
#include "twin/math/bit_masks.h"
#include "twin/math/cast.h"
#include "twin/vector/call.h"

namespace AscendC {

namespace detail {

template <class D, class S>
struct CastBody {
    RoundMode mode;
    float scale;
    void operator()(uintptr_t to, const uintptr_t* from, uint32_t n) const {
        twin::CastArray(UbPointer<D>(to), UbPointer<S>(from[0]), mode, n, scale);
    }
};
template <class D, class S>
inline CastBody<D, S> CheckedCast(RoundMode mode, const twin::Loc& loc) {
    static_assert(twin::kCastLegal<D, S>, "Cast: no such conversion on A2/A3");
    TWIN_RAISE_IF((!twin::CastModeLegal<D, S>(mode)), kBadArgument, loc,
                  "Cast: round mode %d is not allowed for this conversion", static_cast<int>(mode));
    return {mode, twin::current_core().deq_scale};
}

template <class T>
struct FillBody {
    T value;
    void operator()(uintptr_t to, const uintptr_t*, uint32_t n) const { twin::FillArray(UbPointer<T>(to), value, n); }
};
template <>
struct Forwards<FillBody<float>> {
    static constexpr bool kBegins = true;
    static bool Do(const FillBody<float>& body, uintptr_t to, const uintptr_t*, uint32_t n) {
        return twin::ForwardFill(twin::current_core().forward, to, n, body.value);
    }
};
template <class T>
struct CopyBody {
    void operator()(uintptr_t to, const uintptr_t* from, uint32_t n) const {
        std::memmove(UbPointer<T>(to), UbPointer<T>(from[0]), n * sizeof(T));
    }
};
template <class D, class S>
constexpr uint32_t kCastLanes = twin::kRepeatBytes / (sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S));
inline void CheckCopyStrides(const CopyRepeatParams& p, const twin::Loc& loc) {
    TWIN_RAISE_IF(p.dstRepeatSize > 4095 || p.srcRepeatSize > 4095, kBadArgument, loc,
                  "Copy: a repeat stride of %u is over 4095", std::max(p.dstRepeatSize, p.srcRepeatSize));
}

}  // namespace detail

template <class T, class U>
inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, const uint32_t count,
                 TWIN_CALLER) {
    const detail::CastBody<T, U> body = detail::CheckedCast<T, U>(roundMode, loc);
    const uint32_t n = detail::CheckElementCount("Cast", count, loc);
    SetMaskNorm();
    ResetMask();
    if (n == 0) return;
    T* to = dst.Span(n, loc, "Cast destination");
    const U* from = src.Span(n, loc, "Cast source");
    const uintptr_t t = reinterpret_cast<uintptr_t>(to), f = reinterpret_cast<uintptr_t>(from);
    const bool apart = t + n * sizeof(T) <= f || f + n * sizeof(U) <= t;
    const bool in_place = t == f && sizeof(T) <= sizeof(U);
    constexpr uint32_t kWidth = detail::kCastLanes<T, U>;
    if (!apart && !in_place) {
        // What repeat i wrote ends at (i + 1) * kWidth * sizeof(T); the next one to read starts there or
        // later.
        const uint32_t repeats = (n + kWidth - 1) / kWidth;
        for (uint32_t i = 0; i + 1 < repeats; ++i) {
            const uintptr_t written = t + uint64_t{i + 1} * kWidth * sizeof(T);
            if (written <= f + uint64_t{i + 1} * kWidth * sizeof(U) || t >= f + n * sizeof(U)) continue;
            TWIN_RULE_IF(true, kCastOverlap, kBadArgument, loc,
                         "Cast: destination and source overlap, and repeat %u overwrites what later ones read", i);
            break;
        }
    }
    if constexpr (!twin::kChecked && twin::kOneOf<U, half, bfloat16_t> && twin::kOneOf<T, float>) {
        twin::Forward& forward = twin::current_core().forward;
        if (forward.Any() && twin::ForwardCast(forward, t, f, n, twin::AddendTypeOf<U>())) return;
    }
    if constexpr (!twin::kChecked && twin::kOneOf<T, half, bfloat16_t> && twin::kOneOf<U, float>) {
        const bool nearest = body.mode == twin::RoundMode::CAST_RINT || body.mode == twin::RoundMode::CAST_NONE;
        twin::Forward& forward = twin::current_core().forward;
        if (nearest && forward.Any() && twin::ForwardRound(forward, t, f, n, twin::AddendTypeOf<T>())) return;
    }
    twin::IssueExact(twin::PartOf({"Cast", loc}, {t, n * sizeof(T)}, {f, n * sizeof(U)}), [=] {
        if (apart || in_place) {
            twin::RunBest([=] { twin::CastArray(to, from, body.mode, n, body.scale); });
        } else {  // right where no repeat reads what an earlier one wrote
            detail::ByRepeats<U>(body, 8 * sizeof(T), t, &f, n);
        }
    });
}

inline void SetDeqScale(half scale) { twin::current_core().deq_scale = static_cast<float>(scale); }

template <class T>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, const int32_t& count, TWIN_CALLER) {
    static_assert(twin::kDuplicateType<T>, "Duplicate: 16- and 32-bit types only");
    detail::CountCall("Duplicate", loc, count, false, detail::FillBody<T>{scalarValue}, dst);
}

template <class T, class U, bool isSetMask = true, class M>
inline void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& roundMode, M mask,
                 const int32_t repeatTime, const UnaryRepeatParams& repeatParams, TWIN_CALLER) {
    const auto body = detail::CheckedCast<T, U>(roundMode, loc);
    const detail::Work work = detail::WorkOf<isSetMask>(mask, repeatTime, detail::kCastLanes<T, U>, loc);
    detail::MaskedCall({"Cast", loc}, work, {false, dst.data() == src.data() && sizeof(T) <= sizeof(U)}, body,
                       detail::Strided<T>{dst, repeatParams.dstBlkStride, repeatParams.dstRepStride},
                       detail::Strided<U>{src, repeatParams.srcBlkStride, repeatParams.srcRepStride});
}
template <class T, bool isSetMask = true, class M>
inline void Duplicate(const LocalTensor<T>& dst, const T& scalarValue, M mask, const int32_t repeatTime,
                      const uint16_t dstBlockStride, const uint8_t dstRepeatStride, TWIN_CALLER) {
    static_assert(twin::kDuplicateType<T>, "Duplicate: 16- and 32-bit types only");
    const detail::Work work = detail::WorkOf<isSetMask>(mask, repeatTime, twin::kLanes<T>, loc);
    detail::MaskedCall({"Duplicate", loc}, work, {}, detail::FillBody<T>{scalarValue},
                       detail::Strided<T>{dst, dstBlockStride, dstRepeatStride});
}
// In counter mode the mask counts the elements of each repeat, which then may be more than 8 blocks.
template <class T, bool isSetMask = true, class M>
inline void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, M mask, const int32_t repeatTime,
                 const CopyRepeatParams& repeatParams, TWIN_CALLER) {
    static_assert(twin::kDuplicateType<T>, "Copy: 16- and 32-bit types only");
    detail::CheckCopyStrides(repeatParams, loc);
    detail::Work work = detail::WorkOf<isSetMask>(mask, repeatTime, twin::kLanes<T>, loc);
    if (work.counted && work.elements > twin::kLanes<T>) {
        for (int32_t r = 0; r < repeatTime; ++r) {
            const LocalTensor<T> to = dst[r * repeatParams.dstRepeatSize * twin::kBlockLanes<T>],
                                 from = src[r * repeatParams.srcRepeatSize * twin::kBlockLanes<T>];
            detail::MaskedCall({"Copy", loc}, work, {}, detail::CopyBody<T>{},
                               detail::Strided<T>{to, repeatParams.dstStride, 8u * repeatParams.dstStride},
                               detail::Strided<T>{from, repeatParams.srcStride, 8u * repeatParams.srcStride});
        }
        return;
    }
    if (work.counted) {
        detail::CheckMask(work.elements, twin::kLanes<T>, loc);
        work.lanes.mask = twin::LaneMask::First(static_cast<uint32_t>(work.elements));
        work.counted = false;
    }
    detail::MaskedCall({"Copy", loc}, work, {}, detail::CopyBody<T>{},
                       detail::Strided<T>{dst, repeatParams.dstStride, repeatParams.dstRepeatSize},
                       detail::Strided<T>{src, repeatParams.srcStride, repeatParams.srcRepeatSize});
}

// ---- DataCopy within UB by DataCopyParams: a vector instruction.

template <class T>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params, TWIN_CALLER) {
    constexpr const char* kName = "DataCopy UB->UB";
    detail::CheckPieces(params.blockCount, 0, 1, loc);
    const uint32_t count = params.blockCount;
    const uint64_t bytes = detail::Blocks(params.blockLen);
    if (count == 0 || bytes == 0) return;
    const uint64_t from_step = bytes + detail::Blocks(params.srcGap), to_step = bytes + detail::Blocks(params.dstGap);
    const uint64_t from_bytes = detail::Extent(count, bytes, from_step),
                   to_bytes = detail::Extent(count, bytes, to_step);
    const twin::Access to = dst.Part(to_bytes / sizeof(T), loc, kName);
    const twin::Access from = src.Part(from_bytes / sizeof(T), loc, kName);
    if (to.begin != from.begin || to_step != from_step) detail::CheckApart(kName, "source", to, from, loc);
    const auto access = [=](uintptr_t begin, uint64_t step) {
        return step == bytes ? twin::Access{begin, count * bytes} : twin::Access{begin, bytes, count, step};
    };
    twin::Issue(twin::PartOf({kName, loc}, access(to.begin, to_step), access(from.begin, from_step)), [=] {
        for (uint32_t i = 0; i < count; ++i) {
            std::memmove(detail::UbPointer<T>(to.begin + i * to_step), detail::UbPointer<T>(from.begin + i * from_step),
                         bytes);
        }
    });
}

}  // namespace AscendC
