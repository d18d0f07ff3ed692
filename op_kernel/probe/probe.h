// The probes. Each tests one assumption of the operators about the hardware or HCCL, with the code that the
// operators use for it. They write to data areas only, which HCCL overwrites anyway: a communicator stays
// fresh.
//
// mode            | function      | which cores  | reads                 | writes                 | who meets
// ----------------+---------------+--------------+-----------------------+------------------------+----------
// all, first      | WindowContext | all          | the context           | nothing; a mismatch is |
//                 | :: Check      |              |                       | the report             |
// kProbeContext   |               |              | nothing else          | nothing else           |
// kProbeStore     | StoreAndRead  | all: a share | rows and flags that   | a row of 16 KiB and a  | all ranks
//                 |               | of the peers | peers stored here;    | flag to each peer      |
//                 |               |              | its own rows in the   |                        |
//                 |               |              | peers' areas          |                        |
// kProbeAtomic    | Atomic        | core 0       | blocks from the rank  | a block a round to the | all ranks
//                 |               | writes, core | before                | next rank              |
//                 |               | 1 reads      |                       |                        |
// kProbeOrder     | Order         | core 0       | rows and flags from   | core 0: a row, then    | all
//                 |               | writes, core | the rank before; core | its flag, to the next  | ranks,
//                 |               | 1 reads      | 0: answers            | rank; core 1: an       | each
//                 |               |              |                       | answer to the rank     | round
//                 |               |              |                       | before                 |
// kProbeSyncAll   | SyncAllRounds | all          | workspace [2][64]     | workspace: a block a   | cores of
//                 |               |              | blocks                | round                  | the rank,
//                 |               |              |                       |                        | each
//                 |               |              |                       |                        | round
// kProbeCycles    | Cycles        | core 0       | the cycle counter     | nothing                |
// kProbeZeroState | ZeroState     | core 0       | the state area        | nothing                |
// all, last       | Report        | all          | nothing               | report [cores] blocks  |
//
// "Meets" here: a core waits for a flag, block or answer of another rank. A core without work reports
// "passed".
#ifndef ASCEND_MOE_PROBE_PROBE_H
#define ASCEND_MOE_PROBE_PROBE_H

#include "tiling.h"
#include "../common/contexts.h"
#include "../common/wait.h"

namespace moe {

class Probe {
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
    }

    __aicore__ inline void Process() {
        const ContextMismatch mismatch = context_.Check();
        if (mismatch.field != kContextFieldCount) {
            Set(kProbeMismatch, mismatch.field, mismatch.ours, mismatch.theirs);
        } else if (tiling_->mode == kProbeStore) {
            StoreAndRead();
        } else if (tiling_->mode == kProbeAtomic) {
            Atomic();
        } else if (tiling_->mode == kProbeOrder) {
            Order();
        } else if (tiling_->mode == kProbeSyncAll) {
            SyncAllRounds();
        } else if (tiling_->mode == kProbeCycles) {
            Cycles();
        } else if (tiling_->mode == kProbeZeroState) {
            ZeroState();
        }
        Report();
        link_.Close();
    }

private:
    static constexpr uint32_t kRowBytes = 16 * 1024;
    static constexpr uint32_t kRowWords = kRowBytes / sizeof(uint32_t);
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
    // Polls until word 0 of the block is `value`; false at the deadline. `whole`: words that differ from word
    // 0 are a finding of their own. `from`: the rank that the report names.
    __aicore__ inline bool Await(GM_ADDR address, uint32_t value, uint32_t from, bool whole = false) {
        const int64_t start = AscendC::GetSystemCycle();
        while (AscendC::GetSystemCycle() - start <= static_cast<int64_t>(tiling_->deadlineCycles)) {
            LocalTensor<uint32_t> seen = LoadBlock(address);
            const uint32_t first = seen.GetValue(0);
            for (uint32_t i = 1; whole && i < kBlockWords; ++i) {
                if (seen.GetValue(i) != first) Set(kProbeDiffers, i, first, seen.GetValue(i));
            }
            if (first == value) return true;
            MOE_POLL_HINT();
        }
        Set(kProbeTimeout, from, value - tiling_->nonce, 0);
        return false;
    }

    // ---- the probes ----

    // For this core's share of the peers: stores a row and its flag to each peer; then checks the row that
    // the peer has stored here, and reads its own row back from there.
    __aicore__ inline void StoreAndRead() {
        const uint32_t rank = tiling_->rank, world = tiling_->world;
        for (uint32_t peer = core_; peer < world; peer += tiling_->cores) {
            StoreRow(At(peer, rank, 0), RowValue(rank, peer));
            AscendC::PipeBarrier<PIPE_ALL>();
            StoreBlock(At(peer, rank, kFlagAt), tiling_->nonce);
        }
        for (uint32_t peer = core_; peer < world; peer += tiling_->cores) {
            if (!Await(At(rank, peer, kFlagAt), tiling_->nonce, peer)) return;
            CheckRow(At(rank, peer, 0), RowValue(peer, rank), peer);
            CheckRow(At(peer, rank, 0), RowValue(rank, peer), peer);
            ++done_;
        }
    }
    __aicore__ inline uint32_t RowValue(uint32_t source, uint32_t owner) const {
        return tiling_->nonce * 2654435761u + source * 1000003u + owner;
    }

    // Core 0 writes blocks of equal words to the next rank; core 1 looks at the blocks of the rank before
    // until the last round has come.
    __aicore__ inline void Atomic() {
        const uint32_t world = tiling_->world, rank = tiling_->rank;
        const uint32_t next = (rank + 1) % world, before = (rank + world - 1) % world;
        if (core_ == 0) {
            for (uint32_t n = 1; n <= tiling_->rounds; ++n) {
                StoreBlock(At(next, rank, kAtomicAt), tiling_->nonce + n);
            }
            done_ = tiling_->rounds;
        } else if (core_ == 1) {
            Await(At(rank, before, kAtomicAt), tiling_->nonce + tiling_->rounds, before, true);
            ++done_;
        }
    }
    // A round: core 0 stores a row, drains, stores the flag and awaits the answer. Core 1 awaits the flag,
    // checks the row and answers, so that no row is overwritten while it is read.
    __aicore__ inline void Order() {
        const uint32_t world = tiling_->world, rank = tiling_->rank;
        const uint32_t next = (rank + 1) % world, before = (rank + world - 1) % world;
        for (uint32_t n = 1; n <= tiling_->rounds; ++n) {
            const uint32_t value = tiling_->nonce + n;
            if (core_ == 0) {
                StoreRow(At(next, rank, 0), value);
                AscendC::PipeBarrier<PIPE_ALL>();
                StoreBlock(At(next, rank, kFlagAt), value);
                if (!Await(At(rank, next, kAnswerAt), value, next)) return;
            } else if (core_ == 1) {
                if (!Await(At(rank, before, kFlagAt), value, before)) return;
                CheckRow(At(rank, before, 0), value, before);
                StoreBlock(At(before, rank, kAnswerAt), value);
            }
            ++done_;
        }
    }

    // Every core stores a block in the workspace, meets the others, and must see all of this round.
    __aicore__ inline void SyncAllRounds() {
        for (uint32_t n = 1; n <= tiling_->rounds; ++n) {
            const uint32_t value = tiling_->nonce + n;
            StoreBlock(workspace_ + Post(core_, n), value);
            AscendC::PipeBarrier<PIPE_ALL>();
            AscendC::SyncAll<true>();
            for (uint32_t core = 0; core < tiling_->cores; ++core) {
                const uint32_t seen = LoadBlock(workspace_ + Post(core, n)).GetValue(0);
                if (seen != value) Set(kProbeDiffers, core, value, seen);
            }
            ++done_;
        }
    }
    // Two sets of posts, so that no core overwrites what a slower one still reads.
    __aicore__ inline uint64_t Post(uint32_t core, uint32_t round) const {
        return (static_cast<uint64_t>(round & 1) * kMaxCores + core) * kBlock;
    }

    // Spins for deadlineCycles cycles; the host compares them with its own clock.
    __aicore__ inline void Cycles() {
        if (core_ != 0) return;
        const int64_t start = AscendC::GetSystemCycle();
        int64_t passed = 0;
        while (passed < static_cast<int64_t>(tiling_->deadlineCycles)) {
            MOE_POLL_HINT();
            passed = AscendC::GetSystemCycle() - start;
        }
        cycles_ = static_cast<uint32_t>(passed);
        done_ = 1;
    }

    // Core 0 reads the state area that the operators use.
    __aicore__ inline void ZeroState() {
        if (core_ != 0) return;
        const uint32_t words = static_cast<uint32_t>(StateBytes(tiling_->world) / sizeof(uint32_t));
        constexpr uint32_t kControlWords = kErrorRecordOffset / sizeof(uint32_t);
        for (uint32_t at = 0, count = kControlWords; at < words; at += count, count = Min(kRowWords, words - at)) {
            GlobalTensor<uint32_t> source;
            source.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context_.state(tiling_->rank)) + at, count);
            LocalTensor<uint32_t> back = backBuf_.Get<uint32_t>();
            SyncFunc<HardEvent::S_MTE2>();
            AscendC::DataCopy(back, source, count);
            SyncFunc<HardEvent::MTE2_S>();
            for (uint32_t i = 0; i < count; ++i) {
                if (back.GetValue(i) != 0) Set(kProbeDiffers, (at + i) * 4, 0, back.GetValue(i));
            }
            ++done_;
        }
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
    UbBuf blockBuf_, seenBuf_, rowBuf_, backBuf_;
    uint32_t core_ = 0;
    uint32_t code_ = 0, where_ = 0, wanted_ = 0, seen_ = 0, done_ = 0, cycles_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_PROBE_PROBE_H
