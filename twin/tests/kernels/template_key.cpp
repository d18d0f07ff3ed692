// y = x * SCALE, or only where the mask is set: a template kernel, its arguments in the tiling key.
#include "adv_api/reduce/sum.h"
#include "basic_api/kernel_operator_vec_binary_scalar_intf.h"
#include "kernel_basic_intf.h"
#include "template_key.h"

using namespace AscendC;

struct TemplateKeyTilingData {
    uint32_t length;
};

template <typename D_T, bool HAS_MASK, uint32_t SCALE, int FORMAT, int8_t KIND, uint8_t CORES>
__global__ __aicore__ void template_key(GM_ADDR x, GM_ADDR mask, GM_ADDR y, GM_ADDR workspace, GM_ADDR tiling) {
    REGISTER_TILING_DEFAULT(TemplateKeyTilingData);
    GET_TILING_DATA_WITH_STRUCT(TemplateKeyTilingData, t, tiling);
    static_assert(FORMAT == 2 && CORES == 0 && (sizeof(D_T) == 2 ? KIND == 20 : KIND == 30));
    constexpr uint32_t kEach = 256 / sizeof(D_T);
    TPipe pipe;
    TBuf<> xBuf, yBuf, bitsBuf;
    pipe.InitBuffer(xBuf, 256);
    pipe.InitBuffer(yBuf, 256);
    pipe.InitBuffer(bitsBuf, 32);
    GlobalTensor<D_T> from, to, chosen;
    from.SetGlobalBuffer((__gm__ D_T*)x);
    to.SetGlobalBuffer((__gm__ D_T*)y);
    chosen.SetGlobalBuffer((__gm__ D_T*)mask);
    LocalTensor<D_T> row = xBuf.Get<D_T>(), out = yBuf.Get<D_T>();
    LocalTensor<uint8_t> bits = bitsBuf.Get<uint8_t>();
    for (uint32_t begin = GetBlockIdx() * kEach; begin < t.length; begin += GetBlockNum() * kEach) {
        const uint32_t rest = t.length - begin, n = rest < kEach ? rest : kEach;
        const DataCopyExtParams one{1, static_cast<uint32_t>(n * sizeof(D_T)), 0, 0, 0};
        const uint8_t gap = static_cast<uint8_t>((32 / sizeof(D_T) - n % (32 / sizeof(D_T))) % (32 / sizeof(D_T)));
        Duplicate(row, static_cast<D_T>(0), kEach);
        PipeBarrier<PIPE_ALL>();
        DataCopyPad(row, from[begin], one, DataCopyPadExtParams<D_T>{true, 0, gap, static_cast<D_T>(0)});
        PipeBarrier<PIPE_ALL>();
        Muls(out, row, static_cast<D_T>(static_cast<float>(SCALE)), kEach);
        if constexpr (HAS_MASK) {
            PipeBarrier<PIPE_ALL>();
            Duplicate(row, static_cast<D_T>(0), kEach);
            PipeBarrier<PIPE_ALL>();
            DataCopyPad(row, chosen[begin], one, DataCopyPadExtParams<D_T>{true, 0, gap, static_cast<D_T>(0)});
            PipeBarrier<PIPE_ALL>();
            CompareScalar(bits, row, static_cast<D_T>(0), CMPMODE::GT, kEach);
            PipeBarrier<PIPE_V>();
            Select(out, bits, out, static_cast<D_T>(0), SELMODE::VSEL_TENSOR_SCALAR_MODE, kEach);
        }
        PipeBarrier<PIPE_ALL>();
        DataCopyPad(to[begin], out, one);
        PipeBarrier<PIPE_ALL>();
    }
}
