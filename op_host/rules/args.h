// A call as the host sees it: attributes and tensor descriptions of any of the four ops, no CANN types.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "protocol/tiling.h"
#include "op.h"

namespace moe {

// Element types beyond those on the wire.
constexpr uint32_t kTypeAbsent = 0, kTypeInt32 = 5, kTypeInt64 = 6, kTypeBool = 7, kTypeOther = 99;

struct TensorDesc {
    int32_t dtype;  // kTypeAbsent: not given
    int32_t rank;
    int64_t dims[3];
};

constexpr int64_t kNoValue = INT64_MIN;
constexpr int64_t kCommQuantMode = 2;  // comm_quant_mode: int8 rows on the return path

#define ASCEND_MOE_ENUM(name) kTensor_##name,
enum TensorIndex : uint32_t { ASCEND_MOE_TENSORS(ASCEND_MOE_ENUM) kTensorCount };
#undef ASCEND_MOE_ENUM
#define ASCEND_MOE_ENUM(name) kAttribute_##name,
enum AttributeIndex : uint32_t { ASCEND_MOE_ATTRIBUTES(ASCEND_MOE_ENUM) kAttributeCount };
#undef ASCEND_MOE_ENUM

// Indices of comm_alg's names; those before kCommAlgDirect select the window algorithm. "" means "auto", and so does
// kCommAlgHccl within one server; between servers it means hierarchy: hosts pass it if a call names nothing and HCCL's
// variables ask for hierarchy.
constexpr int32_t kCommAlgWindow = 0, kCommAlgHierarchy = 4, kCommAlgDirect = 5, kCommAlgAuto = 6, kCommAlgHccl = 8,
                  kCommAlgCount = 9;

// Names of comm_alg. CANN's names for its algorithms select window: within one server its hierarchy sums in the same
// way.
inline int32_t AlgorithmIndexOf(const char* name) {
    static const char* const names[] = {
        "window", "fullmesh", "fullmesh_v1", "fullmesh_v2", "hierarchy", "direct", "auto", "", "auto by HCCL_INTRA_*"};
    static_assert(sizeof(names) / sizeof(names[0]) == kCommAlgCount, "a name an index");
    for (int32_t i = 0; i < kCommAlgCount; ++i) {
        if (strcmp(name, names[i]) == 0) return i;
    }
    return -1;
}

struct CallSpec {
    int32_t op;        // kOpDispatch, kOpCombine
    int32_t contract;  // kContractV1, kContractV2
    int32_t group_ep_length;
    int32_t comm_alg;          // index into the accepted names, -1: unknown
    int32_t context_kind;      // kContextTable, kContextA3 or kContextA2
    int32_t ranks_per_server;  // 0: all ranks in one
    // The communicator of the call.
    int64_t comm_world;
    int64_t comm_rank;
    int64_t window_mib;      // data area
    int64_t registered_mib;  // registered area after it
    int64_t cores;
    int64_t deadline_micros;
    int64_t attributes[kAttributeCount];
    TensorDesc tensors[kTensorCount];
    int32_t list_cores;  // direct dispatch: cores that make lists; 0: chosen by the rules
    int32_t ub_bytes;    // of a core, from the platform; 0: kUbBytes
    int32_t part;        // kPartWhole, kPartSend or kPartFinish
    int32_t
        intra_node_stores;  // over several servers: 1: ranks of the own server are reached by stores, 0: by BatchWrite
    int32_t core_barrier;   // kBarrierByBlocks or kBarrierBySyncAll
    int32_t timestamps;     // 1: cores leave timestamps of their phases
    int32_t rdma_flags;     // over several servers: 1: rows of BatchWrite lie in flagged blocks
    int32_t row_unit;       // rows of windows begin at multiples of it, from the platform: kBlock; 0: kRowUnit
    int64_t planned;        // 1: nothing will run, and W may be up to kMaxPlanned
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
