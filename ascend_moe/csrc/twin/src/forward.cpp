#ifndef TWIN_CHECKED

#include "twin/forward.h"

#include <cstring>

namespace twin {

namespace {

constexpr uint32_t kLooks = 8;
constexpr uint32_t kTile = 1024;  // elements of a sum that stay in L1 while all terms are added

bool Overlap(uintptr_t a, uintptr_t a_end, uintptr_t b, uintptr_t b_end) { return a < b_end && b < a_end; }
uintptr_t EndOf(const ForwardedRow& row) { return row.ub + row.bytes; }
uint64_t SumBytes(const ForwardedSum& sum) { return uint64_t{sum.count} * sizeof(float); }
uint64_t TermBytes(const ForwardedTerm& term) { return uint64_t{term.count} * sizeof(float); }
uint64_t SourceBytes(const ForwardedTerm& term) {
    return uint64_t{term.count} * (term.type == TermType::kFloat ? sizeof(float) : sizeof(half));
}

float Wide(const float* p, uint32_t i) { return LoadAt(p, i); }
float Wide(const half* p, uint32_t i) { return static_cast<float>(LoadAt(p, i)); }
float Wide(const bfloat16_t* p, uint32_t i) { return static_cast<float>(LoadAt(p, i)); }

// to = the term, or addend + the term. As the instructions would have: each step rounded, none fused.
template <bool kAdd, bool kScaled, class T>
void TermLoop(float* to, const float* addend, const T* from, float weight, uint32_t n) {
    RunBest([=] {
        TWIN_ELEMENTWISE
        for (uint32_t i = 0; i < n; ++i) {
            float value = Wide(from, i);
            if constexpr (kScaled) value = value * weight;
            if constexpr (kAdd) value = LoadAt(addend, i) + value;
            StoreAt(to, i, value);
        }
    });
}
template <bool kAdd, class T>
void TermOf(const ForwardedTerm& term, float* to, uint32_t first, uint32_t count) {
    const T* from = reinterpret_cast<const T*>(term.gm) + first;
    if (term.scaled) {
        TermLoop<kAdd, true>(to, to, from, term.weight, count);
    } else {
        TermLoop<kAdd, false>(to, to, from, 0, count);
    }
}
// Elements [first, first + count) of a term to `to`, or added to what is there.
template <bool kAdd>
void RunTerm(const ForwardedTerm& term, float* to, uint32_t first, uint32_t count) {
    switch (term.type) {
        case TermType::kFloat: return TermOf<kAdd, float>(term, to, first, count);
        case TermType::kHalf: return TermOf<kAdd, half>(term, to, first, count);
        case TermType::kBf16: return TermOf<kAdd, bfloat16_t>(term, to, first, count);
        case TermType::kNone: return;
    }
}

void Widen(Forward& forward, uintptr_t ub, uint64_t bytes, uintptr_t gm, uint64_t source) {
    if (ub < forward.ub_begin) forward.ub_begin = ub;
    if (ub + bytes > forward.ub_end) forward.ub_end = ub + bytes;
    if (gm < forward.gm_begin) forward.gm_begin = gm;
    if (gm + source > forward.gm_end) forward.gm_end = gm + source;
}
void Widen(Forward& forward, const ForwardedRow& row) {
    Widen(forward, row.ub, row.bytes, row.gm, row.bytes);
}
void Widen(Forward& forward, const ForwardedTerm& term) {
    if (term.type != TermType::kNone) Widen(forward, term.ub, TermBytes(term), term.gm, SourceBytes(term));
}
void Widen(Forward& forward, const ForwardedSum& sum) {
    for (uint32_t i = 0; i < sum.terms; ++i)
        Widen(forward, sum.ub, SumBytes(sum), sum.term[i].gm, SourceBytes(sum.term[i]));
}
void Hull(Forward& forward) {
    forward.ub_begin = forward.gm_begin = ~uintptr_t{0};
    forward.ub_end = forward.gm_end = 0;
    for (uint32_t i = 0; i < forward.count; ++i) Widen(forward, forward.rows[i]);
    Widen(forward, forward.term);
    Widen(forward, forward.sum);
}

// The hull stays as it is: callers shrink it when they are done.
void Forget(Forward& forward, uint32_t i) { forward.rows[i] = forward.rows[--forward.count]; }
void Make(const ForwardedRow& row) {
    memcpy(reinterpret_cast<void*>(row.ub), reinterpret_cast<const void*>(row.gm), row.bytes);
}
void MakeTerm(Forward& forward) {
    if (forward.term.type != TermType::kNone)
        RunTerm<false>(forward.term, reinterpret_cast<float*>(forward.term.ub), 0, forward.term.count);
    forward.term.type = TermType::kNone;
}
// Tile by tile: a sum of long rows would leave L1 with every term.
void MakeSum(Forward& forward) {
    const ForwardedSum& sum = forward.sum;
    float* to = reinterpret_cast<float*>(sum.ub);
    for (uint32_t first = 0; sum.terms != 0 && first < sum.count; first += kTile) {
        const uint32_t count = sum.count - first < kTile ? sum.count - first : kTile;
        for (uint32_t i = 0; i < sum.terms; ++i) RunTerm<true>(sum.term[i], to + first, first, count);
    }
    forward.sum.terms = 0;
}
bool SumIn(const Forward& forward, uintptr_t begin, uintptr_t end) {
    const ForwardedSum& sum = forward.sum;
    return sum.terms != 0 && Overlap(sum.ub, sum.ub + SumBytes(sum), begin, end);
}
bool SumReads(const Forward& forward, uintptr_t begin, uintptr_t end) {
    for (uint32_t i = 0; i < forward.sum.terms; ++i) {
        const ForwardedTerm& term = forward.sum.term[i];
        if (Overlap(term.gm, term.gm + SourceBytes(term), begin, end)) return true;
    }
    return false;
}
bool TermIn(const Forward& forward, uintptr_t begin, uintptr_t end) {
    const ForwardedTerm& term = forward.term;
    return term.type != TermType::kNone && Overlap(term.ub, term.ub + TermBytes(term), begin, end);
}
bool IsTerm(const Forward& forward, uintptr_t ub, uint32_t count) {
    const ForwardedTerm& term = forward.term;
    return term.type != TermType::kNone && term.ub == ub && term.count == count;
}

}  // namespace

void ForwardRead(Forward& forward, uintptr_t begin, uintptr_t end) {
    bool made = false;
    if (SumIn(forward, begin, end)) {
        MakeSum(forward);
        made = true;
    }
    if (TermIn(forward, begin, end)) {
        MakeTerm(forward);
        made = true;
    }
    for (uint32_t i = forward.count; i-- > 0;) {
        ForwardedRow& row = forward.rows[i];
        if (!Overlap(row.ub, EndOf(row), begin, end)) continue;
        const uintptr_t from = begin > row.ub ? begin : row.ub, to = end < EndOf(row) ? end : EndOf(row);
        if ((to - from) * 4 < row.bytes && ++row.looks <= kLooks) {
            memcpy(reinterpret_cast<void*>(from), reinterpret_cast<const void*>(row.gm + (from - row.ub)),
                   to - from);
            continue;
        }
        Make(row);
        Forget(forward, i);
        made = true;
    }
    if (made) Hull(forward);
}

void ForwardWrite(Forward& forward, uintptr_t begin, uintptr_t end) {
    bool made = false;
    if (SumIn(forward, begin, end)) {
        MakeSum(forward);
        made = true;
    }
    if (TermIn(forward, begin, end)) {
        MakeTerm(forward);
        made = true;
    }
    for (uint32_t i = forward.count; i-- > 0;) {
        if (!Overlap(forward.rows[i].ub, EndOf(forward.rows[i]), begin, end)) continue;
        Make(forward.rows[i]);
        Forget(forward, i);
        made = true;
    }
    if (made) Hull(forward);
}

void ForwardDrop(Forward& forward, uintptr_t begin, uintptr_t end) {
    bool dropped = false;
    const ForwardedTerm& term = forward.term;
    if (term.type != TermType::kNone && term.ub >= begin && term.ub + TermBytes(term) <= end) {
        forward.term.type = TermType::kNone;
        dropped = true;
    }
    const ForwardedSum& sum = forward.sum;
    if (sum.terms != 0 && sum.ub >= begin && sum.ub + SumBytes(sum) <= end) {
        forward.sum.terms = 0;
        dropped = true;
    }
    for (uint32_t i = forward.count; i-- > 0;) {
        if (forward.rows[i].ub < begin || EndOf(forward.rows[i]) > end) continue;
        Forget(forward, i);
        dropped = true;
    }
    if (dropped) Hull(forward);
}

void ForwardOverwrite(Forward& forward, uintptr_t begin, uintptr_t end) {
    ForwardDrop(forward, begin, end);
    ForwardWrite(forward, begin, end);
}

void ForwardStore(Forward& forward, uintptr_t begin, uintptr_t end) {
    if (begin >= forward.gm_end || forward.gm_begin >= end) return;
    const ForwardedTerm& term = forward.term;
    if (SumReads(forward, begin, end)) MakeSum(forward);
    if (term.type != TermType::kNone && Overlap(term.gm, term.gm + SourceBytes(term), begin, end))
        MakeTerm(forward);
    for (uint32_t i = forward.count; i-- > 0;) {
        const ForwardedRow& row = forward.rows[i];
        if (!Overlap(row.gm, row.gm + row.bytes, begin, end)) continue;
        Make(row);
        Forget(forward, i);
    }
    Hull(forward);
}

void ForwardSettle(Forward& forward) {
    MakeSum(forward);
    MakeTerm(forward);
    for (uint32_t i = 0; i < forward.count; ++i) Make(forward.rows[i]);
    ForwardDrop(forward);
}

void ForwardDrop(Forward& forward) {
    forward.count = 0;
    forward.term.type = TermType::kNone;
    forward.sum.terms = 0;
    Hull(forward);
}

void ForwardCopy(Forward& forward, uintptr_t ub, uintptr_t gm, uint64_t bytes) {
    if (forward.Near(ub, ub + bytes)) ForwardOverwrite(forward, ub, ub + bytes);
    if (forward.count == Forward::kRows) {
        Make(forward.rows[0]);
        Forget(forward, 0);
        Hull(forward);
    }
    forward.rows[forward.count] = {ub, bytes, gm, 0};
    Widen(forward, forward.rows[forward.count++]);
}

const uint8_t* ForwardSource(Forward& forward, uintptr_t begin, uint64_t bytes) {
    const uintptr_t end = begin + bytes;
    if (!forward.Near(begin, end)) return nullptr;
    for (uint32_t step = 0; step < forward.count; ++step) {
        const uint32_t i = (forward.next + step) % forward.count;
        const ForwardedRow& row = forward.rows[i];
        if (row.ub > begin || end > EndOf(row)) continue;
        forward.next = end == EndOf(row) ? i + 1 : i;
        return reinterpret_cast<const uint8_t*>(row.gm + (begin - row.ub));
    }
    ForwardWrite(forward, begin, end);  // makes what overlaps, all of it
    return nullptr;
}

bool ForwardCast(Forward& forward, uintptr_t to, uintptr_t from, uint32_t count, TermType type) {
    const uint64_t element = type == TermType::kFloat ? sizeof(float) : sizeof(half);
    const uint64_t bytes = uint64_t{count} * sizeof(float);
    if (bytes < Forward::kLeastBytes || Overlap(to, to + bytes, from, from + count * element)) return false;
    if (TermIn(forward, from, from + count * element)) return false;
    const uint8_t* source = ForwardSource(forward, from, count * element);
    if (source == nullptr) return false;
    // A term for a term: the one before may still be read, where it is not overwritten.
    ForwardOverwrite(forward, to, to + bytes);
    MakeTerm(forward);
    forward.term = {to, count, type, false, 0, reinterpret_cast<uintptr_t>(source)};
    Hull(forward);
    return true;
}

bool ForwardScale(Forward& forward, uintptr_t to, uintptr_t from, uint32_t count, float weight) {
    if (to != from)
        return ForwardCast(forward, to, from, count, TermType::kFloat) &&
               ForwardScale(forward, to, to, count, weight);
    if (!IsTerm(forward, to, count) || forward.term.scaled) return false;
    forward.term.scaled = true;
    forward.term.weight = weight;
    return true;
}

bool ForwardAdd(Forward& forward, uintptr_t to, uintptr_t a, uintptr_t b, uint32_t count) {
    if (to != a || !IsTerm(forward, b, count)) return false;
    const uintptr_t end = to + uint64_t{count} * sizeof(float);
    if (Overlap(to, end, b, b + (end - to))) return false;
    ForwardedSum& sum = forward.sum;
    const bool same = sum.terms != 0 && sum.ub == to && sum.count == count;
    if (!same || sum.terms == ForwardedSum::kTerms) {
        ForwardWrite(forward, to, end);
        MakeSum(forward);
        sum.ub = to;
        sum.count = count;
    }
    sum.term[sum.terms++] = forward.term;
    Widen(forward, to, end - to, forward.term.gm, SourceBytes(forward.term));
    return true;
}

}  // namespace twin

#endif  // TWIN_CHECKED
