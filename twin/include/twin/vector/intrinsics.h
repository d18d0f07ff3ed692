// The compiler's own names for events, barriers and cache control, which some kernels use beside the API's.
#pragma once

#include "twin/api/sync.h"

enum cache_line_t { SINGLE_CACHE_LINE = 0, ENTIRE_DATA_CACHE };
enum dcci_dst_t { CACHELINE_ALL = 0, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

namespace AscendC {
namespace detail {

// Calls visit(event) with the pair as a constant.
template <int kEvent = 0, class Visit>
inline void WithEvent(pipe_t from, pipe_t to, const twin::Loc& loc, const Visit& visit) {
    if constexpr (kEvent == static_cast<int>(HardEvent::MAX)) {
        twin::Raise(twin::Finding::kEventMisuse, loc, "no event from pipe %d to pipe %d on a vector core",
                    from, to);
    } else {
        constexpr HardEvent event = static_cast<HardEvent>(kEvent);
        constexpr pipe_t kNames[] = {PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3};
        if (kNames[static_cast<int>(PipesOf(event).from)] == from &&
            kNames[static_cast<int>(PipesOf(event).to)] == to) {
            visit(std::integral_constant<HardEvent, event>());
        } else {
            WithEvent<kEvent + 1>(from, to, loc, visit);
        }
    }
}

}  // namespace detail
}  // namespace AscendC

inline void set_flag(pipe_t from, pipe_t to, event_t id, twin::Loc loc = twin::Loc::Here()) {
    AscendC::detail::WithEvent(from, to, loc, [=](auto event) { AscendC::SetFlag<event()>(id, loc); });
}
inline void wait_flag(pipe_t from, pipe_t to, event_t id, twin::Loc loc = twin::Loc::Here()) {
    AscendC::detail::WithEvent(from, to, loc, [=](auto event) { AscendC::WaitFlag<event()>(id, loc); });
}
inline void pipe_barrier(pipe_t pipe, twin::Loc loc = twin::Loc::Here()) {
    switch (pipe) {
        case PIPE_V: return AscendC::PipeBarrier<PIPE_V>(loc);
        case PIPE_MTE2: return AscendC::PipeBarrier<PIPE_MTE2>(loc);
        case PIPE_MTE3: return AscendC::PipeBarrier<PIPE_MTE3>(loc);
        case PIPE_ALL: return AscendC::PipeBarrier<PIPE_ALL>(loc);
        default: twin::Raise(twin::Finding::kBadArgument, loc, "pipe_barrier of pipe %d", pipe);
    }
}
template <class T>
inline void dcci(__gm__ T* address, uint64_t line, uint64_t = CACHELINE_ALL,
                 twin::Loc loc = twin::Loc::Here()) {
    twin::CleanLines(reinterpret_cast<uintptr_t>(address), line == ENTIRE_DATA_CACHE, loc);
}
inline int64_t get_block_idx() { return AscendC::GetBlockIdx(); }
inline int64_t get_block_num() { return AscendC::GetBlockNum(); }
