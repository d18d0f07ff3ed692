// Direct dispatch's last step where owners have many experts: a row that goes to several of them crosses the
// links once, and leaves UB for all its places in expand_x. A core has some tokens of one or two sources,
// finds their pairs in the lists by vector instructions, and chains those of a token.
#ifndef ASCEND_MOE_DISTRIBUTE_DIRECT_ONCE_H
#define ASCEND_MOE_DISTRIBUTE_DIRECT_ONCE_H

#include "moe_distribute_dispatch_outputs.h"
#include "moe_distribute_exchange.h"

namespace moe {

class DirectOnce {
public:
    __aicore__ inline void Init(Exchange& exchange, const DispatchArguments& arguments,
                                const MoeDistributeDispatchTiling& tiling, bool quantised) {
        exchange_ = &exchange;
        args_ = &arguments;
        info_ = &tiling.info;
        quantised_ = quantised;
        wireSize_ = WireSize(*info_);
        rowStride_ = DispatchRowStride(info_->hidden, wireSize_, quantised, false);
        lanes_ = ListLanes(info_->capacity);
        entries_ = OnceEntries(*info_);
        TPipe& pipe = exchange.pipe();
        pipe.InitBuffer(listBuf_, 2 * lanes_ * sizeof(int32_t));
        pipe.InitBuffer(indexBuf_, lanes_ * sizeof(int32_t));
        pipe.InitBuffer(valueBuf_, lanes_ * sizeof(float));
        pipe.InitBuffer(foundBuf_, 2 * lanes_ * sizeof(int32_t));
        pipe.InitBuffer(bitBuf_, CeilTo(lanes_ / 8, kBlock));
        pipe.InitBuffer(chainBuf_, 4 * PaddedInts(entries_) * sizeof(int32_t));
        if (info_->triples != 0) pipe.InitBuffer(tripleBuf_, entries_ * kBlock);
        pipe.InitBuffer(queue_, static_cast<uint8_t>(tiling.copyRing), rowStride_);
        ring_ = tiling.copyRing;
        AscendC::CreateVecIndex(indexBuf_.Get<int32_t>(), static_cast<int32_t>(0), lanes_);
        AscendC::Duplicate(Heads(), static_cast<int32_t>(0), static_cast<int32_t>(PaddedInts(entries_)));
    }
    // The lists of this core's sources begin to load.
    __aicore__ inline void Begin(SegmentTable& segments) {
        segments_ = &segments;
        const uint32_t tokens = info_->world * info_->batch;
        const uint32_t begin = PartBegin(tokens, exchange_->core(), info_->cores);
        const uint32_t end = PartBegin(tokens, exchange_->core() + 1, info_->cores);
        if (begin == end) return;
        const uint32_t first = begin / info_->batch, last = (end - 1) / info_->batch;
        visits_ = last - first + 1;
        SyncFunc<HardEvent::S_MTE2>();
        for (uint32_t v = 0; v < visits_; ++v) {
            Visit& visit = visit_[v];
            const uint32_t at = (first + v) * info_->batch;
            // Not all ranks begin with the same source.
            visit.source = (first + v + info_->rank) % info_->world;
            visit.begin = Max(begin, at) - at;
            visit.end = Min(end, at + info_->batch) - at;
            const uint32_t slot = (info_->localExperts - 1) * info_->world + visit.source;
            const uint32_t rows =
                static_cast<uint32_t>(segments.Offset(slot)) + segments.End(slot) - segments.Start(slot);
            visit.listed = Min(rows, info_->capacity);
            if (visit.listed == 0) continue;
            GlobalTensor<int32_t> list;
            list.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(exchange_->HalfOf(visit.source) +
                                                                   info_->rank * ListBytes(info_->capacity)),
                                 visit.listed);
            CopyIn(listBuf_.Get<int32_t>()[v * lanes_], list, visit.listed);
        }
    }
    __aicore__ inline void Finish() {
        if (visits_ == 0) return;
        if constexpr (!IsMutant(Mutant::kListReadBeforeLoaded)) SyncFunc<HardEvent::MTE2_V>();
        for (uint32_t v = 0; v < visits_; ++v) {
            if (visit_[v].listed == 0) continue;
            Find(v);
            Chain(visit_[v]);
            Gather(visit_[v]);
        }
    }

private:
    struct Visit {
        uint32_t source, begin, end;  // tokens
        uint32_t listed;
    };
    __aicore__ inline LocalTensor<int32_t> Pairs() { return foundBuf_.Get<int32_t>(); }
    __aicore__ inline LocalTensor<int32_t> Numbers() { return foundBuf_.Get<int32_t>()[lanes_]; }
    // A number a token of this core: 1 + its last entry. Tokens of both visits follow each other.
    __aicore__ inline LocalTensor<int32_t> Heads() { return chainBuf_.Get<int32_t>(); }
    __aicore__ inline LocalTensor<int32_t> Part(uint32_t part) {
        return chainBuf_.Get<int32_t>()[part * PaddedInts(entries_)];
    }
    __aicore__ inline LocalTensor<int32_t> Nexts() { return Part(1); }
    __aicore__ inline LocalTensor<int32_t> Places() { return Part(2); }
    __aicore__ inline LocalTensor<int32_t> Tokens() { return Part(3); }

    // The entries of a list that are about this core's tokens: their pairs, and their numbers in the list.
    __aicore__ inline void Find(uint32_t v) {
        const Visit& visit = visit_[v];
        const LocalTensor<int32_t> list = listBuf_.Get<int32_t>()[v * lanes_];
        const LocalTensor<float> value = valueBuf_.Get<float>();
        const LocalTensor<uint8_t> bits = bitBuf_.Get<uint8_t>();
        const float first = static_cast<float>(visit.begin * info_->topK);
        const float last = static_cast<float>(visit.end * info_->topK - 1);
        const int32_t lanes = static_cast<int32_t>(lanes_);
        if (v > 0) SyncFunc<HardEvent::S_V>();
        AscendC::Duplicate(value, -last - 1.0f, lanes);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(value, list, AscendC::RoundMode::CAST_RINT, visit.listed);
        AscendC::PipeBarrier<PIPE_V>();
        // In the range: not farther from its middle than its ends are.
        AscendC::Adds(value, value, -0.5f * (first + last), lanes);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Abs(value, value, lanes);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::CompareScalar(bits, value, 0.5f * (last - first), AscendC::CMPMODE::LE, lanes_);
        AscendC::PipeBarrier<PIPE_V>();
        uint64_t found = 0;
        const AscendC::GatherMaskParams once(1, 1, 8, 8);
        AscendC::GatherMask(Pairs(), list, bits.ReinterpretCast<uint32_t>(), true, visit.listed, once, found);
        AscendC::GatherMask(Numbers(), indexBuf_.Get<int32_t>(), bits.ReinterpretCast<uint32_t>(), true,
                            visit.listed, once, found);
        // Of a list that nobody has checked yet too: never more than there is room for.
        found_ = Min(static_cast<uint32_t>(found), (visit.end - visit.begin) * info_->topK);
        SyncFunc<HardEvent::V_S>();
    }
    // Places in expand_x, and for every token the chain of its entries.
    __aicore__ inline void Chain(const Visit& visit) {
        const LocalTensor<int32_t> pairs = Pairs(), numbers = Numbers();
        LocalTensor<int32_t> heads = Heads(), nexts = Nexts(), places = Places(), tokens = Tokens();
        uint32_t slot = visit.source, end = EndOf(slot), local = 0;
        int32_t base = static_cast<int32_t>(segments_->Start(slot)) - segments_->Offset(slot);
        distinct_ = 0;
        for (uint32_t i = 0; i < found_; ++i) {
            const uint32_t number = static_cast<uint32_t>(numbers.GetValue(i));
            const uint32_t token = static_cast<uint32_t>(pairs.GetValue(i)) / info_->topK;
            if (number >= end) {
                while (number >= end && local + 1 < info_->localExperts) {
                    ++local;
                    slot += info_->world;
                    end = EndOf(slot);
                }
                base = static_cast<int32_t>(segments_->Start(slot)) - segments_->Offset(slot);
            }
            const uint32_t at = firstToken_ + token - visit.begin;
            const int32_t before = heads.GetValue(at);
            if (before == 0) tokens.SetValue(distinct_++, static_cast<int32_t>(token));
            nexts.SetValue(i, before);
            places.SetValue(i, base + static_cast<int32_t>(number));
            heads.SetValue(at, static_cast<int32_t>(i) + 1);
        }
    }
    // In its list, where the segment ends.
    __aicore__ inline uint32_t EndOf(uint32_t slot) {
        const uint32_t next = slot + info_->world;
        return next < segments_->slots() ? static_cast<uint32_t>(segments_->Offset(next)) : info_->capacity;
    }
    __aicore__ inline void Gather(const Visit& visit) {
        GM_ADDR rows = exchange_->HalfOf(visit.source) + PublishedRowsOffset(info_->world, info_->capacity);
        LocalTensor<int32_t> heads = Heads(), nexts = Nexts(), places = Places(), tokens = Tokens();
        for (uint32_t d = 0; d < distinct_; ++d) {
            const uint32_t token = static_cast<uint32_t>(tokens.GetValue(d));
            GlobalTensor<int8_t> source;
            source.SetGlobalBuffer(
                reinterpret_cast<__gm__ int8_t*>(rows + static_cast<uint64_t>(token) * rowStride_),
                rowStride_);
            LocalTensor<int8_t> row = queue_.template AllocTensor<int8_t>();
            AscendC::DataCopy(row, source, rowStride_);
            queue_.EnQue(row);
            row = queue_.template DeQue<int8_t>();
            for (int32_t next = heads.GetValue(firstToken_ + token - visit.begin); next != 0;) {
                const uint32_t entry = static_cast<uint32_t>(next) - 1;
                StoreRow(static_cast<uint32_t>(places.GetValue(entry)), row);
                next = nexts.GetValue(entry);
            }
            queue_.FreeTensor(row);
            if (d + 1 == Min(ring_, distinct_) && info_->triples != 0) StoreTriples(visit.source);
        }
        firstToken_ += visit.end - visit.begin;
    }
    __aicore__ inline void StoreRow(uint32_t place, const LocalTensor<int8_t>& row) {
        if (place >= info_->expandRows) return;
        StoreField(args_->expandX, place, row, info_->hidden * wireSize_, rowStride_, 1);
        if (quantised_) {
            StoreField(args_->dynamicScales, place, row[PayloadBytes(info_->hidden, wireSize_)],
                       sizeof(float), rowStride_, 1);
        }
    }
    // Of all entries, when the first rows are on their way.
    __aicore__ inline void StoreTriples(uint32_t source) {
        const LocalTensor<int32_t> pairs = Pairs(), places = Places();
        LocalTensor<int32_t> triple = tripleBuf_.Get<int32_t>()[firstTriple_ * kBlockWords];
        for (uint32_t i = 0; i < found_; ++i) {
            const uint32_t pair = static_cast<uint32_t>(pairs.GetValue(i));
            triple.SetValue(i * kBlockWords, static_cast<int32_t>(source));
            triple.SetValue(i * kBlockWords + 1, static_cast<int32_t>(pair / info_->topK));
            triple.SetValue(i * kBlockWords + 2, static_cast<int32_t>(pair % info_->topK));
        }
        if constexpr (!IsMutant(Mutant::kTriplesSentBeforeWritten)) SyncFunc<HardEvent::S_MTE3>();
        for (uint32_t i = 0; i < found_; ++i) {
            const uint32_t place = static_cast<uint32_t>(places.GetValue(i));
            if (place >= info_->expandRows) continue;
            GlobalTensor<int32_t> target;
            target.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args_->expandIdx) +
                                       static_cast<uint64_t>(place) * kTripleWords,
                                   kTripleWords);
            CopyOut(target, triple[i * kBlockWords], kTripleWords);
        }
        firstTriple_ += found_;
    }

    Exchange* exchange_ = nullptr;
    const DispatchArguments* args_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    SegmentTable* segments_ = nullptr;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> queue_;
    UbBuf listBuf_, indexBuf_, valueBuf_, foundBuf_, bitBuf_, chainBuf_, tripleBuf_;
    Visit visit_[2] = {};
    uint32_t visits_ = 0;
    uint32_t wireSize_ = 1, rowStride_ = 0;
    uint32_t lanes_ = 0;
    uint32_t entries_ = 0;
    uint32_t ring_ = 1;
    uint32_t found_ = 0, distinct_ = 0;
    uint32_t firstToken_ = 0, firstTriple_ = 0;  // of this visit, among all tokens and triples of the core
    bool quantised_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_DIRECT_ONCE_H
