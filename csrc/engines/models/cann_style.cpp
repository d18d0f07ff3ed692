// Models of kernels that are never shipped: they have the structure of the kernels whose times were
// published.
#include "cann_style.h"

#include "kernel_operator.h"

#include "cann_style_combine.h"
#include "cann_style_dispatch.h"

extern "C" void model_cann_style_dispatch(GM_ADDR x, GM_ADDR expertIds, GM_ADDR, GM_ADDR, GM_ADDR,
                                          GM_ADDR expandX, GM_ADDR dynamicScales, GM_ADDR triples,
                                          GM_ADDR tokenNums, GM_ADDR recvCounts, GM_ADDR, GM_ADDR, GM_ADDR,
                                          GM_ADDR workspace, GM_ADDR tilingGM) {
    GET_TILING_DATA_WITH_STRUCT(moe::MoeDistributeDispatchTiling, tiling, tilingGM);
    const models::DispatchTensors tensors = {x,       expertIds, expandX,    dynamicScales,
                                             triples, tokenNums, recvCounts, workspace};
    AscendC::TPipe pipe;
    if (tiling.info.quantMode != 0) {
        models::CannStyleDispatch<bfloat16_t, true> op;
        op.Init(tensors, tiling);
        op.Process(pipe);
    } else {
        models::CannStyleDispatch<bfloat16_t, false> op;
        op.Init(tensors, tiling);
        op.Process(pipe);
    }
}

extern "C" void model_cann_style_combine(GM_ADDR expandX, GM_ADDR, GM_ADDR triples, GM_ADDR sendCounts,
                                         GM_ADDR scales, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR x,
                                         GM_ADDR, GM_ADDR, GM_ADDR tilingGM) {
    GET_TILING_DATA_WITH_STRUCT(moe::MoeDistributeCombineTiling, tiling, tilingGM);
    models::CannStyleCombine<bfloat16_t> op;
    op.Init({expandX, triples, sendCounts, scales, x}, tiling);
    AscendC::TPipe pipe;
    op.Process(pipe);
}
