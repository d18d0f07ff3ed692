// UB of the kernels' classes, one entry per class: a struct with the bytes of each buffer, or a number for a single
// buffer. A class makes its buffers in Init from its entry, and the host sums the same entries (op_host/rules/ub.h)
// when it chooses rings and refuses calls. They are here because the host includes no AscendC.
#ifndef ASCEND_MOE_PROTOCOL_UB_H
#define ASCEND_MOE_PROTOCOL_UB_H

#include "tiling.h"

namespace moe {

constexpr uint32_t kIntBytes = sizeof(int32_t), kFloatBytes = sizeof(float), kWordPairBytes = sizeof(uint64_t);

// UB is allocated in blocks.
MOE_FN uint32_t InBlocks(uint32_t bytes) { return static_cast<uint32_t>(CeilTo(bytes, kBlock)); }
MOE_FN uint32_t PaddedIntBytes(uint32_t n) { return PaddedInts(n) * kIntBytes; }

// One int32 or fp32 per pair of a chunk: expand_idx, row numbers, positions, weights.
constexpr uint32_t kChunkIntBytes = kChunkPairs * kIntBytes;
// One block per pair of a chunk: tags, list entries, one kind of trailer.
constexpr uint32_t kChunkBlockBytes = kChunkPairs * kBlock;

// ---- common/contexts.h ----
constexpr uint32_t kEpochWordBytes = kBlock;
// WindowContext: all ranks' window addresses as in the context, on A3 two words per rank. In larger groups a core has
// few rows per rank, and rings need the room. Between servers of A2 each rank has a record of its own instead.
constexpr uint32_t kMostPeersInUb = 64;
MOE_FN uint32_t PeersBytes(const MoeDistributeInfo& info) {
    return info.world > kMostPeersInUb || info.transport == kTransportRdma ? 0
                                                                           : InBlocks(2 * info.world * kWordPairBytes);
}

// ---- common/core_barrier.h ----
// CoreBarrier: a block to post, all cores' blocks and their expected words, in whole repeats of 256 bytes, one bit per
// word, and a block for Arrive.
MOE_FN uint32_t CoreBarrierLanes(uint32_t cores) {
    return static_cast<uint32_t>(CeilTo(cores * kBlockWords, kRepeatWords));
}
MOE_FN uint32_t CoreBarrierBytes(uint32_t cores) {
    const uint32_t lanes = CoreBarrierLanes(cores);
    return 2 * kBlock + 2 * lanes * kIntBytes + InBlocks(lanes / 8);
}

// ---- common/routing.h ----
struct PairReaderUb {
    uint32_t ids = kChunkIntBytes, mask;
    MOE_FN explicit PairReaderUb(const MoeDistributeInfo& info) : mask(info.maskRank != 0 ? kChunkPairs : 0) {}
    MOE_FN uint32_t Bytes() const { return ids + mask; }
};
struct RoutingTableUb {
    PairReaderUb pairs;
    uint32_t experts;  // of each of three tables: counts, totals, places
    MOE_FN explicit RoutingTableUb(const MoeDistributeInfo& info)
        : pairs(info), experts(PaddedIntBytes(info.experts)) {}
    MOE_FN uint32_t Bytes() const { return pairs.Bytes() + 3 * experts; }
};

// ---- common/segments.h ----
struct SegmentTableUb {
    uint32_t slots;  // of each of two tables
    uint32_t sources;
    MOE_FN explicit SegmentTableUb(const MoeDistributeInfo& info)
        : slots(PaddedIntBytes(info.world * info.localExperts)), sources(PaddedIntBytes(info.world)) {}
    MOE_FN uint32_t Bytes() const { return 2 * slots + sources; }
};
// `rowBytes`: stored bytes of a source's message.
struct SegmentScanUb {
    uint32_t slots;  // of each of two tables
    uint32_t rows, base;
    MOE_FN SegmentScanUb(uint32_t world, uint32_t localExperts, uint32_t rowBytes)
        : slots(world * localExperts * kIntBytes), rows(world * rowBytes), base(rowBytes) {}
    MOE_FN uint32_t Bytes() const { return 2 * slots + rows + base; }
};
// Scratch of a reduction over so many words: its result, and a value with its index for every repeat.
MOE_FN uint32_t ReduceBytes(uint32_t words) {
    return kBlock + InBlocks(2 * CeilDiv(words, kRepeatWords) * kFloatBytes);
}
struct RowPlacesUb {
    uint32_t histograms;
    uint32_t experts, reduce;  // of each of four tables, where places are found by vectors
    MOE_FN explicit RowPlacesUb(const MoeDistributeInfo& info)
        : histograms(HistogramsAtOnce(info) * PaddedIntBytes(info.experts)),
          experts(ScansSegments(info.world, info.cores) ? PaddedIntBytes(info.experts) : 0),
          reduce(experts != 0 ? PaddedIntBytes(info.world) + 2 * kBlock + ReduceBytes(info.world) : 0) {}
    MOE_FN uint32_t Bytes() const { return histograms + 4 * experts + reduce; }
};
// Ends, starts; the sums by source in rows of ReturnCountUnit lanes; the check's scratch.
struct ReturnCountsUb {
    uint32_t slots;  // of each of two tables
    uint32_t sums, work;
    MOE_FN explicit ReturnCountsUb(const MoeDistributeInfo& info)
        : slots(PaddedIntBytes(info.world * info.localExperts)),
          sums(ReturnCountLanes(info.world, info.world * info.localExperts) * kFloatBytes),
          work(slots + 2 * kBlock) {}
    MOE_FN uint32_t Bytes() const { return 2 * slots + sums + work; }
};

// ---- common/inputs.h ----
// CountsMatch: two tables [E] in whole repeats, and one bit per lane.
MOE_FN uint32_t CountsLanes(uint32_t experts) { return static_cast<uint32_t>(CeilTo(experts, kRepeatWords)); }
MOE_FN uint32_t CountsMatchBytes(uint32_t experts) {
    const uint32_t lanes = CountsLanes(experts);
    return 2 * lanes * kIntBytes + InBlocks(lanes / 8);
}

constexpr uint32_t kSourceIndexRows = 512;  // source indices at a time, plus the one before them
constexpr uint32_t kSourceIndexReaderBytes = PaddedIntBytes((kSourceIndexRows + 1) * kSourceIndexWords);

// ---- common/send.h ----
// Flags of kFlagsAtOnce blocks, and for readers one bit per word.
struct BlockFlagsUb {
    uint32_t flags, bits;
    MOE_FN explicit BlockFlagsUb(const MoeDistributeInfo& info)
        : flags(info.rdmaFlags != 0 ? kFlagsAtOnce * kBlock : 0), bits(info.rdmaFlags != 0 ? kFlagsAtOnce : 0) {}
    MOE_FN uint32_t Bytes() const { return flags + bits; }
};

struct ItemListUb {
    uint32_t item = kBlock, flags;
    MOE_FN explicit ItemListUb(const MoeDistributeInfo& info) : flags(BlockFlagsUb(info).flags) {}
    MOE_FN uint32_t Bytes() const { return item + flags; }
};

// ---- common/exchange.h ----
// Messages that a core sends; `counts`: of a message.
MOE_FN uint32_t SentMessagesBytes(const MoeDistributeInfo& info, uint32_t counts) {
    return MessagesInUb(info) * StatusMessageBytes(counts);
}

// ---- common/status.h ----
// MessageMatch, for so many messages together: the expected message; a block and a number per source; the differences
// of all words, and their reduction.
struct MessageMatchUb {
    uint32_t pattern, sources, words, reduce;
    MOE_FN MessageMatchUb(uint32_t messages, uint32_t counts)
        : pattern(StatusMessageBytes(counts)),
          sources(PaddedInts(messages) * (kBlock + kIntBytes)),
          words(messages * pattern),
          reduce(ReduceBytes(words / kIntBytes)) {}
    MOE_FN uint32_t Bytes() const { return pattern + sources + words + reduce; }
};

// ---- common/aborts.h ----
// AbortWatch: abort blocks per poll.
constexpr uint32_t kAbortsAtOnce = 128;
MOE_FN uint32_t AbortBytes(uint32_t world) { return Min(world, kAbortsAtOnce) * kBlock; }
constexpr uint32_t kLocalAbortFlagBytes = kBlock;
// AlgorithmHints: a hint and a BatchWrite item.
MOE_FN uint32_t HintsBytes(const MoeDistributeInfo& info) { return info.transport == kTransportRdma ? 2 * kBlock : 0; }

// ---- common/status_wait.h ----
// WaitTimes: per source the time at which its message was seen, and its word pair of performance_info.
struct WaitTimesUb {
    uint32_t seen, sums;
    MOE_FN explicit WaitTimesUb(uint32_t sources)
        : seen(InBlocks(sources * kIntBytes)), sums(InBlocks(sources * kWordPairBytes)) {}
    MOE_FN uint32_t Bytes() const { return seen + sums; }
};
// StatusWaiter, for `sources` ranks or for all; `counts`: per message.
struct StatusWaiterUb {
    uint32_t aborts, messages;
    uint32_t stored = 0, match = 0;
    MOE_FN StatusWaiterUb(const MoeDistributeInfo& info, uint32_t counts, uint32_t sources)
        : aborts(AbortBytes(info.world)), messages(sources * StatusMessageBytes(counts)) {}
    MOE_FN StatusWaiterUb(const MoeDistributeInfo& info, uint32_t counts)
        : StatusWaiterUb(info, counts, MessagesAtOnce(info.world, info.cores, counts)) {
        const uint32_t together = MessagesAtOnce(info.world, info.cores, counts);
        if (together < info.world) stored = info.world * StoredBytes(info.world, info.cores, counts, info.localExperts);
        if (info.cores > 1) match = MessageMatchUb(together, counts).Bytes();
    }
    MOE_FN uint32_t Bytes() const { return aborts + messages + stored + match; }
};

// ---- common/outputs.h ----
MOE_FN uint32_t DispatchCountsBytes(uint32_t localExperts) { return InBlocks(localExperts * sizeof(int64_t)) + kBlock; }
MOE_FN uint32_t SendCountsBytes(uint32_t experts) { return PaddedIntBytes(experts); }

// ---- common/quantize.h ----
// RowQuantizer: fp32 values of a piece, scratch of the same size, smooth scales; the reduction: the maximum, the
// pieces' maxima, and its scratch.
MOE_FN uint32_t QuantMaximaWords(uint32_t hidden, uint32_t piece) { return PaddedInts(CeilDiv(hidden, piece)); }
struct RowQuantizerUb {
    uint32_t values;  // of each of two tables
    uint32_t reduce, smooth;
    MOE_FN RowQuantizerUb(uint32_t hidden, uint32_t piece, bool smoothed)
        : values(InBlocks(piece * kFloatBytes)),
          reduce(QuantMaximaWords(hidden, piece) * kFloatBytes +
                 ReduceBytes(Max(piece, QuantMaximaWords(hidden, piece)))),
          smooth(smoothed ? values : 0) {}
    MOE_FN uint32_t Bytes() const { return 2 * values + reduce + smooth; }
};
// RowLoader: rings of rows of x, and of wire rows if they are quantized. `size`: of an element of x.
struct RowLoaderUb {
    uint32_t ring, row, wire = 0, quantizer = 0;
    MOE_FN RowLoaderUb(const MoeDistributeDispatchTiling& tiling, uint32_t size)
        : ring(tiling.sendRing), row(tiling.info.hidden * size) {
        if (tiling.info.quantMode == 0) return;
        wire = PayloadBytes(tiling.info.hidden, 1) + kBlock;
        quantizer = RowQuantizerUb(tiling.info.hidden, tiling.quantPiece, tiling.info.hasScales != 0).Bytes();
    }
    MOE_FN uint32_t Bytes() const { return ring * (InBlocks(row) + wire) + quantizer; }
};
// Codes of rows on the return path: fp32 values in whole repeats, and a scale for each block of codes.
MOE_FN uint32_t CommQuantLanes(uint32_t elements) { return static_cast<uint32_t>(CeilTo(elements, kRepeatWords)); }
MOE_FN uint32_t CommQuantScaleBytes(uint32_t elements) {
    return CommQuantLanes(elements) / kCodesOfScale * kFloatBytes;
}
struct CommQuantizerUb {
    uint32_t values;  // of each of two tables
    uint32_t scales;
    MOE_FN explicit CommQuantizerUb(uint32_t piece)
        : values(CommQuantLanes(piece) * kFloatBytes), scales(CommQuantScaleBytes(piece)) {}
    MOE_FN uint32_t Bytes() const { return 2 * values + InBlocks(scales); }
};
// `size`: of an element of x.
struct CommDecoderUb {
    uint32_t row, wide, scales;
    MOE_FN CommDecoderUb(uint32_t elements, uint32_t size)
        : row(CommQuantLanes(elements) * size),
          wide(CommQuantLanes(elements) * kFloatBytes),
          scales(CommQuantScaleBytes(elements)) {}
    MOE_FN uint32_t Bytes() const { return InBlocks(row) + wide + InBlocks(scales); }
};
// Bytes of expand_x in UB while they are quantized: a chunk of rows, or a piece of a row.
MOE_FN uint32_t UnquantizedBytes(const MoeDistributeCombineTiling& tiling, uint32_t size) {
    const uint32_t hidden = tiling.info.hidden;
    return (tiling.quantPiece < hidden ? tiling.quantPiece : tiling.sendRows * hidden) * size;
}
// ReturnLoader: rings of chunks; `stride`: bytes from row to row of a chunk, `size`: of an element of expand_x.
struct ReturnLoaderUb {
    uint32_t ring, chunk, elements = 0, quantizer = 0;
    MOE_FN ReturnLoaderUb(const MoeDistributeCombineTiling& tiling, uint32_t stride, uint32_t size)
        : ring(tiling.returnRing), chunk(tiling.sendRows * stride) {
        if (CommQuantMode(tiling.info) == 0) return;
        elements = UnquantizedBytes(tiling, size);
        quantizer = CommQuantizerUb(tiling.quantPiece).Bytes();
    }
    MOE_FN uint32_t Bytes() const { return ring * (InBlocks(chunk) + InBlocks(elements)) + quantizer; }
};

// ---- common/weighted_sum.h ----
// ConstFactors: three tensors as given and, if these are narrower, in fp32; two sums. Given factors take a block each;
// products take kDotLanes elements at a time.
constexpr uint32_t kDotLanes = 256;
MOE_FN uint32_t ConstFactorBytes(uint32_t alphaRank, uint32_t elementBytes) {
    const uint32_t lanes = alphaRank == 2 ? kDotLanes : kBlockWords;
    return 3 * InBlocks(lanes * elementBytes) + (elementBytes == kFloatBytes ? 2 : 5) * lanes * kFloatBytes;
}

// ---- common/weighted_sum.h; `size`: of an element of x ----
struct AddendsUb {
    uint32_t weights = kChunkIntBytes, factors;
    MOE_FN AddendsUb(const MoeDistributeInfo& info, uint32_t size)
        : factors(info.alphaRank != 0 ? ConstFactorBytes(info.alphaRank, size) : 0) {}
    MOE_FN uint32_t Bytes() const { return weights + InBlocks(factors); }
};
// WeightedSum: two results, or one if it is the sum; an addend in fp32; the sum; the addends of a const expert.
struct WeightedSumUb {
    uint32_t results, result, addend, sum, mix, decoder;
    MOE_FN WeightedSumUb(const MoeDistributeCombineTiling& tiling, uint32_t size)
        : results(size == kFloatBytes ? 1 : 2),
          result(tiling.partElements * size),
          addend(tiling.partElements * kFloatBytes),
          sum(size == kFloatBytes ? 0 : addend),
          mix(tiling.info.alphaRank != 0 ? addend : 0),
          decoder(CommQuantMode(tiling.info) != 0 ? CommDecoderUb(tiling.partElements, size).Bytes() : 0) {}
    MOE_FN uint32_t Bytes() const { return results * InBlocks(result) + addend + sum + mix + decoder; }
};

// ---- common/outputs.h ----
// All sources' messages, and chunks of window rows; direct dispatch uses the latter, too.
struct CopyOutUb {
    uint32_t messages, ring, chunk;
    MOE_FN CopyOutUb(const MoeDistributeDispatchTiling& tiling, uint32_t stride)
        : messages(tiling.info.world * StatusMessageBytes(tiling.info.localExperts)),
          ring(tiling.copyRing),
          chunk(tiling.copyRows * stride) {}
    MOE_FN uint32_t Bytes() const { return messages + ring * InBlocks(chunk); }
};

// ---- window/dispatch.h ----
// A chunk of pairs while rows are sent, and the queue of rows with trailers. `stride`: of a row in the window.
struct SendChunkUb {
    uint32_t index = kChunkIntBytes, rows = kChunkIntBytes, trailers, weights, ring, row;
    MOE_FN SendChunkUb(const MoeDistributeDispatchTiling& tiling, uint32_t stride)
        : trailers(TrailerBlocks(tiling.info) * kChunkBlockBytes),
          weights(tiling.info.hasWeights != 0 ? kChunkIntBytes : 0),
          ring(tiling.trailerRing),
          row(stride) {}
    MOE_FN uint32_t Bytes() const { return index + rows + trailers + weights + ring * InBlocks(row); }
};
// ---- window/combine.h: expand_idx of a chunk, ep_send_counts ----
struct CompactedCombineUb {
    uint32_t index = kChunkIntBytes, counts;
    MOE_FN explicit CompactedCombineUb(const MoeDistributeInfo& info)
        : counts(PaddedIntBytes(info.world * info.localExperts)) {}
    MOE_FN uint32_t Bytes() const { return index + counts; }
};

// ---- window/combine.h: the queue of TokenSum ----
// Bytes of a part of an addend in UB: of a row that came back, or of one that never travelled.
MOE_FN uint32_t SumPieceBytes(const MoeDistributeInfo& info, bool plainAddends, uint32_t elements, uint32_t size) {
    const bool commQuant = CommQuantMode(info) != 0 && !plainAddends;
    return commQuant ? elements + PayloadBytes(elements / kCodesOfScale, kScaleBytes) : elements * size;
}
struct TokenSumUb {
    uint32_t ring, piece;
    MOE_FN TokenSumUb(const MoeDistributeCombineTiling& tiling, uint32_t size)
        : ring(tiling.sumRing), piece(SumPieceBytes(tiling.info, HasPlainAddends(tiling), tiling.partElements, size)) {}
    MOE_FN uint32_t Bytes() const { return ring * InBlocks(piece); }
};

// ---- hierarchy/relay.h ----
// ServerTokens: three tables [S], and the cores' rows in flight.
struct ServerTokensUb {
    uint32_t servers, rows;
    MOE_FN explicit ServerTokensUb(const MoeDistributeInfo& info)
        : servers(PaddedIntBytes(Servers(info))), rows(ServerRows(info) * servers) {}
    MOE_FN uint32_t Bytes() const { return 3 * servers + rows; }
};
// Relay: a block and an item; for passing messages on, a ring of them.
struct RelayUb {
    uint32_t block = kBlock, item = kBlock, message;
    MOE_FN explicit RelayUb(const MoeDistributeInfo& info) : message(StatusMessageBytes(info.localExperts)) {}
    MOE_FN uint32_t Bytes() const { return block + item; }
    MOE_FN uint32_t Messages() const { return kRelayedMessages * message; }
};

// ---- hierarchy/dispatch.h ----
// For some tokens: trailers of their rows, weights, records.
struct SendRecordsUb {
    uint32_t trailers, weights, records;
    MOE_FN explicit SendRecordsUb(const MoeDistributeInfo& info)
        : trailers(RecordTokens(info.topK) * info.topK * TrailerBlocks(info) * kBlock),
          weights(PaddedIntBytes(RecordTokens(info.topK) * info.topK)),
          records(RecordTokens(info.topK) * RecordBytes(info.topK)) {}
    MOE_FN uint32_t Bytes() const { return trailers + weights + records; }
};
// Rows with their records, and trailers for the resulting rows. `row`: bytes without a trailer.
struct ForwardUb {
    uint32_t ring, record;
    MOE_FN ForwardUb(const MoeDistributeDispatchTiling& tiling, uint32_t row)
        : ring(tiling.sendRing),
          record(row + RecordBytes(tiling.info.topK) + tiling.info.topK * TrailerBlocks(tiling.info) * kBlock) {}
    MOE_FN uint32_t Bytes() const { return ring * record; }
};

// ---- hierarchy/combine.h ----
// While rows go to the ranks that sum them: ep_send_counts; a number; numbers of stored records.
struct ReturnToRailUb {
    uint32_t counts, number = kBlock, stored;
    MOE_FN explicit ReturnToRailUb(const MoeDistributeInfo& info)
        : counts(PaddedIntBytes(info.world * info.localExperts)), stored(Servers(info) * kBlock) {}
    MOE_FN uint32_t Bytes() const { return counts + number + stored; }
};
// A server's sums: rows that have come, per place; numbers of stored records; records; parts of rows; codes.
struct ServerSumsUb {
    uint32_t came, stored, records, ring, piece, sum, codes = 0, quantizer = 0;
    MOE_FN ServerSumsUb(const MoeDistributeCombineTiling& tiling, uint32_t size)
        : came(tiling.info.world * kBlock),
          stored(Servers(tiling.info) * kBlock),
          records(kSumRecords * RecordBytes(tiling.info.topK)),
          ring(tiling.sumRing),
          piece(tiling.partElements * size),
          sum(WeightedSumUb(ServerSumTiling(tiling), size).Bytes()) {
        if (CommQuantMode(tiling.info) == 0) return;
        codes = CommQuantRowBytes(tiling.info.hidden);
        quantizer = CommQuantizerUb(tiling.partElements).Bytes();
    }
    MOE_FN uint32_t Bytes() const { return came + stored + records + ring * InBlocks(piece) + sum + codes + quantizer; }
};

// ---- direct/lists.h ----
// RankPairs: the ids of all pairs of the rank (ListLanes) and their numbers; alternating comparisons; the mask as bytes
// and as half. InitBuffer takes no empty buffer: a rank without pairs has lanes, too.
constexpr uint32_t kHalfLanes = 128;  // of a repeat
struct RankPairsUb {
    uint32_t ids;   // of each of two tables
    uint32_t bits;  // of each of two comparisons
    uint32_t mask = 0, halves = 0;
    MOE_FN explicit RankPairsUb(const MoeDistributeInfo& info)
        : ids(ListLanes(info.batch * info.topK) * kIntBytes),
          bits(InBlocks(static_cast<uint32_t>(CeilTo(ListLanes(info.batch * info.topK), kHalfLanes)) / 8)) {
        if (info.maskRank == 0) return;
        const uint32_t masks = Max(1, info.maskRank == 1 ? info.batch : info.batch * info.topK);
        mask = InBlocks(masks);
        halves = static_cast<uint32_t>(CeilTo(masks, kHalfLanes)) * 2;
    }
    MOE_FN uint32_t Bytes() const { return 2 * ids + 2 * bits + mask + halves; }
};
constexpr uint32_t kPositionBlocks = 64;
struct PairPositionsUb {
    uint32_t table = kPositionBlocks * kBlock, numbers = kPositionBlocks * kIntBytes;
    MOE_FN uint32_t Bytes() const { return table + numbers; }
};
// ExpertLists, for so many experts: ListInts int32, first two copies of the ids as scratch, then the lists, each from a
// new block; without source indices a table of positions.
MOE_FN uint32_t ListInts(uint32_t lanes, uint32_t experts) { return 2 * lanes + (experts + 1) * kBlockWords; }
struct ExpertListsUb {
    RankPairsUb pairs;
    uint32_t counts, lists, positions;
    MOE_FN ExpertListsUb(const MoeDistributeInfo& info, uint32_t experts)
        : pairs(info),
          counts(PaddedIntBytes(Max(1, experts))),
          lists(ListInts(ListLanes(info.batch * info.topK), experts) * kIntBytes),
          positions(info.sourceIndices == 0 ? PairPositionsUb().Bytes() : 0) {}
    MOE_FN uint32_t Bytes() const { return pairs.Bytes() + counts + lists + positions; }
};

// ---- direct/dispatch.h: a chunk of pairs, while all cores make lists ----
struct ListChunkUb {
    uint32_t index, entries = kChunkBlockBytes;
    MOE_FN explicit ListChunkUb(const MoeDistributeInfo& info) : index(info.sourceIndices == 0 ? kChunkIntBytes : 0) {}
    MOE_FN uint32_t Bytes() const { return index + entries; }
};

// ---- direct/gather.h; `stride`: of a published row ----
constexpr uint32_t kListInts = 512;  // list entries in UB at a time; a piece of a list takes whole blocks
struct DirectGatherUb {
    uint32_t lists = kListInts * kIntBytes, sourceIndices, ring, chunk;
    MOE_FN DirectGatherUb(const MoeDistributeDispatchTiling& tiling, uint32_t stride)
        : sourceIndices(tiling.info.sourceIndices != 0 ? kListInts * kSourceIndexWords * kIntBytes : 0),
          ring(tiling.copyRing),
          chunk(tiling.copyRows * stride) {}
    MOE_FN uint32_t Bytes() const { return lists + sourceIndices + ring * InBlocks(chunk); }
};
constexpr uint32_t kWeightRows = 64;  // rows whose weights are gathered at a time
struct WeightGatherUb {
    uint32_t lists = kWeightRows * kIntBytes, weights = kWeightRows * kBlock;
    MOE_FN uint32_t Bytes() const { return lists + weights; }
};

// ---- direct/shared_rows.h ----
// RowOrder: entries, keys and numbers; sorted pairs of key and number, and scratch.
struct RowOrderUb {
    uint32_t lanes;   // of each of three tables
    uint32_t sorted;  // of each of two
    MOE_FN explicit RowOrderUb(uint32_t entries) : lanes(entries * kIntBytes), sorted(2 * lanes) {}
    MOE_FN uint32_t Bytes() const { return 3 * lanes + 2 * sorted; }
};
struct SharedRowGatherUb {
    RowOrderUb order;
    uint32_t places, sourceIndices, ring, row;
    MOE_FN SharedRowGatherUb(const MoeDistributeDispatchTiling& tiling, uint32_t stride)
        : order(tiling.sharedLanes),
          places(PaddedIntBytes(SharedRowShare(tiling.info, tiling.sharedLanes))),
          sourceIndices(tiling.info.sourceIndices != 0 ? SharedRowShare(tiling.info, tiling.sharedLanes) * kBlock : 0),
          ring(tiling.copyRing),
          row(stride) {}
    MOE_FN uint32_t Bytes() const { return order.Bytes() + places + sourceIndices + ring * InBlocks(row); }
};

// ---- direct/publish.h ----
struct IndexBoundsUb {
    uint32_t index = kChunkIntBytes, experts;
    MOE_FN explicit IndexBoundsUb(const MoeDistributeInfo& info) : experts(PaddedIntBytes(info.experts)) {}
    MOE_FN uint32_t Bytes() const { return index + experts; }
};
// RowReturn: the counts, source indices, and chunks of rows as they are, or as ReturnLoader makes them.
struct RowReturnUb {
    ReturnCountsUb counts;
    uint32_t sourceIndices, ring, chunk, loader;
    MOE_FN RowReturnUb(const MoeDistributeCombineTiling& tiling, uint32_t rowBytes, uint32_t size)
        : counts(tiling.info),
          sourceIndices(tiling.info.sourceIndices != 0 ? kSourceIndexReaderBytes : 0),
          ring(CommQuantMode(tiling.info) != 0 ? 0 : tiling.returnRing),
          chunk(ReturnChunkBytes(rowBytes, tiling.sendRows)),
          loader(CommQuantMode(tiling.info) != 0 ? ReturnLoaderUb(tiling, rowBytes, size).Bytes() : 0) {}
    MOE_FN uint32_t Bytes() const { return counts.Bytes() + sourceIndices + ring * InBlocks(chunk) + loader; }
};

// ---- direct/sum.h ----
constexpr uint32_t kReturnedRowsBytes = kChunkIntBytes;
// Bytes of a group of parts of rows; a row of a histogram [E] int32 fits too.
MOE_FN uint32_t SumGroupBytes(uint32_t experts, uint32_t pieces, uint32_t pieceBytes) {
    return Max(pieces * pieceBytes, PaddedIntBytes(experts));
}
// DirectSum, without Addends and WeightedSum: per addend its address, its weight, and with const experts how it is
// added; addends per token; groups of parts of rows. `size`: of an element of x.
struct DirectSumUb {
    uint32_t addresses, weights, lists, mix, groups, group;
    MOE_FN DirectSumUb(const MoeDistributeCombineTiling& tiling, uint32_t size)
        : addresses(SumEntries(tiling.info) * kWordPairBytes),
          weights(SumEntries(tiling.info) * kFloatBytes),
          lists(ChunkTokens(tiling.info) * kIntBytes),
          mix(tiling.info.alphaRank != 0 ? addresses : 0),
          groups(tiling.sumRing / tiling.sumGroup),
          group(SumGroupBytes(tiling.info.experts, tiling.sumGroup,
                              SumPieceBytes(tiling.info, HasPlainAddends(tiling), tiling.partElements, size))) {}
    MOE_FN uint32_t Bytes() const {
        return InBlocks(addresses) + InBlocks(weights) + InBlocks(lists) + InBlocks(mix) + groups * InBlocks(group);
    }
};

}  // namespace moe

#endif  // ASCEND_MOE_PROTOCOL_UB_H
