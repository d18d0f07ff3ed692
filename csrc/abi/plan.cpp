// Plans across the C ABI: names, shapes, checks.
#include <cstring>

#include "plan.h"
#include "ascend_moe.h"
#include "rules/message.h"
#include "rules/op.h"

namespace {

#define AM_NAME(name) #name " "
constexpr char kTensorNames[] = ASCEND_MOE_TENSORS(AM_NAME);
constexpr char kAttributeNames[] = ASCEND_MOE_ATTRIBUTES(AM_NAME);
#undef AM_NAME

void CopyText(const std::string& from, char* to, uint64_t bytes) {
    if (bytes == 0) return;
    const size_t length = from.size() < bytes - 1 ? from.size() : bytes - 1;
    memcpy(to, from.data(), length);
    to[length] = '\0';
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
    moe::OutputDesc outputs[moe::kDispatchOutputs];
    int count = 1;
    if (call.op == static_cast<int32_t>(moe::kOpDispatch)) {
        moe::DispatchShapes(call, outputs);
        count = static_cast<int>(moe::kDispatchOutputs);
    } else {
        outputs[0] = moe::CombineShape(call);
    }
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
    CopyText(moe::RecordText(record).Message(), text, bytes);
}
void am_error_fields(const int32_t* record, char* text, uint64_t bytes) {
    CopyText(moe::RecordText(record).Fields(), text, bytes);
}
