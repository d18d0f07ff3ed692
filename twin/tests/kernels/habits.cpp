// What kernels in use do against the API's rules, and what no kernel should do, by tiling key.
#include "moe_mc2_base.h"

using namespace Mc2Sample;

extern "C" __global__ __aicore__ void habits(GM_ADDR x, GM_ADDR y) {
    if (GetBlockIdx() != 0) return;
    TPipe pipe;
    TBuf<> buf, small, longer, none;
    TQue<QuePosition::VECIN, 1> queue;
    pipe.InitBuffer(buf, 192);
    pipe.InitBuffer(small, 64);
    pipe.InitBuffer(longer, 1024);
    pipe.InitBuffer(queue, 1, 32);
    LocalTensor<float> row = buf.Get<float>(), words = small.Get<float>();
    DataCopy(row, Gm<float>(x), 48);
    SyncFunc<HardEvent::MTE2_V>();
    if (TILING_KEY_IS(0)) DataCopy(row, Gm<float>(x), 0);
    if (TILING_KEY_IS(2) || TILING_KEY_IS(3)) {
        if (TILING_KEY_IS(2)) Sum(row, row, SumParams{2, 24, 24});
        if (TILING_KEY_IS(3)) Sum(words, row, SumParams{4, 12, 12});
        SyncFunc<HardEvent::V_MTE3>();
        DataCopy(Gm<float>(y), TILING_KEY_IS(2) ? row : words, 8);
    }
    PipeBarrier<PIPE_V>();
    if (TILING_KEY_IS(4)) Duplicate(words, 1.0f, 24);
    if (TILING_KEY_IS(6)) pipe.InitBuffer(none, 0);
    if (TILING_KEY_IS(7)) {  // the atomic store and the vector unit read the same row
        SyncFunc<HardEvent::V_MTE3>();
        SetAtomicAdd<float>();
        DataCopy(Gm<float>(y), row, 48);
        SetAtomicNone();
        Adds(words, row, 1.0f, 16);
    }
    if (TILING_KEY_IS(20)) words = words[17];
    if (TILING_KEY_IS(22)) {
        GlobalTensor<float> declared;
        declared.SetGlobalBuffer((__gm__ float*)x, 40);
        DataCopy(words, declared[32], 16);
    }
    if (TILING_KEY_IS(23)) queue.AllocTensor<float>();
    if (TILING_KEY_IS(24)) Muls(row, row, 2.0f, static_cast<uint64_t>(0), 1, {1, 1, 8, 8});
    LocalTensor<float> flags = longer.Get<float>();
    if (TILING_KEY_VAR >> 32 ==
        1) {  // a call over 256 elements: which, by how many blocks its operands are apart, count
        const uint32_t call = TILING_KEY_VAR >> 24 & 3, apart = 8 * (TILING_KEY_VAR >> 12 & 31);
        const uint32_t count = TILING_KEY_VAR & 511;
        DataCopy(flags, Gm<float>(x), 256);
        SyncFunc<HardEvent::MTE2_V>();
        if (call == 0) Adds(flags[apart], flags, 1.0f, count);
        if (call == 1) CompareScalar(flags[apart].ReinterpretCast<uint8_t>(), flags, 0.0f, CMPMODE::GT, count);
        if (call == 2) Adds(flags[apart], flags, 1.0f, static_cast<uint64_t>(64), count / 64, {1, 1, 8, 8});
        if (call == 3) Adds(flags, flags[apart], 1.0f, count);
        SyncFunc<HardEvent::V_MTE3>();
        DataCopy(Gm<float>(y), flags, 256);
    }
    if (TILING_KEY_IS(22)) {
        SyncFunc<HardEvent::MTE2_MTE3>();
        DataCopy(Gm<float>(y), words, 16);
    }
    volatile uint32_t* nowhere = (volatile uint32_t*)16;
    if (TILING_KEY_IS(10)) *(__gm__ uint32_t*)y = *nowhere;
    if (TILING_KEY_IS(12)) *(__gm__ uint32_t*)y = *(volatile uint32_t*)0xdead000000000000;
}

// A row, from a queue to a queue; each comes by value or by reference.
template <typename In, typename Out>
__aicore__ inline void AddOne(In in, Out out, GlobalTensor<float> x, GlobalTensor<float> y) {
    LocalTensor<float> a = in.template AllocTensor<float>();
    DataCopy(a, x, 64);
    in.EnQue(a);
    a = in.template DeQue<float>();
    LocalTensor<float> b = out.template AllocTensor<float>();
    Adds(b, a, 1.0f, 64);
    out.EnQue(b);
    in.FreeTensor(a);
    b = out.template DeQue<float>();
    DataCopy(y, b, 64);
    out.FreeTensor(b);
}

// Tiling: rows, buffers of both queues, and which of them comes by value: 1 the first, 2 the second. 4: none, and
// the first gives back its events after each row.
extern "C" __global__ __aicore__ void queues_by_value(GM_ADDR x, GM_ADDR y, GM_ADDR tiling) {
    using InQueue = TQue<QuePosition::VECIN, 4>;
    using OutQueue = TQue<QuePosition::VECOUT, 4>;
    const __gm__ uint32_t* numbers = reinterpret_cast<const __gm__ uint32_t*>(tiling);
    TPipe pipe;
    InQueue in;
    OutQueue out;
    pipe.InitBuffer(in, numbers[1], 256);
    pipe.InitBuffer(out, numbers[2], 256);
    for (uint32_t row = 0; row < numbers[0]; ++row) {
        const GlobalTensor<float> from = Gm<float>(x)[row * 64], to = Gm<float>(y)[row * 64];
        if (numbers[3] == 0) AddOne<InQueue&, OutQueue&>(in, out, from, to);
        if (numbers[3] == 1) AddOne<InQueue, OutQueue&>(in, out, from, to);
        if (numbers[3] == 2) AddOne<InQueue&, OutQueue>(in, out, from, to);
        if (numbers[3] == 3) AddOne<InQueue, OutQueue>(in, out, from, to);
        if (numbers[3] == 4) AddOne<InQueue&, OutQueue&>(in, out, from, to);
        if (numbers[3] == 4) in.FreeAllEvent();
    }
}

// Queues of depth 0: each row's tensors are allocated and dequeued in place, both rows of a pair before either is used.
// Key 1: a tensor that is not in the queue is taken out; 2: nine buffers.
extern "C" __global__ __aicore__ void queues_in_place(GM_ADDR x, GM_ADDR y) {
    TPipe pipe;
    TQue<QuePosition::VECIN, 0> in;
    TQue<QuePosition::VECOUT, 0> out;
    pipe.InitBuffer(in, TILING_KEY_IS(2) ? 9 : 2, 256);
    pipe.InitBuffer(out, 2, 256);
    LocalTensor<float> a[2], b;
    for (uint32_t row = 0; row < 8; row += 2) {
        for (uint32_t i = 0; i < 2; ++i) {
            in.AllocTensor<float>(a[i]);
            DataCopy(a[i], Gm<float>(x)[(row + i) * 64], 64);
            if (!TILING_KEY_IS(1)) in.EnQue(a[i]);
        }
        for (uint32_t i = 0; i < 2; ++i) {
            in.DeQue<float>(a[1 - i]);
            out.AllocTensor<float>(b);
            Adds(b, a[1 - i], 1.0f, 64);
            out.EnQue(b);
            in.FreeTensor(a[1 - i]);
            out.DeQue<float>(b);
            DataCopy(Gm<float>(y)[(row + 1 - i) * 64], b, 64);
            out.FreeTensor(b);
        }
    }
}

// Core 0 leaves a block in the workspace, which core 1 stores into y. Key 1: they meet in between.
extern "C" __global__ __aicore__ void left_block(GM_ADDR x, GM_ADDR y, GM_ADDR workspace) {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 32);
    LocalTensor<float> block = buf.Get<float>();
    if (GetBlockIdx() == 0) {
        DataCopy(block, Gm<float>(x), 8);
        PipeBarrier<PIPE_ALL>();
        DataCopy(Gm<float>(workspace), block, 8);
        PipeBarrier<PIPE_ALL>();
    }
    if (TILING_KEY_IS(1)) SyncAll();
    if (GetBlockIdx() == 1) {
        DataCopy(block, Gm<float>(workspace), 8);
        PipeBarrier<PIPE_ALL>();
        DataCopy(Gm<float>(y), block, 8);
    }
}
