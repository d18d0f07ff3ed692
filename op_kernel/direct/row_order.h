// Direct dispatch: the entries of the lists of some sources by row, that is by token and source, so that the
// entries of a row follow each other whatever their experts, and cores can share them evenly. A sort does it.
#ifndef ASCEND_MOE_DISTRIBUTE_ROW_ORDER_H
#define ASCEND_MOE_DISTRIBUTE_ROW_ORDER_H

#include "../common/exchange.h"

namespace moe {

class RowOrder {
public:
    struct Entry {
        uint32_t source, pair;
        int32_t number;  // in the source's list
    };
    __aicore__ inline void Init(Exchange& exchange, const MoeDistributeInfo& info) {
        exchange_ = &exchange;
        info_ = &info;
        room_ = SharedRowLanes(info);
        width_ = SharedRowSources(info);
        TPipe& pipe = exchange.pipe();
        pipe.InitBuffer(listBuf_, room_ * sizeof(int32_t));
        pipe.InitBuffer(keyBuf_, room_ * sizeof(float));
        pipe.InitBuffer(indexBuf_, room_ * sizeof(int32_t));
        pipe.InitBuffer(sortedBuf_, 2 * room_ * sizeof(float));
        pipe.InitBuffer(spareBuf_, 2 * room_ * sizeof(float));
        AscendC::CreateVecIndex(indexBuf_.Get<int32_t>(), static_cast<int32_t>(0), room_);
    }
    // Of the sources [begin, end) after this rank.
    __aicore__ inline void Take(SegmentTable& segments, uint32_t begin, uint32_t end) {
        segments_ = &segments;
        begin_ = next_ = begin;
        end_ = end;
    }
    // The next of their entries begin to load, as many as UB holds. False: there are none.
    __aicore__ inline bool Load() {
        const LocalTensor<int32_t> list = listBuf_.Get<int32_t>();
        if (lanes_ != 0) {
            SyncFunc<HardEvent::S_MTE2>();
            SyncFunc<HardEvent::V_MTE2>();
        }
        lanes_ = count_ = 0;
        uint32_t counts[kMostSharedRowSources] = {};
        for (; next_ < end_; ++next_, from_ = 0) {
            const uint32_t v = next_ - begin_, source = SourceOf(v), rows = RowsOf(source);
            const uint32_t count = Min(rows - from_, room_ - lanes_);
            if (rows == from_) continue;
            if (count == 0) break;
            GlobalTensor<int32_t> from;
            from.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(exchange_->HalfOf(source) +
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
        // What lies between the lists and behind them sorts behind all entries.
        const uint32_t end = lanes_;
        lanes_ = CeilDiv(lanes_, kSorted) * kSorted;
        if (end < lanes_)
            AscendC::Duplicate(list[end], static_cast<int32_t>(0), static_cast<int32_t>(lanes_ - end));
        const LocalTensor<float> bias = spareBuf_.Get<float>();
        AscendC::Duplicate(bias, kNoEntry, static_cast<int32_t>(lanes_));
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t v = 0; v < end_ - begin_; ++v) {
            if (counts[v] != 0)
                AscendC::Duplicate(bias[at_[v]], -static_cast<float>(v), static_cast<int32_t>(counts[v]));
        }
        return true;
    }
    // Of those that have been loaded.
    __aicore__ inline void Sort() {
        const LocalTensor<float> key = keyBuf_.Get<float>();
        LocalTensor<float> spare = spareBuf_.Get<float>();
        const LocalTensor<float> bias = spare, token = spare[room_];
        const int32_t lanes = static_cast<int32_t>(lanes_);
        const float part = 1.0f / static_cast<float>(info_->topK);
        SyncFunc<HardEvent::MTE2_V>();
        AscendC::Cast(key, listBuf_.Get<int32_t>(), AscendC::RoundMode::CAST_RINT, lanes_);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Muls(key, key, part, lanes);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Adds(key, key, 0.5f * part, lanes);
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
    // Equal for the entries of a row only.
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

    // Into whole blocks.
    __aicore__ inline void CopyList(const LocalTensor<int32_t>& to, const GlobalTensor<int32_t>& from,
                                    uint32_t count) {
        const DataCopyExtParams params{1, static_cast<uint32_t>(count * sizeof(int32_t)), 0, 0, 0};
        const DataCopyPadExtParams<int32_t> pad{true, 0, static_cast<uint8_t>(PaddedInts(count) - count), 0};
        AscendC::DataCopyPad(to, from, params, pad);
    }
    __aicore__ inline uint32_t SourceOf(uint32_t v) const {
        return (info_->rank + begin_ + v) % info_->world;
    }
    __aicore__ inline uint32_t RowsOf(uint32_t source) {
        const uint32_t slot = (info_->localExperts - 1) * info_->world + source;
        const uint32_t rows =
            static_cast<uint32_t>(segments_->Offset(slot)) + segments_->End(slot) - segments_->Start(slot);
        return Min(rows, info_->capacity);
    }
    // Of a list that nobody has checked yet too: never beyond the tokens of a source.
    __aicore__ inline uint32_t Number(float key) const {
        const float most = static_cast<float>(info_->maxBatch * width_ - 1);
        return static_cast<uint32_t>(key > 0.0f ? 0.0f : -key > most ? most : -key);
    }

    Exchange* exchange_ = nullptr;
    const MoeDistributeInfo* info_ = nullptr;
    SegmentTable* segments_ = nullptr;
    UbBuf listBuf_, keyBuf_, indexBuf_, sortedBuf_, spareBuf_;
    uint32_t at_[kMostSharedRowSources] = {},
             first_[kMostSharedRowSources] = {};  // by source: lane, entry of its list
    uint32_t room_ = 0, width_ = 1;
    uint32_t begin_ = 0, end_ = 0;  // sources
    uint32_t next_ = 0, from_ = 0;  // source, and entry of its list, that the next load begins with
    uint32_t lanes_ = 0, count_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_ROW_ORDER_H
