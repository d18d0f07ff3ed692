// Tensors that a kernel lays over UB by address, and pointers into UB, beside none of TPipe's buffers.
#include "moe_mc2_base.h"

using namespace AscendC;
using Mc2Sample::Gm;

template <class T>
__aicore__ inline LocalTensor<T> At(uint32_t offset) {
    LocalTensor<T> tensor;
    tensor.address_.logicPos = static_cast<uint8_t>(TPosition::VECIN);
    tensor.address_.bufferAddr = offset;
    return tensor;
}
template <class T>
__aicore__ inline LocalTensor<T> Over(__ubuf__ T* pointer, uint32_t count) {
    TBuffAddr address;
    address.logicPos = static_cast<uint8_t>(TPosition::VECCALC);
    address.bufferAddr = reinterpret_cast<uint64_t>(pointer);
    address.dataLen = count * sizeof(T);
    LocalTensor<T> tensor;
    tensor.SetAddr(address);
    return tensor;
}

extern "C" __global__ __aicore__ void raw_addresses(GM_ADDR x, GM_ADDR y, GM_ADDR words) {
    constexpr uint32_t kCount = 128, kFirst = 96, kSecond = 65536 + 96;
    const GlobalTensor<float> in = Gm<float>(x), out = Gm<float>(y);
    LocalTensor<float> first = At<float>(kFirst);
    __ubuf__ float* pointer = (__ubuf__ float*)kSecond;
    LocalTensor<float> second = Over(pointer, kCount);
    DataCopy(first, in, kCount);
    if (!TILING_KEY_IS(2)) {
        SetFlag<HardEvent::MTE2_V>(EVENT_ID0);
        WaitFlag<HardEvent::MTE2_V>(EVENT_ID0);
    }
    Adds(second, first, 1.0f, TILING_KEY_IS(1) ? kCount + 8 : kCount);
    SetFlag<HardEvent::V_MTE3>(EVENT_ID0);
    WaitFlag<HardEvent::V_MTE3>(EVENT_ID0);
    DataCopy(out, Over((__ubuf__ float*)(get_imm(0) + kSecond), kCount), kCount);
    if (TILING_KEY_IS(5)) {
        InitSocState();
        LocalMemAllocator<Hardware::UB> allocator;
        LocalTensor<float> third = allocator.Alloc<float, 32>();
        LocalTensor<half> fourth = allocator.Alloc<TPosition::VECIN, half>(32);
        PipeBarrier<PIPE_ALL>();
        DataCopy(third, in, 32);
        PipeBarrier<PIPE_ALL>();
        Adds(third, third, 2.0f, 32);
        Cast(fourth, third, RoundMode::CAST_NONE, 32);
        Cast(LocalTensor<float>(TPosition::VECCALC, allocator.GetCurAddr(), 32), fourth, RoundMode::CAST_NONE, 32);
        PipeBarrier<PIPE_ALL>();
        DataCopy(out, LocalTensor<float>(TPosition::VECCALC, 192, 32), 32);
        PipeBarrier<PIPE_ALL>();
    }
    if (TILING_KEY_IS(6)) {
        LocalMemAllocator allocator;
        allocator.Alloc<float>(192 * 256);
        allocator.Alloc<float>(8);
    }
    if (TILING_KEY_IS(7)) Adds(LocalTensor<float>(TPosition::VECIN, 192 * 1024 - 64, 32), first, 1.0f, 32);
    if (TILING_KEY_IS(3)) At<float>(192 * 1024);
    if (TILING_KEY_IS(4)) DataCopy(At<float>(192 * 1024 - 32), in, kCount);
    __ubuf__ int32_t* word = (__ubuf__ int32_t*)get_imm(32);
    *word = static_cast<int32_t>(second.GetPosition());
    word[1] = static_cast<int32_t>(first.address_.logicPos);
    word[2] = static_cast<int32_t>(first.address_.bufferAddr);
    word[3] = static_cast<int32_t>(first[8].address_.bufferAddr);
    word[4] = static_cast<int32_t>(second.address_.dataLen);
    SetFlag<HardEvent::S_MTE3>(EVENT_ID1);
    WaitFlag<HardEvent::S_MTE3>(EVENT_ID1);
    DataCopy(Gm<int32_t>(words), At<int32_t>(32), 8);
}
