// One emulated AIV core. It holds all state that a kernel can reach, so that many ranks can live in one
// process and one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>

#include "twin/engine/fault.h"
#include "twin/engine/forward.h"
#include "twin/engine/host_cpu.h"

// TWIN_HOT: on the path of every access, always inlined. TWIN_COLD: error paths, never inlined.
#define TWIN_HOT inline __attribute__((always_inline))
#define TWIN_COLD __attribute__((cold, noinline))

namespace twin {

constexpr uint32_t kUbBytes = 192 * 1024;
constexpr uint32_t kBlockBytes = 32;
constexpr uint32_t kEventIds = 8;
constexpr uint32_t kHardEvents = 16;
constexpr const char* kEventNames[] = {"MTE2_V", "V_MTE2", "MTE3_V", "V_MTE3", "V_V",    "MTE3_MTE2", "MTE2_MTE3",
                                       "S_V",    "V_S",    "S_MTE2", "MTE2_S", "S_MTE3", "MTE3_S"};
constexpr uint32_t kMaxCores = 64;
constexpr uint32_t kMaxUbBuffers = 64;
// Behind the buffers of TPipe: all of UB, for tensors whose address the kernel sets itself, once for each TPosition.
constexpr uint32_t kRawUbBuffers = 16;

enum class Pipe : uint8_t { kS, kV, kMte2, kMte3, kAll };
constexpr uint32_t kPipes = 4;

// What a registered range of GM is, for bounds messages and for counting bytes.
enum class GmKind : uint8_t { kTensor, kWindowData, kWindowState, kWorkspace, kWindowRegistered, kKinds };

// What reaches a range: loads and stores alone where HCCL has linked its rank by memory, items of BatchWrite alone
// where it has linked it by RDMA and maps nothing.
enum class Reach : uint8_t { kAll, kMemory, kRdma };

// One GM allocation that a kernel may touch.
struct GmRange {
    uintptr_t begin;
    uintptr_t end;
    GmKind kind;
    bool atomic_blocks;  // 32-byte blocks are published and read whole (status areas)
    uint32_t* doorbell;  // rung after a store, or null
    const char* name;
    int owner = -1;     // windows: the rank whose window it is
    bool bulk = false;  // rows of payload: copies of them may wait; runs that are only timed may leave them out
    uint64_t at = 0;    // bytes into its area, of which it is a part
    bool data = false;  // other people's kernels: stores of single blocks are no flags
    Reach reach = Reach::kAll;

    bool window() const {
        return kind == GmKind::kWindowData || kind == GmKind::kWindowState || kind == GmKind::kWindowRegistered;
    }
};

// Bytes that the MTE pipes moved, by the kind of GM at the far end.
struct Traffic {
    uint64_t read[static_cast<int>(GmKind::kKinds)];
    uint64_t written[static_cast<int>(GmKind::kKinds)];
    uint64_t ub_peak;  // most UB that a core's TPipe had carved at a time

    void Add(const Traffic& other) {
        for (int kind = 0; kind < static_cast<int>(GmKind::kKinds); ++kind) {
            read[kind] += other.read[kind];
            written[kind] += other.written[kind];
        }
        if (other.ub_peak > ub_peak) ub_peak = other.ub_peak;
    }
};

// A buffer that TPipe::InitBuffer carved out of UB. Its generation changes whenever its contents stop
// being the caller's: FreeTensor, Reset, Destroy. A tensor stores the generation of its creation.
struct UbBuffer {
    uint32_t begin = 0;
    uint32_t bytes = 0;
    uint32_t generation = 0;
    bool allocated = false;
    Loc allocated_at = {};
    bool freed = false;  // given back, and its reader has not been waited for yet
    Pipe producer = Pipe::kS;
    uint8_t position = 0;  // AscendC::TPosition
    // An NPU's queue takes its buffers in rotation: which of the queue's this allocation would have on an NPU, and of
    // that buffer whether an NPU would have it allocated, or hold an event id for it since it was freed.
    uint8_t npu_choice = 0;
    bool npu_allocated = false;
    bool npu_holds = false;
    uint8_t npu_free_event = 0;  // that id
    uint8_t full_event = 0;      // id from EnQue to DeQue
    bool enqueued = false;       // of a queue of depth 0
};

// What a reduction leaves in a special register: a value in the bits of its element type, and where it was.
struct Reduced {
    uint32_t value = 0;
    uint32_t index = 0;
    uint8_t bytes = 0;  // of the element type; 0: no reduction has run
};

// The flags that an engine keeps for a core: the hard events, then two for each UB buffer: full and free.
constexpr uint32_t kQueueFlags = kHardEvents * kEventIds;
constexpr uint32_t kFlags = kQueueFlags + 2 * kMaxUbBuffers;
constexpr uint32_t FullFlag(uint32_t slot) { return kQueueFlags + 2 * slot; }
constexpr uint32_t FreeFlag(uint32_t slot) { return kQueueFlags + 2 * slot + 1; }

// The latest GM reads of a core, by which a poll that the kernel does not declare is noticed.
struct PollWatch {
    static constexpr uint32_t kReads = 128;             // a power of two
    static constexpr uint32_t kReadsBeforeYield = 512;  // reads without a yield, whatever they are
    struct Read {
        uintptr_t address;
        int line;
        uint32_t round;
    };
    Read reads[kReads] = {};
    uint32_t round = 1;  // reads of earlier rounds are forgotten
    uint32_t unyielding = 0;
    uint32_t repeated = 0;  // reads in a row that were made before, stores between them or not
};

class Device;
class Scheduler;
class Recorder;
struct LaunchState;
namespace timed {
struct Hot;
}

struct Core {
    uint32_t index = 0;
    int rank = -1;
    LaunchState* launch = nullptr;
    Scheduler* scheduler = nullptr;  // of the fast engine
    uint8_t* ub = nullptr;
    uint32_t ub_used = 0;  // bump allocator of the live TPipe
    void* pipe = nullptr;  // the live TPipe, or null
    UbBuffer buffers[kMaxUbBuffers + kRawUbBuffers] = {};
    uint32_t buffer_count = 0;
    Loc flags[kHardEvents][kEventIds] = {};     // where it was set and not yet waited for, else null
    uint8_t reserved_events[kHardEvents] = {};  // ids that AllocEventID holds, one bit each
    uint8_t queue_events[kHardEvents] = {};     // ids that an NPU's queues would hold, see TQueBind
    uint8_t queue_sets[kHardEvents] = {};       // of those the ids that are set and not yet waited for
    uint32_t queue_tensors[2] = {};             // tensors allocated and not freed: VECIN, VECOUT
    Loc left_at = {};                           // where one was allocated that its TPipe did not get back
    uint32_t sync_all_calls = 0;
    uint32_t sync_cores = 0;     // how many a SyncAll is of: all, in the soft form maybe the first ones
    uint32_t core_barriers = 0;  // that the kernel has marked
    bool counter_mode = false;
    uint64_t vector_mask[2] = {~0ull, ~0ull};
    float deq_scale = 1.0f;
    uint8_t atomic_op = 0;    // set by SetAtomic*: 0 none, 1 add, 2 max, 3 min
    uint8_t atomic_type = 0;  // element type of the atomic
    Loc atomic_at = {};
    uint64_t gather_count = 0;      // elements selected by the last GatherMask
    uint64_t compare_mask[2] = {};  // result of a Compare without a destination
    uint16_t merge_counts[4] = {};  // entries of each list that the last MrgSort took
    Reduced reduced_sum = {};       // of the last ReduceSum over a count
    Reduced reduced_extreme = {};   // of the last maximum or minimum over repeats or a count
    uint64_t pad_value = 0;         // bits of SetPadValue
    bool pad_value_set = false;
    GmRange last_range[2] = {};  // most recently hit GM ranges
    uint32_t last_slot = 0;
    Traffic traffic = {};
    Loc blocked_at = {"", 0};
    void (*abandon)(Core&, std::exception_ptr) = nullptr;  // ends the fiber that runs, without unwinding it
    void* fiber_state = nullptr;                           // what the engine knows of the core
    const char* phase = "";                                // step of the op, as the kernel named it last
    uintptr_t hccl_context[2] = {0, 0};                    // by SetHcclContext; 0: the launch's
    std::unique_ptr<PollWatch> watch;                      // null where polls are declared
    Forward forward;                                       // of the fast engine
    RowStores* stores = nullptr;                           // of the fast engine
    Recorder* recorder = nullptr;                          // of the fast engine, where a timeline is wanted
    timed::Hot* timed = nullptr;                           // of the timed engine
};

// The core whose fiber runs on this thread: set at every fiber switch. The single thread_local of the twin.
extern __thread Core* g_current_core __attribute__((tls_model("initial-exec")));
inline Core& current_core() { return *g_current_core; }

void RecordPhase(const Core& core);  // that its phase ends
inline void MarkPhase(const char* name) {
    Core& core = current_core();
    if (__builtin_expect(core.recorder != nullptr, 0)) RecordPhase(core);
    core.phase = name;
}

// Finds the GM range that holds [address, address + bytes) or raises kOutOfBounds.
const char* GmNameAt(const Core& core, uintptr_t address);  // of the range there, else of the nearest
const GmRange& SearchGm(Core& core, uintptr_t address, uint64_t bytes, const Loc& loc);
// The same for what an item of BatchWrite is to write.
const GmRange& FindItemGm(const Core& core, uintptr_t address, uint64_t bytes, const Loc& loc);
inline const GmRange& FindGm(Core& core, uintptr_t address, uint64_t bytes, const Loc& loc) {
    for (const GmRange& range : core.last_range) {
        if (address >= range.begin && address < range.end && bytes <= range.end - address) return range;
    }
    return SearchGm(core, address, bytes, loc);
}

// Blocks the running fiber until the first sync_cores cores have called it equally often.
void SyncAllCores(const Loc& loc);
// A declared poll whose value has not come: lets other cores, then other processes, run.
void PollYield(const Loc& loc);
// Number of failed polls after which a core sleeps until something that it read in them changes.
#ifdef TWIN_CHECKED
uint32_t PollSleeps();
#else
constexpr uint32_t PollSleeps() { return 1; }
#endif
// The same for a poll that was noticed, not declared. It never counts towards a hang.
void SuspectedPoll(const Loc& loc);
// Lets other cores run once during a loop that may be work or an undeclared poll. `idle`: it reads again what it has
// read, which is no progress.
void Yield(const Loc& loc, bool idle = false);
// A core that repeats a GM read with no store of its own in between seems to poll. This rule misses polls
// that store at every look and polls over very many addresses: after kReadsBeforeYield reads other cores run
// anyway.
inline void WatchRead(Core& core, uintptr_t address, const Loc& loc) {
    if (core.watch == nullptr) return;
    PollWatch& watch = *core.watch;
    const uint32_t hash = static_cast<uint32_t>(address >> 5) * 2654435761u + static_cast<uint32_t>(loc.line);
    PollWatch::Read& read = watch.reads[(hash ^ hash >> 16) % PollWatch::kReads];
    const bool before = read.address == address && read.line == loc.line;
    watch.repeated = before ? watch.repeated + 1 : 0;
    if (before && read.round == watch.round) {
        watch.unyielding = 0;
        SuspectedPoll(loc);
        return;
    }
    read = {address, loc.line, watch.round};
    if (++watch.unyielding >= PollWatch::kReadsBeforeYield) {
        watch.unyielding = 0;
        Yield(loc, watch.repeated >= PollWatch::kReadsBeforeYield);
    }
}
inline void ForgetReads(Core& core) {
    if (core.watch != nullptr) ++core.watch->round;
}
// 50 cycles a microsecond, as on A2/A3.
int64_t SystemCycle();
uint32_t BlockNum();
uint64_t TilingKey();
uintptr_t HcclContext(int index);
// Flags between cores of one launch. Mode 0: all cores set, then all may pass; mode 1: the two sub-blocks of
// a block. Mode 2 needs a cube core and is refused.
void CrossCoreSet(int mode, Pipe pipe, int id, const Loc& loc);
void CrossCoreWait(int id, const Loc& loc);

}  // namespace twin
