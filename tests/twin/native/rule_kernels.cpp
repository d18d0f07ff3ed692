// Tiny kernels that break one rule of the hardware each, and near misses that break none. A test runs them by
// name and reads what the twin says.
#include <cstring>

#include "kernel_operator.h"
#include "twin/engine/launch.h"

namespace {

using namespace AscendC;

constexpr uint32_t kGmBytes = 32768;
alignas(64) uint8_t g_gm[kGmBytes];
alignas(64) uint8_t g_stranger[64];  // memory that no tensor of the launch covers

template <class T>
GlobalTensor<T> Gm(uint64_t offset = 0, uint64_t count = 0) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(twin::GmOf(g_gm + offset)), count);
    return tensor;
}

using InQueue = TQue<QuePosition::VECIN, 1>;

struct Rule {
    const char* name;
    void (*kernel)();
    uint32_t cores;
};

// ---- UB allocation ----
void UbFull() {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 192 * 1024);
    Duplicate(buf.Get<float>(), 1.0f, 192 * 256);
}
void UbOver() {
    TPipe pipe;
    TBuf<> a, b;
    pipe.InitBuffer(a, 192 * 1024 - 32);
    pipe.InitBuffer(b, 33);
}
template <int kCount>
void Buffers() {
    TPipe pipe;
    TBuf<> buf;
    for (int i = 0; i < kCount; ++i) pipe.InitBuffer(buf, 32);
}
void TwoPipes() {
    TPipe first;
    TPipe second;
}
void PipeAfterDestroy() {
    TPipe first;
    first.Destroy();
    TPipe second;
}
template <int kOffset, int kCount>
void BufView() {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 256);
    buf.GetWithOffset<float>(kCount, kOffset);
}

// ---- copies ----
template <class T, int kCount, int kUbOffset>
void CopyIn() {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 256);
    DataCopy(buf.Get<T>()[kUbOffset], Gm<T>(), kCount);
}
template <int kOffset, int kDeclared, int kCount>
void CopyOut() {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 256);
    Duplicate(buf.Get<float>(), 0.0f, 64);
    PipeBarrier<PIPE_ALL>();
    DataCopy(Gm<float>(kOffset, kDeclared), buf.Get<float>(), kCount);
}
void CopyStranger() {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 64);
    GlobalTensor<float> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(twin::GmOf(g_stranger)));
    DataCopy(buf.Get<float>(), tensor, 8);
}
template <int kBlocks, int kBytes, int kRight>
void CopyPad() {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 160 * 1024);
    DataCopyPad(buf.Get<float>(), Gm<float>(), DataCopyExtParams(kBlocks, kBytes, 0, 0, 0),
                DataCopyPadExtParams<float>(kRight != 0, 0, kRight, 0.0f));
}
template <class Mode>
void Atomic() {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 64);
    Duplicate(buf.Get<float>(), 1.0f, 16);
    PipeBarrier<PIPE_ALL>();
    SetAtomicAdd<Mode>();
    DataCopy(Gm<float>(), buf.Get<float>(), 8);
    SetAtomicNone();
}
void AtomicLeft() { SetAtomicAdd<float>(); }

// ---- elements ----
template <int kIndex>
void Element() {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 32);
    buf.Get<int32_t>().SetValue(kIndex, 1);
}
template <int kCount>
void VectorLength() {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 256);
    Duplicate(buf.Get<float>(), 1.0f, 64);
    PipeBarrier<PIPE_ALL>();
    Muls(buf.Get<float>(), buf.Get<float>(), 2.0f, kCount);
}
template <RoundMode kMode>
void CastMode() {
    TPipe pipe;
    TBuf<> from, to;
    pipe.InitBuffer(from, 256);
    pipe.InitBuffer(to, 256);
    Duplicate(from.Get<float>(), 1.0f, 64);
    PipeBarrier<PIPE_ALL>();
    Cast(to.Get<bfloat16_t>(), from.Get<float>(), kMode, 64);
}

// ---- queues ----
template <int kTensors>
void QueueAlloc() {
    TPipe pipe;
    InQueue queue;
    pipe.InitBuffer(queue, 2, 64);
    LocalTensor<float> held[kTensors];
    for (auto& tensor : held) tensor = queue.AllocTensor<float>();
    for (auto& tensor : held) queue.FreeTensor(tensor);
}
template <int kTensors>
void QueueAtOnce() {
    TPipe pipe;
    InQueue queue;
    pipe.InitBuffer(queue, 16, 64);
    LocalTensor<float> held[kTensors];
    for (auto& tensor : held) tensor = queue.AllocTensor<float>();
    for (auto& tensor : held) queue.FreeTensor(tensor);
}
template <int kEnQues, int kDeQues>
void QueueDepth() {
    TPipe pipe;
    InQueue queue;
    pipe.InitBuffer(queue, 2, 64);
    LocalTensor<float> held[2] = {queue.AllocTensor<float>(), queue.AllocTensor<float>()};
    for (int i = 0; i < kEnQues; ++i) queue.EnQue(held[i]);
    for (int i = 0; i < kDeQues; ++i) queue.DeQue<float>();
    for (auto& tensor : held) queue.FreeTensor(tensor);
}
template <int kFrees>
void QueueFree() {
    TPipe pipe;
    InQueue queue;
    pipe.InitBuffer(queue, 1, 64);
    LocalTensor<float> tensor = queue.AllocTensor<float>();
    for (int i = 0; i < kFrees; ++i) queue.FreeTensor(tensor);
}
void QueueForeign() {
    TPipe pipe;
    InQueue mine, other;
    pipe.InitBuffer(mine, 1, 64);
    pipe.InitBuffer(other, 1, 64);
    other.FreeTensor(mine.AllocTensor<float>());
}
template <bool kFreed>
void UseAfterFree() {
    TPipe pipe;
    InQueue queue;
    pipe.InitBuffer(queue, 1, 64);
    LocalTensor<float> tensor = queue.AllocTensor<float>();
    if (kFreed) queue.FreeTensor(tensor);
    Duplicate(tensor, 1.0f, 16);
    if (!kFreed) queue.FreeTensor(tensor);
}
template <bool kReset>
void UseAfterReset() {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 64);
    LocalTensor<float> tensor = buf.Get<float>();
    if (kReset) pipe.Reset();
    Duplicate(tensor, 1.0f, 16);
}
void NeverAllocated() {
    LocalTensor<float> tensor;
    tensor.GetValue(0);
}

// ---- events and barriers ----
template <int kId, int kSets, int kWaits>
void Events() {
    for (int i = 0; i < kSets; ++i) SetFlag<HardEvent::MTE2_V>(kId);
    for (int i = 0; i < kWaits; ++i) WaitFlag<HardEvent::MTE2_V>(kId);
}
template <bool kAll>
void Meet() {
    if (kAll || GetBlockIdx() != 1) SyncAll();
}
void MeetOften() {
    for (int i = 0; i < 1000; ++i) SyncAll();
}
// One core fails while the others wait: they must unwind, not hang, and the first fault is told.
void FailWhileOthersWait() {
    TPipe pipe;
    SyncAll();
    if (GetBlockIdx() == 3) WaitFlag<HardEvent::V_S>(0);
    SyncAll();
}

const Rule kRules[] = {
    {"ub_full", UbFull, 1},
    {"ub_over", UbOver, 1},
    {"buffers_64", Buffers<64>, 1},
    {"buffers_65", Buffers<65>, 1},
    {"two_pipes", TwoPipes, 1},
    {"pipe_after_destroy", PipeAfterDestroy, 1},
    {"buf_view_ok", BufView<64, 48>, 1},
    {"buf_view_over", BufView<64, 49>, 1},
    {"buf_view_unaligned", BufView<16, 8>, 1},
    {"copy_ok", CopyIn<float, 64, 0>, 1},
    {"copy_rounded", CopyIn<float, 12, 0>, 1},
    {"copy_rounded_half", CopyIn<half, 17, 0>, 1},
    {"copy_nothing", CopyIn<float, 0, 0>, 1},
    {"copy_past_ub", CopyIn<float, 72, 0>, 1},
    {"copy_ub_aligned", CopyIn<float, 8, 8>, 1},
    {"copy_ub_unaligned", CopyIn<float, 8, 4>, 1},
    {"copy_gm_end", CopyOut<kGmBytes - 256, 0, 64>, 1},
    {"copy_gm_past", CopyOut<kGmBytes - 252, 0, 64>, 1},
    {"copy_gm_unaligned", CopyOut<2, 0, 8>, 1},
    {"copy_declared", CopyOut<0, 16, 16>, 1},
    {"copy_past_declared", CopyOut<0, 15, 16>, 1},
    {"copy_stranger", CopyStranger, 1},
    {"pad_ok", CopyPad<4095, 4, 0>, 1},
    {"pad_count", CopyPad<4096, 4, 0>, 1},
    {"pad_element", CopyPad<1, 6, 0>, 1},
    {"pad_right_ok", CopyPad<1, 4, 7>, 1},
    {"pad_right_over", CopyPad<1, 4, 9>, 1},
    {"atomic_ok", Atomic<float>, 1},
    {"atomic_type", Atomic<int32_t>, 1},
    {"atomic_left", AtomicLeft, 1},
    {"element_last", Element<7>, 1},
    {"element_past", Element<8>, 1},
    {"vector_ok", VectorLength<64>, 1},
    {"vector_past", VectorLength<65>, 1},
    {"cast_rint", CastMode<RoundMode::CAST_RINT>, 1},
    {"cast_none", CastMode<RoundMode::CAST_NONE>, 1},
    {"queue_alloc_2", QueueAlloc<2>, 1},
    {"queue_alloc_3", QueueAlloc<3>, 1},
    {"queue_out_8", QueueAtOnce<8>, 1},
    {"queue_out_9", QueueAtOnce<9>, 1},
    {"queue_depth_ok", QueueDepth<1, 1>, 1},
    {"queue_depth_over", QueueDepth<2, 2>, 1},
    {"queue_empty", QueueDepth<0, 1>, 1},
    {"queue_freed", QueueFree<1>, 1},
    {"queue_freed_twice", QueueFree<2>, 1},
    {"queue_leak", QueueFree<0>, 1},
    {"queue_foreign", QueueForeign, 1},
    {"use_before_free", UseAfterFree<false>, 1},
    {"use_after_free", UseAfterFree<true>, 1},
    {"use_before_reset", UseAfterReset<false>, 1},
    {"use_after_reset", UseAfterReset<true>, 1},
    {"never_allocated", NeverAllocated, 1},
    {"event_7", Events<7, 1, 1>, 1},
    {"event_8", Events<8, 1, 1>, 1},
    {"event_twice", Events<0, 2, 1>, 1},
    {"event_unset", Events<0, 0, 1>, 1},
    {"event_left", Events<0, 1, 0>, 1},
    {"sync_all", Meet<true>, 3},
    {"sync_diverges", Meet<false>, 3},
    {"sync_often", MeetOften, 48},
    {"fail_while_waiting", FailWhileOthersWait, 48},
};

}  // namespace

extern "C" const char* run_rule(const char* name) {
    static char text[1024];
    text[0] = '\0';
    for (const Rule& rule : kRules) {
        if (strcmp(rule.name, name) != 0) continue;
        twin::Device device(5);
        twin::LaunchSpec spec;
        spec.block_dim = rule.cores;
        const uintptr_t begin = reinterpret_cast<uintptr_t>(g_gm);
        spec.ranges.push_back({begin, begin + kGmBytes, twin::GmKind::kTensor, false, nullptr, "gm"});
        for (int launch = 0; launch < 2; ++launch) {  // a fault must not spoil the device
            text[0] = '\0';
            try {
                device.Launch(spec, rule.kernel);
            } catch (const std::exception& error) {
                strncpy(text, error.what(), sizeof(text) - 1);
            }
        }
        return text;
    }
    return "no such rule";
}

extern "C" const char* rule_names() {
    static char text[4096];
    text[0] = '\0';
    for (const Rule& rule : kRules) {
        strcat(text, rule.name);
        strcat(text, " ");
    }
    return text;
}
