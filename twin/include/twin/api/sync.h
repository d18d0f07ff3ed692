// Ordering: events, pipe barriers, the all-core barrier, data-cache control, the cycle counter.
#pragma once

#include "twin/api/tensor.h"

enum pipe_t {
    PIPE_S = 0,
    PIPE_V,
    PIPE_M,
    PIPE_MTE1,
    PIPE_MTE2,
    PIPE_MTE3,
    PIPE_ALL,
    PIPE_MTE4,
    PIPE_MTE5,
    PIPE_V2,
    PIPE_FIX
};
using event_t = int32_t;
constexpr event_t EVENT_ID0 = 0, EVENT_ID1 = 1, EVENT_ID2 = 2, EVENT_ID3 = 3, EVENT_ID4 = 4, EVENT_ID5 = 5,
                  EVENT_ID6 = 6, EVENT_ID7 = 7;

namespace AscendC {

// The pairs of pipes of a vector core that have events.
enum class HardEvent : uint8_t {
    MTE2_V,
    V_MTE2,
    MTE3_V,
    V_MTE3,
    V_V,
    MTE3_MTE2,
    MTE2_MTE3,
    S_V,
    V_S,
    S_MTE2,
    MTE2_S,
    S_MTE3,
    MTE3_S,
    MAX
};
using TEventID = int8_t;

namespace detail {

struct EventPipes {
    twin::Pipe from;
    twin::Pipe to;
};
constexpr EventPipes PipesOf(HardEvent event) {
    constexpr twin::Pipe kS = twin::Pipe::kS, kV = twin::Pipe::kV, k2 = twin::Pipe::kMte2, k3 = twin::Pipe::kMte3;
    constexpr EventPipes kTable[] = {{k2, kV}, {kV, k2}, {k3, kV}, {kV, k3}, {kV, kV}, {k3, k2}, {k2, k3},
                                     {kS, kV}, {kV, kS}, {kS, k2}, {k2, kS}, {kS, k3}, {k3, kS}};
    return kTable[static_cast<int>(event)];
}

constexpr const char* NameOf(HardEvent event) { return twin::kEventNames[static_cast<int>(event)]; }
// The event by which `from` lets `to` go on; V_V for the pairs of a pipe with itself.
constexpr HardEvent EventOf(twin::Pipe from, twin::Pipe to) {
    for (int event = 0; event < static_cast<int>(HardEvent::MAX); ++event) {
        const EventPipes pipes = PipesOf(static_cast<HardEvent>(event));
        if (pipes.from == from && pipes.to == to) return static_cast<HardEvent>(event);
    }
    return HardEvent::V_V;
}

constexpr twin::Pipe PipeOf(pipe_t pipe) {
    return pipe == PIPE_S      ? twin::Pipe::kS
           : pipe == PIPE_V    ? twin::Pipe::kV
           : pipe == PIPE_MTE2 ? twin::Pipe::kMte2
           : pipe == PIPE_MTE3 ? twin::Pipe::kMte3
                               : twin::Pipe::kAll;
}

// Where the engine keeps an event.
inline uint32_t FlagIndex(HardEvent event, int32_t id) {
    return static_cast<uint32_t>(event) * twin::kEventIds + static_cast<uint32_t>(id);
}

inline twin::Loc& FlagOf(HardEvent event, int32_t id, const twin::Loc& loc) {
    TWIN_RAISE_IF(id < 0 || id >= static_cast<int32_t>(twin::kEventIds), kEventMisuse, loc,
                  "event id %d is outside 0..%u", id, twin::kEventIds - 1);
    return twin::current_core().flags[static_cast<int>(event)][id];
}

TWIN_HOT void SetEvent(HardEvent event, int32_t id, const twin::Loc& loc) {
    twin::Loc& flag = FlagOf(event, id, loc);
    TWIN_RAISE_IF(flag.file != nullptr, kEventMisuse, loc, "event %d of %s is set twice", id, NameOf(event));
    TWIN_RULE_IF(twin::current_core().queue_sets[static_cast<int>(event)] >> id & 1, kQueueEvent, kEventMisuse, loc,
                 "event id %d of %s is one that a queue has set: an NPU sets it twice; take it from AllocEventID", id,
                 NameOf(event));
    flag = loc;
    twin::FlagSet(FlagIndex(event, id), PipesOf(event).from, loc);
}
TWIN_HOT void WaitEvent(HardEvent event, int32_t id, const twin::Loc& loc) {
    twin::Loc& flag = FlagOf(event, id, loc);
    TWIN_RAISE_IF(flag.file == nullptr, kEventMisuse, loc,
                  "WaitFlag on event %d of %s that nobody has set: an NPU would hang here", id, NameOf(event));
    flag.file = nullptr;
    twin::FlagWait(FlagIndex(event, id), PipesOf(event).to, loc);
}

template <int64_t (*value)()>
struct BuiltIn {
    operator int64_t() const { return value(); }
};
}  // namespace detail

template <HardEvent event>
inline void SetFlag(int32_t id, TWIN_CALLER) {
    detail::SetEvent(event, id, loc);
}
template <HardEvent event>
inline void WaitFlag(int32_t id, TWIN_CALLER) {
    detail::WaitEvent(event, id, loc);
}

template <pipe_t pipe>
inline void PipeBarrier(TWIN_CALLER) {
    static_assert(pipe != PIPE_S, "PipeBarrier<PIPE_S> is not supported");
    static_assert(pipe == PIPE_V || pipe == PIPE_MTE2 || pipe == PIPE_MTE3 || pipe == PIPE_ALL || pipe == PIPE_MTE1 ||
                      pipe == PIPE_M || pipe == PIPE_FIX,
                  "no such pipe on a vector core");
    twin::Barrier(detail::PipeOf(pipe), loc);
}

// All launched AIV cores synchronize. Every core must call it equally often.
template <bool isAIVOnly = true>
inline void SyncAll(TWIN_CALLER) {
    twin::SyncAllCores(loc);
}
// Soft form, of the first usedCores cores or all: `gmWorkspace` needs 32 zeroed bytes a core.
template <bool isAIVOnly = true>
inline void SyncAll(const GlobalTensor<int32_t>& gmWorkspace, const LocalTensor<int32_t>& ubWorkspace,
                    const int32_t usedCores = 0, TWIN_CALLER) {
    const uint32_t cores = usedCores > 0 ? static_cast<uint32_t>(usedCores) : twin::BlockNum();
    gmWorkspace.Span(static_cast<uint64_t>(cores) * twin::kBlockBytes, loc, "SyncAll workspace");
    ubWorkspace.Span(static_cast<uint64_t>(cores) * 8, loc, "SyncAll UB workspace");
    twin::Core& core = twin::current_core();
    TWIN_RAISE_IF(cores > twin::BlockNum() || core.index >= cores, kSyncDivergence, loc,
                  "SyncAll of the first %u cores on core %u, and %u were launched", cores, core.index,
                  twin::BlockNum());
    core.sync_cores = cores;
    twin::SyncAllCores(loc);
    core.sync_cores = twin::BlockNum();
}

enum class CacheLine : uint8_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum class DcciDst : uint8_t { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

template <class T, CacheLine line, DcciDst dst = DcciDst::CACHELINE_ALL>
inline void DataCacheCleanAndInvalid(const GlobalTensor<T>& target, TWIN_CALLER) {
    const auto span = target.Span(sizeof(T), loc, "DataCacheCleanAndInvalid");
    twin::CleanLines(reinterpret_cast<uintptr_t>(span.first), line == CacheLine::ENTIRE_DATA_CACHE, loc);
}

inline int64_t GetSystemCycle() { return twin::SystemCycle(); }
inline int64_t GetBlockIdx() { return twin::current_core().index; }
inline int64_t GetBlockNum() { return twin::BlockNum(); }
inline int64_t GetSubBlockIdx() { return 0; }
inline int64_t GetTaskRation() { return 1; }

// ---- Flags between the cores of one launch.

// Set when the earlier work of `pipe` is done. Mode 0: all cores set, then all may pass; mode 1: the two
// vector cores of a block; mode 2, between cube and vector cores, is refused when the kernel runs.
template <uint8_t modeId, pipe_t pipe>
inline void CrossCoreSetFlag(uint16_t flagId, TWIN_CALLER) {
    static_assert(modeId <= 2, "CrossCoreSetFlag: modes 0, 1 and 2");
    static_assert(pipe == PIPE_V || pipe == PIPE_MTE2 || pipe == PIPE_MTE3,
                  "CrossCoreSetFlag: PIPE_V, PIPE_MTE2 or PIPE_MTE3 on a vector core");
    twin::CrossCoreSet(modeId, detail::PipeOf(pipe), flagId, loc);
}
template <uint8_t modeId = 0, pipe_t pipe = PIPE_S>
inline void CrossCoreWaitFlag(uint16_t flagId, TWIN_CALLER) {
    static_assert(modeId <= 2, "CrossCoreWaitFlag: modes 0, 1 and 2");
    twin::CrossCoreWait(flagId, loc);
}

}  // namespace AscendC

// ---- The compiler's own names for events, barriers and cache control, which some kernels use beside the
// API's.

enum cache_line_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum dcci_dst_t { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

namespace AscendC {
namespace detail {

inline HardEvent EventOf(pipe_t from, pipe_t to, const twin::Loc& loc) {
    const HardEvent event = EventOf(PipeOf(from), PipeOf(to));
    const EventPipes pipes = PipesOf(event);
    if (pipes.from == PipeOf(from) && pipes.to == PipeOf(to)) return event;
    twin::Raise(twin::Finding::kEventMisuse, loc, "no event from pipe %d to pipe %d on a vector core", from, to);
}

}  // namespace detail
}  // namespace AscendC

inline void set_flag(pipe_t from, pipe_t to, event_t id, TWIN_CALLER) {
    AscendC::detail::SetEvent(AscendC::detail::EventOf(from, to, loc), id, loc);
}
inline void wait_flag(pipe_t from, pipe_t to, event_t id, TWIN_CALLER) {
    AscendC::detail::WaitEvent(AscendC::detail::EventOf(from, to, loc), id, loc);
}
inline void pipe_barrier(pipe_t pipe, TWIN_CALLER) {
    TWIN_RAISE_IF(pipe != PIPE_V && pipe != PIPE_MTE2 && pipe != PIPE_MTE3 && pipe != PIPE_ALL, kBadArgument, loc,
                  "pipe_barrier of pipe %d", pipe);
    twin::Barrier(AscendC::detail::PipeOf(pipe), loc);
}
namespace AscendC {

// Events by pair of pipes, with ids that the caller chooses.
template <pipe_t src, pipe_t dst>
class TQueSync {
public:
    static_assert(src != dst, "TQueSync: two different pipes");
    void SetFlag(TEventID id, TWIN_CALLER) { set_flag(src, dst, id, loc); }
    void WaitFlag(TEventID id, TWIN_CALLER) { wait_flag(src, dst, id, loc); }
};

}  // namespace AscendC

template <class T>
inline void dcci(__gm__ T* address, uint64_t line, uint64_t = CACHELINE_ALL, TWIN_CALLER) {
    twin::CleanLines(reinterpret_cast<uintptr_t>(address), line == ENTIRE_DATA_CACHE, loc);
}
inline int64_t get_block_idx() { return AscendC::GetBlockIdx(); }
inline int64_t get_block_num() { return AscendC::GetBlockNum(); }
inline constexpr AscendC::detail::BuiltIn<get_block_idx> block_idx{};
inline constexpr AscendC::detail::BuiltIn<get_block_num> block_num{};
