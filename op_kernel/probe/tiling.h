// Tiling of the bring-up probes: one kernel, a mode a probe.
#ifndef ASCEND_MOE_PROBE_TILING_H
#define ASCEND_MOE_PROBE_TILING_H

#include "../protocol/tiling.h"

// A macro with a decimal literal: the op compiler reads it as text.
#define ASCEND_MOE_TILING_KEY_PROBE 1000

namespace moe {

constexpr uint32_t kOpProbe = 3;  // beside kOpDispatch and kOpCombine; never on the wire

enum ProbeMode : uint32_t {
    kProbeContext = 1,    // the context is the one that the host side describes
    kProbeStore = 2,      // stores to a peer's window arrive, and can be read back from there
    kProbeAtomic = 3,     // of a block of 32 bytes no word is older than both its first and its last
    kProbeOrder = 4,      // data that was drained before a flag is there when the flag is
    kProbeMeeting = 5,    // after a meeting every core sees every other core's drained stores
    kProbeCycles = 6,     // GetSystemCycle counts 50 a microsecond
    kProbeZeroState = 7,  // the state area of a fresh communicator is zero
    kProbePull = 8,       // rows that a peer has written into its own memory are read as they are, again and again
    kProbeRelay = 9,      // a core that was told by another core sees the rows that the other was told of
    kProbeQueue = 10,     // queues of kMostRing tensors, ordered by their own flags alone
    kProbeModeEnd = 11
};
// Blocks of the operator's output `report`: one for each core that a launch may have.
constexpr uint32_t kProbeReportBlocks = kMaxCores;
// Rows of 16 KiB that kProbePull stores, and others that it loads, for their speed; fewer in a small data area.
constexpr uint32_t kProbeMoves = 64;
// Three sets of a block a core, for kProbeMeeting.
constexpr uint64_t kProbeWorkspaceBytes = 3ull * kMaxCores * kBlock;

struct MoeProbeTiling {
    MoeDistributeMc2Head mc2;
    uint32_t mode;
    uint32_t world;
    uint32_t rank;
    uint32_t cores;
    uint32_t contextKind;
    uint32_t nonce;  // of this launch: what lies in the windows already is none of its blocks
    uint32_t rounds;
    uint32_t nearRanks;  // ranks of a server, which stores and loads reach; 0: all
    uint64_t dataBytes;
    uint64_t deadlineCycles;  // of every wait; kProbeCycles: how many to count
};

// Every core reports one block.
// kPrWhere, where kProbePull has passed: the rows moved in kPrCycles. kPrWanted and kPrSeen, where kProbeContext has:
// the address of the rank's own data area.
enum ProbeReport : uint32_t { kPrCode, kPrWhere, kPrWanted, kPrSeen, kPrDone, kPrCycles, kPrCores };
enum ProbeCode : uint32_t {
    kProbePassed = 0x600D,
    kProbeDiffers = 1,  // where, wanted, seen
    kProbeTimeout = 2,  // where: the rank that is awaited; wanted: the round
    kProbeMismatch = 3  // field of the context, ours, theirs
};

}  // namespace moe

#endif  // ASCEND_MOE_PROBE_TILING_H
