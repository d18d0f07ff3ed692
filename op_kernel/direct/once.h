// Direct dispatch's last step where owners have several experts: a row that goes to more than one of them
// crosses the links once, and leaves UB for all its places in expand_x. Some cores have some sources, and
// share their rows evenly, token by token: no core waits for one source alone.
#ifndef ASCEND_MOE_DISTRIBUTE_DIRECT_ONCE_H
#define ASCEND_MOE_DISTRIBUTE_DIRECT_ONCE_H

#include "../common/dispatch_outputs.h"
#include "row_order.h"

namespace moe {

class SharedRowGather {
public:
    __aicore__ inline void Init(Exchange& exchange, const DispatchArguments& arguments,
                                const MoeDistributeDispatchTiling& tiling, bool quantised) {
        exchange_ = &exchange;
        args_ = &arguments;
        info_ = &tiling.info;
        quantised_ = quantised;
        wireSize_ = WireSize(*info_);
        rowStride_ = DispatchRowStride(info_->hidden, wireSize_, quantised, false);
        ring_ = tiling.copyRing;
        order_.Init(exchange, *info_);
        TPipe& pipe = exchange.pipe();
        pipe.InitBuffer(placeBuf_, PaddedInts(SharedRowShare(*info_)) * sizeof(int32_t));
        if (info_->triples != 0) pipe.InitBuffer(tripleBuf_, SharedRowShare(*info_) * kBlock);
        pipe.InitBuffer(queue_, static_cast<uint8_t>(ring_), rowStride_);
    }
    // The lists of this core's sources begin to load.
    __aicore__ inline void Begin(SegmentTable& segments) {
        segments_ = &segments;
        const uint32_t groups = SharedRowGroups(*info_), cores = info_->cores;
        const uint32_t group = ((exchange_->core() + 1) * groups - 1) / cores;
        firstCore_ = PartBegin(cores, group, groups);
        groupCores_ = PartBegin(cores, group + 1, groups) - firstCore_;
        order_.Take(segments, PartBegin(info_->world, group, groups),
                    PartBegin(info_->world, group + 1, groups));
        loaded_ = order_.Load();
    }
    // The first rows begin to load.
    __aicore__ inline void Start() {
        if (loaded_) StartBatch();
    }
    __aicore__ inline void Finish() {
        while (loaded_) {
            if (begin_ < end_) Gather();
            loaded_ = order_.Load();
            if (loaded_) StartBatch();
        }
    }

private:
    __aicore__ inline void StartBatch() {
        order_.Sort();
        begin_ = RowFrom(ShareBegin(exchange_->core()));
        end_ = RowFrom(ShareBegin(exchange_->core() + 1));
        // Of lists that nobody has checked yet too: never more than there is room for.
        end_ = Min(end_, begin_ + SharedRowShare(*info_));
        ahead_ = begin_;
        for (uint32_t started = 0; started < ring_ && ahead_ < end_; ++started) StartRow();
    }
    // Core 0 comes late, and has the counts to store: half a share is its.
    __aicore__ inline uint32_t ShareBegin(uint32_t core) const {
        const uint32_t shares = 2 * groupCores_, before = 2 * (core - firstCore_);
        if (firstCore_ != 0 || groupCores_ == 1) return PartBegin(order_.count(), before, shares);
        return PartBegin(order_.count(), Max(before, 1) - 1, shares - 1);
    }
    // The first entry from `at` on that begins a row.
    __aicore__ inline uint32_t RowFrom(uint32_t at) {
        if (at == 0) return 0;
        const float before = order_.Key(at - 1);
        while (at < order_.count() && order_.Key(at) == before) ++at;
        return at;
    }
    __aicore__ inline uint32_t RowEnd(uint32_t at) {
        const float key = order_.Key(at);
        while (++at < end_ && order_.Key(at) == key) continue;
        return at;
    }
    __aicore__ inline void Gather() {
        FindPlaces();
        if (info_->triples != 0) StoreTriples();
        LocalTensor<int32_t> places = placeBuf_.Get<int32_t>();
        for (uint32_t at = begin_; at < end_;) {
            LocalTensor<int8_t> row = queue_.template DeQue<int8_t>();
            for (const uint32_t end = RowEnd(at); at < end; ++at)
                StoreRow(static_cast<uint32_t>(places.GetValue(at - begin_)), row);
            queue_.FreeTensor(row);
            if (ahead_ < end_) StartRow();
        }
    }
    __aicore__ inline void StartRow() {
        const float key = order_.Key(ahead_);
        GlobalTensor<int8_t> source;
        source.SetGlobalBuffer(
            reinterpret_cast<__gm__ int8_t*>(exchange_->HalfOf(order_.SourceOfKey(key)) +
                                             PublishedRowsOffset(info_->world, info_->capacity) +
                                             static_cast<uint64_t>(order_.TokenOfKey(key)) * rowStride_),
            rowStride_);
        LocalTensor<int8_t> row = queue_.template AllocTensor<int8_t>();
        AscendC::DataCopy(row, source, rowStride_);
        queue_.EnQue(row);
        ahead_ = RowEnd(ahead_);
    }
    // In expand_x, of all entries of the share.
    __aicore__ inline void FindPlaces() {
        LocalTensor<int32_t> places = placeBuf_.Get<int32_t>();
        LocalTensor<int32_t> triple;
        if (info_->triples != 0) triple = tripleBuf_.Get<int32_t>();
        if (found_ && info_->triples != 0) SyncFunc<HardEvent::MTE3_S>();
        found_ = true;
        for (uint32_t i = 0; i < end_ - begin_; ++i) {
            const RowOrder::Entry entry = order_.EntryAt(begin_ + i);
            places.SetValue(i, PlaceOf(entry));
            if (info_->triples == 0) continue;
            triple.SetValue(i * kBlockWords, static_cast<int32_t>(entry.source));
            triple.SetValue(i * kBlockWords + 1, static_cast<int32_t>(entry.pair / info_->topK));
            triple.SetValue(i * kBlockWords + 2, static_cast<int32_t>(entry.pair % info_->topK));
        }
    }
    // A list is its segments one behind the other: an entry is in the last that does not begin behind it.
    __aicore__ inline int32_t PlaceOf(const RowOrder::Entry& entry) {
        uint32_t local = 0;
        for (uint32_t end = info_->localExperts - 1; local < end;) {
            const uint32_t middle = (local + end + 1) / 2;
            if (segments_->Offset(middle * info_->world + entry.source) <= entry.number) {
                local = middle;
            } else {
                end = middle - 1;
            }
        }
        const uint32_t slot = local * info_->world + entry.source;
        return static_cast<int32_t>(segments_->Start(slot)) + entry.number - segments_->Offset(slot);
    }
    __aicore__ inline void StoreRow(uint32_t place, const LocalTensor<int8_t>& row) {
        if (place >= info_->expandRows) return;
        StoreField(args_->expandX, place, row, info_->hidden * wireSize_, rowStride_, 1);
        if (quantised_) {
            StoreField(args_->dynamicScales, place, row[PayloadBytes(info_->hidden, wireSize_)],
                       sizeof(float), rowStride_, 1);
        }
    }
    __aicore__ inline void StoreTriples() {
        LocalTensor<int32_t> places = placeBuf_.Get<int32_t>(), triple = tripleBuf_.Get<int32_t>();
        SyncFunc<HardEvent::S_MTE3>();
        for (uint32_t i = 0; i < end_ - begin_; ++i) {
            const uint32_t place = static_cast<uint32_t>(places.GetValue(i));
            if (place >= info_->expandRows) continue;
            GlobalTensor<int32_t> target;
            target.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(args_->expandIdx) +
                                       static_cast<uint64_t>(place) * kTripleWords,
                                   kTripleWords);
            CopyOut(target, triple[i * kBlockWords], kTripleWords);
        }
    }

    Exchange* exchange_ = nullptr;
    const DispatchArguments* args_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    SegmentTable* segments_ = nullptr;
    RowOrder order_;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, kMostGatherRing> queue_;
    UbBuf placeBuf_, tripleBuf_;
    uint32_t firstCore_ = 0, groupCores_ = 1;  // that share the rows of these sources
    uint32_t begin_ = 0, end_ = 0;             // this core's share of the entries
    uint32_t ahead_ = 0;                       // of them, the first whose row has not begun to load
    uint32_t wireSize_ = 1, rowStride_ = 0;
    uint32_t ring_ = 1;
    bool loaded_ = false, found_ = false;
    bool quantised_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_DIRECT_ONCE_H
