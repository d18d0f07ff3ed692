// The timed engine: effects happen in program order, as in the fast one, and a modelled clock runs beside
// them for every pipe of every core. See src/timed.
#pragma once

#include <cstddef>

namespace twin {

constexpr bool kChecked = false;

namespace timed {

// State that every scalar instruction uses.
struct Hot {
    double now = 0;           // of S, ns
    double scalar_ns = 0;     // of one scalar instruction
    double* spent = nullptr;  // where this core's critical path counts S in the current step
};

enum class Outcome : unsigned char {
    kNow,   // the effect follows at once
    kSkip,  // payload that the run leaves out
    kLater  // a store of status: it becomes visible when it lands
};
// Moves the clocks; lets other cores run first where the order matters.
Outcome Schedule(const Instruction& instruction);
void OrderScalarAccess(const GmRange& range, const void* at, uint64_t bytes, bool store);

}  // namespace timed

template <class Effect>
inline __attribute__((always_inline)) void Issue(const Instruction& instruction, Effect&& effect) {
    if (instruction.pipe == Pipe::kS) {
        timed::Hot& hot = *current_core().timed;
        hot.now += hot.scalar_ns;
        *hot.spent += hot.scalar_ns;
        effect();
        return;
    }
    if (timed::Schedule(instruction) == timed::Outcome::kNow) effect();
}

inline void UbCarved(uint32_t, uint32_t) {}
inline void UbReleased() {}
inline void UbExposed() {}
inline void UbPointed() {}

// A scalar GM access costs a GM round trip; the data cache is not modelled.
template <class T>
inline T ScalarLoad(const T* from, const GmRange& range, const Loc&) {
    timed::OrderScalarAccess(range, from, sizeof(T), false);
    T value{};
    __atomic_load(const_cast<T*>(from), &value, __ATOMIC_ACQUIRE);
    return value;
}
template <class T>
inline void ScalarStore(T* to, T value, const GmRange& range, const Loc&) {
    timed::OrderScalarAccess(range, to, sizeof(T), true);
    __atomic_store(to, &value, __ATOMIC_RELEASE);
}
inline void CleanLines(uintptr_t, bool, const Loc&) {}
inline void FlagAt(uintptr_t, bool) {}

}  // namespace twin
