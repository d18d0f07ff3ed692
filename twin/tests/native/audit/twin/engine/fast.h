// The fast engine, with every vector instruction held back until something else happens, and then run twice
// to see whether it touches what it declares: nothing else changes, all of `write` is written, and the result
// depends on nothing but `reads`. For tests: this directory goes before the twin's own on the include path.
#pragma once

#define Issue FastIssue
#define IssueExact FastIssueExact
#define IssueSourced FastIssueSourced
#define CompletePipe FastCompletePipe
#define kChecked kFastChecked
#include_next "twin/engine/fast.h"
#undef Issue
#undef IssueExact
#undef IssueSourced
#undef CompletePipe
#undef kChecked

#include <type_traits>

namespace twin {

constexpr bool kChecked = true;

namespace audit {
void Hold(const Instruction& instruction, const void* effect, size_t bytes, void (*run)(const void*));
void Settle();
}  // namespace audit

template <class Effect>
inline void Issue(const Instruction& instruction, Effect&& effect) {
    if (instruction.pipe == Pipe::kV) {
        using Kept = std::decay_t<Effect>;
        static_assert(std::is_trivially_copyable_v<Kept>);
        audit::Hold(instruction, &effect, sizeof(Kept),
                    [](const void* kept) { (*static_cast<Kept*>(const_cast<void*>(kept)))(); });
        return;
    }
    audit::Settle();
    effect();
}
template <class Effect>
inline void IssueExact(const Instruction& instruction, Effect&& effect) {
    Issue(instruction, effect);
}
template <class Effect>
inline void IssueSourced(const Instruction& instruction, Effect&& effect) {
    Issue(instruction, effect);
}
inline void CompletePipe(Pipe) { audit::Settle(); }

}  // namespace twin
