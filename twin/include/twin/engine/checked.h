// The checked engine: V, MTE2 and MTE3 are queues that run later, as late as the flags allow or as a schedule
// says; every access is checked against every other one that nothing orders before it. See src/checked.
#pragma once

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace twin {

constexpr bool kChecked = true;

namespace checked {
// Memory for a queued effect. It lives until the effect has run.
void* Reserve(size_t bytes);
void Enqueue(const Instruction& instruction, void (*run)(void*), void* effect);
// An instruction of the scalar pipe: checked here, its effect follows at once.
void CheckScalar(const Instruction& instruction);
void LoadCached(const void* from, uint32_t bytes, void* value, const GmRange& range, const Loc& loc);
void StoreCached(void* to, uint32_t bytes, const void* value, const GmRange& range, const Loc& loc);
}  // namespace checked

template <class Effect>
inline void Issue(const Instruction& instruction, Effect&& effect) {
    using Closure = typename std::decay<Effect>::type;
    if (instruction.pipe == Pipe::kS) {
        checked::CheckScalar(instruction);
        effect();
        return;
    }
    void* memory = checked::Reserve(sizeof(Closure));
    new (memory) Closure(std::forward<Effect>(effect));
    checked::Enqueue(
        instruction,
        [](void* closure) {
            Closure* held = static_cast<Closure*>(closure);
            (*held)();
            held->~Closure();
        },
        memory);
}

void UbCarved(uint32_t begin, uint32_t bytes);
void UbExposed();  // the kernel has a UB address: it may touch bytes that no TPipe carved
void UbPointed();  // the kernel has a pointer: what it stores there is not seen, so all of UB may be read
void UbReleased();
void CleanLines(uintptr_t address, bool all, const Loc& loc);
// The 32-byte block there is a flag, whatever it lies in; not `certain`: by a guess.
void FlagAt(uintptr_t address, bool certain);

template <class T>
inline T ScalarLoad(const T* from, const GmRange& range, const Loc& loc) {
    T value{};
    checked::LoadCached(from, sizeof(T), &value, range, loc);
    return value;
}
template <class T>
inline void ScalarStore(T* to, T value, const GmRange& range, const Loc& loc) {
    checked::StoreCached(to, sizeof(T), &value, range, loc);
}

}  // namespace twin
