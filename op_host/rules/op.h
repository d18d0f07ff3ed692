// The description of the operators: inputs, outputs and attributes of each op type, in the order shared by its
// definition, the aclnn entry points and the kernel entries; and which of torch_npu's two functions have them. No CANN
// types.
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
//   by the tables of op_tables.h: CANN's definition, shape and tiling functions (op_host/cann), what check.h refuses,
//   the twin's launch (csrc/abi/op_launch.cpp), the virtual NPU's entry points (vnpu/cust_opapi);
//   by the macros: the call on an NPU (csrc/npu/adapter.cpp);
//   by tools/op_description.py, which reads a row a line: the aclnn entry points and their header, msopgen's JSON.
// Python's functions and the kernel entries are written by hand; tests/host/test_op_description.py and test_op_api.py
// compare them with the rows.
#pragma once

// clang-format off
// Names for which a CallSpec (args.h) has a place: every tensor argument of torch_npu's functions, of both contracts.
#define ASCEND_MOE_TENSORS(X)                                                                       \
    X(x) X(expand_x) X(expert_ids) X(scales) X(x_active_mask) X(expert_scales) X(expand_idx)        \
    X(assist_info_for_combine) X(ep_send_counts) X(tp_send_counts) X(activation_scale)              \
    X(weight_scale) X(group_list) X(expand_scales) X(shared_expert_x) X(elastic_info)               \
    X(performance_info) X(ori_x) X(const_expert_alpha_1) X(const_expert_alpha_2) X(const_expert_v)

// And every integer attribute; absent optional ones are kNoValue.
#define ASCEND_MOE_ATTRIBUTES(X)                                                                    \
    X(ep_world_size) X(ep_rank_id) X(moe_expert_num) X(tp_world_size) X(tp_rank_id)                 \
    X(expert_shard_type) X(shared_expert_num) X(shared_expert_rank_num) X(quant_mode) X(global_bs)  \
    X(expert_token_nums_type) X(out_dtype) X(comm_quant_mode) X(group_list_type)                    \
    X(zero_expert_num) X(copy_expert_num) X(const_expert_num) X(y_dtype) X(x_dtype) X(scales_dtype)

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
    INTEGER(core_barrier, kOptional, 0, kNeither)

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
    INTEGER(core_barrier, kOptional, 0, kNeither)

// The bring-up's op; not one of torch_npu's functions.
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
    INTEGER(ranks_per_server, kOptional, 0, kNeither)                                                                 \
    INTEGER(intra_node_stores, kOptional, 0, kNeither)

// Several ranks in one launch (protocol/tiling.h): the ranks' tensors are not CANN's.
#define ASCEND_MOE_ONE_CARD_INPUTS(INPUT, RENAMED, REFUSED)
#define ASCEND_MOE_ONE_CARD_OUTPUTS(OUTPUT, RENAMED)                                                                  \
    OUTPUT(barrier, kTypeInt32) /* [kMaxCores, kBlockWords], zeros at the launch */

#define ASCEND_MOE_ONE_CARD_ATTRIBUTES(TEXT, INTEGER, REFUSED)                                                        \
    INTEGER(ranks, kRequired, 0, kNeither)                                                                            \
    INTEGER(world, kRequired, 0, kNeither)                                                                            \
    INTEGER(cores, kRequired, 0, kNeither)                                                                            \
    INTEGER(tiling_key, kRequired, 0, kNeither)

// Code, type as CANN knows it, its rows above, columns of its dtype lists.
#define ASCEND_MOE_OPS(OP)                                                                                            \
    OP(kOpDispatch, AscendMoeDistributeDispatch, DISPATCH, 6)                                                         \
    OP(kOpCombine, AscendMoeDistributeCombine, COMBINE, 3)                                                            \
    OP(kOpProbe, AscendMoeProbe, PROBE, 1)                                                                            \
    OP(kOpOneCard, AscendMoeOneCard, ONE_CARD, 1)

// Columns of the dtype lists: kRows and kWireRows. A binary of the kernel is built for each. Dispatch sends rows as
// they are, or as int8 if it quantizes: the columns after the third, which other ops do not have.
#define ASCEND_MOE_COLUMNS(COLUMN)                                                                                    \
    COLUMN(kTypeBf16, kTypeBf16)                                                                                      \
    COLUMN(kTypeFp16, kTypeFp16)                                                                                      \
    COLUMN(kTypeFp32, kTypeFp32)                                                                                      \
    COLUMN(kTypeBf16, kTypeInt8)                                                                                      \
    COLUMN(kTypeFp16, kTypeInt8)                                                                                      \
    COLUMN(kTypeFp32, kTypeInt8)
// clang-format on
