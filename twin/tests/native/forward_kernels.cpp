// Random programs of copies, casts, sums and scalar accesses. A test runs each with copies that may wait and
// with copies that never do, and compares every byte. Where others may change the source of a copy (after a
// store to a state window, a poll, a SyncAll), the program changes it behind the twin's back.
#include <cstdlib>
#include <cstring>
#include <random>

#include "kernel_operator.h"
#include "twin/engine/launch.h"

namespace {

using namespace AscendC;

constexpr uint32_t kMost = 8;         // cores
constexpr uint32_t kGmBytes = 65536;  // of each area of a core
constexpr uint32_t kUbBytes = 16384;  // of each buffer: sums of more elements than are rounded at a time
constexpr uint32_t kElements = kUbBytes / sizeof(float);
constexpr uint32_t kMailBytes = 2048;
constexpr uint32_t kPlaces = 128;  // of elements that are picked

// Areas by core: rows in, rows out, floats; what cores hand each other; a state window.
struct Memory {
    alignas(64) uint8_t x[kMost][kGmBytes], y[kMost][kGmBytes], f[kMost][kGmBytes];
    alignas(64) uint8_t mail[kMost][kMailBytes];
    alignas(64) uint8_t state[kMost][64];
};
Memory g_memory;

template <class T>
GlobalTensor<T> Gm(uint8_t* area, uint64_t offset, uint64_t bytes) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(twin::GmOf(area + offset)), bytes / sizeof(T));
    return tensor;
}

class Program {
public:
    Program(uint32_t seed, uint32_t cores) : core_(twin::current_core().index), cores_(cores) {
        own_.seed(seed * 1000 + core_);
        common_.seed(seed);  // what all cores decide alike
        for (auto& row : rows_) pipe_.InitBuffer(row, kUbBytes);
        for (auto& sum : sums_) pipe_.InitBuffer(sum, kUbBytes);
        pipe_.InitBuffer(queue_, 2, kUbBytes);
        pipe_.InitBuffer(places_, kPlaces * sizeof(uint32_t));
        pipe_.InitBuffer(bits_, kElements / 8);
        Duplicate(bits_.Get<bfloat16_t>(), ToBfloat16(0), kElements / 16);
        for (auto& row : rows_) Duplicate(row.Get<bfloat16_t>(), ToBfloat16(0.5f), kUbBytes / 2);
        for (auto& sum : sums_) Duplicate(sum.Get<float>(), 0.25f, kElements);
    }
    void Run(uint32_t steps) {
        for (uint32_t i = 0; i < steps; ++i) {
            if (common_() % 24 == 0) {
                Exchange();
            } else {
                Step(own_() % 20);
            }
        }
        for (auto& row : rows_) DataCopy(Gm<bfloat16_t>(Y(), 0, kUbBytes), row.Get<bfloat16_t>(), kUbBytes / 2);
        for (auto& sum : sums_) DataCopy(Gm<float>(F(), 0, kUbBytes), sum.Get<float>(), kElements);
        DataCopy(Gm<uint8_t>(Y(), kUbBytes, kElements / 8), bits_.Get<uint8_t>(), kElements / 8);
    }

private:
    uint8_t* X() { return g_memory.x[core_]; }
    uint8_t* Y() { return g_memory.y[core_]; }
    uint8_t* F() { return g_memory.f[core_]; }
    uint32_t Below(uint32_t n) { return static_cast<uint32_t>(own_() % n); }
    // A length and a place for it, both multiples of a block; whole buffers more often than by chance.
    struct Piece {
        uint32_t bytes, at;
    };
    Piece Take(uint32_t room) {
        const uint32_t blocks = room / 32;
        const uint32_t length = Below(3) == 0 ? blocks : 1 + Below(blocks);
        return {length * 32, Below(blocks - length + 1) * 32};
    }
    LocalTensor<bfloat16_t> Row() { return rows_[Below(3)].Get<bfloat16_t>(); }
    LocalTensor<float> Sum() { return sums_[Below(3)].Get<float>(); }
    uint8_t* Source() { return Below(2) == 0 ? X() : Y(); }
    void Poke() {  // as a peer would
        const uint16_t value = static_cast<uint16_t>(0x3F00 + Below(256));
        for (uint32_t i = 0; i < 64; ++i) memcpy(X() + Below(kGmBytes / 2) * 2, &value, 2);
    }

    void In() {
        const Piece p = Take(kUbBytes);
        DataCopy(Row()[p.at / 2], Gm<bfloat16_t>(Source(), Below((kGmBytes - p.bytes) / 32) * 32, p.bytes),
                 p.bytes / 2);
    }
    void Out() {
        const Piece p = Take(kUbBytes);
        DataCopy(Gm<bfloat16_t>(Source(), Below((kGmBytes - p.bytes) / 32) * 32, p.bytes), Row()[p.at / 2],
                 p.bytes / 2);
    }
    void InStrided() {
        const uint16_t count = static_cast<uint16_t>(1 + Below(5));
        const uint32_t bytes = 32 * (1 + Below(12)) - 2 * (Below(2) * Below(4));
        const DataCopyExtParams params{count, bytes, 2 * Below(32), Below(3), 0};
        const DataCopyPadExtParams<bfloat16_t> pad{false, 0, 0, ToBfloat16(0)};
        DataCopyPad(Row()[Below(8) * 16], Gm<bfloat16_t>(Source(), 64, 8192), params, pad);
    }
    void OutStrided() {
        const uint16_t count = static_cast<uint16_t>(1 + Below(3));
        const DataCopyExtParams params{count, 32 * (1 + Below(12)), Below(3), 2 * Below(32), 0};
        DataCopyPad(Gm<bfloat16_t>(Source(), Below(64) * 32, 8192), Row()[Below(8) * 16], params);
    }
    // Rows side by side, out in one call of as many pieces, some of them cut elsewhere.
    void Gather() {
        LocalTensor<bfloat16_t> chunk = queue_.AllocTensor<bfloat16_t>();
        const uint32_t bytes = 512 + 32 * Below(8), rows = 2 + Below(4);
        const uint32_t count = rows * bytes <= kUbBytes ? rows : kUbBytes / bytes;
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t at = Below((kGmBytes - bytes) / 32) * 32;
            DataCopy(chunk[i * bytes / 2], Gm<bfloat16_t>(Source(), at, bytes), bytes / 2);
        }
        queue_.EnQue(chunk);
        chunk = queue_.DeQue<bfloat16_t>();
        const uint32_t shift = Below(4) == 0 ? 16 : 0;
        const DataCopyExtParams params{static_cast<uint16_t>(count - 1), bytes, 0, 32 * Below(3), 0};
        DataCopyPad(Gm<bfloat16_t>(Source(), Below(64) * 32, 8192), chunk[shift], params);
        queue_.FreeTensor(chunk);
    }
    // Terms onto zeros, more than wait together now and then, narrowed at the end.
    void WholeSum() {
        LocalTensor<float> sum = Sum();
        const uint32_t n = Below(2) == 0 ? kElements : 8 * (1 + Below(kElements / 8));
        Duplicate(sum, Below(8) == 0 ? -0.0f : 0.0f, static_cast<int32_t>(n));
        for (uint32_t terms = Below(11); terms > 0; --terms) AddAddend(sum, n);
        if (Below(4) != 0) Cast(Row(), sum, RoundMode::CAST_RINT, n);
        if (Below(8) == 0) StepWithin();
        if (Below(4) == 0) AddAddend(sum, n);
    }
    void Chain() { AddAddend(Sum(), Below(2) == 0 ? kElements : 8 * (1 + Below(kElements / 8))); }
    // The chain that a weighted sum is made of, cut at random.
    void AddAddend(LocalTensor<float> sum, uint32_t n) {
        LocalTensor<bfloat16_t> row = queue_.AllocTensor<bfloat16_t>();
        DataCopy(row, Gm<bfloat16_t>(Source(), Below(128) * 32, kUbBytes), kUbBytes / 2);
        queue_.EnQue(row);
        row = queue_.DeQue<bfloat16_t>();
        LocalTensor<float> term = Sum();
        if (Below(8) != 0) Cast(term, row[Below(4) * 16], RoundMode::CAST_NONE, n);
        if (Below(8) == 0) StepWithin();
        if (Below(4) != 0) Muls(term, term, Weight(), n);
        if (Below(8) == 0) StepWithin();
        if (sum.data() != term.data() || Below(2) == 0) Add(sum, sum, term, n);
        if (Below(8) == 0) Add(sum, sum, term, n);
        queue_.FreeTensor(row);
    }
    float Weight() { return 0.125f * static_cast<float>(Below(8)) - 0.5f; }
    void Vector() {
        const uint32_t n = 8 * (1 + Below(kElements / 8));
        LocalTensor<float> a = Sum(), b = Sum();
        switch (Below(9)) {
            case 0: return Duplicate(a, Weight(), static_cast<int32_t>(n));
            case 1: return Muls(a, b, Weight(), n);
            case 2: return Add(a, a, b, n);
            case 3: return Cast(Row(), a, RoundMode::CAST_RINT, n);
            case 4: return Adds(a, b, Weight(), uint64_t{40}, 3, UnaryRepeatParams(1, 1, 8, 8));
            case 5: return Maxs(a, b, Weight(), n);
            case 6: return Compare(bits_.Get<uint8_t>(), a, b, CMPMODE::LT, (n + 63) / 64 * 64);
            case 7: return Pick(a, b);
            default: return Cast(a, Row(), RoundMode::CAST_NONE, n);
        }
    }
    // Elements of `from` by places in it, all or every other lane.
    void Pick(const LocalTensor<float>& to, const LocalTensor<float>& from) {
        if (to.data() == from.data()) return;
        LocalTensor<uint32_t> places = places_.Get<uint32_t>();
        for (uint32_t i = 0; i < kPlaces; ++i) places.SetValue(i, Below(kElements) * sizeof(float));
        const LocalTensor<float> target = to[Below((kElements - kPlaces) / 8) * 8];
        uint64_t mask[2] = {0x5555555555555555u, 0};
        if (Below(2) == 0) {
            ::AscendC::Gather(target, from, places, 0u, kPlaces);
        } else {
            ::AscendC::Gather(target, from, places, 0u, mask, static_cast<uint8_t>(kPlaces / 64), 8);
        }
    }
    void Scalars() {
        LocalTensor<bfloat16_t> row = Row();
        for (uint32_t i = Below(12); i-- > 0;) row.SetValue(Below(kUbBytes / 2), row.GetValue(Below(kUbBytes / 2)));
        LocalTensor<float> sum = Sum();
        sum.SetValue(Below(kElements), sum.GetValue(Below(kElements)));
    }
    void Floats() {
        const Piece p = Take(kUbBytes);
        const GlobalTensor<float> gm = Gm<float>(F(), Below((kGmBytes - p.bytes) / 32) * 32, p.bytes);
        switch (Below(3)) {
            case 0: return DataCopy(Sum()[p.at / 4], gm, p.bytes / 4);
            case 1: return DataCopy(gm, Sum()[p.at / 4], p.bytes / 4);
            default:
                SetAtomicAdd<float>();
                DataCopy(gm, Sum()[p.at / 4], p.bytes / 4);
                SetAtomicNone();
        }
    }
    void TellAndPoke() {
        const uint32_t at = Below(2) * 32;
        DataCopy(Gm<bfloat16_t>(g_memory.state[core_], at, 32), Row(), 16);
        Poke();
    }
    void CopyRow() { DataCopy(rows_[0].Get<bfloat16_t>(), rows_[1 + Below(2)].Get<bfloat16_t>(), kUbBytes / 2); }
    void SetElement() { Gm<bfloat16_t>(X(), 0, kGmBytes).SetValue(Below(kGmBytes / 2), ToBfloat16(Weight())); }
    void Poll() {
        twin::Yield(twin::Loc::Here());
        Poke();
    }
    // The last four may not stand within a chain.
    void StepWithin() {
        const uint32_t which = Below(20);
        if (which < 16) Step(which);
    }
    void Step(uint32_t which) {
        static constexpr void (Program::* kSteps[20])() = {
            &Program::InStrided,  &Program::OutStrided, &Program::Scalars, &Program::Floats, &Program::TellAndPoke,
            &Program::SetElement, &Program::CopyRow,    &Program::Out,     &Program::Out,    &Program::Out,
            &Program::Vector,     &Program::Vector,     &Program::In,      &Program::In,     &Program::In,
            &Program::In,         &Program::Poll,       &Program::Gather,  &Program::Chain,  &Program::WholeSum};
        const auto step = kSteps[which];
        (this->*step)();
    }
    // A row to the next core by way of GM, which is written again at once.
    void Exchange() {
        const uint32_t bytes = 512 + 32 * (common_() % 32);
        DataCopy(Gm<bfloat16_t>(g_memory.mail[core_], 0, bytes), Row(), bytes / 2);
        PipeBarrier<PIPE_ALL>();
        SyncAll();
        DataCopy(Row(), Gm<bfloat16_t>(g_memory.mail[(core_ + 1) % cores_], 0, bytes), bytes / 2);
        PipeBarrier<PIPE_ALL>();
        SyncAll();
        Duplicate(rows_[0].Get<bfloat16_t>(), ToBfloat16(Weight()), static_cast<int32_t>(bytes / 2));
        DataCopy(Gm<bfloat16_t>(g_memory.mail[core_], 0, bytes), rows_[0].Get<bfloat16_t>(), bytes / 2);
    }

    TPipe pipe_;
    TBuf<> rows_[3], sums_[3], places_, bits_;
    TQue<QuePosition::VECIN, 1> queue_;
    std::mt19937 own_, common_;
    const uint32_t core_, cores_;
};

}  // namespace

// Runs a program and leaves all of its memory in `out`. Returns what the twin said, or "".
extern "C" const char* run_program(uint32_t seed, uint32_t steps, uint32_t cores, int forwards, uint8_t* out) {
    static char text[1024];
    text[0] = '\0';
    std::mt19937 random(seed);
    uint16_t* words = reinterpret_cast<uint16_t*>(&g_memory);
    // Finite as bfloat16, and in pairs as float32.
    for (size_t i = 0; i < sizeof(g_memory) / 2; ++i)
        words[i] = static_cast<uint16_t>((random() & 0x8000u) | (0x3000u + random() % 0x1000u));
    setenv("ASCEND_MOE_FORWARD", forwards != 0 ? "1" : "0", 1);
    twin::LaunchSpec spec;
    spec.block_dim = cores;
    uint32_t doorbells[2] = {};
    const auto add = [&](uint8_t* begin, size_t bytes, twin::GmKind kind, bool bulk = false) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(begin);
        spec.ranges.push_back({at, at + bytes, kind, kind == twin::GmKind::kWindowState,
                               kind == twin::GmKind::kWindowState ? doorbells + 1 : nullptr, "gm", -1, bulk});
    };
    add(g_memory.x[0], sizeof(g_memory.x), twin::GmKind::kWindowData);
    add(g_memory.y[0], sizeof(g_memory.y), twin::GmKind::kTensor, true);
    add(g_memory.f[0], sizeof(g_memory.f), twin::GmKind::kTensor, true);
    add(g_memory.mail[0], sizeof(g_memory.mail), twin::GmKind::kTensor);
    add(g_memory.state[0], sizeof(g_memory.state), twin::GmKind::kWindowState);
    try {
        twin::Device(0).Launch(spec, [&] { Program(seed, cores).Run(steps); });
    } catch (const std::exception& error) {
        strncpy(text, error.what(), sizeof(text) - 1);
    }
    memcpy(out, &g_memory, sizeof(g_memory));
    return text;
}
extern "C" uint64_t memory_bytes() { return sizeof(Memory); }
