// Kernel entry of AscendMoeDistributeCombine. DTYPE_X is the element type of expand_x and of the result.
#include "kernel_operator.h"

#include "window/combine.h"
#include "window/combine_indexed.h"
#include "direct/combine.h"
#include "hierarchy/combine.h"

extern "C" __global__ __aicore__ void ascend_moe_distribute_combine(
    GM_ADDR expandX, GM_ADDR expertIds, GM_ADDR expandIdx, GM_ADDR epSendCounts, GM_ADDR expertScales,
    GM_ADDR tpSendCounts, GM_ADDR xActiveMask, GM_ADDR expandScales, GM_ADDR sharedExpertX, GM_ADDR oriX,
    GM_ADDR constExpertAlpha_1, GM_ADDR constExpertAlpha_2, GM_ADDR constExpertV, GM_ADDR performanceInfo, GM_ADDR x,
    GM_ADDR errorRecord, GM_ADDR workspaceGM, GM_ADDR tilingGM) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    REGISTER_TILING_DEFAULT(moe::MoeDistributeCombineTiling);
    GET_TILING_DATA_WITH_STRUCT(moe::MoeDistributeCombineTiling, tiling, tilingGM);
    (void)tpSendCounts;
    (void)expandScales;
    const moe::CombineArguments arguments = {
        expandX,     expertIds,          expandIdx,          epSendCounts, expertScales,    xActiveMask, sharedExpertX,
        oriX,        constExpertAlpha_1, constExpertAlpha_2, constExpertV, performanceInfo, x,           errorRecord,
        workspaceGM, tilingGM,           moe::WholeLaunch()};
    constexpr bool kCodes = !AscendC::IsSameType<DTYPE_X, float>::value;  // rows of fp32 travel as they are
    AscendC::TPipe pipe;
    if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_COMBINE)) {
        moe::WindowCombineCompacted<DTYPE_X, false> op;
        op.Init(arguments, tiling);
        op.Process(pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_COMBINE_QUANT)) {
        moe::WindowCombineCompacted<DTYPE_X, kCodes> op;
        op.Init(arguments, tiling);
        op.Process(pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_COMBINE_INDEXED)) {
        moe::WindowCombineIndexed<DTYPE_X, false> op;
        op.Init(arguments, tiling);
        op.Process(pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_COMBINE_INDEXED_QUANT)) {
        moe::WindowCombineIndexed<DTYPE_X, kCodes> op;
        op.Init(arguments, tiling);
        op.Process(pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_COMBINE_DIRECT)) {
        moe::DirectCombine<DTYPE_X, false> op;
        op.Init(arguments, tiling);
        op.Process(pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_COMBINE_DIRECT_QUANT)) {
        moe::DirectCombine<DTYPE_X, kCodes> op;
        op.Init(arguments, tiling);
        op.Process(pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_COMBINE_HIERARCHY)) {
        moe::HierarchyCombine<DTYPE_X, false> op;
        op.Init(arguments, tiling);
        op.Process(pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_COMBINE_HIERARCHY_QUANT)) {
        moe::HierarchyCombine<DTYPE_X, kCodes> op;
        op.Init(arguments, tiling);
        op.Process(pipe);
    }
}
