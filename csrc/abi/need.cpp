// What a call needs, across the C ABI: windows, UB, tiling, and what CANN's own operators would need. Texts
// of "name=value" fields; where a line stands for one thing, one line each.
#include <cstring>
#include <string>

#include "ascend_moe.h"
#include "communicator.h"
#include "plan.h"
#include "rules/ub.h"
#include "vendor_needs.h"

namespace {

uint64_t Give(const std::string& from, char* to, uint64_t bytes) {
    if (bytes != 0) {
        const size_t length = from.size() < bytes - 1 ? from.size() : bytes - 1;
        memcpy(to, from.data(), length);
        to[length] = '\0';
    }
    return from.size() + 1;
}

template <class Number>
void Field(std::string& text, const char* name, Number value) {
    if (!text.empty() && text.back() != '\n') text += ";";
    text += std::string(name) + "=" + std::to_string(value);
}

}  // namespace

uint64_t am_need_limits(char* text, uint64_t bytes) {
    std::string fields;
    Field(fields, "ep_world_size", moe::kMaxWorld);
    Field(fields, "slots", moe::kMaxSlots);
    Field(fields, "moe_expert_num", moe::kMaxExperts);
    Field(fields, "topk", moe::kMaxTopK);
    Field(fields, "batch", moe::kMaxBatch);
    Field(fields, "hidden", moe::kMaxHidden);
    Field(fields, "cores", moe::kMaxCores);
    Field(fields, "ub_bytes", moe::kUbBytes);
    Field(fields, "mc2_bytes", sizeof(moe::MoeDistributeMc2Head));
    return Give(fields, text, bytes);
}

uint64_t am_need_window(const void* dispatch_spec, char* text, uint64_t bytes) {
    const moe::CallSpec& call = *static_cast<const moe::CallSpec*>(dispatch_spec);
    moe::MoeDistributeInfo info;
    moe::FillInfo(call, info);
    const moe::WindowNeed need = moe::WindowNeedOf(info, info.wireType, info.quantMode != 0);
    std::string fields;
    const uint64_t regions = info.world;
    Field(fields, "dispatch_bytes",
          2 * std::max(regions * moe::CeilTo(need.dispatchRegion, 512), moe::CeilTo(need.dispatchHalf, 512)));
    Field(fields, "combine_bytes",
          2 * std::max(regions * moe::CeilTo(need.combineRegion, 512), moe::CeilTo(need.combineHalf, 512)));
    Field(fields, "dispatch_mib", moe::NeededMiB(info, need.dispatchRegion, need.dispatchHalf));
    Field(fields, "combine_mib", moe::NeededMiB(info, need.combineRegion, need.combineHalf));
    Field(fields, "buffsize_mib",
          moe::NeededMiB(info, std::max(need.dispatchRegion, need.combineRegion),
                         std::max(need.dispatchHalf, need.combineHalf)));
    Field(fields, "algorithm", info.algorithm);
    Field(fields, "state_bytes", moe::StateBytes(info.world));
    Field(fields, "state_in_window_mib", moe::StateMiB(info));
    Field(fields, "capacity", info.capacity);
    Field(fields, "max_batch", info.maxBatch);
    Field(fields, "local_experts", info.localExperts);
    Field(fields, "expand_rows", info.expandRows);
    return Give(fields, text, bytes);
}

uint64_t am_need_tiling(const void* plan, char* text, uint64_t bytes) {
    const moe::CallPlan& call = static_cast<const ops::Plan*>(plan)->call;
    const bool dispatch = call.op == moe::kOpDispatch;
    std::string fields;
    Field(fields, "tiling_key", call.tilingKey);
    Field(fields, "block_dim", call.blockDim);
    Field(fields, "workspace_bytes", call.workspaceBytes);
    Field(fields, "algorithm", dispatch ? call.dispatch.info.algorithm : call.combine.info.algorithm);
    Field(fields, "transport", dispatch ? call.dispatch.info.transport : call.combine.info.transport);
    if (dispatch) {
        Field(fields, "tiling_bytes", sizeof(call.dispatch));
        Field(fields, "send_ring", call.dispatch.sendRing);
        Field(fields, "copy_rows", call.dispatch.copyRows);
        Field(fields, "copy_ring", call.dispatch.copyRing);
        Field(fields, "list_cores", call.dispatch.listCores);
    } else {
        Field(fields, "tiling_bytes", sizeof(call.combine));
        Field(fields, "send_rows", call.combine.sendRows);
        Field(fields, "parts_per_token", call.combine.partsPerToken);
        Field(fields, "part_elements", call.combine.partElements);
        Field(fields, "sum_ring", call.combine.sumRing);
    }
    return Give(fields, text, bytes);
}

uint64_t am_need_ub(const void* plan, char* text, uint64_t bytes) {
    const moe::UbBudget budget(static_cast<const ops::Plan*>(plan)->call);
    std::string lines;
    for (const moe::UbItem& item : budget.items())
        lines += std::string(item.step) + "\t" + item.name + "\t" + std::to_string(item.bytes) + "\n";
    return Give(lines, text, bytes);
}

uint64_t am_need_cann(const int64_t* call, char* text, uint64_t bytes) {
    const moe::CannCall cann = {call[0], call[1], call[2], call[3], call[4], call[5], call[6], call[7]};
    std::string lines;
    for (uint32_t i = 0; i < moe::kCannVersionCount; ++i) {
        const moe::CannVersion& version = moe::kCannVersions[i];
        const int64_t need = version.bytes(cann);
        lines += std::string(version.name) + "\t" + std::to_string(need) + "\t" +
                 std::to_string(moe::CannMiB(need)) + "\t" +
                 moe::CannLimits(static_cast<moe::CannVersionIndex>(i), cann).text() + "\n";
    }
    return Give(lines, text, bytes);
}

uint64_t am_need_ub_taken(void* comm) {
    return static_cast<ops::Communicator*>(comm)->device().traffic().ub_peak;
}
