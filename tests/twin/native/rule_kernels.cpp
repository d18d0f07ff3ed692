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

struct Ub {
    explicit Ub(uint32_t bytes = 256, bool fill = false) {
        pipe.InitBuffer(buf, bytes);
        if (!fill) return;
        Duplicate(buf.Get<float>(), 1.0f, static_cast<int32_t>(bytes / 4));
        PipeBarrier<PIPE_ALL>();
    }
    template <class T>
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

struct Rule {
    const char* name;
    void (*kernel)();
    uint32_t cores = 1;
};

// ---- UB allocation ----
void UbFull() {
    Ub ub(192 * 1024);
    Duplicate(ub.Get<float>(), 1.0f, 192 * 256);
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
    Ub ub;
    ub.buf.GetWithOffset<float>(kCount, kOffset);
}

// ---- copies ----
template <class T, int kCount, int kUbOffset>
void CopyIn() {
    Ub ub;
    DataCopy(ub.Get<T>()[kUbOffset], Gm<T>(), kCount);
}
template <int kOffset, int kDeclared, int kCount>
void CopyOut() {
    Ub ub(256, true);
    DataCopy(Gm<float>(kOffset, kDeclared), ub.Get<float>(), kCount);
}
void CopyStranger() {
    Ub ub(64);
    GlobalTensor<float> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(twin::GmOf(g_stranger)));
    DataCopy(ub.Get<float>(), tensor, 8);
}
template <int kBlocks, int kBytes, int kRight>
void CopyPad() {
    Ub ub(160 * 1024);
    DataCopyPad(ub.Get<float>(), Gm<float>(), DataCopyExtParams(kBlocks, kBytes, 0, 0, 0),
                DataCopyPadExtParams<float>(kRight != 0, 0, kRight, 0.0f));
}
template <class Mode>
void Atomic() {
    Ub ub(64, true);
    SetAtomicAdd<Mode>();
    DataCopy(Gm<float>(), ub.Get<float>(), 8);
    SetAtomicNone();
}
void AtomicLeft() { SetAtomicAdd<float>(); }

// ---- elements ----
template <int kIndex>
void Element() {
    Ub ub(32);
    ub.Get<int32_t>().SetValue(kIndex, 1);
}
template <int kCount>
void VectorLength() {
    Ub ub(256, true);
    Muls(ub.Get<float>(), ub.Get<float>(), 2.0f, kCount);
}
template <RoundMode kMode>
void CastMode() {
    Ub ub(512, true);
    Cast(ub.Get<bfloat16_t>()[128], ub.Get<float>(), kMode, 64);
}

// ---- queues ----
template <int kRoom, int kTensors>
void QueueAlloc() {
    Queue queue(kRoom);
    LocalTensor<float> held[kTensors];
    for (auto& tensor : held) tensor = queue.AllocTensor<float>();
    for (auto& tensor : held) queue.FreeTensor(tensor);
}
template <int kEnQues, int kDeQues>
void QueueDepth() {
    Queue queue(2);
    LocalTensor<float> held[2] = {queue.AllocTensor<float>(), queue.AllocTensor<float>()};
    for (int i = 0; i < kEnQues; ++i) queue.EnQue(held[i]);
    for (int i = 0; i < kDeQues; ++i) queue.DeQue<float>();
    for (auto& tensor : held) queue.FreeTensor(tensor);
}
template <int kFrees>
void QueueFree() {
    Queue queue(1);
    LocalTensor<float> tensor = queue.AllocTensor<float>();
    for (int i = 0; i < kFrees; ++i) queue.FreeTensor(tensor);
}
void QueueForeign() {
    Queue mine(1);
    TQue<QuePosition::VECIN, 1> other;
    mine.pipe.InitBuffer(other, 1, 64);
    other.FreeTensor(mine.AllocTensor<float>());
}
template <bool kFreed>
void UseAfterFree() {
    Queue queue(1);
    LocalTensor<float> tensor = queue.AllocTensor<float>();
    if (kFreed) queue.FreeTensor(tensor);
    Duplicate(tensor, 1.0f, 16);
    if (!kFreed) queue.FreeTensor(tensor);
}
template <bool kReset>
void UseAfterReset() {
    Ub ub(64);
    LocalTensor<float> tensor = ub.Get<float>();
    if (kReset) ub.pipe.Reset();
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
    {"ub_full", UbFull},
    {"ub_over", UbOver},
    {"buffers_64", Buffers<64>},
    {"buffers_65", Buffers<65>},
    {"two_pipes", TwoPipes},
    {"pipe_after_destroy", PipeAfterDestroy},
    {"buf_view_ok", BufView<64, 48>},
    {"buf_view_over", BufView<64, 49>},
    {"buf_view_unaligned", BufView<16, 8>},
    {"copy_ok", CopyIn<float, 64, 0>},
    {"copy_rounded", CopyIn<float, 12, 0>},
    {"copy_rounded_half", CopyIn<half, 17, 0>},
    {"copy_nothing", CopyIn<float, 0, 0>},
    {"copy_past_ub", CopyIn<float, 72, 0>},
    {"copy_ub_aligned", CopyIn<float, 8, 8>},
    {"copy_ub_unaligned", CopyIn<float, 8, 4>},
    {"copy_gm_end", CopyOut<kGmBytes - 256, 0, 64>},
    {"copy_gm_past", CopyOut<kGmBytes - 252, 0, 64>},
    {"copy_gm_unaligned", CopyOut<2, 0, 8>},
    {"copy_declared", CopyOut<0, 16, 16>},
    {"copy_past_declared", CopyOut<0, 15, 16>},
    {"copy_stranger", CopyStranger},
    {"pad_ok", CopyPad<4095, 4, 0>},
    {"pad_count", CopyPad<4096, 4, 0>},
    {"pad_element", CopyPad<1, 6, 0>},
    {"pad_right_ok", CopyPad<1, 4, 7>},
    {"pad_right_over", CopyPad<1, 4, 9>},
    {"atomic_ok", Atomic<float>},
    {"atomic_type", Atomic<int32_t>},
    {"atomic_left", AtomicLeft},
    {"element_last", Element<7>},
    {"element_past", Element<8>},
    {"vector_ok", VectorLength<64>},
    {"vector_past", VectorLength<65>},
    {"cast_rint", CastMode<RoundMode::CAST_RINT>},
    {"cast_none", CastMode<RoundMode::CAST_NONE>},
    {"queue_alloc_2", QueueAlloc<2, 2>},
    {"queue_alloc_3", QueueAlloc<2, 3>},
    {"queue_out_8", QueueAlloc<16, 8>},
    {"queue_out_9", QueueAlloc<16, 9>},
    {"queue_depth_ok", QueueDepth<1, 1>},
    {"queue_depth_over", QueueDepth<2, 2>},
    {"queue_empty", QueueDepth<0, 1>},
    {"queue_freed", QueueFree<1>},
    {"queue_freed_twice", QueueFree<2>},
    {"queue_leak", QueueFree<0>},
    {"queue_foreign", QueueForeign},
    {"use_before_free", UseAfterFree<false>},
    {"use_after_free", UseAfterFree<true>},
    {"use_before_reset", UseAfterReset<false>},
    {"use_after_reset", UseAfterReset<true>},
    {"never_allocated", NeverAllocated},
    {"event_7", Events<7, 1, 1>},
    {"event_8", Events<8, 1, 1>},
    {"event_twice", Events<0, 2, 1>},
    {"event_unset", Events<0, 0, 1>},
    {"event_left", Events<0, 1, 0>},
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
