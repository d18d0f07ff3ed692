// Dispatch, algorithm "hierarchy": a token's row is sent once to every server that owns one of its experts, to the rank
// there with the sender's local rank, which stores it to the owners. Within its own server the sender stores it itself,
// while the rows for other servers are in transit. Each rank then gathers its window into expand_x as in "window".
//
// phase | function             | which cores   | reads                | writes                         | which cores
//       |                      |               |                      |                                | synchronize
// ------+----------------------+---------------+----------------------+--------------------------------+------------
// 0     | Exchange::Enter      | all           | context, epoch word  | nothing                        |
// 1     | RoutingTable::Count, | all: a share  | expert_ids [BS][K]   | workspace: histograms          | cores of
//       | ServerTokens::Count, | of the tokens | int32,               | [cores][E] int32, tokens a     | the rank
//       | Exchange::Open       |               | x_active_mask; core  | server [cores][S] int32; core  |
//       |                      |               | 0: abort blocks      | 0: epoch                       |
// 2     | RowPlaces::Find,     | all; core 0   | histograms, tokens a | workspace: totals [E] int32    |
//       | ServerTokens::Find   | stores        | server               |                                |
// 3     | AlltoAllDispatch     | all: the      | ids and mask again,  | windowsOut: records with rows, | cores of
//       | <false>,             | share of      | x [BS][H],           | messages to other servers; an  | the rank
//       | PostRecords          | phase 1; of   | expert_scales        | item a server                  |
//       |                      | the peers     | [BS][K] fp32         |                                |
// 4     | AlltoAllDispatch     | the same      | the same; totals     | the ping-pong buffers of       | cores of
//       | <true>,              |               |                      | owners of this server: rows;   | the rank
//       | BarrierAfterSend,    |               |                      | stored records of this server; |
//       | SetStatus            |               |                      | messages: its state areas      |
// 5     | WaitStatus           | all: a share  | messages of this     | nothing                        | the rail,
//       |                      | of the places | server's ranks, and  |                                | then cores
//       |                      |               | those to relay       |                                | of the rank
// 6     | ForwardRows          | all: a share  | records received     | the ping-pong buffers of this  | cores of
//       |                      | of them       |                      | server: rows; stored records   | the rank
//       |                      |               |                      | of other servers               |
// 7     | PassMessagesOn       | all: a share  | messages to relay    | state areas of this server     |
//       |                      | of them       |                      |                                |
// 8     | WaitDispatch         | all: a share  | status messages,     | workspace: messages [W] int32  | all ranks,
//       |                      | of the        | abort blocks         |                                | then cores
//       |                      | sources       |                      |                                | of the rank
// 9     | ArrivedRows::Copy    | all: a share  | counts, rows in the  | the outputs, as window's       |
//       |                      | of the rows   | own ping-pong buffer |                                |
//
// A collective error stops the rows of the rank that has it, but no messages, so every rank raises it after phase 8. A
// fatal error also stops the relay, and aborts report it. In split mode, send returns after phase 4; finish runs phases
// 0 and 5 to 9.
#ifndef ASCEND_MOE_HIERARCHY_DISPATCH_H
#define ASCEND_MOE_HIERARCHY_DISPATCH_H

#include "../common/outputs.h"
#include "../common/quantize.h"
#include "relay.h"

namespace moe {

// Counts for messages: the totals, which every core has after RowPlaces::Find.
struct TotalCounts {
    RoutingTable* routing;
    uint32_t localExperts;
    __aicore__ inline void Select(uint32_t) {}
    __aicore__ inline uint32_t Rows(uint32_t peer, uint32_t localExpert) {
        return routing->Total(static_cast<int32_t>(peer * localExperts + localExpert));
    }
};

template <bool kQuant>
class HierarchyDispatch : PairTables {
public:
    __aicore__ inline void Init(const DispatchArguments& arguments, const MoeDistributeDispatchTiling& tiling) {
        args_ = arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        counts_.Init(args_, tiling);
        trailerBytes_ = TrailerBlocks(*info_) * kBlock;
        rowStride_ = DispatchRowStride(info_->hidden, WireSize(*info_), kQuant, TrailerBlocks(*info_));
        rowBytes_ = rowStride_ - trailerBytes_;
        recordBytes_ = RecordBytes(info_->topK);
        arrived_.Init(args_, tiling, rowStride_, trailerBytes_);
        stored_.Init(*info_, args_.expandIdx);
    }
    __aicore__ inline void Process(TPipe& pipe) {
        if (exchange_.Enter(pipe, *info_, kOpDispatch, args_.group, args_.workspace, args_.performanceInfo,
                            args_.errorRecord, args_.tiling, tiling_->mc2))
            Run();
        exchange_.Exit();
    }
    // For Exchange::WaitStatus in phase 5.
    __aicore__ inline OpStatus Arrived(uint32_t, const LocalTensor<uint32_t>&) { return OpStatus(); }

private:
    __aicore__ inline void Run() {
        exchange_.BarrierInit();
        if (info_->part != kPartFinish && !Send()) {
            Leave();
            return;
        }
        if (exchange_.Sent()) return;
        if (!Forward() || !WaitDispatch()) {
            Leave();
            return;
        }
        arrived_.Copy(exchange_, keeper_, counts_);  // UB layout 4 (phase 9)
    }
    // Returns false if the communicator is in the failed state.
    __aicore__ inline bool Send() {
        SendBuffInit();
        tokens_.Count();
        if (!exchange_.Open(routing_.Count())) return false;
        exchange_.Fail(places_.Find());
        tokens_.Find(exchange_.core());
        routing_.StoreTotals();
        AlltoAllDispatch<false>();
        PostRecords();
        AlltoAllDispatch<true>();
        exchange_.BarrierAfterSend(OpStatus());
        SetStatus();
        return true;
    }

    // UB layout 1 (phases 1 to 4): routing tables and rows in flight; for the current tokens row numbers, trailers, and
    // records; a message and an item to other servers.
    __aicore__ inline void SendBuffInit() {
        MOE_PHASE(exchange_.timestamps(), SendBuffInit);
        TPipe& pipe = exchange_.pipe();
        TablesInit(exchange_, *info_, args_);
        rows_.Init(pipe, *tiling_, args_.x, nullptr);
        const SendRecordsUb ub(*info_);
        pipe.InitBuffer(trailerBuf_, ub.trailers);
        pipe.InitBuffer(weightBuf_, ub.weights);
        pipe.InitBuffer(recordBuf_, ub.records);
    }

    // Sends rows to this server (kHere), or to the other servers.
    template <bool kHere>
    __aicore__ inline void AlltoAllDispatch() {
        MOE_PHASE(exchange_.timestamps(), AlltoAllDispatch);
        if (exchange_.Failed()) return;  // the status message carries the reason, no row leaves
        const uint32_t topK = info_->topK, end = routing_.end() / topK;
        for (uint32_t token = routing_.begin() / topK; token < end;) {
            const uint32_t count = Min(RecordTokens(topK), end - token);
            routing_.pairs().Load(token * topK, count * topK);
            LoadWeights(token * topK, count * topK);
            PlaceTokens<kHere>(token, count);
            for (uint32_t i = 0; i < count; ++i) SendToken<kHere>(token + i, i);
            token += count;
        }
        rows_.Release();
    }
    __aicore__ inline void LoadWeights(uint32_t at, uint32_t count) {
        GlobalTensor<float> weights;
        weights.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(args_.expertScales) + at, count);
        CopyIn(weightBuf_.Get<float>(), weights, count);
        SyncFunc<HardEvent::MTE2_S>();
    }
    // Trailers and records of the tokens; a record has row numbers of the servers that it is for. Earlier stores from
    // their memory are done.
    template <bool kHere>
    __aicore__ inline void PlaceTokens(uint32_t first, uint32_t count) {
        SyncFunc<HardEvent::MTE3_S>();
        for (uint32_t t = 0; t < count; ++t) {
            RecordView record = RecordOf(t);
            record.words.SetValue(0, static_cast<int32_t>(first + t));
            for (uint32_t w = 1; w < kBlockWords; ++w) record.words.SetValue(w, 0);
            for (uint32_t k = 0; k < info_->topK; ++k) {
                const uint32_t i = t * info_->topK + k;
                const int32_t id = routing_.pairs().Id(i, first + t), weight = weightBuf_.Get<int32_t>().GetValue(i);
                const bool routed = routing_.pairs().Routed(id), placed = routed && Here(id) == kHere;
                const int32_t row = placed ? places_.First(id) + static_cast<int32_t>(routing_.TakePosition(id)) : 0;
                record.words.SetValue(record.IdAt(k), routed ? id : kNotRouted);
                record.words.SetValue(record.RowAt(k), row);
                record.words.SetValue(record.WeightAt(k), weight);
                if (kHere && placed)
                    SetTrailer(Trailer(i).template ReinterpretCast<int32_t>(), info_->rank, first + t, k, weight);
            }
        }
        SyncFunc<HardEvent::S_MTE3>();
    }
    // The source index and the weight, one block each.
    __aicore__ inline void SetTrailer(const LocalTensor<int32_t>& trailer, uint32_t source, uint32_t token, uint32_t k,
                                      int32_t weight) {
        LocalTensor<int32_t> words = trailer;
        for (uint32_t w = 0; w < 2 * kBlockWords; ++w) words.SetValue(w, 0);
        words.SetValue(0, static_cast<int32_t>(source));
        words.SetValue(1, static_cast<int32_t>(token));
        words.SetValue(2, static_cast<int32_t>(k));
        words.SetValue(kBlockWords, weight);
    }
    __aicore__ inline LocalTensor<int8_t> Trailer(uint32_t i) { return trailerBuf_.Get<int8_t>()[i * trailerBytes_]; }
    __aicore__ inline RecordView RecordOf(uint32_t t) {
        RecordView record;
        record.Init(recordBuf_.Get<int32_t>()[t * (recordBytes_ / sizeof(int32_t))], info_->topK);
        return record;
    }

    // Sends the row to the owners on this server, or with the record once to each other server.
    template <bool kHere>
    __aicore__ inline void SendToken(uint32_t token, uint32_t t) {
        const RecordView record = RecordOf(t);
        for (uint32_t k = 0; k < info_->topK; ++k) {
            const int32_t id = record.Id(k);
            if (id < 0 || Here(id) != kHere) continue;
            const uint32_t server = ServerOf(*info_, id);
            if (tokens_.First(server, token)) StoreRecord<kHere>(token, t, server, tokens_.Take(server));
            if constexpr (kHere)
                PutRow(info_->rank, id, record.Row(k), rows_.Fetch(token, 0), rows_.WireBytes(),
                       Trailer(t * info_->topK + k));
        }
    }
    template <bool kHere>
    __aicore__ inline void StoreRecord(uint32_t token, uint32_t t, uint32_t server, uint32_t number) {
        const LocalTensor<int8_t> record = RecordOf(t).words.template ReinterpretCast<int8_t>();
        if constexpr (kHere) {
            StoreRows(stored_.Record(server, number), record, recordBytes_);
        } else {
            GM_ADDR place = exchange_.context().staging() +
                            RelayOffset(exchange_.context(), *info_, Parity(exchange_.epoch()), server) -
                            static_cast<uint64_t>(tokens_.Total(server) - number) * ItemRowBytes();
            StoreRows(place, rows_.Fetch(token, 0), rows_.WireBytes());
            StoreRows(place + rowBytes_, record, recordBytes_);
        }
    }
    // Stages the messages to other servers and posts the items. All cores have the same totals and status.
    __aicore__ inline void PostRecords() {
        Relay relay;
        relay.Init(exchange_, *info_);
        TotalCounts counts = {&routing_, info_->localExperts};
        const ServerPass others = {1, Servers(*info_)};
        exchange_.SetStatus(counts, rowStride_, others);
        relay.PostItems(tokens_, ItemRowBytes(), others);
    }
    __aicore__ inline uint32_t ItemRowBytes() const { return rowBytes_ + recordBytes_; }
    // Stores a row of `source` into its region at the owner, a rank of this server.
    __aicore__ inline void PutRow(uint32_t source, int32_t id, int32_t number, const LocalTensor<int8_t>& row,
                                  uint32_t bytes, const LocalTensor<int8_t>& trailer) {
        const WindowContext& context = exchange_.context();
        GM_ADDR place = context.data(Owner(*info_, static_cast<uint32_t>(id))) +
                        RegionOffset(context.data_bytes(), info_->regions, Parity(exchange_.epoch()), source) +
                        exchange_.sender().rows_at() + RowOffsetBytes(number, rowStride_);
        StoreRows(place, row, bytes);
        StoreRows(place + rowBytes_, trailer, trailerBytes_);
    }

    // UB layout 2 (phases 4 and 5): messages.
    __aicore__ inline void SetStatus() {
        exchange_.NextPlan();
        SendCounts counts;
        counts.Init(exchange_.pipe(), *info_, args_.workspace);
        ServerTokens totals;
        totals.Init(exchange_.pipe(), *info_, args_.workspace);
        totals.Find(0);
        Relay relay;
        relay.Init(exchange_, *info_);
        exchange_.SetStatus(counts, rowStride_, ServerPass{0, 1});
        // The records of this rank's own tokens are already there.
        if (exchange_.core() == 0) stored_.StoreCount(relay, Mine(), exchange_.Failed() ? 0 : totals.Total(Mine()));
    }

    // Phases 5 to 7. Returns false on a fatal error.
    __aicore__ inline bool Forward() {
        exchange_.WaitStatus(*this, 0, Awaited::kRecords);
        if (exchange_.Over()) return false;
        exchange_.BeginAfterWait(1);
        exchange_.NextPlan();
        exchange_.LoadPeers();
        Relay relay;
        relay.Init(exchange_, *info_);
        relay.InitMessages();
        exchange_.BarrierAt(0, ForwardRows(relay));
        if (exchange_.Over()) return false;
        relay.PassMessagesOn();
        exchange_.sender().Flush();
        return true;
    }
    // UB layout 3 (phases 6 to 8): records, each with trailers for its rows; messages.
    __aicore__ inline OpStatus ForwardRows(Relay& relay) {
        MOE_PHASE(exchange_.timestamps(), ForwardRows);
        const ForwardUb ub(*tiling_, rowBytes_);
        exchange_.pipe().InitBuffer(recordQueue_, Ring(ub.ring), ub.record);
        OpStatus status;
        for (uint32_t server = 0; server < Servers(*info_); ++server) {
            if (server == Mine()) continue;
            uint32_t rows = 0;
            const OpStatus counted = relay.Rows(server, rows);
            // Rows are forwarded after a collective error too: the owners check their own messages and may find none.
            // If ranks differ in what the block's hash covers, all of them know from the messages.
            if (!exchange_.Failed()) Worsen(status, counted);
            if (exchange_.core() == 0) stored_.StoreCount(relay, server, rows);
            const uint32_t end = PartBegin(rows, exchange_.core() + 1, info_->cores);
            for (uint32_t i = PartBegin(rows, exchange_.core(), info_->cores); i < end; ++i) {
                if (loading_ == ub.ring) Worsen(status, ForwardRow(relay));
                LoadRow(relay, server, rows, i);
            }
        }
        while (loading_ > 0) Worsen(status, ForwardRow(relay));
        return status;
    }
    // Starts to load a row with its record.
    __aicore__ inline void LoadRow(Relay& relay, uint32_t server, uint32_t rows, uint32_t number) {
        GlobalTensor<int8_t> place;
        const uint32_t bytes = ItemRowBytes();
        place.SetGlobalBuffer(
            reinterpret_cast<__gm__ int8_t*>(relay.Arrived(server) - static_cast<uint64_t>(rows - number) * bytes),
            bytes);
        const AscendC::TEventID loaded = GetTPipePtr()->AllocEventID<HardEvent::MTE2_S>();
        records_[(first_ + loading_++) % kMaxSendRing] = {server, number, loaded};
        const LocalTensor<int8_t> row = recordQueue_.template AllocTensor<int8_t>();
        SyncFunc<HardEvent::S_MTE2>();  // the record before it in this tensor has been read
        AscendC::DataCopy(row, place, bytes);
        AscendC::SetFlag<HardEvent::MTE2_S>(loaded);
        recordQueue_.EnQue(row);
    }
    // Forwards the first of the rows that load.
    __aicore__ inline OpStatus ForwardRow(Relay& relay) {
        const Loading one = records_[first_];
        const uint32_t bytes = ItemRowBytes(), source = relay.RailPeer(one.server);
        first_ = (first_ + 1) % kMaxSendRing;
        --loading_;
        LocalTensor<int8_t> row = recordQueue_.template DeQue<int8_t>();
        AscendC::WaitFlag<HardEvent::MTE2_S>(one.loaded);
        GetTPipePtr()->ReleaseEventID<HardEvent::MTE2_S>(one.loaded);
        RecordView record;
        record.Init(row[rowBytes_].template ReinterpretCast<int32_t>(), info_->topK);
        const OpStatus status = SetTrailers(source, record, row[bytes]);
        if (status.code == kOk) {
            SyncFunc<HardEvent::S_MTE3>();
            for (uint32_t k = 0; k < info_->topK; ++k) {
                const int32_t id = record.Id(k);
                if (Here(id)) PutRow(source, id, record.Row(k), row, rowBytes_, row[bytes + k * trailerBytes_]);
            }
            StoreRows(stored_.Record(one.server, one.number), row[rowBytes_], recordBytes_);
        }
        recordQueue_.FreeTensor(row);
        return status;
    }
    // Makes the trailers of a record's rows. Numbers that no rank can have sent are corrupt; nothing is stored then.
    __aicore__ inline OpStatus SetTrailers(uint32_t source, const RecordView& record,
                                           const LocalTensor<int8_t>& trailers) {
        const uint32_t token = record.Token();
        bool corrupt = token >= info_->maxBatch;
        uint32_t odd = token;
        for (uint32_t k = 0; k < info_->topK; ++k) {
            if (!Here(record.Id(k))) continue;
            const int32_t row = record.Row(k);
            if (row >= 0 || row < -static_cast<int32_t>(info_->capacity)) {
                corrupt = true;
                odd = static_cast<uint32_t>(row);
            }
            SetTrailer(trailers[k * trailerBytes_].template ReinterpretCast<int32_t>(), source, token, k,
                       record.WeightBits(k));
        }
        if (!corrupt) return OpStatus();
        OpStatus status = InvalidOf(*info_, kCorruptStatus, AtLevel(kRecordIndex, 1), odd);
        status.source = source;
        return status;
    }

    __aicore__ inline bool WaitDispatch() {
        keeper_.Init(*info_, args_.workspace);
        return exchange_.WaitStatus(keeper_, 0, Awaited::kRelayed);
    }
    // After a failure core 0 writes zero counts, also of records, so that callers and combine see no rows.
    __aicore__ inline void Leave() {
        if (exchange_.core() == 0) {
            exchange_.NextPlan();
            Relay relay;
            relay.Init(exchange_, *info_);
            for (uint32_t server = 0; server < Servers(*info_); ++server) stored_.StoreCount(relay, server, 0);
        }
        counts_.Leave(exchange_);
    }

    DispatchArguments args_;
    const MoeDistributeDispatchTiling* tiling_ = nullptr;
    Exchange exchange_;
    RowLoader<kQuant> rows_;
    StoredRecords stored_;
    DispatchCounts counts_;
    MessageKeeper keeper_;
    ArrivedRows<kQuant> arrived_;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, kMaxSendRing> recordQueue_;
    struct Loading {
        uint32_t server, number;
        AscendC::TEventID loaded;
    };
    Loading records_[kMaxSendRing];  // that load, a ring
    uint32_t first_ = 0, loading_ = 0;
    UbBuf trailerBuf_, weightBuf_, recordBuf_;
    uint32_t rowStride_ = 0;  // of a row in an owner's window
    uint32_t rowBytes_ = 0;   // of it without its trailer
    uint32_t trailerBytes_ = 0;
    uint32_t recordBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_HIERARCHY_DISPATCH_H
