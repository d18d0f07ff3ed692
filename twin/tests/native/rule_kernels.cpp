// Tiny kernels that break one rule of the hardware each, and near misses that break none. Each says what the
// twin must find: the finding, then pieces of what is said, between bars. A test runs them by name: rules by
// a launch on both engines, hazards on the checked one under a policy and a seed.
#include <cstring>
#include <string>

#include "kernel_operator.h"
#include "twin/engine/launch.h"
#ifdef TWIN_CHECKED
#include "twin/engine/explore.h"
#endif

namespace {

using namespace AscendC;

constexpr uint32_t kRanks = 2, kGmBytes = 32768;
alignas(4096) uint8_t g_gm[kRanks][kGmBytes];
alignas(64) uint8_t g_stranger[64];  // memory that no tensor of the launch covers

struct Kernel {
    const char* name;
    void (*run)();
    const char* expected = "";
    uint32_t cores = 1, ranks = 1;
    bool third_party = false;
};

template <class T>
GlobalTensor<T> At(uint8_t* memory, uint64_t offset, uint64_t count = 0) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(twin::GmOf(memory + offset)), count);
    return tensor;
}
template <class T = float>
GlobalTensor<T> Gm(uint64_t offset = 0, uint64_t count = 0) {
    return At<T>(g_gm[twin::current_core().rank % kRanks], offset, count);
}

// A buffer of UB, of ones if it is filled.
struct Ub {
    explicit Ub(uint32_t bytes = 256, bool fill = false) {
        pipe.InitBuffer(buf, bytes);
        if (!fill) return;
        Duplicate(buf.Get<float>(), 1.0f, static_cast<int32_t>(bytes / 4));
        PipeBarrier<PIPE_ALL>();
    }
    template <class T = float>
    LocalTensor<T> Get() {
        return buf.Get<T>();
    }
    TPipe pipe;
    TBuf<> buf;
};
struct Queue : TQue<QuePosition::VECIN, 1> {
    Queue(uint8_t tensors) { pipe.InitBuffer(*this, tensors, 64); }
    TPipe pipe;
};

// ---- rules: allocation, copies, elements ----
void Buffers(int count) {
    TPipe pipe;
    TBuf<> buf;
    for (int i = 0; i < count; ++i) pipe.InitBuffer(buf, 32);
}
void BufView(uint32_t offset, uint32_t count) { Ub().buf.GetWithOffset<float>(count, offset); }
template <class T>
void CopyIn(uint32_t count, uint32_t ub_offset) {
    Ub ub;
    DataCopy(ub.Get<T>()[ub_offset], Gm<T>(), count);
}
void CopyOut(uint64_t offset, uint64_t declared, uint32_t count) {
    Ub ub(256, true);
    DataCopy(Gm(offset, declared), ub.Get(), count);
}
void CopyPad(uint16_t blocks, uint32_t bytes, uint8_t right) {
    Ub ub(160 * 1024);
    DataCopyPad(ub.Get(), Gm(), DataCopyExtParams(blocks, bytes, 0, 0, 0),
                DataCopyPadExtParams<float>(right != 0, 0, right, 0.0f));
}
void CopyPadAnywhere(uint64_t in, uint64_t out, bool atomic) {
    Ub ub(256, true);
    const DataCopyExtParams params(1, 8, 0, 0, 0);
    if (atomic) SetAtomicAdd<float>();
    DataCopyPad(Gm(out), ub.Get(), params);
    SetAtomicNone();
    PipeBarrier<PIPE_ALL>();
    DataCopyPad(ub.Get(), Gm(in), params, DataCopyPadExtParams<float>());
}
// Parts of one buffer: the view of an operand contains others, the call touches none of them.
void Carved(uint32_t gathered) {
    Ub ub(4096, true);
    const LocalTensor<float> all = ub.Get();
    LocalTensor<uint8_t> scratch = ub.Get<uint8_t>();
    const LocalTensor<uint32_t> words = ub.Get<uint32_t>()[512];
    const uint32_t to[] = {8, 8}, from[] = {8, 1};
    uint64_t kept = 0;
    Duplicate(words, 0x11u, 8);
    ArithProgression(words[64].ReinterpretCast<int32_t>(), 0, 4, 64);
    ArithProgression(words[128].ReinterpretCast<int32_t>(), 0, 32, 8);
    PipeBarrier<PIPE_V>();
    Gather(all[gathered], all, words[64], 0, 64);
    PipeBarrier<PIPE_V>();
    Gatherb(words[192], words, words[128], 1, {1, 8});
    Sum(all[128], all[64], scratch, SumParams{8, 8, 8});
    Broadcast<float, 2, 1>(all[256], all[400], to, from, scratch);
    PipeBarrier<PIPE_V>();
    GatherMask(all, all[8], words, true, 32, {1, 1, 8, 8}, kept);
}
template <class Mode>
void Atomic() {
    Ub ub(64, true);
    SetAtomicAdd<Mode>();
    DataCopy(Gm(), ub.Get(), 8);
    SetAtomicNone();
}
void VectorLength(int32_t count) {
    Ub ub(256, true);
    Muls(ub.Get(), ub.Get(), 2.0f, count);
}
void CastMode(RoundMode mode) {
    Ub ub(512, true);
    Cast(ub.Get<bfloat16_t>()[128], ub.Get(), mode, 64);
}

// ---- rules: queues, events, barriers ----
void QueueAlloc(uint8_t room, int tensors) {
    Queue queue(room);
    LocalTensor<float> held[9];
    for (int i = 0; i < tensors; ++i) held[i] = queue.AllocTensor<float>();
    for (int i = 0; i < tensors; ++i) queue.FreeTensor(held[i]);
}
void QueueDepth(int en_ques, int de_ques) {
    Queue queue(2);
    LocalTensor<float> held[2] = {queue.AllocTensor<float>(), queue.AllocTensor<float>()};
    for (int i = 0; i < en_ques; ++i) queue.EnQue(held[i]);
    for (int i = 0; i < de_ques; ++i) queue.DeQue<float>();
    for (auto& tensor : held) queue.FreeTensor(tensor);
}
void QueueFree(int frees) {
    Queue queue(1);
    LocalTensor<float> tensor = queue.AllocTensor<float>();
    for (int i = 0; i < frees; ++i) queue.FreeTensor(tensor);
}
// Each tensor of both queues is used, one at a time: an NPU then holds an event id for each of them.
void QueueEvents(uint8_t tensors, uint8_t others, bool waits) {
    TPipe pipe;
    TQue<QuePosition::VECOUT, 1> first, second;
    pipe.InitBuffer(first, tensors, 64);
    pipe.InitBuffer(second, others, 64);
    for (int i = 0; i < 2 * tensors; ++i) first.FreeTensor(first.AllocTensor<float>());
    for (int i = 0; i < 2 * others; ++i) second.FreeTensor(second.AllocTensor<float>());
    if (waits) pipe.FetchEventID(HardEvent::MTE3_V);
}
void QueueEventsReset() {
    QueueEvents(8, 0, false);
    QueueEvents(0, 8, false);
}
// An event beside one that a queue holds. `id` below 0: that of FetchEventID.
void EventBesideQueue(int id, bool before) {
    Queue queue(1);
    LocalTensor<float> tensor = queue.AllocTensor<float>();
    if (before) SetFlag<HardEvent::MTE2_V>(id);
    queue.EnQue(tensor);
    if (id < 0) id = queue.pipe.FetchEventID(HardEvent::MTE2_V);
    if (!before) SetFlag<HardEvent::MTE2_V>(id);
    WaitFlag<HardEvent::MTE2_V>(id);
    queue.FreeTensor(queue.DeQue<float>());
}
void QueueOfAnother() {
    Queue mine(1);
    TQue<QuePosition::VECIN, 1> other;
    mine.pipe.InitBuffer(other, 1, 64);
    other.FreeTensor(mine.AllocTensor<float>());
}
void UseAfterFree(bool freed) {
    Queue queue(1);
    LocalTensor<float> tensor = queue.AllocTensor<float>();
    if (freed) queue.FreeTensor(tensor);
    Duplicate(tensor, 1.0f, 16);
    if (!freed) queue.FreeTensor(tensor);
}
void UseAfterReset(bool reset) {
    Ub ub(64);
    LocalTensor<float> tensor = ub.Get();
    if (reset) ub.pipe.Reset();
    Duplicate(tensor, 1.0f, 16);
}
void Events(int id, int sets, int waits) {
    for (int i = 0; i < sets; ++i) SetFlag<HardEvent::MTE2_V>(id);
    for (int i = 0; i < waits; ++i) WaitFlag<HardEvent::MTE2_V>(id);
}
void MeetOften() {
    for (int i = 0; i < 1000; ++i) SyncAll();
}
// The first two cores synchronize; `callers` call it.
void MeetSoftly(uint32_t callers) {
    Ub ub;
    if (GetBlockIdx() < callers) SyncAll(Gm<int32_t>(), ub.Get<int32_t>(), 2);
}
// One core fails while the others wait: they must unwind, not hang, and the first fault is reported.
void FailWhileOthersWait() {
    TPipe pipe;
    SyncAll();
    if (GetBlockIdx() == 3) WaitFlag<HardEvent::V_S>(0);
    SyncAll();
}

#define RULE(name, ...) {name, [] { __VA_ARGS__; }}
#define BROKEN(name, expected, ...) {name, [] { __VA_ARGS__; }, expected}
// clang-format off
const Kernel kRules[] = {
    RULE("ub_full", Ub(192 * 1024, true)),
    BROKEN("ub_over", "UB overflow|196576 of the UB's 196608",
           Ub ub(192 * 1024 - 32); ub.pipe.InitBuffer(ub.buf, 33)),
    BROKEN("buffer_of_nothing", "illegal argument|InitBuffer of 0 bytes",
           TPipe pipe; TBuf<> buf; pipe.InitBuffer(buf, 0)),
    RULE("buffers_64", Buffers(64)),
    BROKEN("buffers_65", "UB overflow|more than 64 buffers", Buffers(65)),
    BROKEN("two_pipes", "queue discipline|two TPipes", TPipe first; TPipe second),
    RULE("pipe_after_destroy", TPipe first; first.Destroy(); TPipe second),
    RULE("buf_view_ok", BufView(64, 48)),
    BROKEN("buf_view_over", "out of bounds|TBuf holds 256 bytes", BufView(64, 49)),
    BROKEN("buf_view_unaligned", "misaligned address|offset 16", BufView(16, 8)),
    RULE("copy_ok", CopyIn<float>(64, 0)),
    BROKEN("copy_rounded", "copy length rounded down|48 bytes: the last 16 would be dropped",
           CopyIn<float>(12, 0)),
    BROKEN("copy_rounded_half", "copy length rounded down|34 bytes: the last 2 would be dropped",
           CopyIn<half>(17, 0)),
    BROKEN("copy_nothing", "illegal argument|of 0 bytes", CopyIn<float>(0, 0)),
    BROKEN("copy_past_ub", "out of bounds|needs 288 bytes, the UB view holds 256", CopyIn<float>(72, 0)),
    RULE("copy_ub_aligned", CopyIn<float>(8, 8)),
    BROKEN("copy_ub_unaligned", "misaligned address|16 bytes past a 32-byte boundary", CopyIn<float>(8, 4)),
    RULE("copy_gm_end", CopyOut(kGmBytes - 256, 0, 64)),
    BROKEN("copy_gm_past", "out of bounds|256 bytes at byte 32516 of GM \"gm\", which has 32768",
           CopyOut(kGmBytes - 252, 0, 64)),
    BROKEN("copy_gm_unaligned", "misaligned address|not aligned to 4 bytes", CopyOut(2, 0, 8)),
    RULE("copy_declared", CopyOut(0, 16, 16)),
    BROKEN("copy_past_declared", "out of bounds|64 bytes, the GlobalTensor of \"gm\" holds 60", CopyOut(0, 15, 16)),
    BROKEN("copy_stranger", "out of bounds|in no tensor or window",
           Ub ub(64); DataCopy(ub.Get(), At<float>(g_stranger, 0), 8)),
    RULE("pad_ok", CopyPad(4095, 4, 0)),
    BROKEN("pad_count", "illegal argument|blockCount 4096 is over 4095", CopyPad(4096, 4, 0)),
    BROKEN("pad_element", "illegal argument|blockLen 6 is not a multiple of the 4-byte element",
           CopyPad(1, 6, 0)),
    RULE("pad_right_ok", CopyPad(1, 4, 7)),
    BROKEN("pad_right_over", "illegal argument|more than 32 bytes", CopyPad(1, 4, 9)),
    RULE("pad_gm_any", CopyPadAnywhere(1, 2, false)),
    BROKEN("pad_gm_atomic", "misaligned address|not aligned to 4 bytes", CopyPadAnywhere(1, 2, true)),
    RULE("carved", Carved(64)),
    BROKEN("carved_gather", "illegal argument|Gather: destination and source overlap", Carved(56)),
    RULE("atomic_ok", Atomic<float>()),
    BROKEN("atomic_type", "illegal argument|SetAtomic of another element type", Atomic<int32_t>()),
    BROKEN("atomic_left", "illegal argument|SetAtomicNone is missing", SetAtomicAdd<float>()),
    RULE("element_last", Ub(32).Get<int32_t>().SetValue(7, 1)),
    BROKEN("element_past", "out of bounds|element 8 of a LocalTensor of 8",
           Ub(32).Get<int32_t>().SetValue(8, 1)),
    RULE("vector_ok", VectorLength(64)),
    BROKEN("vector_past", "out of bounds|260 bytes, the UB view holds 256", VectorLength(65)),
    RULE("cast_rint", CastMode(RoundMode::CAST_RINT)),
    BROKEN("cast_none", "illegal argument|round mode 0", CastMode(RoundMode::CAST_NONE)),
    RULE("queue_alloc_2", QueueAlloc(2, 2)),
    BROKEN("queue_alloc_3", "queue discipline|none of the queue's 2 tensors free", QueueAlloc(2, 3)),
    RULE("queue_out_8", QueueAlloc(16, 8)),
    BROKEN("queue_out_9", "queue discipline|more than 8 queue tensors", QueueAlloc(16, 9)),
    RULE("queue_depth_ok", QueueDepth(1, 1)),
    BROKEN("queue_depth_over", "queue discipline|over the queue's depth 1", QueueDepth(2, 2)),
    BROKEN("queue_empty", "queue discipline|DeQue of an empty queue", QueueDepth(0, 1)),
    RULE("queue_freed", QueueFree(1)),
    BROKEN("queue_freed_twice", "queue discipline|freed twice", QueueFree(2)),
    BROKEN("queue_leak", "queue discipline|1 queue tensors were never freed", QueueFree(0)),
    RULE("queue_events_7", QueueEvents(4, 3, true)),
    BROKEN("queue_events_8", "event discipline|no event id of MTE3_V is left: queues hold 8", QueueEvents(4, 4, true)),
    RULE("queue_events_all", QueueEvents(4, 4, false)),
    BROKEN("queue_events_9", "queue discipline|queues hold 9 event ids of MTE3_V", QueueEvents(5, 4, false)),
    RULE("queue_events_again", QueueEventsReset()),
    RULE("queue_event_fetched", EventBesideQueue(-1, false)),
    BROKEN("queue_event_set", "event discipline|id 0 of MTE2_V is one that a queue has set", EventBesideQueue(0, false)),
    BROKEN("queue_event_taken", "event discipline|a queue takes event id 0 of MTE2_V", EventBesideQueue(0, true)),
    BROKEN("queue_of_another", "queue discipline|not this queue's", QueueOfAnother()),
    RULE("use_before_free", UseAfterFree(false)),
    BROKEN("use_after_free", "use after free|after FreeTensor", UseAfterFree(true)),
    RULE("use_before_reset", UseAfterReset(false)),
    BROKEN("use_after_reset", "use after free|TPipe was reset", UseAfterReset(true)),
    BROKEN("never_allocated", "use after free|never allocated", LocalTensor<float>().GetValue(0)),
    RULE("event_7", Events(7, 1, 1)),
    BROKEN("event_8", "event discipline|event id 8", Events(8, 1, 1)),
    BROKEN("event_twice", "event discipline|set twice", Events(0, 2, 1)),
    BROKEN("event_unset", "event discipline|of MTE2_V that nobody has set", Events(0, 0, 1)),
    BROKEN("event_left", "event discipline|still set", Events(0, 1, 0)),
    BROKEN("event_7_left", "event discipline|event 7 of MTE2_V", Events(7, 1, 0)),
    {"sync_all", [] { SyncAll(); }, "", 3},
    {"sync_diverges", [] { if (GetBlockIdx() != 1) SyncAll(); },
     "SyncAll divergence|but cores 1 have left", 3},
    {"sync_soft", [] { MeetSoftly(2); }, "", 3},
    {"sync_soft_diverges", [] { MeetSoftly(1); }, "SyncAll divergence|but cores 1 have left", 3},
    {"sync_soft_all", [] { MeetSoftly(3); }, "SyncAll divergence|the first 2 cores on core 2", 3},
    {"sync_mixed", [] { MeetSoftly(GetBlockIdx() == 0); SyncAll(); },
     "SyncAll divergence|cores 1 wait in a SyncAll of more cores", 3},
    {"sync_often", MeetOften, "", 48},
    {"fail_while_waiting", FailWhileOthersWait, "event discipline|(rank 5, core 3)", 48},
};
// clang-format on

std::string g_text;

template <size_t kCount>
const char* List(const Kernel (&kernels)[kCount]) {
    g_text.clear();
    for (const Kernel& kernel : kernels) g_text += std::string(kernel.name) + "|" + kernel.expected + "\n";
    return g_text.c_str();
}
template <size_t kCount>
const Kernel& Named(const Kernel (&kernels)[kCount], const char* name) {
    size_t i = 0;
    while (strcmp(kernels[i].name, name) != 0) ++i;
    return kernels[i];
}

}  // namespace

extern "C" const char* rules() { return List(kRules); }
extern "C" const char* run_rule(const char* name) {
    const Kernel& kernel = Named(kRules, name);
    twin::Device device(5);
    twin::LaunchSpec spec;
    spec.block_dim = kernel.cores;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(g_gm[5 % kRanks]);
    spec.ranges.push_back({begin, begin + kGmBytes, twin::GmKind::kTensor, false, nullptr, "gm"});
    for (int launch = 0; launch < 2; ++launch) {  // a fault must not spoil the device
        g_text.clear();
        try {
            device.Launch(spec, kernel.run);
        } catch (const std::exception& error) {
            g_text = error.what();
        }
    }
    return g_text.c_str();
}

#ifdef TWIN_CHECKED
namespace {

constexpr uint32_t kWindowBytes = 4096;
alignas(4096) uint8_t g_window[kRanks][kWindowBytes];
alignas(4096) uint8_t g_state[kRanks][kWindowBytes];

// ---- hazards: `on` is whether the edge is there ----
struct Three : Ub {
    Three() : Ub(768, true) {}
    LocalTensor<float> A() { return Get(); }
    LocalTensor<float> B() { return Get()[64]; }
    LocalTensor<float> C() { return Get()[128]; }
};
template <HardEvent event>
void Edge(bool on = true) {
    if (!on) return;
    SetFlag<event>(EVENT_ID0);
    WaitFlag<event>(EVENT_ID0);
}
// What each pipe does with A.
void Load(Three& ub) { DataCopy(ub.A(), Gm(512), 64); }
void Store(Three& ub) { DataCopy(Gm(), ub.A(), 64); }
void ReadV(Three& ub) { Adds(ub.B(), ub.A(), 1.0f, 64); }
void WriteV(Three& ub) { Adds(ub.A(), ub.B(), 1.0f, 64); }
void ReadS(Three& ub) { (void)ub.A().GetValue(7); }
void WriteS(Three& ub) { ub.A().SetValue(3, 5.0f); }
template <HardEvent event>
void Pipes(bool on, void (*first)(Three&), void (*second)(Three&)) {
    Three ub;
    first(ub);
    Edge<event>(on);
    second(ub);
}
// The right event over another pair of pipes orders nothing.
void WrongEvent() {
    Three ub;
    DataCopy(ub.A(), Gm(), 64);
    Edge<HardEvent::MTE2_S>();
    Edge<HardEvent::MTE3_V>();
    DataCopy(ub.B(), Gm(512), 64);
    Adds(ub.C(), ub.B(), 1.0f, 64);
}
// Other bytes of the same block are no conflict.
void OtherBytes() {
    Three ub;
    DataCopyPad(Gm(), ub.A(), DataCopyExtParams(1, 8, 0, 0, 0));
    ub.A().SetValue(2, 5.0f);
}
// A scalar wait reaches what is issued after it.
void ThroughScalar() {
    Three ub;
    DataCopy(ub.A(), Gm(), 64);
    Edge<HardEvent::MTE2_S>();
    Adds(ub.B(), ub.A(), 1.0f, 64);
}
void Queues(bool on) {
    TPipe pipe;
    TQue<QuePosition::VECIN, 1> in;
    TQue<QuePosition::VECOUT, 1> out;
    pipe.InitBuffer(in, 2, 256);
    pipe.InitBuffer(out, 2, 256);
    for (int i = 0; i < 6; ++i) {
        LocalTensor<float> x = in.AllocTensor<float>();
        DataCopy(x, Gm(i * 256), 64);
        in.EnQue(x);
        x = in.DeQue<float>();
        LocalTensor<float> y = out.AllocTensor<float>();
        Adds(y, x, 1.0f, 64);
        in.FreeTensor(x);
        out.EnQue(y);
        y = out.DeQue<float>();
        DataCopy(Gm(i * 256), y, 64);
        PipeBarrier<PIPE_V>();
        if (!on && i == 3) Adds(y, y, 1.0f, 64);  // while the copy is under way
        out.FreeTensor(y);
    }
}
void ReadB(Three& ub) { Adds(ub.C(), ub.B(), 1.0f, 64); }
template <pipe_t pipe>
void SamePipe(bool on, void (*first)(Three&), void (*second)(Three&)) {
    Three ub;
    first(ub);
    if (on) PipeBarrier<pipe>();
    second(ub);
}

// ---- UB that holds nothing ----
void Fresh(bool on) {
    Ub ub;
    if (on) Duplicate(ub.Get(), 1.0f, 64);
    PipeBarrier<PIPE_ALL>();
    (void)ub.Get().GetValue(63);
}
// Padding without a value, that of SetPadValue if it is set; without padding, the first element of the piece.
void Padding(bool on) {
    Three ub;
    Store(ub);
    if (on) SetPadValue(2.0f);
    for (uint8_t right : {uint8_t(0), uint8_t(3)}) {
        PipeBarrier<PIPE_ALL>();
        DataCopyPad(ub.A(), Gm(), DataCopyExtParams(1, 20, 0, 0, 0), DataCopyPadExtParams<float>(false, 0, right, 3));
        PipeBarrier<PIPE_ALL>();
        ASSERT(ub.A().GetValue(5) == (right == 0 ? 1.0f : 2.0f));
    }
}
void Freed(bool on) {
    TPipe pipe;
    TQue<QuePosition::VECIN, 1> in;
    pipe.InitBuffer(in, 1, 256);
    for (int i = 0; i < 2; ++i) {
        LocalTensor<float> x = in.AllocTensor<float>();
        if (i == 0 || on) DataCopy(x, Gm(), 64);
        in.EnQue(x);
        x = in.DeQue<float>();
        Adds(x, x, 1.0f, 64);
        in.FreeTensor(x);
    }
}

// ---- the scalar unit's cache ----
using Line = GlobalTensor<int32_t>;
void Clean(const Line& line, bool on = true) {
    if (!on) return;
    DataCacheCleanAndInvalid<int32_t, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(line);
}
void Stale(bool on) {
    Three ub;
    const Line line = Gm<int32_t>(1024);
    (void)line.GetValue(0);
    PipeBarrier<PIPE_ALL>();
    DataCopy(Gm(1024), ub.A(), 64);
    PipeBarrier<PIPE_ALL>();
    Clean(line, on);
    (void)line.GetValue(0);
}
void Unflushed(bool on) {
    Gm<int32_t>(1024).SetValue(0, 7);
    Clean(Gm<int32_t>(1024), on);
}
void UnflushedCopy(bool on) {
    Three ub;
    Unflushed(on);
    PipeBarrier<PIPE_ALL>();
    DataCopy(ub.A(), Gm(1024), 64);
    PipeBarrier<PIPE_ALL>();
    Clean(Gm<int32_t>(1024), !on);
}
void SharedLine(bool on) {
    const Line mine = Gm<int32_t>(1024 + GetBlockIdx() * (on ? 64 : 8));
    mine.SetValue(0, 7);
    SyncAll();
    Clean(mine);
}
void UnflushedSync(bool on) {
    if (GetBlockIdx() == 0) Unflushed(on);
    SyncAll();
    if (GetBlockIdx() == 1) (void)Gm<int32_t>(1024).GetValue(0);
    SyncAll();
    if (GetBlockIdx() == 0) Clean(Gm<int32_t>(1024));
}

// ---- cores ----
void Cores(bool on) {
    Three ub;
    const uint32_t me = static_cast<uint32_t>(GetBlockIdx());
    DataCopy(Gm(me * 256), ub.A(), 64);
    PipeBarrier<PIPE_ALL>();
    if (on) SyncAll();
    DataCopy(ub.B(), Gm((1 - me) * 256), 64);
}
// Halves of one 32-byte block, or all of it.
void TwoWriters(bool on) {
    Three ub;
    DataCopyPad(Gm(on ? GetBlockIdx() * 16 : 0), ub.A(), DataCopyExtParams(1, 16, 0, 0, 0));
}
void Adders(bool on, bool reader = false) {
    Three ub;
    if (on) SetAtomicAdd<float>();
    DataCopy(Gm(), ub.A(), 64);
    if (on) SetAtomicNone();
    PipeBarrier<PIPE_ALL>();
    if (reader && GetBlockIdx() == 1) DataCopy(ub.B(), Gm(), 64);
}
// A flag orders what comes before it, not what comes before another one.
void CrossFlags(bool on) {
    Three ub;
    const uint32_t me = static_cast<uint32_t>(GetBlockIdx());
    CrossCoreSetFlag<0, PIPE_MTE3>(3);
    DataCopy(Gm(me * 256), ub.A(), 64);
    CrossCoreSetFlag<0, PIPE_MTE3>(4);
    CrossCoreWaitFlag(on ? 4 : 3);
    DataCopy(ub.B(), Gm((1 - me) * 256), 64);
    CrossCoreWaitFlag(on ? 3 : 4);
}
// Rounds over one row: before a core overwrites it, its neighbour says that it has read it.
void CrossRounds(bool on) {
    Three ub;
    const uint32_t me = static_cast<uint32_t>(GetBlockIdx());
    for (int round = 0; round < 2; ++round) {
        DataCopy(Gm(me * 256), ub.A(), 64);
        CrossCoreSetFlag<0, PIPE_MTE3>(3);
        CrossCoreWaitFlag(3);
        DataCopy(ub.B(), Gm((1 - me) * 256), 64);
        if (on) {
            CrossCoreSetFlag<0, PIPE_MTE2>(3);
            CrossCoreWaitFlag(3);
        }
        PipeBarrier<PIPE_ALL>();
    }
}
// A word and a flag past the data cache, in a tensor: core 1 polls the flag.
void PastCache() {
    const auto word = [](uint64_t offset) { return twin::GmOf(reinterpret_cast<int32_t*>(g_gm[0] + offset)); };
    if (GetBlockIdx() == 0) {
        WriteGmByPassDCache(word(64), 7);
        WriteGmByPassDCache(word(0), 9);
    } else {
        while (ReadGmByPassDCache(word(0)) != 9) {
        }
        ASSERT(ReadGmByPassDCache(word(64)) == 7);
    }
}
// Cores read what core 0 then overwrites; each says by a flag that it has. The last one: `flagged`: too; else it is
// silent, and reads `own` bytes from byte `from` on. Core 0 writes the second half of the block.
void ManyReaders(bool flagged, uint32_t from = 0, uint32_t own = 32) {
    Three ub;
    const uint32_t me = static_cast<uint32_t>(GetBlockIdx()), last = static_cast<uint32_t>(GetBlockNum()) - 1;
    LocalTensor<int32_t> flag = ub.C().ReinterpretCast<int32_t>();
    Duplicate(flag, static_cast<int32_t>(9), 8);
    PipeBarrier<PIPE_ALL>();
    const auto flag_of = [](uint32_t core) { return At<int32_t>(g_state[0], core * 64); };
    if (me != 0) {
        DataCopyPad(ub.B(), Gm(me == last ? from : 0), DataCopyExtParams(1, me == last ? own : 32, 0, 0, 0),
                    DataCopyPadExtParams<float>(false, 0, 0, 0.0f));
        Edge<HardEvent::MTE2_MTE3>();
        if (flagged || me != last) DataCopy(flag_of(me), flag, 8);
        return;
    }
    for (uint32_t core = 1; core <= (flagged ? last : last - 1);) {
        DataCopy(flag[8], flag_of(core), 8);
        Edge<HardEvent::MTE2_S>();
        const bool seen = flag.GetValue(8) == 9;
        Edge<HardEvent::S_MTE2>();
        if (seen) {
            ++core;
        } else {
            TWIN_POLL_HINT();
        }
    }
    DataCopyPad(Gm(16), ub.A(), DataCopyExtParams(1, 16, 0, 0, 0));
}

// ---- ranks: a row, then a status block that says so ----
enum class Mistake { kNone, kNoDrain, kFlagFirst, kNoWait, kNoFlag, kReuse };
// A third-party kernel's flag lies in the data window, and nobody declares its poll.
template <Mistake mistake, bool kForeign = false>
void Ranks() {
    Three ub;
    const int me = twin::current_core().rank, peer = 1 - me;
    LocalTensor<int32_t> flag = ub.C().ReinterpretCast<int32_t>();
    Duplicate(flag, static_cast<int32_t>(9), 8);
    PipeBarrier<PIPE_ALL>();
    const auto flag_of = [](int rank) { return At<int32_t>(kForeign ? g_window[rank] + 1024 : g_state[rank], 0); };
    const auto send_flag = [&] { DataCopy(flag_of(peer), flag, 8); };
    if (mistake == Mistake::kFlagFirst) send_flag();
    DataCopy(At<float>(g_window[peer], 0), ub.A(), 64);
    if (mistake != Mistake::kNoDrain) PipeBarrier<PIPE_ALL>();
    if (mistake != Mistake::kFlagFirst && mistake != Mistake::kNoFlag) send_flag();
    for (bool seen = mistake == Mistake::kNoWait; !seen;) {
        DataCopy(flag[8], flag_of(me), 8);
        Edge<HardEvent::MTE2_S>();
        seen = flag.GetValue(8) == 9;
        Edge<HardEvent::S_MTE2>();
        if (!seen && !kForeign) TWIN_POLL_HINT();
    }
    DataCopy(ub.B(), At<float>(g_window[me], 0), 64);
    PipeBarrier<PIPE_ALL>();
    // Into the same place before the peer has said that it has read.
    if (mistake == Mistake::kReuse) DataCopy(At<float>(g_window[peer], 0), ub.A(), 64);
}
void WindowHalf(bool on) {
    Three ub;
    const int me = twin::current_core().rank;
    DataCopy(At<float>(g_window[1 - me], (on ? 0 : 2048) + me * 1024), ub.A(), 64);
}
void NeverComes() {
    Three ub;
    for (;;) {
        DataCopy(ub.A(), At<float>(g_state[0], 2048), 8);
        PipeBarrier<PIPE_ALL>();
        if (ub.A().GetValue(0) != 0.0f) return;
        TWIN_POLL_HINT();
    }
}

#define PAIR(name, cores, expected, ...)  \
    {name "_missing",                     \
     [] {                                 \
         constexpr bool on = false;       \
         __VA_ARGS__;                     \
     },                                   \
     expected, cores},                    \
    {                                     \
        name,                             \
            [] {                          \
                constexpr bool on = true; \
                __VA_ARGS__;              \
            },                            \
            "", cores                     \
    }
#define SYNC "missing pipe synchronisation|"
#define PIPES(from, to, First, Second)                                                                             \
    PAIR(#from "_" #to, 1, SYNC "is not ordered before " #to " |needs " #from "_" #to " or PipeBarrier<PIPE_ALL>", \
         Pipes<HardEvent::from##_##to>(on, First, Second))
#define RANKS(name, mistake, expected) {name, Ranks<Mistake::mistake>, expected, 1, 2}
// clang-format off
const Kernel kHazards[] = {
    PIPES(MTE2, V, Load, ReadV), PIPES(V, MTE2, ReadV, Load), PIPES(V, MTE3, WriteV, Store),
    PIPES(MTE3, V, Store, WriteV), PIPES(MTE3, MTE2, Store, Load), PIPES(MTE2, MTE3, Load, Store),
    PIPES(S, V, WriteS, ReadV), PIPES(V, S, WriteV, ReadS), PIPES(S, MTE2, WriteS, Load),
    PIPES(MTE2, S, Load, ReadS), PIPES(S, MTE3, WriteS, Store), PIPES(MTE3, S, Store, WriteS),
    {"wrong_event", WrongEvent, SYNC "MTE2 load|needs MTE2_V"},
    {"other_bytes", OtherBytes},
    {"through_scalar", ThroughScalar},
    PAIR("queues", 1, SYNC "MTE3 store|needs MTE3_V", Queues(on)),
    PAIR("v_v", 1, "same-pipe hazard|V write|needs PipeBarrier<PIPE_V>", SamePipe<PIPE_V>(on, ReadV, ReadB)),
    {"v_v_compiler", [] { SamePipe<PIPE_V>(false, ReadV, ReadB); }, "", 1, 1, true},
    PAIR("mte2_mte2", 1, "same-pipe hazard|MTE2 |needs PipeBarrier<PIPE_MTE2>",
         SamePipe<PIPE_MTE2>(on, Load, Load)),
    PAIR("mte3_mte3", 1, "same-pipe hazard|MTE3 store|needs PipeBarrier<PIPE_MTE3>",
         SamePipe<PIPE_MTE3>(on, Store, Store)),
    PAIR("fresh", 1, "uninitialised UB read|GetValue|never been written", Fresh(on)),
    PAIR("padding", 1, "uninitialised UB read|GetValue|dummy bytes", Padding(on)),
    PAIR("freed", 1, "uninitialised UB read|Adds|freed", Freed(on)),
    PAIR("stale", 1, "stale scalar read|GetValue|needs DataCacheCleanAndInvalid before the read", Stale(on)),
    PAIR("unflushed", 1, "unflushed scalar write|when the kernel ends|after the write", Unflushed(on)),
    PAIR("unflushed_copy", 1, "unflushed scalar write|misses what SetValue|after the write",
         UnflushedCopy(on)),
    PAIR("shared_line", 2, "cache line shared by two writers|64-byte line|lines of their own", SharedLine(on)),
    PAIR("unflushed_sync", 2, "unflushed scalar write|misses what SetValue|core 0", UnflushedSync(on)),
    PAIR("cores", 2, "race between cores|of core |needs PipeBarrier<PIPE_ALL> and SyncAll", Cores(on)),
    PAIR("two_writers", 2, "race between cores|MTE3 store|SyncAll", TwoWriters(on)),
    PAIR("adders", 2, "race between cores|MTE3 store|SyncAll", Adders(on)),
    {"adders_reader", [] { Adders(true, true); }, "race between cores|MTE2 load|SyncAll", 2},
    {"diverge", [] { if (GetBlockIdx() == 0) SyncAll(); },
     "SyncAll divergence|core 0 waits|cores 1 have left", 2},
    PAIR("many_readers", 7, "race between cores|MTE2 load|MTE3 store", ManyReaders(on)),
    PAIR("many_readers_of_a_part", 7, "race between cores|MTE2 load|MTE3 store", ManyReaders(false, on ? 0 : 16, 16)),
    PAIR("cross_flags", 2, "race between cores|MTE2 load|SyncAll", CrossFlags(on)),
    PAIR("cross_rounds", 2, "race between cores|MTE2 load|SyncAll", CrossRounds(on)),
    {"past_cache", PastCache, "", 2, 1, true},
    RANKS("ranks", kNone, ""),
    RANKS("ranks_unordered", kNoDrain, "race between ranks"),
    RANKS("ranks_flag_first", kFlagFirst, "race between ranks|MTE3 store|needs a status block"),
    RANKS("ranks_no_wait", kNoWait, "race between ranks| load at |needs a status block"),
    RANKS("ranks_no_flag", kNoFlag, "hang|rank 0 core 0 polls|rank 1 core 0 polls"),
    RANKS("ranks_reuse", kReuse, "race between ranks|MTE3 store|needs a status block"),
    {"third_party", Ranks<Mistake::kNone, true>, "", 1, 2, true},
    {"third_party_unordered", Ranks<Mistake::kNoDrain, true>, "race between ranks", 1, 2, true},
    {"half", [] { WindowHalf(true); }, "", 1, 2},
    {"half_missing", [] { WindowHalf(false); }, "wrong part of a window|data window|other half", 1, 2},
    {"never_comes", NeverComes, "hang|polls at|nothing can move"},
};
// clang-format on

twin::GmRange Range(void* begin, uint64_t bytes, twin::GmKind kind, const char* name, int owner) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
    return {address, address + bytes, kind, kind == twin::GmKind::kWindowState, nullptr, name, owner};
}

}  // namespace

extern "C" const char* hazards() { return List(kHazards); }
// What the engine says, or nothing. `unordered`: stores land in any order.
extern "C" const char* run_hazard(const char* name, int policy, uint64_t seed, int unordered) {
    const Kernel& kernel = Named(kHazards, name);
    memset(g_gm, 0, sizeof(g_gm));
    memset(g_window, 0, sizeof(g_window));
    memset(g_state, 0, sizeof(g_state));
    twin::ProgramStep steps[kRanks];
    std::vector<twin::RankProgram> programs(kernel.ranks);
    for (uint32_t rank = 0; rank < kernel.ranks; ++rank) {
        twin::ProgramStep& step = steps[rank];
        step.spec.block_dim = kernel.cores;
        step.spec.watch_polls = kernel.third_party;
        step.spec.ranges = {Range(g_gm[rank], kGmBytes, twin::GmKind::kTensor, "gm", -1)};
        for (uint32_t peer = 0; peer < kernel.ranks; ++peer) {
            const int owner = static_cast<int>(peer);
            step.spec.ranges.push_back(
                Range(g_window[peer], kWindowBytes, twin::GmKind::kWindowData, "data window", owner));
            step.spec.ranges.push_back(
                Range(g_state[peer], kWindowBytes, twin::GmKind::kWindowState, "state window", owner));
        }
        if (strncmp(name, "half", 4) == 0) {
            step.spec.window_rule = [](uintptr_t begin, uint64_t, bool) -> const char* {
                const uint64_t at = (begin - reinterpret_cast<uintptr_t>(g_window)) % kWindowBytes;
                return at < kWindowBytes / 2 ? nullptr : "it lies in the other half";
            };
        }
        step.kernel = kernel.run;
        programs[rank].rank = static_cast<int>(rank);
        programs[rank].steps = {&step};
    }
    twin::RunOptions options;
    options.policy = static_cast<twin::Policy>(policy);
    options.seed = seed;
    options.unordered = unordered != 0;
    options.explicit_sync = !kernel.third_party;
    options.max_steps = 100000;
    const twin::RunResult result = twin::Explorer().Run(programs, options);
    g_text = result.failed ? result.message : "";
    return g_text.c_str();
}
#endif
