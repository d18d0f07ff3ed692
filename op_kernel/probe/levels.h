// The probe of the path that hierarchy takes between servers: what came by RDMA is read and stored on by cores that
// have not seen it come, and what cores of other ranks have stored leaves by RDMA. A trip there and back, as in a round
// trip of the ops: ranks are numbered server * R + lane, and rows between servers only go between ranks of a lane.
//
// step | who                        | rows                                      | and then, its cores have met
// -----+----------------------------+-------------------------------------------+----------------------------------
// 1    | p, for each other server   | staged in windowsOut                      | R messages; an item carries all
// 2    | f, which has p's lane      | as they came, to each rank of its server  | each of them its message
// 3    | j, an owner                | other values, back to f                   | a message to f
// 4    | f                          | of the owners in turn, staged             | R messages; an item to p
// 5    | p                          | are checked                               |
//
// Before it reads, each rank's cores share the messages that they wait for, and meet: most rows are read by a core
// that has not seen their message. The next launch writes the same places, with other values.
#ifndef ASCEND_MOE_PROBE_LEVELS_H
#define ASCEND_MOE_PROBE_LEVELS_H

#include "shared.h"

namespace moe {

class LevelProbes : public SharedProbes {
protected:
    __aicore__ inline void TwoLevels() {
        lanes_ = tiling_->nearRanks;
        servers_ = tiling_->world / lanes_;
        mine_ = tiling_->rank / lanes_;
        lane_ = tiling_->rank % lanes_;
        const uint64_t rows = tiling_->dataBytes / (2ull * (servers_ + tiling_->world)) / kRowBytes;
        most_ = Min(kProbeLevelRows + 1, static_cast<uint32_t>(rows));
        if (most_ < 2) return;  // no room
        pieces_ = Min(1u << ((tiling_->rounds - 1) % kProbeLevelSizes), most_ - 1);
        BoardInit(board_);
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
        for (uint32_t i = core_; i < FarServers() * pieces_; i += tiling_->cores) {
            const uint32_t server = FarServer(i / pieces_), piece = i % pieces_;
            StoreRow(Place(context_.staging(), There(server), piece), ValueThere(tiling_->rank, server, piece));
        }
        StageItems(0, There(0), There(mine_));
        Meet();
        if (core_ == 0) link_.Post(List(0), FarServers());
    }
    __aicore__ inline void StoreOn() {
        AwaitItems(There(0));
        for (uint32_t i = core_; i < FarServers() * pieces_; i += tiling_->cores) {
            const uint32_t server = FarServer(i / pieces_), piece = i % pieces_;
            LoadChecked(Place(Mine(), There(server), piece), ValueThere(RankOf(server, lane_), mine_, piece), piece);
            for (uint32_t owner = 0; owner < lanes_; ++owner) {
                StoreLoaded(Place(Near(owner), Passed(server, lane_), piece));
            }
        }
        Meet();
        for (uint32_t i = core_; i < FarServers() * lanes_; i += tiling_->cores) {
            const uint32_t server = FarServer(i / lanes_), owner = i % lanes_;
            PassMessage(Message(Mine(), There(server), owner), Message(Near(owner), Passed(server, lane_), 0));
        }
    }
    __aicore__ inline void ReturnRows() {
        AwaitNear(Passed(0, 0));
        for (uint32_t i = core_; i < FarServers() * lanes_ * pieces_; i += tiling_->cores) {
            const uint32_t server = FarServer(i / pieces_ / lanes_), lane = i / pieces_ % lanes_, piece = i % pieces_;
            const uint32_t source = RankOf(server, lane);
            LoadChecked(Place(Mine(), Passed(server, lane), piece), ValueThere(source, mine_, piece), piece);
            StoreRow(Place(Near(lane), Returned(server, lane_), piece), ValueBack(source, tiling_->rank, piece));
        }
        Meet();
        for (uint32_t i = core_; i < FarServers() * lanes_; i += tiling_->cores) {
            const uint32_t server = FarServer(i / lanes_), lane = i % lanes_;
            StoreBlock(Message(Near(lane), Returned(server, lane_), 0), tiling_->nonce);
        }
    }
    __aicore__ inline void StageBack() {
        AwaitNear(Returned(0, 0));
        for (uint32_t i = core_; i < FarServers() * pieces_; i += tiling_->cores) {
            const uint32_t server = FarServer(i / pieces_), piece = i % pieces_, source = RankOf(server, lane_);
            for (uint32_t owner = 0; owner < lanes_; ++owner) {
                const uint32_t value = ValueBack(source, RankOf(mine_, owner), piece);
                LoadChecked(Place(Mine(), Returned(server, owner), piece), value, piece);
                if (owner == piece % lanes_) StoreLoaded(Place(context_.staging(), Back(server), piece));
            }
        }
        StageItems(1, Back(0), Back(mine_));
        Meet();
        if (core_ == 0) link_.Post(List(1), FarServers());
    }
    __aicore__ inline void CheckReturned() {
        AwaitItems(Back(0));
        for (uint32_t i = core_; i < FarServers() * pieces_; i += tiling_->cores) {
            const uint32_t server = FarServer(i / pieces_), piece = i % pieces_;
            const uint32_t value = ValueBack(tiling_->rank, RankOf(server, piece % lanes_), piece);
            LoadChecked(Place(Mine(), Back(server), piece), value, piece);
        }
    }

    // ---- ranks, places and values ----

    __aicore__ inline uint32_t FarServers() const { return servers_ - 1; }
    __aicore__ inline uint32_t FarServer(uint32_t i) const { return i < mine_ ? i : i + 1; }
    __aicore__ inline uint32_t RankOf(uint32_t server, uint32_t lane) const { return server * lanes_ + lane; }
    __aicore__ inline GM_ADDR Mine() const { return context_.data(tiling_->rank); }
    __aicore__ inline GM_ADDR Near(uint32_t lane) const { return context_.data(RankOf(mine_, lane)); }

    // Numbers of regions: [S] that come from other servers, [S][R] passed on and [S][R] returned within the server, and
    // [S] that come back. windowsOut has the same.
    __aicore__ inline uint32_t There(uint32_t server) const { return server; }
    __aicore__ inline uint32_t Passed(uint32_t server, uint32_t lane) const { return servers_ + RankOf(server, lane); }
    __aicore__ inline uint32_t Returned(uint32_t server, uint32_t lane) const {
        return tiling_->world + Passed(server, lane);
    }
    __aicore__ inline uint32_t Back(uint32_t server) const { return servers_ + 2 * tiling_->world + server; }
    __aicore__ inline GM_ADDR Place(GM_ADDR base, uint32_t region, uint32_t piece) const {
        return base + (static_cast<uint64_t>(region) * most_ + piece) * kRowBytes;
    }
    // Behind the rows.
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

    // No core leaves before the last meeting, whatever it has found: meetings have no deadline.
    __aicore__ inline void Meet() { board_.Meet(met_++, Verdict()); }
    __aicore__ inline void AwaitMessage(GM_ADDR address, uint32_t from) {
        if (code_ == 0 && AwaitLast(address, tiling_->nonce, from)) ++done_;
    }
    // All messages of the items of other servers, in regions from `first` on.
    __aicore__ inline void AwaitItems(uint32_t first) {
        for (uint32_t i = core_; i < FarServers() * lanes_; i += tiling_->cores) {
            const uint32_t server = FarServer(i / lanes_);
            AwaitMessage(Message(Mine(), first + server, i % lanes_), RankOf(server, lane_));
        }
        Meet();
    }
    // The messages of ranks of this server.
    __aicore__ inline void AwaitNear(uint32_t first) {
        for (uint32_t i = core_; i < FarServers() * lanes_; i += tiling_->cores) {
            const uint32_t server = FarServer(i / lanes_), lane = i % lanes_;
            AwaitMessage(Message(Mine(), first + RankOf(server, lane), 0), RankOf(mine_, lane));
        }
        Meet();
    }

    // ---- rows and items ----

    __aicore__ inline void LoadChecked(GM_ADDR address, uint32_t value, uint32_t where) {
        SyncFunc<HardEvent::MTE3_MTE2>();  // the row before has been stored
        StoreFill(value);
        CheckFilled(address, value, where);
    }
    // The row that was loaded last.
    __aicore__ inline void StoreLoaded(GM_ADDR address) {
        SyncFunc<HardEvent::MTE2_MTE3>();
        GlobalTensor<uint32_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(address), kRowWords);
        AscendC::DataCopy(target, backBuf_.Get<uint32_t>(), kRowWords);
    }
    __aicore__ inline void PassMessage(GM_ADDR from, GM_ADDR to) {
        const LocalTensor<uint32_t> message = LoadBlock(from);
        SyncFunc<HardEvent::MTE2_MTE3>();
        GlobalTensor<uint32_t> target;
        target.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(to), kBlockWords);
        AscendC::DataCopy(target, message, kBlockWords);
        SyncFunc<HardEvent::MTE3_MTE2>();
    }
    // Stages the messages behind the rows for each server of this core's share, in regions from `first` on, and the
    // item that carries both into region `target` of the rank there that has this rank's lane.
    __aicore__ inline void StageItems(uint32_t list, uint32_t first, uint32_t target) {
        for (uint32_t i = core_; i < FarServers(); i += tiling_->cores) {
            const uint32_t server = FarServer(i);
            GM_ADDR staging = context_.staging();
            for (uint32_t number = 0; number < lanes_; ++number) {
                StoreBlock(Message(staging, first + server, number), tiling_->nonce);
            }
            BatchItem item;
            item.peer = RankOf(server, lane_);
            item.local = reinterpret_cast<uint64_t>(Place(staging, first + server, 0));
            item.remote = reinterpret_cast<uint64_t>(Place(context_.data(item.peer), target, 0));
            item.bytes = static_cast<uint64_t>(pieces_) * kRowBytes + static_cast<uint64_t>(lanes_) * kBlock;
            item.type = 0;
            StoreItem(List(list) + static_cast<uint64_t>(i) * kBlock, item);
        }
    }

    VerdictBoard board_;
    uint32_t lanes_ = 1, servers_ = 1, mine_ = 0, lane_ = 0;
    uint32_t most_ = 0;    // rows of a region, its messages among them
    uint32_t pieces_ = 0;  // rows of an item
    uint32_t met_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_PROBE_LEVELS_H
