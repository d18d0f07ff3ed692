// z = x + y, element by element: double-buffered queues, a tail that is no whole block.
#include "kernel_operator.h"

using namespace AscendC;

constexpr int32_t BUFFER_NUM = 2;

struct AddCustomTilingData {
    uint32_t totalLength;
    uint32_t tileLength;
};

class KernelAdd {
public:
    __aicore__ inline KernelAdd() {}
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, GM_ADDR z, const AddCustomTilingData& tiling) {
        uint32_t perCore = (tiling.totalLength + GetBlockNum() - 1) / GetBlockNum();
        uint32_t begin = perCore * GetBlockIdx();
        this->blockLength = begin >= tiling.totalLength            ? 0
                            : tiling.totalLength - begin < perCore ? tiling.totalLength - begin
                                                                   : perCore;
        this->tileLength = tiling.tileLength;
        if (this->blockLength == 0) {
            return;
        }
        xGm.SetGlobalBuffer((__gm__ DTYPE_X*)x + begin, this->blockLength);
        yGm.SetGlobalBuffer((__gm__ DTYPE_X*)y + begin, this->blockLength);
        zGm.SetGlobalBuffer((__gm__ DTYPE_X*)z + begin, this->blockLength);
        pipe.InitBuffer(inQueueX, BUFFER_NUM, this->tileLength * sizeof(DTYPE_X));
        pipe.InitBuffer(inQueueY, BUFFER_NUM, this->tileLength * sizeof(DTYPE_X));
        pipe.InitBuffer(outQueueZ, BUFFER_NUM, this->tileLength * sizeof(DTYPE_X));
    }
    __aicore__ inline void Process() {
        for (uint32_t done = 0; done < this->blockLength; done += this->tileLength) {
            uint32_t left = this->blockLength - done;
            uint32_t count = left < this->tileLength ? left : this->tileLength;
            CopyIn(done, count);
            Compute(count);
            CopyOut(done, count);
        }
    }

private:
    __aicore__ inline void CopyIn(uint32_t offset, uint32_t count) {
        LocalTensor<DTYPE_X> xLocal = inQueueX.AllocTensor<DTYPE_X>();
        LocalTensor<DTYPE_X> yLocal = inQueueY.AllocTensor<DTYPE_X>();
        DataCopyExtParams params{1, static_cast<uint32_t>(count * sizeof(DTYPE_X)), 0, 0, 0};
        DataCopyPadExtParams<DTYPE_X> pad{false, 0, 0, static_cast<DTYPE_X>(0)};
        DataCopyPad(xLocal, xGm[offset], params, pad);
        DataCopyPad(yLocal, yGm[offset], params, pad);
        inQueueX.EnQue(xLocal);
        inQueueY.EnQue(yLocal);
    }
    __aicore__ inline void Compute(uint32_t count) {
        LocalTensor<DTYPE_X> xLocal = inQueueX.DeQue<DTYPE_X>();
        LocalTensor<DTYPE_X> yLocal = inQueueY.DeQue<DTYPE_X>();
        LocalTensor<DTYPE_X> zLocal = outQueueZ.AllocTensor<DTYPE_X>();
        Add(zLocal, xLocal, yLocal, count);
        outQueueZ.EnQue<DTYPE_X>(zLocal);
        inQueueX.FreeTensor(xLocal);
        inQueueY.FreeTensor(yLocal);
    }
    __aicore__ inline void CopyOut(uint32_t offset, uint32_t count) {
        LocalTensor<DTYPE_X> zLocal = outQueueZ.DeQue<DTYPE_X>();
        DataCopyExtParams params{1, static_cast<uint32_t>(count * sizeof(DTYPE_X)), 0, 0, 0};
        DataCopyPad(zGm[offset], zLocal, params);
        outQueueZ.FreeTensor(zLocal);
    }

    TPipe pipe;
    TQue<QuePosition::VECIN, BUFFER_NUM> inQueueX, inQueueY;
    TQue<QuePosition::VECOUT, BUFFER_NUM> outQueueZ;
    GlobalTensor<DTYPE_X> xGm, yGm, zGm;
    uint32_t blockLength;
    uint32_t tileLength;
};

extern "C" __global__ __aicore__ void add_custom(GM_ADDR x, GM_ADDR y, GM_ADDR z, GM_ADDR workspace, GM_ADDR tiling) {
    REGISTER_TILING_DEFAULT(AddCustomTilingData);
    GET_TILING_DATA_WITH_STRUCT(AddCustomTilingData, tilingData, tiling);
    if (TILING_KEY_IS(1)) {
        KernelAdd op;
        op.Init(x, y, z, tilingData);
        op.Process();
    }
}

#ifndef ASCENDC_CPU_DEBUG
void add_custom_do(uint32_t blockDim, void* stream, uint8_t* x, uint8_t* y, uint8_t* z, uint8_t* workspace,
                   uint8_t* tiling) {
    add_custom<<<blockDim, nullptr, stream>>>(x, y, z, workspace, tiling);
}
#endif
