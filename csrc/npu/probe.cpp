// torch.ops.ascend_moe_npu.probe: the bring-up's probe kernel. Its output is an argument, so it is never for
// a compiler's graph.
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "adapter.h"

namespace ascend_moe_npu {

namespace {

void Probe(c10::string_view group_ep, int64_t ep_world_size, int64_t ep_rank_id, int64_t mode, int64_t nonce,
           int64_t rounds, int64_t cycles, int64_t broken, int64_t window_mib, int64_t timeout_us,
           const at::Tensor& report) {
    const c10::OptionalDeviceGuard guard(report.device());
    AM_REQUIRE(aclnnAscendMoeProbe);
    std::string groupEp(group_ep);  // a view need not end in NUL
    char* group_ep_text = groupEp.data();
    EXEC_NPU_CMD_EXT(aclnnAscendMoeProbe, group_ep_text, ep_world_size, ep_rank_id, mode, nonce, rounds,
                     cycles, broken, window_mib, timeout_us, report);
}

}  // namespace

}  // namespace ascend_moe_npu

TORCH_LIBRARY(ascend_moe_npu, library) {
    library.def(
        "probe(str group_ep, int ep_world_size, int ep_rank_id, int mode, int nonce, int rounds, int cycles, "
        "int broken, int window_mib, int timeout_us, Tensor(a!) report) -> ()");
}

TORCH_LIBRARY_IMPL(ascend_moe_npu, PrivateUse1, library) { library.impl("probe", &ascend_moe_npu::Probe); }
