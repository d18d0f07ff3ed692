// The probes in which several cores of a rank write what one reader takes for whole: rows before a meeting, parts of
// one block, the pieces of an item of BatchWrite; and the times of meetings and of rows by their stride.
#ifndef ASCEND_MOE_PROBE_SHARED_H
#define ASCEND_MOE_PROBE_SHARED_H

#include "tiling.h"
#include "../common/contexts.h"
#include "../common/verdict.h"
#include "../common/wait.h"

namespace moe {

// What every probe of the bring-up is made of: its buffers, copies of blocks and rows, a wait, and the report.

class ProbeDevice {
public:
    // `inGm`: where the tiling lies there.
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
        const uint32_t share = tiling.nearRanks == 0 ? tiling.world : tiling.nearRanks;
        firstPeer_ = tiling.rank / share * share;
        peers_ = Min(share, tiling.world - firstPeer_);
        next_ = firstPeer_ + (tiling.rank - firstPeer_ + 1) % peers_;
        before_ = firstPeer_ + (tiling.rank - firstPeer_ + peers_ - 1) % peers_;
    }

protected:
    static constexpr uint32_t kRowBytes = 16 * 1024;
    static constexpr uint32_t kRowWords = kRowBytes / sizeof(uint32_t);
    static constexpr uint32_t kPieceBytes = 512, kPieceWords = kPieceBytes / sizeof(uint32_t);
    // Of a source rank in a peer's data area: the row, its flag, the answer to it, the block of kProbeAtomic.
    static constexpr uint64_t kFlagAt = kRowBytes, kAnswerAt = kFlagAt + 512, kAtomicAt = kAnswerAt + 512,
                              kSourceBytes = kAtomicAt + 512;

    __aicore__ inline GM_ADDR At(uint32_t owner, uint32_t source, uint64_t offset) const {
        return context_.data(owner) + source * kSourceBytes + offset;
    }
    __aicore__ inline void Set(uint32_t code, uint32_t where, uint32_t wanted, uint32_t seen) {
        if (code_ != 0) return;  // the first finding is kept
        code_ = code;
        where_ = where;
        wanted_ = wanted;
        seen_ = seen;
    }

    // Words of the state area from word `at` on that one copy may move: none crosses from one part of it into another,
    // the control block, what the peers write, and the board of this rank's cores. 0: that was all.
    __aicore__ inline uint32_t StatePiece(uint32_t at) const {
        constexpr uint32_t kControlWords = kErrorRecordOffset / sizeof(uint32_t);
        const uint32_t words = static_cast<uint32_t>(StateBytes(tiling_->world) / sizeof(uint32_t));
        const uint32_t board = static_cast<uint32_t>(VerdictOffset(tiling_->world, 0) / sizeof(uint32_t));
        return Min(kRowWords, (at < kControlWords ? kControlWords : at < board ? board : words) - at);
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
    // Loads a row; every word must be `value`. `where` goes into the report.
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
    // Polls until word 0 of the block is `value`; false at the deadline. `whole`: words that are older than both
    // the first and the last are a finding of their own. `from`: the rank that the report names.
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

    // In the workspace. Two sets of posts, so that no core overwrites what a slower one still reads; a third of
    // kProbeMeeting.
    static constexpr uint32_t kMeetingPosts = 0xFFFFFFFFu;
    __aicore__ inline uint64_t Post(uint32_t core, uint32_t round) const {
        return (static_cast<uint64_t>(round == kMeetingPosts ? 2 : round & 1) * kMaxCores + core) * kBlock;
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
    // even ones (direct). The cores meet as in the ops, and the last of them tells the reader. There each core waits
    // for that flag and checks the part of another core. No core leaves before the last meeting, whatever it has found:
    // meetings have no deadline.
    __aicore__ inline void Writers() {
        const uint32_t rank = tiling_->rank, cores = tiling_->cores, part = (core_ + 1) % cores;
        VerdictBoard board;
        BoardInit(board);
        for (uint32_t n = 1; n <= Min(tiling_->rounds, kProbeMeetings); ++n) {
            const bool push = n % 2 != 0;
            const uint32_t value = tiling_->nonce + n, reader = push ? next_ : before_, writer = push ? before_ : next_;
            StorePart(PartAt(push ? reader : rank, push, rank, core_), value);
            board.Meet(n - 1, Verdict());
            if (core_ == cores - 1) StoreBlock(At(reader, rank, kFlagAt), value);
            if (code_ != 0 || !Await(At(rank, writer, kFlagAt), value, writer)) continue;
            CheckPart(PartAt(push ? rank : writer, push, writer, part), value, part);
            StoreBlock(AnswerAt(writer, rank, core_), value);
            if (Await(AnswerAt(rank, reader, core_), value, reader)) ++done_;
        }
    }

    // A round: cores 0 and 1 store pieces of 4, 12 and 20 bytes in turn, which share blocks of 32 bytes: an entry or a
    // scale, a triple, and the part of a list. Then all cores meet, and both check all words.
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

    // An item of BatchWrite to each of the first peers behind this rank, filled by all cores; `rounds` says which size
    // and how many peers. A reader that sees an item's last block looks at all its blocks. One list a launch, as the
    // ops; the host begins no launch before all ranks have left the one before.
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

    // For each stride, one after another: the even cores store rows to the next rank, then the odd ones load them. The
    // cycles of each core, by stride, are in its report.
    __aicore__ inline void Strides() {
        const uint64_t spare = tiling_->world * kSourceBytes, room = tiling_->dataBytes - spare;
        const uint32_t lanes = (tiling_->cores + 1) / 2, words = ProbeStride(0) / sizeof(uint32_t);
        const uint32_t fit =
            static_cast<uint32_t>(room / (static_cast<uint64_t>(lanes) * ProbeStride(kProbeStrides - 1)));
        const uint32_t rows = Min(kProbeMoves, fit);
        uint32_t cycles[kProbeStrides] = {};
        for (uint32_t n = 0; n < 2 * kProbeStrides; ++n) {  // twice: the first time warms translations of addresses up
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

    // In the place of the report: a block of what this core has left in its state area.
    __aicore__ inline void Stamps() {
        constexpr uint32_t kBlocks = kStampWords / kBlockWords;
        const uint32_t block = (tiling_->rounds - 1) % (kStampedOps * kBlocks);
        GM_ADDR from = context_.state(tiling_->rank) + StampsOffset(tiling_->world, 1 + block / kBlocks, core_) +
                       static_cast<uint64_t>(block % kBlocks) * kBlock;
        const LocalTensor<uint32_t> words = LoadBlock(from);
        SyncFunc<HardEvent::MTE2_MTE3>();
        AscendC::DataCopy(report_[static_cast<uint64_t>(core_) * kBlockWords], words, kBlockWords);
        AscendC::PipeBarrier<PIPE_ALL>();
    }

    // Every core stores a block in the workspace, meets the others, in turn by SyncAll and as in the ops by a block
    // that it posts and all await, and must see all of this round. Then both kinds are timed, the second through the
    // board of the ops.
    __aicore__ inline void Meetings() {
        for (uint32_t n = 1; n <= tiling_->rounds; ++n) {
            const uint32_t value = tiling_->nonce + n;
            StoreBlock(workspace_ + Post(core_, n), value);
            AscendC::PipeBarrier<PIPE_ALL>();
            if (n % 2 != 0) {
                AscendC::SyncAll<true>();
            } else {
                StoreBlock(workspace_ + Post(core_, kMeetingPosts), value);
                for (uint32_t core = 0; core < tiling_->cores; ++core) {
                    if (code_ == 0) Await(workspace_ + Post(core, kMeetingPosts), value, tiling_->rank);
                }
            }
            for (uint32_t core = 0; core < tiling_->cores; ++core) {
                const uint32_t seen = LoadBlock(workspace_ + Post(core, n)).GetValue(0);
                if (seen != value) Set(kProbeDiffers, core, value, seen);
            }
            ++done_;
        }
        VerdictBoard board;
        BoardInit(board);
        const uint32_t times = Min(tiling_->rounds, kProbeMeetings - 1);
        board.Meet(times, Verdict());  // all begin together
        const int64_t start = AscendC::GetSystemCycle();
        for (uint32_t n = 0; n < times; ++n) board.Meet(n, Verdict());
        const int64_t between = AscendC::GetSystemCycle();
        for (uint32_t n = 0; n < times; ++n) AscendC::SyncAll<true>();
        cycles_ = static_cast<uint32_t>(AscendC::GetSystemCycle() - between);
        if (code_ == 0) where_ = static_cast<uint32_t>(between - start);
    }

private:
    // ---- parts of a row, one a core ----
    static constexpr uint32_t kPartBytes = 2 * kPieceBytes, kPartWords = kPartBytes / sizeof(uint32_t);

    // Behind the rows of the other probes: the parts of the ranks [pushed or not][source][core], and behind these the
    // answers, a block a core.
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
    // The board lies in the workspace behind the posts, a row a meeting: its marks are the launch's.
    __aicore__ inline void BoardInit(VerdictBoard& board) {
        GM_ADDR rows = workspace_ + kProbeBoardOffset;
        board.Init(*GetTPipePtr(), rows - VerdictOffset(tiling_->world, 0), tiling_->world, tiling_->nonce, core_,
                   tiling_->cores);
    }

    // ---- items of BatchWrite ----
    // Into the list in the workspace: the same bytes to the `i`-th rank behind this one.
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
    // As Await, but until both ends of the block have come, as readers of status blocks do.
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
