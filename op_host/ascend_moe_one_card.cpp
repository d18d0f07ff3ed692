// The op AscendMoeOneCard for CANN: several ranks in one launch, whose tilings the caller has planned.
#include "cann/def.h"

namespace {

bool PlanOneCard(gert::TilingContext& context) {
    const moe::OpInterface& op = moe::InterfaceOf(moe::kOpOneCard);
    const gert::RuntimeAttrs* attributes = context.GetAttrs();
    fe::PlatFormInfos* infos = context.GetPlatformInfo();
    if (attributes == nullptr) return moe::ReportError(op.type, "the context has no attributes");
    if (infos == nullptr) return moe::ReportError(op.type, "the context has no platform");
    platform_ascendc::PlatformAscendC platform(infos);
    const int64_t most = platform.GetCoreNumAiv();
    const int64_t world = moe::IntegerOf(op, *attributes, "world"), cores = moe::IntegerOf(op, *attributes, "cores");
    const int64_t ranks = moe::IntegerOf(op, *attributes, "ranks"), key = moe::IntegerOf(op, *attributes, "tiling_key");
    if (!moe::InRange(op.type, {"the number of vector cores", 1, moe::kMaxCores}, most) ||
        !moe::InRange(op.type, {"world", 1, most}, world) || !moe::InRange(op.type, {"cores", 1, most / world}, cores))
        return false;
    const moe::MoeOneCardTiling tiling = {static_cast<uint64_t>(ranks), static_cast<uint32_t>(world),
                                          static_cast<uint32_t>(cores)};
    moe::CallPlan plan = {};
    plan.tilingKey = static_cast<uint32_t>(key);
    plan.blockDim = tiling.world * tiling.cores;
    return moe::HandOver(op.type, context, plan, false, platform, &tiling, sizeof(tiling));
}

ge::graphStatus TileOneCard(gert::TilingContext* context) {
    return context != nullptr && PlanOneCard(*context) ? ge::GRAPH_SUCCESS : ge::GRAPH_FAILED;
}

}  // namespace

namespace ops {

class AscendMoeOneCard : public OpDef {
public:
    explicit AscendMoeOneCard(const char* name) : OpDef(name) {
        moe::DescribeOp(moe::kOpOneCard, {moe::InferShapeOfBlocks, moe::InferDataTypeOfBlocks, TileOneCard}, *this);
    }
};

OP_ADD(AscendMoeOneCard);

}  // namespace ops
