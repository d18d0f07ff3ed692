// aclnn entry points of AscendMoeProbe, the kernel of `ascend-moe validate --bringup`: arguments in the order
// of the op definition. A launch is collective: all ranks of groupEp, the same mode (ProbeMode) and nonce,
// which no earlier launch on the communicator had. report is int32[64, 8], a block a core. rounds: of the
// probes that repeat; cycles: to count, 0: waits take timeoutUs; broken: the mode to fail, 0 for none;
// windowMib 0: HCCL_BUFFSIZE; timeoutUs 0: the default deadline.
#ifndef ACLNN_ASCEND_MOE_PROBE_H
#define ACLNN_ASCEND_MOE_PROBE_H

#include "ascend_moe_aclnn_types.h"

// Phase one: checks and tiles the call. 161001 for a null argument, 561002 when tiling refuses it (the log
// says why); the executor is for one launch.
ASCEND_MOE_ACLNN_API aclnnStatus aclnnAscendMoeProbeGetWorkspaceSize(
    const char* groupEp, int64_t epWorldSize, int64_t epRankId, int64_t mode, int64_t nonce, int64_t rounds,
    int64_t cycles, int64_t broken, int64_t windowMib, int64_t timeoutUs, const aclTensor* reportOut,
    uint64_t* workspaceSize, aclOpExecutor** executor);

// Phase two: launches on the stream.
ASCEND_MOE_ACLNN_API aclnnStatus aclnnAscendMoeProbe(void* workspace, uint64_t workspaceSize,
                                                     aclOpExecutor* executor, aclrtStream stream);

#endif  // ACLNN_ASCEND_MOE_PROBE_H
