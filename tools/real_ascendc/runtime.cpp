// Runs a job: a process a rank, which forks a process a core for each of its steps. Also what asc-tools' closed
// library defines beside the instructions.
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "intrinsics.h"
#include "kernel_operator.h"

#include "../../op_kernel/protocol/tiling.h"
#include "entries.h"  // made by check.py: the declarations of the kernel entries

// ---- globals of CANN's CPU library ----

int64_t block_idx = 0, block_num = 1, g_ubBase = 0;
uint64_t g_tilingKey = 0, g_fixpipeNdNzParam = 0, g_fullSizeOfWorkspace = 0;
uint64_t* g_workspaceSharedPtr = nullptr;
int32_t g_coreType = 0, g_matmulCount = 0, g_taskRation = 1, sub_block_idx = 0, g_mainPid = 0, g_processNum = 0;
KernelMode g_kernelMode = KernelMode::AIV_MODE;
SocVersion g_socVersion = SocVersion::VER_220;
namespace AscendC {
extern const int MIX_TYPE = 0, AIC_TYPE = 1, AIV_TYPE = 2;
bool g_isVdeq = false, g_isAtomic = false;
ProcessLock* ProcessLock::processLock = nullptr;
ProcessLock::ProcessLock() {}
ProcessLock::~ProcessLock() {}
ProcessLock* ProcessLock::CreateLock() {
    static ProcessLock lock;
    return &lock;
}
int ProcessLock::Write() { return 0; }
int ProcessLock::Unlock() { return 0; }
void SetModelGatherbSrc0Tensor(uint64_t address, uint32_t) { real::g_core.gather_base = address; }
}  // namespace AscendC
// What asc-tools' checks ask of the model.
uint8_t ModelFactoryGetMaskMode() { return real::g_core.counter ? 1 : 0; }
uint64_t ModelFactoryGetMaskHigh() { return real::g_core.mask[1]; }
uint64_t ModelFactoryGetMaskLow() { return real::g_core.mask[0]; }
uint16_t bfloat16::Bf16T::FloatToBf16(const float& value) const {
    return real::BitsOf<uint16_t>(real::Bf16(value, 'r'));
}

bfloat16::Bf16T& bfloat16::Bf16T::operator=(const Bf16T& other) {
    val = other.val;
    return *this;
}

// ---- the core ----

namespace real {

Core g_core;

namespace {

uint64_t Now(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

void Pause() {
    if (__atomic_load_n(&g_core.job->failed, __ATOMIC_ACQUIRE) != 0) _exit(3);
    sched_yield();
}

const Range& RangeOf(const char* name, const void* address, uint64_t bytes, bool write) {
    const uint64_t at = reinterpret_cast<uint64_t>(address);
    const Range* ranges = reinterpret_cast<const Range*>(kBase + g_core.step->ranges);
    for (uint64_t i = 0; i < g_core.step->range_count; ++i) {
        const Range& range = ranges[i];
        if (at < range.begin || at >= range.end) continue;
        if (bytes > range.end - at)
            Fail("%s: %lu bytes at %s + %lu pass its end by %lu", name, bytes, range.name, at - range.begin,
                 at + bytes - range.end);
        if (write && range.kind == kInput) Fail("%s: writes to %s, an input", name, range.name);
        return range;
    }
    Fail("%s: %lu bytes at GM %p, which is in no tensor or window of this launch", name, bytes, address);
}

// Blocks of 32 bytes are indivisible on an NPU. Here a whole copy is, where others may look at it.
class Shared {
public:
    explicit Shared(const Range& range) : lock_(range.kind == kWindow ? &g_core.job->lock : nullptr) {
        while (lock_ != nullptr && __atomic_exchange_n(lock_, 1, __ATOMIC_ACQUIRE) != 0) Pause();
    }
    ~Shared() {
        if (lock_ != nullptr) __atomic_store_n(lock_, 0, __ATOMIC_RELEASE);
    }
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;

private:
    uint64_t* lock_;
};

}  // namespace

void Fail(const char* format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fflush(stdout);  // where AscendC and its checks write
    fprintf(stderr, "rank %lu core %lu: %s\n", g_core.step->rank, g_core.index, text);
    __atomic_store_n(&g_core.job->failed, 1, __ATOMIC_RELEASE);
    _exit(2);
}

void OutOfUb(const char* name, const void* address, uint64_t bytes) {
    Fail("%s: %lu bytes at UB %+ld, UB has %lu", name, bytes,
         static_cast<long>(static_cast<const uint8_t*>(address) - g_core.ub), g_core.ub_bytes);
}

void Load(const char* name, void* to, const void* from, int count, uint64_t bytes, uint64_t gap, uint64_t to_gap,
          uint64_t left, uint64_t right, uint64_t size) {
    uint8_t* d = static_cast<uint8_t*>(to);
    const uint8_t* s = static_cast<const uint8_t*>(from);
    Aligned(name, to);
    if (bytes == 0 || count == 0) return;
    if (from == g_core.polled) Pause();
    g_core.polled = from;
    const uint64_t taken = ((left + right) * size + bytes + 31) / 32 * 32;
    for (int i = 0; i < count; ++i, d += taken + to_gap, s += bytes + gap) {
        const Shared lock(RangeOf(name, s, bytes, false));
        Ub(name, d, taken);
        memset(d, static_cast<int>(g_core.job->poison), taken);
        for (uint64_t i = 0; i < left; ++i) memcpy(d + i * size, &g_core.pad, size);
        for (uint64_t i = 0; i < right; ++i) memcpy(d + (left + i) * size + bytes, &g_core.pad, size);
        memcpy(d + left * size, s, bytes);
    }
}

void Store(const char* name, void* to, const void* from, int count, uint64_t bytes, uint64_t gap, uint64_t to_gap) {
    uint8_t* d = static_cast<uint8_t*>(to);
    const uint8_t* s = static_cast<const uint8_t*>(from);
    Aligned(name, from);
    if (bytes == 0 || count == 0) return;
    for (int i = 0; i < count; ++i, d += bytes + to_gap, s += (bytes + 31) / 32 * 32 + gap) {
        const Shared lock(RangeOf(name, d, bytes, true));
        Ub(name, s, bytes);
        memcpy(d, s, bytes);
    }
}

static uint8_t& EventOf(int from, int to, int id) {
    if (id < 0 || id > 7) Fail("event %d of pipes %d to %d: there are 8", id, from, to);
    return g_core.events[from][to][id];
}
void SetEvent(int from, int to, int id) {
    if (EventOf(from, to, id)++ != 0) Fail("event %d of pipes %d to %d is set twice", id, from, to);
}
void WaitEvent(int from, int to, int id) {
    if (EventOf(from, to, id)-- != 1)
        Fail("event %d of pipes %d to %d is waited for, and nobody sets it", id, from, to);
}

void Meet(uint32_t message) {
    if ((message >> 4 & 3) != 0) Fail("a flag between cores of mode %u", message >> 4 & 3);
    __atomic_add_fetch(&g_core.step->arrived[message >> 8 & 15], 1, __ATOMIC_ACQ_REL);
}
void Await(uint32_t flag) {
    const uint64_t whole = ++g_core.awaited[flag] * g_core.step->cores;
    const uint64_t end = Now(CLOCK_MONOTONIC) + g_core.job->seconds * 1000000000u;
    while (__atomic_load_n(&g_core.step->arrived[flag], __ATOMIC_ACQUIRE) < whole) {
        if (Now(CLOCK_MONOTONIC) > end) Fail("flag %u between cores: the others do not come", flag);
        Pause();
    }
}

int Clock(int, timespec* time) {
    const uint64_t ticks = Now(CLOCK_MONOTONIC) / 20;
    time->tv_sec = static_cast<time_t>(ticks / 1000000000u);
    time->tv_nsec = static_cast<long>(ticks % 1000000000u);
    return 0;
}

}  // namespace real

// ---- the runner ----

namespace {

using real::g_core;

// A kernel entry's parameters, the tiling last.
template <typename... Gm>
constexpr size_t Count(void (*)(Gm...)) {
    static_assert(sizeof...(Gm) <= real::kArguments);
    return sizeof...(Gm);
}

template <typename... Gm, size_t... index>
void Launch(void (*kernel)(Gm...), const uint64_t* arguments, std::index_sequence<index...>) {
    kernel(reinterpret_cast<Gm>(arguments[index])...);
}

template <typename... Gm>
void Launch(void (*kernel)(Gm...), const uint64_t* arguments) {
    Launch(kernel, arguments, std::index_sequence_for<Gm...>());
}

void OnSignal(int number) { real::Fail("signal %d (%s)", number, strsignal(number)); }

[[noreturn]] void RunCore(uint64_t core) {
    g_core.index = core;
    for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) signal(number, OnSignal);
    const real::Step& step = *g_core.step;
    block_idx = static_cast<int64_t>(core);
    block_num = static_cast<int64_t>(step.cores);
    g_tilingKey = step.tiling_key;
    g_coreType = AscendC::AIV_TYPE;
    AscendC::ConstDefiner& hardware = AscendC::ConstDefiner::Instance();
    g_core.ub = hardware.cpuUB;
    g_core.ub_bytes = static_cast<uint64_t>(hardware.bufferInitLen.at(AscendC::Hardware::UB));
    memset(g_core.ub, static_cast<int>(g_core.job->poison), g_core.ub_bytes);
    AscendC::SetHcclContext<0>(reinterpret_cast<GM_ADDR>(step.context));
    if (step.op == 1)
        Launch(ascend_moe_distribute_dispatch, step.arguments);
    else
        Launch(ascend_moe_distribute_combine, step.arguments);
    for (int from = 0; from < 16; ++from)
        for (int to = 0; to < 16; ++to)
            for (int id = 0; id < 8; ++id)
                if (g_core.events[from][to][id] != 0)
                    real::Fail("event %d of pipes %d to %d is set, and nobody waits for it", id, from, to);
    for (uint32_t flag = 0; flag < real::kFlags; ++flag)
        if (step.arrived[flag] < g_core.awaited[flag] * step.cores) real::Fail("flag %u between cores", flag);
    fflush(nullptr);
    _exit(0);
}

bool Joined(const std::vector<pid_t>& children) {
    bool good = true;
    for (const pid_t child : children) {
        int status = 0;
        good = waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0 && good;
    }
    return good;
}

// Whatever ends a process ends those that it has started.
void EndWithParent() { prctl(PR_SET_PDEATHSIG, SIGKILL); }

template <class F>
bool InProcesses(uint64_t count, F run) {
    std::vector<pid_t> children;
    for (uint64_t i = 0; i < count; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            EndWithParent();
            run(i);
        }
        if (child < 0) __atomic_store_n(&g_core.job->failed, 1, __ATOMIC_RELEASE);
        children.push_back(child);
    }
    return Joined(children);
}

}  // namespace

int main(int count, char** words) {
    if (count != 2) return 64;
    EndWithParent();
    const int file = open(words[1], O_RDWR);
    struct stat about;
    if (file < 0 || fstat(file, &about) != 0) return perror(words[1]), 66;
    void* base = reinterpret_cast<void*>(real::kBase);
    if (mmap(base, static_cast<size_t>(about.st_size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, file,
             0) != base)
        return perror("mmap"), 66;
    real::Job& job = *static_cast<real::Job*>(base);
    real::Step* steps = reinterpret_cast<real::Step*>(real::kBase + job.steps);
    g_core.job = &job;
    const bool good = InProcesses(job.world, [&](uint64_t rank) {
        for (uint64_t i = 0; i < job.step_count; ++i) {
            if (steps[i].rank != rank) continue;
            g_core.step = &steps[i];
            if (steps[i].registered != 0)
                reinterpret_cast<moe::MoeDistributeCombineTiling*>(
                    steps[i].arguments[Count(ascend_moe_distribute_combine) - 1])
                    ->info.registeredGeneration = static_cast<uint32_t>(steps[i].registered);
            if (!InProcesses(steps[i].cores, RunCore)) {
                __atomic_store_n(&job.failed, 1, __ATOMIC_RELEASE);
                _exit(2);
            }
            for (uint32_t flag = 0; flag < real::kFlags; ++flag)
                if (steps[i].arrived[flag] % steps[i].cores != 0) {
                    fprintf(stderr, "rank %lu: cores met unequally often\n", rank);
                    __atomic_store_n(&job.failed, 1, __ATOMIC_RELEASE);
                    _exit(2);
                }
        }
        _exit(0);
    });
    return good ? 0 : 1;
}
