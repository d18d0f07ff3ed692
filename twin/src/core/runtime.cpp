// What all engines share: the current core, the texts of findings, doorbells, GM ranges by address.
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>

#include "runtime.h"
#include "twin/engine/atomic_store.h"
#include "twin/engine/launch.h"

namespace twin {

__thread Core* g_current_core __attribute__((tls_model("initial-exec"))) = nullptr;

void RingDoorbell(uint32_t* doorbell) {
    __atomic_fetch_add(doorbell, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(doorbell - 1, __ATOMIC_SEQ_CST) != 0) {
        syscall(SYS_futex, doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
}

const char* FindingName(Finding kind) {
    switch (kind) {
        case Finding::kOutOfBounds: return "out of bounds";
        case Finding::kMisaligned: return "misaligned address";
        case Finding::kTruncatedCopy: return "copy length rounded down";
        case Finding::kBadArgument: return "illegal argument";
        case Finding::kUbOverflow: return "UB overflow";
        case Finding::kQueueMisuse: return "queue discipline";
        case Finding::kUseAfterFree: return "use after free";
        case Finding::kEventMisuse: return "event discipline";
        case Finding::kSyncDivergence: return "SyncAll divergence";
        case Finding::kMissingSync: return "missing pipe synchronisation";
        case Finding::kPipeHazard: return "same-pipe hazard";
        case Finding::kUninitialised: return "uninitialised UB read";
        case Finding::kStaleRead: return "stale scalar read";
        case Finding::kUnflushedWrite: return "unflushed scalar write";
        case Finding::kSharedLine: return "cache line shared by two writers";
        case Finding::kWrongWindowPart: return "wrong part of a window";
        case Finding::kCoreRace: return "race between cores";
        case Finding::kRankRace: return "race between ranks";
        case Finding::kHang: return "hang";
    }
    return "fault";
}

namespace {

// "kind: text, at file:line".
std::string LineOf(Finding kind, const Loc& loc, const char* format, va_list arguments) {
    char text[512];
    vsnprintf(text, sizeof(text), format, arguments);
    return std::string(FindingName(kind)) + ": " + text + ", at " + PlaceOf(loc);
}

[[noreturn]] void ThrowFault(Finding kind, const std::string& line) {
    const Core* core = g_current_core;
    throw Fault(kind, line + " (rank " + std::to_string(core != nullptr ? core->rank : -1) + ", core " +
                          std::to_string(core != nullptr ? core->index : 0) + ")");
}

}  // namespace

void Raise(Finding kind, const Loc& loc, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const std::string line = LineOf(kind, loc, format, arguments);
    va_end(arguments);
    ThrowFault(kind, line);
}

void RaiseOrList(Rule rule, Finding kind, const Loc& loc, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    const std::string line = LineOf(kind, loc, format, arguments);
    va_end(arguments);
    const Core* core = g_current_core;
    const LaunchSpec* spec = core != nullptr ? core->launch->spec : nullptr;
    const RuleText& text = kRules[static_cast<int>(rule)];
    if (spec == nullptr || spec->warnings == nullptr || (text.level == RuleLevel::kError && !spec->lists_all))
        ThrowFault(kind, line + " [" + text.source + "]");
    spec->warnings->insert(line);
}

std::string PlaceOf(const Loc& loc) {
    const char* slash = strrchr(loc.file, '/');
    return std::string(slash != nullptr ? slash + 1 : loc.file) + ":" + std::to_string(loc.line);
}

std::exception_ptr FaultOf(const Core& core, Finding kind, const Loc& loc, const std::string& text) {
    Core* const before = g_current_core;
    g_current_core = const_cast<Core*>(&core);
    std::exception_ptr fault;
    try {
        Raise(kind, loc, "%s", text.c_str());
    } catch (...) {
        fault = std::current_exception();
    }
    g_current_core = before;
    return fault;
}

std::string TextOf(std::exception_ptr failure, Finding* kind) {
    try {
        std::rethrow_exception(failure);
    } catch (const Fault& fault) {
        *kind = fault.kind;
        return fault.what();
    } catch (const std::exception& error) {
        return error.what();
    } catch (...) {
        return "the kernel threw something that is no exception";
    }
}

std::string StandOf(const Core& core, CoreStatus status) {
    const char* what = status == CoreStatus::kBarrier   ? "waits in SyncAll"
                       : status == CoreStatus::kPolling ? "polls"
                       : status == CoreStatus::kCross   ? "waits for a cross-core flag"
                                                        : "stands";
    return "rank " + std::to_string(core.rank) + " core " + std::to_string(core.index) + " " + what + " at " +
           PlaceOf(core.blocked_at);
}

const GmRange& SearchGm(Core& core, uintptr_t address, uint64_t bytes, const Loc& loc) {
    const GmRange& range = core.launch->ranges.Find(address, bytes, loc);
    TWIN_RAISE_IF(
        range.reach == Reach::kRdma, kOutOfBounds, loc,
        "load or store of %llu bytes in the \"%s\" of rank %d: HCCL has linked that rank by RDMA, its window is "
        "not mapped; BatchWrite alone reaches it",
        static_cast<unsigned long long>(bytes), range.name, range.owner);
    core.last_slot ^= 1;
    core.last_range[core.last_slot] = range;
    return core.last_range[core.last_slot];
}
const GmRange& FindItemGm(const Core& core, uintptr_t address, uint64_t bytes, const Loc& loc) {
    const GmRange& range = core.launch->ranges.Find(address, bytes, loc);
    TWIN_RAISE_IF(range.reach == Reach::kMemory, kBadArgument, loc,
                  "BatchWrite to the \"%s\" of rank %d: HCCL has linked that rank by memory, it has no queue pair",
                  range.name, range.owner);
    return range;
}
const char* GmNameAt(const Core& core, uintptr_t address) { return core.launch->ranges.NameAt(address); }
uint32_t BlockNum() { return g_current_core->launch->spec->block_dim; }
uint64_t TilingKey() { return g_current_core->launch->spec->tiling_key; }
uintptr_t HcclContext(int index) { return g_current_core->launch->spec->hccl_context[index]; }

void GmMap::Assign(const std::vector<GmRange>& ranges) {
    std::vector<GmRange> sorted = ranges;
    std::sort(sorted.begin(), sorted.end(), [](const GmRange& a, const GmRange& b) { return a.begin < b.begin; });
    ranges_.clear();
    for (const GmRange& range : sorted) {
        // A caller may pass a tensor twice, or a part of another one: what either holds is legal.
        if (!ranges_.empty() && ranges_.back().end > range.begin && ranges_.back().kind == GmKind::kTensor &&
            range.kind == GmKind::kTensor) {
            ranges_.back().end = std::max(ranges_.back().end, range.end);
            ranges_.back().bulk &= range.bulk;
        } else {
            ranges_.push_back(range);
        }
    }
}

std::vector<GmRange>::const_iterator GmMap::After(uintptr_t address) const {
    return std::upper_bound(ranges_.begin(), ranges_.end(), address,
                            [](uintptr_t a, const GmRange& range) { return a < range.begin; });
}

const char* GmMap::NameAt(uintptr_t address) const {
    if (ranges_.empty()) {
        return "nothing";
    }
    const auto next = After(address);
    return (next == ranges_.begin() ? next : next - 1)->name;
}

const GmRange& GmMap::Find(uintptr_t address, uint64_t bytes, const Loc& loc) const {
    const auto next = After(address);
    TWIN_RAISE_IF(ranges_.empty(), kOutOfBounds, loc, "GM address is in no tensor or window: the launch has none");
    TWIN_RAISE_IF(next == ranges_.begin(), kOutOfBounds, loc,
                  "GM address is in no tensor or window; the nearest above is \"%s\", which begins %llu bytes after",
                  next->name, static_cast<unsigned long long>(next->begin - address));
    const GmRange& range = *(next - 1);
    if (address < range.end && bytes <= range.end - address) return range;
    TWIN_RAISE_IF(address < range.end, kOutOfBounds, loc, "%llu bytes at byte %llu of GM \"%s\", which has %llu",
                  static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(address - range.begin),
                  range.name, static_cast<unsigned long long>(range.end - range.begin));
    Raise(Finding::kOutOfBounds, loc,
          "GM address is in no tensor or window; the nearest below is \"%s\", which ends %llu bytes before", range.name,
          static_cast<unsigned long long>(address - range.end));
}

uint8_t* MapUb(size_t cores) {
    void* const mapped =
        mmap(nullptr, cores * kUbBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    return static_cast<uint8_t*>(mapped);
}
void UnmapUb(uint8_t* ub, size_t cores) { munmap(ub, cores * kUbBytes); }

void CheckCleanExit(const Core& core) {
    for (uint32_t event = 0; event < kHardEvents; ++event) {
        for (uint32_t id = 0; id < kEventIds; ++id) {
            TWIN_RAISE_IF(core.flags[event][id].file != nullptr, kEventMisuse, core.flags[event][id],
                          "event %u of %s is still set when the kernel ends: it would poison the next one", id,
                          kEventNames[event]);
        }
    }
    const uint32_t tensors = core.queue_tensors[0] + core.queue_tensors[1];
    Loc left = core.left_at;
    for (uint32_t i = 0; i < core.buffer_count && tensors != 0; ++i) {
        if (core.buffers[i].allocated) left = core.buffers[i].allocated_at;
    }
    TWIN_RULE_IF(tensors != 0, kQueueLeak, kQueueMisuse, left, "%u queue tensors were never freed", tensors);
    TWIN_RAISE_IF(core.atomic_op != 0, kBadArgument, core.atomic_at,
                  "SetAtomicNone is missing: the next kernel would add");
}

}  // namespace twin
