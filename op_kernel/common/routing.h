// This rank's routing: which (token, k) pairs go where. Each core reads its share of the ids and writes a histogram
// over the experts to the workspace, [cores][E] int32. After the core barrier each core sums the histograms: the rank's
// totals, and the counts of the cores before it, which give each of its pairs its position among the rank's pairs of
// that expert.
#ifndef ASCEND_MOE_COMMON_ROUTING_H
#define ASCEND_MOE_COMMON_ROUTING_H

#include "core_barrier.h"

namespace moe {

// Folds rows [cores][lanes] int32 in the workspace, one per core, into their sum or maximum. Loads many rows at a time
// and folds them pairwise, so that instructions are few and long.
class CoreRows {
public:
    // `lanes` of a row, a multiple of 8.
    __aicore__ inline void Init(GM_ADDR rows, uint32_t lanes, uint32_t cores) {
        lanes_ = lanes;
        rows_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(rows), static_cast<uint64_t>(cores) * lanes);
    }
    // Folds lanes [first, first + count) of the rows of cores [begin, end) into `to`, which holds the neutral value.
    // `queue`: for loads; its tensors hold `room` int32, at least `lanes`.
    template <bool kLargest, typename Queue>
    __aicore__ inline void Fold(Queue& queue, uint32_t room, const LocalTensor<int32_t>& to, uint32_t first,
                                uint32_t count, uint32_t begin, uint32_t end) {
        const uint32_t padded = PaddedInts(count), step = Min(room / padded, kMostRows);
        const DataCopyPadExtParams<int32_t> pad{padded != count, 0, Padding(padded - count), 0};
        for (uint32_t core = begin; core < end; core += step) {
            uint32_t n = Min(step, end - core);
            const DataCopyExtParams params{Pieces(n), static_cast<uint32_t>(count * sizeof(int32_t)),
                                           static_cast<uint32_t>((lanes_ - count) * sizeof(int32_t)), 0, 0};
            LocalTensor<int32_t> rows = queue.template AllocTensor<int32_t>();
            AscendC::DataCopyPad(rows, rows_[static_cast<uint64_t>(core) * lanes_ + first], params, pad);
            queue.EnQue(rows);
            rows = queue.template DeQue<int32_t>();
            while (n > 1) {
                const uint32_t half = n / 2;
                Join<kLargest>(rows, rows[(n - half) * padded], half * padded);
                n -= half;
            }
            Join<kLargest>(to, rows, padded);
            queue.FreeTensor(rows);
        }
    }

private:
    static constexpr uint32_t kMostRows = 64;

    template <bool kLargest>
    __aicore__ inline void Join(const LocalTensor<int32_t>& to, const LocalTensor<int32_t>& more, uint32_t count) {
        AscendC::PipeBarrier<PIPE_V>();
        if constexpr (kLargest) {
            AscendC::Max(to, to, more, static_cast<int32_t>(count));
        } else {
            AscendC::Add(to, to, more, static_cast<int32_t>(count));
        }
    }
    GlobalTensor<int32_t> rows_;
    uint32_t lanes_ = 0;
};

constexpr int32_t kNotRouted = -1;  // id -1: routed nowhere
constexpr int32_t kInactive = -2;   // masked

// Streams expert_ids and x_active_mask. `Id(i)` is the routed or special expert, kNotRouted or kInactive.
class PairReader {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expertIds, GM_ADDR mask) {
        info_ = &info;
        stored_ = 0;
        ids_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(expertIds), info.batch * info.topK);
        const PairReaderUb ub(info);
        pipe.InitBuffer(idBuf_, ub.ids);
        if (info.maskRank != 0) {
            mask_.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(mask),
                                  info.maskRank == 1 ? info.batch : info.batch * info.topK);
            pipe.InitBuffer(maskBuf_, ub.mask);
        }
    }
    // Loads pairs [begin, begin + count), count <= kChunkPairs.
    __aicore__ inline void Load(uint32_t begin, uint32_t count) {
        if (count == stored_ && begin == begin_) return;
        stored_ = 0;
        Start(begin, count);
        SyncFunc<HardEvent::MTE2_S>();
    }
    // Starts to load pairs for later calls of Load. The caller makes S wait for MTE2.
    __aicore__ inline void Keep(uint32_t begin, uint32_t count) {
        Start(begin, count);
        stored_ = count;
    }
    // The id of pair begin + i, of token `token`; kInactive if it is masked.
    __aicore__ inline int32_t Id(uint32_t i, uint32_t token) {
        if (info_->maskRank != 0) {
            const uint32_t at = info_->maskRank == 1 ? token - firstToken_ : i;
            if (maskBuf_.Get<int8_t>().GetValue(at) == 0) return kInactive;
        }
        const int32_t id = idBuf_.Get<int32_t>().GetValue(i);
        return id == kInactive ? kInvalid : id;
    }
    __aicore__ inline bool Routed(int32_t id) const { return id >= 0 && id < static_cast<int32_t>(info_->experts); }
    // Ids of zero, copy and const experts follow the others.
    __aicore__ inline bool Special(int32_t id) const {
        return id >= static_cast<int32_t>(info_->experts) && id < static_cast<int32_t>(info_->ids);
    }
    __aicore__ inline bool Invalid(int32_t id) const {
        return id != kNotRouted && id != kInactive && (id < 0 || id >= static_cast<int32_t>(info_->ids));
    }
    __aicore__ inline int32_t RawId(uint32_t i) { return idBuf_.Get<int32_t>().GetValue(i); }

private:
    // Loads of the same pairs that callers start after this need no extra wait for reads of earlier pairs.
    __aicore__ inline void Start(uint32_t begin, uint32_t count) {
        begin_ = begin;
        SyncFunc<HardEvent::S_MTE2>();
        CopyIn(idBuf_.Get<int32_t>(), ids_[begin], count);
        if (info_->maskRank == 1) {
            firstToken_ = begin / info_->topK;
            const uint32_t lastToken = (begin + count - 1) / info_->topK;
            CopyIn(maskBuf_.Get<int8_t>(), mask_[firstToken_], lastToken - firstToken_ + 1);
        } else if (info_->maskRank == 2) {
            CopyIn(maskBuf_.Get<int8_t>(), mask_[begin], count);
        }
    }
    static constexpr int32_t kInvalid = -3;  // an id that happens to be -2
    GlobalTensor<int32_t> ids_;
    GlobalTensor<int8_t> mask_;
    UbBuf idBuf_, maskBuf_;
    const MoeDistributeInfo* info_ = nullptr;
    uint32_t begin_ = 0;
    uint32_t firstToken_ = 0;
    uint32_t stored_ = 0;  // pairs loaded until others are
};

class RoutingTable {
public:
    // UB: the running counts, totals and prefixes of all experts.
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, GM_ADDR expertIds, GM_ADDR mask,
                                GM_ADDR workspace, uint32_t core) {
        info_ = &info;
        core_ = core;
        lanes_ = PaddedInts(info.experts);
        const uint32_t pairs = info.batch * info.topK;
        begin_ = PartBegin(pairs, core, info.cores);
        end_ = PartBegin(pairs, core + 1, info.cores);
        // A token's pairs stay on one core, so that its row is read once, unless some cores would get none.
        if (info.batch >= info.cores)
            ShareTokens(PartBegin(info.batch, core, info.cores), PartBegin(info.batch, core + 1, info.cores));
        pairs_.Init(pipe, info, expertIds, mask);
        const RoutingTableUb ub(info);
        pipe.InitBuffer(runningBuf_, ub.experts);
        pipe.InitBuffer(totalBuf_, ub.experts);
        pipe.InitBuffer(prefixBuf_, ub.experts);
        histograms_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(workspace),
                                    static_cast<uint64_t>(info.cores) * lanes_);
        rows_.Init(workspace, lanes_, info.cores);
        totals_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(workspace + TotalsOffset(info.cores, info.experts)),
                                lanes_);
    }

    // This core's share is the pairs of these tokens; the shares of all cores are consecutive.
    __aicore__ inline void ShareTokens(uint32_t begin, uint32_t end) {
        begin_ = begin * info_->topK;
        end_ = end * info_->topK;
    }

    // Starts to load the first pairs of the share. The caller makes S wait for MTE2.
    __aicore__ inline void Fetch() {
        if (begin_ < end_) pairs_.Keep(begin_, Min(kChunkPairs, end_ - begin_));
    }
    // Counts this core's pairs and writes its histogram for the others. Returns the first invalid id of the share.
    __aicore__ inline OpStatus Count() {
        OpStatus status;
        LocalTensor<int32_t> running = runningBuf_.Get<int32_t>();
        AscendC::Duplicate(running, static_cast<int32_t>(0), lanes_);
        SyncFunc<HardEvent::V_S>();
        for (uint32_t at = begin_; at < end_; at += kChunkPairs) {
            const uint32_t count = Min(kChunkPairs, end_ - at);
            pairs_.Load(at, count);
            uint32_t token = at / info_->topK, k = at % info_->topK;
            for (uint32_t i = 0; i < count; ++i) {
                const int32_t id = pairs_.Id(i, token);
                if (pairs_.Routed(id)) {
                    running.SetValue(id, running.GetValue(id) + 1);
                } else if (pairs_.Invalid(id) && status.code == kOk) {
                    status =
                        InvalidOf(*info_, kInvalidExpertId, token << 8 | k, static_cast<uint32_t>(pairs_.RawId(i)));
                }
                if (++k == info_->topK) {
                    k = 0;
                    ++token;
                }
            }
        }
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(histograms_[static_cast<uint64_t>(core_) * lanes_], running, lanes_);
        return status;
    }

    // For a core that only reads pairs of its own share: `running`, the counts of the cores before it. `queue`, `room`:
    // see CoreRows.
    template <typename Queue>
    __aicore__ inline void AccumulateBefore(Queue& queue, uint32_t room) {
        Gather(queue, room, runningBuf_.Get<int32_t>(), 0, lanes_, core_);
    }
    // Only the totals of experts [first, first + count); Total(0) is then the first one's.
    template <typename Queue>
    __aicore__ inline void AccumulateShare(Queue& queue, uint32_t room, uint32_t first, uint32_t count) {
        Gather(queue, room, totalBuf_.Get<int32_t>(), first, count, info_->cores);
    }
    // After Count. Returns false if no owner can get more rows than its capacity; true if a token has more pairs for an
    // owner than the owner has experts, i.e. an expert twice.
    __aicore__ inline bool MayOverflow() {
        if (info_->localExperts >= info_->topK) return false;
        uint32_t owners[kMaxTopK];
        const uint32_t chunk = kChunkPairs / info_->topK * info_->topK;
        for (uint32_t at = begin_; at < end_; at += chunk) {
            const uint32_t count = Min(chunk, end_ - at);
            if (end_ - begin_ > chunk) pairs_.Load(at, count);
            for (uint32_t i = 0, k = 0; i < count; ++i) {
                const int32_t id = pairs_.Id(i, (at + i) / info_->topK);
                owners[k] = pairs_.Routed(id) ? Owner(*info_, static_cast<uint32_t>(id)) : kMaxWorld + k;
                uint32_t same = 0;
                for (uint32_t before = 0; before <= k; ++before) same += owners[before] == owners[k] ? 1 : 0;
                if (same > info_->localExperts) return true;
                if (++k == info_->topK) k = 0;
            }
        }
        return false;
    }

    // Finds each expert's first row number in its owner's region: the rows of the experts before it. Over RDMA numbers
    // are negative, counted from the end of the owner's rows. Returns the first owner over its capacity.
    __aicore__ inline OpStatus Place() {
        OpStatus status;
        LocalTensor<int32_t> total = totalBuf_.Get<int32_t>();
        LocalTensor<int32_t> prefix = prefixBuf_.Get<int32_t>();
        uint32_t expert = 0;
        for (uint32_t owner = 0; owner < info_->world; ++owner) {
            uint32_t rows = 0;
            for (uint32_t l = 0; l < info_->localExperts; ++l, ++expert) {
                prefix.SetValue(expert, static_cast<int32_t>(rows));
                rows += static_cast<uint32_t>(total.GetValue(expert));
            }
            if (info_->transport == kTransportRdma) AlignEnd(expert - info_->localExperts, expert, rows);
            if (rows > info_->capacity && status.code == kOk) status = InvalidOf(*info_, kRoutingOverflow, owner, rows);
        }
        return status;
    }

    // Core 0 stores the totals, in which later phases find an owner's slice.
    __aicore__ inline void StoreTotals() {
        if (core_ != 0) return;
        SyncFunc<HardEvent::V_MTE3>();
        AscendC::DataCopy(totals_, totalBuf_.Get<int32_t>(), lanes_);
    }

    // The totals that core 0 stored in an earlier UB layout.
    __aicore__ inline void LoadTotals() {
        AscendC::DataCopy(totalBuf_.Get<int32_t>(), totals_, lanes_);
        SyncFunc<HardEvent::MTE2_S>();
    }

    // The position of the next routed pair of `expert` among the rank's pairs of that expert.
    __aicore__ inline uint32_t TakePosition(int32_t expert) {
        LocalTensor<int32_t> running = runningBuf_.Get<int32_t>();
        const int32_t position = running.GetValue(expert);
        running.SetValue(expert, position + 1);
        return static_cast<uint32_t>(position);
    }
    // Takes back the positions of this token's pairs; the token is the first loaded. Direct combine: the core that sums
    // the token's first part has counted its pairs, so `running` includes them.
    __aicore__ inline void GiveBack(uint32_t token) {
        LocalTensor<int32_t> running = runningBuf_.Get<int32_t>();
        for (uint32_t k = 0; k < info_->topK; ++k) {
            const int32_t id = pairs_.Id(k, token);
            if (pairs_.Routed(id)) running.SetValue(id, running.GetValue(id) - 1);
        }
    }
    __aicore__ inline int32_t Prefix(int32_t expert) { return prefixBuf_.Get<int32_t>().GetValue(expert); }
    __aicore__ inline uint32_t Total(int32_t expert) {
        return static_cast<uint32_t>(totalBuf_.Get<int32_t>().GetValue(expert));
    }

    __aicore__ inline LocalTensor<int32_t> Running() { return runningBuf_.Get<int32_t>(); }
    __aicore__ inline LocalTensor<int32_t> Totals() { return totalBuf_.Get<int32_t>(); }

    __aicore__ inline PairReader& pairs() { return pairs_; }
    __aicore__ inline uint32_t begin() const { return begin_; }
    __aicore__ inline uint32_t end() const { return end_; }

private:
    template <typename Queue>
    __aicore__ inline void Gather(Queue& queue, uint32_t room, const LocalTensor<int32_t>& to, uint32_t first,
                                  uint32_t count, uint32_t cores) {
        SyncFunc<HardEvent::S_V>();
        AscendC::Duplicate(to, static_cast<int32_t>(0), static_cast<int32_t>(PaddedInts(count)));
        rows_.template Fold<false>(queue, room, to, first, count, 0, cores);
        SyncFunc<HardEvent::V_S>();
    }
    __aicore__ inline void AlignEnd(uint32_t begin, uint32_t end, uint32_t rows) {
        LocalTensor<int32_t> prefix = prefixBuf_.Get<int32_t>();
        for (uint32_t expert = begin; expert < end; ++expert)
            prefix.SetValue(expert, prefix.GetValue(expert) - static_cast<int32_t>(rows));
    }

    PairReader pairs_;
    GlobalTensor<int32_t> histograms_, totals_;
    CoreRows rows_;
    UbBuf runningBuf_, totalBuf_, prefixBuf_;
    const MoeDistributeInfo* info_ = nullptr;
    uint32_t core_ = 0;
    uint32_t lanes_ = 0;
    uint32_t begin_ = 0;
    uint32_t end_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_ROUTING_H
