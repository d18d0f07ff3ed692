// A call as CANN describes it to tiling and shape functions, read into a CallSpec.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "exe_graph/runtime/infer_datatype_context.h"
#include "exe_graph/runtime/infer_shape_context.h"
#include "exe_graph/runtime/tiling_context.h"
#include "../rules/op_tables.h"

#if defined(__has_include)
#if __has_include("base/err_msg.h")
#include "base/err_msg.h"
#define ASCEND_MOE_HAS_ERR_MSG 1
#endif
#endif

// CANN's log without its headers, which differ between versions; the symbol does not.
extern "C" __attribute__((weak)) void DlogRecord(int32_t module, int32_t level, const char* format, ...);

namespace moe {

// ---- one line of error, in CANN's log and in the text of aclGetRecentErrMsg if that is a public interface (otherwise
// stderr) ----

// `op` is the op type, the rest one line without its name. Always false, so that a caller can return it.
__attribute__((format(printf, 2, 3))) inline bool ReportError(const char* op, const char* format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    constexpr int32_t kModuleOp = 63, kLevelError = 3;
    if (DlogRecord != nullptr) DlogRecord(kModuleOp, kLevelError, "%s: %s", op, message);
#ifdef ASCEND_MOE_HAS_ERR_MSG
    if (ge::ReportUserDefinedErrMsg != nullptr) {
        ge::ReportUserDefinedErrMsg("EU0001", "%s: %s", op, message);
        return false;
    }
#endif
    fprintf(stderr, "%s: %s\n", op, message);
    return false;
}

// ---- a call ----

// The attributes that are no part of CallSpec's table.
struct CannAttributes {
    const char* group_ep;
    int64_t window_mib;
    int64_t timeout_us;
    int64_t ranks_per_server;
    int64_t core_barrier;  // 1 + kBarrierByBlocks or kBarrierBySyncAll, the faster here; 0: unknown
};

constexpr struct {
    uint32_t type;
    ge::DataType cann;
} kTypes[] = {{kTypeFp32, ge::DT_FLOAT}, {kTypeFp16, ge::DT_FLOAT16}, {kTypeBf16, ge::DT_BF16},
              {kTypeInt8, ge::DT_INT8},  {kTypeInt32, ge::DT_INT32},  {kTypeInt64, ge::DT_INT64},
              {kTypeBool, ge::DT_BOOL}};

inline uint32_t TypeOf(ge::DataType cann) {
    for (const auto& known : kTypes) {
        if (known.cann == cann) return known.type;
    }
    return kTypeOther;
}
inline ge::DataType CannTypeOf(uint32_t type) {
    for (const auto& known : kTypes) {
        if (known.type == type) return known.cann;
    }
    return ge::DT_UNDEFINED;
}

inline void SetShape(const gert::Shape& shape, TensorDesc& tensor) {
    tensor.rank = static_cast<int32_t>(shape.GetDimNum());
    for (int32_t i = 0; i < tensor.rank && i < 3; ++i) tensor.dims[i] = shape.GetDim(static_cast<size_t>(i));
}

// For each kind of context: the tensor of input `index`; false if it is absent. Required inputs come first, so that
// they have the same place in the definition and the call.
inline const gert::Shape& OriginOf(const gert::StorageShape& shape) { return shape.GetOriginShape(); }
inline const gert::Shape& OriginOf(const gert::Shape& shape) { return shape; }

template <typename Context>
bool ReadTensor(const Context& context, size_t index, bool required, TensorDesc& tensor) {
    const auto* shape = required ? context.GetInputShape(index) : context.GetOptionalInputShape(index);
    const auto* desc = required ? context.GetInputDesc(index) : context.GetOptionalInputDesc(index);
    if (shape == nullptr || desc == nullptr) return false;
    tensor.dtype = static_cast<int32_t>(TypeOf(desc->GetDataType()));
    SetShape(OriginOf(*shape), tensor);
    return true;
}
inline bool ReadTensor(const gert::InferDataTypeContext& context, size_t index, bool required, TensorDesc& tensor) {
    const ge::DataType type = required ? context.GetInputDataType(index) : context.GetOptionalInputDataType(index);
    if (type == ge::DT_UNDEFINED) return false;
    tensor.dtype = static_cast<int32_t>(TypeOf(type));
    return true;
}

// An attribute beyond int32 becomes the nearest int32, which no rule accepts.
inline int32_t Saturated(int64_t value) {
    return static_cast<int32_t>(std::min<int64_t>(std::max<int64_t>(value, INT32_MIN), INT32_MAX));
}

inline bool ReportMissing(const OpInterface& op, const char* kind, const char* name) {
    return ReportError(op.type, "%s %s is missing, it is required", kind, name);
}

// Reads integers into CallSpec's table or beside it, and what the checks need of group_ep and comm_alg.
inline bool ReadAttributes(const OpInterface& op, const gert::RuntimeAttrs& attributes, CallSpec& call,
                           CannAttributes& others) {
    for (size_t i = 0; i < op.attributes.size; ++i) {
        const OpAttribute& attribute = op.attributes[i];
        if (attribute.text != nullptr) {
            const char* text = attributes.GetStr(i);
            if (text == nullptr && attribute.required) return ReportMissing(op, "attribute", attribute.name);
            if (text == nullptr) text = attribute.text;
            if (strcmp(attribute.name, "group_ep") == 0) {
                others.group_ep = text;
                call.group_ep_length = static_cast<int32_t>(strlen(text));
            } else if (strcmp(attribute.name, "comm_alg") == 0) {
                call.comm_alg = AlgorithmIndexOf(text);
                // Whether loads of other ranks' rows work here is unknown: callers who know it from the bring-up pass
                // "direct".
                if (call.comm_alg >= kCommAlgAuto) call.comm_alg = kCommAlgWindow;
            }
            continue;
        }
        const int64_t* value = attributes.GetInt(i);
        if (value == nullptr && attribute.required) return ReportMissing(op, "attribute", attribute.name);
        const int64_t given = value == nullptr ? attribute.value : *value;
        const uint32_t index = AttributeIndexOf(attribute.name);
        if (index < kAttributeCount) {
            call.attributes[index] = given;
        } else if (strcmp(attribute.name, "contract") == 0) {
            call.contract = Saturated(given);
        } else if (strcmp(attribute.name, "window_mib") == 0) {
            others.window_mib = given;
        } else if (strcmp(attribute.name, "part") == 0) {
            call.part = Saturated(given);
        } else if (strcmp(attribute.name, "timeout_us") == 0) {
            others.timeout_us = given;
        } else if (strcmp(attribute.name, "ranks_per_server") == 0) {
            others.ranks_per_server = given;
        } else if (strcmp(attribute.name, "core_barrier") == 0) {
            others.core_barrier = given;
        }
    }
    return true;
}

// An integer attribute by its name in the definition, or its default.
inline int64_t IntegerOf(const OpInterface& op, const gert::RuntimeAttrs& attributes, const char* name) {
    for (size_t i = 0; i < op.attributes.size; ++i) {
        if (strcmp(op.attributes[i].name, name) != 0) continue;
        const int64_t* given = attributes.GetInt(i);
        return given == nullptr ? op.attributes[i].value : *given;
    }
    return kNoValue;
}

struct Range {
    const char* name;
    int64_t first, last;
};

inline bool InRange(const char* op, const Range& range, int64_t value) {
    if (value >= range.first && value <= range.last) return true;
    return ReportError(op, "%s is %lld, it must be %lld to %lld", range.name, static_cast<long long>(value),
                       static_cast<long long>(range.first), static_cast<long long>(range.last));
}

// Everything in the context; the kernel checks the communicator's own size and rank.
template <typename Context>
bool ReadCall(const Context& context, uint32_t code, CallSpec& call, CannAttributes& others) {
    const OpInterface& op = InterfaceOf(code);
    memset(&call, 0, sizeof(call));
    memset(&others, 0, sizeof(others));
    call.op = static_cast<int32_t>(code);
    for (int64_t& value : call.attributes) value = kNoValue;
    const gert::RuntimeAttrs* attributes = context.GetAttrs();
    if (attributes == nullptr) return ReportError(op.type, "the context has no attributes");
    if (!ReadAttributes(op, *attributes, call, others)) return false;
    if (call.contract != static_cast<int32_t>(kContractV1) && call.contract != static_cast<int32_t>(kContractV2)) {
        return ReportError(op.type, "contract is %d, it must be 1 or 2", call.contract);
    }
    if (call.part < static_cast<int32_t>(kPartWhole) || call.part > static_cast<int32_t>(kPartFinish)) {
        return ReportError(op.type, "part is %d, it must be 0 (the op), 1 (send) or 2 (finish)", call.part);
    }
    for (size_t i = 0; i < op.inputs.size; ++i) {
        const OpTensor& input = op.inputs[i];
        const TensorIndex index = IndexOf(input, call.contract);
        if (!ReadTensor(context, i, input.required, call.tensors[index]) && input.required) {
            return ReportMissing(op, "input", input.name);
        }
    }
    call.comm_world = MOE_ATTRIBUTE(call, ep_world_size);
    call.comm_rank = MOE_ATTRIBUTE(call, ep_rank_id);
    return true;
}

}  // namespace moe
