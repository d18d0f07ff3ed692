// Tiling of the bring-up probes: one kernel, a mode a probe.
#ifndef ASCEND_MOE_PROBE_TILING_H
#define ASCEND_MOE_PROBE_TILING_H

#include "../protocol/tiling.h"

// A macro with a decimal literal: the op compiler reads it as text.
#define ASCEND_MOE_TILING_KEY_PROBE 1000

namespace moe {

constexpr uint32_t kOpProbe = 3;  // beside kOpDispatch and kOpCombine; never on the wire

enum ProbeMode : uint32_t {
    kProbeContext = 1,      // the context is the one that the host side describes
    kProbeStore = 2,        // stores to a peer's window arrive, and can be read back from there
    kProbeAtomic = 3,       // of a block of 32 bytes no word is older than both its first and its last
    kProbeOrder = 4,        // data that was drained before a flag is there when the flag is
    kProbeCoreBarrier = 5,  // after a core barrier every core sees every other core's drained stores
    kProbeCycles = 6,       // GetSystemCycle counts 50 a microsecond
    kProbeZeroState = 7,    // the state area of a new communicator is zero
    kProbePull = 8,         // rows that a peer has written into its own memory are read as they are, again and again
    kProbeRelay = 9,        // a core notified by another core sees the rows that the other was notified of
    kProbeQueue = 10,       // queues of kMostRing tensors, ordered by their own flags alone
    kProbeWriters = 11,     // what all cores have written before a core barrier is there when one core's flag is
    kProbeNeighbours = 12,  // two cores that write parts of one block keep both parts
    kProbeBatch = 13,       // an item of BatchWrite is whole when its last block is there
    kProbeStride = 14,      // times of rows by their stride
    kProbeClear = 15,       // no probe: zeroes the state area of this rank, before the first op of a group on A2
    kProbeTimestamps = 16,  // no probe: reports the timestamps that the last ops of this rank have left
    kProbeLevels = 17,  // rows that came by RDMA are stored on, and stored ones leave by RDMA, before their messages
    kProbeModeEnd = 18
};
// Blocks of the operator's output `report`: one for each core that a launch may have.
constexpr uint32_t kProbeReportBlocks = kMaxCores;
// Rows of 16 KiB that kProbePull stores, and others that it loads, for their speed; fewer in a small data area.
constexpr uint32_t kProbeMoves = 64;
// The workspace: three sets of one block per core for kProbeCoreBarrier, then one row for each of so many core
// barriers. kProbeBatch has its list there.
constexpr uint32_t kProbeCoreBarriers = 256;
constexpr uint64_t kProbeBarrierOffset = 3ull * kMaxCores * kBlock;
constexpr uint64_t kProbeWorkspaceBytes =
    kProbeBarrierOffset + static_cast<uint64_t>(kProbeCoreBarriers) * kMaxCores * kBlock;
static_assert(kMaxWorld * kBlock <= kProbeWorkspaceBytes, "a list of BatchWrite lies in the workspace");
// kProbeLevels uses fewer core barriers and has its two lists after their rows.
constexpr uint32_t kProbeLevelCoreBarriers = 16;
constexpr uint64_t kProbeListsOffset =
    kProbeBarrierOffset + static_cast<uint64_t>(kProbeLevelCoreBarriers) * kMaxCores * kBlock;
static_assert(kProbeListsOffset + kMaxWorld * kBlock <= kProbeWorkspaceBytes, "lists of at most W / 2 servers each");
// Rows of 16 KiB in an item of kProbeLevels: 1 and doubling by the rounds, fewer in a small data area.
constexpr uint32_t kProbeLevelSizes = 4, kProbeLevelRows = 8;
// Sizes of items, from 1 MiB on doubling, and as many peers as the rounds give.
constexpr uint32_t kProbeItemSizes = 7;
// Bytes from row to row: a row of 7168 bf16; with 32 bytes more, as quantized ones have; the next multiple of 512.
constexpr uint32_t kProbeStrides = 3;
MOE_FN uint32_t ProbeStride(uint32_t i) { return i == 0 ? 14336 : i == 1 ? 14368 : 14848; }

struct MoeProbeTiling {
    MoeDistributeMc2Head mc2;
    uint32_t mode;
    uint32_t world;
    uint32_t rank;
    uint32_t cores;
    uint32_t contextKind;
    uint32_t nonce;  // of this launch: different from any block already in the windows
    uint32_t rounds;
    uint32_t intraNodeRanks;  // ranks of a server, which stores and loads reach; 0: all
    uint64_t dataBytes;
    uint64_t deadlineCycles;  // of every wait; kProbeCycles: how many to count
};

// Every core reports one block. kPrWhere, for kProbePull: the rows moved in kPrCycles. kPrWanted and kPrSeen, for
// kProbeContext: the address of the rank's data area. kProbeCoreBarrier: kPrCycles of SyncAll, kPrWhere of core
// barriers by blocks, as many as rounds. kProbeStride: kPrWhere rows, and their cycles by stride in kPrWanted, kPrSeen,
// kPrCycles. kProbeBatch: kPrWhere rows of 16 KiB per item, kPrDone items. kProbeLevels: the same kPrWhere, kPrDone
// messages. kProbeTimestamps has no such words: each core reports one block of its timestamps of dispatch, then of
// combine; `rounds` is the block's number, from 1 on.
enum ProbeReport : uint32_t { kPrCode, kPrWhere, kPrWanted, kPrSeen, kPrDone, kPrCycles, kPrCores };
enum ProbeCode : uint32_t {
    kProbePassed = 0x600D,
    kProbeDiffers = 1,  // where, wanted, seen
    kProbeTimeout = 2,  // where: the rank that is awaited; wanted: the round
    kProbeMismatch = 3  // field of the context, ours, theirs
};

}  // namespace moe

#endif  // ASCEND_MOE_PROBE_TILING_H
