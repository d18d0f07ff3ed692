// The wire protocol: layout of a rank's window, status messages, abort blocks, error record, limits. Kernels, host
// checks and Python all read these constants from here.
//
// A rank has two areas, and a third for registered memory. `data` contains rows, `state` everything that must survive
// or be polled:
//   state: control block
// error record
// abort blocks, one per source rank
// status messages [parity][source]
// | + core barrier [round][core]
// timestamps of its cores [op][core]
//   data:  ping-pong buffer 0
// 1; in each, region s belongs to source rank s
//   registered: after data: tensors of window_empty, filled by the rank's own caller; peers read them when a message of
//          direct combine says so
// Addresses depend only on (window bytes, world, parity, source rank): a rank with another configuration still writes
// into its own place, where it can be read and named.
#ifndef ASCEND_MOE_PROTOCOL_WINDOW_H
#define ASCEND_MOE_PROTOCOL_WINDOW_H

#include <cstdint>

#ifdef __aicore__
#define MOE_FN __aicore__ inline constexpr
#else
#define MOE_FN inline constexpr
#endif

namespace moe {

// ---- limits -------------------------------------------------------------------------------------------
constexpr uint32_t kMaxWorld = 384;            // W, EP ranks
constexpr uint32_t kMaxPlanned = 768;          // in plans: the limit of CANN's own operators
constexpr uint32_t kMaxSegments = 2048;        // W * L, segments (source rank, local expert) of a rank
constexpr uint32_t kMaxExperts = 1024;         // E
constexpr uint32_t kMaxTopK = 32;              // K
constexpr uint32_t kMaxSpecialExperts = 1024;  // of each kind: zero, copy and const
constexpr uint32_t kMaxBatch = 4096;           // tokens a rank
constexpr uint32_t kMaxHidden = 16384;         // elements of a row
constexpr uint32_t kMaxCores = 64;             // AIV cores a launch

// ---- units --------------------------------------------------------------------------------------------
constexpr uint32_t kBlock = 32;           // bytes: smallest unit of MTE and of a status message
constexpr uint32_t kBlockWords = 8;       // 32-bit words of a block
constexpr uint32_t kRowUnit = 512;        // bytes: rows of a window begin at multiples of it, see RowStep
constexpr uint64_t kMiB = 1024 * 1024;    // bytes
constexpr uint32_t kCyclesPerMicro = 50;  // GetSystemCycle ticks a microsecond
constexpr int64_t kCyclesPerSecond = int64_t{1000 * 1000} * kCyclesPerMicro;

MOE_FN uint64_t CeilTo(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }
MOE_FN uint64_t FloorTo(uint64_t n, uint64_t unit) { return n / unit * unit; }
MOE_FN uint32_t CeilDiv(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
MOE_FN uint32_t Min(uint32_t a, uint32_t b) { return a < b ? a : b; }
MOE_FN uint32_t Max(uint32_t a, uint32_t b) { return a > b ? a : b; }

// ---- state area, offsets in bytes ---------------------------------------------------------------------
constexpr uint32_t kLayoutVersion = 2;
constexpr uint32_t kControlMagic = 0x41530000u | kLayoutVersion;
constexpr uint64_t kControlOffset = 0;  // words: magic, epoch; alone on its cache lines
constexpr uint32_t kControlMagicWord = 0, kControlEpochWord = 1;
constexpr uint64_t kErrorRecordOffset = 512;
constexpr uint32_t kErrorRecordWords = 64;   // int32
constexpr uint64_t kLocalAbortOffset = 768;  // this rank's local abort flag, for its cores
constexpr uint64_t kAbortOffset = 1024;

MOE_FN uint64_t AbortOffset(uint32_t source) { return kAbortOffset + static_cast<uint64_t>(source) * kBlock; }

// A status message: two header blocks, then blocks of four counts: the rows of each local expert; in direct combine
// also where they begin.
constexpr uint32_t kHeaderBlocks = 2;
constexpr uint32_t kCountsPerBlock = 4;

MOE_FN uint32_t MaxLocalExperts(uint32_t world) { return CeilDiv(kMaxSegments, world); }
MOE_FN uint32_t CountBlocks(uint32_t counts) { return CeilDiv(counts, kCountsPerBlock); }
MOE_FN uint32_t StatusMessageBytes(uint32_t counts) { return (kHeaderBlocks + CountBlocks(counts)) * kBlock; }
MOE_FN uint32_t StatusStride(uint32_t world) { return StatusMessageBytes(MaxLocalExperts(world)); }
MOE_FN uint64_t StatusBase(uint32_t world) { return CeilTo(AbortOffset(world), 512); }
MOE_FN uint64_t StatusOffset(uint32_t world, uint32_t parity, uint32_t source) {
    return StatusBase(world) + (static_cast<uint64_t>(parity) * world + source) * StatusStride(world);
}
// An op has up to three core barriers. Each core posts a block and reads those of all.
constexpr uint32_t kCoreBarrierRounds = 3;
MOE_FN uint64_t CoreBarrierOffset(uint32_t world, uint32_t round) {
    return StatusOffset(world, 2, 0) + static_cast<uint64_t>(round) * kMaxCores * kBlock;
}
// Timestamps of the last dispatch and the last combine, if enabled (info.timestamps).
constexpr uint32_t kTimestampWords = 3 * kBlockWords;
constexpr uint32_t kTimestampedOps = 2;
MOE_FN uint64_t TimestampsOffset(uint32_t world, uint32_t op, uint32_t core) {
    return CoreBarrierOffset(world, kCoreBarrierRounds) +
           (static_cast<uint64_t>(op - 1) * kMaxCores + core) * kTimestampWords * sizeof(uint32_t);
}
MOE_FN uint64_t StateBytes(uint32_t world) { return CeilTo(TimestampsOffset(world, kTimestampedOps + 1, 0), 4096); }

static_assert(kErrorRecordOffset + kErrorRecordWords * sizeof(int32_t) <= kLocalAbortOffset &&
                  kLocalAbortOffset + kBlock <= kAbortOffset,
              "error record, local abort flag and aborts overlap");
static_assert(StateBytes(1) <= kMiB && StateBytes(kMaxPlanned) <= kMiB, "the state area must fit 1 MiB");
static_assert(2 * kMaxExperts <= kMaxSegments, "a message of direct combine has two counts a local expert");

// ---- data area, offsets in bytes ----------------------------------------------------------------------
MOE_FN uint64_t PingPongBytes(uint64_t dataBytes) { return FloorTo(dataBytes / 2, 512); }
MOE_FN uint64_t PingPongOffset(uint64_t dataBytes, uint32_t parity) { return parity * PingPongBytes(dataBytes); }
MOE_FN uint64_t RegionBytes(uint64_t dataBytes, uint32_t world) {
    return FloorTo(PingPongBytes(dataBytes) / world, 512);
}
MOE_FN uint64_t RegionOffset(uint64_t dataBytes, uint32_t world, uint32_t parity, uint32_t source) {
    return PingPongOffset(dataBytes, parity) + source * RegionBytes(dataBytes, world);
}

// Over RDMA rows are compacted towards the end of a region and end where its status message begins, so that both leave
// as one contiguous item. The place of the message is fixed and begins a block of 512 bytes.
constexpr uint32_t kFlaggedBlock = 512;
MOE_FN uint64_t InterNodeMessageBytes(uint32_t world) { return CeilTo(StatusStride(world), kFlaggedBlock); }
MOE_FN uint64_t RowsEnd(uint64_t dataBytes, uint32_t world, uint32_t regions) {
    const uint64_t region = RegionBytes(dataBytes, regions), message = InterNodeMessageBytes(world);
    return region < message ? 0 : region - message;
}
// With ASCEND_MOE_RDMA_FLAGS rows lie in flagged blocks: 480 bytes of rows, then 32 bytes with the block's epoch. A
// reader then does not depend on the order in which the blocks of an item arrive.
constexpr uint32_t kFlaggedPayload = kFlaggedBlock - kBlock;
constexpr uint32_t kFlagMagic = 0x464C4147u;
MOE_FN uint32_t FlagWord(uint32_t epoch) { return kFlagMagic ^ epoch; }
MOE_FN uint64_t FlaggedBlocks(uint64_t rowBytes) { return (rowBytes + kFlaggedPayload - 1) / kFlaggedPayload; }
MOE_FN uint64_t FlaggedBytes(uint64_t rowBytes) { return FlaggedBlocks(rowBytes) * kFlaggedBlock; }
constexpr uint64_t kA2StateBytes = kMiB;  // A2: the last of windowsIn

// Algorithm "hierarchy": a ping-pong buffer has one more region per server, W + s for server s, for what travels
// between it and the ranks of a rail: rows that end at RelayEnd(), a block that counts them, and a place for the
// message of (dispatch: to) each of its ranks. A local rank is a rank's number within its server.
MOE_FN uint32_t RegionsOf(uint32_t world, uint32_t localRanks) {
    return localRanks == 0 ? world : world + world / localRanks;
}
MOE_FN uint64_t RelayMessageOffset(uint32_t world, uint32_t localRank) {
    return kBlock + static_cast<uint64_t>(localRank) * StatusStride(world);
}
MOE_FN uint64_t RelayTrailerBytes(uint32_t world, uint32_t localRanks) {
    return CeilTo(RelayMessageOffset(world, localRanks), kFlaggedBlock);
}
MOE_FN uint64_t RelayEnd(uint64_t dataBytes, uint32_t world, uint32_t localRanks) {
    const uint64_t region = RegionBytes(dataBytes, RegionsOf(world, localRanks)),
                   trailer = RelayTrailerBytes(world, localRanks);
    return region < trailer ? 0 : region - trailer;
}
// The counting block, words; the magic is keyed by the epoch.
enum RelayBlock : uint32_t { kRbMagic, kRbOp, kRbSource, kRbRows, kRbHash, kRbEpoch = 7 };
constexpr uint32_t kRelayMagic = 0x52454C59u;
MOE_FN uint32_t RelayWord(uint32_t epoch) { return kRelayMagic ^ epoch; }
// A record lists the pairs of a token: a block with the token; then, each from a new block, K ids, or -1 for a pair
// routed nowhere, K row numbers at the owners, and K weights. In dispatch the token's row precedes it.
constexpr uint32_t kRecordLists = 3;
MOE_FN uint32_t RecordBytes(uint32_t topK) {
    return kBlock + kRecordLists * static_cast<uint32_t>(CeilTo(topK * sizeof(int32_t), kBlock));
}

// Bytes from row 0 to a row, modulo 2^64: rows before row 0 have negative numbers.
MOE_FN uint64_t RowOffsetBytes(int32_t row, uint32_t stride) {
    return static_cast<uint64_t>(static_cast<int64_t>(row) * stride);
}

// The same for flagged blocks, which end where row 0 would begin.
MOE_FN uint64_t FlaggedRowOffset(uint64_t offset) { return offset - FlaggedBlocks(0 - offset) * kBlock; }
MOE_FN uint64_t RowPlace(int32_t row, uint32_t stride, bool flagged) {
    const uint64_t offset = RowOffsetBytes(row, stride);
    return flagged ? FlaggedRowOffset(offset) : offset;
}

// A row on the wire: payload, then 32 B with the fp32 scale if quantized. In algorithm "window" its trailer follows: 32
// B with the source index (source rank, token, k) if rows have one, and 32 B with the row's weight if dispatch is given
// expert_scales.
MOE_FN uint32_t PayloadBytes(uint32_t hidden, uint32_t size) {
    return static_cast<uint32_t>(CeilTo(hidden * size, kBlock));
}
MOE_FN uint32_t DispatchRowStride(uint32_t hidden, uint32_t size, bool quantized, uint32_t trailerBlocks) {
    return PayloadBytes(hidden, size) + ((quantized ? 1 : 0) + trailerBlocks) * kBlock;
}
constexpr uint32_t kSourceIndexWords = 3;

// Bytes from row to row in a window, for rows of `bytes` bytes: rows that begin at multiples of kRowUnit move fastest
// on NPUs. `unit`: that, or kBlock on CPUs, if the window has no room for it, or if rows travel between servers. In UB
// rows have no gaps.
MOE_FN uint32_t RowStep(uint32_t bytes, uint32_t unit) { return (bytes + unit - 1) & ~(unit - 1); }

// A returned row with comm_quant_mode 2: int8 codes, then a scale for each block of them, in the rows' type.
constexpr uint32_t kCodesOfScale = 8;
constexpr uint32_t kScaleBytes = 2;
MOE_FN uint32_t BlockScalesOffset(uint32_t hidden) { return PayloadBytes(hidden, 1); }
MOE_FN uint32_t CommQuantRowBytes(uint32_t hidden) {
    return BlockScalesOffset(hidden) + PayloadBytes(hidden / kCodesOfScale, kScaleBytes);
}

// In window combine a row with a source index returns to the place of its (token, k). A block after it has its epoch: a
// reader never takes a row of an earlier op. Over RDMA rows are compacted and have no such block.
constexpr uint32_t kIndexedRowMagic = 0x534C4F54u;
MOE_FN uint32_t IndexedRowTag(uint32_t epoch) { return kIndexedRowMagic ^ epoch; }
MOE_FN uint32_t IndexedRowBytes(uint32_t rowBytes) { return rowBytes + kBlock; }

// Rows that one source may send to one owner.
MOE_FN uint32_t Capacity(uint32_t maxBatch, uint32_t topK, uint32_t localExperts) {
    return maxBatch * Min(topK, localExperts);
}

// Algorithm "direct": a rank fills its own ping-pong buffer, and the others read it there. Dispatch: lists
// [W][capacity] int32 of pair numbers (token * K + k), each from a new block, then rows [maxBS], or [maxBS*K] with
// smooth scales, then expert_scales [maxBS*K] fp32 if given. Combine: the rows in the order of expand_x. The layout
// depends only on values that all ranks share.
MOE_FN uint64_t ListBytes(uint32_t capacity) { return CeilTo(capacity * sizeof(int32_t), kBlock); }
MOE_FN uint64_t PublishedRowsOffset(uint32_t world, uint32_t capacity) {
    return CeilTo(world * ListBytes(capacity), 512);
}

// ---- epochs -------------------------------------------------------------------------------------------
// 0 is never an epoch, and 0xFFFFFFFF is followed by 2 so that parity keeps alternating.
MOE_FN uint32_t NextEpoch(uint32_t epoch) { return epoch == 0xFFFFFFFFu ? 2u : epoch + 1; }
MOE_FN uint32_t Parity(uint32_t epoch) { return epoch & 1; }
// Whether the place of a message may contain this epoch before the message of `epoch` arrives: 0 (nothing), or the
// epoch of two ops ago.
MOE_FN bool IsStale(uint32_t seen, uint32_t epoch) {
    return seen == 0 || seen == epoch - 2 || (epoch == 2 && seen == 0xFFFFFFFEu) || (epoch == 3 && seen == 0xFFFFFFFFu);
}

// ---- status blocks, 32-bit words ----------------------------------------------------------------------
constexpr uint32_t kStatusMagic = 0x4D4F4530u;
constexpr uint32_t kAbortMagic = 0x41424F52u;
constexpr uint32_t kLocalAbortMagic = 0x4641494Cu;
constexpr uint32_t kCoreBarrierMagic = 0x56455244u;
constexpr uint32_t kOpDispatch = 1, kOpCombine = 2;
// The phase of a message says where its rows lie: final: in the reader's window; published: in the sender's own
// ping-pong buffer; registered: in the sender's registered area.
constexpr uint32_t kPhaseFinal = 1, kPhasePublished = 2, kPhaseRegistered = 3;
constexpr uint32_t kAlgorithmWindow = 1, kAlgorithmDirect = 2, kAlgorithmHierarchy = 3;
constexpr uint32_t kContractV1 = 1, kContractV2 = 2;

// Number of counts of a message.
MOE_FN uint32_t MessageCounts(uint32_t algorithm, uint32_t op, uint32_t localExperts) {
    return algorithm == kAlgorithmDirect && op == kOpCombine ? 2 * localExperts : localExperts;
}

// Word 0 of header 0 is the magic keyed by the epoch: it changes every op and is published last.
MOE_FN uint32_t HeaderWord(uint32_t epoch) { return kStatusMagic ^ epoch; }
MOE_FN uint32_t OpPhase(uint32_t op, uint32_t phase, uint32_t id) { return op << 24 | phase << 16 | id; }
MOE_FN uint32_t PhaseOf(uint32_t opPhase) { return opPhase >> 16 & 0xFF; }
// Whether a message of this algorithm and op may have this phase.
MOE_FN bool IsPhaseOf(uint32_t algorithm, uint32_t op, uint32_t phase) {
    if (algorithm != kAlgorithmDirect) return phase == kPhaseFinal;
    return phase == kPhasePublished || (phase == kPhaseRegistered && op == kOpCombine);
}

// A reader may find a block half written. So each begins and ends with the epoch (the first of header 0
// with the magic), and a block has arrived when both have this epoch.
enum Header0 : uint32_t { kH0Magic, kH0OpPhase, kH0Source, kH0Hidden, kH0TopK, kH0Experts, kH0MaxBatch, kH0Epoch };
enum Header1 : uint32_t { kH1Epoch, kH1OpPhase, kH1Types, kH1Contract, kH1Code, kH1Detail0, kH1Detail1, kH1Tag };
enum CountBlock : uint32_t { kCbEpoch, kCbOpPhase, kCbCounts, kCbHash = 6, kCbTag };
constexpr uint32_t kFirstTag = 0, kLastTag = 7;  // words of every block
constexpr uint32_t kHeader1Id = 0xFFFEu;         // distinguishes header 1 from a count block

// kH1Types: x type
// wire type
// quant mode of the rows
// smooth scales, 2 for expert_scales of dispatch, and 4 if rows begin at multiples of kRowUnit; 8 bits each.
// kH1Contract: contract
// global_bs given
// window MiB in the upper half.
MOE_FN uint32_t TypesWord(uint32_t xType, uint32_t wireType, uint32_t quant, uint32_t smooth, uint32_t weights,
                          uint32_t rowUnit) {
    return xType | wireType << 8 | quant << 16 | (smooth | weights << 1 | (rowUnit == kRowUnit ? 4u : 0u)) << 24;
}
MOE_FN uint32_t TypesRowUnit(uint32_t types) { return (types >> 26 & 1) != 0 ? kRowUnit : kBlock; }
MOE_FN uint32_t ContractWord(uint32_t contract, bool globalBs, uint32_t windowMiB) {
    return contract | (globalBs ? 1u : 0u) << 8 | windowMiB << 16;
}
// kH1Code: the error code, and the algorithm above it.
MOE_FN uint32_t CodeWord(uint32_t algorithm, uint32_t code) { return algorithm << 8 | code; }
MOE_FN uint32_t HashMix(uint32_t hash, uint32_t word) { return (hash ^ word) * 16777619u; }

// ---- abort block, words -------------------------------------------------------------------------------
// The magic is at both ends.
enum AbortBlock : uint32_t { kAbMagic, kAbEpoch, kAbCode, kAbCulprit, kAbReporter, kAbDetail0, kAbDetail1, kAbTag };

// ---- algorithm hint, words: between servers, in the place of an unused abort block. A rank that waits for long sends
// all others its algorithm: messages of another algorithm arrive where nobody reads. A rank whose deadline has passed
// accuses the rank that it misses, which may only be waiting for another and then says so in an abort. The first and
// last words show that a hint is whole; its magic differs from an abort's ----
enum AlgorithmHint : uint32_t {
    kHtMagic,
    kHtEpoch,
    kHtAlgorithm,
    kHtAccused,
    kHtTurns,
    kHtTag = 7
};  // the tag is the epoch
constexpr uint32_t kHintMagic = 0x4E4F5445u;
constexpr uint32_t kHintShare = 4;  // hints are sent or answered after this share of the deadline
// kHtAccused: 1 + the rank, 0 if the hint accuses nobody. kHtTurns: how long its sender waits for an answer. An accused
// rank waits one turn less for the answer of the rank that it misses. The longest chain has four ranks: in the second
// and first wait of an op of hierarchy, and in those of the op before.
constexpr uint32_t kMostTurns = 5;
constexpr uint32_t kTurnShare = 16;  // a turn is this share of the deadline, at most a second

// ---- local abort flag, words: from core 0 to the other cores of its rank: the reason why it has given up, or that
// there is an abort. A fatal code of an earlier epoch means that the communicator is in the failed state ----
enum LocalAbortBlock : uint32_t { kLaMagic, kLaEpoch, kLaCode };  // the magic keyed by the epoch
MOE_FN uint32_t LocalAbortWord(uint32_t epoch) { return kLocalAbortMagic ^ epoch; }

// ---- core barrier block, words: each xor CoreBarrierTag, so that a core without an error posts the tag eight times.
// The tag is at both ends. ----
enum CoreBarrierBlock : uint32_t {
    kBrTag,
    kBrCode,
    kBrSource,
    kBrDetail0,
    kBrDetail1,
    kBrDetail2,
    kBrReporter,
    kBrLast
};
// `finish`: the second launch of an op, whose barriers start again.
MOE_FN uint32_t CoreBarrierTag(uint32_t epoch, bool finish) {
    return kCoreBarrierMagic ^ epoch ^ (finish ? 1u << 31 : 0u);
}
// After each wait of hierarchy, core barriers start again at the first block. All cores have read what lay there,
// because all have posted to the blocks after it.
MOE_FN uint32_t WaitTag(uint32_t waits) { return waits << 24; }
// The same for the core barrier after ranks have found different algorithms.
constexpr uint32_t kHintedTag = 1u << 29;

// ---- phases of an op, and the timestamps of a core ----
// The only list of these names: MOE_PHASE takes no other, and timelines, predictions and timestamps print them. A core
// is in a phase until the next one begins; in "launch" before the first, and at "end" all its stores have left.
#define ASCEND_MOE_PHASES(X)      \
    X(BuffInit)                   \
    X(SendBuffInit)               \
    X(AlltoAllDispatch)           \
    X(PublishRows)                \
    X(PublishLists)               \
    X(ReturnRows)                 \
    X(SetWaitTpStatusAndDisPatch) \
    X(SetStatus)                  \
    X(WaitStatus)                 \
    X(GatherRows)                 \
    X(LocalWindowCopy)            \
    X(SumRows)                    \
    X(ForwardRows)                \
    X(SumServer)
#define ASCEND_MOE_PHASE(name) kIn##name,
enum Phase : uint32_t { kInLaunch, ASCEND_MOE_PHASES(ASCEND_MOE_PHASE) kAtEnd };
#undef ASCEND_MOE_PHASE
// Words of a core's timestamps: the tag; their number
// algorithm << 8; a byte for each phase that begins; the low words of GetSystemCycle then. The first is the launch's.
enum TimestampBlock : uint32_t { kStTag, kStCount, kStPhases, kStCycles = 7 };
constexpr uint32_t kMostTimestamps = kTimestampWords - kStCycles, kTimestampsOfWord = 4;
static_assert(kMostTimestamps <= (kStCycles - kStPhases) * kTimestampsOfWord && kAtEnd < 256, "a phase is a byte");
constexpr uint32_t kTimestampMagic = 0x5354414Du;
MOE_FN uint32_t TimestampTag(uint32_t epoch) { return kTimestampMagic ^ epoch; }

// ---- errors -------------------------------------------------------------------------------------------
enum ErrorCode : uint32_t {
    kOk = 0,
    // collective: travel in the status header, the communicator stays usable
    kInvalidExpertId = 1,     // details: token << 8 | k, id
    kRoutingOverflow = 2,     // details: owner, rows
    kInvalidCounts = 3,       // ep_send_counts; details: index, value
    kInvalidSourceIndex = 4,  // assist_info_for_combine; details: row, word
    kConfigMismatch = 5,      // seen by the reader; details: field, ours, theirs
    kRoutingMismatch = 6,     // raised where it is seen; details: expert, ours, theirs
    // fatal: sticky
    kPeerLost = 16,
    kCommTimeout = 17,
    kCorruptStatus = 18,    // details: block, word
    kContextMismatch = 19,  // the context is not the one that the tiling was made for; details: field, ours,
                            // theirs
    kKernelFault = 20       // written by a host whose kernel broke a rule of the hardware
};
constexpr uint32_t kFirstFatal = kPeerLost;
// kInvalidCounts: set in detail 0 beside a source rank whose rows together are too many.
constexpr uint32_t kCountsOfSource = 0x80000000u;
// kCorruptStatus: the block in detail 0 if it is not one of a status message.
constexpr uint32_t kAbortBlockIndex = 0xFFFFu;
constexpr uint32_t kRelayBlockIndex = 0xFFFEu;  // hierarchy: the block that counts rows,
constexpr uint32_t kRecordIndex = 0xFFFDu;      // a record
// Waits of hierarchy: at level 1 for what a rank forwards or sums, at level 2 for what others forward to it. The
// upper half of detail 0 of kPeerLost, kCommTimeout and kCorruptStatus is the level; 0: another algorithm, or not
// detected by a wait.
MOE_FN uint32_t AtLevel(uint32_t detail, uint32_t level) { return detail | level << 16; }
MOE_FN uint32_t LevelOf(uint32_t detail) { return detail >> 16; }
MOE_FN uint32_t BlockOf(uint32_t detail) { return detail & 0xFFFFu; }
// kInvalidSourceIndex: the word in detail 0 if the source index is not dispatch's at this row.
constexpr uint32_t kSourceIndexOrder = 3;
// kInvalidSourceIndex: detail 0 if a record of hierarchy after the source indices is invalid.
constexpr uint32_t kSourceIndexRecords = 0xFFFFFFFFu;
// kRoutingMismatch: set in detail 0 beside the expert if expand_idx, not a count, differs.
constexpr uint32_t kMismatchIndex = 0x80000000u;
// kRoutingMismatch: set in detail 0 beside the expert if the row of a pair has not come; details: token, k.
constexpr uint32_t kMismatchRow = 0x40000000u;
// kRoutingMismatch: set in detail 0 beside a server if the number of its sums differs (hierarchy).
constexpr uint32_t kMismatchSums = 0x20000000u;

// Fields of the configuration, as in a mismatch.
enum ConfigField : uint32_t {
    kFieldOp,
    kFieldWindow,
    kFieldContract,
    kFieldHidden,
    kFieldTopK,
    kFieldExperts,
    kFieldGlobalBs,
    kFieldMaxBatch,
    kFieldType,
    kFieldQuant,
    kFieldScales,
    kFieldWeights,
    kFieldAlgorithm,
    kFieldRowUnit,
    kFieldCount
};

// Fields of the communication context, as in a mismatch with the tiling. Sizes are in KiB.
enum ContextField : uint32_t {
    kContextFieldAddress,
    kContextFieldMagic,
    kContextFieldRank,
    kContextFieldWorld,
    kContextFieldPeers,  // where the table of peers begins
    kContextFieldWindow,
    kContextFieldState,
    kContextFieldCount
};

// Error record, int32 words. After kRecAwaited: (rank, epoch it was last seen at, its op then) for each awaited rank.
enum ErrorRecord : uint32_t {
    kRecMagic,
    kRecCode,
    kRecOp,
    kRecEpoch,
    kRecRank,
    kRecCulprit,
    kRecDetail0,
    kRecDetail1,
    kRecDetail2,
    kRecReporter,
    kRecCapacity,
    kRecWaitedMillis,
    kRecIds,  // info.ids
    kRecMaxBatch,
    kRecTopK,
    kRecWorld,
    kRecAwaitedCount,
    kRecAwaited
};
constexpr int32_t kRecordMagic = 0x4D4F4552;
constexpr uint32_t kMaxAwaited = (kErrorRecordWords - kRecAwaited) / 3;

}  // namespace moe

#endif  // ASCEND_MOE_PROTOCOL_WINDOW_H
