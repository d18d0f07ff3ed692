// One kernel an API call: two float tensors of 256 elements in, 1 KiB out. A test compares with numpy.
#include <cstring>

#include "kernel_operator.h"
#include "twin/engine/launch.h"

namespace {

using namespace AscendC;

constexpr uint32_t kCount = 256;
alignas(64) float g_a[kCount];
alignas(64) float g_b[kCount];
alignas(64) uint8_t g_out[2 * kCount * sizeof(float)];

// Copies the inputs in, runs `call(out, a, b, scratch)`, copies the result out.
template <class Call>
void Run(Call&& call) {
    TPipe pipe;
    TBuf<> a, b, out, scratch;
    pipe.InitBuffer(a, kCount * 4);
    pipe.InitBuffer(b, kCount * 4);
    pipe.InitBuffer(out, 2 * kCount * 4);
    pipe.InitBuffer(scratch, 2 * kCount * 4);
    GlobalTensor<float> from;
    from.SetGlobalBuffer(twin::GmOf(g_a), kCount);
    DataCopy(a.Get<float>(), from, kCount);
    from.SetGlobalBuffer(twin::GmOf(g_b), kCount);
    DataCopy(b.Get<float>(), from, kCount);
    GlobalTensor<uint8_t> to;
    to.SetGlobalBuffer(twin::GmOf(g_out), sizeof(g_out));
    DataCopy(out.Get<uint8_t>(), to, sizeof(g_out));
    call(out.Get<float>(), a.Get<float>(), b.Get<float>(), scratch.Get<float>());
    DataCopy(to, out.Get<uint8_t>(), sizeof(g_out));
}

using F = LocalTensor<float>;

#define API(name, ...)                   \
    void name() {                        \
        Run([](F out, F a, F b, F tmp) { \
            (void)a;                     \
            (void)b;                     \
            (void)tmp;                   \
            __VA_ARGS__;                 \
        });                              \
    }

API(add, Add(out, a, b, kCount))
API(sub, Sub(out, a, b, kCount))
API(mul, Mul(out, a, b, kCount))
API(div, Div(out, a, b, kCount))
API(max, Max(out, a, b, kCount))
API(min, Min(out, a, b, kCount))
API(adds, Adds(out, a, 1.5f, kCount))
API(muls, Muls(out, a, 1.5f, kCount))
API(maxs, Maxs(out, a, 0.25f, kCount))
API(mins, Mins(out, a, 0.25f, kCount))
API(abs, Abs(out, a, kCount))
API(relu, Relu(out, a, kCount))
API(sqrt, Abs(tmp, a, kCount); Sqrt(out, tmp, kCount))
API(exp, Exp(out, a, kCount))
API(axpy, DataCopy(out, b, kCount); Axpy(out, a, 0.5f, kCount))
API(mul_add_dst, Duplicate(out, 1.0f, kCount); MulAddDst(out, a, b, kCount))
API(bits_and, And(out.ReinterpretCast<int16_t>(), a.ReinterpretCast<int16_t>(), b.ReinterpretCast<int16_t>(),
                  2 * kCount))
API(shift, ShiftRight(out.ReinterpretCast<int32_t>(), a.ReinterpretCast<int32_t>(), 3, kCount))
API(cast_half, Cast(tmp.ReinterpretCast<half>(), a, RoundMode::CAST_RINT, kCount);
    Cast(out, tmp.ReinterpretCast<half>(), RoundMode::CAST_NONE, kCount))
API(reduce_max, ReduceMax(out, a, tmp, kCount, true))
API(reduce_min, ReduceMin(out, a, tmp, kCount, false))
API(reduce_sum, ReduceSum(out, a, tmp, kCount))
API(sum_rows, Sum(out, a, tmp.ReinterpretCast<uint8_t>(), SumParams{8, 32, 30}))
API(whole_max, WholeReduceMax(out, a, 64, 4, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE))
API(block_max, BlockReduceMax(out, a, 4, 64, 1, 1, 8))
API(whole_sum, WholeReduceSum(out, a, 64, 4, 1, 1, 8))
API(compare, Compare(out.ReinterpretCast<uint8_t>(), a, b, CMPMODE::GT, kCount))
API(compare_scalar, CompareScalar(out.ReinterpretCast<uint8_t>(), a, 0.0f, CMPMODE::LE, kCount))
API(compare_int, CompareScalar(out.ReinterpretCast<uint8_t>(), a.ReinterpretCast<int32_t>(), 0x3f800000,
                               CMPMODE::EQ, kCount))
API(select, Compare(tmp.ReinterpretCast<uint8_t>(), a, b, CMPMODE::LT, kCount);
    Select(out, tmp.ReinterpretCast<uint8_t>(), a, b, SELMODE::VSEL_TENSOR_TENSOR_MODE, kCount))
API(select_scalar, CompareScalar(tmp.ReinterpretCast<uint8_t>(), a, 0.0f, CMPMODE::GT, kCount);
    Select(out, tmp.ReinterpretCast<uint8_t>(), a, 7.0f, SELMODE::VSEL_TENSOR_SCALAR_MODE, kCount))
API(index, CreateVecIndex(out, 5.0f, kCount))
API(progression, ArithProgression(out, 1.0f, 0.5f, kCount))
API(brcb, Brcb(out, a, 8, BrcbRepeatParams(1, 8)))
API(gather_pattern, uint64_t kept = 0; GatherMask(out, a, 2, false, 0, GatherMaskParams(1, 4, 8, 0), kept);
    out.SetValue(511, static_cast<float>(kept)))
API(gather_bits, uint64_t kept = 0;
    CompareScalar(tmp.ReinterpretCast<uint8_t>(), a, 0.0f, CMPMODE::GT, kCount);
    GatherMask(out, a, tmp.ReinterpretCast<uint32_t>(), true, kCount, GatherMaskParams(1, 1, 8, 0), kept);
    out.SetValue(511, static_cast<float>(kept)))
API(add_repeats, Add(out, a, b, 32, 4, BinaryRepeatParams(1, 1, 1, 8, 8, 0)))
API(muls_repeats, Muls(out, a, 2.0f, 64, 2, UnaryRepeatParams(2, 1, 16, 8)))
API(abs_repeats, Abs(out, a, 64, 4, UnaryRepeatParams(1, 1, 8, 8)))
API(sort32, CreateVecIndex(tmp.ReinterpretCast<int32_t>(), 0, kCount);
    Sort32(out, a, tmp.ReinterpretCast<uint32_t>(), 8))
API(sort_extract, CreateVecIndex(tmp.ReinterpretCast<int32_t>(), 0, kCount);
    Sort32(out, a, tmp.ReinterpretCast<uint32_t>(), 2); const uint16_t lengths[4] = {32, 32, 0, 0};
    MrgSort(tmp, MrgSortSrcList<float>(out, out[64], out, out), MrgSort4Info(lengths, false, 3, 1));
    Extract(out, out[64].ReinterpretCast<uint32_t>(), tmp, 2))
API(add_mask_range, Add(out, a, b, 65, 1, BinaryRepeatParams()))
API(merge_lists, MrgSort(out, MrgSortSrcList<float>(a, a, a, a), MrgSort4Info()))
API(compare_ragged, Compare(out.ReinterpretCast<uint8_t>(), a, b, CMPMODE::GT, 60))
API(compare_int_gt,
    CompareScalar(out.ReinterpretCast<uint8_t>(), a.ReinterpretCast<int32_t>(), 0, CMPMODE::GT, kCount))
API(mask_range, WholeReduceSum(out, a, 65, 1, 1, 1, 8))
API(repeat_range, BlockReduceMax(out, a, 256, 64, 1, 1, 0))
API(brcb_stride, Brcb(out, a, 1, BrcbRepeatParams(0, 8)))
API(pattern_range, uint64_t kept = 0; GatherMask(out, a, 8, false, 0, GatherMaskParams(1, 1, 8, 0), kept))

struct Entry {
    const char* name;
    void (*kernel)();
};
#define ENTRY(name) {#name, name}
const Entry kEntries[] = {
    ENTRY(add),
    ENTRY(sub),
    ENTRY(mul),
    ENTRY(div),
    ENTRY(max),
    ENTRY(min),
    ENTRY(adds),
    ENTRY(muls),
    ENTRY(maxs),
    ENTRY(mins),
    ENTRY(abs),
    ENTRY(relu),
    ENTRY(sqrt),
    ENTRY(exp),
    ENTRY(axpy),
    ENTRY(mul_add_dst),
    ENTRY(bits_and),
    ENTRY(shift),
    ENTRY(cast_half),
    ENTRY(reduce_max),
    ENTRY(reduce_min),
    ENTRY(reduce_sum),
    ENTRY(sum_rows),
    ENTRY(whole_max),
    ENTRY(block_max),
    ENTRY(whole_sum),
    ENTRY(compare),
    ENTRY(compare_scalar),
    ENTRY(compare_int),
    ENTRY(select),
    ENTRY(select_scalar),
    ENTRY(index),
    ENTRY(progression),
    ENTRY(brcb),
    ENTRY(gather_pattern),
    ENTRY(gather_bits),
    ENTRY(add_repeats),
    ENTRY(muls_repeats),
    ENTRY(abs_repeats),
    ENTRY(sort32),
    ENTRY(sort_extract),
    ENTRY(add_mask_range),
    ENTRY(merge_lists),
    ENTRY(compare_ragged),
    ENTRY(compare_int_gt),
    ENTRY(mask_range),
    ENTRY(repeat_range),
    ENTRY(brcb_stride),
    ENTRY(pattern_range),
};

}  // namespace

extern "C" const char* run_api(const char* name, const float* a, const float* b, uint8_t* out) {
    static char text[1024];
    for (const Entry& entry : kEntries) {
        if (strcmp(entry.name, name) != 0) continue;
        memcpy(g_a, a, sizeof(g_a));
        memcpy(g_b, b, sizeof(g_b));
        memset(g_out, 0, sizeof(g_out));
        twin::Device device(0);
        twin::LaunchSpec spec;
        for (auto [begin, bytes] :
             {std::pair<void*, size_t>(g_a, sizeof(g_a)), {g_b, sizeof(g_b)}, {g_out, sizeof(g_out)}}) {
            const uintptr_t at = reinterpret_cast<uintptr_t>(begin);
            spec.ranges.push_back({at, at + bytes, twin::GmKind::kTensor, false, nullptr, "gm"});
        }
        text[0] = '\0';
        try {
            device.Launch(spec, entry.kernel);
        } catch (const std::exception& error) {
            strncpy(text, error.what(), sizeof(text) - 1);
        }
        memcpy(out, g_out, sizeof(g_out));
        return text;
    }
    return "no such kernel";
}
