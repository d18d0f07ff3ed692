// HCCL's communication contexts as device memory holds them: a private ABI, so only what is read here is
// named, and what a launch relies on is checked against the tiling before the first store. A test compares
// every offset with the structs that the twin fills.
#ifndef ASCEND_MOE_DISTRIBUTE_ABI_H
#define ASCEND_MOE_DISTRIBUTE_ABI_H

#include "kernel_operator.h"

namespace moe {

// ---- A3 (Ascend 910_93): HcclOpResParam; a peer is reached through remote[peer].device ----
struct A3Remote {  // HcclRankRelationResV2
    uint32_t rank;
    uint32_t worldRank;
    uint64_t windowsIn;
    uint64_t windowsOut;
    uint64_t windowsExp;
};
struct A3Pointer {  // RemoteResPtr
    uint64_t host;
    uint64_t device;  // A3Remote
};
constexpr uint32_t kA3MaxRanks = 131072;
struct A3Context {
    uint64_t workspace;
    uint64_t workspaceBytes;
    uint32_t rank;
    uint32_t world;
    uint64_t windowBytes;
    uint64_t windowsIn;  // of this rank
    uint64_t windowsOut;
    uint8_t name[128];
    uint64_t expBytes;
    uint64_t windowsExp;
    uint8_t resources[2792];
    A3Pointer remote[kA3MaxRanks];
};

// ---- A2 (Ascend 910B): HcclA2CombineOpParam; more than 32 ranks, or multiFlag, are reached through data
// ----
constexpr uint32_t kA2Ranks = 32;
struct A2Memory {  // MemDetails
    uint64_t bytes;
    uint64_t address;
    uint32_t key;
    uint32_t reserved;
};
struct A2Remote {  // IbVerbsData
    A2Memory remoteIn;
    A2Memory remoteOut;
    A2Memory localIn;
    A2Memory localOut;
    uint8_t reserved[24];
};
struct A2Context {
    uint64_t workspace;
    uint64_t workspaceBytes;
    uint32_t rank;
    uint32_t world;
    uint64_t windowBytes;  // of windowsIn, and of windowsOut
    uint64_t windowsIn[kA2Ranks];
    uint64_t windowsOut[kA2Ranks];
    uint8_t resources[8328];
    uint8_t multiFlag;
    uint8_t padding[7];
    uint64_t data;  // A2Remote[world]
};

// One BatchWrite item: `bytes` from this rank's windowsOut to the windowsIn of a peer.
struct BatchItem {
    uint64_t local;
    uint64_t remote;
    uint64_t bytes;
    uint32_t type;  // HCCL_DATA_TYPE_INT8
    uint32_t peer;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_ABI_H
