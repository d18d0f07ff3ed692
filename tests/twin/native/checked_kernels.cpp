// Tiny kernels with one missing edge each, and near misses that have it. A test runs them by name on the
// checked engine, under a policy and a seed, and reads what it says.
#include <cstring>

#include "kernel_operator.h"
#include "twin/engine/explore.h"

namespace {

using namespace AscendC;

constexpr uint32_t kRanks = 2, kGmBytes = 8192, kWindowBytes = 4096;
alignas(4096) uint8_t g_gm[kRanks][kGmBytes];
alignas(4096) uint8_t g_window[kRanks][kWindowBytes];
alignas(4096) uint8_t g_state[kRanks][kWindowBytes];

int Rank() { return twin::current_core().rank; }
template <class T>
GlobalTensor<T> At(uint8_t* memory, uint64_t offset) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(twin::GmOf(memory + offset)));
    return tensor;
}
template <class T>
GlobalTensor<T> Gm(uint64_t offset = 0) {
    return At<T>(g_gm[Rank()], offset);
}

struct Ub {
    explicit Ub(bool fill = true) {
        pipe.InitBuffer(a, 256);
        pipe.InitBuffer(b, 256);
        pipe.InitBuffer(c, 256);
        if (!fill) return;
        Duplicate(A(), 1.0f, 64);
        Duplicate(B(), 2.0f, 64);
        Duplicate(C(), 3.0f, 64);
        PipeBarrier<PIPE_ALL>();
    }
    LocalTensor<float> A() { return a.Get<float>(); }
    LocalTensor<float> B() { return b.Get<float>(); }
    LocalTensor<float> C() { return c.Get<float>(); }
    TPipe pipe;
    TBuf<> a, b, c;
};

template <bool kOn, HardEvent event>
void Edge() {
    if constexpr (kOn) {
        SetFlag<event>(EVENT_ID0);
        WaitFlag<event>(EVENT_ID0);
    }
}

// ---- between pipes: what each does with A ----
struct Load {
    static void Do(Ub& ub) { DataCopy(ub.A(), Gm<float>(512), 64); }
};
struct Store {
    static void Do(Ub& ub) { DataCopy(Gm<float>(), ub.A(), 64); }
};
struct ReadV {
    static void Do(Ub& ub) { Adds(ub.B(), ub.A(), 1.0f, 64); }
};
struct WriteV {
    static void Do(Ub& ub) { Adds(ub.A(), ub.B(), 1.0f, 64); }
};
struct ReadS {
    static void Do(Ub& ub) { (void)ub.A().GetValue(7); }
};
struct WriteS {
    static void Do(Ub& ub) { ub.A().SetValue(3, 5.0f); }
};
template <bool kOn, class First, HardEvent event, class Second>
void Pipes() {
    Ub ub;
    First::Do(ub);
    Edge<kOn, event>();
    Second::Do(ub);
}
// The right event over another pair of pipes orders nothing.
void WrongEvent() {
    Ub ub;
    DataCopy(ub.A(), Gm<float>(), 64);
    Edge<true, HardEvent::MTE2_S>();
    SetFlag<HardEvent::MTE3_V>(EVENT_ID0);
    WaitFlag<HardEvent::MTE3_V>(EVENT_ID0);
    DataCopy(ub.B(), Gm<float>(512), 64);
    Adds(ub.C(), ub.B(), 1.0f, 64);
}
// Other bytes of the same block are no conflict.
void OtherBytes() {
    Ub ub;
    DataCopyPad(Gm<float>(), ub.A(), DataCopyExtParams(1, 8, 0, 0, 0));
    ub.A().SetValue(2, 5.0f);
}
// A scalar wait reaches what is issued after it.
void ThroughScalar() {
    Ub ub;
    DataCopy(ub.A(), Gm<float>(), 64);
    Edge<true, HardEvent::MTE2_S>();
    Adds(ub.B(), ub.A(), 1.0f, 64);
}
template <bool kQueue>
void Queues() {
    TPipe pipe;
    TQue<QuePosition::VECIN, 1> in;
    TQue<QuePosition::VECOUT, 1> out;
    pipe.InitBuffer(in, 2, 256);
    pipe.InitBuffer(out, 2, 256);
    for (int i = 0; i < 6; ++i) {
        LocalTensor<float> x = in.AllocTensor<float>();
        DataCopy(x, Gm<float>(i * 256), 64);
        in.EnQue(x);
        x = in.DeQue<float>();
        LocalTensor<float> y = out.AllocTensor<float>();
        Adds(y, x, 1.0f, 64);
        in.FreeTensor(x);
        out.EnQue(y);
        y = out.DeQue<float>();
        DataCopy(Gm<float>(i * 256), y, 64);
        PipeBarrier<PIPE_V>();
        if (!kQueue && i == 3) Adds(y, y, 1.0f, 64);  // while the copy is under way
        out.FreeTensor(y);
    }
}

// ---- one pipe ----
template <bool kOn>
void VV() {
    Ub ub;
    Adds(ub.B(), ub.A(), 1.0f, 64);
    if (kOn) PipeBarrier<PIPE_V>();
    Adds(ub.C(), ub.B(), 1.0f, 64);
}
template <bool kOn>
void Mte2Mte2() {
    Ub ub;
    DataCopy(ub.A(), Gm<float>(), 64);
    if (kOn) PipeBarrier<PIPE_MTE2>();
    DataCopy(ub.A(), Gm<float>(256), 64);
}
template <bool kOn>
void Mte3Mte3() {
    Ub ub;
    DataCopy(Gm<float>(), ub.A(), 64);
    if (kOn) PipeBarrier<PIPE_MTE3>();
    DataCopy(Gm<float>(128), ub.B(), 64);
}

// ---- UB that holds nothing ----
template <bool kOn>
void Fresh() {
    Ub ub(false);
    if (kOn) Duplicate(ub.A(), 1.0f, 64);
    PipeBarrier<PIPE_ALL>();
    (void)ub.A().GetValue(63);
}
template <int kRead>
void Padding() {
    Ub ub(false);
    DataCopyPad(ub.A(), Gm<float>(), DataCopyExtParams(1, 20, 0, 0, 0), DataCopyPadExtParams<float>());
    PipeBarrier<PIPE_ALL>();
    (void)ub.A().GetValue(kRead);
}
template <bool kOn>
void Freed() {
    TPipe pipe;
    TQue<QuePosition::VECIN, 1> in;
    pipe.InitBuffer(in, 1, 256);
    for (int i = 0; i < 2; ++i) {
        LocalTensor<float> x = in.AllocTensor<float>();
        if (i == 0 || kOn) DataCopy(x, Gm<float>(), 64);
        in.EnQue(x);
        x = in.DeQue<float>();
        Adds(x, x, 1.0f, 64);
        in.FreeTensor(x);
    }
}

// ---- the scalar unit's cache ----
using Line = GlobalTensor<int32_t>;
void Clean(const Line& line) {
    DataCacheCleanAndInvalid<int32_t, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(line);
}
template <bool kOn>
void Stale() {
    Ub ub;
    const Line line = Gm<int32_t>(1024);
    (void)line.GetValue(0);
    PipeBarrier<PIPE_ALL>();
    DataCopy(Gm<float>(1024), ub.A(), 64);
    PipeBarrier<PIPE_ALL>();
    if (kOn) Clean(line);
    (void)line.GetValue(0);
}
template <bool kOn>
void Unflushed() {
    Gm<int32_t>(1024).SetValue(0, 7);
    if (kOn) Clean(Gm<int32_t>(1024));
}
template <bool kOn>
void UnflushedCopy() {
    Ub ub;
    Gm<int32_t>(1024).SetValue(0, 7);
    if (kOn) Clean(Gm<int32_t>(1024));
    PipeBarrier<PIPE_ALL>();
    DataCopy(ub.A(), Gm<float>(1024), 64);
    PipeBarrier<PIPE_ALL>();
    if (!kOn) Clean(Gm<int32_t>(1024));
}
template <uint32_t kApart>
void SharedLine() {
    const Line mine = Gm<int32_t>(1024 + GetBlockIdx() * kApart);
    mine.SetValue(0, 7);
    SyncAll();
    Clean(mine);
}
template <bool kOn>
void UnflushedSync() {
    const Line line = Gm<int32_t>(1024);
    if (GetBlockIdx() == 0) {
        line.SetValue(0, 7);
        if (kOn) Clean(line);
    }
    SyncAll();
    if (GetBlockIdx() == 1) (void)line.GetValue(0);
    SyncAll();
    if (GetBlockIdx() == 0) Clean(line);
}

// ---- cores ----
template <bool kOn>
void Cores() {
    Ub ub;
    const uint32_t me = static_cast<uint32_t>(GetBlockIdx());
    DataCopy(Gm<float>(me * 256), ub.A(), 64);
    PipeBarrier<PIPE_ALL>();
    if (kOn) SyncAll();
    DataCopy(ub.B(), Gm<float>((1 - me) * 256), 64);
}
template <bool kApart>
void TwoWriters() {
    Ub ub;
    const uint32_t me = static_cast<uint32_t>(GetBlockIdx());
    // Halves of one 32-byte block, or all of it.
    DataCopyPad(Gm<float>(kApart ? me * 16 : 0), ub.A(), DataCopyExtParams(1, 16, 0, 0, 0));
}
template <bool kAtomic>
void Adders() {
    Ub ub;
    if (kAtomic) SetAtomicAdd<float>();
    DataCopy(Gm<float>(), ub.A(), 64);
    if (kAtomic) SetAtomicNone();
}
void AddersThenReader() {
    Ub ub;
    SetAtomicAdd<float>();
    DataCopy(Gm<float>(), ub.A(), 64);
    SetAtomicNone();
    PipeBarrier<PIPE_ALL>();
    if (GetBlockIdx() == 1) DataCopy(ub.B(), Gm<float>(), 64);
}
void Diverge() {
    if (GetBlockIdx() == 0) SyncAll();
}
template <bool kOn>
void CrossFlags() {
    Ub ub;
    const uint32_t me = static_cast<uint32_t>(GetBlockIdx());
    DataCopy(Gm<float>(me * 256), ub.A(), 64);
    CrossCoreSetFlag<0, PIPE_MTE3>(3);
    if (kOn) CrossCoreWaitFlag(3);
    DataCopy(ub.B(), Gm<float>((1 - me) * 256), 64);
    if (!kOn) CrossCoreWaitFlag(3);
}

// ---- ranks: a row, then a status block that says so ----
enum class Mistake { kNone, kNoDrain, kFlagFirst, kNoWait, kNoFlag, kReuse };
// A foreign kernel's flag lies in the data window, and nobody declares its poll.
template <Mistake mistake, bool kForeign = false>
void Ranks() {
    Ub ub;
    const int me = Rank(), peer = 1 - me;
    LocalTensor<int32_t> flag = ub.C().ReinterpretCast<int32_t>();
    Duplicate(flag, static_cast<int32_t>(9), 8);
    PipeBarrier<PIPE_ALL>();
    const auto flag_of = [](int rank) {
        return At<int32_t>(kForeign ? g_window[rank] + 1024 : g_state[rank], 0);
    };
    const auto send_flag = [&] { DataCopy(flag_of(peer), flag, 8); };
    if (mistake == Mistake::kFlagFirst) send_flag();
    DataCopy(At<float>(g_window[peer], 0), ub.A(), 64);
    if (mistake != Mistake::kNoDrain) PipeBarrier<PIPE_ALL>();
    if (mistake != Mistake::kFlagFirst && mistake != Mistake::kNoFlag) send_flag();
    for (bool seen = mistake == Mistake::kNoWait; !seen;) {
        DataCopy(flag[8], flag_of(me), 8);
        SetFlag<HardEvent::MTE2_S>(EVENT_ID0);
        WaitFlag<HardEvent::MTE2_S>(EVENT_ID0);
        seen = flag.GetValue(8) == 9;
        SetFlag<HardEvent::S_MTE2>(EVENT_ID0);
        WaitFlag<HardEvent::S_MTE2>(EVENT_ID0);
        if (!seen && !kForeign) TWIN_POLL_HINT();
    }
    DataCopy(ub.B(), At<float>(g_window[me], 0), 64);
    PipeBarrier<PIPE_ALL>();
    // Into the same place before the peer has said that it has read.
    if (mistake == Mistake::kReuse) DataCopy(At<float>(g_window[peer], 0), ub.A(), 64);
}
template <int kOffset>
void WindowPart() {
    Ub ub;
    DataCopy(At<float>(g_window[1 - Rank()], kOffset + Rank() * 1024), ub.A(), 64);
}
void NeverComes() {
    Ub ub;
    for (;;) {
        DataCopy(ub.A(), At<float>(g_state[Rank()], 2048), 8);
        PipeBarrier<PIPE_ALL>();
        if (ub.A().GetValue(0) != 0.0f) return;
        TWIN_POLL_HINT();
    }
}

struct Kernel {
    const char* name;
    void (*run)();
    uint32_t cores;
    uint32_t ranks;
    bool foreign;
};

#define BOTH(name, cores, ranks, foreign, Missing, ...) \
    {name "_missing", Missing, cores, ranks, foreign}, { name, __VA_ARGS__, cores, ranks, foreign }
#define PIPES(name, First, EVENT, Second)                                    \
    BOTH(name, 1, 1, false, (Pipes<false, First, HardEvent::EVENT, Second>), \
         Pipes<true, First, HardEvent::EVENT, Second>)
#define PAIR(name, Function) BOTH(name, 1, 1, false, Function<false>, Function<true>)
#define CORES(name, Function) BOTH(name, 2, 1, false, Function<false>, Function<true>)
const Kernel kKernels[] = {
    PIPES("mte2_v", Load, MTE2_V, ReadV),
    PIPES("v_mte2", ReadV, V_MTE2, Load),
    PIPES("v_mte3", WriteV, V_MTE3, Store),
    PIPES("mte3_v", Store, MTE3_V, WriteV),
    PIPES("mte3_mte2", Store, MTE3_MTE2, Load),
    PIPES("mte2_mte3", Load, MTE2_MTE3, Store),
    PIPES("s_v", WriteS, S_V, ReadV),
    PIPES("v_s", WriteV, V_S, ReadS),
    PIPES("s_mte2", WriteS, S_MTE2, Load),
    PIPES("mte2_s", Load, MTE2_S, ReadS),
    PIPES("s_mte3", WriteS, S_MTE3, Store),
    PIPES("mte3_s", Store, MTE3_S, WriteS),
    {"wrong_event", WrongEvent, 1, 1, false},
    {"other_bytes", OtherBytes, 1, 1, false},
    {"through_scalar", ThroughScalar, 1, 1, false},
    PAIR("queues", Queues),
    PAIR("v_v", VV),
    {"v_v_compiler", VV<false>, 1, 1, true},
    PAIR("mte2_mte2", Mte2Mte2),
    PAIR("mte3_mte3", Mte3Mte3),
    PAIR("fresh", Fresh),
    BOTH("padding", 1, 1, false, Padding<5>, Padding<4>),
    PAIR("freed", Freed),
    PAIR("stale", Stale),
    PAIR("unflushed", Unflushed),
    PAIR("unflushed_copy", UnflushedCopy),
    BOTH("shared_line", 2, 1, false, SharedLine<8>, SharedLine<64>),
    CORES("unflushed_sync", UnflushedSync),
    CORES("cores", Cores),
    CORES("two_writers", TwoWriters),
    CORES("adders", Adders),
    {"adders_reader", AddersThenReader, 2, 1, false},
    {"diverge", Diverge, 2, 1, false},
    CORES("cross_flags", CrossFlags),
    {"ranks", Ranks<Mistake::kNone>, 1, 2, false},
    {"ranks_no_drain", Ranks<Mistake::kNoDrain>, 1, 2, false},
    {"ranks_flag_first", Ranks<Mistake::kFlagFirst>, 1, 2, false},
    {"ranks_no_wait", Ranks<Mistake::kNoWait>, 1, 2, false},
    {"ranks_no_flag", Ranks<Mistake::kNoFlag>, 1, 2, false},
    {"ranks_reuse", Ranks<Mistake::kReuse>, 1, 2, false},
    BOTH("foreign", 1, 2, true, (Ranks<Mistake::kNoDrain, true>), Ranks<Mistake::kNone, true>),
    BOTH("half", 1, 2, false, WindowPart<2048>, WindowPart<0>),
    {"never_comes", NeverComes, 1, 1, false},
};

char g_text[2048];

twin::GmRange Range(void* begin, uint64_t bytes, twin::GmKind kind, const char* name, int owner) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
    return {address, address + bytes, kind, kind == twin::GmKind::kWindowState, nullptr, name, owner};
}

}  // namespace

extern "C" const char* checked_names() {
    g_text[0] = '\0';
    for (const Kernel& kernel : kKernels) {
        strcat(g_text, kernel.name);
        strcat(g_text, " ");
    }
    return g_text;
}

// What the engine says, or nothing. `order`: stores land in any order.
extern "C" const char* run_checked(const char* name, int policy, uint64_t seed, int unordered) {
    for (const Kernel& kernel : kKernels) {
        if (strcmp(kernel.name, name) != 0) continue;
        memset(g_gm, 0, sizeof(g_gm));
        memset(g_window, 0, sizeof(g_window));
        memset(g_state, 0, sizeof(g_state));
        twin::ProgramStep steps[kRanks];
        std::vector<twin::RankProgram> programs(kernel.ranks);
        for (uint32_t rank = 0; rank < kernel.ranks; ++rank) {
            twin::ProgramStep& step = steps[rank];
            step.spec.block_dim = kernel.cores;
            step.spec.watch_polls = kernel.foreign;
            step.spec.ranges = {Range(g_gm[rank], kGmBytes, twin::GmKind::kTensor, "gm", -1)};
            for (uint32_t peer = 0; peer < kernel.ranks; ++peer) {
                const int owner = static_cast<int>(peer);
                step.spec.ranges.push_back(
                    Range(g_window[peer], kWindowBytes, twin::GmKind::kWindowData, "data window", owner));
                step.spec.ranges.push_back(
                    Range(g_state[peer], kWindowBytes, twin::GmKind::kWindowState, "state window", owner));
            }
            if (strncmp(name, "half", 4) == 0) {
                step.spec.window_rule = [](uintptr_t begin, uint64_t, bool) -> const char* {
                    const uint64_t at = (begin - reinterpret_cast<uintptr_t>(g_window)) % kWindowBytes;
                    return at < kWindowBytes / 2 ? nullptr : "it lies in the other half";
                };
            }
            step.kernel = kernel.run;
            programs[rank].rank = static_cast<int>(rank);
            programs[rank].steps = {&step};
        }
        twin::RunOptions options;
        options.policy = static_cast<twin::Policy>(policy);
        options.seed = seed;
        options.unordered = unordered != 0;
        options.explicit_sync = !kernel.foreign;
        options.max_steps = 100000;
        twin::Explorer explorer;
        const twin::RunResult result = explorer.Run(programs, options);
        strncpy(g_text, result.failed ? result.message.c_str() : "", sizeof(g_text) - 1);
        return g_text;
    }
    return "no such kernel";
}
