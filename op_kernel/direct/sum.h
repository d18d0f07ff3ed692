// Phases 5 and 7 of direct combine: finds the rows of this rank's pairs, and sums a token's K rows: weighted, in fp32,
// multiply then add, k ascending, one cast at the end. The rows lie in other ranks' memory, so many parts of rows load
// at a time, in groups of sumGroup.
#ifndef ASCEND_MOE_DIRECT_SUM_H
#define ASCEND_MOE_DIRECT_SUM_H

#include "../common/weighted_sum.h"

namespace moe {

// Finds the rows of this rank's pairs: in the ping-pong buffer or the registered area of the owner (the expert's rank),
// whose message says where this rank's rows of each expert begin. Rows of its own experts are in expand_x, unless rows
// travel as codes.
class ReturnedRows {
public:
    __aicore__ inline void Init(Exchange& exchange, StatusWaiter& messages, const MoeDistributeInfo& info,
                                GM_ADDR expandX, GM_ADDR expandIdx, uint32_t rowBytes) {
        exchange_ = &exchange;
        messages_ = &messages;
        info_ = &info;
        expandX_ = expandX;
        rowBytes_ = rowBytes;
        rowStep_ = RowStep(info, rowBytes);
        index_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expandIdx), info.batch * info.topK);
        exchange.pipe().InitBuffer(positionBuf_, kReturnedRowsBytes);
    }

    // Starts to load expand_idx, if it is used.
    __aicore__ inline void Load(uint32_t begin, uint32_t count) {
        if (info_->sourceIndices == 0) CopyIn(positionBuf_.Get<int32_t>(), index_[begin], count);
    }
    // With source indices: recounts the positions. The owner has checked that its rows are in dispatch's order.
    __aicore__ inline void Place(RoutingTable& routing, uint32_t token, uint32_t tokens) {
        if (info_->sourceIndices == 0) return;
        LocalTensor<int32_t> position = positionBuf_.Get<int32_t>();
        for (uint32_t t = 0, i = 0; t < tokens; ++t) {
            for (uint32_t k = 0; k < info_->topK; ++k, ++i) {
                const int32_t id = routing.pairs().Id(i, token + t);
                if (routing.pairs().Routed(id)) position.SetValue(i, static_cast<int32_t>(routing.TakePosition(id)));
            }
        }
    }
    // The address of the row of pair `i` of the chunk, after all messages have come. Core 0 may not have checked the
    // counts or expand_idx yet, so the address is clamped to the area that the message names.
    __aicore__ inline GM_ADDR Address(RoutingTable&, int32_t id, uint32_t, uint32_t, uint32_t i) {
        const uint32_t expert = static_cast<uint32_t>(id), owner = Owner(*info_, expert);
        const LocalTensor<uint32_t> header1 = messages_->Header1Of(owner);
        const uint32_t start = messages_->CountsOf(owner).GetValue(
            StatusWriter::WordOfCounts(info_->localExperts + Local(*info_, expert)));
        const uint32_t row = start + static_cast<uint32_t>(positionBuf_.Get<int32_t>().GetValue(i));
        GM_ADDR base = exchange_->PingPongOf(owner);
        uint32_t step = rowStep_;
        uint64_t bytes = static_cast<uint64_t>(info_->world) * info_->capacity * step;
        if (owner == info_->rank && info_->expandRows != 0 && CommQuantMode(*info_) == 0) {  // nobody has to copy those
            base = expandX_;
            step = rowBytes_;
            bytes = static_cast<uint64_t>(info_->expandRows) * rowBytes_;
        } else if (PhaseOf(header1.GetValue(kH1OpPhase)) == kPhaseRegistered) {
            const WindowContext& context = exchange_->context();
            const uint64_t registered = static_cast<uint64_t>(header1.GetValue(kH1Detail0)) * kBlock;
            if (registered + rowBytes_ <= context.registered_bytes()) {
                base = context.registered(owner) + registered;
                step = rowBytes_;
                bytes = context.registered_bytes() - registered;
            }
        }
        const uint64_t at = static_cast<uint64_t>(row) * step, most = bytes - step;
        return base + (at < most ? at : most);
    }

private:
    Exchange* exchange_ = nullptr;
    StatusWaiter* messages_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    GlobalTensor<int32_t> index_;
    GM_ADDR expandX_ = nullptr;
    UbBuf positionBuf_;
    uint32_t rowBytes_ = 0;  // of a row,
    uint32_t rowStep_ = 0;   // and from row to row in a ping-pong buffer
};

// Calls: Init, Fetch, Prepare, Begin, Run; or Drop instead of Run.
template <typename XType, bool kQuant>
class DirectSum {
public:
    using Queue = AscendC::TQue<AscendC::QuePosition::VECIN, kMaxSumGroups>;

    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeCombineTiling& tiling,
                                const CombineArguments& arguments, ReturnedRows& rows, uint32_t core) {
        info_ = &tiling.info;
        x_ = arguments.x;
        parts_.Init(tiling);
        addends_.Init(pipe, tiling, arguments, rows);
        const uint32_t items = parts_.Items(info_->batch);
        item_ = PartBegin(items, core, info_->cores);
        end_ = PartBegin(items, core + 1, info_->cores);
        perGroup_ = tiling.sumGroup;
        const DirectSumUb ub(tiling, sizeof(XType));
        groups_ = ub.groups;
        room_ = ub.group;
        pipe.InitBuffer(addressBuf_, ub.addresses);
        pipe.InitBuffer(weightBuf_, ub.weights);
        pipe.InitBuffer(listBuf_, ub.lists);
        pipe.InitBuffer(queue_, Ring(groups_), room_);
        if (ub.mix != 0) pipe.InitBuffer(mixBuf_, ub.mix);
        sum_.Init(pipe, tiling);
    }
    // The queue for loads of rows. Other steps may use it before Begin. Its tensors hold `room` int32.
    __aicore__ inline Queue& queue() { return queue_; }
    __aicore__ inline uint32_t room() const { return room_ / sizeof(int32_t); }
    // Starts to load ids, weights and positions of the first chunk of tokens; they do not depend on other ranks.
    __aicore__ inline void Fetch(RoutingTable& routing) {
        if (item_ < end_) FetchChunk(routing);
    }
    // Waits for them and finds the positions.
    __aicore__ inline void Prepare(RoutingTable& routing) {
        if (item_ == end_) return;
        SyncFunc<HardEvent::MTE2_S>();
        if (info_->sourceIndices != 0 && parts_.Part(item_) != 0) routing.GiveBack(addends_.first());
        addends_.Place(routing);
    }
    // When all messages have come: starts to load the first rows.
    __aicore__ inline void Begin(RoutingTable& routing) {
        if (item_ < end_) BeginChunk(routing);
    }
    // Ends the loads that Begin has started and uses none of them.
    __aicore__ inline void Drop() {
        while (waiting_ > 0) {
            group_ = TakeGroup();
            queue_.FreeTensor(group_);
        }
    }
    // Sums this core's share of the items (token, part of H).
    __aicore__ inline void Run(RoutingTable& routing) {
        while (item_ < end_) {
            SumChunk(routing);
            if (item_ == end_) break;
            FetchChunk(routing);
            SyncFunc<HardEvent::MTE2_S>();
            addends_.Place(routing);
            BeginChunk(routing);
        }
    }

private:
    __aicore__ inline void FetchChunk(RoutingTable& routing) {
        const uint32_t first = parts_.Token(item_), last = parts_.Token(end_ - 1);
        addends_.Load(routing, first, Min(addends_.ChunkTokens(), last + 1 - first));
    }
    // Lists a token's addends in UB: addresses, weights, and their number. Those without a weight are last.
    __aicore__ inline void List(RoutingTable& routing, uint32_t token) {
        const uint32_t base = Base(token);
        LocalTensor<uint64_t> address = addressBuf_.Get<uint64_t>();
        LocalTensor<float> weight = weightBuf_.Get<float>();
        uint32_t count = 0, weighted = 0;
        addends_.Begin(token);
        for (Addend addend; addends_.Next(routing, addend); ++count) {
            address.SetValue(base + count,
                             reinterpret_cast<uint64_t>(addend.address) | (addend.travelled ? 0 : kPlain));
            if (info_->alphaRank != 0) KeepMix(base + count, addend);
            if (!addend.weighted) continue;
            weight.SetValue(base + count, addend.weight);
            ++weighted;
        }
        listed_ = count;
        listBuf_.Get<uint32_t>().SetValue(token - addends_.first(), count | weighted << kWeightedFrom);
    }
    __aicore__ inline uint32_t Base(uint32_t token) const {
        return (token - addends_.first()) * AddendsPerToken(*info_);
    }
    // With const experts: also stores how each addend is added.
    __aicore__ inline void KeepMix(uint32_t at, const Addend& addend) {
        mixBuf_.Get<uint32_t>().SetValue(2 * at, static_cast<uint32_t>(addend.kind));
        mixBuf_.Get<float>().SetValue(2 * at + 1, addend.factor);
    }

    // ---- loads, ahead of the sums ----
    __aicore__ inline void BeginChunk(RoutingTable& routing) {
        stop_ = Min(end_, parts_.Items(addends_.first() + addends_.tokens()));
        loadItem_ = item_;
        loadAddend_ = used_ = 0;
        List(routing, addends_.first());
        for (uint32_t g = 0; g < groups_; ++g) LoadGroup(routing);
    }
    // Goes to the next addend to load, of this item or a later one. Returns false if none is left in the chunk.
    __aicore__ inline bool FindPiece(RoutingTable& routing) {
        while (loadItem_ < stop_ && loadAddend_ == listed_) {
            ++loadItem_;
            loadAddend_ = 0;
            if (loadItem_ < stop_ && parts_.Part(loadItem_) == 0) List(routing, parts_.Token(loadItem_));
        }
        return loadItem_ < stop_;
    }
    __aicore__ inline void LoadGroup(RoutingTable& routing) {
        if (!FindPiece(routing)) return;
        LocalTensor<int8_t> group = queue_.template AllocTensor<int8_t>();
        for (uint32_t n = 0; n < perGroup_ && FindPiece(routing); ++n, ++loadAddend_) {
            const uint32_t at = Base(parts_.Token(loadItem_)) + loadAddend_;
            const uint64_t address = addressBuf_.Get<uint64_t>().GetValue(at);
            parts_.Load(group[n * parts_.PieceBytes()], reinterpret_cast<GM_ADDR>(address & ~kPlain),
                        (address & kPlain) == 0, parts_.Part(loadItem_));
        }
        queue_.EnQue(group);
        ++waiting_;
    }
    __aicore__ inline LocalTensor<int8_t> TakeGroup() {
        --waiting_;
        return queue_.template DeQue<int8_t>();
    }

    // ---- sums ----
    __aicore__ inline void SumChunk(RoutingTable& routing) {
        for (; item_ < stop_; ++item_) SumItem(routing);
        if (used_ != 0) queue_.FreeTensor(group_);
    }
    __aicore__ inline void SumItem(RoutingTable& routing) {
        const uint32_t token = parts_.Token(item_), part = parts_.Part(item_), base = Base(token);
        const uint32_t list = listBuf_.Get<uint32_t>().GetValue(token - addends_.first());
        const uint32_t count = list & ((1u << kWeightedFrom) - 1), weighted = list >> kWeightedFrom;
        sum_.Begin(parts_.Elements(part));
        for (uint32_t n = 0; n < weighted; ++n)
            AddAddend(routing, base + n, weightBuf_.Get<float>().GetValue(base + n), true);
        for (uint32_t n = weighted; n < count; ++n) AddAddend(routing, base + n, 1.0f, false);
        sum_.Store(parts_.Place(x_, token, part));
    }
    // Adds the next addend in the order of the loads, entry `at` of the lists. A group whose addends are all added
    // frees its buffer.
    __aicore__ inline void AddAddend(RoutingTable& routing, uint32_t at, float weight, bool weighted) {
        if (used_ == 0) group_ = TakeGroup();
        const bool travelled = !kQuant || (addressBuf_.Get<uint64_t>().GetValue(at) & kPlain) == 0;
        Addend addend = {nullptr, weight, weighted, travelled, AddendKind::kWhole, 1.0f};
        if (info_->alphaRank != 0) {
            addend.kind = static_cast<AddendKind>(mixBuf_.Get<uint32_t>().GetValue(2 * at));
            addend.factor = mixBuf_.Get<float>().GetValue(2 * at + 1);
        }
        sum_.Add(group_[used_ * parts_.PieceBytes()], addend);
        if (++used_ < perGroup_) return;
        queue_.FreeTensor(group_);
        used_ = 0;
        LoadGroup(routing);
    }

    static constexpr uint64_t kPlain = 1ull << 63;  // flag of an address: the addend never travelled
    static constexpr uint32_t kWeightedFrom = 16;   // bit of a word of listBuf_: addends with a weight
    const MoeDistributeInfo* info_ = nullptr;
    GM_ADDR x_ = nullptr;
    Addends<XType, ReturnedRows> addends_;
    RowParts<XType, kQuant> parts_;
    Queue queue_;
    WeightedSum<XType, kQuant> sum_;
    UbBuf addressBuf_, weightBuf_, listBuf_, mixBuf_;
    LocalTensor<int8_t> group_;    // being summed
    uint32_t used_ = 0;            // addends of it
    uint32_t perGroup_ = 1;        // of all
    uint32_t groups_ = 0;          // loaded at a time
    uint32_t waiting_ = 0;         // loaded, not yet summed
    uint32_t room_ = 0;            // bytes of one
    uint32_t item_ = 0, end_ = 0;  // remaining share
    uint32_t stop_ = 0;            // of it, in the chunk
    uint32_t loadItem_ = 0, loadAddend_ = 0;
    uint32_t listed_ = 0;  // addends of the token that is being loaded
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_SUM_H
