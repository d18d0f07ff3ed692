// Combine, algorithm "hierarchy": a rank passes each source's rows to the rank of its own server with the source's
// local rank. That rank sums them, weighted, in fp32 and in ascending k, one sum per token, and sends the rounded sums
// to the source. The source adds the servers' sums in ascending order, then special experts and the shared expert.
//
// Phases 3 to 6 run for each pass: first for the rows of other servers' sources, in up to three passes, last for those
// of this server's. So sums are in transit while rows of the next passes leave.
//
// Source: the rank whose token a row is. A: rows of expand_x. S: servers.
//
// phase | function              | which cores     | reads                      | writes                 | which cores
//       |                       |                 |                            |                        | synchronize
// ------+-----------------------+-----------------+----------------------------+------------------------+------------
// 0     | Exchange::Enter       | all             | context, epoch word        | nothing                |
// 1     | RoutingTable::Count,  | all: a share of | expert_ids [BS][K] int32,  | workspace: histograms  | cores of
//       | ServerTokens::Count,  | the tokens, all | x_active_mask,             | [cores][E] int32, to-  | the rank
//       | LoadSegments,         | segments        | ep_send_counts [L*W]; core | kens a server [cores]  |
//       | Exchange::Open        |                 | 0: abort blocks            | [S] int32; core 0: ep. |
// 2     | RowPlaces::Find,      | all; core 0     | histograms                 | workspace: totals [E]  |
//       | StoreTotals           | stores          |                            | int32                  |
// 3     | SetWaitTpStatusAnd-   | all: a share of | expand_x [A][H]            | ping-pong buffers of   | cores of
//       | DisPatch, SetStatus   | rows, of peers  |                            | this server: rows;     | the rank
//       |                       |                 |                            | then messages, also to |
//       |                       |                 |                            | state areas            |
// 4     | WaitStatus, Arrived   | all: a share of | messages of this server's  | workspace: rows        | the server,
//       |                       | the places      | ranks for its rail's ranks | received [W] int32     | then cores
// 5     | SumServer,            | all: a share of | records behind the source  | windowsOut: sums,      | cores of
//       | StageMessages         | (token, part of | indices, rows in the own   | messages; last pass:   | the rank
//       |                       | H), of messages | ping-pong buffer           | own ping-pong buffer   |
// 6     | PostItems; not in the | all: a share of | nothing                    | windowsOut: counting   | SyncAll
//       | last pass             | the servers     |                            | blocks; items          |
// 7     | WaitStatus, Arrived   | all: a share of | messages of inter-node     | nothing: compares      | all ranks,
//       |                       | the places      | ranks, numbers of sums     | counts with its totals | cores
// 8     | SumRows               | all: a share of | sums in the own ping-pong  | x [BS][H]              |
//       |                       | (token, part)   | buffer, other addends      |                        |
//
// Errors are handled as in dispatch. A RoutingMismatch concerns this rank only and stops nothing that others wait for.
// After any failure Leave writes zeros into x, and core 0 writes the error record. In split mode, send returns after
// phase 3, which it runs once for all rows; finish counts its ids again and runs phases 4 to 6 of each pass.
#ifndef ASCEND_MOE_HIERARCHY_COMBINE_H
#define ASCEND_MOE_HIERARCHY_COMBINE_H

#include "../common/inputs.h"
#include "../window/combine.h"
#include "relay.h"

namespace moe {

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

    // For TokenSum; after a core barrier there is nothing to publish.
    __aicore__ inline void ArriveBeforeSums(const OpStatus&) {}
    // For Exchange::WaitStatus, for each message of this core's share: from the rank of a place; in phase 7 from the
    // place itself.
    __aicore__ inline OpStatus Arrived(uint32_t place, const LocalTensor<uint32_t>& message) {
        if (!second_) StoreRowsThatCame(place, message);
        if (second_ || Server(*info_, place) == Mine()) return CompareCounts(*info_, routing_, place, message);
        return OpStatus();
    }

private:
    __aicore__ inline void Run() {
        exchange_.BarrierInit();
        PlanInit();
        if (!Send()) {
            Leave();
            return;
        }
        if (info_->part == kPartSend) SendRows(ServerPass{0, Servers(*info_)});
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
        return true;
    }
    // Passes the rows for a pass's servers to the ranks of this server that sum them, then a message to each of these
    // ranks.
    __aicore__ inline void SendRows(const ServerPass& pass) {
        ReturnRowsToRail(pass);
        exchange_.BarrierAfterSend(OpStatus());
        exchange_.SetStatus(segments_, rowBytes_, pass);
    }

    // UB layout 1 (phases 1 to 5).
    __aicore__ inline void PlanInit() {
        MOE_PHASE(exchange_.timestamps(), BuffInit);
        TablesInit(exchange_, *info_, args_);
        ReturnInit();
    }
    // UB layout 3: totals, segments, messages.
    __aicore__ inline void NextPassInit() {
        exchange_.NextPlan();
        exchange_.LoadPeers();
        LoadTotals();
        ReturnInit();
    }
    __aicore__ inline void ReturnInit() {
        TPipe& pipe = exchange_.pipe();
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
    // The first slot of a run: the rows of a local expert for a server of the pass, which are contiguous.
    __aicore__ inline uint32_t RunSlot(const ServerPass& pass, uint32_t run) const {
        const uint32_t servers = pass.last - pass.first, server = pass.At(*info_, pass.first + run % servers);
        return run / servers * info_->world + server * info_->intraNodeRanks;
    }
    // Passes on this core's share of the rows of a pass.
    __aicore__ inline void ReturnRowsToRail(const ServerPass& pass) {
        MOE_PHASE(exchange_.timestamps(), SetWaitTpStatusAndDisPatch);
        if (exchange_.Failed()) return;
        const uint32_t runs = info_->localExperts * (pass.last - pass.first), ranks = info_->intraNodeRanks;
        uint32_t rows = 0;
        for (uint32_t run = 0; run < runs; ++run) {
            const uint32_t slot = RunSlot(pass, run);
            rows += segments_.Start(slot + ranks) - segments_.Start(slot);
        }
        uint32_t skip = PartBegin(rows, exchange_.core(), info_->cores);
        uint32_t left = PartBegin(rows, exchange_.core() + 1, info_->cores) - skip;
        ReturnLoader<XType, false> loader;
        if (left > 0) loader.Init(exchange_.pipe(), *tiling_, args_.expandX, rowBytes_);
        for (uint32_t run = 0; left > 0; ++run) {
            uint32_t slot = RunSlot(pass, run), row = segments_.Start(slot) + skip, end = segments_.Start(slot + ranks);
            if (row >= end) {
                skip = row - end;
                continue;
            }
            skip = 0;
            end = Min(end, row + left);
            left -= end - row;
            for (uint32_t count; row < end; row += count) {
                while (segments_.End(slot) <= row) ++slot;
                count = Min(tiling_->sendRows, Min(end, segments_.End(slot)) - row);
                loader.Load(row, count);
                const LocalTensor<int8_t> chunk = loader.Take();
                const int32_t at = segments_.Offset(slot) + static_cast<int32_t>(row - segments_.Start(slot));
                StoreRows(RailPlace(slot % info_->world) + RowOffsetBytes(at, rowBytes_), chunk, count * rowBytes_);
                loader.Free(chunk);
            }
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

    // Phases 3 to 6, for each pass. Returns false on a fatal error.
    __aicore__ inline bool Relayed() {
        const uint32_t passes = 1 + OtherPasses();
        OpStatus sent;  // what messages say
        for (uint32_t i = 0; i < passes; ++i) {
            const ServerPass pass = PassAt(i, passes);
            if (i > 0) NextPassInit();
            if (info_->part == kPartWhole) {
                OpStatus received;
                if (i > 0) {
                    LoadAllSegments();
                    received = exchange_.ReplaceStatus(sent);
                }
                SendRows(pass);
                sent = exchange_.status();
                exchange_.Fail(received);
            }
            exchange_.WaitStatus(*this, 0, Awaited::kReturned, pass);
            if (exchange_.Over()) return false;
            exchange_.BeginAfterWait(i + 1);
            exchange_.NextPlan();
            Relay relay;
            relay.Init(exchange_, *info_);
            relay.InitMessages();
            const OpStatus mine = SumServer(relay, pass);  // UB layout 2
            if (pass.Own()) {
                exchange_.Fail(mine);
                break;
            }
            relay.StageMessages(pass);
            exchange_.BarrierAt(0, mine);
            relay.PostItems(*this, sumBytes_, pass);
        }
        return true;
    }
    // Passes for other servers. A pass costs about as much as the NIC needs for kPassTokens sums.
    __aicore__ inline uint32_t OtherPasses() const {
        constexpr uint32_t kPassTokens = 64, kMostPasses = 3;
        const uint32_t others = Servers(*info_) - 1, passes = Min(others * info_->maxBatch / kPassTokens, kMostPasses);
        return Max(1, Min(passes, others));
    }
    // The other servers, in passes, then this one.
    __aicore__ inline ServerPass PassAt(uint32_t i, uint32_t passes) const {
        const uint32_t others = Servers(*info_) - 1;
        if (i + 1 == passes) return {0, 1};
        return {1 + PartBegin(others, i, passes - 1), 1 + PartBegin(others, i + 1, passes - 1)};
    }

    // UB: rows that have arrived, a block per place; numbers of records, a record, sums.
    __aicore__ inline OpStatus SumServer(Relay& relay, const ServerPass& pass) {
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
        RailSums sums;
        sums.Init(pipe, *tiling_);
        ServerItem<HierarchyCombine> loads(*info_, *this, pass, exchange_.core(), tiling_->partsPerToken), item = loads;
        while (item.Find()) {
            uint32_t count = 0;
            SyncFunc<HardEvent::S_MTE2>();
            for (; count < kSumRecords && loads.Find(); ++count, loads.Next())
                stored_.Load(RecordWords(recordBuf, count), loads.server(), sums.Token(loads.at()));
            SyncFunc<HardEvent::MTE2_S>();
            for (uint32_t i = 0; i < count && item.Find(); ++i, item.Next()) {
                const LocalTensor<int32_t> words = RecordWords(recordBuf, i);
                const uint32_t server = item.server(), fromEnd = Stored(server) - sums.Token(item.at());
                status = CheckRecord(words, server);
                if (status.code != kOk) return status;
                GM_ADDR end = server == Mine() ? relay.Arrived(server) : relay.Staged(server);
                SumRecord(sums, words, server, sums.Part(item.at()), end - static_cast<uint64_t>(fromEnd) * sumBytes_);
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
    class RailSums {
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
            AddPart(inQueue_, parts_, sum_, {row, weight, true, true, AddendKind::kWhole, 0.0f}, part);
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
    __aicore__ inline void SumRecord(RailSums& sums, const LocalTensor<int32_t>& words, uint32_t server, uint32_t part,
                                     GM_ADDR place) {
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
    __aicore__ inline void LoadTotals() {
        RoutingInit();
        routing_.LoadTotals();
    }
    __aicore__ inline void RoutingInit() {
        routing_.Init(exchange_.pipe(), *info_, args_.expertIds, args_.xActiveMask, args_.workspace, exchange_.core());
    }
    // UB layout 4 (phase 7): totals, messages.
    __aicore__ inline bool WaitSums() {
        exchange_.NextPlan();
        second_ = true;
        LoadTotals();
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

    // UB layout 5 (phase 8): the ids again, and the sums of this core's share.
    __aicore__ inline void SumRows() {
        MOE_PHASE(exchange_.timestamps(), SumRows);
        exchange_.NextPlan();
        RoutingInit();
        Relay relay;
        relay.Init(exchange_, *info_);
        ServerSums sums;
        sums.Init(exchange_.pipe(), *info_, args_.workspace, relay, sumBytes_, exchange_.core());
        TokenSum<XType, kQuant, ServerSums> sum;
        sum.Init(exchange_.pipe(), *tiling_, args_, sums);
        sum.Run(routing_, exchange_.core(), info_->cores, *this);
        AscendC::PipeBarrier<PIPE_ALL>();
    }

    __aicore__ inline void Leave() { LeaveCombine(exchange_, *tiling_, args_.x, rowBytes_); }

    CombineArguments args_;
    const MoeDistributeCombineTiling* tiling_ = nullptr;
    Exchange exchange_;
    ServerTokens totals_;
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
