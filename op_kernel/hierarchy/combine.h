// Combine, algorithm "hierarchy": a rank passes each source's rows to the rank of its own server with the source's
// local rank. That rank sums them, weighted, in fp32 and in ascending k, one sum per token, and sends the rounded sums
// to the source. The source adds the servers' sums in ascending order, then special experts and the shared expert.
//
// Source: the rank whose token a row is. A: rows of expand_x. S: servers.
//
// phase | function         | which      | reads                 | writes                 | which cores
//       |                  | cores      |                       |                        | synchronize
// ------+------------------+------------+-----------------------+------------------------+------------
// 0     | Exchange::Enter  | all        | context, epoch word   | nothing                |
// 1     | RoutingTable::   | all: a     | expert_ids [BS][K]    | workspace: histograms  | cores of
//       | Count,           | share of   | int32, x_active_mask, | [cores][E] int32,      | the rank
//       | ServerTokens::   | the        | ep_send_counts [L*W]; | tokens a server        |
//       | Count,           | tokens,    | core 0: abort blocks  | [cores][S] int32; core |
//       | LoadSegments,    | all        |                       | 0: epoch               |
//       | Exchange::Open   | segments   |                       |                        |
// 2     | RowPlaces::Find, | all; core  | histograms            | workspace: totals [E]  |
//       | StoreTotals      | 0 stores   |                       | int32                  |
// 3     | SetWaitTpStatus- | all: a     | expand_x [A][H]       | ping-pong buffers of   | cores of
//       | AndDisPatch,     | share of   |                       | this server: rows      | the rank
//       | BarrierAfterSend | the rows   |                       |                        |
// 4     | SetStatus        | all: a     | nothing: the segments | messages: state areas  |
//       |                  | share of   | are in UB             | and ping-pong buffers  |
//       |                  | the peers  |                       | of this server         |
// 5     | WaitStatus,      | all: a     | messages of this      | workspace: rows        | the server,
//       | Arrived          | share of   | server's ranks to     | received [W] int32     | then cores
//       |                  | the places | this one and its rail |                        |
// 6     | SumServer,       | all: a     | records behind the    | windowsOut: sums,      | cores of
//       | StageMessages,   | share of   | source indices, rows  | messages; own          | the rank
//       | StageItems       | (token,    | in the own ping-pong  | ping-pong buffer: the  |
//       |                  | part of    | buffer                | sums of its own        |
//       |                  | H),        |                       | tokens; an item a      |
//       |                  | messages   |                       | server                 |
// 7     | WaitStatus,      | all: a     | messages of the       | nothing: compares      | all ranks,
//       | Arrived          | share of   | inter-node ranks,     | counts with its totals | cores
//       |                  | the places | numbers of sums       |                        |
// 8     | SumRows          | all: a     | sums in the own       | x [BS][H]              |
//       |                  | share of   | ping-pong buffer,     |                        |
//       |                  | (token,    | other addends         |                        |
//       |                  | part of H) | (Addends)             |                        |
//
// Errors are handled as in dispatch. A RoutingMismatch concerns this rank only and stops nothing that others wait for.
// After any failure Leave writes zeros into x, and core 0 writes the error record. In split mode, send returns after
// phase 4; finish counts its ids again and continues at phase 5.
#ifndef ASCEND_MOE_HIERARCHY_COMBINE_H
#define ASCEND_MOE_HIERARCHY_COMBINE_H

#include "../common/inputs.h"
#include "../common/weighted_sum.h"
#include "relay.h"

namespace moe {

// Rows of pairs do not return as such: Addends then contains only special and shared experts.
class NoRows {
public:
    __aicore__ inline void Load(uint32_t, uint32_t) {}
    __aicore__ inline void Place(RoutingTable&, uint32_t, uint32_t) {}
    __aicore__ inline GM_ADDR Address(RoutingTable&, int32_t, uint32_t, uint32_t, uint32_t) { return nullptr; }
};

// The sums of a core's share of the items (token, part of H): of the servers' sums and the source's local addends.
template <typename XType, bool kQuant>
class SourceSums {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeCombineTiling& tiling,
                                const CombineArguments& arguments, RoutingTable& routing, Relay& relay, uint32_t core) {
        info_ = &tiling.info;
        routing_ = &routing;
        relay_ = &relay;
        x_ = arguments.x;
        sumBytes_ = ReturnedRowBytes(*info_, sizeof(XType));
        parts_.Init(tiling);
        addends_.Init(pipe, tiling, arguments, none_);
        tokens_.Init(pipe, *info_, arguments.workspace);
        core_ = core;
        const TokenSumUb ub(tiling, sizeof(XType));
        pipe.InitBuffer(inQueue_, Ring(ub.ring), ub.piece);
        sum_.Init(pipe, tiling);
        const uint32_t items = parts_.Items(info_->batch);
        begin_ = PartBegin(items, core, info_->cores);
        end_ = PartBegin(items, core + 1, info_->cores);
    }
    __aicore__ inline void Run() {
        if (begin_ == end_) return;
        tokens_.Find(core_);  // its first item belongs to the first token of its share, whichever part of H
        for (uint32_t item = begin_; item < end_;) {
            const uint32_t first = parts_.Token(item);
            addends_.Load(*routing_, first, Min(addends_.ChunkTokens(), parts_.Token(end_ - 1) + 1 - first));
            SyncFunc<HardEvent::MTE2_S>();
            for (; item < end_ && parts_.Token(item) < first + addends_.tokens(); ++item) {
                const uint32_t token = parts_.Token(item), part = parts_.Part(item);
                if (item == begin_ || part == 0) FindSums(token);
                sum_.Begin(parts_.Elements(part));
                for (uint32_t i = 0; i < count_; ++i)
                    Add({sums_[i], 1.0f, false, true, AddendKind::kWhole, 0.0f}, part);
                addends_.Begin(token);
                for (Addend addend; addends_.Next(*routing_, addend);) Add(addend, part);
                sum_.Store(parts_.Place(x_, token, part));
            }
        }
    }

private:
    // Finds the servers' sums of a token, servers ascending.
    __aicore__ inline void FindSums(uint32_t token) {
        count_ = 0;
        for (uint32_t k = 0; k < info_->topK; ++k) {
            const int32_t id = routing_->pairs().Id((token - addends_.first()) * info_->topK + k, token);
            if (!routing_->pairs().Routed(id)) continue;
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
    }
    __aicore__ inline void Add(const Addend& addend, uint32_t part) {
        LocalTensor<int8_t> piece = inQueue_.template AllocTensor<int8_t>();
        parts_.Load(piece, addend.address, addend.travelled, part);
        inQueue_.EnQue(piece);
        piece = inQueue_.template DeQue<int8_t>();
        sum_.Add(piece, addend);
        inQueue_.FreeTensor(piece);
    }

    const MoeDistributeInfo* info_ = nullptr;
    RoutingTable* routing_ = nullptr;
    Relay* relay_ = nullptr;
    GM_ADDR x_ = nullptr;
    NoRows none_;
    Addends<XType, NoRows> addends_;
    ServerTokens tokens_;
    RowParts<XType, kQuant> parts_;
    AscendC::TQue<AscendC::QuePosition::VECIN, 1> inQueue_;
    WeightedSum<XType, kQuant> sum_;
    uint32_t servers_[kMaxTopK];
    GM_ADDR sums_[kMaxTopK];
    uint32_t count_ = 0;  // servers of the token
    uint32_t sumBytes_ = 0;
    uint32_t core_ = 0;
    uint32_t begin_ = 0, end_ = 0;  // items
};

template <typename XType, bool kQuant>
class HierarchyCombine : PairTables {
public:
    __aicore__ inline void Init(const CombineArguments& arguments, const MoeDistributeCombineTiling& tiling) {
        args_ = arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        rowBytes_ = static_cast<uint32_t>(info_->hidden * sizeof(XType));
        sumBytes_ = ReturnedRowBytes(*info_, sizeof(XType));
        stored_.Init(*info_, args_.expandIdx);
        arrivedRows_.SetGlobalBuffer(
            reinterpret_cast<__gm__ int32_t*>(args_.workspace + CountsOffset(info_->cores, info_->experts)),
            info_->world * kBlockWords);
    }
    __aicore__ inline void Process(TPipe& pipe) {
        if (exchange_.Enter(pipe, *info_, kOpCombine, args_.group, args_.workspace, args_.performanceInfo,
                            args_.errorRecord, args_.tiling, tiling_->mc2))
            Run();
        exchange_.Exit();
    }

    // For Exchange::WaitStatus, for each message of this core's share: from the rank of a place; in phase 7 from the
    // place itself.
    __aicore__ inline OpStatus Arrived(uint32_t place, const LocalTensor<uint32_t>& message) {
        if (!second_) StoreRowsThatCame(place, message);
        if (second_ || Server(*info_, place) == Mine()) return CompareCounts(*info_, routing_, place, message);
        return OpStatus();
    }

private:
    __aicore__ inline void Run() {
        PlanInit();
        if (!Send()) {
            Leave();
            return;
        }
        if (exchange_.Sent()) return;
        if (Relayed() && WaitSums()) {
            SumRows();
        } else {
            Leave();
        }
    }
    // Finish counts alone. Returns false if the communicator is in the failed state.
    __aicore__ inline bool Send() {
        const bool sends = info_->part != kPartFinish;
        tokens_.Count();
        OpStatus mine = routing_.Count();
        if (sends) {
            Worsen(mine, LoadAllSegments());
            Worsen(mine, LoadStored());
        }
        if (sends ? !exchange_.Open(mine) : !exchange_.Agree(mine)) return false;
        exchange_.Fail(places_.Find());
        routing_.StoreTotals();
        if (sends) ReturnRowsToRail();
        exchange_.BarrierAfterSend(OpStatus());
        if (sends) exchange_.SetStatus(segments_, rowBytes_);
        return true;
    }

    // UB layout 1 (phases 1 to 5).
    __aicore__ inline void PlanInit() {
        MOE_PHASE(exchange_.timestamps(), BuffInit);
        TPipe& pipe = exchange_.pipe();
        TablesInit(exchange_, *info_, args_);
        loader_.Init(pipe, *tiling_, args_.expandX, rowBytes_);
        segments_.Init(pipe, *info_);
        const ReturnToRailUb ub(*info_);
        pipe.InitBuffer(prefixBuf_, ub.counts);
        pipe.InitBuffer(cameBuf_, ub.number);
        pipe.InitBuffer(storedBuf_, ub.stored);
    }
    // The numbers of the records that dispatch has stored.
    __aicore__ inline OpStatus LoadStored() {
        GlobalTensor<int32_t> stored;
        const uint32_t words = Servers(*info_) * kBlockWords;
        if (info_->maxBatch == 0) {
            for (uint32_t w = 0; w < words; ++w) storedBuf_.Get<int32_t>().SetValue(w, 0);
            return OpStatus();
        }
        stored.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(stored_.Count(0)), words);
        AscendC::DataCopy(storedBuf_.Get<int32_t>(), stored, words);
        SyncFunc<HardEvent::MTE2_S>();
        for (uint32_t server = 0; server < Servers(*info_); ++server) {
            if (Stored(server) > info_->maxBatch)
                return InvalidOf(*info_, kInvalidSourceIndex, kSourceIndexRecords, Stored(server));
        }
        return OpStatus();
    }
    __aicore__ inline OpStatus LoadAllSegments() {
        const OpStatus status = LoadSegments(*info_, args_.epSendCounts, prefixBuf_.Get<int32_t>(), segments_);
        if (status.code == kOk) segments_.AlignEnd();
        return status;
    }
    // Passes this core's share of the rows to the ranks of this server that sum them.
    __aicore__ inline void ReturnRowsToRail() {
        MOE_PHASE(exchange_.timestamps(), SetWaitTpStatusAndDisPatch);
        if (exchange_.Failed()) return;
        const uint32_t begin = PartBegin(segments_.Rows(), exchange_.core(), info_->cores);
        const uint32_t end = PartBegin(segments_.Rows(), exchange_.core() + 1, info_->cores);
        if (begin == end) return;
        uint32_t slot = segments_.Seek(begin);
        for (uint32_t row = begin; row < end;) {
            while (segments_.End(slot) <= row) ++slot;
            const uint32_t count = Min(tiling_->sendRows, Min(end, segments_.End(slot)) - row);
            loader_.Load(row, count);
            const LocalTensor<int8_t> chunk = loader_.Take();
            const int32_t at = segments_.Offset(slot) + static_cast<int32_t>(row - segments_.Start(slot));
            StoreRows(RailPlace(slot % info_->world) + RowOffsetBytes(at, rowBytes_), chunk, count * rowBytes_);
            loader_.Free(chunk);
            row += count;
        }
    }
    // Where the rows end that this rank returns for a source: at this server's rank with the source's local rank, in
    // the region with the source's server and this rank's local rank.
    __aicore__ inline GM_ADDR RailPlace(uint32_t source) {
        const uint32_t forwarder = Mine() * info_->intraNodeRanks + LocalRank(*info_, source);
        return RegionEnd(forwarder, Server(*info_, source) * info_->intraNodeRanks + LocalRank(*info_, info_->rank));
    }
    __aicore__ inline GM_ADDR RegionEnd(uint32_t rank, uint32_t region) {
        const WindowContext& context = exchange_.context();
        return context.data(rank) +
               RegionOffset(context.data_bytes(), info_->regions, Parity(exchange_.epoch()), region) +
               exchange_.sender().rows_at();
    }

    // Stores the number of rows that the rank of a place has passed on, for the other cores.
    __aicore__ inline void StoreRowsThatCame(uint32_t place, const LocalTensor<uint32_t>& message) {
        uint32_t rows = 0;
        for (uint32_t l = 0; l < info_->localExperts; ++l) rows += message.GetValue(StatusWriter::CountWord(l));
        LocalTensor<int32_t> came = cameBuf_.Get<int32_t>();
        SyncFunc<HardEvent::MTE3_S>();
        for (uint32_t w = 0; w < kBlockWords; ++w) came.SetValue(w, static_cast<int32_t>(rows));
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(arrivedRows_[place * kBlockWords], came, kBlockWords);
    }

    // Phases 5 and 6. Returns false on a fatal error.
    __aicore__ inline bool Relayed() {
        exchange_.WaitStatus(*this, 0, Awaited::kReturned);
        if (exchange_.Over()) return false;
        exchange_.BeginSecondLevel();
        exchange_.NextPlan();
        Relay relay;
        relay.Init(exchange_, *info_);
        relay.InitMessages();
        const OpStatus mine = SumServer(relay);  // UB layout 2
        relay.StageMessages();
        exchange_.BarrierAt(0, mine);
        if (exchange_.Over()) return false;
        relay.StageItems(*this, sumBytes_);
        relay.Post();
        return true;
    }

    // UB: rows that have arrived, a block per place; numbers of records, a record, sums.
    __aicore__ inline OpStatus SumServer(Relay& relay) {
        MOE_PHASE(exchange_.timestamps(), SumServer);
        TPipe& pipe = exchange_.pipe();
        const ServerSumsUb ub(*tiling_, sizeof(XType));
        pipe.InitBuffer(rowsBuf_, ub.came);
        pipe.InitBuffer(storedBuf_, ub.stored);
        if (exchange_.Failed()) return OpStatus();
        AscendC::DataCopy(rowsBuf_.Get<int32_t>(), arrivedRows_, info_->world * kBlockWords);
        OpStatus status = LoadStored();
        if (status.code != kOk) return status;
        UbBuf recordBuf;
        pipe.InitBuffer(recordBuf, ub.records);
        ServerSums sums;
        sums.Init(pipe, *tiling_);
        ServerItem loads(*info_, exchange_.core(), tiling_->partsPerToken), item = loads;
        while (item.Find(*this)) {
            uint32_t count = 0;
            SyncFunc<HardEvent::S_MTE2>();
            for (; count < kSumRecords && loads.Find(*this); ++count, ++loads.at)
                stored_.Load(RecordWords(recordBuf, count), loads.server(), sums.Token(loads.at));
            SyncFunc<HardEvent::MTE2_S>();
            for (uint32_t i = 0; i < count && item.Find(*this); ++i, ++item.at) {
                const LocalTensor<int32_t> words = RecordWords(recordBuf, i);
                const uint32_t server = item.server(), fromEnd = Stored(server) - sums.Token(item.at);
                status = CheckRecord(words, server);
                if (status.code != kOk) return status;
                GM_ADDR end = server == Mine() ? relay.Arrived(server) : relay.Staged(server);
                SumRecord(sums, words, server, sums.Part(item.at), end - static_cast<uint64_t>(fromEnd) * sumBytes_);
            }
        }
        return status;
    }
    __aicore__ inline LocalTensor<int32_t> RecordWords(UbBuf& records, uint32_t i) {
        return records.Get<int32_t>()[i * (stored_.bytes() / sizeof(int32_t))];
    }
    __aicore__ inline uint32_t Stored(uint32_t server) {
        return static_cast<uint32_t>(storedBuf_.Get<int32_t>().GetValue(server * kBlockWords));
    }
    // Whether all rows of a record have arrived.
    __aicore__ inline OpStatus CheckRecord(const LocalTensor<int32_t>& words, uint32_t server) {
        RecordView record;
        record.Init(words, info_->topK);
        for (uint32_t k = 0; k < info_->topK; ++k) {
            if (!Here(record.Id(k))) continue;
            const int32_t row = record.Row(k), came = CameFrom(Region(server, record.Id(k)));
            if (row >= 0 || row < -came)
                return InvalidOf(*info_, kInvalidSourceIndex, kSourceIndexRecords, static_cast<uint32_t>(row));
        }
        return OpStatus();
    }
    __aicore__ inline int32_t CameFrom(uint32_t place) { return rowsBuf_.Get<int32_t>().GetValue(place * kBlockWords); }
    // The region of the rows that an expert's owner has passed on for a server's source.
    __aicore__ inline uint32_t Region(uint32_t server, int32_t id) const {
        return server * info_->intraNodeRanks + LocalRank(*info_, Owner(*info_, static_cast<uint32_t>(id)));
    }

    // Sums plain rows, and stores the sums as rows or codes.
    class ServerSums {
    public:
        __aicore__ inline void Init(TPipe& pipe, const MoeDistributeCombineTiling& tiling) {
            const ServerSumsUb ub(tiling, sizeof(XType));
            plain_ = ServerSumTiling(tiling);
            parts_.Init(plain_);
            pipe.InitBuffer(inQueue_, Ring(ub.ring), ub.piece);
            sum_.Init(pipe, plain_);
            if constexpr (kQuant) {
                quantizer_.Init(pipe, tiling.info.hidden, tiling.partElements);
                pipe.InitBuffer(codeQueue_, 1, ub.codes);
            }
        }
        __aicore__ inline uint32_t Token(uint32_t item) const { return parts_.Token(item); }
        __aicore__ inline uint32_t Part(uint32_t item) const { return parts_.Part(item); }
        __aicore__ inline void Begin(uint32_t part) { sum_.Begin(parts_.Elements(part)); }
        __aicore__ inline void Add(GM_ADDR row, float weight, uint32_t part) {
            const Addend addend = {row, weight, true, true, AddendKind::kWhole, 0.0f};
            LocalTensor<int8_t> piece = inQueue_.template AllocTensor<int8_t>();
            parts_.Load(piece, row, false, part);
            inQueue_.EnQue(piece);
            piece = inQueue_.template DeQue<int8_t>();
            sum_.Add(piece, addend);
            inQueue_.FreeTensor(piece);
        }
        __aicore__ inline void Store(GM_ADDR place, uint32_t part) {
            if constexpr (kQuant) {
                StoreCodes(place, part);
            } else {
                sum_.Store(parts_.Place(place, 0, part));
            }
        }

    private:
        __aicore__ inline void StoreCodes(GM_ADDR place, uint32_t part) {
            const uint32_t elements = parts_.Elements(part), first = part * plain_.partElements;
            const uint32_t scales = BlockScalesOffset(plain_.info.hidden) + first / kCodesOfScale * kScaleBytes;
            LocalTensor<int8_t> row = codeQueue_.template AllocTensor<int8_t>();
            quantizer_.Quantize(row, sum_.Take(), first);
            sum_.Drop();
            codeQueue_.EnQue(row);
            row = codeQueue_.template DeQue<int8_t>();
            StoreRows(place + first, row[first], elements);
            StoreRows(place + scales, row[scales], elements / kCodesOfScale * kScaleBytes);
            codeQueue_.FreeTensor(row);
        }

        MoeDistributeCombineTiling plain_;
        RowParts<XType, false> parts_;
        WeightedSum<XType, false> sum_;
        CommQuantizer<XType> quantizer_;
        AscendC::TQue<AscendC::QuePosition::VECIN, 1> inQueue_;
        AscendC::TQue<AscendC::QuePosition::VECOUT, 1> codeQueue_;
    };
    __aicore__ inline void SumRecord(ServerSums& sums, const LocalTensor<int32_t>& words, uint32_t server,
                                     uint32_t part, GM_ADDR place) {
        RecordView record;
        record.Init(words, info_->topK);
        sums.Begin(part);
        for (uint32_t k = 0; k < info_->topK; ++k) {
            if (!Here(record.Id(k))) continue;
            GM_ADDR row =
                RegionEnd(info_->rank, Region(server, record.Id(k))) + RowOffsetBytes(record.Row(k), rowBytes_);
            sums.Add(row, words.ReinterpretCast<float>().GetValue(record.WeightAt(k)), part);
        }
        sums.Store(place, part);
    }

public:
    // For ServerItem and Relay::StageItems: sums for the ranks of a server.
    __aicore__ inline uint32_t Total(uint32_t server) { return Stored(server); }

private:
    // UB layout 3 (phase 7): totals, messages.
    __aicore__ inline bool WaitSums() {
        exchange_.NextPlan();
        second_ = true;
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
        routing_.LoadTotals();
        Relay relay;
        relay.Init(exchange_, *info_);
        if (!exchange_.WaitStatus(*this, 0, Awaited::kSums)) return false;
        // After the core barrier all messages are there, and so are the numbers of the sums.
        totals_.Init(exchange_.pipe(), *info_, args_.workspace);
        totals_.Find(0);
        OpStatus mine;
        for (uint32_t server = 0; server < Servers(*info_); ++server) {
            uint32_t rows = 0;
            if (server != Mine()) {
                Worsen(mine, relay.Rows(server, rows));
            } else {
                rows = stored_.LoadCount(relay, server);
            }
            if (rows != totals_.Total(server) && mine.code == kOk)
                mine = MismatchOf(*info_, server | kMismatchSums, totals_.Total(server), rows);
        }
        exchange_.Fail(mine);
        return exchange_.status().code == kOk;
    }

    // UB layout 4 (phase 8): the ids again, and the sums of this core's share.
    __aicore__ inline void SumRows() {
        MOE_PHASE(exchange_.timestamps(), SumRows);
        exchange_.NextPlan();
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
        Relay relay;
        relay.Init(exchange_, *info_);
        SourceSums<XType, kQuant> sums;
        sums.Init(exchange_.pipe(), *tiling_, args_, routing_, relay, exchange_.core());
        sums.Run();
        AscendC::PipeBarrier<PIPE_ALL>();
    }

    __aicore__ inline void Leave() { LeaveCombine(exchange_, *tiling_, args_.x, rowBytes_); }

    CombineArguments args_;
    const MoeDistributeCombineTiling* tiling_ = nullptr;
    Exchange exchange_;
    ServerTokens totals_;
    ReturnLoader<XType, false> loader_;
    SegmentTable segments_;
    StoredRecords stored_;
    GlobalTensor<int32_t> arrivedRows_;
    UbBuf prefixBuf_, cameBuf_, rowsBuf_, storedBuf_;
    uint32_t rowBytes_ = 0;
    uint32_t sumBytes_ = 0;
    bool second_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_HIERARCHY_COMBINE_H
