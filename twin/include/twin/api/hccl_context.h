// The communication contexts that GetHcclContext points at, as the host side of the twin fills them and as
// kernels read them, with structs of their own or by these. Field offsets are those of HCCL's device
// structs; everything a window kernel does not read is zero. Where kernels and the toolkit name one field
// differently, both names stand in a union.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twin {
class CopyAgent;
}

namespace twin::hccl {

// The twin's own header in front of every context: which layout follows, and the agent that executes
// BatchWrite.
constexpr uint64_t kHeaderMagic = 0x4C43434854574E31ull;
enum class Layout : uint32_t { kA3 = 0, kA2 = 1 };
struct Header {
    uint64_t magic;
    Layout layout;
    uint32_t rank;
    uint32_t world;
    uint32_t served;  // launches that ended with Finalize
    CopyAgent* agent;
    uint64_t padding[4];
};
static_assert(sizeof(Header) == 64, "contexts stay aligned");

// ---- A3 (Ascend910_93): HcclOpResParam, its peers reached through remoteRes[rank].nextDevicePtr ----

constexpr uint32_t kA3MaxRanks = 131072;
// Where the table of peers begins: with 19 streams a communicator has, and with 40.
constexpr uint32_t kA3PeerTables[] = {2984, 3320};
struct A3Remote {  // HcclRankRelationResV2
    uint32_t remoteUsrRankId, remoteWorldRank;
    uint64_t windowsIn, windowsOut, windowsExp;
    uint64_t list[4];
};
struct A3Pointer {  // RemoteResPtr
    A3Remote *nextHostPtr, *nextDevicePtr;
};
struct A3Context {
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
    uint32_t rWinStart;  // of A3Pointer[kA3MaxRanks], bytes from the beginning
    uint32_t rWinOffset;
};
static_assert(offsetof(A3Context, winExpSize) == 176 && offsetof(A3Context, rWinStart) == 192, "A3 layout");
static_assert(sizeof(A3Remote) == 64, "A3 layout");

// With the table where a kernel is compiled for it.
#ifndef TWIN_PEER_TABLE
#define TWIN_PEER_TABLE 2984  // 3320: newer HCCL
#endif
struct A3Fields : A3Context {
    uint8_t others[TWIN_PEER_TABLE - sizeof(A3Context)];
    A3Pointer remoteRes[kA3MaxRanks];
};
static_assert(sizeof(A3Fields) == TWIN_PEER_TABLE + sizeof(A3Pointer) * kA3MaxRanks, "A3 layout");

// ---- A2 (Ascend910B): HcclCombinOpParam, known to kernels as HcclCombineOpParam / HcclA2CombineOpParam ----

constexpr uint32_t kA2Ranks = 32;  // more of them are reached through `data`
struct A2Memory {
    uint64_t size;
    uint64_t addr;
    uint32_t key;
};
struct A2Remote {
    A2Memory remoteInput;
    A2Memory remoteOutput;
    A2Memory localInput;
    A2Memory localOutput;
    uint8_t res[24];
};
struct A2Context {
    uint64_t workSpace, workSpaceSize;
    uint32_t rankId, rankNum;
    uint64_t winSize, windowsIn[kA2Ranks], windowsOut[kA2Ranks];
    uint8_t res[8064];
    uint64_t winExpSize, windowsExp[kA2Ranks];
    uint8_t multiFlag;  // 1: addresses are in `data`
    A2Remote* data;     // [rankNum]
    uint64_t dataSize, sizeOfAiRMAInfo, aiRMAInfo;
    uint64_t capability;  // one uint64_t: how data moves; bit 1 is the AICPU
    uint64_t capabilitySize;
};
static_assert(offsetof(A2Context, res) == 544, "A2 layout");
static_assert(offsetof(A2Context, multiFlag) == 544 + 8328 && offsetof(A2Context, data) == 8880, "A2 layout");
static_assert(sizeof(A2Remote) == 120, "A2 layout");
constexpr uint64_t kA2DataPlaneAicpu = 1u << 1;

// ---- Host side: fills the communication contexts of one rank, in each layout.

// The windows of one group of ranks: arrays of `world` addresses.
struct GroupWindows {
    Layout layout;
    uint32_t world;
    uint64_t peer_table;  // A3: one of kA3PeerTables
    uint64_t window_bytes;
    uint64_t exp_bytes;
    uint64_t workspace_bytes;
    const uint64_t* windows_in;
    const uint64_t* windows_out;
    const uint64_t* windows_exp;
    const char* name;
    uint32_t multi_server;  // A2: 1: HCCL has taken its ranks to be on several servers; addresses are in `data` alone
};

// A blob is the twin's header, the context, and what it points at. It is zero before it is filled;
// `workspace` is memory of the blob's owner.
uint64_t ContextBlobBytes(Layout layout, uint32_t world);
void FillContext(const GroupWindows& group, uint32_t rank, void* blob, uint64_t workspace);
inline void* ContextOf(void* blob) { return static_cast<Header*>(blob) + 1; }

}  // namespace twin::hccl

// ---- The same for kernels that bring no structs of their own ----

namespace AscendC {

using MemDetails = twin::hccl::A2Memory;
using IbVerbsData = twin::hccl::A2Remote;
using HcclCombineOpParam = twin::hccl::A2Context;
namespace HcclContextDef {
using HcclOpResParam = twin::hccl::A3Fields;
using HcclRankRelationResV2 = twin::hccl::A3Remote;
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
using HcclRankRelationResV2 = twin::hccl::A3Remote;
#endif
#ifdef TWIN_LACKS_HcclA2CombineOpParam
using HcclA2CombineOpParam = twin::hccl::A2Context;
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
