// The description of the operators: inputs, outputs and attributes of each op type, in the one order that its
// definition, the aclnn entry points and the kernel entries share; and which of torch_npu's two functions have them.
// No CANN types.
//
// A row of it is one of:
//   INPUT(name, type, need, functions)             a tensor; the functions that have it too
//   OUTPUT(name, type)                             a tensor that both functions return
//   RENAMED(name, v2_name, type[, need, functions]) either, where V2's function has another name for it
//   INTEGER, TEXT(name, need, default, functions)  an attribute; the functions that have it too
//   REFUSED(name, functions, why)                  these functions have it and take no value; the op has not
// The last output of an op, error_record, is returned by no function. A function's parameters are those rows that are
// required, inputs before attributes, and then, by name only, the others in the same order.
//
// Made from the rows:
//   by the tables further below: CANN's definition, shape and tiling functions (op_host/cann), what check.h refuses,
//   the twin's launch (csrc/abi/op_launch.cpp), the virtual NPU's entry points (vnpu/cust_opapi);
//   by the macros: the call on an NPU (csrc/npu/adapter.cpp);
//   by tools/op_description.py, which reads a row a line: the aclnn entry points and their header, msopgen's JSON.
// Typed are Python's functions and the kernel entries: tests/host/test_op_description.py and test_op_api.py hold them
// against the rows.
#pragma once

#include <cstddef>
#include <cstring>

#include "probe/tiling.h"
#include "args.h"

// clang-format off
#define ASCEND_MOE_DISPATCH_INPUTS(INPUT, RENAMED, REFUSED)                                                           \
    INPUT(x, kRows, kRequired, kBoth)                                                                                 \
    INPUT(expert_ids, kTypeInt32, kRequired, kBoth)                                                                   \
    INPUT(scales, kTypeFp32, kOptional, kBoth)                                                                        \
    INPUT(x_active_mask, kTypeBool, kOptional, kBoth)                                                                 \
    INPUT(expert_scales, kTypeFp32, kOptional, kBoth)                                                                 \
    REFUSED(elastic_info, kV2, "CANN no longer has it; ascend_moe.agree and ascend_moe.shrink survive a lost rank")   \
    INPUT(performance_info, kTypeInt64, kOptional, kV2)

#define ASCEND_MOE_DISPATCH_OUTPUTS(OUTPUT, RENAMED)                                                                  \
    OUTPUT(expand_x, kWireRows)                                                                                       \
    OUTPUT(dynamic_scales, kTypeFp32)                                                                                 \
    RENAMED(expand_idx, assist_info_for_combine, kTypeInt32)                                                          \
    OUTPUT(expert_token_nums, kTypeInt64)                                                                             \
    OUTPUT(ep_recv_counts, kTypeInt32)                                                                                \
    OUTPUT(tp_recv_counts, kTypeInt32)                                                                                \
    OUTPUT(expand_scales, kTypeFp32)                                                                                  \
    OUTPUT(error_record, kTypeInt32)

#define ASCEND_MOE_DISPATCH_ATTRIBUTES(TEXT, INTEGER, REFUSED)                                                        \
    TEXT(group_ep, kRequired, "", kBoth)                                                                              \
    INTEGER(ep_world_size, kRequired, 0, kBoth)                                                                       \
    INTEGER(ep_rank_id, kRequired, 0, kBoth)                                                                          \
    INTEGER(moe_expert_num, kRequired, 0, kBoth)                                                                      \
    TEXT(group_tp, kOptional, "", kBoth)                                                                              \
    INTEGER(tp_world_size, kOptional, 0, kBoth)                                                                       \
    INTEGER(tp_rank_id, kOptional, 0, kBoth)                                                                          \
    INTEGER(expert_shard_type, kOptional, 0, kBoth)                                                                   \
    INTEGER(shared_expert_num, kOptional, 1, kBoth)                                                                   \
    INTEGER(shared_expert_rank_num, kOptional, 0, kBoth)                                                              \
    INTEGER(quant_mode, kOptional, 0, kBoth)                                                                          \
    INTEGER(global_bs, kOptional, 0, kBoth)                                                                           \
    INTEGER(expert_token_nums_type, kOptional, 1, kBoth)                                                              \
    TEXT(comm_alg, kOptional, "", kV2)                                                                                \
    INTEGER(zero_expert_num, kOptional, 0, kV2)                                                                       \
    INTEGER(copy_expert_num, kOptional, 0, kV2)                                                                       \
    INTEGER(const_expert_num, kOptional, 0, kV2)                                                                      \
    REFUSED(y_dtype, kV2, "other types of rows are Ascend 950's alone")                                               \
    REFUSED(x_dtype, kV2, "other types of rows are Ascend 950's alone")                                               \
    REFUSED(scales_dtype, kV2, "other types of rows are Ascend 950's alone")                                          \
    INTEGER(contract, kOptional, 1, kNeither)                                                                         \
    INTEGER(window_mib, kOptional, 0, kNeither)                                                                       \
    INTEGER(timeout_us, kOptional, 0, kNeither)                                                                       \
    INTEGER(part, kOptional, 0, kNeither)                                                                             \
    INTEGER(ranks_per_server, kOptional, 0, kNeither)                                                                 \
    INTEGER(meeting, kOptional, 0, kNeither)

#define ASCEND_MOE_COMBINE_INPUTS(INPUT, RENAMED, REFUSED)                                                            \
    INPUT(expand_x, kRows, kRequired, kBoth)                                                                          \
    INPUT(expert_ids, kTypeInt32, kRequired, kBoth)                                                                   \
    RENAMED(expand_idx, assist_info_for_combine, kTypeInt32, kRequired, kBoth)                                        \
    INPUT(ep_send_counts, kTypeInt32, kRequired, kBoth)                                                               \
    INPUT(expert_scales, kTypeFp32, kRequired, kBoth)                                                                 \
    INPUT(tp_send_counts, kTypeInt32, kOptional, kBoth)                                                               \
    INPUT(x_active_mask, kTypeBool, kOptional, kBoth)                                                                 \
    REFUSED(activation_scale, kV1, "CANN takes no other")                                                             \
    REFUSED(weight_scale, kV1, "CANN takes no other")                                                                 \
    REFUSED(group_list, kV1, "CANN takes no other")                                                                   \
    INPUT(expand_scales, kTypeFp32, kOptional, kBoth)                                                                 \
    INPUT(shared_expert_x, kRows, kOptional, kBoth)                                                                   \
    REFUSED(elastic_info, kV2, "CANN no longer has it; ascend_moe.agree and ascend_moe.shrink survive a lost rank")   \
    INPUT(ori_x, kRows, kOptional, kV2)                                                                               \
    INPUT(const_expert_alpha_1, kRows, kOptional, kV2)                                                                \
    INPUT(const_expert_alpha_2, kRows, kOptional, kV2)                                                                \
    INPUT(const_expert_v, kRows, kOptional, kV2)                                                                      \
    INPUT(performance_info, kTypeInt64, kOptional, kV2)

#define ASCEND_MOE_COMBINE_OUTPUTS(OUTPUT, RENAMED)                                                                   \
    OUTPUT(x, kRows)                                                                                                  \
    OUTPUT(error_record, kTypeInt32)

#define ASCEND_MOE_COMBINE_ATTRIBUTES(TEXT, INTEGER, REFUSED)                                                         \
    TEXT(group_ep, kRequired, "", kBoth)                                                                              \
    INTEGER(ep_world_size, kRequired, 0, kBoth)                                                                       \
    INTEGER(ep_rank_id, kRequired, 0, kBoth)                                                                          \
    INTEGER(moe_expert_num, kRequired, 0, kBoth)                                                                      \
    TEXT(group_tp, kOptional, "", kBoth)                                                                              \
    INTEGER(tp_world_size, kOptional, 0, kBoth)                                                                       \
    INTEGER(tp_rank_id, kOptional, 0, kBoth)                                                                          \
    INTEGER(expert_shard_type, kOptional, 0, kBoth)                                                                   \
    INTEGER(shared_expert_num, kOptional, 1, kBoth)                                                                   \
    INTEGER(shared_expert_rank_num, kOptional, 0, kBoth)                                                              \
    INTEGER(global_bs, kOptional, 0, kBoth)                                                                           \
    INTEGER(out_dtype, kOptional, 0, kV1)                                                                             \
    INTEGER(comm_quant_mode, kOptional, 0, kBoth)                                                                     \
    INTEGER(group_list_type, kOptional, 0, kV1)                                                                       \
    TEXT(comm_alg, kOptional, "", kV2)                                                                                \
    INTEGER(zero_expert_num, kOptional, 0, kV2)                                                                       \
    INTEGER(copy_expert_num, kOptional, 0, kV2)                                                                       \
    INTEGER(const_expert_num, kOptional, 0, kV2)                                                                      \
    INTEGER(contract, kOptional, 1, kNeither)                                                                         \
    INTEGER(window_mib, kOptional, 0, kNeither)                                                                       \
    INTEGER(timeout_us, kOptional, 0, kNeither)                                                                       \
    INTEGER(part, kOptional, 0, kNeither)                                                                             \
    INTEGER(ranks_per_server, kOptional, 0, kNeither)                                                                 \
    INTEGER(meeting, kOptional, 0, kNeither)

// The bring-up's; not one of torch_npu's functions.
#define ASCEND_MOE_PROBE_INPUTS(INPUT, RENAMED, REFUSED)
#define ASCEND_MOE_PROBE_OUTPUTS(OUTPUT, RENAMED)                                                                     \
    OUTPUT(report, kTypeInt32) /* [kProbeReportBlocks, kBlockWords] */

#define ASCEND_MOE_PROBE_ATTRIBUTES(TEXT, INTEGER, REFUSED)                                                           \
    TEXT(group_ep, kRequired, "", kNeither)                                                                           \
    INTEGER(ep_world_size, kRequired, 0, kNeither)                                                                    \
    INTEGER(ep_rank_id, kRequired, 0, kNeither)                                                                       \
    INTEGER(mode, kRequired, 0, kNeither)                                                                             \
    INTEGER(nonce, kRequired, 0, kNeither)                                                                            \
    INTEGER(rounds, kOptional, 1, kNeither)                                                                           \
    INTEGER(cycles, kOptional, 0, kNeither)                                                                           \
    INTEGER(window_mib, kOptional, 0, kNeither)                                                                       \
    INTEGER(timeout_us, kOptional, 0, kNeither)                                                                       \
    INTEGER(ranks_per_server, kOptional, 0, kNeither)

// Code, type as CANN knows it, its rows above, columns of its dtype lists.
#define ASCEND_MOE_OPS(OP)                                                                                            \
    OP(kOpDispatch, AscendMoeDistributeDispatch, DISPATCH, 6)                                                         \
    OP(kOpCombine, AscendMoeDistributeCombine, COMBINE, 3)                                                            \
    OP(kOpProbe, AscendMoeProbe, PROBE, 1)

// Columns of the dtype lists: kRows and kWireRows. A binary of the kernel is built for each. Dispatch sends rows as
// they are, or as int8 when it quantizes: the columns behind the third, which an op that does not quantize has not.
#define ASCEND_MOE_COLUMNS(COLUMN)                                                                                    \
    COLUMN(kTypeBf16, kTypeBf16)                                                                                      \
    COLUMN(kTypeFp16, kTypeFp16)                                                                                      \
    COLUMN(kTypeFp32, kTypeFp32)                                                                                      \
    COLUMN(kTypeBf16, kTypeInt8)                                                                                      \
    COLUMN(kTypeFp16, kTypeInt8)                                                                                      \
    COLUMN(kTypeFp32, kTypeInt8)
// clang-format on

namespace moe {

// ---- the same as tables ----

// Element types that differ from column to column: rows as a caller has them, and as dispatch sends them.
constexpr uint32_t kRows = 100, kWireRows = 101;
constexpr bool kRequired = true, kOptional = false;

struct OpTensor {
    const char* name;
    uint32_t type;
    bool required;
    TensorIndex index, v2_index;  // in CallSpec; of outputs unused
};

// An integer, or a string where `text` is not null.
struct OpAttribute {
    const char* name;
    bool required;
    int64_t value;     // default
    const char* text;  // default
};

// What a function has and takes no value for.
struct OpRefused {
    const char* name;
    uint32_t index;  // TensorIndex or AttributeIndex in CallSpec
    const char* why;
};

template <typename T>
struct Span {
    const T* data;
    size_t size;
    const T* begin() const { return data; }
    const T* end() const { return data + size; }
    const T& operator[](size_t i) const { return data[i]; }
};
// Without the last element: no table below is empty in C++, each has one more.
template <typename T, size_t kSize>
constexpr Span<T> RowsOf(const T (&table)[kSize]) {
    return {table, kSize - 1};
}

struct OpInterface {
    const char* type;
    size_t columns;  // of its dtype lists
    Span<OpTensor> inputs;
    Span<OpTensor> outputs;
    Span<OpAttribute> attributes;
    Span<OpRefused> refused_inputs;
    Span<OpRefused> refused_attributes;
};

#define ASCEND_MOE_NOTHING(...)
#define ASCEND_MOE_INPUT(name, type, need, functions) {#name, type, need, kTensor_##name, kTensor_##name},
#define ASCEND_MOE_RENAMED_INPUT(name, v2_name, type, need, functions) \
    {#name, type, need, kTensor_##name, kTensor_##v2_name},
#define ASCEND_MOE_OUTPUT(name, type) {#name, type, kRequired, kTensorCount, kTensorCount},
#define ASCEND_MOE_RENAMED_OUTPUT(name, v2_name, type) ASCEND_MOE_OUTPUT(name, type)
#define ASCEND_MOE_INTEGER(name, need, value, functions) {#name, need, value, nullptr},
#define ASCEND_MOE_TEXT(name, need, text, functions) {#name, need, 0, text},
#define ASCEND_MOE_REFUSED_INPUT(name, functions, why) {#name, kTensor_##name, why},
#define ASCEND_MOE_REFUSED_ATTRIBUTE(name, functions, why) {#name, kAttribute_##name, why},

template <uint32_t kCode>
struct OpRows;
#define ASCEND_MOE_OP(code, op_type, rows, column_count)                                                             \
    template <>                                                                                                      \
    struct OpRows<code> {                                                                                            \
        static constexpr OpTensor inputs[] = {                                                                       \
            ASCEND_MOE_##rows##_INPUTS(ASCEND_MOE_INPUT, ASCEND_MOE_RENAMED_INPUT, ASCEND_MOE_NOTHING){}};           \
        static constexpr OpTensor outputs[] = {                                                                      \
            ASCEND_MOE_##rows##_OUTPUTS(ASCEND_MOE_OUTPUT, ASCEND_MOE_RENAMED_OUTPUT){}};                            \
        static constexpr OpAttribute attributes[] = {                                                                \
            ASCEND_MOE_##rows##_ATTRIBUTES(ASCEND_MOE_TEXT, ASCEND_MOE_INTEGER, ASCEND_MOE_NOTHING){}};              \
        static constexpr OpRefused refused_inputs[] = {                                                              \
            ASCEND_MOE_##rows##_INPUTS(ASCEND_MOE_NOTHING, ASCEND_MOE_NOTHING, ASCEND_MOE_REFUSED_INPUT){}};         \
        static constexpr OpRefused refused_attributes[] = {                                                          \
            ASCEND_MOE_##rows##_ATTRIBUTES(ASCEND_MOE_NOTHING, ASCEND_MOE_NOTHING, ASCEND_MOE_REFUSED_ATTRIBUTE){}}; \
        static constexpr OpInterface interface = {#op_type,                                                          \
                                                  column_count,                                                      \
                                                  RowsOf(inputs),                                                    \
                                                  RowsOf(outputs),                                                   \
                                                  RowsOf(attributes),                                                \
                                                  RowsOf(refused_inputs),                                            \
                                                  RowsOf(refused_attributes)};                                       \
    };
ASCEND_MOE_OPS(ASCEND_MOE_OP)
#undef ASCEND_MOE_OP

inline const OpInterface& InterfaceOf(uint32_t op) {
#define ASCEND_MOE_OP(code, ...) \
    if (op == code) return OpRows<code>::interface;
    ASCEND_MOE_OPS(ASCEND_MOE_OP)
#undef ASCEND_MOE_OP
    return OpRows<kOpCombine>::interface;
}

// clang-format off
// Places of the outputs; of a kernel's arguments, as its entry has them.
#define ASCEND_MOE_PLACE(name, ...) name,
#define ASCEND_MOE_PLACES(op, OP)                                                                        \
    struct op##Output {                                                                                  \
        enum Place : uint32_t { ASCEND_MOE_##OP##_OUTPUTS(ASCEND_MOE_PLACE, ASCEND_MOE_PLACE) kCount };  \
    };                                                                                                   \
    struct op##Argument {                                                                                \
        enum Place : uint32_t {                                                                          \
            ASCEND_MOE_##OP##_INPUTS(ASCEND_MOE_PLACE, ASCEND_MOE_PLACE, ASCEND_MOE_NOTHING)             \
            ASCEND_MOE_##OP##_OUTPUTS(ASCEND_MOE_PLACE, ASCEND_MOE_PLACE)                                \
            workspace, tiling, kCount                                                                    \
        };                                                                                               \
    };
ASCEND_MOE_PLACES(Dispatch, DISPATCH)
ASCEND_MOE_PLACES(Combine, COMBINE)
// clang-format on
#undef ASCEND_MOE_PLACES
#undef ASCEND_MOE_PLACE
#undef ASCEND_MOE_NOTHING
#undef ASCEND_MOE_INPUT
#undef ASCEND_MOE_RENAMED_INPUT
#undef ASCEND_MOE_OUTPUT
#undef ASCEND_MOE_RENAMED_OUTPUT
#undef ASCEND_MOE_INTEGER
#undef ASCEND_MOE_TEXT
#undef ASCEND_MOE_REFUSED_INPUT
#undef ASCEND_MOE_REFUSED_ATTRIBUTE

struct RowTypes {
    uint32_t rows;
    uint32_t wire;
};
#define ASCEND_MOE_COLUMN(rows, wire) {rows, wire},
constexpr RowTypes kRowTypes[] = {ASCEND_MOE_COLUMNS(ASCEND_MOE_COLUMN)};
#undef ASCEND_MOE_COLUMN

// Place of an input in CallSpec, as the function of that contract calls it.
inline TensorIndex IndexOf(const OpTensor& input, int32_t contract) {
    return contract == static_cast<int32_t>(kContractV2) ? input.v2_index : input.index;
}

// Names in CallSpec, and their places; kTensorCount and kAttributeCount for those that it has not.
#define ASCEND_MOE_NAME(name) #name,
constexpr const char* kTensorNames[] = {ASCEND_MOE_TENSORS(ASCEND_MOE_NAME)};
constexpr const char* kAttributeNames[] = {ASCEND_MOE_ATTRIBUTES(ASCEND_MOE_NAME)};
#undef ASCEND_MOE_NAME
template <size_t kSize>
uint32_t PlaceOf(const char* name, const char* const (&names)[kSize]) {
    uint32_t place = 0;
    while (place < kSize && strcmp(names[place], name) != 0) ++place;
    return place;
}
inline uint32_t TensorIndexOf(const char* name) { return PlaceOf(name, kTensorNames); }
inline uint32_t AttributeIndexOf(const char* name) { return PlaceOf(name, kAttributeNames); }

// Names of comm_alg. CANN's names for its algorithms select window: on one
// server its hierarchy sums as that does.
inline int32_t AlgorithmIndexOf(const char* name) {
    static const char* const names[] = {
        "window", "fullmesh", "fullmesh_v1", "fullmesh_v2", "hierarchy", "direct", "auto", "", "auto by HCCL_INTRA_*"};
    static_assert(sizeof(names) / sizeof(names[0]) == kCommAlgCount, "a name an index");
    for (int32_t i = 0; i < kCommAlgCount; ++i) {
        if (strcmp(name, names[i]) == 0) return i;
    }
    return -1;
}

}  // namespace moe
