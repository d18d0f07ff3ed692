// What a kernel asks of its core, of caches and of other cores beside events and barriers.
#pragma once

#include "twin/api/copy.h"
#include "twin/api/debug.h"

namespace AscendC {

// ---- no effect on one launch: hints, and calls that A2/A3 compile only

template <class T>
inline void DataCachePreload(const GlobalTensor<uint64_t>&, const T) {}
inline void ICachePreLoad(const int64_t) {}
inline int64_t GetICachePreloadStatus() { return 0; }
inline void MetricsProfStart() {}
inline void MetricsProfStop() {}
template <pipe_t aivPipe = PIPE_MTE3, pipe_t aicPipe = PIPE_FIX, bool force = false>
inline void SetNextTaskStart() {}
template <bool force = false>
inline void WaitPreTaskEnd() {}
// Scalar accesses take effect in order in any case; pipes need their events.
enum class MemDsbT : uint8_t { ALL = 0, DDR, UB, SEQ };
template <MemDsbT memory>
inline void DataSyncBarrier() {}

enum class EngineType : int32_t { AIC = 1, AIV = 2 };
template <EngineType engine, auto function, class... Args>
inline void Async(Args... args) {
    if constexpr (engine == EngineType::AIV) function(args...);
}

inline uint64_t GetShapeSize(const ShapeInfo& shapeInfo) {
    uint64_t size = 1;
    for (int i = 0; i < shapeInfo.shapeDim; ++i) size *= shapeInfo.shape[i];
    return size;
}

// x / divisor is (x * magic / 2^bits + x) >> shift, with the sum in twice the bits of T.
template <class T>
inline void GetUintDivMagicAndShift(T& magic, T& shift, T divisor, TWIN_CALLER) {
    static_assert(std::is_same_v<T, uint32_t> || std::is_same_v<T, uint64_t>, "uint32_t and uint64_t only");
    constexpr T kMost = static_cast<T>(~T{0} >> 1);
    TWIN_RAISE_IF(divisor == 0 || divisor > kMost, kBadArgument, loc, "GetUintDivMagicAndShift: divisor %llu",
                  static_cast<unsigned long long>(divisor));
    __extension__ using Wide = unsigned __int128;
    shift = 0;
    while (T{1} << shift < divisor) ++shift;
    magic = static_cast<T>((((Wide{1} << shift) - divisor) << (8 * sizeof(T))) / divisor + 1);
}

// ---- scalar accesses past the data cache: cores may talk by them, which the checked engine then has to guess

template <class T>
inline void WriteGmByPassDCache(__gm__ T* addr, T value, TWIN_CALLER) {
    static_assert(std::is_integral_v<T>, "WriteGmByPassDCache: integers only");
    GlobalTensor<T> element;
    element.SetGlobalBuffer(addr, 1);
    twin::FlagAt(reinterpret_cast<uintptr_t>(element.Span(sizeof(T), loc, "WriteGmByPassDCache").first), false);
    element.SetValue(0, value, loc);
    DataCacheCleanAndInvalid<T, CacheLine::SINGLE_CACHE_LINE>(element, loc);
}
template <class T>
inline T ReadGmByPassDCache(__gm__ T* addr, TWIN_CALLER) {
    static_assert(std::is_integral_v<T>, "ReadGmByPassDCache: integers only");
    GlobalTensor<T> element;
    element.SetGlobalBuffer(addr, 1);
    twin::FlagAt(reinterpret_cast<uintptr_t>(element.Span(sizeof(T), loc, "ReadGmByPassDCache").first), false);
    DataCacheCleanAndInvalid<T, CacheLine::SINGLE_CACHE_LINE>(element, loc);
    return element.GetValue(0, loc);
}

// ---- turns of cores, by 32-byte blocks of a workspace in GM

namespace detail {

constexpr uint32_t kTurnWords = twin::kBlockBytes / sizeof(int32_t);

// Waits until the block of a core and an event has a value, then stores another.
inline void TakeTurn(const GlobalTensor<int32_t>& gm, const LocalTensor<int32_t>& ub, int32_t core, int32_t event,
                     int32_t wanted, const twin::Loc& loc) {
    const uint64_t at =
        (static_cast<uint64_t>(GetBlockNum()) * static_cast<uint32_t>(event) + static_cast<uint32_t>(core)) *
        kTurnWords;
    twin::FlagAt(reinterpret_cast<uintptr_t>(gm[at].Span(twin::kBlockBytes, loc, "IBSet, IBWait").first), true);
    PipeBarrier<PIPE_ALL>(loc);
    do {
        DataCopy(ub, gm[at], kTurnWords, loc);
        PipeBarrier<PIPE_ALL>(loc);
    } while (ub.GetValue(0, loc) != wanted);
    ub.SetValue(0, 1 - wanted, loc);
    PipeBarrier<PIPE_ALL>(loc);
    DataCopy(gm[at], ub, kTurnWords, loc);
    PipeBarrier<PIPE_ALL>(loc);
}

}  // namespace detail

template <bool isAIVOnly = true>
inline void IBSet(const GlobalTensor<int32_t>& gmWorkspace, const LocalTensor<int32_t>& ubWorkspace, int32_t blockIdx,
                  int32_t eventID, TWIN_CALLER) {
    detail::TakeTurn(gmWorkspace, ubWorkspace, blockIdx, eventID, 0, loc);
}
template <bool isAIVOnly = true>
inline void IBWait(const GlobalTensor<int32_t>& gmWorkspace, const LocalTensor<int32_t>& ubWorkspace, int32_t blockIdx,
                   int32_t eventID, TWIN_CALLER) {
    detail::TakeTurn(gmWorkspace, ubWorkspace, blockIdx, eventID, 1, loc);
}

}  // namespace AscendC
