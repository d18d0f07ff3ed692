// Probes in which several cores of a rank write what one reader takes as a whole: rows before a core barrier, parts of
// one block, pieces of a BatchWrite item; and the times of core barriers and of rows by stride.
#ifndef ASCEND_MOE_PROBE_SHARED_H
#define ASCEND_MOE_PROBE_SHARED_H

#include "tiling.h"
#include "../common/contexts.h"
#include "../common/core_barrier.h"
#include "../common/status_wait.h"

namespace moe {

// Common parts of all probes: buffers, copies of blocks and rows, a wait, and the report.

class ProbeDevice {
public:
    // `inGm`: the tiling's address there.
    __aicore__ inline void Init(TPipe& pipe, const MoeProbeTiling& tiling, GM_ADDR report, GM_ADDR workspace,
                                GM_ADDR inGm) {
        tiling_ = &tiling;
        core_ = static_cast<uint32_t>(AscendC::GetBlockIdx());
        info_.world = tiling.world;
        info_.rank = tiling.rank;
        info_.contextKind = tiling.contextKind;
        info_.dataBytes = tiling.dataBytes;
        context_.Init(AscendC::GetHcclContext<0>(), info_);
        link_.Open(context_, core_, inGm, tiling.mc2);
        report_.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(report), tiling.cores * kBlockWords);
        workspace_ = workspace;
        pipe.InitBuffer(blockBuf_, kBlock);
        pipe.InitBuffer(seenBuf_, kBlock);
        pipe.InitBuffer(rowBuf_, kRowBytes);
        pipe.InitBuffer(backBuf_, kRowBytes);
        pipe.InitBuffer(bitsBuf_, kRowWords / 8);
        pipe.InitBuffer(inQueue_, kMostRing, kPieceBytes);
        pipe.InitBuffer(outQueue_, kMostRing, kPieceBytes);
        const uint32_t share = tiling.intraNodeRanks == 0 ? tiling.world : tiling.intraNodeRanks;
        firstPeer_ = tiling.rank / share * share;
        peers_ = Min(share, tiling.world - firstPeer_);
        next_ = firstPeer_ + (tiling.rank - firstPeer_ + 1) % peers_;
        before_ = firstPeer_ + (tiling.rank - firstPeer_ + peers_ - 1) % peers_;
    }

protected:
    static constexpr uint32_t kRowBytes = 16 * 1024;
    static constexpr uint32_t kRowWords = kRowBytes / sizeof(uint32_t);
    static constexpr uint32_t kPieceBytes = 512, kPieceWords = kPieceBytes / sizeof(uint32_t);
    // Per source rank in a peer's data area: the row, its flag, its answer, the block of kProbeAtomic.
    static constexpr uint64_t kFlagAt = kRowBytes, kAnswerAt = kFlagAt + 512, kAtomicAt = kAnswerAt + 512,
                              kSourceBytes = kAtomicAt + 512;

    __aicore__ inline GM_ADDR At(uint32_t owner, uint32_t source, uint64_t offset) const {
        return context_.data(owner) + source * kSourceBytes + offset;
    }
    __aicore__ inline void Set(uint32_t code, uint32_t where, uint32_t wanted, uint32_t seen) {
        if (code_ != 0) return;  // the first finding is reported
        code_ = code;
        where_ = where;
        wanted_ = wanted;
        seen_ = seen;
    }

    // Words of the state area from word `at` on that one copy may move: no copy crosses the borders of the control
    // block, the peers' part and this rank's core barrier. Returns 0 at the end.
    __aicore__ inline uint32_t StatePiece(uint32_t at) const {
        constexpr uint32_t kControlWords = kErrorRecordOffset / sizeof(uint32_t);
        const uint32_t words = static_cast<uint32_t>(StateBytes(tiling_->world) / sizeof(uint32_t));
        const uint32_t barrier = static_cast<uint32_t>(CoreBarrierOffset(tiling_->world, 0) / sizeof(uint32_t));
        return Min(kRowWords, (at < kControlWords ? kControlWords : at < barrier ? barrier : words) - at);
    }

    // ---- moving blocks and rows ----

    // Stores a block whose words are all `value`.
    __aicore__ inline void StoreBlock(GM_ADDR address, uint32_t value) {
        LocalTensor<uint32_t> block = blockBuf_.Get<uint32_t>();
        SyncFunc<HardEvent::MTE3_S>();
        for (uint32_t i = 0; i < kBlockWords; ++i) block.SetValue(i, value);
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<uint32_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(address), kBlockWords);
        AscendC::DataCopy(target, block, kBlockWords);
    }
    __aicore__ inline LocalTensor<uint32_t> LoadBlock(GM_ADDR address) {
        GlobalTensor<uint32_t> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(address), kBlockWords);
        LocalTensor<uint32_t> seen = seenBuf_.Get<uint32_t>();
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(seen, source, kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        return seen;
    }
    __aicore__ inline void StoreRow(GM_ADDR address, uint32_t value) {
        LocalTensor<int32_t> row = rowBuf_.Get<int32_t>();
        SyncFunc<HardEvent::MTE3_V>();
        AscendC::Duplicate(row, static_cast<int32_t>(value), kRowWords);
        SyncFunc<HardEvent::V_MTE3>();
        GlobalTensor<int32_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(address), kRowWords);
        AscendC::DataCopy(target, row, kRowWords);
    }
    // Loads a row whose words must all be `value`. `where` goes into the report.
    __aicore__ inline void CheckRow(GM_ADDR address, uint32_t value, uint32_t where) {
        GlobalTensor<uint32_t> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(address), kRowWords);
        LocalTensor<uint32_t> back = backBuf_.Get<uint32_t>();
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(back, source, kRowWords);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t i = 0; i < kRowWords; ++i) {
            if (back.GetValue(i) == value) continue;
            Set(kProbeDiffers, where, value, back.GetValue(i));
            return;
        }
    }
    // Polls until word 0 of the block is `value`; returns false at the deadline. `whole`: words older than both the
    // first and the last are a separate finding. `from`: the rank for the report.
    __aicore__ inline bool Await(GM_ADDR address, uint32_t value, uint32_t from, bool whole = false) {
        const int64_t start = AscendC::GetSystemCycle();
        while (AscendC::GetSystemCycle() - start <= static_cast<int64_t>(tiling_->deadlineCycles)) {
            LocalTensor<uint32_t> seen = LoadBlock(address);
            const uint32_t first = seen.GetValue(0);
            const uint32_t last = seen.GetValue(kBlockWords - 1);
            const uint32_t older = static_cast<int32_t>(last - first) < 0 ? last : first;
            for (uint32_t i = 0; whole && i < kBlockWords; ++i) {
                if (static_cast<int32_t>(seen.GetValue(i) - older) < 0) Set(kProbeDiffers, i, older, seen.GetValue(i));
            }
            if (first == value) return true;
            MOE_POLL_HINT();
        }
        Set(kProbeTimeout, from, value - tiling_->nonce, 0);
        return false;
    }

    // In the workspace: two sets of blocks, so that no core overwrites what a slower one still reads, and a third set
    // for kProbeCoreBarrier.
    static constexpr uint32_t kCoreBarrierBlocks = 0xFFFFFFFFu;
    __aicore__ inline uint64_t BarrierBlock(uint32_t core, uint32_t round) const {
        return (static_cast<uint64_t>(round == kCoreBarrierBlocks ? 2 : round & 1) * kMaxCores + core) * kBlock;
    }

    __aicore__ inline void Report() {
        AscendC::PipeBarrier<PIPE_ALL>();
        LocalTensor<uint32_t> block = blockBuf_.Get<uint32_t>();
        for (uint32_t i = 0; i < kBlockWords; ++i) block.SetValue(i, 0u);
        block.SetValue(kPrCode, code_ == 0 ? static_cast<uint32_t>(kProbePassed) : code_);
        block.SetValue(kPrWhere, where_);
        block.SetValue(kPrWanted, wanted_);
        block.SetValue(kPrSeen, seen_);
        block.SetValue(kPrDone, done_);
        block.SetValue(kPrCycles, cycles_);
        block.SetValue(kPrCores, tiling_->cores);
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(report_[static_cast<uint64_t>(core_) * kBlockWords], block, kBlockWords);
        AscendC::PipeBarrier<PIPE_ALL>();
    }

    const MoeProbeTiling* tiling_ = nullptr;
    MoeDistributeInfo info_ = MoeDistributeInfo();
    WindowContext context_;
    RdmaLink link_;
    GlobalTensor<uint32_t> report_;
    GM_ADDR workspace_ = nullptr;
    UbBuf blockBuf_, seenBuf_, rowBuf_, backBuf_, bitsBuf_;
    AscendC::TQue<AscendC::QuePosition::VECIN, kMostRing> inQueue_;
    AscendC::TQue<AscendC::QuePosition::VECOUT, kMostRing> outQueue_;
    uint32_t firstPeer_ = 0, peers_ = 1, next_ = 0, before_ = 0;  // of this server
    uint32_t core_ = 0;
    uint32_t code_ = 0, where_ = 0, wanted_ = 0, seen_ = 0, done_ = 0, cycles_ = 0;
};

class SharedProbes : public ProbeDevice {
protected:
    // A round: every core stores its part of a row, into the next rank's area in odd rounds (window), into its own in
    // even ones (direct). After a core barrier as in the ops, the last core notifies the reader. There each core waits
    // for the flag and checks another core's part. No core leaves before the last core barrier, whatever it has found:
    // barriers have no deadline.
    __aicore__ inline void Writers() {
        const uint32_t rank = tiling_->rank, cores = tiling_->cores, part = (core_ + 1) % cores;
        CoreBarrier barrier;
        BarrierInit(barrier);
        for (uint32_t n = 1; n <= Min(tiling_->rounds, kProbeCoreBarriers); ++n) {
            const bool push = n % 2 != 0;
            const uint32_t value = tiling_->nonce + n, reader = push ? next_ : before_, writer = push ? before_ : next_;
            StorePart(PartAt(push ? reader : rank, push, rank, core_), value);
            barrier.ArriveAndWait(n - 1, OpStatus());
            if (core_ == cores - 1) StoreBlock(At(reader, rank, kFlagAt), value);
            if (code_ != 0 || !Await(At(rank, writer, kFlagAt), value, writer)) continue;
            CheckPart(PartAt(push ? rank : writer, push, writer, part), value, part);
            StoreBlock(AnswerAt(writer, rank, core_), value);
            if (Await(AnswerAt(rank, reader, core_), value, reader)) ++done_;
        }
    }

    // A round: cores 0 and 1 store pieces of 4, 12 and 20 bytes in turn, which share blocks of 32 bytes, like an entry
    // or a scale, a source index, and a part of a list. After a core barrier both check all words.
    __aicore__ inline void Neighbours() {
        for (uint32_t n = 1; n <= tiling_->rounds; ++n) {
            const uint32_t value = tiling_->nonce + n * kNeighbourWords;
            __gm__ uint32_t* area = reinterpret_cast<__gm__ uint32_t*>(context_.data(tiling_->rank)) +
                                    n % 2 * kNeighbourWords;  // the other one is still read
            for (uint32_t kind = 0, at = 1; kind < kNeighbourKinds; ++kind) {
                const uint32_t words = 2 * kind + 1;  // of a piece
                for (uint32_t i = 0; i < kNeighbourPieces; ++i, at += words) {
                    if (core_ == i % 2) StorePiece(area + at, value + at, words);
                }
            }
            AscendC::PipeBarrier<PIPE_ALL>();
            AscendC::SyncAll<true>();
            if (core_ < 2) CheckWords(area, value);
            ++done_;
        }
    }

    // A BatchWrite item to each of the first peers after this rank, filled by all cores; `rounds` selects the size and
    // the number of peers. A reader that sees an item's last block checks all its blocks. One list per launch, as in
    // the ops; the host starts no launch before all ranks have left the previous one.
    __aicore__ inline void Batch() {
        const uint32_t world = tiling_->world, rank = tiling_->rank, cores = tiling_->cores, value = tiling_->nonce;
        const uint64_t region = tiling_->dataBytes / world / kRowBytes * kRowBytes;
        const uint64_t asked = static_cast<uint64_t>(kMiB) << ((tiling_->rounds - 1) % kProbeItemSizes);
        const uint64_t bytes = asked < region ? asked : region;
        const uint32_t pieces = static_cast<uint32_t>(bytes / kRowBytes);
        const uint32_t peers = 1 + (tiling_->rounds - 1) / kProbeItemSizes % (world - 1);
        for (uint32_t piece = core_; piece < pieces; piece += cores) {
            StoreRow(context_.staging() + static_cast<uint64_t>(piece) * kRowBytes, value);
        }
        for (uint32_t i = core_; i < peers; i += cores) PutItem(i, region, bytes);
        AscendC::PipeBarrier<PIPE_ALL>();
        AscendC::SyncAll<true>();
        if (core_ == 0) link_.Post(workspace_, peers);
        StoreFill(value);
        for (uint32_t i = 1; i <= peers; ++i) {
            const uint32_t source = (rank + world - i) % world;
            GM_ADDR item = context_.data(rank) + source * region;
            if (!AwaitLast(item + bytes - kBlock, value, source)) continue;
            for (uint32_t piece = core_; piece < pieces; piece += cores) {
                CheckFilled(item + static_cast<uint64_t>(piece) * kRowBytes, value, piece);
            }
            ++done_;
        }
        if (code_ == 0) where_ = static_cast<uint32_t>(bytes / kRowBytes);
    }

    // For each stride in turn: the even cores store rows to the next rank, then the odd ones load them. Each core's
    // cycles, by stride, are in its report.
    __aicore__ inline void Strides() {
        const uint64_t spare = tiling_->world * kSourceBytes, room = tiling_->dataBytes - spare;
        const uint32_t lanes = (tiling_->cores + 1) / 2, words = ProbeStride(0) / sizeof(uint32_t);
        const uint32_t fit =
            static_cast<uint32_t>(room / (static_cast<uint64_t>(lanes) * ProbeStride(kProbeStrides - 1)));
        const uint32_t rows = Min(kProbeMoves, fit);
        uint32_t cycles[kProbeStrides] = {};
        for (uint32_t n = 0; n < 2 * kProbeStrides; ++n) {  // twice: the first time warms up address translations
            const uint32_t s = n % kProbeStrides, value = tiling_->nonce + n, stride = ProbeStride(s);
            GM_ADDR first = context_.data(next_) + spare + static_cast<uint64_t>(core_ / 2) * rows * stride;
            for (uint32_t half = 0; half < 2; ++half) {
                FillRow(value);
                AscendC::PipeBarrier<PIPE_ALL>();
                AscendC::SyncAll<true>();
                if (core_ % 2 != half) continue;
                const int64_t start = AscendC::GetSystemCycle();
                for (uint32_t i = 0; i < rows; ++i) {
                    GM_ADDR row = first + static_cast<uint64_t>(i) * stride;
                    half == 0 ? RowOut(row, words) : RowIn(row, words);
                }
                AscendC::PipeBarrier<PIPE_ALL>();
                cycles[s] = static_cast<uint32_t>(AscendC::GetSystemCycle() - start);
                if (half == 1) CheckLoaded(words, value, stride);
            }
        }
        done_ = kProbeStrides;
        if (code_ != 0) return;
        where_ = rows;
        wanted_ = cycles[0];
        seen_ = cycles[1];
        cycles_ = cycles[2];
    }

    // Core 0 zeroes the state area.
    __aicore__ inline void Clear() {
        if (core_ != 0) return;
        FillRow(0);
        for (uint32_t at = 0, count = StatePiece(0); count > 0; at += count, count = StatePiece(at)) {
            RowOut(context_.state(tiling_->rank) + at * sizeof(uint32_t), count);
            ++done_;
        }
    }

    // Instead of the report: a block that this core has left in its state area.
    __aicore__ inline void Timestamps() {
        constexpr uint32_t kBlocks = kTimestampWords / kBlockWords;
        const uint32_t block = (tiling_->rounds - 1) % (kTimestampedOps * kBlocks);
        GM_ADDR from = context_.state(tiling_->rank) + TimestampsOffset(tiling_->world, 1 + block / kBlocks, core_) +
                       static_cast<uint64_t>(block % kBlocks) * kBlock;
        const LocalTensor<uint32_t> words = LoadBlock(from);
        AscendC::DataCopy(report_[static_cast<uint64_t>(core_) * kBlockWords], words, kBlockWords);
        AscendC::PipeBarrier<PIPE_ALL>();
    }

    // Every core stores a block in the workspace, synchronizes alternately by SyncAll and, as in the ops, by blocks
    // that all cores poll, and must see all blocks of this round. Then both kinds are timed, the second through
    // CoreBarrier.
    __aicore__ inline void CoreBarriers() {
        for (uint32_t n = 1; n <= tiling_->rounds; ++n) {
            const uint32_t value = tiling_->nonce + n;
            StoreBlock(workspace_ + BarrierBlock(core_, n), value);
            AscendC::PipeBarrier<PIPE_ALL>();
            if (n % 2 != 0) {
                AscendC::SyncAll<true>();
            } else {
                StoreBlock(workspace_ + BarrierBlock(core_, kCoreBarrierBlocks), value);
                for (uint32_t core = 0; core < tiling_->cores; ++core) {
                    if (code_ == 0) Await(workspace_ + BarrierBlock(core, kCoreBarrierBlocks), value, tiling_->rank);
                }
            }
            for (uint32_t core = 0; core < tiling_->cores; ++core) {
                const uint32_t seen = LoadBlock(workspace_ + BarrierBlock(core, n)).GetValue(0);
                if (seen != value) Set(kProbeDiffers, core, value, seen);
            }
            ++done_;
        }
        CoreBarrier barrier;
        BarrierInit(barrier);
        const uint32_t times = Min(tiling_->rounds, kProbeCoreBarriers - 1);
        barrier.ArriveAndWait(times, OpStatus());  // all begin together
        const int64_t start = AscendC::GetSystemCycle();
        for (uint32_t n = 0; n < times; ++n) barrier.ArriveAndWait(n, OpStatus());
        const int64_t between = AscendC::GetSystemCycle();
        for (uint32_t n = 0; n < times; ++n) AscendC::SyncAll<true>();
        cycles_ = static_cast<uint32_t>(AscendC::GetSystemCycle() - between);
        if (code_ == 0) where_ = static_cast<uint32_t>(between - start);
    }

private:
    // ---- parts of a row, one a core ----
    static constexpr uint32_t kPartBytes = 2 * kPieceBytes, kPartWords = kPartBytes / sizeof(uint32_t);

    // After the other probes' rows: the parts of the ranks [pushed or not][source][core], then the answers, a block per
    // core.
    __aicore__ inline GM_ADDR PartAt(uint32_t owner, bool push, uint32_t source, uint32_t core) const {
        const uint64_t row = (push ? 0 : tiling_->world) + source;
        return context_.data(owner) + tiling_->world * kSourceBytes + (row * kMaxCores + core) * kPartBytes;
    }
    __aicore__ inline GM_ADDR AnswerAt(uint32_t owner, uint32_t source, uint32_t core) const {
        return PartAt(owner, false, tiling_->world, 0) + (static_cast<uint64_t>(source) * kMaxCores + core) * kBlock;
    }
    __aicore__ inline void StorePart(GM_ADDR address, uint32_t value) {
        FillRow(value);
        RowOut(address, kPartWords);
    }
    __aicore__ inline void CheckPart(GM_ADDR address, uint32_t value, uint32_t part) {
        RowIn(address, kPartWords);
        SyncFunc<HardEvent::MTE2_S>();
        CheckLoaded(kPartWords, value, part);
    }

    // ---- rows of any length ----
    __aicore__ inline void FillRow(uint32_t value) {
        SyncFunc<HardEvent::MTE3_V>();
        AscendC::Duplicate(rowBuf_.Get<int32_t>(), static_cast<int32_t>(value), kRowWords);
        SyncFunc<HardEvent::V_MTE3>();
    }
    __aicore__ inline void RowOut(GM_ADDR address, uint32_t words) {
        GlobalTensor<uint32_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(address), words);
        AscendC::DataCopy(target, rowBuf_.Get<uint32_t>(), words);
    }
    __aicore__ inline void RowIn(GM_ADDR address, uint32_t words) {
        GlobalTensor<uint32_t> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(address), words);
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::PipeBarrier<PIPE_MTE2>();
        AscendC::DataCopy(backBuf_.Get<uint32_t>(), source, words);
    }
    __aicore__ inline void CheckLoaded(uint32_t words, uint32_t value, uint32_t where) {
        const LocalTensor<uint32_t> back = backBuf_.Get<uint32_t>();
        for (uint32_t i = 0; i < words; ++i) {
            if (back.GetValue(i) != value) Set(kProbeDiffers, where, value, back.GetValue(i));
        }
    }

    // ---- neighbours in a block ----
    static constexpr uint32_t kNeighbourKinds = 3, kNeighbourPieces = 14;
    static constexpr uint32_t kNeighbourWords = 128;  // 1 + 14 * (1 + 3 + 5), and the rest of the last block
    static_assert(1 + kNeighbourPieces * 9 <= kNeighbourWords, "an area holds all pieces");

    __aicore__ inline void StorePiece(__gm__ uint32_t* address, uint32_t value, uint32_t words) {
        LocalTensor<uint32_t> block = blockBuf_.Get<uint32_t>();
        SyncFunc<HardEvent::MTE3_S>();
        for (uint32_t i = 0; i < words; ++i) block.SetValue(i, value + i);
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<uint32_t> target;
        target.SetGlobalBuffer(address, words);
        CopyOut(target, block, words);
    }
    // Word i of the area is value + i, between the borders.
    __aicore__ inline void CheckWords(__gm__ uint32_t* area, uint32_t value) {
        RowIn(reinterpret_cast<GM_ADDR>(area), kNeighbourWords);
        SyncFunc<HardEvent::MTE2_S>();
        const LocalTensor<uint32_t> back = backBuf_.Get<uint32_t>();
        for (uint32_t i = 1; i < 1 + kNeighbourPieces * 9; ++i) {
            if (back.GetValue(i) != value + i) Set(kProbeDiffers, i, value + i, back.GetValue(i));
        }
    }

protected:
    // The core barrier's rows in the workspace, after the blocks; its tags are the launch's.
    __aicore__ inline void BarrierInit(CoreBarrier& barrier) {
        GM_ADDR rows = workspace_ + kProbeBarrierOffset;
        barrier.Init(*GetTPipePtr(), rows - CoreBarrierOffset(tiling_->world, 0), tiling_->world, tiling_->nonce, core_,
                     tiling_->cores);
    }

    // ---- items of BatchWrite ----
    // Into the list in the workspace: the same bytes to the `i`-th rank after this one.
    __aicore__ inline void PutItem(uint32_t i, uint64_t region, uint64_t bytes) {
        BatchItem item;
        item.peer = (tiling_->rank + 1 + i) % tiling_->world;
        item.local = reinterpret_cast<uint64_t>(context_.staging());
        item.remote = reinterpret_cast<uint64_t>(context_.data(item.peer) + tiling_->rank * region);
        item.bytes = bytes;
        item.type = 0;
        StoreItem(workspace_ + i * kBlock, item);
    }
    __aicore__ inline void StoreItem(GM_ADDR address, const BatchItem& item) {
        SyncFunc<HardEvent::MTE3_S>();
        WindowSender::SetItem(blockBuf_.Get<uint64_t>(), item);
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<uint32_t> list;
        list.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(address), kBlockWords);
        AscendC::DataCopy(list, blockBuf_.Get<uint32_t>(), kBlockWords);
    }
    // As Await, but until both ends of the block have come, as for status blocks.
    __aicore__ inline bool AwaitLast(GM_ADDR address, uint32_t value, uint32_t from) {
        if (!Await(address, value, from)) return false;
        const int64_t start = AscendC::GetSystemCycle();
        while (LoadBlock(address).GetValue(kBlockWords - 1) != value) {
            if (AscendC::GetSystemCycle() - start > static_cast<int64_t>(tiling_->deadlineCycles)) {
                Set(kProbeTimeout, from, value - tiling_->nonce, 0);
                return false;
            }
            MOE_POLL_HINT();
        }
        return true;
    }
    // What CheckFilled compares with: rowBuf_, whose rows have left.
    __aicore__ inline void StoreFill(uint32_t value) {
        FillRow(value);
        SyncFunc<HardEvent::V_S>();
    }
    // Loads a row whose words must all be `value`; `where` goes into the report.
    __aicore__ inline void CheckFilled(GM_ADDR address, uint32_t value, uint32_t where) {
        RowIn(address, kRowWords);
        SyncFunc<HardEvent::MTE2_V>();
        const LocalTensor<uint8_t> bits = bitsBuf_.Get<uint8_t>();
        AscendC::Compare(bits, backBuf_.Get<int32_t>(), rowBuf_.Get<int32_t>(), AscendC::CMPMODE::EQ, kRowWords);
        SyncFunc<HardEvent::V_S>();
        const LocalTensor<uint32_t> words = bits.ReinterpretCast<uint32_t>();
        for (uint32_t i = 0; i < kRowWords / 32; ++i) {
            if (words.GetValue(i) == 0xFFFFFFFFu) continue;
            CheckLoaded(kRowWords, value, where);
            return;
        }
    }
};

}  // namespace moe

#endif  // ASCEND_MOE_PROBE_SHARED_H
