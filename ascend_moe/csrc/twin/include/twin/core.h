// One emulated AIV core and the device (rank) it belongs to. Everything a kernel can reach hangs off here;
// there is no other state, so that many ranks can live in one process and one thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "twin/fault.h"

namespace twin {

constexpr uint32_t kUbBytes = 192 * 1024;
constexpr uint32_t kBlockBytes = 32;
constexpr uint32_t kEventIds = 8;
constexpr uint32_t kHardEvents = 16;
constexpr uint32_t kMaxCores = 64;
constexpr uint32_t kMaxUbBuffers = 64;

enum class Pipe : uint8_t { kS, kV, kMte2, kMte3, kAll };

// What a registered range of GM is, for bounds messages and for counting bytes.
enum class GmKind : uint8_t { kTensor, kWindowData, kWindowState, kWorkspace, kKinds };

// One GM allocation that a kernel may touch.
struct GmRange {
    uintptr_t begin;
    uintptr_t end;
    GmKind kind;
    bool atomic_blocks;  // 32-byte blocks are published and read whole (status areas)
    uint32_t* doorbell;  // rung after a store, or null
    const char* name;
};

// Bytes that the MTE pipes moved, by the kind of GM at the far end.
struct Traffic {
    uint64_t read[static_cast<int>(GmKind::kKinds)];
    uint64_t written[static_cast<int>(GmKind::kKinds)];
};

// A buffer that TPipe::InitBuffer carved out of UB. Its stamp changes whenever its contents stop being
// the caller's: FreeTensor, Reset, Destroy. A tensor carries the stamp it was born with.
struct UbBuffer {
    uint32_t begin = 0;
    uint32_t bytes = 0;
    uint32_t stamp = 0;
    bool allocated = false;
};

class Device;
class Scheduler;

struct Core {
    uint32_t index = 0;
    Device* device = nullptr;
    Scheduler* scheduler = nullptr;
    uint8_t* ub = nullptr;
    uint32_t ub_used = 0;  // bump allocator of the live TPipe
    void* pipe = nullptr;  // the live TPipe, or null
    UbBuffer buffers[kMaxUbBuffers] = {};
    uint32_t buffer_count = 0;
    bool flags[kHardEvents][kEventIds] = {};    // set and not yet waited for
    uint8_t reserved_events[kHardEvents] = {};  // ids that AllocEventID holds, one bit each
    uint32_t queue_tensors[2] = {};             // tensors allocated and not freed: VECIN, VECOUT
    uint32_t sync_all_calls = 0;
    bool counter_mode = false;
    uint64_t vector_mask[2] = {~0ull, ~0ull};
    float deq_scale = 1.0f;
    uint8_t atomic_op = 0;    // set by SetAtomic*: 0 none, 1 add, 2 max, 3 min
    uint8_t atomic_type = 0;  // element type of the atomic
    uint64_t gather_count = 0;
    GmRange last_range[2] = {};  // most recently hit GM ranges
    uint32_t last_slot = 0;
    Traffic traffic = {};
    Loc blocked_at = {"", 0};
};

// The core whose fiber runs on this thread: set at every fiber switch. The single thread_local of the twin.
extern __thread Core* g_current_core __attribute__((tls_model("initial-exec")));
inline Core& current_core() { return *g_current_core; }

// Finds the GM range that holds [address, address + bytes) or raises kOutOfBounds.
const GmRange& SearchGm(Core& core, uintptr_t address, uint64_t bytes, const Loc& loc);
inline const GmRange& FindGm(Core& core, uintptr_t address, uint64_t bytes, const Loc& loc) {
    for (const GmRange& range : core.last_range) {
        if (address >= range.begin && address < range.end && bytes <= range.end - address) return range;
    }
    return SearchGm(core, address, bytes, loc);
}

// Blocks the running fiber until all launched cores have called it equally often.
void SyncAllCores(const Loc& loc);
// A declared poll that found nothing: lets other cores, then other processes, run.
void PollYield(const Loc& loc);
// 50 cycles a microsecond, as on A2/A3.
int64_t SystemCycle();
uint32_t BlockNum();
uint64_t TilingKey();
uintptr_t HcclContext(int index);

}  // namespace twin
