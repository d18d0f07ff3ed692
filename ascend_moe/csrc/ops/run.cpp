// Launches the kernels on the twin.
#include "run.h"

#include <cstring>
#include <string>

#include "ascend_moe.h"
#include "communicator.h"
#include "kernels.h"

namespace ops {

namespace {

// Outputs are undefined past the received rows. Small tails are zeroed all the same, so that tools that
// compare whole tensors twice (opcheck) see equal bytes; large ones would cost as much as the op.
constexpr uint64_t kZeroTailBytes = 256 * 1024;

uint64_t BytesOf(const moe::TensorDesc& tensor) {
    uint64_t bytes = moe::TypeSize(static_cast<uint32_t>(tensor.dtype));
    for (int32_t i = 0; i < tensor.rank; ++i) bytes *= static_cast<uint64_t>(tensor.dims[i]);
    return bytes;
}
uint64_t BytesOf(const moe::OutputDesc& output) {
    uint64_t bytes = moe::TypeSize(output.dtype);
    for (int32_t i = 0; i < output.rank; ++i) bytes *= static_cast<uint64_t>(output.dims[i]);
    return bytes;
}

// One launch: its arguments as the kernel sees them, and the ranges it may touch.
class Launch {
public:
    Launch(Communicator& comm, const Plan& plan, const void* const* inputs, void* const* outputs,
           int32_t* record)
        : comm_(comm), plan_(plan), inputs_(inputs), outputs_(outputs), record_(record) {}

    void Run() {
        spec_.block_dim = plan_.call.blockDim;
        spec_.tiling_key = plan_.call.tilingKey;
        spec_.hccl_context[0] = reinterpret_cast<uintptr_t>(comm_.table());
        spec_.ranges = comm_.ranges();
        Add(comm_.table(), sizeof(*comm_.table()), twin::GmKind::kWorkspace, "window table");
        workspace_ = Add(comm_.Workspace(plan_.call.workspaceBytes), plan_.call.workspaceBytes,
                         twin::GmKind::kWorkspace, "workspace");
        recordAddress_ =
            Add(record_, moe::kErrorRecordWords * sizeof(int32_t), twin::GmKind::kWorkspace, "error_record");
        if (plan_.call.op == moe::kOpDispatch) {
            Dispatch();
        } else {
            Combine();
        }
    }

private:
    GM_ADDR Add(const void* begin, uint64_t bytes, twin::GmKind kind, const char* name) {
        const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
        if (begin != nullptr && bytes > 0)
            spec_.ranges.push_back({address, address + bytes, kind, false, nullptr, name});
        return twin::GmOf(static_cast<uint8_t*>(const_cast<void*>(begin)));
    }
    GM_ADDR Input(moe::TensorIndex index, const char* name) {
        if (!moe::Given(plan_.spec, index)) return nullptr;
        return Add(inputs_[index], BytesOf(moe::Tensor(plan_.spec, index)), twin::GmKind::kTensor, name);
    }
    GM_ADDR Output(uint32_t index, const moe::OutputDesc& desc, const char* name) {
        return Add(outputs_[index], BytesOf(desc), twin::GmKind::kTensor, name);
    }
#define AM_INPUT(name) Input(moe::kTensor_##name, #name)

    void Dispatch() {
        moe::OutputDesc shapes[moe::kDispatchOutputs];
        moe::DispatchShapes(plan_.spec, shapes);
        GM_ADDR x = AM_INPUT(x);
        GM_ADDR ids = AM_INPUT(expert_ids);
        GM_ADDR scales = AM_INPUT(scales);
        GM_ADDR mask = AM_INPUT(x_active_mask);
        GM_ADDR expertScales = AM_INPUT(expert_scales);
        static const char* const kNames[] = {"expand_x",          "dynamic_scales", "expand_idx",
                                             "expert_token_nums", "ep_recv_counts", "tp_recv_counts",
                                             "expand_scales"};
        GM_ADDR out[moe::kDispatchOutputs];
        for (uint32_t i = 0; i < moe::kDispatchOutputs; ++i) out[i] = Output(i, shapes[i], kNames[i]);
        GM_ADDR tiling = Tiling(&plan_.call.dispatch, sizeof(plan_.call.dispatch));
        const DispatchKernel kernel = DispatchKernelOf(plan_.call.xType);
        comm_.device().Launch(spec_, [&] {
            kernel(x, ids, scales, mask, expertScales, out[0], out[1], out[2], out[3], out[4], out[5], out[6],
                   recordAddress_, workspace_, tiling);
        });
        ZeroTails(shapes);
    }

    void Combine() {
        GM_ADDR expandX = AM_INPUT(expand_x);
        GM_ADDR ids = AM_INPUT(expert_ids);
        GM_ADDR sendCounts = AM_INPUT(ep_send_counts);
        GM_ADDR expertScales = AM_INPUT(expert_scales);
        GM_ADDR mask = AM_INPUT(x_active_mask);
        GM_ADDR shared = AM_INPUT(shared_expert_x);
        GM_ADDR index = plan_.spec.contract == static_cast<int32_t>(moe::kContractV2)
                            ? AM_INPUT(assist_info_for_combine)
                            : AM_INPUT(expand_idx);
        GM_ADDR x = Output(0, moe::CombineShape(plan_.spec), "x");
        GM_ADDR tiling = Tiling(&plan_.call.combine, sizeof(plan_.call.combine));
        const CombineKernel kernel = CombineKernelOf(plan_.call.xType);
        comm_.device().Launch(spec_, [&] {
            kernel(expandX, ids, index, sendCounts, expertScales, nullptr, mask, nullptr, shared, x,
                   recordAddress_, workspace_, tiling);
        });
    }
#undef AM_INPUT

    GM_ADDR Tiling(const void* data, uint64_t bytes) {
        return Add(data, bytes, twin::GmKind::kWorkspace, "tiling");
    }

    void ZeroTails(const moe::OutputDesc (&shapes)[moe::kDispatchOutputs]) {
        const moe::MoeDistributeInfo& info = plan_.call.dispatch.info;
        const int32_t* counts = static_cast<const int32_t*>(outputs_[4]);
        const uint32_t slots = info.world * info.localExperts;
        const uint64_t rows = static_cast<uint64_t>(counts[slots - 1]);
        const bool quantised = info.quantMode != 0, triples = info.contract == moe::kContractV2;
        ZeroTail(0, shapes[0], rows * info.hidden * moe::TypeSize(info.wireType));
        ZeroTail(1, shapes[1], quantised ? rows * sizeof(float) : 0);
        if (triples) ZeroTail(2, shapes[2], rows * moe::kTripleWords * sizeof(int32_t));
        ZeroTail(4, shapes[4], slots * sizeof(int32_t));
        ZeroTail(6, shapes[6], 0);
    }
    void ZeroTail(uint32_t index, const moe::OutputDesc& shape, uint64_t defined) {
        const uint64_t bytes = BytesOf(shape);
        if (bytes > defined && bytes - defined <= kZeroTailBytes) {
            memset(static_cast<uint8_t*>(outputs_[index]) + defined, 0, bytes - defined);
        }
    }

    Communicator& comm_;
    const Plan& plan_;
    const void* const* inputs_;
    void* const* outputs_;
    int32_t* record_;
    twin::LaunchSpec spec_;
    GM_ADDR workspace_ = nullptr;
    GM_ADDR recordAddress_ = nullptr;
};

}  // namespace

}  // namespace ops

int am_run(void* comm, void* plan, const void* const* inputs, void* const* outputs, int32_t* record,
           char* fault, uint64_t fault_bytes) {
    ops::Communicator& end = *static_cast<ops::Communicator*>(comm);
    const std::lock_guard<std::mutex> lock(end.mutex());
    memset(record, 0, moe::kErrorRecordWords * sizeof(int32_t));
    try {
        ops::Launch(end, *static_cast<ops::Plan*>(plan), inputs, outputs, record).Run();
        return record[moe::kRecMagic] == moe::kRecordMagic ? record[moe::kRecCode]
                                                           : static_cast<int>(moe::kOk);
    } catch (const std::exception& error) {
        // The others need not wait for a rank whose kernel has stopped.
        for (int peer = 0; peer < end.world(); ++peer) end.PostAbort(peer, moe::kKernelFault, end.rank());
        strncpy(fault, error.what(), fault_bytes - 1);
        fault[fault_bytes - 1] = '\0';
        return static_cast<int>(moe::kKernelFault);
    }
}
