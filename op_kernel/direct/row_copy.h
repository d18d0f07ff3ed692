// Rows from one place in GM to another of the same shape, by way of UB, several chunks on their way at a
// time.
#ifndef ASCEND_MOE_DISTRIBUTE_ROW_COPY_H
#define ASCEND_MOE_DISTRIBUTE_ROW_COPY_H

#include "../common/base.h"

namespace moe {

class RowCopy {
public:
    // UB: `ring` chunks.
    __aicore__ inline void Init(TPipe& pipe, uint32_t ring, uint32_t chunkBytes, uint32_t rowBytes) {
        chunkBytes_ = chunkBytes;
        rowBytes_ = rowBytes;
        pipe.InitBuffer(queue_, static_cast<uint8_t>(ring), chunkBytes);
    }
    __aicore__ inline void Between(GM_ADDR from, GM_ADDR to) {
        from_ = from;
        to_ = to;
    }
    // Bytes [begin, end) of all rows.
    __aicore__ inline void Bytes(uint64_t begin, uint64_t end) {
        for (uint64_t at = begin; at < end;) {
            const uint32_t bytes = end - at < chunkBytes_ ? static_cast<uint32_t>(end - at) : chunkBytes_;
            LocalTensor<int8_t> chunk = queue_.template AllocTensor<int8_t>();
            AscendC::DataCopy(chunk, At(from_, at, bytes), bytes);
            chunk = Arrived(chunk);
            AscendC::DataCopy(At(to_, at, bytes), chunk, bytes);
            queue_.FreeTensor(chunk);
            at += bytes;
        }
    }
    // Columns [begin, end) of `count` rows, in bytes.
    __aicore__ inline void Columns(uint32_t row, uint32_t count, uint32_t begin, uint32_t end) {
        const uint32_t most = chunkBytes_ / kBlock * kBlock;
        for (uint32_t column = begin; column < end; column += most) {
            const uint32_t bytes = Min(most, end - column), rows = most / bytes;
            for (uint32_t i = 0; i < count; i += rows) Part(row + i, Min(rows, count - i), column, bytes);
        }
    }

private:
    __aicore__ inline void Part(uint32_t row, uint32_t count, uint32_t column, uint32_t bytes) {
        const uint64_t at = static_cast<uint64_t>(row) * rowBytes_ + column;
        const uint32_t span = (count - 1) * rowBytes_ + bytes;
        const uint16_t rows = static_cast<uint16_t>(count);
        const DataCopyPadExtParams<int8_t> pad{false, 0, 0, 0};
        LocalTensor<int8_t> chunk = queue_.template AllocTensor<int8_t>();
        const DataCopyExtParams in{rows, bytes, rowBytes_ - bytes, 0, 0};
        AscendC::DataCopyPad(chunk, At(from_, at, span), in, pad);
        chunk = Arrived(chunk);
        const DataCopyExtParams out{rows, bytes, 0, rowBytes_ - bytes, 0};
        AscendC::DataCopyPad(At(to_, at, span), chunk, out);
        queue_.FreeTensor(chunk);
    }
    __aicore__ inline LocalTensor<int8_t> Arrived(LocalTensor<int8_t>& chunk) {
        queue_.EnQue(chunk);
        return queue_.template DeQue<int8_t>();
    }
    __aicore__ inline GlobalTensor<int8_t> At(GM_ADDR base, uint64_t offset, uint32_t bytes) const {
        GlobalTensor<int8_t> tensor;
        tensor.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(base + offset), bytes);
        return tensor;
    }

    AscendC::TQueBind<AscendC::QuePosition::VECIN, AscendC::QuePosition::VECOUT, 1> queue_;
    GM_ADDR from_ = nullptr;
    GM_ADDR to_ = nullptr;
    uint32_t chunkBytes_ = 0;
    uint32_t rowBytes_ = 0;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_ROW_COPY_H
