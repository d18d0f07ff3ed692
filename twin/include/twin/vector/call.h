// From the arguments of a vector call to what twin::IssueLanes takes: masks and repeats checked, tensors
// checked and turned into operands.
#pragma once

#include "twin/api/pipe.h"
#include "twin/engine/host_cpu.h"
#include "twin/vector/arguments.h"
#include "twin/vector/lanes.h"

namespace AscendC {
namespace detail {

template <class T>
inline T* UbPointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}
template <class T>
inline twin::Access UbAccess(const T* first, uint64_t count) {
    return {reinterpret_cast<uintptr_t>(first), count * sizeof(T)};
}

inline bool Apart(const twin::Access& a, const twin::Access& b) {
    return a.begin + a.bytes <= b.begin || b.begin + b.bytes <= a.begin;
}
// A destination begins where a source does, or lies apart from it.
inline void CheckOverlap(const char* name, uint32_t source, const twin::Access& to, const twin::Access& from,
                         const twin::Loc& loc) {
    TWIN_RAISE_IF(to.begin != from.begin && !Apart(to, from), kBadArgument, loc,
                  "%s: destination and source %u overlap in part; they may be the same, or apart", name, source);
}
// The same by a rule that a launch may list, for calls that the twin can make as the vector unit makes them, see
// ByRepeats. Whether they overlap in part.
template <twin::Rule rule = twin::Rule::kOverlap>
inline bool ListOverlap(const char* name, uint32_t source, const twin::Access& to, const twin::Access& from,
                        const twin::Loc& loc) {
    const bool part = to.begin != from.begin && !Apart(to, from);
    if (__builtin_expect(part, 0))
        twin::RaiseOrList(rule, twin::Finding::kBadArgument, loc,
                          "%s: destination and source %u overlap in part; they may be the same, or apart", name,
                          source);
    return part;
}
// body(dst, src[], count) repeat by repeat, each read before it is written. An element of dst has `dst_bits`.
template <class... S, class Body>
inline void ByRepeats(const Body& body, uint32_t dst_bits, uintptr_t to, const uintptr_t* from, uint32_t n) {
    constexpr uint32_t kBytes[] = {sizeof(S)..., 0};
    const uint32_t width = twin::kRepeatBytes / std::max({dst_bits / 8, static_cast<uint32_t>(sizeof(S))...});
    alignas(64) uint8_t taken[sizeof...(S) + 1][twin::kRepeatBytes];
    uintptr_t at[3] = {};
    for (uint32_t done = 0; done < n; done += width) {
        const uint32_t part = std::min(width, n - done);
        for (uint32_t i = 0; i < sizeof...(S); ++i) {
            memcpy(taken[i], UbPointer<uint8_t>(from[i] + uint64_t{done} * kBytes[i]), part * kBytes[i]);
            at[i] = reinterpret_cast<uintptr_t>(taken[i]);
        }
        body(to + uint64_t{done} * dst_bits / 8, at, part);
    }
}
// Checks a call that cannot work in place.
inline void CheckApart(const char* name, const char* what, const twin::Access& to, const twin::Access& from,
                       const twin::Loc& loc) {
    TWIN_RAISE_IF(!Apart(to, from), kBadArgument, loc, "%s: destination and %s overlap", name, what);
}

inline uint32_t CheckElementCount(const char* name, int64_t count, const twin::Loc& loc) {
    TWIN_RAISE_IF(count < 0 || count > UINT32_MAX, kBadArgument, loc, "%s of %lld elements", name,
                  static_cast<long long>(count));
    return static_cast<uint32_t>(count);
}

inline void CheckMask(uint64_t mask, uint32_t lanes, const twin::Loc& loc) {
    TWIN_RULE_IF(mask == 0, kNoLane, kBadArgument, loc, "mask 0 is outside 1..%u: the call does nothing", lanes);
    TWIN_RAISE_IF(mask > lanes, kBadArgument, loc, "mask %lld is outside 1..%u", static_cast<long long>(mask), lanes);
}
inline void CheckRepeatTime(int32_t repeats, const twin::Loc& loc) {
    TWIN_RAISE_IF(repeats < 0 || repeats > 255, kBadArgument, loc, "repeatTime %d is outside 0..255", repeats);
}

// The extent of a call by its mask and repeatTime: lanes of some repeats, or in counter mode a number of
// elements.
struct Work {
    twin::Lanes lanes;
    bool counted = false;
    uint64_t elements = 0;
};

// `width`: lanes of a repeat, 256 bytes of the widest element type. Masks of 4- and 8-byte types are one
// word.
inline Work RegisterWork(int32_t repeats, uint32_t width) {
    const twin::Core& core = twin::current_core();
    Work work;
    work.counted = core.counter_mode;
    work.elements = core.vector_mask[0];
    work.lanes = {{{core.vector_mask[0], core.vector_mask[1]}}, width, static_cast<uint32_t>(repeats)};
    const twin::LaneMask all = twin::LaneMask::First(width);
    for (int i = 0; i < 2; ++i) work.lanes.mask.bits[i] &= all.bits[i];
    return work;
}
template <bool isSetMask>
inline Work WorkOf(uint64_t mask, int32_t repeats, uint32_t width, const twin::Loc& loc) {
    CheckRepeatTime(repeats, loc);
    if (isSetMask) {
        TWIN_RAISE_IF(twin::current_core().counter_mode, kBadArgument, loc,
                      "a mask of the first %llu lanes in counter mode: give the number of elements as {n, 0}, "
                      "or with SetVectorMask<T, MaskMode::COUNTER>",
                      static_cast<unsigned long long>(mask));
        CheckMask(mask, width, loc);
        StoreMask(twin::LaneMask::First(static_cast<uint32_t>(mask)));
    }
    return RegisterWork(repeats, width);
}
template <bool isSetMask>
inline Work WorkOf(const uint64_t* mask, int32_t repeats, uint32_t width, const twin::Loc& loc) {
    CheckRepeatTime(repeats, loc);
    if (isSetMask) {
        const twin::LaneMask bits = {{mask[0], width > 64 ? mask[1] : 0}};
        TWIN_RULE_IF(bits.bits[0] == 0 && bits.bits[1] == 0, kNoLane, kBadArgument, loc, "a mask of no lane at all");
        TWIN_RAISE_IF(width < 64 && !twin::current_core().counter_mode && bits.bits[0] >> width != 0, kBadArgument, loc,
                      "a mask with bits beyond the %u lanes of a repeat", width);
        StoreMask(bits);
    }
    return RegisterWork(repeats, width);
}

// A tensor and its strides.
template <class T>
struct Strided {
    const LocalTensor<T>& tensor;
    uint32_t block = 1;
    uint32_t repeat = 8;

    twin::Operand Operand() const { return {reinterpret_cast<uintptr_t>(tensor.data()), sizeof(T), {block, repeat}}; }
    void Check(uint64_t bytes, const twin::VectorCall& call) const {
        tensor.Span((bytes + sizeof(T) - 1) / sizeof(T), call.loc, call.name);
    }
};
// Where a repeat follows the one before without a gap.
template <class T>
inline Strided<T> Dense(const LocalTensor<T>& tensor, uint32_t width) {
    return {tensor, 1, width * static_cast<uint32_t>(sizeof(T)) / twin::kVectorBlockBytes};
}

struct LaneOptions {
    bool accumulates = false;  // dst is read, too
    bool own_repeat = false;   // a repeat may overwrite its own sources
    twin::Access extra = {};   // that the body reads besides
};

template <class Body, class D, class... S>
inline void LanesCall(const twin::VectorCall& call, const twin::Operands& all, const twin::Lanes& lanes,
                      const LaneOptions& options, const Body& body, const Strided<D>& dst, const Strided<S>&... src) {
    const twin::Runs runs = twin::FindRuns(lanes, all);
    if (runs.count == 0 || lanes.repeats == 0) return;
    TWIN_RAISE_IF(dst.block == 0 && runs.end() > twin::kVectorBlockBytes / sizeof(D), kBadArgument, call.loc,
                  "%s: the destination's block stride is 0", call.name);
    const auto check = [&](const auto& tensor, const twin::Operand& operand) {
        tensor.Check(operand.begin - tensor.Operand().begin + twin::Extent(operand, runs, lanes.repeats), call);
    };
    check(dst, all.dst);
    [[maybe_unused]] uint32_t i = 0;
    (check(src, all.src[i++]), ...);
    const bool overlaps = twin::CheckLaneOverlap(call, all, runs, lanes.repeats, options.own_repeat);
    twin::IssueLanes(call, all, lanes, body, options.extra, overlaps);
}

// A mask form: body(dst, src[], count) on each stretch of lanes.
template <class Body, class D, class... S>
inline void MaskedCall(const twin::VectorCall& call, const Work& work, const LaneOptions& options, const Body& body,
                       const Strided<D>& dst, const Strided<S>&... src) {
    twin::Operands all;
    all.accumulates = options.accumulates;
    all.dst = dst.Operand();
    ((all.src[all.sources++] = src.Operand()), ...);
    if (!work.counted) {
        LanesCall(call, all, work.lanes, options, body, dst, src...);
        return;
    }
    const uint32_t width = work.lanes.width;
    const twin::Lanes full = {twin::LaneMask::First(width), width,
                              static_cast<uint32_t>(std::min<uint64_t>(work.elements / width, 4096))};
    const twin::Lanes rest = {twin::LaneMask::First(static_cast<uint32_t>(work.elements % width)), width, 1};
    LanesCall(call, all, full, options, body, dst, src...);
    all.dst.begin = all.dst.At(full.repeats, 0);
    for (uint32_t i = 0; i < all.sources; ++i) all.src[i].begin = all.src[i].At(full.repeats, 0);
    LanesCall(call, all, rest, options, body, dst, src...);
}

// Says whether an instruction may be deferred together with the copies that it reads. Bodies that may be
// specialise it.
template <class Body>
struct Forwards {
    static constexpr bool kBegins = false;  // also when nothing is deferred yet
    static bool Do(const Body&, uintptr_t, const uintptr_t*, uint32_t) { return false; }
};

// A count form: `n` elements, one after the other. It leaves normal mode and a full mask behind.
template <class Body, class D, class... S>
inline void CountCall(const char* name, const twin::Loc& loc, int64_t count, bool accumulates, const Body& body,
                      const LocalTensor<D>& dst, const LocalTensor<S>&... src) {
    const uint32_t n = CheckElementCount(name, count, loc);
    SetMaskNorm();
    ResetMask();
    if (n == 0) return;
    const twin::Access write = dst.Part(n, loc, name);
    const uintptr_t to = write.begin;
    struct {
        uintptr_t at[3] = {};
    } from;
    twin::Access reads[3];
    uint32_t i = 0;
    bool overlaps = false;
    [[maybe_unused]] const auto read = [&](const auto& source) {
        const twin::Access part = reads[i] = source.Part(n, loc, name);
        from.at[i] = part.begin;
        if (part.bytes == write.bytes) {
            overlaps |= ListOverlap(name, i, write, part, loc);
        } else {
            CheckApart(name, "a source of another width", write, part, loc);
        }
        ++i;
    };
    (read(src), ...);
    if (accumulates) reads[i] = write;
    if (__builtin_expect(overlaps, 0)) {
        twin::IssueExact(twin::PartOf({name, loc}, write, reads[0], reads[1], reads[2]),
                         [=] { ByRepeats<S...>(body, 8 * sizeof(D), to, from.at, n); });
        return;
    }
    if constexpr (!twin::kChecked) {
        if ((Forwards<Body>::kBegins || __builtin_expect(twin::current_core().forward.Any(), 0)) &&
            Forwards<Body>::Do(body, to, from.at, n))
            return;
    }
    twin::IssueExact(twin::PartOf({name, loc}, write, reads[0], reads[1], reads[2]),
                     [=] { twin::RunBest([=] { body(to, from.at, n); }); });
}

}  // namespace detail
}  // namespace AscendC
