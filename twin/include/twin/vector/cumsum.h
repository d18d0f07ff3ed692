// CumSum: running sums along the rows or down the columns.
#pragma once

#include "twin/vector/call.h"
#include "twin/vector/select.h"

namespace AscendC {

enum class CumSumAlgorithm { CUMSUM_ALGORITHM_LINEBYLINE = 0, CUMSUM_ALGORITHM_SKLANSKY = 1 };
struct CumSumConfig {
    bool isLastAxis{true};
    bool isReuseSource{false};
    bool outputLastRow{false};
    CumSumAlgorithm algorithm{CumSumAlgorithm::CUMSUM_ALGORITHM_LINEBYLINE};
};
struct CumSumInfo {
    uint32_t outter{0};  // rows
    uint32_t inner{0};   // elements of a row, whole 32 bytes
};
inline constexpr CumSumConfig defaultCumSumConfig = {true, false, true};

namespace detail {

// Sums are float, rounded to T at the end. A float sum begins with +0, as on the hardware; -0 changes no number.
template <class T, bool kLastAxis>
inline void CumSumArray(T* to, const T* from, const CumSumInfo& info) {
    const uint32_t lines = kLastAxis ? info.outter : info.inner, length = kLastAxis ? info.inner : info.outter;
    const uint32_t line_step = kLastAxis ? info.inner : 1, step = kLastAxis ? 1 : info.inner;
    for (uint32_t line = 0; line < lines; ++line) {
        float sum = sizeof(T) == sizeof(float) ? 0.0f : -0.0f;
        for (uint32_t i = 0; i < length; ++i) {
            const uint32_t at = line * line_step + i * step;
            sum += static_cast<float>(from[at]);
            to[at] = static_cast<T>(sum);
        }
    }
}

template <class T, const CumSumConfig& config>
inline void CumSum(const LocalTensor<T>& dst, const LocalTensor<T>& lastRow, const LocalTensor<T>& src,
                   const LocalTensor<uint8_t>* scratch, const CumSumInfo& info, const twin::Loc& loc) {
    static_assert(twin::kRealType<T>, "CumSum: half and float only");
    static_assert(config.algorithm == CumSumAlgorithm::CUMSUM_ALGORITHM_LINEBYLINE, "Sklansky: Ascend 950 only");
    TWIN_RAISE_IF(info.outter == 0 || info.inner == 0 || info.inner * sizeof(T) % twin::kBlockBytes != 0, kBadArgument,
                  loc, "CumSum: %u rows of %u elements; a row is a multiple of 32 bytes", info.outter, info.inner);
    const uint64_t n = static_cast<uint64_t>(info.outter) * info.inner;
    const twin::Access write = dst.Part(n, loc, "CumSum destination"), read = src.Part(n, loc, "CumSum source");
    CheckOverlap("CumSum", 0, write, read, loc);
    // The hardware's version transposes 16 rows at a time there and back, in half by way of float.
    constexpr bool kHalf = sizeof(T) != sizeof(float);
    const uint64_t needed =
        config.isLastAxis ? info.inner * 16ull * sizeof(T) * (kHalf ? 3 : 2) : (kHalf ? n * sizeof(float) : 0);
    twin::Access garbage;
    if (scratch != nullptr && needed != 0) {
        garbage = scratch->Part(needed, loc, "CumSum scratch");
        CheckApart("CumSum", "scratch", write, garbage, loc);
        CheckApart("CumSum", "scratch (of the source)", read, garbage, loc);
    }
    T* to = UbPointer<T>(write.begin);
    const T* from = UbPointer<T>(read.begin);
    twin::Issue(twin::PartOf({"CumSum", loc}, write, read, {}, {}, garbage),
                [=] { CumSumArray<T, config.isLastAxis>(to, from, info); });
    twin::Barrier(twin::Pipe::kV, loc);
    if constexpr (config.outputLastRow) {
        T* row = lastRow.Span(info.inner, loc, "CumSum last row");
        const T* last = to + (n - info.inner);
        twin::Issue(twin::PartOf({"CumSum last row", loc}, UbAccess(row, info.inner), UbAccess(last, info.inner)),
                    [=] { memmove(row, last, info.inner * sizeof(T)); });
        twin::Barrier(twin::Pipe::kV, loc);
    }
    SetMaskNorm();
    ResetMask();
}

}  // namespace detail

template <class T, const CumSumConfig& config = defaultCumSumConfig>
inline void CumSum(LocalTensor<T>& dstTensor, LocalTensor<T>& lastRowTensor, const LocalTensor<T>& srcTensor,
                   LocalTensor<uint8_t>& sharedTmpBuffer, const CumSumInfo& cumSumInfo, TWIN_CALLER) {
    detail::CumSum<T, config>(dstTensor, lastRowTensor, srcTensor, &sharedTmpBuffer, cumSumInfo, loc);
}
// The same with scratch from the end of UB.
template <class T, const CumSumConfig& config = defaultCumSumConfig>
inline void CumSum(LocalTensor<T>& dstTensor, LocalTensor<T>& lastRowTensor, const LocalTensor<T>& srcTensor,
                   const CumSumInfo& cumSumInfo, TWIN_CALLER) {
    detail::CheckScratch("CumSum without a scratch tensor", loc);
    detail::CumSum<T, config>(dstTensor, lastRowTensor, srcTensor, nullptr, cumSumInfo, loc);
}

}  // namespace AscendC
