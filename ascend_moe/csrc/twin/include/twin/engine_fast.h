// The fast engine: the effect runs at once, in program order. Everything but the call is compiled away.
#pragma once

namespace twin {

template <class Effect>
inline __attribute__((always_inline)) void Issue(const Instruction&, Effect&& effect) {
    effect();
}

// Ordering edges (events, barriers, queue hand-overs) mean nothing when program order is execution order.
inline void OrderEdge(Pipe, Pipe, const Loc&) {}

}  // namespace twin
