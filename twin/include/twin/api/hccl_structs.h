// The communication contexts by the fields that kernels read, for kernels that bring no structs of their own.
#pragma once

#include "twin/api/hccl_context.h"
#include "twin/api/qualifiers.h"

#ifndef TWIN_PEER_TABLE
#define TWIN_PEER_TABLE 2984  // 3320: newer HCCL
#endif

namespace twin::hccl {

// Two names of one field stand in a union: those of kernels, and those of the toolkit.
struct A3PeerFields {
    uint32_t remoteUsrRankId, remoteWorldRank;
    uint64_t windowsIn, windowsOut, windowsExp;
};
struct A3Fields {
    uint64_t workSpace, workSpaceSize;
    union {
        uint32_t localUsrRankId, rankId;
    };
    union {
        uint32_t rankSize, rankNum;
    };
    uint64_t winSize, localWindowsIn, localWindowsOut;
    char hcomId[128];
    uint64_t winExpSize, localWindowsExp;
    uint32_t rWinStart, rWinOffset;
    uint8_t others[TWIN_PEER_TABLE - 200];
    struct {
        A3PeerFields *nextHostPtr, *nextDevicePtr;
    } remoteRes[kA3MaxRanks];
};
struct A2Fields {
    uint64_t workSpace, workSpaceSize;
    uint32_t rankId, rankNum;
    uint64_t winSize, windowsIn[kA2Ranks], windowsOut[kA2Ranks];
    uint8_t res[8064];
    uint64_t winExpSize, windowsExp[kA2Ranks];
    uint8_t multiFlag;
    __gm__ A2Remote* data;
};
static_assert(offsetof(A3PeerFields, windowsExp) == offsetof(A3Remote, windows_exp), "A3 layout");
static_assert(offsetof(A3Fields, localWindowsExp) == offsetof(A3Context, windows_exp), "A3 layout");
static_assert(offsetof(A3Fields, remoteRes) == TWIN_PEER_TABLE, "A3 layout");
static_assert(offsetof(A2Fields, windowsExp) == offsetof(A2Context, windows_exp), "A2 layout");
static_assert(offsetof(A2Fields, data) == offsetof(A2Context, data), "A2 layout");

}  // namespace twin::hccl

namespace AscendC {

using MemDetails = twin::hccl::A2Memory;
using IbVerbsData = twin::hccl::A2Remote;
using HcclCombineOpParam = twin::hccl::A2Fields;
namespace HcclContextDef {
using HcclOpResParam = twin::hccl::A3Fields;
using HcclRankRelationResV2 = twin::hccl::A3PeerFields;
}  // namespace HcclContextDef

}  // namespace AscendC

// The same without a namespace, as kernels name them: a kernel's own struct would collide with it. compiling.py
// defines TWIN_LACKS_<name> where a source uses the name and has no such struct, TWIN_AWAITS_<name> where it uses the
// name first and brings the struct afterwards; where it reads fields before, the struct's header is included first as
// well.
#ifdef TWIN_LACKS_HcclOpResParam
using HcclOpResParam = twin::hccl::A3Fields;
#endif
#ifdef TWIN_LACKS_HcclRankRelationResV2
using HcclRankRelationResV2 = twin::hccl::A3PeerFields;
#endif
#ifdef TWIN_LACKS_HcclA2CombineOpParam
using HcclA2CombineOpParam = twin::hccl::A2Fields;
#endif
#ifdef TWIN_AWAITS_HcclOpResParam
struct HcclOpResParam;
#endif
#ifdef TWIN_AWAITS_HcclRankRelationResV2
struct HcclRankRelationResV2;
#endif
#ifdef TWIN_AWAITS_HcclA2CombineOpParam
struct HcclA2CombineOpParam;
#endif
