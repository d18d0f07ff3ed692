// The fast engine: the effect runs at once, in program order. Everything but the call is compiled away.
#pragma once

namespace twin {

constexpr bool kChecked = false;

template <class Effect>
inline __attribute__((always_inline)) void Issue(const Instruction&, Effect&& effect) {
    effect();
}

// Ordering means nothing when program order is execution order.
inline void FlagSet(uint32_t, Pipe, const Loc&) {}
inline void FlagWait(uint32_t, Pipe, const Loc&) {}
inline void Barrier(Pipe, const Loc&) {}
inline void SettlePipe(Pipe) {}
inline void UbCarved(uint32_t, uint32_t) {}
inline void UbReleased() {}

// Scalar GM accesses: a coherent machine has no stale lines.
template <class T>
inline T ScalarLoad(const T* from, const GmRange&, const Loc&) {
    T value{};
    __atomic_load(const_cast<T*>(from), &value, __ATOMIC_ACQUIRE);
    return value;
}
template <class T>
inline void ScalarStore(T* to, T value, const GmRange&, const Loc&) {
    __atomic_store(to, &value, __ATOMIC_RELEASE);
}
inline void CleanLines(uintptr_t, bool, const Loc&) {}

}  // namespace twin
