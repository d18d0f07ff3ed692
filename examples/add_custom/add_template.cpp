// z = x + y, or the sum only where the mask is not 0: one template, whose arguments the tiling key names.
#include "ascendc/host_api/tiling/template_argument.h"
#include "kernel_operator.h"

ASCENDC_TPL_ARGS_DECL(AddTemplate, ASCENDC_TPL_DATATYPE_DECL(D_T, C_DT_FLOAT16, C_DT_FLOAT, ASCENDC_TPL_INPUT(0)),
                      ASCENDC_TPL_BOOL_DECL(HAS_MASK, 0, 1), );
ASCENDC_TPL_SEL(ASCENDC_TPL_ARGS_SEL(ASCENDC_TPL_DATATYPE_SEL(D_T, C_DT_FLOAT16, C_DT_FLOAT),
                                     ASCENDC_TPL_BOOL_SEL(HAS_MASK, 0, 1), ), );

using namespace AscendC;

template <typename D_T, bool HAS_MASK>
__global__ __aicore__ void add_template(GM_ADDR x, GM_ADDR y, GM_ADDR mask, GM_ADDR z) {
    constexpr uint32_t kTile = 256 / sizeof(D_T);  // of each core: the least that a comparison takes
    const uint32_t begin = GetBlockIdx() * kTile;
    GlobalTensor<D_T> xGm, yGm, maskGm, zGm;
    xGm.SetGlobalBuffer((__gm__ D_T*)x + begin, kTile);
    yGm.SetGlobalBuffer((__gm__ D_T*)y + begin, kTile);
    zGm.SetGlobalBuffer((__gm__ D_T*)z + begin, kTile);
    TPipe pipe;
    TBuf<> xBuf, yBuf, bitsBuf;
    pipe.InitBuffer(xBuf, 256);
    pipe.InitBuffer(yBuf, 256);
    pipe.InitBuffer(bitsBuf, 32);
    LocalTensor<D_T> sum = xBuf.Get<D_T>(), other = yBuf.Get<D_T>();
    LocalTensor<uint8_t> bits = bitsBuf.Get<uint8_t>();
    DataCopy(sum, xGm, kTile);
    DataCopy(other, yGm, kTile);
    PipeBarrier<PIPE_ALL>();
    Add(sum, sum, other, kTile);
    if constexpr (HAS_MASK) {
        maskGm.SetGlobalBuffer((__gm__ D_T*)mask + begin, kTile);
        PipeBarrier<PIPE_ALL>();
        DataCopy(other, maskGm, kTile);
        PipeBarrier<PIPE_ALL>();
        CompareScalar(bits, other, static_cast<D_T>(0), CMPMODE::NE, kTile);
        PipeBarrier<PIPE_V>();
        Select(sum, bits, sum, static_cast<D_T>(0), SELMODE::VSEL_TENSOR_SCALAR_MODE, kTile);
    }
    PipeBarrier<PIPE_ALL>();
    DataCopy(zGm, sum, kTile);
}
