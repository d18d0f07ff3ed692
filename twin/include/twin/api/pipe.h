// TPipe and what it allocates: TBuf (raw UB) and TQue/TQueBind (UB with producer-consumer discipline).
#pragma once

#include <algorithm>
#include <exception>
#include <type_traits>

#include "twin/api/sync.h"

namespace AscendC {

class TBufBase {
public:
    uint32_t begin_ = 0;
    uint32_t bytes_ = 0;
    uint32_t buffer_ = 0;
};

template <TPosition position = TPosition::LCM>
class TBuf : public TBufBase {
public:
    template <class T>
    TWIN_HOT LocalTensor<T> Get() {
        return Tensor<T>(bytes_ / static_cast<uint32_t>(sizeof(T)), 0);
    }
    template <class T>
    TWIN_HOT LocalTensor<T> Get(uint32_t count, TWIN_CALLER) {
        return GetWithOffset<T>(count, 0, loc);
    }
    template <class T>
    TWIN_HOT LocalTensor<T> GetWithOffset(uint32_t count, uint32_t byteOffset, TWIN_CALLER) {
        const uint64_t end = static_cast<uint64_t>(byteOffset) + static_cast<uint64_t>(count) * sizeof(T);
        if (__builtin_expect(byteOffset % twin::kBlockBytes != 0 || end > bytes_, 0))
            RaiseOffset(*this, count, sizeof(T), byteOffset, loc.file, loc.line);
        return Tensor<T>(count, byteOffset);
    }

    // As for a queue's tensors, but no event belongs to them.
    template <class T>
    LocalTensor<T> AllocTensor() {
        return Get<T>();
    }
    template <class T>
    void FreeTensor(const LocalTensor<T>&) {}
    TWIN_REFUSE_MEMBERS(TBuf);

private:
    template <class T>
    TWIN_HOT LocalTensor<T> Tensor(uint32_t count, uint32_t byteOffset) const {
        const twin::Core& core = twin::current_core();
        return LocalTensor<T>(core.ub + begin_ + byteOffset, count * static_cast<uint32_t>(sizeof(T)), buffer_,
                              core.buffers[buffer_].generation);
    }
    // Returns where the launch lists tensors that pass their buffer and stay in UB.
    TWIN_COLD static void RaiseOffset(TBufBase buffer, uint32_t count, size_t element, uint32_t byteOffset,
                                      const char* file, int line) {
        const twin::Loc loc{file, line};
        TWIN_RAISE_IF(byteOffset % twin::kBlockBytes != 0, kMisaligned, loc,
                      "TBuf offset %u is not a multiple of 32 bytes", byteOffset);
        const char* const past = "TBuf holds %u bytes, asked for %u elements of %zu at byte %u";
        const uint64_t end = uint64_t{buffer.begin_} + byteOffset + uint64_t{count} * element;
        TWIN_RAISE_IF(end > twin::kUbBytes, kOutOfBounds, loc, past, buffer.bytes_, count, element, byteOffset);
        TWIN_RULE_IF(true, kBufferEnd, kOutOfBounds, loc, past, buffer.bytes_, count, element, byteOffset);
        twin::UbExposed();
    }
};

// At most this many tensors of one position may be out at once.
constexpr uint32_t kMaxQueueTensors = 8;
// At most this many event ids of a pair of pipes may be held by queues at once. TWIN_QUEUE_EVENTS: kernels that leave
// ids to single waits and to the compiler.
#ifndef TWIN_QUEUE_EVENTS
#define TWIN_QUEUE_EVENTS twin::kEventIds
#endif
constexpr uint32_t kMaxQueueEvents = TWIN_QUEUE_EVENTS;
static_assert(kMaxQueueEvents <= twin::kEventIds, "more than there are");
// What TPipe hands out of UB; TWIN_UB_BYTES: what a platform grants, where that is less than all of it.
#ifndef TWIN_UB_BYTES
#define TWIN_UB_BYTES twin::kUbBytes
#endif
constexpr uint32_t kGrantedUbBytes = TWIN_UB_BYTES;
constexpr uint32_t kMaxQueueDepth = 16;

namespace detail {

// Whether queues and AllocEventID hold all ids of a pair; else the first free one.
static_assert(twin::kEventIds == 8, "a bit an id in a byte");
inline bool NoEventLeft(const twin::Core& core, HardEvent event) {
    const int at = static_cast<int>(event);
    return (core.queue_events[at] | core.reserved_events[at]) == 0xFF;
}
inline uint8_t FreeEvent(const twin::Core& core, HardEvent event) {
    const int at = static_cast<int>(event);
    return static_cast<uint8_t>(__builtin_ctz(~uint32_t{core.queue_events[at]} & ~uint32_t{core.reserved_events[at]}));
}

}  // namespace detail

// An NPU's queue holds an event id of its pair of pipes from EnQue to DeQue, and one of the pair in the other direction
// from FreeTensor until the tensor is allocated again. It takes its tensors in rotation, whichever the fast engine
// takes. A queue may be passed by value; state lies where asc-devkit has it (kernel_tquebind_impl.h,
// kernel_tpipe_impl.h):
//   each buffer, in the core's table: place, allocated or free, event ids
//   TQueBind, and each copy of it: its range of the table, tensors in the queue and their order, where the rotation is
//   TBuf, LocalTensor: a buffer, offset and length; GlobalTensor: address and length
//   the core, for its one TPipe: the table, UB in use, event ids in use
template <TPosition src, TPosition dst, int32_t depth>
class TQueBind {
public:
    static_assert(depth >= 0 && depth <= static_cast<int32_t>(kMaxQueueDepth), "queue depth out of range");

    template <class T>
    LocalTensor<T> AllocTensor(TWIN_CALLER) {
        static_assert(depth != 0 || sizeof(T) == 0, "AllocTensor<T>(tensor): the queue's depth is 0");
        return Allocate<T>(loc);
    }
    // In place, of a queue of depth 0: each buffer holds two event ids from InitBuffer on, and nothing is in the queue.
    template <class T>
    void AllocTensor(LocalTensor<T>& tensor, TWIN_CALLER) {
        static_assert(depth == 0 || sizeof(T) == 0, "AllocTensor<T>(): the queue's depth is not 0");
        tensor = Allocate<T>(loc);
    }
    template <class T>
    void DeQue(LocalTensor<T>& tensor, TWIN_CALLER) {
        static_assert(depth == 0 || sizeof(T) == 0, "DeQue<T>(): the queue's depth is not 0");
        CheckOwned(tensor.buffer(), tensor.generation(), "DeQue", loc);
        twin::UbBuffer& buffer = twin::current_core().buffers[tensor.buffer()];
        TWIN_RAISE_IF(!buffer.enqueued, kQueueMisuse, loc,
                      "DeQue of a tensor that is not in the queue: an NPU would hang here");
        buffer.enqueued = false;
        twin::FlagWait(twin::FullFlag(tensor.buffer()), kConsumer, loc);
    }

    template <class T>
    bool EnQue(const LocalTensor<T>& tensor, TWIN_CALLER) {
        CheckOwned(tensor.buffer(), tensor.generation(), "EnQue", loc);
        if constexpr (depth == 0) {
            twin::UbBuffer& buffer = twin::current_core().buffers[tensor.buffer()];
            TWIN_RAISE_IF(buffer.enqueued, kQueueMisuse, loc, "EnQue of a tensor that is in the queue");
            buffer.enqueued = true;
        } else {
            TWIN_RAISE_IF(queued_ >= static_cast<uint32_t>(depth), kQueueMisuse, loc, "EnQue over the queue's depth %d",
                          depth);
            ring_[(head_ + queued_++) % kMaxQueueDepth] = tensor.buffer();
            twin::current_core().buffers[tensor.buffer()].full_event = Hold(kFull, loc);
        }
        twin::FlagSet(twin::FullFlag(tensor.buffer()), kProducer, loc);
        return true;
    }
    template <class T>
    LocalTensor<T> DeQue(TWIN_CALLER) {
        static_assert(depth != 0 || sizeof(T) == 0, "DeQue<T>(tensor): the queue's depth is 0");
        TWIN_RAISE_IF(queued_ == 0, kQueueMisuse, loc, "DeQue of an empty queue: an NPU would hang here");
        const uint32_t id = ring_[head_];
        head_ = (head_ + 1) % kMaxQueueDepth;
        --queued_;
        twin::Core& core = twin::current_core();
        const twin::UbBuffer& buffer = core.buffers[id];
        Drop(kFull, buffer.full_event);
        twin::FlagWait(twin::FullFlag(id), kConsumer, loc);
        return LocalTensor<T>(core.ub + buffer.begin, buffer.bytes, id, buffer.generation);
    }
    template <class T>
    void FreeTensor(const LocalTensor<T>& tensor, TWIN_CALLER) {
        CheckOwned(tensor.buffer(), tensor.generation(), "FreeTensor", loc);
        twin::Core& core = twin::current_core();
        twin::UbBuffer& buffer = core.buffers[tensor.buffer()];
        buffer.allocated = false;
        ++buffer.generation;
        twin::UbFreed(buffer.begin, buffer.bytes);
        --core.queue_tensors[kSide];
        twin::UbBuffer& chosen = core.buffers[first_ + buffer.npu_choice];
        chosen.npu_allocated = false;
        if (depth != 0) {
            chosen.npu_holds = true;
            chosen.npu_free_event = Hold(kFree, loc);
        }
        buffer.freed = true;
        buffer.producer = kProducer;
        twin::FlagSet(twin::FreeFlag(tensor.buffer()), kConsumer, loc);
    }
    bool VacantInQue() const { return queued_ < static_cast<uint32_t>(depth); }
    bool HasTensorInQue() const { return queued_ > 0; }
    int32_t GetTensorCountInQue() const { return static_cast<int32_t>(queued_); }
    bool HasIdleBuffer() const {
        const twin::Core& core = twin::current_core();
        for (uint32_t i = 0; i < count_; ++i) {
            if (!core.buffers[first_ + i].allocated) return true;
        }
        return false;
    }
    void FreeAllEvent(TWIN_CALLER) {
        twin::Core& core = twin::current_core();
        for (uint32_t i = first_; i < first_ + count_; ++i) {
            twin::UbBuffer& buffer = core.buffers[i];
            if (buffer.npu_holds) Drop(kFree, buffer.npu_free_event);
            if (buffer.freed) twin::FlagWait(twin::FreeFlag(i), kProducer, loc);
            buffer.freed = buffer.npu_holds = false;
        }
    }

    // For TPipe only.
    void Bind(uint32_t first, uint32_t count, const twin::Loc& loc) {
        first_ = first;
        count_ = count;
        queued_ = head_ = cursor_ = 0;
        for (uint32_t i = 0; depth == 0 && i < count; ++i) {
            Hold(kFull, loc);
            Hold(kFree, loc);
        }
    }
    TWIN_REFUSE_MEMBERS(TQueBind);
    TWIN_REFUSED_FORM(EnQue, TWIN_WHY_POSITIONS, const, decltype(src_), TPosition src_, TPosition dst_, class... Types)
    TWIN_REFUSED_FORM(DeQue, TWIN_WHY_POSITIONS, const, decltype(src_), TPosition src_, TPosition dst_, class... Types)

private:
    static constexpr int kSide = src == TPosition::VECIN ? 0 : 1;
    static constexpr twin::Pipe kProducer = src == TPosition::VECIN ? twin::Pipe::kMte2 : twin::Pipe::kV;
    static constexpr twin::Pipe kConsumer = dst == TPosition::VECOUT || src == TPosition::VECOUT || dst == TPosition::GM
                                                ? twin::Pipe::kMte3
                                                : twin::Pipe::kV;
    static constexpr HardEvent kFull = detail::EventOf(kProducer, kConsumer),
                               kFree = detail::EventOf(kConsumer, kProducer);
    // Takes an id as an NPU does. Of a queue of depth 0 it is not set all the time.
    static uint8_t Hold(HardEvent event, const twin::Loc& loc) {
        if (event == HardEvent::V_V) return 0;  // AscendC's queues take id 0
        twin::Core& core = twin::current_core();
        const int at = static_cast<int>(event);
        uint32_t room = 0xFFu & ~uint32_t{core.queue_events[at]};  // without the lowest ids that must stay free
        for (uint32_t i = kMaxQueueEvents; i < twin::kEventIds; ++i) room &= room - 1;
        TWIN_RAISE_IF(room == 0 || detail::NoEventLeft(core, event), kQueueMisuse, loc,
                      "queues hold %d event ids of %s, they may hold %u of its %u",
                      __builtin_popcount(core.queue_events[at]) + 1, detail::NameOf(event), kMaxQueueEvents,
                      twin::kEventIds);
        const uint8_t id = detail::FreeEvent(core, event), bit = static_cast<uint8_t>(1u << id);
        TWIN_RULE_IF(core.flags[at][id].file != nullptr, kQueueEvent, kEventMisuse, loc,
                     "a queue takes event id %u of %s, which SetFlag has set: an NPU sets it twice; take the id of "
                     "SetFlag from AllocEventID",
                     id, detail::NameOf(event));
        core.queue_events[at] |= bit;
        if (depth != 0) core.queue_sets[at] |= bit;
        return id;
    }
    static void Drop(HardEvent event, uint8_t id) {
        twin::Core& core = twin::current_core();
        const uint8_t others = static_cast<uint8_t>(~(1u << id));
        core.queue_events[static_cast<int>(event)] &= others;
        core.queue_sets[static_cast<int>(event)] &= others;
    }
    void CheckOwned(uint32_t id, uint32_t generation, const char* what, const twin::Loc& loc) const {
        const twin::Core& core = twin::current_core();
        TWIN_RAISE_IF(id < first_ || id >= first_ + count_, kQueueMisuse, loc,
                      "%s of a tensor that is not this queue's", what);
        TWIN_RAISE_IF(!core.buffers[id].allocated || core.buffers[id].generation != generation, kQueueMisuse, loc,
                      "%s of a tensor that is not allocated (freed twice?)", what);
    }

    template <class T>
    LocalTensor<T> Allocate(const twin::Loc& loc) {
        twin::Core& core = twin::current_core();
        for (uint32_t tried = 0; tried < count_; ++tried) {
            const uint32_t i = Slot(tried);
            twin::UbBuffer& buffer = core.buffers[first_ + i];
            if (buffer.allocated) continue;
            TWIN_RAISE_IF(core.queue_tensors[kSide] >= kMaxQueueTensors, kQueueMisuse, loc,
                          "more than %u queue tensors are out at one position", kMaxQueueTensors);
            buffer.allocated = true;
            buffer.allocated_at = loc;
            ++core.queue_tensors[kSide];
            buffer.npu_choice = static_cast<uint8_t>(ChooseAsNpu(core));
            if (buffer.freed) twin::FlagWait(twin::FreeFlag(first_ + i), kProducer, loc);
            buffer.freed = false;
            last_ = i;
            return LocalTensor<T>(core.ub + buffer.begin, buffer.bytes, first_ + i, buffer.generation);
        }
        twin::Raise(twin::Finding::kQueueMisuse, loc,
                    "AllocTensor finds none of the queue's %u tensors free: an NPU would hang here", count_);
    }

    // The buffer that an NPU would take, one of which is free. It gives the buffer's event id back.
    uint32_t ChooseAsNpu(twin::Core& core) {
        while (core.buffers[first_ + cursor_].npu_allocated) cursor_ = (cursor_ + 1) % count_;
        const uint32_t choice = cursor_;
        twin::UbBuffer& chosen = core.buffers[first_ + choice];
        if (chosen.npu_holds) Drop(kFree, chosen.npu_free_event);
        chosen.npu_allocated = true;
        chosen.npu_holds = false;
        cursor_ = (cursor_ + 1) % count_;
        return choice;
    }

    // Which buffer to try next. The timed and the checked engine take the buffers in rotation, as an NPU does:
    // otherwise the next copy in would wait for the last copy out, and whatever else lacks an order would have one by
    // that. The fast engine takes the first free buffer, which is most likely in the caches.
    uint32_t Slot(uint32_t tried) const {
#if defined(TWIN_TIMED) || defined(TWIN_CHECKED)
        return (last_ + 1 + tried) % count_;
#else
        return tried;
#endif
    }

    uint32_t first_ = 0;
    uint32_t count_ = 0;
    uint32_t last_ = 0;    // of the buffers, allocated
    uint32_t cursor_ = 0;  // of the buffers, that an NPU would try next
    uint32_t ring_[kMaxQueueDepth] = {};
    uint32_t head_ = 0;
    uint32_t queued_ = 0;
};

template <TPosition position, int32_t depth, auto mask = 0>
class TQue : public TQueBind<position, position == TPosition::VECIN ? TPosition::VECCALC : TPosition::GM, depth> {};

class TPipe {
public:
    TPipe(TWIN_CALLER) {
        twin::Core& core = twin::current_core();
        TWIN_RAISE_IF(core.pipe != nullptr, kQueueMisuse, loc, "two TPipes are alive on one core");
        core.pipe = this;
    }
    // Runs what is still queued, which may raise a finding. A core that unwinds from a finding does not run
    // it.
    ~TPipe() noexcept(false) {
        if (!alive_) return;
        if (std::uncaught_exceptions() == 0) {
            Destroy();
        } else {
            twin::current_core().pipe = nullptr;
        }
    }
    TPipe(const TPipe&) = delete;
    TPipe& operator=(const TPipe&) = delete;

    template <TPosition src, TPosition dst, int32_t depth>
    bool InitBuffer(TQueBind<src, dst, depth>& queue, uint8_t num, uint32_t len, TWIN_CALLER) {
        const uint32_t first = twin::current_core().buffer_count;
        for (uint32_t i = 0; i < num; ++i) Carve(len, src, loc);
        queue.Bind(first, num, loc);
        return true;
    }
    template <TPosition position>
    bool InitBuffer(TBuf<position>& buffer, uint32_t len, TWIN_CALLER) {
        const uint32_t id = Carve(len, position, loc);
        buffer.buffer_ = id;
        buffer.begin_ = twin::current_core().buffers[id].begin;
        buffer.bytes_ = twin::current_core().buffers[id].bytes;
        return true;
    }
    void Reset() { Release(); }
    void Destroy() {
        Release();
        twin::current_core().pipe = nullptr;
        alive_ = false;
    }
    void DestroyWithoutPipeAll() { Destroy(); }
    void Init() {}

    // The first id that neither queues nor AllocEventID hold.
    TEventID FetchEventID(HardEvent event, TWIN_CALLER) {
        const twin::Core& core = twin::current_core();
        const int at = static_cast<int>(event);
        TWIN_RAISE_IF(detail::NoEventLeft(core, event), kEventMisuse, loc,
                      "no event id of %s is left: queues hold %u, AllocEventID %u", detail::NameOf(event),
                      static_cast<uint32_t>(__builtin_popcount(core.queue_events[at])),
                      static_cast<uint32_t>(__builtin_popcount(core.reserved_events[at])));
        return static_cast<TEventID>(detail::FreeEvent(core, event));
    }
    template <HardEvent event>
    TEventID FetchEventID(TWIN_CALLER) {
        return FetchEventID(event, loc);
    }
    template <HardEvent event>
    TEventID AllocEventID(TWIN_CALLER) {
        const TEventID id = FetchEventID(event, loc);
        twin::current_core().reserved_events[static_cast<int>(event)] |= static_cast<uint8_t>(1u << id);
        return id;
    }
    template <HardEvent event>
    void ReleaseEventID(TEventID id) {
        twin::current_core().reserved_events[static_cast<int>(event)] &= static_cast<uint8_t>(~(1u << id));
    }
    TWIN_REFUSE_MEMBERS(TPipe);

private:
    uint32_t Carve(uint32_t len, TPosition position, const twin::Loc& loc) {
        twin::Core& core = twin::current_core();
        TWIN_RULE_IF(len == 0, kEmptyBuffer, kBadArgument, loc,
                     "InitBuffer of 0 bytes: a core without a share makes no buffer");
        const uint32_t bytes = (len + twin::kBlockBytes - 1) / twin::kBlockBytes * twin::kBlockBytes;
        TWIN_RAISE_IF(core.ub_used + static_cast<uint64_t>(bytes) > kGrantedUbBytes, kUbOverflow, loc,
                      "InitBuffer of %u bytes: %u of the UB's %u are taken", bytes, core.ub_used, kGrantedUbBytes);
        TWIN_RAISE_IF(core.buffer_count >= twin::kMaxUbBuffers, kUbOverflow, loc, "more than %u buffers in one TPipe",
                      twin::kMaxUbBuffers);
        twin::UbBuffer& buffer = core.buffers[core.buffer_count];
        buffer.begin = core.ub_used;
        buffer.bytes = bytes;
        buffer.position = static_cast<uint8_t>(position);
        buffer.allocated = buffer.freed = buffer.npu_allocated = buffer.npu_holds = buffer.enqueued = false;
        ++buffer.generation;
        twin::UbCarved(buffer.begin, bytes);
        core.ub_used += bytes;
        if (core.ub_used > core.traffic.ub_peak) core.traffic.ub_peak = core.ub_used;
        return core.buffer_count++;
    }
    void Release() {
        twin::Core& core = twin::current_core();
        for (uint32_t i = 0; i < core.buffer_count; ++i) {
            twin::UbBuffer& buffer = core.buffers[i];
            // As in the real TPipe: before a freed tensor is filled again, its producer waits until its
            // reader is done.
            if (buffer.freed) twin::FlagWait(twin::FreeFlag(i), buffer.producer, {"TPipe", 0});
            if (buffer.allocated) core.left_at = buffer.allocated_at;
            buffer.allocated = buffer.freed = false;
            ++buffer.generation;
        }
        twin::UbReleased();
        core.buffer_count = 0;
        core.ub_used = 0;
        std::fill(std::begin(core.queue_events), std::end(core.queue_events), uint8_t(0));
        std::fill(std::begin(core.queue_sets), std::end(core.queue_sets), uint8_t(0));
    }
    bool alive_ = true;
};

inline TPipe* GetTPipePtr() { return static_cast<TPipe*>(twin::current_core().pipe); }

}  // namespace AscendC

using AscendC::GetTPipePtr;
