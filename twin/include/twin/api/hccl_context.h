// The communication contexts that GetHcclContext points at, as the host side of the twin fills them and as
// kernels that carry their own struct definitions read them. Field offsets are those of HCCL's device
// structs; everything a window kernel does not read is zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twin {

class CopyAgent;

namespace hccl {

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
    uint32_t rank;
    uint32_t world_rank;
    uint64_t windows_in;
    uint64_t windows_out;
    uint64_t windows_exp;
    uint64_t list[4];
};
struct A3Pointer {  // RemoteResPtr
    uint64_t host;
    uint64_t device;
};
struct A3Context {
    uint64_t workspace;
    uint64_t workspace_bytes;
    uint32_t rank;
    uint32_t world;
    uint64_t window_bytes;
    uint64_t windows_in;
    uint64_t windows_out;
    char name[128];
    uint64_t exp_bytes;
    uint64_t windows_exp;
    uint32_t remote_start;  // of A3Pointer[kA3MaxRanks], bytes from the beginning
    uint32_t remote_step;
};
static_assert(offsetof(A3Context, exp_bytes) == 176 && offsetof(A3Context, remote_start) == 192, "A3 layout");
static_assert(sizeof(A3Remote) == 64, "A3 layout");

// ---- A2 (Ascend910B): HcclCombinOpParam, known to kernels as HcclCombineOpParam / HcclA2CombineOpParam ----

constexpr uint32_t kA2Ranks = 32;  // more of them are reached through `data`
struct A2Memory {                  // with the vendor's names: lib/hccl/hccl.h offers both structs to kernels
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
    uint64_t workspace;
    uint64_t workspace_bytes;
    uint32_t rank;
    uint32_t world;
    uint64_t window_bytes;
    uint64_t windows_in[kA2Ranks];
    uint64_t windows_out[kA2Ranks];
    uint8_t resources[8064];
    uint64_t exp_bytes;
    uint64_t windows_exp[kA2Ranks];
    uint8_t multi_flag;  // 1: addresses are in `data`
    uint64_t data;       // A2Remote[world]
    uint64_t data_bytes;
    uint64_t rma_bytes;
    uint64_t rma;
    uint64_t capability;  // one uint64_t: how data moves; bit 1 is the AICPU
    uint64_t capability_bytes;
};
static_assert(offsetof(A2Context, resources) == 544, "A2 layout");
static_assert(offsetof(A2Context, multi_flag) == 544 + 8328 && offsetof(A2Context, data) == 8880, "A2 layout");
static_assert(sizeof(A2Remote) == 120, "A2 layout");
constexpr uint64_t kA2DataPlaneAicpu = 1u << 1;

}  // namespace hccl
}  // namespace twin

namespace twin::hccl {

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
