// What every probe of the bring-up is made of: its buffers, copies of blocks and rows, a wait, and the report.
#ifndef ASCEND_MOE_PROBE_DEVICE_H
#define ASCEND_MOE_PROBE_DEVICE_H

#include "tiling.h"
#include "../common/contexts.h"
#include "../common/wait.h"

namespace moe {

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

}  // namespace moe

#endif  // ASCEND_MOE_PROBE_DEVICE_H
