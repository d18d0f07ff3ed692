// A call as the host sees it: attributes and tensor descriptions of any of the four ops, no CANN types.
#pragma once

#include <algorithm>
#include <cstdint>

#include "protocol/tiling.h"

namespace moe {

// Element types beyond those on the wire.
constexpr uint32_t kTypeAbsent = 0, kTypeInt32 = 5, kTypeInt64 = 6, kTypeBool = 7, kTypeOther = 99;

struct TensorDesc {
    int32_t dtype;  // kTypeAbsent: not given
    int32_t rank;
    int64_t dims[3];
};

// Every tensor argument of the four ops; dispatch and combine use their own subset.
// clang-format off
#define ASCEND_MOE_TENSORS(X)                                                                       \
    X(x) X(expand_x) X(expert_ids) X(scales) X(x_active_mask) X(expert_scales) X(expand_idx)        \
    X(assist_info_for_combine) X(ep_send_counts) X(tp_send_counts) X(activation_scale)              \
    X(weight_scale) X(group_list) X(expand_scales) X(shared_expert_x) X(elastic_info)               \
    X(performance_info) X(ori_x) X(const_expert_alpha_1) X(const_expert_alpha_2) X(const_expert_v)

// Every integer attribute; absent optional ones are kNoValue.
#define ASCEND_MOE_ATTRIBUTES(X)                                                                    \
    X(ep_world_size) X(ep_rank_id) X(moe_expert_num) X(tp_world_size) X(tp_rank_id)                 \
    X(expert_shard_type) X(shared_expert_num) X(shared_expert_rank_num) X(quant_mode) X(global_bs)  \
    X(expert_token_nums_type) X(out_dtype) X(comm_quant_mode) X(group_list_type)                    \
    X(zero_expert_num) X(copy_expert_num) X(const_expert_num) X(y_dtype) X(x_dtype) X(scales_dtype)
// clang-format on

constexpr int64_t kNoValue = INT64_MIN;
constexpr int64_t kBlockQuant = 2;  // comm_quant_mode: int8 rows on the way back

#define ASCEND_MOE_ENUM(name) kTensor_##name,
enum TensorIndex : uint32_t { ASCEND_MOE_TENSORS(ASCEND_MOE_ENUM) kTensorCount };
#undef ASCEND_MOE_ENUM
#define ASCEND_MOE_ENUM(name) kAttribute_##name,
enum AttributeIndex : uint32_t { ASCEND_MOE_ATTRIBUTES(ASCEND_MOE_ENUM) kAttributeCount };
#undef ASCEND_MOE_ENUM

// Indices of comm_alg's names; those before kCommAlgDirect all select the window algorithm. "" means the same as
// "auto"; so does kCommAlgHccl on one server, and hierarchy between several: hosts say it where a call names nothing,
// and HCCL's variables ask for hierarchy.
constexpr int32_t kCommAlgWindow = 0, kCommAlgHierarchy = 4, kCommAlgDirect = 5, kCommAlgAuto = 6, kCommAlgHccl = 8,
                  kCommAlgCount = 9;

struct CallSpec {
    int32_t op;        // kOpDispatch, kOpCombine
    int32_t contract;  // kContractV1, kContractV2
    int32_t group_ep_length;
    int32_t comm_alg;          // index into the accepted names, -1: unknown
    int32_t context_kind;      // kContextTable, kContextA3 or kContextA2
    int32_t ranks_per_server;  // 0: all ranks in one
    // The communicator that the call is for.
    int64_t comm_world;
    int64_t comm_rank;
    int64_t window_mib;  // data area
    int64_t lent_mib;    // lent area behind it
    int64_t cores;
    int64_t deadline_micros;
    int64_t attributes[kAttributeCount];
    TensorDesc tensors[kTensorCount];
    int32_t list_cores;   // direct dispatch: cores that make lists; 0: as many as the rules say
    int32_t ub_bytes;     // of a core, as the platform says; 0: kUbBytes
    int32_t part;         // kPartWhole, kPartSend or kPartFinish
    int32_t near_stores;  // over several servers: 1: ranks of the own server are reached by stores, 0: by BatchWrite
    int32_t meeting;      // kMeetByBlocks or kMeetBySyncAll
    int32_t stamps;       // 1: cores leave stamps of their phases
    int32_t rdma_flags;   // over several servers: 1: rows of BatchWrite lie in flagged blocks
    int64_t planned;      // 1: nothing will run, and W may be up to kMaxPlanned
};

inline int64_t Attribute(const CallSpec& call, AttributeIndex index) { return call.attributes[index]; }
inline const TensorDesc& Tensor(const CallSpec& call, TensorIndex index) { return call.tensors[index]; }
inline bool Given(const CallSpec& call, TensorIndex index) { return call.tensors[index].dtype != kTypeAbsent; }
inline bool HasElements(const TensorDesc& tensor) {
    return std::all_of(tensor.dims, tensor.dims + std::min<int32_t>(tensor.rank, 3), [](int64_t n) { return n != 0; });
}
#define MOE_ATTRIBUTE(call, name) ::moe::Attribute(call, ::moe::kAttribute_##name)
#define MOE_TENSOR(call, name) ::moe::Tensor(call, ::moe::kTensor_##name)
#define MOE_GIVEN(call, name) ::moe::Given(call, ::moe::kTensor_##name)

inline const char* AlgorithmName(uint32_t algorithm) {
    switch (algorithm) {
        case kAlgorithmWindow: return "window";
        case kAlgorithmDirect: return "direct";
        case kAlgorithmHierarchy: return "hierarchy";
        default: return "?";
    }
}

inline uint32_t TypeSize(uint32_t type) {
    switch (type) {
        case kTypeFp32:
        case kTypeInt32: return 4;
        case kTypeFp16:
        case kTypeBf16: return 2;
        case kTypeInt8:
        case kTypeBool: return 1;
        default: return 8;
    }
}

inline const char* TypeName(uint32_t type) {
    switch (type) {
        case kTypeFp32: return "float32";
        case kTypeFp16: return "float16";
        case kTypeBf16: return "bfloat16";
        case kTypeInt8: return "int8";
        case kTypeInt32: return "int32";
        case kTypeInt64: return "int64";
        case kTypeBool: return "bool";
        case kTypeAbsent: return "None";
        default: return "another dtype";
    }
}

}  // namespace moe
