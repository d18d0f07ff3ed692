// The probes. Each tests one assumption about the hardware or HCCL, with the code that the operators use for it. Of the
// windows they write data areas and windowsOut only, which HCCL overwrites anyway, so a communicator stays new.
// kProbeClear and kProbeTimestamps are no probes: one resets a communicator, the other reports timestamps.
//
// mode             | function      | which cores    | reads                | writes                      | which cores
//                  |               |                |                      |                             | synchronize
// -----------------+---------------+----------------+----------------------+-----------------------------+-------------
// all, first       | WindowContext | all            | the context          | nothing; a mismatch is the  |
//                  | :: Check      |                |                      | report                      |
// kProbeContext    | Windows       | all            | the context, by MTE2 | nothing                     |
// kProbeStore      | StoreAndRead  | all: a share   | rows, flags, answers | a row of 16 KiB, a flag and | its peers
//                  |               | of the peers   | that peers stored    | an answer to each peer;     |
//                  |               |                | here; its own rows   | twice, other values         |
//                  |               |                | in the peers' areas  |                             |
// kProbeAtomic     | Atomic        | core 0 writes, | blocks from the rank | a block a round to the next | rank before
//                  |               | core 1 reads   | before               | rank                        |
// kProbeOrder      | Order         | core 0 writes, | rows and flags from  | core 0: a row, then its     | next, before
//                  |               | core 1 reads   | the rank before;     | flag, to the next rank;     | each round
//                  |               |                | core 0: answers      | core 1: an answer to the    |
//                  |               |                |                      | rank before                 |
// kProbeCore-      | CoreBarriers  | all            | workspace [3][64]    | workspace: a block a round; | cores of the
// Barrier          |               |                | blocks; the core     | every other round another,  | rank, each
//                  |               |                | barriers [256][64]   | when the first has drained; | round
//                  |               |                | behind them          | the core barrier            |
// kProbeCycles     | Cycles        | core 0         | the cycle counter    | nothing                     |
// kProbeZeroState  | ZeroState     | core 0         | the state area       | nothing                     |
// kProbePull       | Pull          | core 0 writes, | core 1: a row, then  | core 0: a row into its own  | next, before
//                  |               | core 1 reads   | 64 to time them, of  | area, a flag to before, 64  | each round
//                  |               |                | the next rank's area | rows to next; 1: an answer  |
// kProbeRelay      | Relay         | as             | core 1: the flag;    | core 1: a block in the      | core 1; next
//                  |               | kProbeOrder;   | core 2: that block,  | workspace; core 2: an       | and before,
//                  |               | core 2 reads   | the row              | answer                      | each round
// kProbeQueue      | Queues        | all            | its own area         | its own area                |
// kProbeWriters    | Writers       | all write, all | parts of the rank    | a part of 1 KiB, by turns   | cores of the
//                  |               | read           | before, or the next  | into the next rank's area   | rank; next,
//                  |               |                | one's; its flag;     | and the own; the last core: | before, each
//                  |               |                | answers              | a flag; answers             | round
// kProbeNeighbours | Neighbours    | 0 and 1; all   | its own area         | its own area                | cores of the
//                  |               | synchronize    |                      |                             | rank
// kProbeBatch      | Batch         | all            | items of ranks       | windowsOut, a list in the   | cores of the
//                  |               |                | before it            | workspace                   | rank; before
// kProbeLevels     | TwoLevels     | all            | items of its rail;   | windowsOut, lists in the    | cores of the
//                  |               |                | rows of its server's | workspace; rows and         | rank; its
//                  |               |                |                      | messages to its server's    | rail and
//                  |               |                |                      | ranks                       | server
// kProbeStride     | Strides       | even store,    | rows of the next     | rows of the next rank       | cores of the
//                  |               | odd load       | rank                 |                             | rank
// kProbeClear      | Clear         | core 0         | nothing              | this rank's state area      |
// kProbeTimestamps | Timestamps    | all            | its timestamps       | its block of report         |
// all but the one  | Report        | all            | nothing              | report [cores] blocks       |
//
// Last column: whose flags, blocks or answers a core waits for. A core without work reports "passed". Peers, next
// and before are ranks of the own server: stores may not reach others. PipeBarrier<PIPE_ALL> drains a core's stores as
// in the ops. In the emulator StoreBlock's wait and SyncAll drain them too, so no schedule shows that one is missing.
#ifndef ASCEND_MOE_PROBE_PROBE_H
#define ASCEND_MOE_PROBE_PROBE_H

#include "levels.h"

namespace moe {

class Probe : public LevelProbes {
public:
    __aicore__ inline void Process() {
        const ContextMismatch mismatch = context_.Check();
        if (mismatch.field != kContextFieldCount) {
            Set(kProbeMismatch, mismatch.field, mismatch.ours, mismatch.theirs);
        } else if (tiling_->mode == kProbeContext) {
            Windows();
        } else if (tiling_->mode == kProbeStore) {
            StoreAndRead();
        } else if (tiling_->mode == kProbeAtomic) {
            Atomic();
        } else if (tiling_->mode == kProbeOrder) {
            Order();
        } else if (tiling_->mode == kProbeCoreBarrier) {
            CoreBarriers();
        } else if (tiling_->mode == kProbeCycles) {
            Cycles();
        } else if (tiling_->mode == kProbeZeroState) {
            ZeroState();
        } else if (tiling_->mode == kProbePull) {
            Pull();
        } else if (tiling_->mode == kProbeRelay) {
            Relay();
        } else if (tiling_->mode == kProbeQueue) {
            Queues();
        } else if (tiling_->mode == kProbeWriters) {
            Writers();
        } else if (tiling_->mode == kProbeNeighbours) {
            Neighbours();
        } else if (tiling_->mode == kProbeBatch) {
            Batch();
        } else if (tiling_->mode == kProbeStride) {
            Strides();
        } else if (tiling_->mode == kProbeLevels) {
            TwoLevels();
        } else if (tiling_->mode == kProbeClear) {
            Clear();
        }
        if (tiling_->mode == kProbeTimestamps && code_ == 0) {
            Timestamps();
        } else {
            Report();
        }
        link_.Close();
    }

private:
    // ---- the probes ----

    // MTE2 reads all ranks' windows from the context like the scalar unit.
    __aicore__ inline void Windows() {
        const WindowContext scalar = context_;
        context_.LoadPeers(*GetTPipePtr(), info_);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t rank = 0; rank < tiling_->world; ++rank) {
            const uint64_t wanted = reinterpret_cast<uint64_t>(scalar.data(rank)),
                           seen = reinterpret_cast<uint64_t>(context_.data(rank));
            if (wanted != seen) Set(kProbeDiffers, rank, static_cast<uint32_t>(wanted), static_cast<uint32_t>(seen));
        }
        if (code_ != 0) return;
        const uint64_t own = reinterpret_cast<uint64_t>(context_.data(tiling_->rank));
        wanted_ = static_cast<uint32_t>(own);
        seen_ = static_cast<uint32_t>(own >> 32);
    }

    // For this core's share of the peers: stores a row and its flag to each peer; then checks the row that the peer has
    // stored here, reads its own row back from there, and answers. Then again with other values, which a read of a
    // stale line would miss.
    __aicore__ inline void StoreAndRead() {
        const uint32_t rank = tiling_->rank;
        for (uint32_t n = 0; n < 2; ++n) {
            const uint32_t flag = tiling_->nonce + n;
            for (uint32_t peer = firstPeer_ + core_; peer < firstPeer_ + peers_; peer += tiling_->cores) {
                if (n > 0 && !Await(At(rank, peer, kAnswerAt), flag - 1, peer)) return;
                StoreRow(At(peer, rank, 0), RowValue(rank, peer) + n);
                AscendC::PipeBarrier<PIPE_ALL>();
                StoreBlock(At(peer, rank, kFlagAt), flag);
            }
            for (uint32_t peer = firstPeer_ + core_; peer < firstPeer_ + peers_; peer += tiling_->cores) {
                if (!Await(At(rank, peer, kFlagAt), flag, peer)) return;
                CheckRow(At(rank, peer, 0), RowValue(peer, rank) + n, peer);
                CheckRow(At(peer, rank, 0), RowValue(rank, peer) + n, peer);
                StoreBlock(At(peer, rank, kAnswerAt), flag);
                done_ += n;
            }
        }
    }
    __aicore__ inline uint32_t RowValue(uint32_t source, uint32_t owner) const {
        return tiling_->nonce * 2654435761u + source * 1000003u + owner;
    }

    // Core 0 writes blocks of equal words to the next rank; core 1 polls the blocks of the rank before until the last
    // round.
    __aicore__ inline void Atomic() {
        const uint32_t rank = tiling_->rank, next = next_, before = before_;
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
    // A round: core 0 stores a row, drains, stores the flag and awaits the answer. Core 1 awaits the flag, checks the
    // row and answers, so that no row is overwritten while it is read.
    __aicore__ inline void Order() {
        const uint32_t rank = tiling_->rank, next = next_, before = before_;
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

    // A round: core 0 stores a row into its own area, drains, and notifies the rank before. Core 1 is notified by the
    // next rank, reads the row in place, and answers. Then both move kProbeMoves rows and count the cycles: core 0
    // stores to the next rank, core 1 loads from there.
    __aicore__ inline void Pull() {
        const uint32_t rank = tiling_->rank;
        for (uint32_t n = 1; n <= tiling_->rounds; ++n) {
            const uint32_t value = tiling_->nonce + n;
            if (core_ == 0) {
                StoreRow(At(rank, rank, 0), value);
                AscendC::PipeBarrier<PIPE_ALL>();
                StoreBlock(At(before_, rank, kFlagAt), value);
                if (!Await(At(rank, before_, kAnswerAt), value, before_)) return;
            } else if (core_ == 1) {
                if (!Await(At(rank, next_, kFlagAt), value, next_)) return;
                CheckRow(At(next_, next_, 0), value, next_);
                StoreBlock(At(next_, rank, kAnswerAt), value);
            }
            ++done_;
        }
        // After the sources' rows, in unused memory. Each row is different: a repeated load would count as a poll.
        const uint64_t spare = tiling_->world * kSourceBytes, room = tiling_->dataBytes - spare;
        const uint32_t moves = core_ > 1 ? 0 : Min(kProbeMoves, static_cast<uint32_t>(room / 2 / kRowBytes));
        SyncFunc<HardEvent::S_MTE2>();  // the last row has been checked
        const int64_t start = AscendC::GetSystemCycle();
        for (uint32_t n = 0; n < moves; ++n) {
            GM_ADDR row = context_.data(next_) + spare + (core_ * moves + n) * static_cast<uint64_t>(kRowBytes);
            core_ == 0 ? MoveOut(row) : MoveIn(row);
        }
        AscendC::PipeBarrier<PIPE_ALL>();
        cycles_ = static_cast<uint32_t>(AscendC::GetSystemCycle() - start);
        if (code_ == 0) where_ = moves;
    }
    __aicore__ inline void MoveOut(GM_ADDR address) {
        GlobalTensor<int32_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(address), kRowWords);
        AscendC::PipeBarrier<PIPE_MTE3>();  // a row at a time, as MoveIn
        AscendC::DataCopy(target, rowBuf_.Get<int32_t>(), kRowWords);
    }
    __aicore__ inline void MoveIn(GM_ADDR address) {
        GlobalTensor<int32_t> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(address), kRowWords);
        AscendC::PipeBarrier<PIPE_MTE2>();
        AscendC::DataCopy(backBuf_.Get<int32_t>(), source, kRowWords);
    }

    // As Order, but core 1, which sees the flag, notifies core 2 by a block in the workspace, and core 2 reads the row.
    __aicore__ inline void Relay() {
        const uint32_t rank = tiling_->rank;
        for (uint32_t n = 1; n <= tiling_->rounds; ++n) {
            const uint32_t value = tiling_->nonce + n;
            if (core_ == 0) {
                StoreRow(At(next_, rank, 0), value);
                AscendC::PipeBarrier<PIPE_ALL>();
                StoreBlock(At(next_, rank, kFlagAt), value);
                if (!Await(At(rank, next_, kAnswerAt), value, next_)) return;
            } else if (core_ == 1) {
                if (!Await(At(rank, before_, kFlagAt), value, before_)) return;
                StoreBlock(workspace_ + BarrierBlock(1, 0), value);
            } else if (core_ == 2) {
                if (!Await(workspace_ + BarrierBlock(1, 0), value, before_)) return;
                CheckRow(At(rank, before_, 0), value, before_);
                StoreBlock(At(before_, rank, kAnswerAt), value);
            }
            ++done_;
        }
    }

    // Full queues: kMostRing pieces in flight into UB, one added to each, and out of UB, in an area of this
    // core.
    __aicore__ inline void Queues() {
        GM_ADDR mine = context_.data(tiling_->rank) + core_ * 2ull * kMostRing * kPieceBytes;
        GlobalTensor<int32_t> in, out;
        in.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(mine), kMostRing * kPieceWords);
        out.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(mine) + kMostRing * kPieceWords, kMostRing * kPieceWords);
        for (uint32_t n = 1; n <= tiling_->rounds; ++n) {
            const int32_t value = static_cast<int32_t>(tiling_->nonce + n);
            LocalTensor<int32_t> row = rowBuf_.Get<int32_t>();
            AscendC::Duplicate(row, value, kMostRing * kPieceWords);
            SyncFunc<HardEvent::V_MTE3>();
            AscendC::DataCopy(in, row, kMostRing * kPieceWords);
            SyncFunc<HardEvent::MTE3_MTE2>();
            for (uint32_t i = 0; i < kMostRing; ++i) {
                LocalTensor<int32_t> piece = inQueue_.AllocTensor<int32_t>();
                AscendC::DataCopy(piece, in[i * kPieceWords], kPieceWords);
                inQueue_.EnQue(piece);
            }
            for (uint32_t i = 0; i < kMostRing; ++i) {
                LocalTensor<int32_t> piece = inQueue_.DeQue<int32_t>(), sum = outQueue_.AllocTensor<int32_t>();
                AscendC::Adds(sum, piece, static_cast<int32_t>(i + 1), static_cast<int32_t>(kPieceWords));
                inQueue_.FreeTensor(piece);
                outQueue_.EnQue(sum);
            }
            for (uint32_t i = 0; i < kMostRing; ++i) {
                LocalTensor<int32_t> sum = outQueue_.DeQue<int32_t>();
                AscendC::DataCopy(out[i * kPieceWords], sum, kPieceWords);
                outQueue_.FreeTensor(sum);
            }
            LocalTensor<int32_t> back = backBuf_.Get<int32_t>();
            SyncFunc<HardEvent::S_MTE2>();
            SyncFunc<HardEvent::MTE3_MTE2>();
            AscendC::DataCopy(back, out, kMostRing * kPieceWords);
            SyncFunc<HardEvent::MTE2_S>();
            for (uint32_t i = 0; i < kMostRing * kPieceWords; ++i) {
                const int32_t wanted = value + static_cast<int32_t>(i / kPieceWords + 1);
                if (back.GetValue(i) != wanted)
                    Set(kProbeDiffers, i, static_cast<uint32_t>(wanted), static_cast<uint32_t>(back.GetValue(i)));
            }
            ++done_;
        }
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
        for (uint32_t at = 0, count = StatePiece(0); count > 0; at += count, count = StatePiece(at)) {
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
};

}  // namespace moe

#endif  // ASCEND_MOE_PROBE_PROBE_H
