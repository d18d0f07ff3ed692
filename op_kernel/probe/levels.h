// The probe of hierarchy's path between servers: rows received by RDMA are read and stored on by cores that have not
// seen them arrive, and rows stored by other ranks' cores leave by RDMA. A round trip as in the ops: ranks are numbered
// server * R + local rank, and rows between servers stay on a rail.
//
// step | who         | rows                    | then, after a
//      |             |                         | core barrier
// -----+-------------+-------------------------+---------------
// 1    | p, for each | staged in windowsOut,   | an item carries
//      | other       | R messages after them   | all
//      | server      |                         |
// 2    | f, on p's   | as they came, to each   | each of them
//      | rail        | rank of its server      | its message
// 3    | j, an owner | other values, back to f | a message to f
// 4    | f           | of the owners in turn,  | an item to p
//      |             | staged; R messages      |
// 5    | p           | are checked             |
//
// Before they read, each rank's cores share the messages to wait for and synchronize: most rows are read by a core that
// has not seen their message. The next launch writes the same places with other values.
#ifndef ASCEND_MOE_PROBE_LEVELS_H
#define ASCEND_MOE_PROBE_LEVELS_H

#include "shared.h"

namespace moe {

class LevelProbes : public SharedProbes {
protected:
    __aicore__ inline void TwoLevels() {
        localRanks_ = tiling_->intraNodeRanks;
        servers_ = tiling_->world / localRanks_;
        mine_ = tiling_->rank / localRanks_;
        localRank_ = tiling_->rank % localRanks_;
        const uint64_t rows = tiling_->dataBytes / (2ull * (servers_ + tiling_->world)) / kRowBytes;
        most_ = Min(kProbeLevelRows + 1, static_cast<uint32_t>(rows));
        if (most_ < 2) return;  // no room
        pieces_ = Min(1u << ((tiling_->rounds - 1) % kProbeLevelSizes), most_ - 1);
        BarrierInit(barrier_);
        StageThere();
        StoreOn();
        ReturnRows();
        StageBack();
        CheckReturned();
        if (code_ == 0) where_ = pieces_;
    }

private:
    // ---- the steps ----

    __aicore__ inline void StageThere() {
        for (uint32_t i = core_; i < OtherServers() * pieces_; i += tiling_->cores) {
            const uint32_t server = OtherServer(i / pieces_), piece = i % pieces_;
            StoreRow(Place(context_.staging(), There(server), piece), ValueThere(tiling_->rank, server, piece));
        }
        StageItems(0, There(0), There(mine_));
        Barrier();
        if (core_ == 0) link_.Post(List(0), OtherServers());
    }
    __aicore__ inline void StoreOn() {
        AwaitItems(There(0));
        for (uint32_t i = core_; i < OtherServers() * pieces_; i += tiling_->cores) {
            const uint32_t server = OtherServer(i / pieces_), piece = i % pieces_;
            LoadChecked(Place(Mine(), There(server), piece), ValueThere(RankOf(server, localRank_), mine_, piece),
                        piece);
            for (uint32_t owner = 0; owner < localRanks_; ++owner) {
                StoreLoaded(Place(IntraNode(owner), Passed(server, localRank_), piece));
            }
        }
        Barrier();
        for (uint32_t i = core_; i < OtherServers() * localRanks_; i += tiling_->cores) {
            const uint32_t server = OtherServer(i / localRanks_), owner = i % localRanks_;
            PassMessage(Message(Mine(), There(server), owner),
                        Message(IntraNode(owner), Passed(server, localRank_), 0));
        }
    }
    __aicore__ inline void ReturnRows() {
        AwaitIntraNode(Passed(0, 0));
        for (uint32_t i = core_; i < OtherServers() * localRanks_ * pieces_; i += tiling_->cores) {
            const uint32_t server = OtherServer(i / pieces_ / localRanks_), localRank = i / pieces_ % localRanks_,
                           piece = i % pieces_;
            const uint32_t source = RankOf(server, localRank);
            LoadChecked(Place(Mine(), Passed(server, localRank), piece), ValueThere(source, mine_, piece), piece);
            StoreRow(Place(IntraNode(localRank), Returned(server, localRank_), piece),
                     ValueBack(source, tiling_->rank, piece));
        }
        Barrier();
        for (uint32_t i = core_; i < OtherServers() * localRanks_; i += tiling_->cores) {
            const uint32_t server = OtherServer(i / localRanks_), localRank = i % localRanks_;
            StoreBlock(Message(IntraNode(localRank), Returned(server, localRank_), 0), tiling_->nonce);
        }
    }
    __aicore__ inline void StageBack() {
        AwaitIntraNode(Returned(0, 0));
        for (uint32_t i = core_; i < OtherServers() * pieces_; i += tiling_->cores) {
            const uint32_t server = OtherServer(i / pieces_), piece = i % pieces_, source = RankOf(server, localRank_);
            for (uint32_t owner = 0; owner < localRanks_; ++owner) {
                const uint32_t value = ValueBack(source, RankOf(mine_, owner), piece);
                LoadChecked(Place(Mine(), Returned(server, owner), piece), value, piece);
                if (owner == piece % localRanks_) StoreLoaded(Place(context_.staging(), Back(server), piece));
            }
        }
        StageItems(1, Back(0), Back(mine_));
        Barrier();
        if (core_ == 0) link_.Post(List(1), OtherServers());
    }
    __aicore__ inline void CheckReturned() {
        AwaitItems(Back(0));
        for (uint32_t i = core_; i < OtherServers() * pieces_; i += tiling_->cores) {
            const uint32_t server = OtherServer(i / pieces_), piece = i % pieces_;
            const uint32_t value = ValueBack(tiling_->rank, RankOf(server, piece % localRanks_), piece);
            LoadChecked(Place(Mine(), Back(server), piece), value, piece);
        }
    }

    // ---- ranks, places and values ----

    __aicore__ inline uint32_t OtherServers() const { return servers_ - 1; }
    __aicore__ inline uint32_t OtherServer(uint32_t i) const { return i < mine_ ? i : i + 1; }
    __aicore__ inline uint32_t RankOf(uint32_t server, uint32_t localRank) const {
        return server * localRanks_ + localRank;
    }
    __aicore__ inline GM_ADDR Mine() const { return context_.data(tiling_->rank); }
    __aicore__ inline GM_ADDR IntraNode(uint32_t localRank) const { return context_.data(RankOf(mine_, localRank)); }

    // Numbers of regions: [S] from other servers, [S][R] passed on and [S][R] returned within the server, and [S] that
    // come back. windowsOut has the same.
    __aicore__ inline uint32_t There(uint32_t server) const { return server; }
    __aicore__ inline uint32_t Passed(uint32_t server, uint32_t localRank) const {
        return servers_ + RankOf(server, localRank);
    }
    __aicore__ inline uint32_t Returned(uint32_t server, uint32_t localRank) const {
        return tiling_->world + Passed(server, localRank);
    }
    __aicore__ inline uint32_t Back(uint32_t server) const { return servers_ + 2 * tiling_->world + server; }
    __aicore__ inline GM_ADDR Place(GM_ADDR base, uint32_t region, uint32_t piece) const {
        return base + (static_cast<uint64_t>(region) * most_ + piece) * kRowBytes;
    }
    // After the rows.
    __aicore__ inline GM_ADDR Message(GM_ADDR base, uint32_t region, uint32_t number) const {
        return Place(base, region, pieces_) + static_cast<uint64_t>(number) * kBlock;
    }
    __aicore__ inline GM_ADDR List(uint32_t number) const {
        return workspace_ + kProbeListsOffset + static_cast<uint64_t>(number) * servers_ * kBlock;
    }
    __aicore__ inline uint32_t ValueThere(uint32_t source, uint32_t server, uint32_t piece) const {
        return tiling_->nonce * 2654435761u + source * 1000003u + server * 4099u + piece;
    }
    __aicore__ inline uint32_t ValueBack(uint32_t source, uint32_t owner, uint32_t piece) const {
        return tiling_->nonce * 2246822519u + source * 1000003u + owner * 4099u + piece;
    }

    // ---- waiting ----

    // No core leaves before the last core barrier, whatever it has found: barriers have no deadline.
    __aicore__ inline void Barrier() { barrier_.ArriveAndWait(met_++, OpStatus()); }
    __aicore__ inline void AwaitMessage(GM_ADDR address, uint32_t from) {
        if (code_ == 0 && AwaitLast(address, tiling_->nonce, from)) ++done_;
    }
    // All messages of the items of other servers, in regions from `first` on.
    __aicore__ inline void AwaitItems(uint32_t first) {
        for (uint32_t i = core_; i < OtherServers() * localRanks_; i += tiling_->cores) {
            const uint32_t server = OtherServer(i / localRanks_);
            AwaitMessage(Message(Mine(), first + server, i % localRanks_), RankOf(server, localRank_));
        }
        Barrier();
    }
    // The messages of ranks of this server.
    __aicore__ inline void AwaitIntraNode(uint32_t first) {
        for (uint32_t i = core_; i < OtherServers() * localRanks_; i += tiling_->cores) {
            const uint32_t server = OtherServer(i / localRanks_), localRank = i % localRanks_;
            AwaitMessage(Message(Mine(), first + RankOf(server, localRank), 0), RankOf(mine_, localRank));
        }
        Barrier();
    }

    // ---- rows and items ----

    __aicore__ inline void LoadChecked(GM_ADDR address, uint32_t value, uint32_t where) {
        StoreFill(value);  // the previous row has been stored
        CheckFilled(address, value, where);
    }
    // Stores the row that was loaded last, and checked.
    __aicore__ inline void StoreLoaded(GM_ADDR address) {
        GlobalTensor<uint32_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(address), kRowWords);
        AscendC::DataCopy(target, backBuf_.Get<uint32_t>(), kRowWords);
    }
    __aicore__ inline void PassMessage(GM_ADDR from, GM_ADDR to) {
        const LocalTensor<uint32_t> message = LoadBlock(from);
        GlobalTensor<uint32_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(to), kBlockWords);
        AscendC::DataCopy(target, message, kBlockWords);
        SyncFunc<HardEvent::MTE3_MTE2>();
    }
    // Stages the messages after the rows for each server of this core's share, in regions from `first` on, and the item
    // that carries both into region `target` of the rail's rank there.
    __aicore__ inline void StageItems(uint32_t list, uint32_t first, uint32_t target) {
        for (uint32_t i = core_; i < OtherServers(); i += tiling_->cores) {
            const uint32_t server = OtherServer(i);
            GM_ADDR staging = context_.staging();
            for (uint32_t number = 0; number < localRanks_; ++number) {
                StoreBlock(Message(staging, first + server, number), tiling_->nonce);
            }
            BatchItem item;
            item.peer = RankOf(server, localRank_);
            item.local = reinterpret_cast<uint64_t>(Place(staging, first + server, 0));
            item.remote = reinterpret_cast<uint64_t>(Place(context_.data(item.peer), target, 0));
            item.bytes = static_cast<uint64_t>(pieces_) * kRowBytes + static_cast<uint64_t>(localRanks_) * kBlock;
            item.type = 0;
            StoreItem(List(list) + static_cast<uint64_t>(i) * kBlock, item);
        }
    }

    CoreBarrier barrier_;
    uint32_t localRanks_ = 1, servers_ = 1, mine_ = 0, localRank_ = 0;
    uint32_t most_ = 0;    // rows of a region, including its messages
    uint32_t pieces_ = 0;  // rows of an item
    uint32_t met_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_PROBE_LEVELS_H
