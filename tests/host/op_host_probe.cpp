// For test_op_host.py: op_host through the shim of CANN, and the plan that the twin makes, across a C
// ABI.
#include <cstdio>
#include <cstring>
#include <sstream>

#include "rules/plan.h"
#include "cann_shim.h"

#define PROBE_API extern "C" __attribute__((visibility("default")))

namespace {

// Lines: "op TYPE", "soc NAME", "cores N", "input -" or "input TYPE DIM...", "number N", "text ANYTHING".
cann_shim::Call ParseCall(const char* text) {
    cann_shim::Call call;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string kind;
        words >> kind;
        if (kind == "op") words >> call.opType;
        if (kind == "soc") {
            call.soc.clear();
            words >> call.soc;
        }
        if (kind == "cores") words >> call.vectorCores;
        if (kind == "number") {
            int64_t number = 0;
            words >> number;
            call.attributes.values.emplace_back(number);
        }
        if (kind == "text") call.attributes.values.emplace_back(line.size() > 5 ? line.substr(5) : std::string());
        if (kind == "input") {
            cann_shim::Tensor tensor;
            int type = 0;
            tensor.given = static_cast<bool>(words >> type);
            tensor.desc.type = static_cast<ge::DataType>(type);
            for (int64_t size; words >> size;) tensor.shape.origin.dims.push_back(size);
            call.inputs.push_back(tensor);
        }
    }
    return call;
}

void CopyText(const std::string& from, char* to, uint64_t bytes) {
    snprintf(to, static_cast<size_t>(bytes), "%s", from.c_str());
}

}  // namespace

// What the runtime would say: the SoC's name, the op-execute timeout in ms, HCCL's version; nothing while null or 0.
extern "C" {
__attribute__((visibility("default"))) const char* probe_soc = nullptr;
__attribute__((visibility("default"))) uint32_t probe_op_timeout = 0;
const char* aclrtGetSocName() { return probe_soc; }
int aclrtGetOpExecuteTimeout(uint32_t* milliseconds) {
    *milliseconds = probe_op_timeout;
    return probe_op_timeout == 0 ? 1 : 0;
}
__attribute__((visibility("default"))) const char* probe_hccl_version = nullptr;
int aclsysGetCANNVersion(int package, char* version) {
    if (probe_hccl_version == nullptr || package != 3) return 1;
    snprintf(version, 128, "%s", probe_hccl_version);
    return 0;
}
}

// numbers: tiling bytes, tiling key, blockDim, schedule mode, workspaces, bytes of the first, AICPU blocks.
PROBE_API int probe_tile(const char* text, uint8_t* bytes, uint64_t capacity, uint64_t* numbers, char* error,
                         uint64_t errorBytes) {
    cann_shim::Call call = ParseCall(text);
    const cann_shim::Tiling tiling = cann_shim::Tile(call);
    const std::vector<uint8_t>& made = tiling.data.bytes;
    CopyText(tiling.error, error, errorBytes);
    if (!tiling.ok || made.size() > capacity) return 0;
    memcpy(bytes, made.data(), made.size());
    numbers[0] = made.size();
    numbers[1] = tiling.tilingKey;
    numbers[2] = tiling.blockDim;
    numbers[3] = tiling.scheduleMode;
    numbers[4] = tiling.workspaces.size();
    numbers[5] = tiling.workspaces.empty() ? 0 : tiling.workspaces[0];
    numbers[6] = tiling.aicpuBlockDim;
    return 1;
}

// The same from a CallSpec of Python's making, without op_host's CANN side. numbers: bytes, key, cores, -, -,
// workspace.
PROBE_API int probe_plan(const void* spec, uint8_t* bytes, uint64_t capacity, uint64_t* numbers, char* error,
                         uint64_t errorBytes) {
    const auto& call = *static_cast<const moe::CallSpec*>(spec);
    moe::CallPlan plan;
    moe::CheckResult check;
    const bool ok = moe::PlanCall(call, plan, check);
    CopyText(check.message, error, errorBytes);
    const bool dispatch = call.op == static_cast<int32_t>(moe::kOpDispatch);
    const uint64_t size = dispatch ? sizeof(plan.dispatch) : sizeof(plan.combine);
    if (!ok || size > capacity) return 0;
    memcpy(bytes, dispatch ? static_cast<const void*>(&plan.dispatch) : &plan.combine, size);
    numbers[0] = size;
    numbers[1] = plan.tilingKey;
    numbers[2] = plan.blockDim;
    numbers[5] = plan.workspaceBytes;
    return 1;
}

PROBE_API uint64_t probe_spec_bytes() { return sizeof(moe::CallSpec); }
PROBE_API uint64_t probe_head_bytes() { return sizeof(moe::MoeDistributeMc2Head); }
PROBE_API uint64_t probe_head_cc() { return offsetof(moe::MoeDistributeMc2Head, cc); }

// "TYPE DIM..." a line, or the error.
PROBE_API int probe_shapes(const char* text, char* out, uint64_t bytes) {
    cann_shim::Call call = ParseCall(text);
    const std::string error = cann_shim::InferShapes(call);
    std::ostringstream lines;
    for (const cann_shim::Tensor& output : call.outputs) {
        lines << output.desc.type;
        for (int64_t size : output.shape.origin.dims) lines << ' ' << size;
        lines << '\n';
    }
    CopyText(error.empty() ? lines.str() : error, out, bytes);
    return error.empty() ? 1 : 0;
}

// A line an item: kind, name, then what there is to know of it.
PROBE_API int probe_definition(const char* type, char* out, uint64_t bytes) {
    const ops::OpDef* definition = cann_shim::Definition(type);
    if (definition == nullptr) return 0;
    std::ostringstream lines;
    const auto tensors = [&lines](const char* kind, const std::deque<ops::OpParamDef>& list) {
        for (const ops::OpParamDef& tensor : list) {
            lines << kind << ' ' << tensor.name << ' ' << tensor.required << ' ' << tensor.formats.size();
            for (ge::DataType one : tensor.types) lines << ' ' << static_cast<int>(one);
            lines << '\n';
        }
    };
    tensors("input", definition->inputs);
    tensors("output", definition->outputs);
    for (const ops::OpAttrDef& attribute : definition->attributes) {
        lines << "attribute " << attribute.name << ' ' << attribute.required << ' '
              << (attribute.isText ? "text " + attribute.text : "int " + std::to_string(attribute.number)) << '\n';
    }
    for (const auto& [soc, config] : definition->aiCore.configs) {
        for (const auto& [key, value] : config.items) lines << "config " << soc << ' ' << key << ' ' << value << '\n';
    }
    ge::AscendString status;
    const bool inGraphs = definition->aiCore.checkSupport(ge::Operator(), status) == ge::GRAPH_SUCCESS;
    lines << "graph " << inGraphs << ' ' << status.GetString() << '\n';
    for (const std::string& group : definition->mc2.groups) lines << "group " << group << '\n';
    CopyText(lines.str(), out, bytes);
    return 1;
}
