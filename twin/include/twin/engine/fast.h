// The fast engine: the effect runs at once, in program order. Everything but the call is compiled away.
#pragma once

#define TWIN_FORWARDS 1  // this engine may defer copies from GM: see forward.h

namespace twin {

constexpr bool kChecked = false;

// An instruction that does not declare its UB accesses exactly: all deferred copies are made first.
template <class Effect>
TWIN_HOT void Issue(const Instruction&, Effect&& effect) {
    Forward& forward = current_core().forward;
    if (__builtin_expect(forward.Any(), 0)) ForwardComplete(forward);
    effect();
}

TWIN_HOT uintptr_t EndOf(const Access& access) {
    return access.begin + (access.count - 1) * access.stride + access.bytes;
}
TWIN_HOT void MakeRead(Forward& forward, const Access& read) {
    if (__builtin_expect(read.bytes != 0 && forward.MayOverlap(read.begin, EndOf(read)), 0))
        ForwardRead(forward, read.begin, EndOf(read));
}
// An instruction that declares exactly what it writes, and in at most three pieces what it reads, in UB.
template <class Effect>
TWIN_HOT void IssueExact(const Instruction& instruction, Effect&& effect) {
    Forward& forward = current_core().forward;
    MakeRead(forward, instruction.reads[0]);
    MakeRead(forward, instruction.reads[1]);
    MakeRead(forward, instruction.reads[2]);
    const Access& write = instruction.write;
    if (__builtin_expect(write.bytes != 0 && forward.MayOverlap(write.begin, EndOf(write)), 0)) {
        if (write.count == 1) {
            ForwardOverwrite(forward, write.begin, EndOf(write));
        } else {
            ForwardWrite(forward, write.begin, EndOf(write));
        }
    }
    effect();
}

// An instruction that declares all that it reads in UB, and writes within what it declares but maybe not all of it.
template <class Effect>
TWIN_HOT void IssueWithin(const Instruction& instruction, Effect&& effect) {
    Forward& forward = current_core().forward;
    const Access& write = instruction.write;
    bool dense = write.width == 0;
    for (const Access& read : instruction.reads) dense = dense && read.width == 0;
    if (__builtin_expect(!dense, 0)) return Issue(instruction, effect);
    for (const Access& read : instruction.reads) MakeRead(forward, read);
    if (__builtin_expect(write.bytes != 0 && forward.MayOverlap(write.begin, EndOf(write)), 0))
        ForwardWrite(forward, write.begin, EndOf(write));
    effect();
}

// An instruction whose effect asks for the place of each piece of its UB source (SourceOf).
template <class Effect>
TWIN_HOT void IssueSourced(const Instruction&, Effect&& effect) {
    effect();
}

// Execution order is program order: there is nothing to wait for.
inline void FlagSet(uint32_t, Pipe, const Loc&) {}
inline void FlagWait(uint32_t, Pipe, const Loc&) {}
inline void Barrier(Pipe, const Loc&) {}
inline void CompletePipe(Pipe) {
    Forward& forward = current_core().forward;
    if (forward.Any()) ForwardComplete(forward);
}
inline void UbCarved(uint32_t, uint32_t) {}
// The kernel has asked for a UB address: it may read and write there from now on.
inline void UbExposed() {
    CompletePipe(Pipe::kAll);
    current_core().forward.enabled = false;
}
inline void UbPointed() { UbExposed(); }
// The kernel has freed these bytes: it may not read them any more.
inline void UbFreed(uint32_t begin, uint32_t bytes) {
    Core& core = current_core();
    const uintptr_t at = reinterpret_cast<uintptr_t>(core.ub) + begin;
    if (core.forward.MayOverlap(at, at + bytes)) ForwardDrop(core.forward, at, at + bytes);
}
inline void UbReleased() {
    Forward& forward = current_core().forward;
    if (forward.Any()) ForwardDrop(forward);
}

// Scalar GM accesses: a coherent machine has no stale lines.
template <class T>
inline T ScalarLoad(const T* from, const GmRange& range, const Loc&) {
    if (range.kind == GmKind::kWindowState) CompletePipe(Pipe::kAll);
    T value{};
    __atomic_load(const_cast<T*>(from), &value, __ATOMIC_ACQUIRE);
    return value;
}
template <class T>
inline void ScalarStore(T* to, T value, const GmRange&, const Loc&) {
    CompletePipe(Pipe::kAll);
    StreamFence();
    __atomic_store(to, &value, __ATOMIC_RELEASE);
}
inline void CleanLines(uintptr_t, bool, const Loc&) {}
inline void FlagAt(uintptr_t, bool) {}

}  // namespace twin
