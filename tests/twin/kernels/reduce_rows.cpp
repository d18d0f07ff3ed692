// Sum and maximum of every row, fp32: many rows at once by Sum, one by one by ReduceMax.
#include "kernel_operator.h"

using namespace AscendC;

struct ReduceRowsTilingData {
    uint32_t rows;  // of all cores, a multiple of 8 a core
    uint32_t columns;
    uint32_t paddedColumns;  // a multiple of 8
};

extern "C" __global__ __aicore__ void reduce_rows(GM_ADDR x, GM_ADDR sums, GM_ADDR maxima, GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(ReduceRowsTilingData, t, tiling);
    const uint32_t rows = t.rows / GetBlockNum(), first = rows * GetBlockIdx();
    TPipe pipe;
    TQue<TPosition::VECIN, 1> inQueue;
    TQue<TPosition::VECOUT, 1> sumQueue, maxQueue;
    TBuf<TPosition::VECCALC> scratch, one;
    pipe.InitBuffer(inQueue, 1, rows * t.paddedColumns * sizeof(float));
    pipe.InitBuffer(sumQueue, 1, rows * sizeof(float));
    pipe.InitBuffer(maxQueue, 1, rows * sizeof(float));
    pipe.InitBuffer(scratch, rows * t.paddedColumns * sizeof(float));
    pipe.InitBuffer(one, 32);
    GlobalTensor<float> xGm, sumGm, maxGm;
    xGm.SetGlobalBuffer((__gm__ float*)x + static_cast<uint64_t>(first) * t.columns, rows * t.columns);
    sumGm.SetGlobalBuffer((__gm__ float*)sums + first, rows);
    maxGm.SetGlobalBuffer((__gm__ float*)maxima + first, rows);

    LocalTensor<float> in = inQueue.AllocTensor<float>();
    const uint8_t right = static_cast<uint8_t>(t.paddedColumns - t.columns);
    DataCopyPad(in, xGm,
                {static_cast<uint16_t>(rows), static_cast<uint32_t>(t.columns * sizeof(float)), 0, 0, 0},
                {true, 0, right, 0.0f});
    inQueue.EnQue(in);
    in = inQueue.DeQue<float>();
    LocalTensor<float> sum = sumQueue.AllocTensor<float>();
    Sum(sum, in, scratch.Get<uint8_t>(), {rows, t.paddedColumns, t.columns});
    sumQueue.EnQue(sum);

    LocalTensor<float> largest = maxQueue.AllocTensor<float>();
    PipeBarrier<PIPE_V>();
    for (uint32_t row = 0; row < rows; ++row) {
        ReduceMax(one.Get<float>(), in[row * t.paddedColumns], scratch.Get<float>(), t.columns, false);
        const int32_t toScalar = pipe.FetchEventID(HardEvent::V_S);
        SetFlag<HardEvent::V_S>(toScalar);
        WaitFlag<HardEvent::V_S>(toScalar);
        largest.SetValue(row, one.Get<float>().GetValue(0));
        const int32_t toVector = pipe.FetchEventID(HardEvent::S_V);
        SetFlag<HardEvent::S_V>(toVector);
        WaitFlag<HardEvent::S_V>(toVector);
    }
    const int32_t toStore = pipe.FetchEventID(HardEvent::S_MTE3);
    SetFlag<HardEvent::S_MTE3>(toStore);
    WaitFlag<HardEvent::S_MTE3>(toStore);
    maxQueue.EnQue(largest);
    inQueue.FreeTensor(in);
    sum = sumQueue.DeQue<float>();
    DataCopyPad(sumGm, sum, {1, static_cast<uint32_t>(rows * sizeof(float)), 0, 0, 0});
    sumQueue.FreeTensor(sum);
    largest = maxQueue.DeQue<float>();
    DataCopyPad(maxGm, largest, {1, static_cast<uint32_t>(rows * sizeof(float)), 0, 0, 0});
    maxQueue.FreeTensor(largest);
}
