// Tiling data that the host passes to the kernels: plain words, the same bytes on host and device.
#ifndef ASCEND_MOE_PROTOCOL_TILING_H
#define ASCEND_MOE_PROTOCOL_TILING_H

#include "window.h"

// Tiling keys are macros with decimal literals, because the op compiler reads them as text. Dispatch: 1000 for
// "window", 2000 for "direct", 3000 for "hierarchy", + quant_mode + 10 with smooth scales.
#define ASCEND_MOE_TILING_KEY_DISPATCH 1000
#define ASCEND_MOE_TILING_KEY_DISPATCH_QUANT 1002
#define ASCEND_MOE_TILING_KEY_DISPATCH_QUANT_SMOOTH 1012
#define ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT 2000
#define ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT_QUANT 2002
#define ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT_QUANT_SMOOTH 2012
#define ASCEND_MOE_TILING_KEY_DISPATCH_HIERARCHY 3000
#define ASCEND_MOE_TILING_KEY_DISPATCH_HIERARCHY_QUANT 3002
// Combine: 1000 for "window" in the compacted layout, 1100 for "window" in the indexed layout, 2000 for "direct", 3000
// for "hierarchy", + comm_quant_mode.
#define ASCEND_MOE_TILING_KEY_COMBINE 1000
#define ASCEND_MOE_TILING_KEY_COMBINE_QUANT 1002
#define ASCEND_MOE_TILING_KEY_COMBINE_INDEXED 1100
#define ASCEND_MOE_TILING_KEY_COMBINE_INDEXED_QUANT 1102
#define ASCEND_MOE_TILING_KEY_COMBINE_DIRECT 2000
#define ASCEND_MOE_TILING_KEY_COMBINE_DIRECT_QUANT 2002
#define ASCEND_MOE_TILING_KEY_COMBINE_HIERARCHY 3000
#define ASCEND_MOE_TILING_KEY_COMBINE_HIERARCHY_QUANT 3002
// One card: those of dispatch as they are, those of combine from 10000 on. bf16 only, without smooth scales.
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE 11000
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_QUANT 11002
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_INDEXED 11100
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_INDEXED_QUANT 11102
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_DIRECT 12000
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_DIRECT_QUANT 12002
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_HIERARCHY 13000
#define ASCEND_MOE_TILING_KEY_CARD_COMBINE_HIERARCHY_QUANT 13002

namespace moe {

// CANN's Mc2InitTiling and one Mc2CcTiling at the head of the tiling data, filled by CANN's host side. Opaque to the
// kernel, which passes them to Hccl<>; zero on the emulator.
struct MoeDistributeMc2Head {
    uint8_t init[64];
    uint8_t cc[512];  // 280 bytes in CANN 8.1, 512 in 9.1
};

// The type of the launch's communication context.
constexpr uint32_t kContextTable = 0;  // our WindowTable
constexpr uint32_t kContextA3 = 1;     // HcclOpResParam
constexpr uint32_t kContextA2 = 2;     // HcclA2CombineOpParam
// How ranks outside this rank's server are reached; those inside are always reached by memory stores.
constexpr uint32_t kTransportMemory = 0;
constexpr uint32_t kTransportRdma = 1;  // BatchWrite from windowsOut

// The part of an op that a launch runs. Only tensors and windows survive a launch: finish counts its ids again.
constexpr uint32_t kPartWhole = 0, kPartSend = 1, kPartFinish = 2;

struct MoeDistributeInfo {
    uint32_t world;                 // W
    uint32_t rank;                  // r
    uint32_t experts;               // E
    uint32_t localExperts;          // L
    uint32_t batch;                 // BS, tokens of this rank
    uint32_t maxBatch;              // global_bs / W
    uint32_t topK;                  // K
    uint32_t hidden;                // H, elements
    uint32_t cores;                 // AIV cores of this launch
    uint32_t contract;              // kContractV1 or kContractV2
    uint32_t xType;                 // TypeCode of x / expand_x
    uint32_t wireType;              // TypeCode of a row in the window
    uint32_t quantMode;             // 0 or 2: dispatch's quant_mode, combine's comm_quant_mode (CommQuantMode)
    uint32_t hasScales;             // smooth scales given
    uint32_t maskRank;              // x_active_mask: 0 none, 1 (BS,), 2 (BS, K)
    uint32_t globalBsGiven;         // 0: equal batches
    uint32_t expandRows;            // rows of expand_x
    uint32_t algorithm;             // kAlgorithmWindow, kAlgorithmDirect or kAlgorithmHierarchy
    uint32_t windowMiB;             // data area
    uint32_t capacity;              // rows that one source may send to one owner
    uint32_t contextKind;           // kContextTable, kContextA3 or kContextA2
    uint32_t transport;             // kTransportMemory or kTransportRdma
    uint32_t ranksPerServer;        // ranks that share a server; 0: all
    uint32_t intraNodeRanks;        // RDMA: ranks that stores reach, from a multiple of it on; 1: this rank alone
    uint32_t hasWeights;            // expert_scales: given to dispatch; with elements in combine
    uint32_t sourceIndices;         // rows have source indices (source, token, k): the V2 contract over memory
    uint32_t registeredGeneration;  // combine: of the registered block, if expand_x lies in one; 0: nothing is
                                    // published there
    uint32_t part;                  // kPartWhole, kPartSend or kPartFinish
    uint32_t coreBarrier;           // kBarrierByBlocks or kBarrierBySyncAll
    uint32_t ids;              // legal ids are below it: E, then zero, copy and const experts, which receive no rows
    uint32_t firstCopy;        // id of the first copy expert,
    uint32_t firstConst;       // and of the first const expert
    uint32_t timestamps;       // 1: every core leaves timestamps of its phases in the state area
    uint32_t measures;         // performance_info given
    uint32_t alphaRank;        // combine: const_expert_alpha_1 and _2: 0 no const experts, 1 (C,), 2 (C, H)
    uint32_t rdmaFlags;        // 1: rows between servers lie in flagged blocks
    uint32_t regions;          // of a ping-pong buffer of the data area: W, and in hierarchy one more a server
    uint32_t rowUnit;          // rows of the data area begin at multiples of it: kRowUnit or kBlock
    uint64_t dataBytes;        // data area of every rank
    uint64_t registeredBytes;  // area after it for callers' tensors; 0: none
    uint64_t deadlineCycles;   // longest wait
};

// Element types on the wire; also the codes that the host's checks use.
constexpr uint32_t kTypeFp32 = 1, kTypeFp16 = 2, kTypeBf16 = 3, kTypeInt8 = 4;

// The rank that owns an expert, the expert's number there, and over RDMA a rank's server.
MOE_FN uint32_t Owner(const MoeDistributeInfo& info, uint32_t expert) { return expert / info.localExperts; }
MOE_FN uint32_t Local(const MoeDistributeInfo& info, uint32_t expert) { return expert % info.localExperts; }
MOE_FN uint32_t Server(const MoeDistributeInfo& info, uint32_t rank) { return rank / info.intraNodeRanks; }
MOE_FN uint32_t Servers(const MoeDistributeInfo& info) { return info.world / info.intraNodeRanks; }
MOE_FN uint32_t LocalRank(const MoeDistributeInfo& info, uint32_t rank) { return rank % info.intraNodeRanks; }

// Bytes that travel for rows of so many bytes.
MOE_FN uint64_t BytesOnWire(const MoeDistributeInfo& info, uint64_t rowBytes) {
    return info.rdmaFlags != 0 ? FlaggedBytes(rowBytes) : rowBytes;
}
// Flags of blocks in UB at a time.
constexpr uint32_t kFlagsAtOnce = 128;

MOE_FN uint32_t ElementBytes(const MoeDistributeInfo& info) { return info.xType == kTypeFp32 ? 4 : 2; }  // of x
// Bytes from row to row in the window, of rows of `bytes` bytes.
MOE_FN uint32_t RowStep(const MoeDistributeInfo& info, uint32_t bytes) { return RowStep(bytes, info.rowUnit); }

MOE_FN uint32_t TrailerBlocks(const MoeDistributeInfo& info) { return info.sourceIndices + info.hasWeights; }

// Direct: where expert_scales lie in a ping-pong buffer, behind the published rows of `bytes` bytes.
MOE_FN uint64_t PublishedWeightsOffset(const MoeDistributeInfo& info, uint32_t bytes) {
    return PublishedRowsOffset(info.world, info.capacity) +
           static_cast<uint64_t>(info.maxBatch) * (info.hasScales != 0 ? info.topK : 1) * RowStep(info, bytes);
}

// How CoreBarrier waits, whichever is faster on a SoC: for every core's block, or also by SyncAll. May differ between
// ranks.
constexpr uint32_t kBarrierByBlocks = 0, kBarrierBySyncAll = 1;

// Scratch GM of every launch. Offsets in bytes; rows are padded to 32 bytes.
//   histograms: [cores][E] int32
// totals: [E] int32
// messages: [W]
// BatchWrite items: [kItemLists][W] blocks
// | + largest positions: [cores][E] int32
MOE_FN uint32_t PaddedInts(uint32_t n) { return CeilDiv(n, kBlockWords) * kBlockWords; }
MOE_FN uint64_t TotalsOffset(uint32_t cores, uint32_t experts) {
    return static_cast<uint64_t>(cores) * PaddedInts(experts) * sizeof(int32_t);
}
MOE_FN uint64_t CountsOffset(uint32_t cores, uint32_t experts) {
    return TotalsOffset(cores, experts) + PaddedInts(experts) * sizeof(int32_t);
}
MOE_FN uint64_t ItemsOffset(uint32_t cores, uint32_t experts, uint32_t world, uint32_t localExperts) {
    return CountsOffset(cores, experts) + static_cast<uint64_t>(world) * StatusMessageBytes(localExperts);
}
constexpr uint32_t kItemLists = 3;  // rows with messages; aborts; hints
constexpr uint32_t kAbortItemList = 1, kHintItemList = 2;
MOE_FN uint64_t BoundsOffset(const MoeDistributeInfo& info) {
    return ItemsOffset(info.cores, info.experts, info.world, info.localExperts) +
           static_cast<uint64_t>(kItemLists) * info.world * kBlock;
}
MOE_FN uint64_t WorkspaceBytes(const MoeDistributeInfo& info) {
    return BoundsOffset(info) + static_cast<uint64_t>(info.cores) * PaddedInts(info.experts) * sizeof(int32_t);
}

// From this number of cores on the kernels save time on an NPU; with fewer they save instructions, which count on the
// emulator.
constexpr uint32_t kManyCores = 8;

constexpr uint32_t kChunkPairs = 512;  // pairs in UB at a time

// Hierarchy: tokens whose records and trailers of rows are in UB together.
constexpr uint32_t kRecordTokens = 32, kRecordPairs = 256;
constexpr uint32_t kRelayedMessages = 2;  // in flight
constexpr uint32_t kSumRecords = 8;       // records in UB together while a server sums
// How many cores' rows with the tokens per server are in flight: all, unless they take much room.
MOE_FN uint32_t ServerRows(const MoeDistributeInfo& info) {
    constexpr uint32_t kLeast = 8, kMostWords = 512;
    return Min(info.cores, Max(kLeast, kMostWords / PaddedInts(Servers(info))));
}
MOE_FN uint32_t RecordTokens(uint32_t topK) { return Max(1, Min(kRecordTokens, kRecordPairs / topK)); }
// Where combine finds the records of this server's pairs: after the source indices of assist_info_for_combine, in
// blocks of int32: [S] blocks with the numbers of records, then [S][maxBS] records.
MOE_FN uint64_t StoredRecordsOffset(const MoeDistributeInfo& info) {
    return CeilTo(static_cast<uint64_t>(info.world) * info.capacity * kSourceIndexWords * sizeof(int32_t), kBlock);
}
MOE_FN uint64_t StoredRecordsBytes(const MoeDistributeInfo& info) {
    if (info.maxBatch == 0) return 0;  // the tensor is empty
    return static_cast<uint64_t>(Servers(info)) *
           (kBlock + static_cast<uint64_t>(info.maxBatch) * RecordBytes(info.topK));
}

// Direct dispatch with roles: most pairs of a rank, and their lanes in UB.
constexpr uint32_t kMostListPairs = 8192;
MOE_FN uint32_t ListLanes(uint32_t pairs) { return CeilDiv(Max(1, pairs), 64) * 64; }

// Direct combine sums ep_send_counts by source, as rows of ReturnCountUnit lanes, a multiple of a block and of W.
MOE_FN uint32_t ReturnCountUnit(uint32_t world) {
    return world % 8 == 0 ? world : world % 4 == 0 ? 2 * world : world % 2 == 0 ? 4 * world : 8 * world;
}
MOE_FN uint32_t ReturnCountLanes(uint32_t world, uint32_t slots) {
    return CeilDiv(slots, ReturnCountUnit(world)) * ReturnCountUnit(world);
}

// Status messages that a core has in UB while it sends them: direct fills a message while the previous one leaves.
constexpr uint32_t kMostMessagesInUb = 2;
MOE_FN uint32_t MessagesInUb(const MoeDistributeInfo& info) {
    return info.algorithm == kAlgorithmDirect && info.world > 1 ? kMostMessagesInUb : 1;
}

constexpr uint32_t kRepeatWords = 64;

// Most repeats of a vector instruction, and most pieces of a DataCopyPad.
constexpr uint32_t kMostRepeats = 255, kMostPieces = 4095;
static_assert(2 * kMaxPlanned <= kMostPieces && kChunkPairs <= kMostPieces, "one copy loads a block of each");

// Messages that a core of direct, or of window combine in V2, awaits and compares together, one repeat each: all of up
// to kWholeWorld ranks; with more ranks as many as kMatchedBytes hold, in equal parts except the last.
constexpr uint32_t kWholeWorld = 64, kMatchedBytes = 10 * 1024;
MOE_FN uint32_t MessagesAtOnce(uint32_t world, uint32_t cores, uint32_t counts) {
    if (world <= kWholeWorld || cores == 1) return world;  // a launch of one core compares word by word
    return CeilDiv(world, CeilDiv(world, Min(kMatchedBytes / StatusMessageBytes(counts), kMostRepeats)));
}
static_assert(MessagesAtOnce(kWholeWorld, kMaxCores, 1) <= kMostRepeats &&
                  StatusMessageBytes(2 * CeilDiv(kMaxExperts, kWholeWorld)) <= kMatchedBytes,
              "one message at least is compared at a time, and no more than an instruction repeats");
// The first stored block of each message in UB: 0 if all messages are there together, otherwise the counts; for direct
// combine, whose messages have two counts per expert, header 1 with the place of registered rows.
MOE_FN uint32_t FirstStoredBlock(uint32_t world, uint32_t cores, uint32_t counts, uint32_t localExperts) {
    if (MessagesAtOnce(world, cores, counts) == world) return 0;
    return counts > localExperts ? 1 : kHeaderBlocks;
}
MOE_FN uint32_t StoredBytes(uint32_t world, uint32_t cores, uint32_t counts, uint32_t localExperts) {
    return StatusMessageBytes(counts) - FirstStoredBlock(world, cores, counts, localExperts) * kBlock;
}

// Histograms in UB at a time: those of all cores, or as many as fit.
MOE_FN uint32_t HistogramsAtOnce(const MoeDistributeInfo& info) {
    constexpr uint32_t kKiB = 1024, kLongRow = 32 * kKiB, kLongestRow = 60 * kKiB;
    const uint32_t lanes = PaddedInts(info.experts) * static_cast<uint32_t>(sizeof(int32_t));
    const bool wide = info.xType == kTypeFp32 || info.quantMode != 0;  // in fp32, at least while it is quantized
    const uint32_t row = info.hidden * (wide ? 4 : 2);
    const uint32_t window = row >= kLongestRow ? 4 * kKiB
                            : row >= kLongRow  ? 8 * kKiB
                                               : 28 * kKiB - Min(4 * lanes, 28 * kKiB);
    return Max(1, Min(info.cores, (info.algorithm == kAlgorithmDirect ? 96 * kKiB : window) / lanes));
}
MOE_FN bool ScansSegments(uint32_t world, uint32_t cores) { return cores > 1 && world % kBlockWords == 0; }

// Shared rows: with sharedLanes, direct dispatch reads a row once for all experts of its owner. A group of cores sorts
// the list entries of a group of sources by row, and divides them. A group has as many sources as make
// kSharedRowEntries entries with even routing.
constexpr uint32_t kMostSharedRowSources = 8, kSharedRowEntries = 256;
MOE_FN uint32_t SharedRowSources(const MoeDistributeInfo& info) {
    const uint32_t even = kSharedRowEntries * info.world / Max(1, info.maxBatch * info.topK);
    return Max(1, Min(Min(even, info.world), kMostSharedRowSources));
}
MOE_FN uint32_t SharedRowGroups(const MoeDistributeInfo& info) { return CeilDiv(info.world, SharedRowSources(info)); }
// Entries of a core at a time, of `lanes` that its group has in UB. Core 0 has half as many as others; up to K entries
// of a row that begins in the share are added.
MOE_FN uint32_t SharedRowShare(const MoeDistributeInfo& info, uint32_t lanes) {
    const uint32_t cores = Max(1, info.cores / SharedRowGroups(info));
    return Min(lanes, CeilDiv(2 * lanes, 2 * cores - 1)) + info.topK;
}

// A queue's tensor takes an event id of one pair of pipes while it is in flight, and of another pair from when it is
// free until it is filled again. Each pair has kEventIds: one is left for single waits, one for the compiler; the rings
// of a step share the others.
constexpr uint32_t kEventIds = 8, kMostRing = kEventIds - 2;

// ---- dispatch ----
constexpr uint32_t kMaxSendRing = 4;             // rows in flight while dispatch sends, publishes or forwards
constexpr uint32_t kMostGatherRing = kMostRing;  // chunks in flight while direct gathers

struct MoeDistributeDispatchTiling {
    MoeDistributeMc2Head mc2;
    MoeDistributeInfo info;
    uint32_t tokenNumsType;  // expert_token_nums_type: 0 cumulative, 1 counts
    uint32_t tpWorldSize;    // 0 or 1
    uint32_t sendRing;       // UB rows in flight while sending
    uint32_t trailerRing;    // window: rows with trailers in flight; 0: trailers leave by themselves
    uint32_t quantPiece;     // elements of a row that are quantized at a time: the whole row, or a multiple of 512
    uint32_t copyRows;       // window rows of one UB chunk while copying out
    uint32_t copyRing;       // such chunks in flight
    uint32_t listCores;      // direct: cores that make the lists, the others publish rows; 0: all do both
    uint32_t sharedLanes;    // direct: list entries that are sorted at a time, see Shared rows; 0: a row a list entry
    uint32_t reserved;
};

// ---- combine ----
constexpr uint32_t kMaxSumGroups = 4;  // direct: groups of rows in flight while summing

struct MoeDistributeCombineTiling {
    MoeDistributeMc2Head mc2;
    MoeDistributeInfo info;
    uint32_t hasSharedExpertX;
    uint32_t sendRows;       // rows of one UB chunk while sending
    uint32_t partsPerToken;  // cores that share a token's H while summing
    uint32_t partElements;   // elements of one part, a multiple of 32
    uint32_t sumRing;        // UB parts of rows in flight while summing
    uint32_t sumGroup;       // direct: so many of them are loaded, waited for and freed together
    uint32_t returnRing;     // such chunks in flight: to the sources, in direct into the own ping-pong buffer
    uint32_t quantPiece;     // elements of a row that are quantized at a time: the whole row, or a multiple of 512
};

// Chunks of direct combine's copy into the own ping-pong buffer, where rows are contiguous and cores share bytes, not
// rows.
constexpr uint32_t kReturnChunkBytes = 16 * 1024;
MOE_FN uint32_t ReturnChunkBytes(uint32_t rowBytes, uint32_t rows) { return Min(rows * rowBytes, kReturnChunkBytes); }
// Combine's comm_quant_mode.
MOE_FN uint32_t CommQuantMode(const MoeDistributeInfo& info) { return info.quantMode; }
// Bytes of a row on the return path; `size`: of an element of expand_x.
MOE_FN uint32_t ReturnedRowBytes(const MoeDistributeInfo& info, uint32_t size) {
    return CommQuantMode(info) != 0 ? CommQuantRowBytes(info.hidden) : info.hidden * size;
}
// Whether comm_quant_mode quantizes rows; in hierarchy it quantizes sums.
MOE_FN bool CodesRows(const MoeDistributeInfo& info) {
    return CommQuantMode(info) != 0 && info.algorithm != kAlgorithmHierarchy;
}
// The tiling of a server's sums: plain rows, all of which travelled.
MOE_FN MoeDistributeCombineTiling ServerSumTiling(const MoeDistributeCombineTiling& tiling) {
    MoeDistributeCombineTiling plain = tiling;
    plain.info.quantMode = 0;
    plain.info.alphaRank = 0;
    return plain;
}
// Whether sums may have addends that never travelled: rows of copy, const and shared experts.
MOE_FN bool HasPlainAddends(const MoeDistributeCombineTiling& tiling) {
    return tiling.hasSharedExpertX != 0 || tiling.info.firstCopy < tiling.info.ids;
}
// Most addends of a token: its pairs, with two for a const expert, and the shared expert's.
MOE_FN uint32_t AddendsPerToken(const MoeDistributeInfo& info) { return (info.alphaRank != 0 ? 2 : 1) * info.topK + 1; }
// Tokens whose sums are prepared together. Const experts' addends need more storage than rows, so chunks then count
// addends.
MOE_FN uint32_t ChunkTokens(const MoeDistributeInfo& info) {
    return kChunkPairs / (info.alphaRank != 0 ? AddendsPerToken(info) : info.topK);
}
MOE_FN uint32_t SumEntries(const MoeDistributeInfo& info) { return ChunkTokens(info) * AddendsPerToken(info); }

// One card: a launch whose cores are divided among several ranks, to run dispatch and combine without a cluster
// (`ascend-moe validate --one-card`). Core b of the launch is core b % cores of rank b / cores.
constexpr uint32_t kOpOneCard = 4;  // beside kOpProbe; never on the wire
constexpr uint32_t kCardCombineKeys = 10000;

// What a rank of the launch works with, as addresses in GM. `arguments`: of the entry of its op, in their order, with
// its own workspace and tiling.
constexpr uint32_t kCardArguments = 18;
struct OneCardRank {
    uint64_t context;
    uint64_t reserved;
    uint64_t arguments[kCardArguments];
};

struct MoeOneCardTiling {
    uint64_t ranks;  // address of OneCardRank[world]
    uint32_t world;
    uint32_t cores;  // of a rank
};

// The end of UB, which is not planned for: a piece of an item, a block, and the blocks of a barrier.
constexpr uint32_t kCardUbBytes = 20 * 1024;
constexpr uint32_t kCardUbAt = 196352 - kCardUbBytes;  // of what CANN grants
constexpr uint32_t kCardPieceBytes = 16 * 1024;
constexpr uint32_t kCardBlockAt = kCardPieceBytes, kCardBarrierAt = kCardBlockAt + kBlock;
static_assert(kCardBarrierAt + kMaxCores * kBlock <= kCardUbBytes, "the barrier's blocks fit");

}  // namespace moe

#endif  // ASCEND_MOE_PROTOCOL_TILING_H
