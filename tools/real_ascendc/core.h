// The job of a run; and a vector core of the models: its registers, its UB, and the ranges of GM that a launch may
// touch. It is included before every source, so it also has what the op compiler generates, and the clock of a core.
#pragma once
#include <cstdint>
#include <cstring>
#include <ctime>

template <class T>
T RealTiling(const uint8_t* gm) {
    T tiling;
    memcpy(&tiling, gm, sizeof(T));
    return tiling;
}
#define GET_TILING_DATA_WITH_STRUCT(type, name, gm) const type name = RealTiling<type>(gm)

namespace real {

// The file that the driver writes and the runner maps at kBase: all GM of all ranks, and what they run. 64-bit words.
constexpr uint64_t kBase = 0x200000000000;
constexpr uint64_t kFlags = 16;
constexpr uint64_t kArguments = 24;  // room for those of any kernel
enum Kind : uint64_t { kInput, kOutput, kWindow };

struct Range {
    uint64_t begin, end, kind;
    char name[24];
};
struct Step {
    uint64_t rank, op, tiling_key, cores, context, ranges, range_count;
    uint64_t registered;  // generation of the registered block with the combine's rows; 0: they lie in none
    uint64_t arguments[kArguments];
    uint64_t arrived[kFlags];  // the runner's: cores that set a flag, since the step began
};
struct Job {
    uint64_t bytes, world, steps, step_count, poison, seconds;
    uint64_t failed, lock;  // the runner's
};

struct Core {
    uint64_t mask[2] = {~0ull, ~0ull};
    bool counter = false;
    float deq_scale = 1;
    uint64_t control = 0;
    uint64_t pad = 0;          // of copies to UB
    uint64_t kept = 0;         // by vreducev2
    uint64_t gather_base = 0;  // of vgather
    uint8_t events[16][16][16] = {};
    uint64_t awaited[kFlags] = {};
    uint8_t* ub = nullptr;
    uint64_t ub_bytes = 0;
    const void* polled = nullptr;
    Job* job = nullptr;
    Step* step = nullptr;
    uint64_t index = 0;
};
extern Core g_core;

// Ends this core, and with it the job: a line of what was wrong.
[[noreturn]] void Fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// An address and its bytes lie in UB; at a multiple of 32 bytes.
void OutOfUb(const char* name, const void* address, uint64_t bytes);
inline void Ub(const char* name, const void* address, uint64_t bytes) {
    const uint64_t at = reinterpret_cast<uint64_t>(address) - reinterpret_cast<uint64_t>(g_core.ub);
    if (at > g_core.ub_bytes || bytes > g_core.ub_bytes - at) OutOfUb(name, address, bytes);
}
inline void Aligned(const char* name, const void* address) {
    if ((reinterpret_cast<uint64_t>(address) - reinterpret_cast<uint64_t>(g_core.ub)) % 32 != 0)
        Fail("%s: an operand at %p is not at a multiple of 32 bytes of UB", name, address);
}

// Copies between GM and UB; gaps are bytes from the end of a block to the next. `left` and `right` elements of
// `size` bytes around a block get the padding, what is left of its last 32 bytes of UB gets the poison.
void Load(const char* name, void* to, const void* from, int count, uint64_t bytes, uint64_t gap, uint64_t to_gap,
          uint64_t left, uint64_t right, uint64_t size);
void Store(const char* name, void* to, const void* from, int count, uint64_t bytes, uint64_t gap, uint64_t to_gap);

void SetEvent(int from, int to, int id);
void WaitEvent(int from, int to, int id);
// A flag of mode 0 of all cores of a launch: set, and waited for.
void Meet(uint32_t message);
void Await(uint32_t flag);
// Ticks of 50 MHz, as SYS_CNT has them.
int Clock(int, struct timespec* time);

}  // namespace real

// GetSystemCycle of asc-devkit's CPU mode counts nanoseconds of the host's clock.
#ifndef REAL_RUNTIME
#define clock_gettime(clock, time) real::Clock(clock, time)
#endif
