// A kernel broke a rule of the hardware: the exception that leaves a fiber, and the place it names.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

// The rules that a launch can list instead of ending: kernels in use break them, and the call does something definite
// then. Each has a source: what CANN's documents (docs/zh/api of asc-devkit) or, where they are silent, asc-devkit's
// headers say. What a document forbids ends a launch; the others are warnings, and a rule without a source would be
// one.
// clang-format off
#define TWIN_RULES(X)                                                                                                 \
    X(kEmptyBuffer, kWarning, "InitBuffer of 0 bytes",                                                                \
      "no document states a minimum; kernel_tpipe_impl.h takes no memory, only its debug build asserts len > 0")      \
    X(kEmptyCopy, kWarning, "DataCopy of 0 bytes",                                                                    \
      "DataCopy（GM与UB高维切分数据搬运）.md: with a blockCount or blockLen of 0 the call is a no-op")       \
    X(kCopyTail, kError, "DataCopy by a count that is not a multiple of 32 bytes",                                    \
      "DataCopy（GM与UB连续数据搬运）.md: count * sizeof(T) must be aligned to 32 bytes, and is rounded down")        \
    X(kPadElement, kError, "DataCopyPad: blockLen that is not a multiple of the element",                             \
      "DataCopyPad（GMToUB非对齐数据搬运）.md: blockLen must be a multiple of sizeof(T)")                             \
    X(kBufferEnd, kError, "Get, GetWithOffset beyond their buffer",                                                   \
      "TBuf/Get.md: len * sizeof(T) may not exceed the length of the TBuf")                                           \
    X(kTensorEnd, kError, "tensor[i], GetValue, SetValue or a call beyond their tensor",                              \
      "LocalTensor/operator.md: offset may not exceed the tensor's size")                                             \
    X(kGlobalEnd, kError, "a GlobalTensor access beyond the size passed to SetGlobalBuffer",                          \
      "SetGlobalBuffer.md: bufferSize is the number of elements that the GlobalTensor contains")                      \
    X(kOverlap, kError, "destination and source overlap in part: calls of one and two operands, Compare over repeats, " \
      "ReduceSum, ReduceMax, ReduceMin",                                                                              \
      "通用说明和约束.md: source and destination must overlap wholly, not in part")                                   \
    X(kCompareOverlap, kWarning, "the same: Compare, CompareScalar over a count",                                     \
      "Compare.md, Compares.md: no rule; the general one is about repeats and strides")                               \
    X(kRepeatReads, kError, "mask forms: a repeat reads results of an earlier one",                                   \
      "通用说明和约束.md: an earlier repeat's destination may not be a later one's source")                           \
    X(kCompareTail, kError, "Compare, CompareScalar of elements that are not a multiple of 256 bytes",                \
      "Compares.md: the space of count elements must be aligned to 256 bytes")                                        \
    X(kCastOverlap, kError, "Cast that overwrites what later repeats read",                                           \
      "Cast.md: overlapping operands of other widths may give wrong results")                                         \
    X(kSumOverlap, kError, "Sum in place", "Sum.md: source and destination may not overlap")                          \
    X(kSumInner, kError, "Sum: inner that is not a multiple of 32 bytes",                                             \
      "Sum.md: inner * sizeof(T) must be a multiple of 32 bytes")                                                     \
    X(kOtherReduction, kError, "GetReduceRepeatSumSpr, GetReduceRepeatMaxMinSpr without such a reduction of the type before", \
      "GetReduceRepeatSumSpr(ISASI).md: with ReduceSum over a count only")                                            \
    X(kQueueEvent, kError, "an event id that a queue holds and SetFlag sets",                                         \
      "SetFlag-WaitFlag(ISASI).md: beside queues an id comes from AllocEventID or FetchEventID; to set one twice is undefined") \
    X(kNoLane, kWarning, "a mask of 0 lanes", "掩码.md: with mask = 0 the call is a no-op")                           \
    X(kQueueLeak, kWarning, "a queue's tensors that are not freed when the kernel ends",                              \
      "no document; kernel_tpipe_impl.h waits for freed tensors only")
// clang-format on

namespace twin {

// Where in a kernel source an API call was written. Default argument of every checked call.
struct Loc {
    const char* file;
    int line;
    static constexpr Loc Here(const char* f = __builtin_FILE(), int l = __builtin_LINE()) { return Loc{f, l}; }
};

// An operator's operand, with the place of the operator: it takes no further argument.
template <class T>
struct Placed {
    template <class U, class = std::enable_if_t<std::is_convertible_v<U, T>>>
    __attribute__((always_inline)) Placed(const U& from, Loc loc = Loc::Here())
        : value(static_cast<T>(from)), loc(loc) {}
    T value;
    Loc loc;
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

enum class RuleLevel : uint8_t { kWarning, kError };
struct RuleText {
    RuleLevel level;
    const char* source;
};
#define TWIN_RULE_NAME(Name, level, what, source) Name,
#define TWIN_RULE_TEXT(Name, level, what, source) {RuleLevel::level, source},
enum class Rule : uint8_t { TWIN_RULES(TWIN_RULE_NAME) };
constexpr RuleText kRules[] = {TWIN_RULES(TWIN_RULE_TEXT)};  // by Rule
#undef TWIN_RULE_NAME
#undef TWIN_RULE_TEXT

class Fault : public std::runtime_error {
public:
    Fault(Finding kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
    Finding kind;
};

// Raises Fault with "kind: message at file:line (rank r, core c)". Never returns.
[[noreturn]] __attribute__((format(printf, 3, 4), cold, noinline)) void Raise(Finding kind, const Loc& loc,
                                                                              const char* format, ...);

// The same for a rule that a launch may list instead.
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
