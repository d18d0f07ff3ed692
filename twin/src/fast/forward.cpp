// Deferred copies of the fast engine.
//
// A row that a kernel copies from GM to UB and from there to GM again would be copied twice. A row that it
// copies to UB, casts to float32, scales and adds to a sum would be copied once and read four times. The
// fast engine therefore defers such copies: it notes where the bytes lie in GM, and reads them there when
// the kernel uses them. ASCEND_MOE_FORWARD=0 switches this off; twin/tests/test_forward.py compares
// random programs with and without it, byte by byte. The checked and the timed engine never defer anything.
//
// Which accesses may be deferred
//   - A copy from GM to UB (ForwardCopy) of one piece of at least 512 bytes without padding, from a tensor of rows
//     (GmRange::bulk), a data window or a registered window whose blocks are not published one by one: not lists and
//     tables, which the scalar unit reads word by word. The table has 64 such rows.
//   - Cast of such a row to float32 (ForwardCast), and Muls of the result (ForwardScale): one addend.
//   - Add of an addend to a sum in place (ForwardAdd): up to 8 addends of one element type in the order of the
//     Adds. A Duplicate of 0.0f (ForwardFill) may begin the sum.
//   - Cast of such a sum to the type of its addends, half or bfloat16_t, rounded to nearest (ForwardRound), is made at
//     once, from the addends. The sum goes on waiting, and is dropped when the kernel begins the next one.
//   Only the count forms of these calls, in which the elements follow one another, take part.
//
// What forces deferred work to be done
//   - A copy from UB to GM reads a deferred row from where it lies in GM (ForwardSource), if one row has all
//     of the bytes. If the bytes lie in a sum, an addend or several rows, these are made first.
//   - An instruction that reads deferred UB bytes makes them first (ForwardRead). A read of less than a
//     quarter of a row copies its own part only, the first eight times.
//   - An instruction that overwrites all of a deferred range drops the range. One that overwrites a part of
//     it makes it first (ForwardOverwrite, ForwardWrite). FreeTensor drops the ranges of its buffer, Destroy
//     all.
//   - A store to GM makes the copies whose source it overlaps (ForwardStore).
//   - Everything is made (ForwardComplete) before each of these: a store to a state window, to a range with a
//     doorbell or with blocks that are published whole; a read of such blocks; a scalar store to GM; a
//     scalar read of a state window; an instruction that does not declare what it touches in UB; SyncAll, a
//     poll and any other wait; GetPhyAddr, which also ends deferral for the rest of the launch.
//   - A launch never defers if its polls are not declared (other people's kernels), if it records a
//     timeline, or if a copy agent serves it (a data window that has a doorbell).
//
// Why no kernel can detect it
//   - UB: the API is the only way to UB bytes, and every call of it that reads or writes them is listed
//     above. GetPhyAddr, which gives an address away, makes everything and ends deferral.
//   - GM of this rank: another core can write it only when this core has blocked, because cores are fibers
//     of one thread. Blocking makes everything. This core's own stores make the copies that they overlap.
//   - Windows of other ranks, and this rank's own window: their bytes change only when the writer has learnt
//     that this rank has finished reading them. It learns this from a status store of this rank, and every
//     status store makes everything first. A peer that does not wait for one has a race on the device, too.
//   - Values: each step rounds as its instruction does, in the order of the instructions, and nothing is
//     fused: an addend is widened, multiplied and added to the sum in float32. An addend that is not scaled is
//     multiplied by 1.0f, which keeps every bit.
//   - Traffic, bounds and alignment are counted and checked when the call is made, not when the bytes move.
#ifndef TWIN_CHECKED

#ifdef TWIN_TIMED  // times are modelled there, and a fast compile is worth more than fast copies
#pragma GCC optimize("O1")
#endif

#include "twin/engine/forward.h"

#include <cstring>

#include "twin/math/cast.h"

namespace twin {

namespace {

constexpr uint32_t kLooks = 8;

bool Overlap(uintptr_t a, uintptr_t a_end, uintptr_t b, uintptr_t b_end) { return a < b_end && b < a_end; }
uintptr_t EndOf(const ForwardedRow& row) { return row.ub + row.bytes; }
uint64_t SumBytes(const ForwardedSum& sum) { return uint64_t{sum.count} * sizeof(float); }
uint64_t AddendBytes(const ForwardedAddend& addend) { return uint64_t{addend.count} * sizeof(float); }
uint64_t SourceBytes(const ForwardedAddend& addend) {
    return uint64_t{addend.count} * (addend.type == AddendType::kFloat ? sizeof(float) : sizeof(half));
}

float Wide(const float* p, uint32_t i) { return LoadAt(p, i); }
float Wide(const half* p, uint32_t i) { return static_cast<float>(LoadAt(p, i)); }
float Wide(const bfloat16_t* p, uint32_t i) { return static_cast<float>(LoadAt(p, i)); }

// Computes an addend as the instructions would have: each step rounds, nothing is fused.
template <class T>
void AddendOf(const ForwardedAddend& addend) {
    RunBest([to = reinterpret_cast<float*>(addend.ub), from = reinterpret_cast<const T*>(addend.gm),
             weight = addend.weight, n = addend.count] {
        TWIN_ELEMENTWISE
        for (uint32_t i = 0; i < n; ++i) StoreAt(to, i, Wide(from, i) * weight);
    });
}
void RunAddend(const ForwardedAddend& addend) {
    switch (addend.type) {
        case AddendType::kFloat: return AddendOf<float>(addend);
        case AddendType::kHalf: return AddendOf<half>(addend);
        case AddendType::kBf16: return AddendOf<bfloat16_t>(addend);
        case AddendType::kNone: return;
    }
}

void Widen(Forward& forward, uintptr_t ub, uint64_t bytes, uintptr_t gm, uint64_t source) {
    if (ub < forward.ub_begin) forward.ub_begin = ub;
    if (ub + bytes > forward.ub_end) forward.ub_end = ub + bytes;
    if (gm < forward.gm_begin) forward.gm_begin = gm;
    if (gm + source > forward.gm_end) forward.gm_end = gm + source;
}
void Widen(Forward& forward, const ForwardedRow& row) {
    if (row.ub < forward.rows_begin) forward.rows_begin = row.ub;
    if (EndOf(row) > forward.rows_end) forward.rows_end = EndOf(row);
    Widen(forward, row.ub, row.bytes, row.gm, row.bytes);
}
void Widen(Forward& forward, const ForwardedAddend& addend) {
    Widen(forward, addend.ub, AddendBytes(addend), addend.gm, SourceBytes(addend));
}
// Resets the hulls once nothing is deferred. Until then they may be too wide: a search in vain costs less
// than to narrow them.
void Shrink(Forward& forward) {
    if (forward.count != 0) return;
    forward.rows_begin = ~uintptr_t{0};
    forward.rows_end = 0;
    if (forward.addend.type != AddendType::kNone || forward.sum.waits()) return;
    forward.ub_begin = forward.gm_begin = ~uintptr_t{0};
    forward.ub_end = forward.gm_end = 0;
}

// How many rows have to be looked at for these UB bytes: all or none.
uint32_t RowsOverlapping(const Forward& forward, uintptr_t begin, uintptr_t end) {
    return forward.MayOverlapRows(begin, end) ? forward.count : 0;
}

// Callers shrink the hulls when they are done.
void Forget(Forward& forward, uint32_t i) { forward.rows[i] = forward.rows[--forward.count]; }
void Make(const ForwardedRow& row) {
    memcpy(reinterpret_cast<void*>(row.ub), reinterpret_cast<const void*>(row.gm), row.bytes);
}
void MakeAddend(Forward& forward) {
    RunAddend(forward.addend);
    forward.addend.type = AddendType::kNone;
}

// kCount addends, in the order in which they are added.
template <class T, uint32_t kCount>
struct Addends {
    const T* from[kCount];
    float weight[kCount];

    explicit Addends(const ForwardedAddend* addend) {
        for (uint32_t k = 0; k < kCount; ++k) {
            from[k] = reinterpret_cast<const T*>(addend[k].gm);
            weight[k] = addend[k].weight;
        }
    }
    inline __attribute__((always_inline)) float AddTo(float value, uint32_t i) const {
#pragma GCC unroll 8
        for (uint32_t k = 0; k < kCount; ++k) value = value + Wide(from[k], i) * weight[k];
        return value;
    }
};

// Adds kCount addends in one pass, or the largest power of two of them that there are. Returns how many.
template <class T, uint32_t kCount = ForwardedSum::kAddends>
uint32_t AddAddends(float* sums, uint32_t n, const ForwardedAddend* addend, uint32_t addends) {
    if constexpr (kCount > 1) {
        if (addends < kCount) return AddAddends<T, kCount / 2>(sums, n, addend, addends);
    }
    RunBest([=, add = Addends<T, kCount>(addend)] {
        TWIN_ELEMENTWISE
        for (uint32_t i = 0; i < n; ++i) StoreAt(sums, i, add.AddTo(LoadAt(sums, i), i));
    });
    return kCount;
}
template <class T>
void AddAll(const ForwardedSum& sum) {
    float* sums = reinterpret_cast<float*>(sum.ub);
    for (uint32_t k = 0; k < sum.addends;) k += AddAddends<T>(sums, sum.count, sum.addend + k, sum.addends - k);
}
// The sum's floats at its place in UB; it goes on waiting.
void Compute(const ForwardedSum& sum) {
    if (sum.zeroed) memset(reinterpret_cast<void*>(sum.ub), 0, SumBytes(sum));
    switch (sum.addends == 0 ? AddendType::kNone : sum.addend[0].type) {
        case AddendType::kFloat: return AddAll<float>(sum);
        case AddendType::kHalf: return AddAll<half>(sum);
        case AddendType::kBf16: return AddAll<bfloat16_t>(sum);
        case AddendType::kNone: return;
    }
}
// A sum that begins with zeros, rounded to nearest to the type of its addends: in one pass, its floats in registers.
template <class T, uint32_t kCount = ForwardedSum::kAddends>
void Round(const ForwardedSum& sum, T* to) {
    if constexpr (kCount > 1) {
        if (sum.addends < kCount) return Round<T, kCount - 1>(sum, to);
    }
    RunBest([to, n = sum.count, add = Addends<T, kCount>(sum.addend)] {
        TWIN_ELEMENTWISE
        for (uint32_t i = 0; i < n; ++i) StoreAt(to, i, CastOne<RoundMode::CAST_RINT, T>(add.AddTo(0.0f, i)));
    });
}
void MakeSum(Forward& forward) {
    ForwardedSum& sum = forward.sum;
    Compute(sum);
    sum.addends = 0;
    sum.zeroed = false;
}
bool SumIn(const Forward& forward, uintptr_t begin, uintptr_t end) {
    const ForwardedSum& sum = forward.sum;
    return sum.waits() && Overlap(sum.ub, sum.ub + SumBytes(sum), begin, end);
}
bool SumReads(const Forward& forward, uintptr_t begin, uintptr_t end) {
    for (uint32_t i = 0; i < forward.sum.addends; ++i) {
        const ForwardedAddend& addend = forward.sum.addend[i];
        if (Overlap(addend.gm, addend.gm + SourceBytes(addend), begin, end)) return true;
    }
    return false;
}
bool AddendIn(const Forward& forward, uintptr_t begin, uintptr_t end) {
    const ForwardedAddend& addend = forward.addend;
    return addend.type != AddendType::kNone && Overlap(addend.ub, addend.ub + AddendBytes(addend), begin, end);
}
// Makes the sum and the addend that overlap these UB bytes. True when there was such a sum or addend.
bool MakeFloats(Forward& forward, uintptr_t begin, uintptr_t end) {
    const bool sum = SumIn(forward, begin, end);
    if (sum) MakeSum(forward);
    const bool addend = AddendIn(forward, begin, end);
    if (addend) MakeAddend(forward);
    return sum || addend;
}
bool IsAddend(const Forward& forward, uintptr_t ub, uint32_t count) {
    const ForwardedAddend& addend = forward.addend;
    return addend.type != AddendType::kNone && addend.ub == ub && addend.count == count;
}

}  // namespace

void ForwardRead(Forward& forward, uintptr_t begin, uintptr_t end) {
    bool made = MakeFloats(forward, begin, end);
    for (uint32_t i = RowsOverlapping(forward, begin, end); i-- > 0;) {
        ForwardedRow& row = forward.rows[i];
        if (!Overlap(row.ub, EndOf(row), begin, end)) continue;
        const uintptr_t from = begin > row.ub ? begin : row.ub, to = end < EndOf(row) ? end : EndOf(row);
        if ((to - from) * 4 < row.bytes && ++row.looks <= kLooks) {
            memcpy(reinterpret_cast<void*>(from), reinterpret_cast<const void*>(row.gm + (from - row.ub)), to - from);
            continue;
        }
        Make(row);
        Forget(forward, i);
        made = true;
    }
    if (made) Shrink(forward);
}

void ForwardWrite(Forward& forward, uintptr_t begin, uintptr_t end) {
    bool made = MakeFloats(forward, begin, end);
    for (uint32_t i = RowsOverlapping(forward, begin, end); i-- > 0;) {
        if (!Overlap(forward.rows[i].ub, EndOf(forward.rows[i]), begin, end)) continue;
        Make(forward.rows[i]);
        Forget(forward, i);
        made = true;
    }
    if (made) Shrink(forward);
}

namespace {
// Drops the addend and the sum that lie within these UB bytes. True when there was such an addend or sum.
bool DropFloats(Forward& forward, uintptr_t begin, uintptr_t end) {
    bool dropped = false;
    const ForwardedAddend& addend = forward.addend;
    if (addend.type != AddendType::kNone && addend.ub >= begin && addend.ub + AddendBytes(addend) <= end) {
        forward.addend.type = AddendType::kNone;
        dropped = true;
    }
    const ForwardedSum& sum = forward.sum;
    if (sum.waits() && sum.ub >= begin && sum.ub + SumBytes(sum) <= end) {
        forward.sum.addends = 0;
        forward.sum.zeroed = false;
        dropped = true;
    }
    return dropped;
}
}  // namespace

void ForwardDrop(Forward& forward, uintptr_t begin, uintptr_t end) {
    bool dropped = DropFloats(forward, begin, end);
    for (uint32_t i = RowsOverlapping(forward, begin, end); i-- > 0;) {
        if (forward.rows[i].ub < begin || EndOf(forward.rows[i]) > end) continue;
        Forget(forward, i);
        dropped = true;
    }
    if (dropped) Shrink(forward);
}

// A row in part of these bytes is made, so that what is left of it stays; a whole one is dropped.
void ForwardOverwrite(Forward& forward, uintptr_t begin, uintptr_t end) {
    bool gone = DropFloats(forward, begin, end);
    gone = MakeFloats(forward, begin, end) || gone;
    for (uint32_t i = RowsOverlapping(forward, begin, end); i-- > 0;) {
        const ForwardedRow& row = forward.rows[i];
        if (!Overlap(row.ub, EndOf(row), begin, end)) continue;
        if (row.ub < begin || EndOf(row) > end) Make(row);
        Forget(forward, i);
        gone = true;
    }
    if (gone) Shrink(forward);
}

void ForwardStore(Forward& forward, uintptr_t begin, uintptr_t end) {
    if (begin >= forward.gm_end || forward.gm_begin >= end) return;
    const ForwardedAddend& addend = forward.addend;
    if (SumReads(forward, begin, end)) MakeSum(forward);
    if (addend.type != AddendType::kNone && Overlap(addend.gm, addend.gm + SourceBytes(addend), begin, end))
        MakeAddend(forward);
    for (uint32_t i = forward.count; i-- > 0;) {
        const ForwardedRow& row = forward.rows[i];
        if (!Overlap(row.gm, row.gm + row.bytes, begin, end)) continue;
        Make(row);
        Forget(forward, i);
    }
    Shrink(forward);
}

void ForwardComplete(Forward& forward) {
    MakeSum(forward);
    MakeAddend(forward);
    for (uint32_t i = 0; i < forward.count; ++i) Make(forward.rows[i]);
    ForwardDrop(forward);
}

void ForwardDrop(Forward& forward) {
    forward.count = 0;
    forward.addend.type = AddendType::kNone;
    forward.sum.addends = 0;
    forward.sum.zeroed = false;
    Shrink(forward);
}

void ForwardCopy(Forward& forward, uintptr_t ub, uintptr_t gm, uint64_t bytes) {
    if (forward.MayOverlap(ub, ub + bytes)) ForwardOverwrite(forward, ub, ub + bytes);
    if (forward.count == Forward::kRows) {
        Make(forward.rows[0]);
        Forget(forward, 0);
    }
    forward.rows[forward.count] = {ub, bytes, gm, 0};
    Widen(forward, forward.rows[forward.count++]);
}

const uint8_t* ForwardSource(Forward& forward, uintptr_t begin, uint64_t bytes) {
    const uintptr_t end = begin + bytes;
    if (!forward.MayOverlap(begin, end)) return nullptr;
    for (uint32_t step = 0; step < forward.count; ++step) {
        const uint32_t i = (forward.next + step) % forward.count;
        const ForwardedRow& row = forward.rows[i];
        if (row.ub > begin || end > EndOf(row)) continue;
        forward.next = end == EndOf(row) ? i + 1 : i;
        return reinterpret_cast<const uint8_t*>(row.gm + (begin - row.ub));
    }
    ForwardWrite(forward, begin, end);  // makes every deferred range that overlaps
    return nullptr;
}

bool ForwardCast(Forward& forward, uintptr_t to, uintptr_t from, uint32_t count, AddendType type) {
    const uint64_t element = type == AddendType::kFloat ? sizeof(float) : sizeof(half);
    const uint64_t bytes = uint64_t{count} * sizeof(float);
    if (bytes < Forward::kLeastBytes || Overlap(to, to + bytes, from, from + count * element)) return false;
    if (AddendIn(forward, from, from + count * element)) return false;
    const uint8_t* source = ForwardSource(forward, from, count * element);
    if (source == nullptr) return false;
    // There is one addend at a time. The kernel may still read the previous one, so it is made unless this cast
    // overwrites it.
    ForwardOverwrite(forward, to, to + bytes);
    MakeAddend(forward);
    forward.addend = {to, count, type, false, 1.0f, reinterpret_cast<uintptr_t>(source)};
    Widen(forward, forward.addend);
    return true;
}

bool ForwardRound(Forward& forward, uintptr_t to, uintptr_t from, uint32_t count, AddendType type) {
    const ForwardedSum& sum = forward.sum;
    if (!sum.zeroed || sum.addends == 0 || sum.ub != from || sum.count != count) return false;
    const uintptr_t end = to + uint64_t{count} * sizeof(half);
    if (type == AddendType::kFloat || type != sum.addend[0].type) return false;
    if (Overlap(to, end, from, from + SumBytes(sum))) return false;
    if (forward.MayOverlap(to, end)) ForwardOverwrite(forward, to, end);
    if (type == AddendType::kHalf) {
        Round(sum, reinterpret_cast<half*>(to));
    } else {
        Round(sum, reinterpret_cast<bfloat16_t*>(to));
    }
    return true;
}

bool ForwardScale(Forward& forward, uintptr_t to, uintptr_t from, uint32_t count, float weight) {
    if (to != from)
        return ForwardCast(forward, to, from, count, AddendType::kFloat) &&
               ForwardScale(forward, to, to, count, weight);
    if (!IsAddend(forward, to, count) || forward.addend.scaled) return false;
    forward.addend.scaled = true;
    forward.addend.weight = weight;
    return true;
}

bool ForwardAdd(Forward& forward, uintptr_t to, uintptr_t a, uintptr_t b, uint32_t count) {
    if (to != a || !IsAddend(forward, b, count)) return false;
    const uintptr_t end = to + uint64_t{count} * sizeof(float);
    if (Overlap(to, end, b, b + (end - to))) return false;
    ForwardedSum& sum = forward.sum;
    const bool typed = sum.addends == 0 || sum.addend[0].type == forward.addend.type;
    const bool same = typed && sum.waits() && sum.ub == to && sum.count == count;
    if (!same || sum.addends == ForwardedSum::kAddends) {
        ForwardWrite(forward, to, end);
        MakeSum(forward);
        sum.ub = to;
        sum.count = count;
    }
    sum.addend[sum.addends++] = forward.addend;
    Widen(forward, to, end - to, forward.addend.gm, SourceBytes(forward.addend));
    return true;
}

bool ForwardFill(Forward& forward, uintptr_t to, uint32_t count, float value) {
    const uint64_t bytes = uint64_t{count} * sizeof(float);
    if (!forward.enabled || FloatBits(value) != 0 || bytes < Forward::kLeastBytes) return false;
    if (forward.MayOverlap(to, to + bytes)) ForwardOverwrite(forward, to, to + bytes);
    MakeSum(forward);
    forward.sum.ub = to;
    forward.sum.count = count;
    forward.sum.zeroed = true;
    Widen(forward, to, bytes, ~uintptr_t{0}, 0);
    return true;
}

}  // namespace twin

#endif  // TWIN_CHECKED
