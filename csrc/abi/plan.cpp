// Plans across the C ABI: names, shapes, checks.
#include <cstring>
#include <string>

#include "ascend_moe.h"
#include "op_launch.h"
#include "rules/message.h"
#include "rules/op_tables.h"
#include "rules/vendor_needs.h"

namespace ops {

uint64_t GiveText(const std::string& from, char* to, uint64_t bytes) {
    if (bytes != 0) to[from.copy(to, bytes - 1)] = '\0';
    return from.size() + 1;
}

}  // namespace ops

namespace {

#define AM_NAME(name) #name " "
constexpr char kTensorNames[] = ASCEND_MOE_TENSORS(AM_NAME);
constexpr char kAttributeNames[] = ASCEND_MOE_ATTRIBUTES(AM_NAME);
#undef AM_NAME

template <class Number>
void Field(std::string& text, const char* name, Number value) {
    if (!text.empty() && text.back() != '\n') text += ";";
    text += std::string(name) + "=" + std::to_string(value);
}

}  // namespace

const char* am_tensor_names(void) { return kTensorNames; }
const char* am_attribute_names(void) { return kAttributeNames; }

int am_type_code(const char* name) {
    for (uint32_t code = moe::kTypeAbsent; code <= moe::kTypeBool; ++code) {
        if (strcmp(name, moe::TypeName(code)) == 0) return static_cast<int>(code);
    }
    return static_cast<int>(moe::kTypeOther);
}

int am_comm_algorithm(const char* name) { return moe::AlgorithmIndexOf(name); }

uint64_t am_spec_bytes(void) { return sizeof(moe::CallSpec); }
uint64_t am_check_bytes(void) { return sizeof(moe::CheckResult); }
uint64_t am_error_record_words(void) { return moe::kErrorRecordWords; }

void* am_plan_create(const void* spec, void* check) {
    ops::Plan* plan = new ops::Plan;
    plan->spec = *static_cast<const moe::CallSpec*>(spec);
    if (moe::PlanCall(plan->spec, plan->call, *static_cast<moe::CheckResult*>(check))) return plan;
    delete plan;
    return nullptr;
}
void am_plan_destroy(void* plan) { delete static_cast<ops::Plan*>(plan); }

uint64_t am_plan_info(const void* plan, uint64_t* out, uint64_t count) {
    const ops::Plan& source = *static_cast<const ops::Plan*>(plan);
    const uint64_t words[] = {source.call.op,        source.call.tilingKey,      source.call.blockDim,
                              source.call.xType,     source.call.workspaceBytes, source.call.windowBytes,
                              source.tiling_bytes(), source.info().transport,    source.info().algorithm};
    constexpr uint64_t kWords = sizeof(words) / sizeof(words[0]);
    memcpy(out, words, sizeof(words[0]) * std::min(count, kWords));
    return kWords;
}
uint64_t am_plan_tiling(const void* plan, void* out, uint64_t bytes) {
    const ops::Plan& source = *static_cast<const ops::Plan*>(plan);
    memcpy(out, source.tiling(), std::min(bytes, source.tiling_bytes()));
    return source.tiling_bytes();
}

int am_call_output(const void* spec, int index, int64_t* out) {
    const moe::CallSpec& call = *static_cast<const moe::CallSpec*>(spec);
    moe::OutputDesc outputs[moe::kMostOutputs];
    const int count = static_cast<int>(moe::OutputsOf(call, outputs));
    if (index < 0 || index >= count) return 0;
    out[0] = outputs[index].dtype;
    out[1] = outputs[index].rank;
    out[2] = outputs[index].dims[0];
    out[3] = outputs[index].dims[1];
    return 1;
}

int am_error_is_fatal(int code) { return code >= static_cast<int>(moe::kFirstFatal); }
const char* am_error_name(int code) { return moe::ErrorName(static_cast<uint32_t>(code)); }
void am_error_message(const int32_t* record, char* text, uint64_t bytes) {
    ops::GiveText(moe::RecordText(record).Message(), text, bytes);
}
void am_error_fields(const int32_t* record, char* text, uint64_t bytes) {
    ops::GiveText(moe::RecordText(record).Fields(), text, bytes);
}

// ---- what a call needs, as the header says ----

uint64_t am_need_limits(char* text, uint64_t bytes) {
    std::string fields;
    Field(fields, "ep_world_size", moe::kMaxWorld);
    Field(fields, "planned_world_size", moe::kMaxPlanned);
    Field(fields, "slots", moe::kMaxSegments);
    Field(fields, "moe_expert_num", moe::kMaxExperts);
    Field(fields, "special_experts", moe::kMaxSpecialExperts);
    Field(fields, "topk", moe::kMaxTopK);
    Field(fields, "batch", moe::kMaxBatch);
    Field(fields, "hidden", moe::kMaxHidden);
    Field(fields, "cores", moe::kMaxCores);
    Field(fields, "ub_bytes", moe::kUbBytes);
    Field(fields, "mc2_bytes", sizeof(moe::MoeDistributeMc2Head));
    return ops::GiveText(fields, text, bytes);
}

uint64_t am_need_window(const void* dispatch_spec, char* text, uint64_t bytes) {
    const moe::CallSpec& call = *static_cast<const moe::CallSpec*>(dispatch_spec);
    moe::MoeDistributeInfo info;
    moe::FillInfo(call, info);
    const uint32_t back = moe::ReturnedRowOf(call, info);
    const auto both = [&](const moe::WindowNeed& need) {
        return moe::NeededMiB(info, std::max(need.dispatchRegion, need.combineRegion),
                              std::max(need.dispatchPingPong, need.combinePingPong));
    };
    // With rows at multiples of kRowUnit; 0: they never are.
    const int64_t aligned = info.rowUnit == moe::kRowUnit ? both(moe::WindowNeedOf(info, back)) : 0;
    info.rowUnit = moe::kBlock;
    const moe::WindowNeed need = moe::WindowNeedOf(info, back);
    std::string fields;
    const uint64_t regions = info.regions;
    Field(fields, "dispatch_bytes",
          2 * std::max(regions * moe::CeilTo(need.dispatchRegion, 512), moe::CeilTo(need.dispatchPingPong, 512)));
    Field(fields, "combine_bytes",
          2 * std::max(regions * moe::CeilTo(need.combineRegion, 512), moe::CeilTo(need.combinePingPong, 512)));
    Field(fields, "dispatch_mib", moe::NeededMiB(info, need.dispatchRegion, need.dispatchPingPong));
    Field(fields, "combine_mib", moe::NeededMiB(info, need.combineRegion, need.combinePingPong));
    Field(fields, "buffsize_mib", both(need));
    Field(fields, "aligned_mib", aligned);
    const bool direct = info.algorithm == moe::kAlgorithmDirect;
    const uint64_t sent = direct ? 0 : static_cast<uint64_t>(info.capacity) * moe::RowBytesWithTrailer(info);
    const uint64_t returned = static_cast<uint64_t>(info.capacity) * back;
    Field(fields, "dispatch_flag_bytes", moe::BytesOnWire(info, sent) - sent);
    Field(fields, "combine_flag_bytes", moe::BytesOnWire(info, returned) - returned);
    Field(fields, "algorithm", info.algorithm);
    Field(fields, "state_bytes", moe::StateBytes(info.world));
    Field(fields, "state_in_window_mib", moe::StateMiB(info));
    Field(fields, "capacity", info.capacity);
    Field(fields, "max_batch", info.maxBatch);
    Field(fields, "local_experts", info.localExperts);
    Field(fields, "expand_rows", info.expandRows);
    return ops::GiveText(fields, text, bytes);
}

uint64_t am_need_tiling(const void* plan, char* text, uint64_t bytes) {
    const ops::Plan& of = *static_cast<const ops::Plan*>(plan);
    const moe::CallPlan& call = of.call;
    const moe::MoeDistributeInfo& info = of.info();
    std::string fields;
    Field(fields, "tiling_key", call.tilingKey);
    Field(fields, "block_dim", call.blockDim);
    Field(fields, "workspace_bytes", call.workspaceBytes);
    Field(fields, "algorithm", info.algorithm);
    Field(fields, "transport", info.transport);
    Field(fields, "rdma_flags", info.rdmaFlags);
    Field(fields, "histograms", moe::HistogramsAtOnce(info));
    Field(fields, "row_unit", info.rowUnit);
    Field(fields, "chunk_pairs", moe::kChunkPairs);
    Field(fields, "tiling_bytes", of.tiling_bytes());
    if (of.dispatch()) {
        Field(fields, "send_ring", call.dispatch.sendRing);
        Field(fields, "trailer_ring", call.dispatch.trailerRing);
        Field(fields, "quant_piece", call.dispatch.quantPiece);
        Field(fields, "copy_rows", call.dispatch.copyRows);
        Field(fields, "copy_ring", call.dispatch.copyRing);
        Field(fields, "list_cores", call.dispatch.listCores);
        Field(fields, "shared_lanes", call.dispatch.sharedLanes);
    } else {
        Field(fields, "send_rows", call.combine.sendRows);
        Field(fields, "parts_per_token", call.combine.partsPerToken);
        Field(fields, "part_elements", call.combine.partElements);
        Field(fields, "sum_ring", call.combine.sumRing);
        Field(fields, "sum_group", call.combine.sumGroup);
        Field(fields, "return_ring", call.combine.returnRing);
        Field(fields, "quant_piece", call.combine.quantPiece);
        Field(fields, "chunk_tokens", moe::ChunkTokens(info));
    }
    return ops::GiveText(fields, text, bytes);
}

uint64_t am_need_ub(const void* plan, char* text, uint64_t bytes) {
    const moe::CallPlan& call = static_cast<const ops::Plan*>(plan)->call;
    std::string lines;
    for (const moe::Step step : moe::StepsOf(call)) {
        for (const moe::UbItem& item : moe::UbBudget(call, step))
            lines += std::string(moe::StepName(step)) + "\t" + item.name + "\t" + std::to_string(item.bytes) + "\n";
    }
    return ops::GiveText(lines, text, bytes);
}

uint64_t am_need_cann(const int64_t* call, char* text, uint64_t bytes) {
    const moe::CannCall cann = {call[0], call[1], call[2], call[3], call[4], call[5], call[6], call[7], call[8]};
    std::string lines;
    for (const moe::CannVersion& version : moe::kCannVersions) {
        const int64_t need = version.bytes(cann);
        lines += std::string(version.name) + "\t" + std::to_string(need) + "\t" + std::to_string(moe::CannMiB(need)) +
                 "\t" + std::to_string(version.stateKiB * cann.world) + "\t" + moe::CannRefusal(version, cann) + "\n";
    }
    return ops::GiveText(lines, text, bytes);
}
const char* am_cann_state_since(void) { return moe::kCannStateSince; }
const char* am_super_pod_rule(void) {
    static const std::string rule = moe::SuperPodRule();
    return rule.c_str();
}

uint64_t am_need_ub_taken(void* comm) { return static_cast<ops::Communicator*>(comm)->device().traffic().ub_peak; }
