// Algorithm "hierarchy": transfers between servers. A rank's local rank is its number within its server; ranks with the
// same local rank form a rail. The ranks of a rail send each other one item per server and op: rows, a block that
// counts them, and the messages of (dispatch: to) all ranks of that server. See docs/cluster.md.
#ifndef ASCEND_MOE_HIERARCHY_RELAY_H
#define ASCEND_MOE_HIERARCHY_RELAY_H

#include "../common/exchange.h"
#include "../common/routing.h"

namespace moe {

// The server of an expert's owner.
__aicore__ inline uint32_t ServerOf(const MoeDistributeInfo& info, int32_t id) {
    return Server(info, Owner(info, static_cast<uint32_t>(id)));
}

// How many tokens of this rank have a pair on each server. A token's record, and its sum on the return path, is
// numbered by the earlier such tokens. A core's share is the tokens of its pairs (ShareTokens), ascending.
class ServerTokens {
public:
    // UB: tables [S] int32, and rows of them in flight.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR workspace) {
        info_ = &info;
        const ServerTokensUb ub(info);
        lanes_ = PaddedInts(Servers(info));
        atOnce_ = ServerRows(info);
        rows_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(workspace + BoundsOffset(info)),
                              static_cast<uint64_t>(info.cores) * lanes_);
        ofCores_.Init(workspace + BoundsOffset(info), lanes_, info.cores);
        pipe.InitBuffer(nextBuf_, ub.servers);
        pipe.InitBuffer(totalBuf_, ub.servers);
        pipe.InitBuffer(seenBuf_, ub.servers);
        pipe.InitBuffer(queue_, 1, ub.rows);
    }
    // Sets the table whose pairs are counted; from here on it shares tokens between cores.
    __aicore__ inline void Use(RoutingTable& routing, uint32_t core) {
        routing_ = &routing;
        core_ = core;
        routing.ShareTokens(PartBegin(info_->batch, core, info_->cores),
                            PartBegin(info_->batch, core + 1, info_->cores));
    }
    // Counts this core's tokens and publishes the numbers to the other cores.
    __aicore__ inline void Count() {
        Clear(nextBuf_);
        Clear(seenBuf_);
        SyncFunc<HardEvent::V_S>();
        CountTokens(routing_->begin() / info_->topK, routing_->end() / info_->topK);
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(rows_[static_cast<uint64_t>(core_) * lanes_], nextBuf_.Get<int32_t>(), lanes_);
    }
    // Once after Count or Init, after a core barrier, with no table in flight. The next token taken is the first of the
    // share of `core`.
    __aicore__ inline void Find(uint32_t core) {
        Clear(nextBuf_);
        Clear(totalBuf_);
        Clear(seenBuf_);
        const uint32_t room = atOnce_ * lanes_;
        const LocalTensor<int32_t> next = nextBuf_.Get<int32_t>(), total = totalBuf_.Get<int32_t>();
        ofCores_.Fold<false>(queue_, room, next, 0, lanes_, 0, core);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(total, total, next, static_cast<int32_t>(lanes_));
        ofCores_.Fold<false>(queue_, room, total, 0, lanes_, core, info_->cores);
        SyncFunc<HardEvent::V_S>();
    }
    // Whether this pair is the token's first on its server. Tokens must come in ascending order, each once.
    __aicore__ inline bool First(uint32_t server, uint32_t token) {
        LocalTensor<int32_t> seen = seenBuf_.Get<int32_t>();
        if (seen.GetValue(server) == static_cast<int32_t>(token + 1)) return false;
        seen.SetValue(server, static_cast<int32_t>(token + 1));
        return true;
    }
    // The number of the token's record for that server.
    __aicore__ inline uint32_t Take(uint32_t server) {
        LocalTensor<int32_t> next = nextBuf_.Get<int32_t>();
        const int32_t number = next.GetValue(server);
        next.SetValue(server, number + 1);
        return static_cast<uint32_t>(number);
    }
    __aicore__ inline uint32_t Total(uint32_t server) {
        return static_cast<uint32_t>(totalBuf_.Get<int32_t>().GetValue(server));
    }

private:
    __aicore__ inline void Clear(UbBuf& buf) {
        AscendC::Duplicate(buf.Get<int32_t>(), static_cast<int32_t>(0), static_cast<int32_t>(lanes_));
    }
    __aicore__ inline void CountTokens(uint32_t token, uint32_t end) {
        const uint32_t topK = info_->topK, chunk = kChunkPairs / topK;
        for (; token < end;) {
            const uint32_t count = Min(chunk, end - token);
            routing_->pairs().Load(token * topK, count * topK);
            for (uint32_t i = 0; i < count * topK; ++i) {
                const int32_t id = routing_->pairs().Id(i, token + i / topK);
                if (!routing_->pairs().Routed(id)) continue;
                const uint32_t server = ServerOf(*info_, id);
                if (First(server, token + i / topK)) Take(server);
            }
            token += count;
        }
    }

    const MoeDistributeInfo* info_ = nullptr;
    RoutingTable* routing_ = nullptr;
    GlobalTensor<int32_t> rows_;
    CoreRows ofCores_;
    AscendC::TQue<AscendC::QuePosition::VECIN, 1> queue_;
    UbBuf nextBuf_, totalBuf_, seenBuf_;
    uint32_t core_ = 0;
    uint32_t lanes_ = 0;
    uint32_t atOnce_ = 1;
};

// Tables for both ops: the rank's pairs by expert, its tokens by server, and where rows lie.
class PairTables {
protected:
    template <typename Arguments>
    __aicore__ inline void TablesInit(Exchange& exchange, const MoeDistributeInfo& info, const Arguments& arguments) {
        exchange.LoadPeers();
        routing_.Init(exchange.pipe(), info, arguments.expertIds, arguments.xActiveMask, arguments.workspace,
                      exchange.core());
        tokens_.Init(exchange.pipe(), info, arguments.workspace);
        tokens_.Use(routing_, exchange.core());
        places_.Init(exchange.pipe(), info, routing_, arguments.workspace, exchange.core());
    }

    // This rank's server, and whether an expert's owner is on it.
    __aicore__ inline uint32_t Mine() const { return Server(*info_, info_->rank); }
    __aicore__ inline bool Here(int32_t id) const {
        return id >= 0 && id < static_cast<int32_t>(info_->experts) && ServerOf(*info_, id) == Mine();
    }

    const MoeDistributeInfo* info_ = nullptr;
    RoutingTable routing_;
    ServerTokens tokens_;
    RowPlaces places_;
};

// The places of a server's region, and what is staged and posted there.
class Relay {
public:
    // UB: a block and an item.
    __aicore__ inline void Init(Exchange& exchange, const MoeDistributeInfo& info) {
        exchange_ = &exchange;
        info_ = &info;
        const RelayUb ub(info);
        exchange.pipe().InitBuffer(blockBuf_, ub.block);
        exchange.pipe().InitBuffer(itemBuf_, ub.item);
    }
    // Additional UB for passing messages on.
    __aicore__ inline void InitMessages() {
        exchange_->pipe().InitBuffer(messageQueue_, kRelayedMessages, RelayUb(*info_).message);
    }
    // Where the rows of a server's region end: received, and staged.
    __aicore__ inline GM_ADDR Arrived(uint32_t server) const {
        return exchange_->context().data(info_->rank) + Offset(server);
    }
    __aicore__ inline GM_ADDR Staged(uint32_t server) const { return exchange_->context().staging() + Offset(server); }
    // Stages the block that counts the rows, and the item that carries all, for each server of this core's share of a
    // pass; then core 0 posts them. Totals: rows of `rowBytes` for a server.
    template <typename Totals>
    __aicore__ inline void PostItems(Totals& totals, uint32_t rowBytes, const ServerPass& pass) {
        const uint32_t count = pass.last - pass.first, core = exchange_->core();
        const uint32_t end = pass.first + PartBegin(count, core + 1, info_->cores);
        for (uint32_t at = pass.first + PartBegin(count, core, info_->cores); at < end; ++at) {
            const uint32_t server = pass.At(*info_, at);
            const uint32_t rows = exchange_->Failed() ? 0 : totals.Total(server);
            SyncFunc<HardEvent::MTE3_S>();
            FillBlock(rows);
            FillItem(server, static_cast<uint64_t>(rows) * rowBytes);
            SyncFunc<HardEvent::S_MTE3>();
            StoreWords(Staged(server), blockBuf_.Get<uint32_t>(), kBlock);
            StoreWords(exchange_->items() + (at - 1) * kBlock, itemBuf_.Get<uint32_t>(), kBlock);
        }
        exchange_->sender().Flush();
        exchange_->PostItems(count, pass.first - 1);
    }

    // The number of rows received from a server whose messages have come; corrupt if no rank can have sent it.
    __aicore__ inline OpStatus Rows(uint32_t server, uint32_t& rows) {
        LocalTensor<uint32_t> block = blockBuf_.Get<uint32_t>();
        LoadBlock(Arrived(server));
        rows = block.GetValue(kRbRows);
        const uint32_t from = RailPeer(server), epoch = exchange_->epoch(), most = info_->maxBatch;
        const bool good = block.GetValue(kRbMagic) == RelayWord(epoch) && block.GetValue(kRbEpoch) == epoch &&
                          block.GetValue(kRbOp) == exchange_->config().op && block.GetValue(kRbSource) == from &&
                          block.GetValue(kRbHash) == HashOf(from, rows) && rows <= most;
        if (good) return OpStatus();
        const uint32_t level = exchange_->config().op == kOpDispatch ? 1 : 2;
        OpStatus status = InvalidOf(*info_, kCorruptStatus, AtLevel(kRelayBlockIndex, level), rows);
        status.source = from;
        rows = 0;
        return status;
    }
    // Stores a block that begins with a number, and waits until it has left, as PostItems does.
    __aicore__ inline void StoreNumber(GM_ADDR place, uint32_t number) {
        ClearBlock().SetValue(0, number);
        SyncFunc<HardEvent::S_MTE3>();
        StoreWords(place, blockBuf_.Get<uint32_t>(), kBlock);
        SyncFunc<HardEvent::MTE3_S>();
    }
    __aicore__ inline uint32_t LoadNumber(GM_ADDR place) {
        LoadBlock(place);
        return blockBuf_.Get<uint32_t>().GetValue(0);
    }
    // The rank of a server on this rank's rail.
    __aicore__ inline uint32_t RailPeer(uint32_t server) const {
        return server * info_->intraNodeRanks + LocalRank(*info_, info_->rank);
    }

    // Dispatch: passes the messages of this rail's inter-node ranks on to the state areas of this server's ranks.
    __aicore__ inline void PassMessagesOn() {
        const WindowContext& context = exchange_->context();
        const uint32_t parity = Parity(exchange_->epoch()), localRanks = info_->intraNodeRanks;
        for (uint32_t place = Begin(); place < End(); ++place) {
            const uint32_t server = Server(*info_, place), localRank = LocalRank(*info_, place);
            if (server == Server(*info_, info_->rank)) continue;
            const uint32_t target = Server(*info_, info_->rank) * localRanks + localRank;
            Move(reinterpret_cast<GM_ADDR>(RelayedMessage(context, *info_, parity, server, localRank)),
                 context.state(target) + StatusOffset(info_->world, parity, RailPeer(server)));
        }
    }
    // Combine: stages the messages of this server's ranks to this rail's ranks of a pass, after the sums for them.
    __aicore__ inline void StageMessages(const ServerPass& pass) {
        const WindowContext& context = exchange_->context();
        for (uint32_t place = Begin(); place < End(); ++place) {
            const uint32_t server = Server(*info_, place), localRank = LocalRank(*info_, place);
            if (!pass.Has(*info_, server)) continue;
            Move(reinterpret_cast<GM_ADDR>(InterNodeMessage(context, Parity(exchange_->epoch()), place)),
                 Staged(server) + RelayMessageOffset(info_->world, localRank));
        }
    }

private:
    __aicore__ inline uint64_t Offset(uint32_t server) const {
        return RelayOffset(exchange_->context(), *info_, Parity(exchange_->epoch()), server);
    }
    __aicore__ inline uint32_t Begin() const { return PartBegin(info_->world, exchange_->core(), info_->cores); }
    __aicore__ inline uint32_t End() const { return PartBegin(info_->world, exchange_->core() + 1, info_->cores); }
    __aicore__ inline uint32_t HashOf(uint32_t source, uint32_t rows) const {
        return HashMix(HashMix(exchange_->config().hash, source), rows);
    }
    __aicore__ inline void LoadBlock(GM_ADDR place) {
        GlobalTensor<uint32_t> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(place), kBlockWords);
        SyncFunc<HardEvent::S_MTE2>();
        AscendC::DataCopy(blockBuf_.Get<uint32_t>(), source, kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
    }
    __aicore__ inline LocalTensor<uint32_t> ClearBlock() {
        LocalTensor<uint32_t> block = blockBuf_.Get<uint32_t>();
        for (uint32_t w = 0; w < kBlockWords; ++w) block.SetValue(w, 0);
        return block;
    }
    __aicore__ inline void FillBlock(uint32_t rows) {
        LocalTensor<uint32_t> block = ClearBlock();
        block.SetValue(kRbMagic, RelayWord(exchange_->epoch()));
        block.SetValue(kRbOp, exchange_->config().op);
        block.SetValue(kRbSource, info_->rank);
        block.SetValue(kRbRows, rows);
        block.SetValue(kRbHash, HashOf(info_->rank, rows));
        block.SetValue(kRbEpoch, exchange_->epoch());
    }
    __aicore__ inline void FillItem(uint32_t server, uint64_t rowBytes) {
        const uint32_t peer = RailPeer(server);
        const uint64_t target =
            RelayOffset(exchange_->context(), *info_, Parity(exchange_->epoch()), Server(*info_, info_->rank)) -
            rowBytes;
        BatchItem item;
        item.local = reinterpret_cast<uint64_t>(Staged(server) - rowBytes);
        item.remote = reinterpret_cast<uint64_t>(exchange_->context().data(peer) + target);
        item.bytes = rowBytes + RelayMessageOffset(info_->world, info_->intraNodeRanks - 1) +
                     StatusMessageBytes(info_->localExperts);
        item.type = 0;
        item.peer = peer;
        WindowSender::SetItem(itemBuf_.Get<uint64_t>(), item);
    }
    __aicore__ inline void Move(GM_ADDR from, GM_ADDR to) {
        const uint32_t words = StatusMessageBytes(info_->localExperts) / static_cast<uint32_t>(sizeof(uint32_t));
        GlobalTensor<uint32_t> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(from), words);
        LocalTensor<uint32_t> message = messageQueue_.template AllocTensor<uint32_t>();
        AscendC::DataCopy(message, source, words);
        messageQueue_.EnQue(message);
        message = messageQueue_.template DeQue<uint32_t>();
        StoreWords(to, message, words * static_cast<uint32_t>(sizeof(uint32_t)));
        messageQueue_.FreeTensor(message);
    }

    Exchange* exchange_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> messageQueue_;
    UbBuf blockBuf_, itemBuf_;
};

// Combine, for TokenSum: the servers' sums of a token. Rows of pairs do not return as such: its other addends are
// special and shared experts.
class ServerSums {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR workspace, Relay& relay,
                                uint32_t sumBytes, uint32_t core) {
        info_ = &info;
        relay_ = &relay;
        sumBytes_ = sumBytes;
        tokens_.Init(pipe, info, workspace);
        tokens_.Find(core);  // its first item belongs to the first token of its share, whichever part of H
    }
    __aicore__ inline void Load(uint32_t, uint32_t) {}
    __aicore__ inline void Place(RoutingTable&, uint32_t, uint32_t) {}
    __aicore__ inline GM_ADDR Address(RoutingTable&, int32_t, uint32_t, uint32_t, uint32_t) { return nullptr; }
    __aicore__ inline OpStatus missing() const { return OpStatus(); }
    // Servers ascending. `first`: token of the chunk.
    __aicore__ inline uint32_t FindSums(RoutingTable& routing, uint32_t first, uint32_t token) {
        if (token == token_) return count_;
        token_ = token;
        count_ = 0;
        for (uint32_t k = 0; k < info_->topK; ++k) {
            const int32_t id = routing.pairs().Id((token - first) * info_->topK + k, token);
            if (!routing.pairs().Routed(id)) continue;
            const uint32_t server = ServerOf(*info_, id);
            if (!tokens_.First(server, token)) continue;
            const uint32_t fromEnd = tokens_.Total(server) - tokens_.Take(server);
            uint32_t at = count_++;
            for (; at > 0 && servers_[at - 1] > server; --at) {
                servers_[at] = servers_[at - 1];
                sums_[at] = sums_[at - 1];
            }
            servers_[at] = server;
            sums_[at] = relay_->Arrived(server) - static_cast<uint64_t>(fromEnd) * sumBytes_;
        }
        return count_;
    }
    __aicore__ inline GM_ADDR Sum(uint32_t i) const { return sums_[i]; }

private:
    const MoeDistributeInfo* info_ = nullptr;
    Relay* relay_ = nullptr;
    ServerTokens tokens_;
    uint32_t servers_[kMaxTopK];
    GM_ADDR sums_[kMaxTopK];
    uint32_t token_ = kMaxBatch, count_ = 0;  // the token, its servers
    uint32_t sumBytes_ = 0;
};

// The records of this server's pairs, after the source indices of assist_info_for_combine: [S] numbers, [S][maxBS]
// records.
class StoredRecords {
public:
    __aicore__ inline void Init(const MoeDistributeInfo& info, GM_ADDR assist) {
        info_ = &info;
        counts_ = assist + StoredRecordsOffset(info);
        records_ = counts_ + static_cast<uint64_t>(Servers(info)) * kBlock;
        bytes_ = RecordBytes(info.topK);
    }
    __aicore__ inline GM_ADDR Count(uint32_t server) const { return counts_ + static_cast<uint64_t>(server) * kBlock; }
    __aicore__ inline GM_ADDR Record(uint32_t server, uint32_t number) const {
        return records_ + (static_cast<uint64_t>(server) * info_->maxBatch + number) * bytes_;
    }
    __aicore__ inline uint32_t bytes() const { return bytes_; }  // of a record
    // Starts to load a record.
    __aicore__ inline void Load(const LocalTensor<int32_t>& words, uint32_t server, uint32_t number) const {
        GlobalTensor<int32_t> source;
        const uint32_t count = bytes_ / static_cast<uint32_t>(sizeof(int32_t));
        source.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(Record(server, number)), count);
        AscendC::DataCopy(words, source, count);
    }
    // Stores, and loads, the number of a server's records.
    __aicore__ inline void StoreCount(Relay& relay, uint32_t server, uint32_t count) const {
        if (info_->maxBatch != 0) relay.StoreNumber(Count(server), count);
    }
    __aicore__ inline uint32_t LoadCount(Relay& relay, uint32_t server) const {
        return info_->maxBatch != 0 ? relay.LoadNumber(Count(server)) : 0;
    }

private:
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR counts_ = nullptr;
    GM_ADDR records_ = nullptr;
    uint32_t bytes_ = 0;
};

// An item (token, part of H) of a core's share of the items of a pass, one server's after another's.
template <typename Totals>
class ServerItem {
public:
    // `totals`: tokens of a server.
    __aicore__ inline ServerItem(const MoeDistributeInfo& info, Totals& totals, const ServerPass& pass, uint32_t core,
                                 uint32_t parts)
        : info_(&info), totals_(&totals), pass_(pass), parts_(parts) {
        uint32_t items = 0;
        for (uint32_t i = pass.first; i < pass.last; ++i) items += totals.Total(pass.At(info, i)) * parts;
        at_ = PartBegin(items, core, info.cores);
        left_ = PartBegin(items, core + 1, info.cores) - at_;
    }
    // Goes on to the next server where this one has none left. Returns false if none is left.
    __aicore__ inline bool Find() {
        for (uint32_t items; left_ > 0 && at_ >= (items = totals_->Total(server()) * parts_); ++pass_.first)
            at_ -= items;
        return left_ > 0;
    }
    __aicore__ inline void Next() {
        ++at_;
        --left_;
    }
    __aicore__ inline uint32_t server() const { return pass_.At(*info_, pass_.first); }
    __aicore__ inline uint32_t at() const { return at_; }  // of the server's items

private:
    const MoeDistributeInfo* info_;
    Totals* totals_;
    ServerPass pass_;
    uint32_t parts_, at_, left_;
};

// A record's lists in UB.
struct RecordView {
    LocalTensor<int32_t> words;
    uint32_t list;  // words from one list to the next
    __aicore__ inline void Init(const LocalTensor<int32_t>& record, uint32_t topK) {
        words = record;
        list = PaddedInts(topK);
    }
    __aicore__ inline uint32_t IdAt(uint32_t k) const { return kBlockWords + k; }
    __aicore__ inline uint32_t RowAt(uint32_t k) const { return kBlockWords + list + k; }
    __aicore__ inline uint32_t WeightAt(uint32_t k) const { return kBlockWords + 2 * list + k; }
    __aicore__ inline uint32_t Token() const { return static_cast<uint32_t>(words.GetValue(0)); }
    __aicore__ inline int32_t Id(uint32_t k) const { return words.GetValue(IdAt(k)); }
    __aicore__ inline int32_t Row(uint32_t k) const { return words.GetValue(RowAt(k)); }
    __aicore__ inline int32_t WeightBits(uint32_t k) const { return words.GetValue(WeightAt(k)); }
};

}  // namespace moe

#endif  // ASCEND_MOE_HIERARCHY_RELAY_H
