// A row of int32 a core, left in the workspace before the cores met: their sum, or their largest, lane by
// lane. Rows come to UB many at a time and are folded in halves, so that instructions are few and long.
#ifndef ASCEND_MOE_DISTRIBUTE_CORE_ROWS_H
#define ASCEND_MOE_DISTRIBUTE_CORE_ROWS_H

#include "base.h"

namespace moe {

class CoreRows {
public:
    // `lanes` of a row, a multiple of 8.
    __aicore__ inline void Init(GM_ADDR rows, uint32_t lanes, uint32_t cores) {
        lanes_ = lanes;
        rows_.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(rows), static_cast<uint64_t>(cores) * lanes);
    }
    // Of lanes [first, first + count) of the rows of cores [begin, end), to `to`, which holds what none has.
    // `queue`: of loads for vectors; its tensors hold `room` int32, `lanes` at least.
    template <bool kLargest, typename Queue>
    __aicore__ inline void Fold(Queue& queue, uint32_t room, const LocalTensor<int32_t>& to, uint32_t first,
                                uint32_t count, uint32_t begin, uint32_t end) {
        const uint32_t padded = PaddedInts(count), step = Min(room / padded, kMostRows);
        const DataCopyPadExtParams<int32_t> pad{padded != count, 0, static_cast<uint8_t>(padded - count), 0};
        for (uint32_t core = begin; core < end; core += step) {
            uint32_t n = Min(step, end - core);
            const DataCopyExtParams params{static_cast<uint16_t>(n),
                                           static_cast<uint32_t>(count * sizeof(int32_t)),
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
    __aicore__ inline void Join(const LocalTensor<int32_t>& to, const LocalTensor<int32_t>& more,
                                uint32_t count) {
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

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_CORE_ROWS_H
