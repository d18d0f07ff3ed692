// Rows to the peers' windows and back, in the style of kernels with plain tiling keys: Init and Process, a struct of
// the context that is named before the header that brings it, more cores than rows. Key 1000: A3, 2000: A2.
#include "kernel_operator.h"
#include "kernel_tiling/kernel_tiling.h"
#include "lib/hccl/hccl.h"

using namespace AscendC;

struct PlainKeyTilingData {
    Mc2InitTiling mc2InitTiling;
    Mc2CcTiling mc2CcTiling;
    uint32_t rows;   // for each rank
    uint32_t width;  // floats
};

// Used before the struct is known.
__aicore__ inline GM_ADDR WindowOfA3(__gm__ HcclOpResParam* context, uint32_t rank);

template <class T>
class PlainKey {
public:
    __aicore__ inline void Init(GM_ADDR x, GM_ADDR y, const PlainKeyTilingData& t, bool a3, TPipe* pipe) {
        a3_ = a3;
        rows_ = t.rows;
        width_ = t.width;
        context_ = GetHcclContext<0>();
        hccl_.Init(context_);
        rank_ = hccl_.GetRankId();
        world_ = hccl_.GetRankDim();
        x_.SetGlobalBuffer((__gm__ T*)x);
        y_.SetGlobalBuffer((__gm__ T*)y);
        total_ = world_ * rows_;
        const uint32_t each = (total_ + GetBlockNum() - 1) / GetBlockNum();
        begin_ = each * GetBlockIdx() < total_ ? each * GetBlockIdx() : total_;
        end_ = begin_ + each < total_ ? begin_ + each : total_;
        pipe->InitBuffer(queue_, 2, width_ * sizeof(T));
        pipe->InitBuffer(mine_, (end_ - begin_) * 32);  // nothing for a core without rows
        pipe->InitBuffer(flags_, 32);
    }
    __aicore__ inline void Process() {
        LocalTensor<int32_t> flag = flags_.template Get<int32_t>();
        LocalTensor<float> sums = mine_.template Get<float>();
        Duplicate(sums, 0.0f, (end_ - begin_) * 8);
        PipeBarrier<PIPE_ALL>();
        for (uint32_t i = begin_; i < end_; ++i) {
            Move(At(i / rows_, rank_ * rows_ + i % rows_), x_[i * width_]);
            flag.SetValue(0, 1);
            PipeBarrier<PIPE_ALL>();
            DataCopy(FlagAt(i / rows_, rank_ * rows_ + i % rows_), flag, 8);
            PipeBarrier<PIPE_ALL>();
        }
        for (uint32_t i = begin_; i < end_; ++i) {
            do {
                DataCopy(flag, FlagAt(rank_, i), 8);
                PipeBarrier<PIPE_ALL>();
            } while (flag.GetValue(0) != 1);
            Move(y_[i * width_], At(rank_, i));
        }
    }

private:
    static constexpr uint32_t kFlags = 1 << 15;  // bytes into the window
    __aicore__ inline GlobalTensor<T> At(uint32_t rank, uint32_t row) {
        GlobalTensor<T> there;
        GM_ADDR window = a3_ ? WindowOfA3((__gm__ HcclOpResParam*)context_, rank) : hccl_.GetWindowsInAddr(rank);
        there.SetGlobalBuffer((__gm__ T*)(window + row * width_ * sizeof(T)), width_);
        return there;
    }
    __aicore__ inline GlobalTensor<int32_t> FlagAt(uint32_t rank, uint32_t row) {
        GlobalTensor<int32_t> there;
        there.SetGlobalBuffer((__gm__ int32_t*)(hccl_.GetWindowsInAddr(rank) + kFlags + row * 32));
        return there;
    }
    __aicore__ inline void Move(const GlobalTensor<T>& to, const GlobalTensor<T>& from) {
        LocalTensor<T> row = queue_.template AllocTensor<T>();
        DataCopy(row, from, width_);
        queue_.EnQue(row);
        row = queue_.template DeQue<T>();
        DataCopy(to, row, width_);
        queue_.FreeTensor(row);
        PipeBarrier<PIPE_ALL>();
    }

    TQueBind<QuePosition::VECIN, QuePosition::VECOUT, 1> queue_;
    TBuf<> mine_, flags_;
    GlobalTensor<T> x_, y_;
    Hccl<HCCL_SERVER_TYPE_AICPU> hccl_;
    GM_ADDR context_;
    bool a3_;
    uint32_t rank_, world_, rows_, width_, total_, begin_, end_;
};

// What the kernel brings itself, where kernels have it in a header of their own.
#ifndef NO_STRUCTS
struct HcclRankRelationResV2 {
    uint32_t remoteUsrRankId;
    uint32_t remoteWorldRank;
    uint64_t windowsIn;
};
struct HcclOpResParam {
    uint8_t before[16];
    uint32_t localUsrRankId;
    uint8_t between[12];
    uint64_t localWindowsIn;
    uint8_t others[2984 - 40];
    struct {
        uint64_t nextHostPtr;
        uint64_t nextDevicePtr;
    } remoteRes[131072];
};
#endif
__aicore__ inline GM_ADDR WindowOfA3(__gm__ HcclOpResParam* context, uint32_t rank) {
    if (rank == context->localUsrRankId) return (GM_ADDR)context->localWindowsIn;
    return (GM_ADDR)((__gm__ HcclRankRelationResV2*)context->remoteRes[rank].nextDevicePtr)->windowsIn;
}

extern "C" __global__ __aicore__ void plain_key(GM_ADDR x, GM_ADDR y, GM_ADDR workspaceGM, GM_ADDR tilingGM) {
    REGISTER_TILING_DEFAULT(PlainKeyTilingData);
    GET_TILING_DATA_WITH_STRUCT(PlainKeyTilingData, tilingData, tilingGM);
    TPipe pipe;
    if (TILING_KEY_IS(1000) || TILING_KEY_IS(2000)) {
        PlainKey<float> op;
        op.Init(x, y, tilingData, TILING_KEY_IS(1000), &pipe);
        op.Process();
    }
}
