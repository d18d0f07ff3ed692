// MoeDistributeDispatch, algorithm "hierarchy": a token's row goes once to every server that owns one of its experts,
// to the rank there that has the sender's lane; that rank stores it to the owners. Within the own server the sender
// stores it itself. Each rank then gathers its window into expand_x as in "window".
//
// phase | function            | which cores  | reads                  | writes                   | who meets
// ------+---------------------+--------------+------------------------+--------------------------+----------
// 0     | Exchange::Enter     | all          | context, epoch word    | nothing                  |
// 1     | RoutingTable::Count,| all: a share | expert_ids [BS][K]     | workspace: histograms    | cores of
//       | ServerTokens::Count,| of the       | int32, x_active_mask;  | [cores][E] int32, tokens | the rank
//       | Exchange::Open      | tokens       | core 0: abort blocks   | a server [cores][S]      |
//       |                     |              |                        | int32; core 0: epoch     |
// 2     | RowPlaces::Find,    | all; core 0  | histograms, tokens a   | workspace: totals [E]    |
//       | ServerTokens::Find  | stores       | server                 | int32                    |
// 3     | AlltoAllDispatch,   | all: the     | ids and mask again, x  | the halves of owners of  | cores of
//       | MeetAfterSend       | share of     | [BS][H], expert_scales | this server: rows;       | the rank
//       |                     | phase 1      | [BS][K] fp32           | windowsOut: records with |
//       |                     |              |                        | rows; kept records of    |
//       |                     |              |                        | this server              |
// 4     | SetStatus,          | all: a share | totals                 | messages: state areas of | cores of
//       | Relay::StageItems,  | of the peers,|                        | this server, windowsOut; | the rank
//       | Relay::Post         | of servers   |                        | an item a server         |
// 5     | WaitStatus          | all: a share | messages of this       | nothing                  | the lane,
//       |                     | of the places| server's ranks, and    |                          | then
//       |                     |              | those to relay         |                          | cores of
//       |                     |              |                        |                          | the rank
// 6     | ForwardRows         | all: a share | records that came      | the halves of this       | cores of
//       |                     | of them      |                        | server: rows; kept       | the rank
//       |                     |              |                        | records of other servers |
// 7     | PassMessagesOn      | all: a share | messages to relay      | state areas of this      |
//       |                     | of them      |                        | server                   |
// 8     | WaitDispatch        | all: a share | status messages, abort | workspace: messages [W]  | all
//       |                     | of the       | blocks                 | int32                    | ranks,
//       |                     | sources      |                        |                          | then
//       |                     |              |                        |                          | cores of
//       |                     |              |                        |                          | the rank
// 9     | ArrivedRows::Copy   | all: a share | counts, rows in the    | the outputs, as window's |
//       |                     | of the rows  | own half               |                          |
//
// A collective error stops the rows of the rank that has it, never messages: so every rank raises it after phase 8. A
// fatal one stops the relay too; then aborts tell it. Of two launches send ends after phase 4, and finish does 0 and 5
// to 9.
#ifndef ASCEND_MOE_HIERARCHY_DISPATCH_H
#define ASCEND_MOE_HIERARCHY_DISPATCH_H

#include "../common/outputs.h"
#include "../common/quantize.h"
#include "relay.h"

namespace moe {

template <typename XType, bool kQuant>
class HierarchyDispatch : PairTables {
public:
    __aicore__ inline void Init(const DispatchArguments& arguments, const MoeDistributeDispatchTiling& tiling) {
        args_ = arguments;
        tiling_ = &tiling;
        info_ = &tiling.info;
        counts_.Init(args_, tiling);
        tailBytes_ = TailBlocks(*info_) * kBlock;
        rowStride_ =
            DispatchRowStride(info_->hidden, kQuant ? sizeof(int8_t) : sizeof(XType), kQuant, TailBlocks(*info_));
        rowBytes_ = rowStride_ - tailBytes_;
        recordBytes_ = RecordBytes(info_->topK);
        arrived_.Init(args_, tiling, rowStride_, tailBytes_);
        kept_.Init(*info_, args_.expandIdx);
    }
    __aicore__ inline void Process(TPipe& pipe) {
        if (exchange_.Enter(pipe, *info_, kOpDispatch, args_.workspace, args_.performanceInfo, args_.errorRecord,
                            args_.tiling, tiling_->mc2))
            Run();
        exchange_.Exit();
    }
    // Exchange::WaitStatus in phase 5.
    __aicore__ inline Verdict Arrived(uint32_t, const LocalTensor<uint32_t>&) { return Verdict(); }

private:
    __aicore__ inline void Run() {
        if (info_->part == kPartFinish) {
            exchange_.BoardInit();
        } else if (!Send()) {
            Leave();
            return;
        }
        if (exchange_.Sent()) return;
        if (!Forward() || !WaitDispatch()) {
            Leave();
            return;
        }
        arrived_.Copy(exchange_, keeper_, counts_);  // UB plan 4 (phase 9)
    }
    // False: the communicator has failed before.
    __aicore__ inline bool Send() {
        SendBuffInit();
        tokens_.Count();
        if (!exchange_.Open(routing_.Count())) return false;
        exchange_.Fail(places_.Find());
        tokens_.Find(exchange_.core());
        routing_.StoreTotals();
        AlltoAllDispatch();
        exchange_.MeetAfterSend(Verdict());
        SetStatus();
        return true;
    }

    // UB plan 1 (phases 1 to 3): routing tables, rows in flight, and of the current tokens row numbers, tails of rows,
    // and records.
    __aicore__ inline void SendBuffInit() {
        MOE_PHASE(exchange_.stamps(), SendBuffInit);
        TPipe& pipe = exchange_.pipe();
        TablesInit(exchange_, *info_, args_);
        rows_.Init(pipe, *tiling_, args_.x, nullptr);
        const SendRecordsUb ub(*info_);
        pipe.InitBuffer(tailBuf_, ub.tails);
        pipe.InitBuffer(weightBuf_, ub.weights);
        pipe.InitBuffer(recordBuf_, ub.records);
    }

    __aicore__ inline void AlltoAllDispatch() {
        MOE_PHASE(exchange_.stamps(), AlltoAllDispatch);
        if (exchange_.Failed()) return;  // the status message carries the reason, no row leaves
        const uint32_t topK = info_->topK, end = routing_.end() / topK;
        for (uint32_t token = routing_.begin() / topK; token < end;) {
            const uint32_t count = Min(RecordTokens(topK), end - token);
            routing_.pairs().Load(token * topK, count * topK);
            LoadWeights(token * topK, count * topK);
            PlaceTokens(token, count);
            for (uint32_t i = 0; i < count; ++i) SendToken(token + i, i);
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
    // Tails and records of the tokens. What was stored from their memory before has left.
    __aicore__ inline void PlaceTokens(uint32_t first, uint32_t count) {
        SyncFunc<HardEvent::MTE3_S>();
        for (uint32_t t = 0; t < count; ++t) {
            RecordView record = RecordOf(t);
            record.words.SetValue(0, static_cast<int32_t>(first + t));
            for (uint32_t w = 1; w < kBlockWords; ++w) record.words.SetValue(w, 0);
            for (uint32_t k = 0; k < info_->topK; ++k) {
                const uint32_t i = t * info_->topK + k;
                const int32_t id = routing_.pairs().Id(i, first + t), weight = weightBuf_.Get<int32_t>().GetValue(i);
                const bool routed = routing_.pairs().Routed(id);
                const int32_t row = routed ? places_.First(id) + static_cast<int32_t>(routing_.TakePosition(id)) : 0;
                record.words.SetValue(record.IdAt(k), routed ? id : kNotRouted);
                record.words.SetValue(record.RowAt(k), row);
                record.words.SetValue(record.WeightAt(k), weight);
                SetTail(Tail(i).template ReinterpretCast<int32_t>(), info_->rank, first + t, k, weight);
            }
        }
        SyncFunc<HardEvent::S_MTE3>();
    }
    // The triple and the weight, a block each.
    __aicore__ inline void SetTail(const LocalTensor<int32_t>& tail, uint32_t source, uint32_t token, uint32_t k,
                                   int32_t weight) {
        LocalTensor<int32_t> words = tail;
        for (uint32_t w = 0; w < 2 * kBlockWords; ++w) words.SetValue(w, 0);
        words.SetValue(0, static_cast<int32_t>(source));
        words.SetValue(1, static_cast<int32_t>(token));
        words.SetValue(2, static_cast<int32_t>(k));
        words.SetValue(kBlockWords, weight);
    }
    __aicore__ inline LocalTensor<int8_t> Tail(uint32_t i) { return tailBuf_.Get<int8_t>()[i * tailBytes_]; }
    __aicore__ inline RecordView RecordOf(uint32_t t) {
        RecordView record;
        record.Init(recordBuf_.Get<int32_t>()[t * (recordBytes_ / sizeof(int32_t))], info_->topK);
        return record;
    }

    // The row to the owners on this server, and with the record once to each other server.
    __aicore__ inline void SendToken(uint32_t token, uint32_t t) {
        const RecordView record = RecordOf(t);
        for (uint32_t k = 0; k < info_->topK; ++k) {
            const int32_t id = record.Id(k);
            if (id < 0) continue;
            const uint32_t server = ServerOf(*info_, id);
            if (tokens_.First(server, token)) SendRecord(token, t, server, tokens_.Take(server));
            if (server != Mine()) continue;
            PutRow(info_->rank, id, record.Row(k), rows_.Fetch(token, 0), rows_.WireBytes(), Tail(t * info_->topK + k));
        }
    }
    __aicore__ inline void SendRecord(uint32_t token, uint32_t t, uint32_t server, uint32_t number) {
        const LocalTensor<int8_t> record = RecordOf(t).words.template ReinterpretCast<int8_t>();
        if (server == Mine()) {
            StoreRows(kept_.Record(server, number), record, recordBytes_);
            return;
        }
        GM_ADDR place = exchange_.context().staging() +
                        RelayOffset(exchange_.context(), *info_, Parity(exchange_.epoch()), server) -
                        static_cast<uint64_t>(tokens_.Total(server) - number) * ItemRowBytes();
        StoreRows(place, rows_.Fetch(token, 0), rows_.WireBytes());
        StoreRows(place + rowBytes_, record, recordBytes_);
    }
    __aicore__ inline uint32_t ItemRowBytes() const { return rowBytes_ + recordBytes_; }
    // A row of `source` into its region at the owner, a rank of this server.
    __aicore__ inline void PutRow(uint32_t source, int32_t id, int32_t number, const LocalTensor<int8_t>& row,
                                  uint32_t bytes, const LocalTensor<int8_t>& tail) {
        const WindowContext& context = exchange_.context();
        GM_ADDR place = context.data(Owner(*info_, static_cast<uint32_t>(id))) +
                        RegionOffset(context.data_bytes(), info_->regions, Parity(exchange_.epoch()), source) +
                        exchange_.sender().rows_at() + RowOffsetBytes(number, rowStride_);
        StoreRows(place, row, bytes);
        StoreRows(place + rowBytes_, tail, tailBytes_);
    }

    // UB plan 2 (phases 4 and 5): messages, items.
    __aicore__ inline void SetStatus() {
        exchange_.NextPlan();
        SendCounts counts;
        counts.Init(exchange_.pipe(), *info_, args_.workspace);
        ServerTokens totals;
        totals.Init(exchange_.pipe(), *info_, args_.workspace);
        totals.Find(0);
        Relay relay;
        relay.Init(exchange_, *info_);
        exchange_.SetStatus(counts, rowStride_);
        relay.StageItems(totals, ItemRowBytes());
        // The records of this rank's own tokens are there already.
        if (exchange_.core() == 0) kept_.StoreCount(relay, Mine(), exchange_.Failed() ? 0 : totals.Total(Mine()));
        relay.Post();
    }

    // Phases 5 to 7. False: a fatal error.
    __aicore__ inline bool Forward() {
        exchange_.WaitStatus(*this, 0, Awaited::kRecords);
        if (exchange_.Over()) return false;
        exchange_.BeginSecondLevel();
        exchange_.NextPlan();
        exchange_.LoadPeers();
        Relay relay;
        relay.Init(exchange_, *info_);
        relay.InitMessages();
        exchange_.MeetAt(0, ForwardRows(relay));
        if (exchange_.Over()) return false;
        relay.PassMessagesOn();
        exchange_.sender().Flush();
        return true;
    }
    // UB plan 3 (phases 6 to 8): records, each with tails for its rows; messages.
    __aicore__ inline Verdict ForwardRows(Relay& relay) {
        MOE_PHASE(exchange_.stamps(), ForwardRows);
        const ForwardUb ub(*tiling_, rowBytes_);
        exchange_.pipe().InitBuffer(recordQueue_, Ring(ub.ring), ub.record);
        Verdict verdict;
        for (uint32_t server = 0; server < Servers(*info_); ++server) {
            if (server == Mine()) continue;
            uint32_t rows = 0;
            const Verdict counted = relay.Rows(server, rows);
            // Rows go on after a collective error too: the owners judge messages of their own, and may have found none.
            // But where ranks differ in what the block's hash covers, all of them know that from the messages.
            if (!exchange_.Failed()) Worsen(verdict, counted);
            if (exchange_.core() == 0) kept_.StoreCount(relay, server, rows);
            const uint32_t end = PartBegin(rows, exchange_.core() + 1, info_->cores);
            for (uint32_t i = PartBegin(rows, exchange_.core(), info_->cores); i < end; ++i)
                Worsen(verdict, ForwardRow(relay, server, rows, i));
        }
        return verdict;
    }
    __aicore__ inline Verdict ForwardRow(Relay& relay, uint32_t server, uint32_t rows, uint32_t number) {
        GlobalTensor<int8_t> place;
        const uint32_t bytes = ItemRowBytes(), source = relay.LaneRank(server);
        place.SetGlobalBuffer(
            reinterpret_cast<__gm__ int8_t*>(relay.Arrived(server) - static_cast<uint64_t>(rows - number) * bytes),
            bytes);
        LocalTensor<int8_t> row = recordQueue_.template AllocTensor<int8_t>();
        SyncFunc<HardEvent::S_MTE2>();  // the record before has been read
        AscendC::DataCopy(row, place, bytes);
        recordQueue_.EnQue(row);
        row = recordQueue_.template DeQue<int8_t>();
        SyncFunc<HardEvent::MTE2_S>();
        RecordView record;
        record.Init(row[rowBytes_].template ReinterpretCast<int32_t>(), info_->topK);
        const Verdict verdict = SetTails(source, record, row[bytes]);
        if (verdict.code == kOk) {
            SyncFunc<HardEvent::S_MTE3>();
            for (uint32_t k = 0; k < info_->topK; ++k) {
                const int32_t id = record.Id(k);
                if (Here(id)) PutRow(source, id, record.Row(k), row, rowBytes_, row[bytes + k * tailBytes_]);
            }
            StoreRows(kept_.Record(server, number), row[rowBytes_], recordBytes_);
        }
        recordQueue_.FreeTensor(row);
        return verdict;
    }
    // Whether an expert's owner is of this server.
    __aicore__ inline bool Here(int32_t id) const {
        return id >= 0 && id < static_cast<int32_t>(info_->experts) && ServerOf(*info_, id) == Mine();
    }
    __aicore__ inline uint32_t Mine() const { return Server(*info_, info_->rank); }
    // The tails of a record's rows. Numbers that no rank can have sent: corrupt, and nothing is stored.
    __aicore__ inline Verdict SetTails(uint32_t source, const RecordView& record, const LocalTensor<int8_t>& tails) {
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
            SetTail(tails[k * tailBytes_].template ReinterpretCast<int32_t>(), source, token, k, record.WeightBits(k));
        }
        if (!corrupt) return Verdict();
        Verdict verdict = InvalidOf(*info_, kCorruptStatus, AtLevel(kRecordIndex, 1), odd);
        verdict.source = source;
        return verdict;
    }

    __aicore__ inline bool WaitDispatch() {
        keeper_.Init(*info_, args_.workspace);
        return exchange_.WaitStatus(keeper_, 0, Awaited::kRelayed);
    }
    // After a failure core 0 writes zero counts, of records too, so that callers and combine see no rows.
    __aicore__ inline void Leave() {
        if (exchange_.core() == 0) {
            exchange_.NextPlan();
            Relay relay;
            relay.Init(exchange_, *info_);
            for (uint32_t server = 0; server < Servers(*info_); ++server) kept_.StoreCount(relay, server, 0);
        }
        counts_.Leave(exchange_);
    }

    DispatchArguments args_;
    const MoeDistributeDispatchTiling* tiling_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    Exchange exchange_;
    RowLoader<XType, kQuant, false> rows_;
    KeptRecords kept_;
    DispatchCounts counts_;
    MessageKeeper keeper_;
    ArrivedRows<kQuant> arrived_;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> recordQueue_;
    UbBuf tailBuf_, weightBuf_, recordBuf_;
    uint32_t rowStride_ = 0;  // of a row in an owner's window
    uint32_t rowBytes_ = 0;   // of it without its tail
    uint32_t tailBytes_ = 0;
    uint32_t recordBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_HIERARCHY_DISPATCH_H
