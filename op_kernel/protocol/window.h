// The wire protocol: geometry of a rank's window, status messages, abort blocks, error record, limits.
// The only home of these constants; kernels, host checks and Python all read them from here.
//
// A rank has two areas, and a third where memory is lent. `data` holds rows, `state` holds everything that
// must survive or be polled:
//   state: control block | error record | abort blocks, one a source rank | status messages [parity][source] |
//          verdicts of the rank's own cores [meeting][core] | stamps of its cores [op][core]
//   data:  half 0 | half 1; in a half, region s belongs to source rank s
//   lent:  right behind data: tensors of window_empty, which the rank's own caller fills;
//          peers read them when a message of direct combine says so
// Addresses depend only on (window bytes, world, parity, source rank): a rank with another configuration
// still writes into its own place, where it can be read and named.
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
constexpr uint32_t kMaxPlanned = 768;          // of a plan: what CANN's own operators allow
constexpr uint32_t kMaxSlots = 2048;           // W * L, (source rank, local expert) pairs a rank serves
constexpr uint32_t kMaxExperts = 1024;         // E
constexpr uint32_t kMaxTopK = 32;              // K
constexpr uint32_t kMaxSpecialExperts = 1024;  // of each kind: zero, copy and const
constexpr uint32_t kMaxBatch = 4096;           // tokens a rank
constexpr uint32_t kMaxHidden = 16384;         // elements of a row
constexpr uint32_t kMaxCores = 64;             // AIV cores a launch

// ---- units --------------------------------------------------------------------------------------------
constexpr uint32_t kBlock = 32;           // bytes: smallest unit of MTE and of a status
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
constexpr uint32_t kErrorRecordWords = 64;  // int32
constexpr uint64_t kFailOffset = 768;       // this rank's own fail block, for its cores
constexpr uint64_t kAbortOffset = 1024;

MOE_FN uint64_t AbortOffset(uint32_t source) { return kAbortOffset + static_cast<uint64_t>(source) * kBlock; }

// A status message: two header blocks, then count blocks of four: the rows of each local expert; in direct
// combine also where they begin.
constexpr uint32_t kHeaderBlocks = 2;
constexpr uint32_t kCountsPerBlock = 4;

MOE_FN uint32_t MaxLocalExperts(uint32_t world) { return CeilDiv(kMaxSlots, world); }
MOE_FN uint32_t CountBlocks(uint32_t counts) { return CeilDiv(counts, kCountsPerBlock); }
MOE_FN uint32_t StatusMessageBytes(uint32_t counts) { return (kHeaderBlocks + CountBlocks(counts)) * kBlock; }
MOE_FN uint32_t StatusStride(uint32_t world) { return StatusMessageBytes(MaxLocalExperts(world)); }
MOE_FN uint64_t StatusBase(uint32_t world) { return CeilTo(AbortOffset(world), 512); }
MOE_FN uint64_t StatusOffset(uint32_t world, uint32_t parity, uint32_t source) {
    return StatusBase(world) + (static_cast<uint64_t>(parity) * world + source) * StatusStride(world);
}
// The cores of a rank meet up to three times in an op. Each posts a block, and reads those of all.
constexpr uint32_t kVerdictRounds = 3;
MOE_FN uint64_t VerdictOffset(uint32_t world, uint32_t round) {
    return StatusOffset(world, 2, 0) + static_cast<uint64_t>(round) * kMaxCores * kBlock;
}
// Stamps of the last dispatch and of the last combine, from those cores that were asked for them (info.stamps).
constexpr uint32_t kStampWords = 2 * kBlockWords;
constexpr uint32_t kStampedOps = 2;
MOE_FN uint64_t StampsOffset(uint32_t world, uint32_t op, uint32_t core) {
    return VerdictOffset(world, kVerdictRounds) +
           (static_cast<uint64_t>(op - 1) * kMaxCores + core) * kStampWords * sizeof(uint32_t);
}
MOE_FN uint64_t StateBytes(uint32_t world) { return CeilTo(StampsOffset(world, kStampedOps + 1, 0), 4096); }

static_assert(kErrorRecordOffset + kErrorRecordWords * sizeof(int32_t) <= kFailOffset &&
                  kFailOffset + kBlock <= kAbortOffset,
              "error record, fail block and aborts overlap");
static_assert(StateBytes(1) <= kMiB && StateBytes(kMaxPlanned) <= kMiB, "the state area must fit 1 MiB");
static_assert(2 * kMaxExperts <= kMaxSlots, "a message of direct combine has two counts a local expert");

// ---- data area, offsets in bytes ----------------------------------------------------------------------
MOE_FN uint64_t HalfBytes(uint64_t dataBytes) { return FloorTo(dataBytes / 2, 512); }
MOE_FN uint64_t HalfOffset(uint64_t dataBytes, uint32_t parity) { return parity * HalfBytes(dataBytes); }
MOE_FN uint64_t RegionBytes(uint64_t dataBytes, uint32_t world) { return FloorTo(HalfBytes(dataBytes) / world, 512); }
MOE_FN uint64_t RegionOffset(uint64_t dataBytes, uint32_t world, uint32_t parity, uint32_t source) {
    return HalfOffset(dataBytes, parity) + source * RegionBytes(dataBytes, world);
}

// Over RDMA rows are packed towards the end of a region and end where its status message begins, so that rows
// and message leave as a contiguous item. The place of the message is fixed, and begins a block of 512 bytes.
constexpr uint32_t kFlaggedBlock = 512;
MOE_FN uint64_t FarMessageBytes(uint32_t world) { return CeilTo(StatusStride(world), kFlaggedBlock); }
MOE_FN uint64_t RowsEnd(uint64_t dataBytes, uint32_t world, uint32_t regions) {
    const uint64_t region = RegionBytes(dataBytes, regions), message = FarMessageBytes(world);
    return region < message ? 0 : region - message;
}
// With ASCEND_MOE_RDMA_FLAGS rows lie there in flagged blocks: 480 bytes of rows, then 32 bytes that say of which epoch
// the block is. So a reader does not depend on the order in which the blocks of an item arrive.
constexpr uint32_t kFlaggedPayload = kFlaggedBlock - kBlock;
constexpr uint32_t kFlagMagic = 0x464C4147u;
MOE_FN uint32_t FlagWord(uint32_t epoch) { return kFlagMagic ^ epoch; }
MOE_FN uint64_t FlaggedBlocks(uint64_t rowBytes) { return (rowBytes + kFlaggedPayload - 1) / kFlaggedPayload; }
MOE_FN uint64_t FlaggedBytes(uint64_t rowBytes) { return FlaggedBlocks(rowBytes) * kFlaggedBlock; }
constexpr uint64_t kA2StateBytes = kMiB;  // A2: the last of windowsIn

// Algorithm "hierarchy": a half has a region more for each server, W + s for server s. What goes to that server, or
// comes from it, by way of the ranks of a lane lies there: rows that end at RelayEnd(), a block that counts them, and a
// place for the message of (dispatch: to) each of its ranks. A lane is a rank's number within its server.
MOE_FN uint32_t RegionsOf(uint32_t world, uint32_t lanes) { return lanes == 0 ? world : world + world / lanes; }
MOE_FN uint64_t RelayMessageOffset(uint32_t world, uint32_t lane) {
    return kBlock + static_cast<uint64_t>(lane) * StatusStride(world);
}
MOE_FN uint64_t RelayTailBytes(uint32_t world, uint32_t lanes) {
    return CeilTo(RelayMessageOffset(world, lanes), kFlaggedBlock);
}
MOE_FN uint64_t RelayEnd(uint64_t dataBytes, uint32_t world, uint32_t lanes) {
    const uint64_t region = RegionBytes(dataBytes, RegionsOf(world, lanes)), tail = RelayTailBytes(world, lanes);
    return region < tail ? 0 : region - tail;
}
// The block, words; the magic is keyed by the epoch.
enum RelayBlock : uint32_t { kRbMagic, kRbOp, kRbSource, kRbRows, kRbHash, kRbEpoch = 7 };
constexpr uint32_t kRelayMagic = 0x52454C59u;
MOE_FN uint32_t RelayWord(uint32_t epoch) { return kRelayMagic ^ epoch; }
// A record names the pairs of a token: a block with the token; then, each from a block on, K ids, or -1 where a pair is
// routed nowhere, K numbers of their rows at the owners, and K weights. In dispatch the token's row lies before it.
constexpr uint32_t kRecordLists = 3;
MOE_FN uint32_t RecordBytes(uint32_t topK) {
    return kBlock + kRecordLists * static_cast<uint32_t>(CeilTo(topK * sizeof(int32_t), kBlock));
}

// Bytes to a row from row 0, modulo 2^64: rows before it have negative numbers.
MOE_FN uint64_t RowOffsetBytes(int32_t row, uint32_t stride) {
    return static_cast<uint64_t>(static_cast<int64_t>(row) * stride);
}

// The same where rows lie in flagged blocks, which end where row 0 would begin.
MOE_FN uint64_t FlaggedRowOffset(uint64_t offset) { return offset - FlaggedBlocks(0 - offset) * kBlock; }
MOE_FN uint64_t RowPlace(int32_t row, uint32_t stride, bool flagged) {
    const uint64_t offset = RowOffsetBytes(row, stride);
    return flagged ? FlaggedRowOffset(offset) : offset;
}

// A row on the wire: payload, then 32 B with the fp32 scale when quantized. In the algorithm "window" its tail
// follows: 32 B with the triple (source rank, token, k) when rows have triples, and 32 B with the row's weight
// when dispatch is given expert_scales.
MOE_FN uint32_t PayloadBytes(uint32_t hidden, uint32_t size) {
    return static_cast<uint32_t>(CeilTo(hidden * size, kBlock));
}
MOE_FN uint32_t DispatchRowStride(uint32_t hidden, uint32_t size, bool quantized, uint32_t tailBlocks) {
    return PayloadBytes(hidden, size) + ((quantized ? 1 : 0) + tailBlocks) * kBlock;
}
constexpr uint32_t kTripleWords = 3;

// Bytes from row to row in a window, for rows of `bytes` bytes: a core moves rows the fastest that begin at multiples
// of kRowUnit. `unit`: that, or kBlock where the window has no room for it, or where rows travel between servers. In UB
// rows are packed.
MOE_FN uint32_t RowStep(uint32_t bytes, uint32_t unit) { return (bytes + unit - 1) & ~(unit - 1); }

// A row on its way back with comm_quant_mode 2: int8 codes, then a scale for each block of them, in the type of rows.
constexpr uint32_t kCodesOfScale = 8;
constexpr uint32_t kScaleBytes = 2;
MOE_FN uint32_t BlockScalesOffset(uint32_t hidden) { return PayloadBytes(hidden, 1); }
MOE_FN uint32_t CommQuantRowBytes(uint32_t hidden) {
    return BlockScalesOffset(hidden) + PayloadBytes(hidden / kCodesOfScale, kScaleBytes);
}

// In window combine a row with a triple comes back to the slot of its (token, k). A block behind it says of which epoch
// it is: a reader never takes a row that an earlier op has left there. Over RDMA rows are packed and carry none.
constexpr uint32_t kSlotMagic = 0x534C4F54u;
MOE_FN uint32_t SlotMark(uint32_t epoch) { return kSlotMagic ^ epoch; }
MOE_FN uint32_t SlotBytes(uint32_t rowBytes) { return rowBytes + kBlock; }

// Rows that one source may send to one owner.
MOE_FN uint32_t Capacity(uint32_t maxBatch, uint32_t topK, uint32_t localExperts) {
    return maxBatch * Min(topK, localExperts);
}

// Algorithm "direct": a rank fills its own half, and the others read it there. Dispatch: lists [W][capacity]
// int32 of pair numbers (token * K + k), each list from a block on, then rows [maxBS], or [maxBS*K] with
// smooth scales, then expert_scales [maxBS*K] fp32 if given. Combine: the rows in the order that they have in
// expand_x. The layout depends on values that all ranks share.
MOE_FN uint64_t ListBytes(uint32_t capacity) { return CeilTo(capacity * sizeof(int32_t), kBlock); }
MOE_FN uint64_t PublishedRowsOffset(uint32_t world, uint32_t capacity) {
    return CeilTo(world * ListBytes(capacity), 512);
}

// ---- epochs -------------------------------------------------------------------------------------------
// 0 is never an epoch, and 0xFFFFFFFF is followed by 2 so that parity keeps alternating.
MOE_FN uint32_t NextEpoch(uint32_t epoch) { return epoch == 0xFFFFFFFFu ? 2u : epoch + 1; }
MOE_FN uint32_t Parity(uint32_t epoch) { return epoch & 1; }
// Whether the place of a message may hold this epoch before the message of `epoch` arrives: 0 (nothing), or
// the epoch of two ops ago.
MOE_FN bool IsStale(uint32_t seen, uint32_t epoch) {
    return seen == 0 || seen == epoch - 2 || (epoch == 2 && seen == 0xFFFFFFFEu) || (epoch == 3 && seen == 0xFFFFFFFFu);
}

// ---- status blocks, 32-bit words ----------------------------------------------------------------------
constexpr uint32_t kStatusMagic = 0x4D4F4530u;
constexpr uint32_t kAbortMagic = 0x41424F52u;
constexpr uint32_t kFailMagic = 0x4641494Cu;
constexpr uint32_t kVerdictMagic = 0x56455244u;
constexpr uint32_t kOpDispatch = 1, kOpCombine = 2;
// The phase of a message says where the rows lie that it announces: final: in the reader's window; published:
// in the sender's own half; lent: in the sender's lent area.
constexpr uint32_t kPhaseFinal = 1, kPhasePublished = 2, kPhaseLent = 3;
constexpr uint32_t kAlgorithmWindow = 1, kAlgorithmDirect = 2, kAlgorithmHierarchy = 3;
constexpr uint32_t kContractV1 = 1, kContractV2 = 2;

// How many counts a message has.
MOE_FN uint32_t MessageCounts(uint32_t algorithm, uint32_t op, uint32_t localExperts) {
    return algorithm == kAlgorithmDirect && op == kOpCombine ? 2 * localExperts : localExperts;
}

// Word 0 of header 0 is the magic keyed by the epoch: it changes every op, and is published last.
MOE_FN uint32_t HeaderWord(uint32_t epoch) { return kStatusMagic ^ epoch; }
MOE_FN uint32_t OpPhase(uint32_t op, uint32_t phase, uint32_t tail) { return op << 24 | phase << 16 | tail; }
MOE_FN uint32_t PhaseOf(uint32_t opPhase) { return opPhase >> 16 & 0xFF; }
// Whether a message of this algorithm and op may have this phase.
MOE_FN bool IsPhaseOf(uint32_t algorithm, uint32_t op, uint32_t phase) {
    if (algorithm != kAlgorithmDirect) return phase == kPhaseFinal;
    return phase == kPhasePublished || (phase == kPhaseLent && op == kOpCombine);
}

// A reader may find a block half written. So both halves of each begin or end with the epoch (the first of header
// 0 with the magic), and a block counts as there when both say this epoch.
enum Header0 : uint32_t { kH0Magic, kH0OpPhase, kH0Source, kH0Hidden, kH0TopK, kH0Experts, kH0MaxBatch, kH0Epoch };
enum Header1 : uint32_t { kH1Epoch, kH1OpPhase, kH1Types, kH1Contract, kH1Code, kH1Detail0, kH1Detail1, kH1Mark };
enum CountBlock : uint32_t { kCbEpoch, kCbOpPhase, kCbCounts, kCbHash = 6, kCbMark };
constexpr uint32_t kFirstMark = 0, kLastMark = 7;  // words of every block
constexpr uint32_t kHeader1Tail = 0xFFFEu;         // tells header 1 from a count block

// kH1Types: x type | wire type | quant mode of the rows that travel | smooth scales, 2 for expert_scales of dispatch,
// and 4 where rows begin at multiples of kRowUnit; 8 bits each.
// kH1Contract: contract | global_bs given | window MiB in the upper half.
MOE_FN uint32_t TypesWord(uint32_t xType, uint32_t wireType, uint32_t quant, uint32_t smooth, uint32_t weights,
                          uint32_t rowUnit) {
    return xType | wireType << 8 | quant << 16 | (smooth | weights << 1 | (rowUnit == kRowUnit ? 4u : 0u)) << 24;
}
MOE_FN uint32_t RowUnitOf(uint32_t types) { return (types >> 26 & 1) != 0 ? kRowUnit : kBlock; }
MOE_FN uint32_t ContractWord(uint32_t contract, bool globalBs, uint32_t windowMiB) {
    return contract | (globalBs ? 1u : 0u) << 8 | windowMiB << 16;
}
// kH1Code: the error code, and the algorithm above it.
MOE_FN uint32_t CodeWord(uint32_t algorithm, uint32_t code) { return algorithm << 8 | code; }
MOE_FN uint32_t HashMix(uint32_t hash, uint32_t word) { return (hash ^ word) * 16777619u; }

// ---- abort block, words -------------------------------------------------------------------------------
// The magic stands in both halves.
enum AbortBlock : uint32_t { kAbMagic, kAbEpoch, kAbCode, kAbCulprit, kAbReporter, kAbDetail0, kAbDetail1, kAbMark };

// ---- note, words: between servers, in the place of an abort block that is not needed. A rank that waits for long
// tells all others which algorithm it runs: the messages of another one lie where nobody looks. A rank whose time is
// over accuses the rank that it misses: that one may only wait itself, for another, and then says so in an abort. The
// first and last words say that a note is whole; its magic is no abort's ----
enum NoteBlock : uint32_t {
    kNtMagic,
    kNtEpoch,
    kNtAlgorithm,
    kNtAccused,
    kNtTurns,
    kNtMark = 7
};  // the mark is the epoch
constexpr uint32_t kNoteMagic = 0x4E4F5445u;
constexpr uint32_t kNoteShare = 4;  // a wait that leaves notes, or answers them, has taken this share of the deadline
// kNtAccused: 1 + the rank, 0 in a note that accuses nobody. kNtTurns: so long its sender waits for an answer. Whoever
// is accused waits a turn less for the answer of the rank that it misses itself. The longest chain has four ranks: in
// the second and first wait of an op of hierarchy, and in those of the op before.
constexpr uint32_t kMostTurns = 5;
constexpr uint32_t kTurnShare = 16;  // a turn is this share of the deadline, at most a second

// ---- fail block, words: from core 0 to the other cores of its rank: why it has given up, or that there is an abort. A
// fatal code of an earlier epoch says that the communicator has failed: sticky as aborts are ----
enum FailBlock : uint32_t { kFbMagic, kFbEpoch, kFbCode };  // the magic keyed by the epoch
MOE_FN uint32_t FailWord(uint32_t epoch) { return kFailMagic ^ epoch; }

// ---- verdict block, words: each xor VerdictMark, so that a core without an error posts the mark eight times.
// The mark stands in both halves. ----
enum VerdictBlock : uint32_t { kVbMark, kVbCode, kVbSource, kVbDetail0, kVbDetail1, kVbDetail2, kVbReporter, kVbLast };
// `finish`: of the second launch of an op, whose cores meet afresh.
MOE_FN uint32_t VerdictMark(uint32_t epoch, bool finish) { return kVerdictMagic ^ epoch ^ (finish ? 1u << 31 : 0u); }
// Of the second level of hierarchy: its meetings begin at the first block again. All cores have seen what lay there,
// because all have posted to the blocks after it.
constexpr uint32_t kSecondLevelMark = 1u << 30;
// The same of the meeting where ranks run different algorithms.
constexpr uint32_t kNotedMark = 1u << 29;

// ---- phases of an op, and the stamps of a core ----
// The only home of these names: MOE_PHASE takes no other, and timelines, predictions and stamps print them. A core is
// in a phase until the next one begins; in "launch" it is before the first, and at "end" all it has stored has left.
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
// Words of a core's stamps: the mark; how many there are | algorithm << 8; a byte each for the phases that begin; the
// low words of GetSystemCycle then. The first is the launch's.
enum StampBlock : uint32_t { kStMark, kStCount, kStPhases, kStCycles = 5 };
constexpr uint32_t kMostStamps = kStampWords - kStCycles, kStampsOfWord = 4;
static_assert(kMostStamps <= (kStCycles - kStPhases) * kStampsOfWord && kAtEnd < 256, "a phase is a byte");
constexpr uint32_t kStampMagic = 0x5354414Du;
MOE_FN uint32_t StampMark(uint32_t epoch) { return kStampMagic ^ epoch; }

// ---- errors -------------------------------------------------------------------------------------------
enum ErrorCode : uint32_t {
    kOk = 0,
    // collective: travel in the status header, the communicator stays usable
    kInvalidExpertId = 1,  // details: token << 8 | k, id
    kRoutingOverflow = 2,  // details: owner, rows
    kInvalidCounts = 3,    // ep_send_counts; details: index, value
    kInvalidTriple = 4,    // assist_info_for_combine; details: row, word
    kConfigMismatch = 5,   // seen by the reader; details: field, ours, theirs
    kRoutingMismatch = 6,  // raised where it is seen; details: expert, ours, theirs
    // fatal: sticky
    kPeerLost = 16,
    kCommTimeout = 17,
    kCorruptStatus = 18,    // details: block, word
    kContextMismatch = 19,  // the context is not the one that the tiling was made for; details: field, ours,
                            // theirs
    kKernelFault = 20       // written by a host whose kernel broke a rule of the hardware
};
constexpr uint32_t kFirstFatal = kPeerLost;
// kInvalidCounts: set in detail 0 beside a source rank when its rows together are too many.
constexpr uint32_t kCountsOfSource = 0x80000000u;
// kCorruptStatus: the block of detail 0 when it is not one of a status message.
constexpr uint32_t kAbortBlockIndex = 0xFFFFu;
constexpr uint32_t kRelayBlockIndex = 0xFFFEu;  // of hierarchy: the block that counts rows,
constexpr uint32_t kRecordIndex = 0xFFFDu;      // a record
// Hierarchy waits twice in an op: in level 1 for what a rank forwards, in level 2 for what others forward to it. The
// upper half of detail 0 of kPeerLost, kCommTimeout and kCorruptStatus is the level; 0: of another algorithm, or found
// by no wait.
MOE_FN uint32_t AtLevel(uint32_t detail, uint32_t level) { return detail | level << 16; }
MOE_FN uint32_t LevelOf(uint32_t detail) { return detail >> 16; }
MOE_FN uint32_t BlockOf(uint32_t detail) { return detail & 0xFFFFu; }
// kInvalidTriple: the word of detail 0 when the triple is none of dispatch's at this row.
constexpr uint32_t kTripleOrder = 3;
// kInvalidTriple: detail 0 when not a triple is wrong, but a record of hierarchy behind them.
constexpr uint32_t kTripleRecords = 0xFFFFFFFFu;
// kRoutingMismatch: set in detail 0 beside the expert when expand_idx, not a count, is at odds.
constexpr uint32_t kMismatchIndex = 0x80000000u;
// kRoutingMismatch: set in detail 0 beside the expert when the row of a pair has not come; details: token, k.
constexpr uint32_t kMismatchRow = 0x40000000u;
// kRoutingMismatch: set in detail 0 beside a server when the number of its sums is at odds (hierarchy).
constexpr uint32_t kMismatchSums = 0x20000000u;

// Fields of the configuration, as a mismatch names them.
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

// Fields of the communication context, as a mismatch with the tiling names them. Sizes are in KiB.
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

// Error record, int32 words. kRecAwaited is followed by triples (rank, epoch it was last seen at, its op
// then).
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
