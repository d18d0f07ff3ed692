// Kernel entry of AscendMoeProbe: `ascend-moe validate --bringup` runs it on the twin, and as an operator of
// the package on an NPU.
#include "kernel_operator.h"

#include "probe/probe.h"

extern "C" __global__ __aicore__ void ascend_moe_probe(GM_ADDR report, GM_ADDR workspaceGM, GM_ADDR tilingGM) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    REGISTER_TILING_DEFAULT(moe::MoeProbeTiling);
    GET_TILING_DATA_WITH_STRUCT(moe::MoeProbeTiling, tiling, tilingGM);
    AscendC::TPipe pipe;
    if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_PROBE)) {
        moe::Probe probe;
        probe.Init(pipe, tiling, report, workspaceGM, tilingGM);
        probe.Process();
    }
}
