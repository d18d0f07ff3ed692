// Phase 7 of direct dispatch (GatherRows) with sharedLanes, for many cores and owners of several experts: a row for
// more than one expert of this rank is read once, and stored from UB to all its places in expand_x.
#ifndef ASCEND_MOE_DIRECT_SHARED_ROWS_H
#define ASCEND_MOE_DIRECT_SHARED_ROWS_H

#include "../common/exchange.h"
#include "../common/outputs.h"

namespace moe {

// The list entries of a group of sources, sorted by token and source. Entries of the same row are then consecutive,
// whatever their experts, and the group's cores share them evenly. The key of an entry is -(token * width + source), as
// a float, because Sort is descending and takes floats.
class RowOrder {
public:
    struct Entry {
        uint32_t source, pair;
        int32_t number;  // in the source's list
    };
    // `lanes`: entries that fit in UB, a multiple of 32.
    __aicore__ inline void Init(Exchange& exchange, const MoeDistributeInfo& info, uint32_t lanes) {
        exchange_ = &exchange;
        info_ = &info;
        room_ = lanes;
        width_ = SharedRowSources(info);
        TPipe& pipe = exchange.pipe();
        const RowOrderUb ub(lanes);
        pipe.InitBuffer(listBuf_, ub.lanes);
        pipe.InitBuffer(keyBuf_, ub.lanes);
        pipe.InitBuffer(indexBuf_, ub.lanes);
        pipe.InitBuffer(sortedBuf_, ub.sorted);
        pipe.InitBuffer(spareBuf_, ub.sorted);
        AscendC::CreateVecIndex(indexBuf_.Get<int32_t>(), static_cast<int32_t>(0), room_);
    }
    // Chooses the sources: the ranks begin..end-1 after this rank.
    __aicore__ inline void Take(SegmentTable& segments, uint32_t begin, uint32_t end) {
        segments_ = &segments;
        begin_ = next_ = begin;
        end_ = end;
    }
    // Starts to load the next entries, as many as UB holds. Returns false if none is left.
    __aicore__ inline bool Load() {
        const LocalTensor<int32_t> list = listBuf_.Get<int32_t>();
        if (lanes_ != 0) {
            SyncFunc<HardEvent::S_MTE2>();  // Sort has waited for V
            SyncFunc<HardEvent::S_V>();     // entries were read where padding is filled in, and keys are sorted
        }
        lanes_ = count_ = 0;
        uint32_t counts[kMostSharedRowSources] = {};
        for (; next_ < end_; ++next_, from_ = 0) {
            const uint32_t v = next_ - begin_, source = SourceOf(v), rows = RowsOf(source);
            const uint32_t count = Min(rows - from_, room_ - lanes_);
            if (rows == from_) continue;
            if (count == 0) break;
            GlobalTensor<int32_t> from;
            from.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(exchange_->PingPongOf(source) +
                                                                   info_->rank * ListBytes(info_->capacity)) +
                                     from_,
                                 count);
            CopyList(list[lanes_], from, count);
            at_[v] = lanes_;
            first_[v] = from_;
            counts[v] = count;
            lanes_ += PaddedInts(count);
            count_ += count;
            from_ += count;
            if (from_ < rows) break;
        }
        if (count_ == 0) return false;
        // Padding between and after the lists sorts after all entries.
        const uint32_t end = lanes_;
        lanes_ = CeilDiv(lanes_, kSorted) * kSorted;
        if (end < lanes_) AscendC::Duplicate(list[end], static_cast<int32_t>(0), static_cast<int32_t>(lanes_ - end));
        const LocalTensor<float> bias = spareBuf_.Get<float>();
        AscendC::Duplicate(bias, kNoEntry, static_cast<int32_t>(lanes_));
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t v = 0; v < end_ - begin_; ++v) {
            if (counts[v] != 0)
                AscendC::Duplicate(bias[at_[v]], -static_cast<float>(v), static_cast<int32_t>(counts[v]));
        }
        return true;
    }
    // Sorts the entries of the last Load.
    __aicore__ inline void Sort() {
        const LocalTensor<float> key = keyBuf_.Get<float>();
        LocalTensor<float> spare = spareBuf_.Get<float>();
        const LocalTensor<float> bias = spare, token = spare[room_];
        const int32_t lanes = static_cast<int32_t>(lanes_);
        SyncFunc<HardEvent::MTE2_V>();
        AscendC::Cast(key, listBuf_.Get<int32_t>(), AscendC::RoundMode::CAST_RINT, lanes_);
        AscendC::PipeBarrier<PIPE_V>();
        // Exact for the token of every pair that SharesRows admits, although the factor is rounded.
        AscendC::Muls(key, key, 1.0f / static_cast<float>(info_->topK), lanes);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(token, key, AscendC::RoundMode::CAST_FLOOR, lanes_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(token, token, -static_cast<float>(width_), lanes);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(key, token, bias, lanes);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Sort<float, true>(sortedBuf_.Get<float>(), key, indexBuf_.Get<uint32_t>(), spare,
                                   static_cast<int32_t>(lanes_ / kSorted));
        SyncFunc<HardEvent::V_S>();
    }
    __aicore__ inline uint32_t count() const { return count_; }
    // Entries of the same row have equal keys.
    __aicore__ inline float Key(uint32_t i) { return sortedBuf_.Get<float>().GetValue(2 * i); }
    __aicore__ inline uint32_t SourceOfKey(float key) { return SourceOf(Number(key) % width_); }
    __aicore__ inline uint32_t TokenOfKey(float key) { return Number(key) / width_; }
    __aicore__ inline Entry EntryAt(uint32_t i) {
        const uint32_t lane = sortedBuf_.Get<uint32_t>().GetValue(2 * i + 1);
        const uint32_t v = Number(Key(i)) % width_;
        return {SourceOf(v), static_cast<uint32_t>(listBuf_.Get<int32_t>().GetValue(lane)),
                static_cast<int32_t>(lane - at_[v] + first_[v])};
    }

private:
    static constexpr uint32_t kSorted = 32;  // entries of a repeat
    static constexpr float kNoEntry = -1e30f;

    // Rounds up to whole blocks.
    __aicore__ inline void CopyList(const LocalTensor<int32_t>& to, const GlobalTensor<int32_t>& from, uint32_t count) {
        const DataCopyExtParams params{1, static_cast<uint32_t>(count * sizeof(int32_t)), 0, 0, 0};
        const DataCopyPadExtParams<int32_t> pad{true, 0, Padding(PaddedInts(count) - count), 0};
        AscendC::DataCopyPad(to, from, params, pad);
    }
    __aicore__ inline uint32_t SourceOf(uint32_t v) const { return (info_->rank + begin_ + v) % info_->world; }
    __aicore__ inline uint32_t RowsOf(uint32_t source) {
        const uint32_t slot = (info_->localExperts - 1) * info_->world + source;
        const uint32_t rows =
            static_cast<uint32_t>(segments_->Offset(slot)) + segments_->End(slot) - segments_->Start(slot);
        return Min(rows, info_->capacity);
    }
    // Core 0 may not have checked the list yet: the number is clamped to the tokens of a source.
    __aicore__ inline uint32_t Number(float key) const {
        const float most = static_cast<float>(info_->maxBatch * width_ - 1);
        return static_cast<uint32_t>(key > 0.0f ? 0.0f : -key > most ? most : -key);
    }

    Exchange* exchange_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    SegmentTable* segments_ = nullptr;
    UbBuf listBuf_, keyBuf_, indexBuf_, sortedBuf_, spareBuf_;
    uint32_t at_[kMostSharedRowSources] = {}, first_[kMostSharedRowSources] = {};  // by source: lane, entry of its list
    uint32_t room_ = 0, width_ = 1;
    uint32_t begin_ = 0, end_ = 0;  // sources
    uint32_t next_ = 0, from_ = 0;  // source, and entry of its list, at which the next load starts
    uint32_t lanes_ = 0, count_ = 0;
};

// The cores are divided into groups, and each group gets a group of sources. All cores of a group load and sort the
// same list entries, and each takes an even share of the rows, so no core waits for one source alone. Same calls as
// DirectGather: Init, Begin, Start, Finish.
class SharedRowGather {
public:
    __aicore__ inline void Init(Exchange& exchange, const DispatchArguments& arguments,
                                const MoeDistributeDispatchTiling& tiling, bool quantized) {
        exchange_ = &exchange;
        args_ = &arguments;
        info_ = &tiling.info;
        quantized_ = quantized;
        wireSize_ = WireSize(*info_);
        rowStride_ = DispatchRowStride(info_->hidden, wireSize_, quantized, 0);
        rowStep_ = RowStep(*info_, rowStride_);
        ring_ = tiling.copyRing;
        share_ = SharedRowShare(*info_, tiling.sharedLanes);
        order_.Init(exchange, *info_, tiling.sharedLanes);
        TPipe& pipe = exchange.pipe();
        const SharedRowGatherUb ub(tiling, rowStride_);
        pipe.InitBuffer(placeBuf_, ub.places);
        if (ub.sourceIndices != 0) pipe.InitBuffer(sourceIndexBuf_, ub.sourceIndices);
        pipe.InitBuffer(queue_, Ring(ub.ring), ub.row);
    }
    // Starts to load the lists of this core's sources.
    __aicore__ inline void Begin(SegmentTable& segments) {
        segments_ = &segments;
        const uint32_t groups = SharedRowGroups(*info_), cores = info_->cores;
        const uint32_t group = ((exchange_->core() + 1) * groups - 1) / cores;
        firstCore_ = PartBegin(cores, group, groups);
        groupCores_ = PartBegin(cores, group + 1, groups) - firstCore_;
        order_.Take(segments, PartBegin(info_->world, group, groups), PartBegin(info_->world, group + 1, groups));
        loaded_ = order_.Load();
    }
    // Sorts the entries and starts to load the first rows.
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
        // Core 0 may not have checked the lists yet: the share never exceeds its room.
        end_ = Min(end_, begin_ + share_);
        ahead_ = begin_;
        for (uint32_t started = 0; started < ring_ && ahead_ < end_; ++started) StartRow();
    }
    // Core 0 starts later and stores the counts: its share is half of the others'.
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
        if (info_->sourceIndices != 0) StoreSourceIndices();
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
            reinterpret_cast<__gm__ int8_t*>(exchange_->PingPongOf(order_.SourceOfKey(key)) +
                                             PublishedRowsOffset(info_->world, info_->capacity) +
                                             static_cast<uint64_t>(order_.TokenOfKey(key)) * rowStep_),
            rowStride_);
        LocalTensor<int8_t> row = queue_.template AllocTensor<int8_t>();
        AscendC::DataCopy(row, source, rowStride_);
        queue_.EnQue(row);
        ahead_ = RowEnd(ahead_);
    }
    // Finds the row of expand_x for each entry of the share, and fills in its source index if rows have them.
    __aicore__ inline void FindPlaces() {
        LocalTensor<int32_t> places = placeBuf_.Get<int32_t>();
        LocalTensor<int32_t> sourceIndex;
        if (info_->sourceIndices != 0) sourceIndex = sourceIndexBuf_.Get<int32_t>();
        if (found_ && info_->sourceIndices != 0) SyncFunc<HardEvent::MTE3_S>();
        found_ = true;
        for (uint32_t i = 0; i < end_ - begin_; ++i) {
            const RowOrder::Entry entry = order_.EntryAt(begin_ + i);
            places.SetValue(i, PlaceOf(entry));
            if (info_->sourceIndices == 0) continue;
            sourceIndex.SetValue(i * kBlockWords, static_cast<int32_t>(entry.source));
            sourceIndex.SetValue(i * kBlockWords + 1, static_cast<int32_t>(entry.pair / info_->topK));
            sourceIndex.SetValue(i * kBlockWords + 2, static_cast<int32_t>(entry.pair % info_->topK));
        }
    }
    // A source's list is its segments in the order of local experts: the entry is in the last segment that begins at or
    // before it.
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
        if (quantized_) {
            StoreField(args_->dynamicScales, place, row[PayloadBytes(info_->hidden, wireSize_)], sizeof(float),
                       rowStride_, 1);
        }
    }
    __aicore__ inline void StoreSourceIndices() {
        LocalTensor<int32_t> places = placeBuf_.Get<int32_t>(), sourceIndex = sourceIndexBuf_.Get<int32_t>();
        SyncFunc<HardEvent::S_MTE3>();
        for (uint32_t i = 0; i < end_ - begin_; ++i) {
            const uint32_t place = static_cast<uint32_t>(places.GetValue(i));
            if (place >= info_->expandRows) continue;
            GlobalTensor<int32_t> target;
            target.SetGlobalBuffer(
                reinterpret_cast<__gm__ int32_t*>(args_->expandIdx) + static_cast<uint64_t>(place) * kSourceIndexWords,
                kSourceIndexWords);
            CopyOut(target, sourceIndex[i * kBlockWords], kSourceIndexWords);
        }
    }

    Exchange* exchange_ = nullptr;
    const DispatchArguments* args_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    SegmentTable* segments_ = nullptr;
    RowOrder order_;
    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, kMostGatherRing> queue_;
    UbBuf placeBuf_, sourceIndexBuf_;
    uint32_t firstCore_ = 0, groupCores_ = 1;  // cores that share the rows of these sources
    uint32_t begin_ = 0, end_ = 0;             // this core's share of the entries
    uint32_t ahead_ = 0;                       // the first of them whose row has not started to load
    uint32_t wireSize_ = 1;
    uint32_t rowStride_ = 0, rowStep_ = 0;  // of a row in UB, and in the window
    uint32_t ring_ = 1;
    uint32_t share_ = 0;  // most entries of a core at a time
    bool loaded_ = false, found_ = false;
    bool quantized_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DIRECT_SHARED_ROWS_H
