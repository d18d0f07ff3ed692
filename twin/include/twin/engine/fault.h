// A kernel broke a rule of the hardware: the exception that leaves a fiber, and the place it names.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "twin/engine/rules.h"

namespace twin {

// Where in a kernel source an API call was written. Default argument of every checked call.
struct Loc {
    const char* file;
    int line;
    static constexpr Loc Here(const char* f = __builtin_FILE(), int l = __builtin_LINE()) { return Loc{f, l}; }
};

// Kinds of findings. The names are what users see.
enum class Finding : uint8_t {
    kOutOfBounds,
    kMisaligned,
    kTruncatedCopy,
    kBadArgument,
    kUbOverflow,
    kQueueMisuse,
    kUseAfterFree,
    kEventMisuse,
    kSyncDivergence,
    // Only the checked engine sees these.
    kMissingSync,
    kPipeHazard,
    kUninitialised,
    kStaleRead,
    kUnflushedWrite,
    kSharedLine,
    kWrongWindowPart,
    kCoreRace,
    kRankRace,
    kHang,
};

const char* FindingName(Finding kind);

class Fault : public std::runtime_error {
public:
    Fault(Finding kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
    Finding kind;
};

// Raises Fault with "kind: message at file:line (rank r, core c)". Never returns.
[[noreturn]] __attribute__((format(printf, 3, 4), cold, noinline)) void Raise(Finding kind, const Loc& loc,
                                                                              const char* format, ...);

// The same for a rule that a launch may list instead: see rules.h.
__attribute__((format(printf, 4, 5), cold, noinline)) void RaiseOrList(Rule rule, Finding kind, const Loc& loc,
                                                                       const char* format, ...);

// Raises a finding if a rule is broken. The text is made only then.
#define TWIN_RAISE_IF(broken, finding, loc, ...)                                                    \
    do {                                                                                            \
        if (__builtin_expect(broken, 0)) ::twin::Raise(::twin::Finding::finding, loc, __VA_ARGS__); \
    } while (0)

#define TWIN_RULE_IF(broken, rule, finding, loc, ...)                                            \
    do {                                                                                         \
        if (__builtin_expect(broken, 0))                                                         \
            ::twin::RaiseOrList(::twin::Rule::rule, ::twin::Finding::finding, loc, __VA_ARGS__); \
    } while (0)

// The place in the kernel that makes a checked call: the call's last parameter.
#define TWIN_CALLER ::twin::Loc loc = ::twin::Loc::Here()

}  // namespace twin
