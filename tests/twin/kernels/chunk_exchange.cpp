// All-to-all of rows in chunks that carry their own flag: 480 bytes of data and 32 of 1.0f, stored as one. No
// core waits for another: receivers poll the flags of a row's chunks, take the data out, take the flags down.
#include "moe_mc2_base.h"

using namespace AscendC;

struct ChunkTilingData {
    uint32_t rank;
    uint32_t world;
    uint32_t rows;   // for each peer
    uint32_t bytes;  // a row, a multiple of 32
};

constexpr uint32_t kData = 480;
constexpr uint32_t kChunk = 512;
constexpr uint32_t kFlagFloats = 8;

class KernelChunks {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, TPipe* pipe, const ChunkTilingData& tiling) {
        t_ = tiling;
        pipe_ = pipe;
        chunks_ = (t_.bytes + kData - 1) / kData;
        context_ = (__gm__ HcclOpResParam*)GetHcclContext<0>();
        xGm_.SetGlobalBuffer((__gm__ uint8_t*)x, t_.world * t_.rows * t_.bytes);
        yGm_.SetGlobalBuffer((__gm__ uint8_t*)y, t_.world * t_.rows * t_.bytes);
        pipe_->InitBuffer(sendQueue_, 2, chunks_ * kChunk);
        pipe_->InitBuffer(takeQueue_, 2, chunks_ * kData);
        pipe_->InitBuffer(flagBuf_, chunks_ * 32);
        pipe_->InitBuffer(sumBuf_, 32);
        pipe_->InitBuffer(workBuf_, chunks_ * 32);
    }
    __aicore__ inline void Process() {
        for (uint32_t i = GetBlockIdx(); i < t_.world * t_.rows; i += GetBlockNum()) {
            Send(i);
        }
        for (uint32_t i = GetBlockIdx(); i < t_.world * t_.rows; i += GetBlockNum()) {
            Receive(i);
        }
    }

private:
    __aicore__ inline GM_ADDR Window(uint32_t rank, uint32_t source, uint32_t row) {
        uint64_t base =
            rank == t_.rank
                ? context_->localWindowsIn
                : ((__gm__ HcclRankRelationResV2*)context_->remoteRes[rank].nextDevicePtr)->windowsIn;
        return (GM_ADDR)(base + static_cast<uint64_t>(source * t_.rows + row) * chunks_ * kChunk);
    }
    // 480 bytes a chunk into UB, 32 left free behind each for the flag.
    __aicore__ inline void Send(uint32_t i) {
        LocalTensor<uint8_t> row = sendQueue_.AllocTensor<uint8_t>();
        uint32_t whole = t_.bytes / kData, rest = t_.bytes % kData;
        if (whole > 0) {
            DataCopy(row, xGm_[static_cast<uint64_t>(i) * t_.bytes],
                     {static_cast<uint16_t>(whole), kData / 32, 0, (kChunk - kData) / 32});
        }
        if (rest > 0) {
            DataCopy(row[whole * kChunk], xGm_[static_cast<uint64_t>(i) * t_.bytes + whole * kData], rest);
            LocalTensor<int32_t> words = row.ReinterpretCast<int32_t>();
            Duplicate(words[(whole * kChunk + rest) / 4], 0, (kData - rest) / 4);
        }
        LocalTensor<float> floats = row.ReinterpretCast<float>();
        for (uint32_t chunk = 0; chunk < chunks_; ++chunk) {
            Duplicate(floats[(chunk * kChunk + kData) / 4], 1.0f, kFlagFloats);
        }
        Mc2Sample::SyncFunc<HardEvent::V_MTE3>();
        sendQueue_.EnQue(row);
        row = sendQueue_.DeQue<uint8_t>();
        GlobalTensor<uint8_t> to;
        to.SetGlobalBuffer((__gm__ uint8_t*)Window(i / t_.rows, t_.rank, i % t_.rows), chunks_ * kChunk);
        DataCopy(to, row, chunks_ * kChunk);
        sendQueue_.FreeTensor(row);
        Mc2Sample::SyncFunc<HardEvent::MTE3_V>();
    }
    __aicore__ inline void Receive(uint32_t i) {
        GM_ADDR from = Window(t_.rank, i / t_.rows, i % t_.rows);
        GlobalTensor<float> flagGm;
        flagGm.SetGlobalBuffer((__gm__ float*)(from + kData));
        LocalTensor<float> flags = flagBuf_.Get<float>(), sum = sumBuf_.Get<float>();
        DataCopyParams strided{static_cast<uint16_t>(chunks_), 1, kData / 32, 0};
        Mc2Sample::SyncFunc<HardEvent::MTE3_MTE2>();
        float up = 0.0f;
        while (up != static_cast<float>(chunks_ * kFlagFloats)) {
            DataCopy(flags, flagGm, strided);
            Mc2Sample::SyncFunc<HardEvent::MTE2_V>();
            ReduceSum(sum, flags, workBuf_.Get<float>(), static_cast<int32_t>(chunks_ * kFlagFloats));
            Mc2Sample::SyncFunc<HardEvent::V_S>();
            up = sum.GetValue(0);
            Mc2Sample::SyncFunc<HardEvent::S_V>();
        }
        GlobalTensor<uint8_t> dataGm;
        dataGm.SetGlobalBuffer((__gm__ uint8_t*)from);
        LocalTensor<uint8_t> row = takeQueue_.AllocTensor<uint8_t>();
        DataCopy(row, dataGm, {static_cast<uint16_t>(chunks_), kData / 32, (kChunk - kData) / 32, 0});
        takeQueue_.EnQue(row);
        row = takeQueue_.DeQue<uint8_t>();
        DataCopy(yGm_[static_cast<uint64_t>(i) * t_.bytes], row, t_.bytes);
        takeQueue_.FreeTensor(row);
        Duplicate(flags, 0.0f, chunks_ * kFlagFloats);
        Mc2Sample::SyncFunc<HardEvent::V_MTE3>();
        DataCopy(flagGm, flags, {static_cast<uint16_t>(chunks_), 1, 0, kData / 32});
    }

    ChunkTilingData t_;
    TPipe* pipe_;
    uint32_t chunks_;
    __gm__ HcclOpResParam* context_;
    TQueBind<QuePosition::VECIN, QuePosition::VECOUT, 1> sendQueue_, takeQueue_;
    TBuf<> flagBuf_, sumBuf_, workBuf_;
    GlobalTensor<uint8_t> xGm_, yGm_;
};

extern "C" __global__ __aicore__ void chunk_exchange(GM_ADDR x, GM_ADDR y, GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(ChunkTilingData, tilingData, tiling);
    TPipe pipe;
    KernelChunks op;
    op.Init(x, y, &pipe, tilingData);
    op.Process();
}
