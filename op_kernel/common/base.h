// Shared by all kernel bodies: the API, the protocol, and small copies.
#ifndef ASCEND_MOE_COMMON_BASE_H
#define ASCEND_MOE_COMMON_BASE_H

#include "kernel_operator.h"

#include "../protocol/tiling.h"
#include "../protocol/ub.h"
#include "../protocol/window.h"

// Starts a phase (protocol/window.h) in timelines of the emulator; no code on an NPU.
#ifdef TWIN_PHASE
#define MOE_MARK(name) TWIN_PHASE((static_cast<void>(moe::kIn##name), #name))
#else
#define MOE_MARK(name)
#endif
// Starts a phase and, if the launch asks for them, records its timestamp; `timestamps`: PhaseTimestamps.
#define MOE_PHASE(timestamps, name) \
    MOE_MARK(name);                 \
    (timestamps).Begin(moe::kIn##name)

// Counts a core barrier by blocks, for predictions on the emulator; no code on an NPU.
#ifdef TWIN_CORE_BARRIER
#define MOE_CORE_BARRIER() TWIN_CORE_BARRIER()
#else
#define MOE_CORE_BARRIER()
#endif

// On the emulator an unsuccessful poll lets other cores and processes run; an NPU core polls again.
#ifdef TWIN_POLL_HINT
#define MOE_POLL_HINT() TWIN_POLL_HINT()
#else
#define MOE_POLL_HINT()
#endif

// A number that does not fit its field stops the kernel on the emulator. On an NPU the protocol's limits bound it.
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

// Narrows a number to an 8-bit or 16-bit field of an instruction; `kMost`: the limit that bounds it. The only place
// where numbers are narrowed: an overflow would become 0, and the instruction would do nothing.
template <typename Field, uint32_t kMost>
__aicore__ inline Field Narrow(uint32_t number) {
    static_assert(kMost <= static_cast<Field>(~Field{0}), "the field has too few bits");
    MOE_EXPECT(number <= kMost);
    return static_cast<Field>(number);
}
// Repeats of a vector instruction, or a stride in blocks.
__aicore__ inline uint8_t Repeats(uint32_t number) { return Narrow<uint8_t, kMostRepeats>(number); }
// Tensors of a queue.
__aicore__ inline uint8_t Ring(uint32_t number) { return Narrow<uint8_t, kMostRing>(number); }
// Elements that pad the last block.
__aicore__ inline uint8_t Padding(uint32_t number) { return Narrow<uint8_t, kBlock - 1>(number); }
// Pieces of one DataCopyPad.
__aicore__ inline uint16_t Pieces(uint32_t number) { return Narrow<uint16_t, kMostPieces>(number); }

// Copies any number of elements between GM and UB; the GM side need not be aligned to 32 bytes.
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

// First of this core's part of n items; sizes differ by at most one.
__aicore__ inline uint32_t PartBegin(uint32_t n, uint32_t core, uint32_t cores) {
    return static_cast<uint32_t>(static_cast<uint64_t>(n) * core / cores);
}

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_BASE_H
