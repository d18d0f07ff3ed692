// What every body here uses: the API, the protocol, and three small copies.
#ifndef ASCEND_MOE_COMMON_BASE_H
#define ASCEND_MOE_COMMON_BASE_H

#include "kernel_operator.h"

#include "../protocol/tiling.h"
#include "../protocol/ub.h"
#include "../protocol/window.h"

// Names the phase of the op (protocol/window.h) that a core begins, for timelines on the twin; nothing on an NPU.
#ifdef TWIN_PHASE
#define MOE_MARK(name) TWIN_PHASE((static_cast<void>(moe::kIn##name), #name))
#else
#define MOE_MARK(name)
#endif
// The same, and a stamp where the launch was asked for them; `stamps`: PhaseStamps.
#define MOE_PHASE(stamps, name) \
    MOE_MARK(name);             \
    (stamps).Begin(moe::kIn##name)

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

// A number that its field cannot hold stops the kernel on the twin. On an NPU nothing looks: there the limits of the
// protocol bound every such number.
#ifdef TWIN_PHASE
#define MOE_EXPECT(condition) ascendc_assert(condition)
#else
#define MOE_EXPECT(condition)
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

// A number for a field of an instruction with 8 or 16 bits; `kMost`: the limit that bounds it. No other place narrows a
// number: one more than a field holds would become 0 there, and the instruction would do nothing.
template <typename Field, uint32_t kMost>
__aicore__ inline Field Narrow(uint32_t number) {
    static_assert(kMost <= static_cast<Field>(~Field{0}), "the field has too few bits");
    MOE_EXPECT(number <= kMost);
    return static_cast<Field>(number);
}
// Repeats of a vector instruction, or blocks from one to the next.
__aicore__ inline uint8_t Repeats(uint32_t number) { return Narrow<uint8_t, kMostRepeats>(number); }
// Tensors of a queue.
__aicore__ inline uint8_t Ring(uint32_t number) { return Narrow<uint8_t, kMostRing>(number); }
// Elements that fill a block behind the last.
__aicore__ inline uint8_t Padding(uint32_t number) { return Narrow<uint8_t, kBlock - 1>(number); }
// Pieces of one DataCopyPad.
__aicore__ inline uint16_t Pieces(uint32_t number) { return Narrow<uint16_t, kMostPieces>(number); }

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
