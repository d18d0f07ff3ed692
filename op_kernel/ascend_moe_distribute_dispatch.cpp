// Kernel entry of AscendMoeDistributeDispatch, for every element type of x. DTYPE_EXPAND_X is the type of the rows that
// it sends, where a binary is for one of them.
#include "kernel_operator.h"

#include "direct/dispatch.h"
#include "hierarchy/dispatch.h"
#include "window/dispatch.h"

extern "C" __global__ __aicore__ void ascend_moe_distribute_dispatch(
    GM_ADDR x, GM_ADDR expertIds, GM_ADDR scales, GM_ADDR xActiveMask, GM_ADDR expertScales, GM_ADDR performanceInfo,
    GM_ADDR expandX, GM_ADDR dynamicScales, GM_ADDR expandIdx, GM_ADDR expertTokenNums, GM_ADDR epRecvCounts,
    GM_ADDR tpRecvCounts, GM_ADDR expandScales, GM_ADDR errorRecord, GM_ADDR workspaceGM, GM_ADDR tilingGM) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    REGISTER_TILING_DEFAULT(moe::MoeDistributeDispatchTiling);
    GET_TILING_DATA_WITH_STRUCT(moe::MoeDistributeDispatchTiling, tiling, tilingGM);
    const moe::DispatchArguments arguments = {x,
                                              expertIds,
                                              scales,
                                              xActiveMask,
                                              expertScales,
                                              performanceInfo,
                                              expandX,
                                              dynamicScales,
                                              expandIdx,
                                              expertTokenNums,
                                              epRecvCounts,
                                              tpRecvCounts,
                                              expandScales,
                                              errorRecord,
                                              workspaceGM,
                                              tilingGM,
                                              moe::WholeLaunch()};
    AscendC::TPipe pipe;
    if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH)) {
        moe::Run<moe::WindowDispatch<false>, moe::kPlain>(arguments, tiling, pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH_QUANT)) {
        moe::Run<moe::WindowDispatch<true>, moe::kQuantized>(arguments, tiling, pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH_QUANT_SMOOTH)) {
        moe::Run<moe::WindowDispatch<true>, moe::kQuantized>(arguments, tiling, pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT)) {
        moe::Run<moe::DirectDispatch<false>, moe::kPlain>(arguments, tiling, pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT_QUANT)) {
        moe::Run<moe::DirectDispatch<true>, moe::kQuantized>(arguments, tiling, pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT_QUANT_SMOOTH)) {
        moe::Run<moe::DirectDispatch<true>, moe::kQuantized>(arguments, tiling, pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH_HIERARCHY)) {
        moe::Run<moe::HierarchyDispatch<false>, moe::kPlain>(arguments, tiling, pipe);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH_HIERARCHY_QUANT)) {
        moe::Run<moe::HierarchyDispatch<true>, moe::kQuantized>(arguments, tiling, pipe);
    }
}
