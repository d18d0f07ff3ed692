// The last step of our ops on an NPU: passes tensors and attributes to aclnnAscendMoe*, through torch_npu's task queue.
// The caller (csrc/torch) checks arguments and allocates outputs.
#include "adapter.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>

#include <unistd.h>

#include <cstring>

#include "rules/op_tables.h"
#include "torch/api.h"

namespace ascend_moe_npu {

namespace {

const at::Tensor& TensorOf(void* handle) {
    return *torch::aot_inductor::tensor_handle_to_tensor_pointer(static_cast<AtenTensorHandle>(handle));
}

// The outputs in order, the record last.
const at::Tensor& Output(const AmNpuLaunch& launch, uint32_t place) {
    const bool dispatch = launch.op == static_cast<int32_t>(moe::kOpDispatch);
    const uint32_t record = dispatch ? moe::DispatchOutput::error_record : moe::CombineOutput::error_record;
    return TensorOf(place == record ? launch.record : launch.outputs[place]);
}

// A launch as the macros of torch_npu want its parts: variables of the types of the aclnn entries.
struct Parts {
    explicit Parts(const AmNpuLaunch& launch)
        : group_ep_text(launch.group_ep),
          group_tp_text(launch.group_tp),
          comm_alg_text(launch.comm_alg),
          contract(launch.contract),
          window_mib(launch.window_mib),
          timeout_us(launch.timeout_us),
          part(launch.part),
          ranks_per_server(launch.ranks_per_server),
          core_barrier(launch.core_barrier) {
        // 0 for those that one contract has and the other has not.
#define AM_ATTRIBUTE(name)                            \
    name = launch.attributes[moe::kAttribute_##name]; \
    if (name == moe::kNoValue) name = 0;
        ASCEND_MOE_ATTRIBUTES(AM_ATTRIBUTE)
#undef AM_ATTRIBUTE
#define AM_TENSOR(name) \
    if (void* given = launch.inputs[moe::kTensor_##name]) name = TensorOf(given);
        ASCEND_MOE_TENSORS(AM_TENSOR)
#undef AM_TENSOR
    }

#define AM_ATTRIBUTE(name) int64_t name;
    ASCEND_MOE_ATTRIBUTES(AM_ATTRIBUTE)
#undef AM_ATTRIBUTE
#define AM_TENSOR(name) c10::optional<at::Tensor> name;
    ASCEND_MOE_TENSORS(AM_TENSOR)
#undef AM_TENSOR
    std::string group_ep_text, group_tp_text, comm_alg_text;
    // The aclnn entries take char*.
    char *group_ep = group_ep_text.data(), *group_tp = group_tp_text.data(), *comm_alg = comm_alg_text.data();
    int64_t contract, window_mib, timeout_us, part, ranks_per_server, core_barrier;
};

// The arguments of an aclnn entry in the order of the description, each with a comma before it.
#define AM_IN(name, ...) , in.name
#define AM_OUT(name, ...) , Output(launch, Out::name)
#define AM_NOTHING(...)
#define AM_ARGUMENTS(op)                                                                                      \
    ASCEND_MOE_##op##_INPUTS(AM_IN, AM_IN, AM_NOTHING) ASCEND_MOE_##op##_ATTRIBUTES(AM_IN, AM_IN, AM_NOTHING) \
        ASCEND_MOE_##op##_OUTPUTS(AM_OUT, AM_OUT)
#define AM_EXECUTE(...) EXEC_NPU_CMD_EXT(__VA_ARGS__)

void Dispatch(const AmNpuLaunch& launch) {
    using Out = moe::DispatchOutput;
    Parts in(launch);
    AM_REQUIRE(aclnnAscendMoeDistributeDispatch);
    AM_EXECUTE(aclnnAscendMoeDistributeDispatch AM_ARGUMENTS(DISPATCH));
}

void Combine(const AmNpuLaunch& launch) {
    using Out = moe::CombineOutput;
    Parts in(launch);
    AM_REQUIRE(aclnnAscendMoeDistributeCombine);
    AM_EXECUTE(aclnnAscendMoeDistributeCombine AM_ARGUMENTS(COMBINE));
}

// torch.ops.ascend_moe_npu.probe: the bring-up's probe kernel. Its output is an argument, so it is never for
// a compiler's graph.
void Probe(c10::string_view group_ep, int64_t ep_world_size, int64_t ep_rank_id, int64_t mode, int64_t nonce,
           int64_t rounds, int64_t cycles, int64_t window_mib, int64_t timeout_us, int64_t ranks_per_server,
           int64_t intra_node_stores, const at::Tensor& report) {
    const c10::OptionalDeviceGuard guard(report.device());
    AM_REQUIRE(aclnnAscendMoeProbe);
    std::string groupEp(group_ep);  // a view need not end in NUL
    char* group_ep_text = groupEp.data();
    EXEC_NPU_CMD_EXT(aclnnAscendMoeProbe, group_ep_text, ep_world_size, ep_rank_id, mode, nonce, rounds, cycles,
                     window_mib, timeout_us, ranks_per_server, intra_node_stores, report);
}

// torch.ops.ascend_moe_npu.one_card: several ranks in one launch; `ranks`: the address of their table.
void OneCard(int64_t ranks, int64_t world, int64_t cores, int64_t tiling_key, const at::Tensor& barrier) {
    const c10::OptionalDeviceGuard guard(barrier.device());
    AM_REQUIRE(aclnnAscendMoeOneCard);
    EXEC_NPU_CMD_EXT(aclnnAscendMoeOneCard, ranks, world, cores, tiling_key, barrier);
}

// torch.ops.ascend_moe_npu.registered_tensor: a tensor over a block of a registered area (am_registered_take); its
// storage calls `release` (am_registered_release) when it is freed.
at::Tensor RegisteredTensor(int64_t address, at::IntArrayRef sizes, at::ScalarType dtype, at::Device device,
                            int64_t area, int64_t generation, int64_t release) {
    const auto give = [=, owner = getpid()](void*) {
        if (getpid() != owner) return;  // a forked child: its parent's blocks are not its own
        reinterpret_cast<int (*)(void*, uint32_t)>(release)(reinterpret_cast<void*>(area),
                                                            static_cast<uint32_t>(generation));
    };
    const c10::OptionalDeviceGuard guard(device);
    return at_npu::native::from_blob(reinterpret_cast<void*>(address), sizes, give,
                                     at::TensorOptions().dtype(dtype).device(device), device);
}

int WriteError(int result, const char* text, char* out, uint64_t bytes) {
    strncpy(out, text, bytes - 1);
    out[bytes - 1] = '\0';
    return result;
}

}  // namespace

}  // namespace ascend_moe_npu

int am_npu_launch(const AmNpuLaunch* launch, char* text, uint64_t bytes) {
    using namespace ascend_moe_npu;
    try {
        const at::Tensor& error_record = TensorOf(launch->record);
        // The stream is that of the current device.
        const c10::OptionalDeviceGuard guard(error_record.device());
        const bool dispatch = launch->op == static_cast<int32_t>(moe::kOpDispatch);
        dispatch ? Dispatch(*launch) : Combine(*launch);
        if (launch->host_record != nullptr) TensorOf(launch->host_record).copy_(error_record, true);
        return kNpuQueued;
    } catch (const NoOperator& error) {
        return WriteError(kNpuNoOperator, error.what(), text, bytes);
    } catch (const Refused& error) {
        return WriteError(kNpuRefused, error.what(), text, bytes);
    } catch (const c10::Error& error) {
        return WriteError(kNpuOther, error.what_without_backtrace(), text, bytes);
    } catch (const std::exception& error) {
        return WriteError(kNpuOther, error.what(), text, bytes);
    }
}

TORCH_LIBRARY(ascend_moe_npu, library) {
    library.def(
        "probe(str group_ep, int ep_world_size, int ep_rank_id, int mode, int nonce, int rounds, int cycles, "
        "int window_mib, int timeout_us, int ranks_per_server, int intra_node_stores, Tensor(a!) report) -> ()");
    library.def("one_card(int ranks, int world, int cores, int tiling_key, Tensor(a!) barrier) -> ()");
    library.def(
        "registered_tensor(int address, int[] sizes, ScalarType dtype, Device device, int area, int generation, "
        "int release) -> Tensor",
        &ascend_moe_npu::RegisteredTensor);
}

TORCH_LIBRARY_IMPL(ascend_moe_npu, PrivateUse1, library) {
    library.impl("probe", &ascend_moe_npu::Probe);
    library.impl("one_card", &ascend_moe_npu::OneCard);
}
