// The op AscendMoeProbe for CANN, the kernel of the bring-up: it has a tiling of its own.
#include "cann/def.h"

namespace {

using moe::InRange;
using moe::IntegerOf;

// The probe's own attributes, except the window, the deadline and the head.
bool Fill(const moe::OpInterface& op, const gert::RuntimeAttrs& attributes, moe::MoeProbeTiling& tiling) {
    const int64_t world = IntegerOf(op, attributes, "ep_world_size");
    constexpr int64_t kWord = UINT32_MAX;
    const struct {
        moe::Range range;
        uint32_t& target;
    } rules[] = {
        {{"ep_world_size", 1, moe::kMaxWorld}, tiling.world},
        {{"ep_rank_id", 0, world - 1}, tiling.rank},
        {{"mode", 1, moe::kProbeModeEnd - 1}, tiling.mode},
        {{"nonce", 1, kWord}, tiling.nonce},
        {{"rounds", 1, kWord}, tiling.rounds},
    };
    for (const auto& rule : rules) {
        const int64_t value = IntegerOf(op, attributes, rule.range.name);
        if (!InRange(op.type, rule.range, value)) return false;
        rule.target = static_cast<uint32_t>(value);
    }
    const int64_t cycles = IntegerOf(op, attributes, "cycles");
    if (!InRange(op.type, {"cycles", 0, INT64_MAX}, cycles)) return false;
    tiling.deadlineCycles = static_cast<uint64_t>(cycles);
    return true;
}

bool PlanProbe(gert::TilingContext& context) {
    const moe::OpInterface& op = moe::InterfaceOf(moe::kOpProbe);
    moe::CallSpec call = {};
    moe::CannAttributes given = {};
    const gert::RuntimeAttrs* attributes = context.GetAttrs();
    fe::PlatFormInfos* infos = context.GetPlatformInfo();
    if (attributes == nullptr) return moe::ReportError(op.type, "the context has no attributes");
    if (infos == nullptr) return moe::ReportError(op.type, "the context has no platform");
    moe::MoeProbeTiling tiling = {};
    if (!moe::ReadAttributes(op, *attributes, call, given) || !Fill(op, *attributes, tiling)) return false;
    const moe::SocName soc = moe::SocOf(infos);
    if (!moe::DescribeMachine(op.type, soc, given, call)) return false;
    platform_ascendc::PlatformAscendC platform(infos);
    const int64_t cores = platform.GetCoreNumAiv();
    // Writer, reader and the core that it notifies are different cores.
    if (!InRange(op.type, {"the number of vector cores", 3, moe::kMaxCores}, cores)) return false;
    tiling.cores = static_cast<uint32_t>(cores);
    tiling.contextKind = static_cast<uint32_t>(call.context_kind);
    // On several servers the kernel stores within one if HCCL is to map it, else to no other rank.
    const int64_t share = call.ranks_per_server, stores = IntegerOf(op, *attributes, "intra_node_stores");
    if (!InRange(op.type, {"intra_node_stores", 0, 1}, stores)) return false;
    const bool several = share > 0 && share < tiling.world;
    tiling.intraNodeRanks = static_cast<uint32_t>(several && stores == 0 ? 1 : share);
    tiling.dataBytes = static_cast<uint64_t>(call.window_mib + call.registered_mib) * moe::kMiB;
    if (tiling.deadlineCycles == 0)
        tiling.deadlineCycles = static_cast<uint64_t>(call.deadline_micros) * moe::kCyclesPerMicro;
    const moe::Mc2Task* task =
        moe::TaskOf(op.type, soc, tiling.world, static_cast<uint32_t>(share), tiling.intraNodeRanks);
    if (task == nullptr || !moe::FillMc2Head(op.type, given.group_ep, *task, tiling.mc2)) return false;
    moe::CallPlan plan = {};
    plan.tilingKey = ASCEND_MOE_TILING_KEY_PROBE;
    plan.blockDim = tiling.cores;
    plan.workspaceBytes = moe::kProbeWorkspaceBytes;
    const bool aiCpu = soc.IsA2() && tiling.world > moe::kAiCpuRanks;
    return moe::HandOver(op.type, context, plan, aiCpu, platform, &tiling, sizeof(tiling));
}

ge::graphStatus TileProbe(gert::TilingContext* context) {
    return context != nullptr && PlanProbe(*context) ? ge::GRAPH_SUCCESS : ge::GRAPH_FAILED;
}

}  // namespace

namespace ops {

class AscendMoeProbe : public OpDef {
public:
    explicit AscendMoeProbe(const char* name) : OpDef(name) {
        moe::DescribeOp(moe::kOpProbe, {moe::InferShapeOfBlocks, moe::InferDataTypeOfBlocks, TileProbe}, *this);
    }
};

OP_ADD(AscendMoeProbe);

}  // namespace ops
