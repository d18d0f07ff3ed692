// z = x + y, element by element. Each core adds its share, a tile at a time.
#include "kernel_operator.h"

using namespace AscendC;

struct AddCustomTilingData {
    uint32_t totalLength;
    uint32_t tileLength;
};

extern "C" __global__ __aicore__ void add_custom(GM_ADDR x, GM_ADDR y, GM_ADDR z, GM_ADDR workspace, GM_ADDR tiling) {
    REGISTER_TILING_DEFAULT(AddCustomTilingData);
    GET_TILING_DATA_WITH_STRUCT(AddCustomTilingData, sizes, tiling);
    const uint32_t share = (sizes.totalLength + GetBlockNum() - 1) / GetBlockNum();
    const uint32_t begin = share * GetBlockIdx();
    if (begin >= sizes.totalLength) {
        return;
    }
    const uint32_t length = sizes.totalLength - begin < share ? sizes.totalLength - begin : share;
    GlobalTensor<DTYPE_X> xGm, yGm, zGm;
    xGm.SetGlobalBuffer((__gm__ DTYPE_X*)x + begin, length);
    yGm.SetGlobalBuffer((__gm__ DTYPE_X*)y + begin, length);
    zGm.SetGlobalBuffer((__gm__ DTYPE_X*)z + begin, length);
    TPipe pipe;
    TQue<QuePosition::VECIN, 2> xQueue, yQueue;
    TQue<QuePosition::VECOUT, 2> zQueue;
    pipe.InitBuffer(xQueue, 2, sizes.tileLength * sizeof(DTYPE_X));
    pipe.InitBuffer(yQueue, 2, sizes.tileLength * sizeof(DTYPE_X));
    pipe.InitBuffer(zQueue, 2, sizes.tileLength * sizeof(DTYPE_X));
    for (uint32_t done = 0; done < length; done += sizes.tileLength) {
        const uint32_t count = length - done < sizes.tileLength ? length - done : sizes.tileLength;
        const DataCopyExtParams bytes{1, static_cast<uint32_t>(count * sizeof(DTYPE_X)), 0, 0, 0};
        const DataCopyPadExtParams<DTYPE_X> pad{false, 0, 0, static_cast<DTYPE_X>(0)};
        LocalTensor<DTYPE_X> xLocal = xQueue.AllocTensor<DTYPE_X>(), yLocal = yQueue.AllocTensor<DTYPE_X>();
        DataCopyPad(xLocal, xGm[done], bytes, pad);
        DataCopyPad(yLocal, yGm[done], bytes, pad);
        xQueue.EnQue(xLocal);
        yQueue.EnQue(yLocal);
        xLocal = xQueue.DeQue<DTYPE_X>();
        yLocal = yQueue.DeQue<DTYPE_X>();
        LocalTensor<DTYPE_X> zLocal = zQueue.AllocTensor<DTYPE_X>();
        Add(zLocal, xLocal, yLocal, count);
        zQueue.EnQue(zLocal);
        xQueue.FreeTensor(xLocal);
        yQueue.FreeTensor(yLocal);
        zLocal = zQueue.DeQue<DTYPE_X>();
        DataCopyPad(zGm[done], zLocal, bytes);
        zQueue.FreeTensor(zLocal);
    }
}
