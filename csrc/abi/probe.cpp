// Launches the probe kernel of the bring-up on the twin, over a communicator's windows.
#include "probe/tiling.h"

#include <cstring>

#include "ascend_moe.h"
#include "op_launch.h"
#include "twin/api/qualifiers.h"

extern "C" void ascend_moe_probe(GM_ADDR, GM_ADDR, GM_ADDR);

namespace ops {

namespace {

// Unlike the operators, the probes wait for flags in the data window: a store there must wake the owner. Their rows and
// flags lie anywhere in it, so this rank's own parts are merged again.
std::vector<twin::GmRange> RangesOf(const Communicator& comm) {
    std::vector<twin::GmRange> ranges;
    for (twin::GmRange range : comm.ranges()) {
        const bool data = range.kind == twin::GmKind::kWindowData && range.owner >= 0;
        if (data && !ranges.empty() && ranges.back().kind == range.kind && ranges.back().end == range.begin) {
            ranges.back().end = range.end;
            continue;
        }
        if (data) {
            range.doorbell = DoorbellOf(comm.base(range.owner));
            range.atomic_blocks = true;
        }
        ranges.push_back(range);
    }
    return ranges;
}

void Launch(Communicator& comm, std::vector<uint8_t>& bytes, uint32_t* report) {
    moe::MoeProbeTiling tiling;
    memcpy(&tiling, bytes.data(), sizeof(tiling));
    twin::LaunchSpec spec;
    spec.block_dim = tiling.cores;
    spec.tiling_key = ASCEND_MOE_TILING_KEY_PROBE;
    spec.hccl_context[0] = reinterpret_cast<uintptr_t>(comm.context());
    spec.ranges = RangesOf(comm);
    if (twin::kChecked) spec.deadline_s = static_cast<double>(tiling.deadlineCycles) / (moe::kCyclesPerMicro * 1e6);
    uint8_t* const scratch = comm.Workspace(moe::kProbeWorkspaceBytes);
    GM_ADDR workspace = AddMemory(spec, scratch, moe::kProbeWorkspaceBytes, "workspace");
    GM_ADDR data = AddMemory(spec, bytes.data(), bytes.size(), "tiling");
    GM_ADDR out = AddMemory(spec, report, static_cast<uint64_t>(tiling.cores) * moe::kBlock, "report");
    spec.ranges.back().kind = twin::GmKind::kTensor;
    comm.BeginLaunch();
    comm.device().Launch(spec, [=] { ascend_moe_probe(out, workspace, data); });
    comm.EndLaunch(false);
    comm.CheckServed();
}

}  // namespace

}  // namespace ops

int am_probe(void* comm, const void* tiling, uint64_t tiling_bytes, uint32_t* report, char* fault,
             uint64_t fault_bytes) {
    ops::Communicator& communicator = *static_cast<ops::Communicator*>(comm);
    const std::lock_guard<std::mutex> lock(communicator.mutex());
    try {
        if (tiling_bytes != sizeof(moe::MoeProbeTiling))
            throw std::runtime_error("the tiling of the probe kernel has another size");
        const uint8_t* bytes = static_cast<const uint8_t*>(tiling);
        std::vector<uint8_t> own(bytes, bytes + tiling_bytes);
        ops::Launch(communicator, own, report);
        return static_cast<int>(moe::kOk);
    } catch (const std::exception& error) {
        communicator.EndLaunch(true);
        ops::GiveText(error.what(), fault, fault_bytes);
        return static_cast<int>(moe::kKernelFault);
    }
}
