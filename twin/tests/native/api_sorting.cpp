// Sorting, what a kernel says, scalar helpers, state that outlives a call; then what the engines must find.
#include "api_harness.h"

namespace {

using namespace api;

// Scores in a, indices in b.
template <class T>
void CallSort32(const Args& g) {
    Sort32(g.As<T>(g.out), g.As<T>(g.a), g.As<uint32_t>(g.b), g.Int(0));
}
template <class T, bool kFull>
void CallSort(const Args& g) {
    LocalTensor<T> score, tmp = g.As<T>(g.tmp);
    Concat(score, g.As<T>(g.a), g.As<T>(g.tmp), g.Int(0));
    Sort<T, kFull>(g.As<T>(g.out), score, g.As<uint32_t>(g.b), tmp, g.Int(0));
}
// Sorted and taken apart again: values, then indices at byte 4096.
template <class T>
void CallExtract(const Args& g) {
    const LocalTensor<T> entries = g.As<T>(g.tmp);
    Sort32(entries, g.As<T>(g.a), g.As<uint32_t>(g.b), g.Int(0));
    PipeBarrier<PIPE_V>();
    Extract(g.As<T>(g.out), g.out[4096].ReinterpretCast<uint32_t>(), entries, g.Int(0));
}
// Lists of a, `number 4 + i` entries from byte `number 8 + i` on; 0 validBit, 1 repeats, 2 suspend, 3 form.
template <class T>
void CallMerge(const Args& g) {
    const auto list = [&](int i) { return g.a[static_cast<uint32_t>(g.p[8 + i])].ReinterpretCast<T>(); };
    const uint16_t lengths[4] = {g.Short(4), g.Short(5), g.Short(6), g.Short(7)};
    const MrgSortSrcList<T> lists(list(0), list(1), list(2), list(3));
    uint32_t taken[4] = {};
    if (g.p[3] == 0) {
        MrgSort(g.As<T>(g.out), lists, MrgSort4Info(lengths, g.p[2] != 0, g.Short(0), g.Short(1)));
        uint16_t n[4];
        GetMrgSortResult(n[0], n[1], n[2], n[3]);
        for (int i = 0; i < 4; ++i) taken[i] = n[i];
    } else if (g.p[2] != 0) {
        MrgSort<T, true>(g.As<T>(g.out), lists, lengths, taken, g.Short(0), g.Int(1));
    } else {
        MrgSort<T>(g.As<T>(g.out), lists, lengths, taken, g.Short(0), g.Int(1));
    }
    SetFlag<HardEvent::V_S>(EVENT_ID0);
    WaitFlag<HardEvent::V_S>(EVENT_ID0);
    for (uint32_t i = 0; i < 4; ++i) g.As<uint32_t>(g.out).SetValue(2044 + i, taken[i]);
}
void SortSizes(const Args& g) {
    const LocalTensor<uint32_t> out = g.As<uint32_t>(g.out);
    out.SetValue(0, GetSortOffset<float>(10));
    out.SetValue(1, GetSortOffset<half>(10));
    out.SetValue(2, GetSortLen<float>(32));
    out.SetValue(3, GetSortLen<half>(32));
}

void Say(const Args& g) {
    AscendC::printf("printf %d %.2f %.1f %s\n", 7, half(1.5f), ToBfloat16(2.5f), "text");
    PRINTF("PRINTF %u\n", 8u);
    DumpTensor(g.As<float>(g.a), 5, 4);
    GlobalTensor<int32_t> gm;
    gm.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(twin::GmOf(Memory(1))), 8);
    DumpTensor(gm, 6, 3);
    ASCENDC_ASSERT((g.p[0] == 0), { KERNEL_LOG(KERNEL_ERROR, "logged %d", 9); });
}
void AssertHolds(const Args& g) {
    assert(g.p[0] == 3);
    assert(g.p[0] == 3, "never said %d", 1);
    ASSERT(g.p[0] == 3);
    ASCENDC_ASSERT((g.p[0] == 3), { KERNEL_LOG(KERNEL_ERROR, "never said"); });
}
void AssertPlain(const Args& g) { assert(g.p[0] == 4); }
void AssertSays(const Args& g) { ascendc_assert(g.p[0] == 4, "got %d", g.Int(0)); }
void Traps(const Args& g) {
    if (g.p[0] == 1) trap();
    if (g.p[0] == 2) AscendC::Trap();
}
void ScalarBits(const Args& g) {
    const uint64_t x = static_cast<uint64_t>(g.p[0]);
    const LocalTensor<int32_t> out = g.As<int32_t>(g.out);
    const int64_t all[] = {
        ScalarGetSFFValue<0>(x),     ScalarGetSFFValue<1>(x),     GetSFFValue<1>(x),
        ScalarGetCountOfValue<0>(x), ScalarGetCountOfValue<1>(x), GetBitCount<1>(x),
        ScalarCountLeadingZero(x),   CountLeadingZero(x),         CountBitsCntSameAsSignBit(static_cast<int64_t>(x))};
    for (uint32_t i = 0; i < 9; ++i) out.SetValue(i, static_cast<int32_t>(all[i]));
}
void DeqScale(const Args& g) {
    SetDeqScale(half(0.25f));
    Cast(g.As<half>(g.out), g.As<int32_t>(g.a), RoundMode::CAST_NONE, 64);
    SetDeqScale(half(1.0f));
}
void ControlBits(const Args& g) {
    SetPadValue<half>(half(1.0f));
    SetPadValue<int64_t, TPosition::VECIN>(5);
    SetCtrlSpr<60, 60>(g.p[0]);
    OOMCheckAddrRange(twin::GmOf(Memory(1)), 64);
    const LocalTensor<int64_t> out = g.As<int64_t>(g.out);
    out.SetValue(0, static_cast<int64_t>(twin::current_core().pad_value));
    out.SetValue(1, GetSubBlockNum() + 10 * GetTaskRatio() + 100 * GetDataBlockSizeInBytes());
}

// The compiler's own names. Number 0: 1 without the wait for the vector unit, 2 a pair without event.
void Intrinsics(const Args& g) {
    const LocalTensor<float> out = g.As<float>(g.out);
    Adds(out, g.As<float>(g.a), 1.0f, 64);
    pipe_barrier(PIPE_V);
    Adds(out, out, 1.0f, 64);
    set_flag(PIPE_V, PIPE_S, EVENT_ID1);
    if (g.p[0] != 1) wait_flag(PIPE_V, PIPE_S, EVENT_ID1);
    if (g.p[0] == 2) set_flag(PIPE_M, PIPE_S, EVENT_ID1);
    if (g.p[0] == 3) pipe_barrier(PIPE_M);
    out.SetValue(64, out.GetValue(0) + static_cast<float>(block_idx * get_block_num() + get_block_idx() + block_num));
    dcci(twin::GmOf(Memory(1)), SINGLE_CACHE_LINE, CACHELINE_OUT);
}

// Touches other bytes than it declares: what the audit must find; number 0 says which.
void Wrong(const Args& g) {
    uint32_t* to = g.out.ReinterpretCast<uint32_t>().Span(64, twin::Loc::Here(), "canary");
    const uint32_t* from = g.a.ReinterpretCast<uint32_t>().Span(64, twin::Loc::Here(), "canary");
    const uint32_t written = g.p[0] == 1 ? 7 : g.p[0] == 2 ? 9 : 8;
    const uint32_t read = g.p[0] == 3 ? 7 : 8;
    twin::Issue(
        {"Canary", twin::Pipe::kV, twin::Loc::Here(), detail::UbAccess(to, written), {detail::UbAccess(from, read)}},
        [=] {
            for (uint32_t i = 0; i < 8; ++i) twin::StoreAt(to, i, twin::LoadAt(from, i) + 1);
        });
}

// An accumulator that stands still; sources unevenly spaced from repeat to repeat.
void Chain(const Args& g) {
    const LocalTensor<float> sum = g.As<float>(g.a);
    Add(sum, g.As<float>(g.b), sum, 64, 3, {1, 2, 1, 0, 17, 0});
    PipeBarrier<PIPE_V>();
    DataCopy(g.out, g.a, kBytes);
}

#define BOTH(Name) \
    {#Name "/f2", Call##Name<half>}, { #Name "/f4", Call##Name<float> }
const Entry kEntries[] = {
    BOTH(Sort32),
    {"Sort/f2", CallSort<half, false>},
    {"Sort/f4", CallSort<float, false>},
    {"FullSort/f2", CallSort<half, true>},
    {"FullSort/f4", CallSort<float, true>},
    BOTH(Extract),
    BOTH(Merge),
    {"sort_sizes", SortSizes},
    {"say", Say},
    {"assert_holds", AssertHolds},
    {"assert_plain", AssertPlain},
    {"assert_says", AssertSays},
    {"trap", Traps},
    {"scalar_bits", ScalarBits},
    {"deq_scale", DeqScale},
    {"control_bits", ControlBits},
    {"intrinsics", Intrinsics},
    {"canary", Wrong},
    {"chain", Chain},
};

}  // namespace

API_MAIN(kEntries)
