// What every body here uses: the API, the protocol, and three small copies.
#ifndef ASCEND_MOE_COMMON_BASE_H
#define ASCEND_MOE_COMMON_BASE_H

#include "kernel_operator.h"

#include "../protocol/tiling.h"
#include "../protocol/window.h"

// Names the step of the op that a core begins, for timelines on the twin; nothing on an NPU.
#ifdef TWIN_PHASE
#define MOE_PHASE(name) TWIN_PHASE(name)
#else
#define MOE_PHASE(name)
#endif

// Counts a meeting of the cores by blocks, for predictions on the twin; nothing on an NPU.
#ifdef TWIN_MEETING
#define MOE_MEETING() TWIN_MEETING()
#else
#define MOE_MEETING()
#endif

// On the twin a fruitless look lets other cores and processes run; an NPU core just looks again.
#ifdef TWIN_POLL_HINT
#define MOE_POLL_HINT() TWIN_POLL_HINT()
#else
#define MOE_POLL_HINT()
#endif

namespace moe {

using AscendC::DataCopyExtParams;
using AscendC::DataCopyPadExtParams;
using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::TPipe;
using AscendC::TPosition;
using UbBuf = AscendC::TBuf<>;

// Makes pipe B wait for all earlier work of pipe A, for an event named A_B.
template <HardEvent event>
__aicore__ inline void SyncFunc() {
    const AscendC::TEventID id = static_cast<AscendC::TEventID>(GetTPipePtr()->FetchEventID(event));
    AscendC::SetFlag<event>(id);
    AscendC::WaitFlag<event>(id);
}

// GM to UB and back, any number of elements; the GM side need not be aligned to 32 bytes.
template <typename T>
__aicore__ inline void CopyIn(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count) {
    const DataCopyExtParams params{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
    const DataCopyPadExtParams<T> pad{false, 0, 0, static_cast<T>(0)};
    AscendC::DataCopyPad(dst, src, params, pad);
}
template <typename T>
__aicore__ inline void CopyOut(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count) {
    const DataCopyExtParams params{1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
    AscendC::DataCopyPad(dst, src, params);
}

// This core's part of n items: [Begin, End), sizes differ by at most one.
__aicore__ inline uint32_t PartBegin(uint32_t n, uint32_t core, uint32_t cores) {
    return static_cast<uint32_t>(static_cast<uint64_t>(n) * core / cores);
}

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_BASE_H
