#include "bad_address.h"

#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>

#include "twin/engine/core.h"

namespace twin::third_party {

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS};
std::mutex g_lock;
int g_users = 0;
struct sigaction g_before[2];

// What the signal of this thread said, for Report.
thread_local uintptr_t g_address = 0;
thread_local uintptr_t g_instruction = 0;

// Runs on the stack of the fiber, above the frame that failed. That frame is not unwound: its state is unknown.
[[noreturn]] void Report() {
    Core& core = current_core();
    Dl_info library;
    const bool known = dladdr(reinterpret_cast<void*>(g_instruction), &library) != 0;
    char where[64] = "no address of this machine";
    if (g_address != 0)
        snprintf(where, sizeof(where), "%#llx, which is in no memory", static_cast<unsigned long long>(g_address));
    char text[512];
    snprintf(
        text, sizeof(text), "%s: a pointer of the kernel leads to %s, at %s+%#llx (rank %d, core %u)",
        FindingName(Finding::kOutOfBounds), where, known ? library.dli_fname : "?",
        static_cast<unsigned long long>(g_instruction - (known ? reinterpret_cast<uintptr_t>(library.dli_fbase) : 0)),
        core.rank, core.index);
    core.abandon(core, std::make_exception_ptr(Fault(Finding::kOutOfBounds, text)));
    __builtin_unreachable();
}

void HandOn(int number, siginfo_t* info, void* context) {
    const struct sigaction& before = g_before[number == SIGBUS ? 1 : 0];
    if ((before.sa_flags & SA_SIGINFO) != 0) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
        signal(number, SIG_DFL);  // the instruction runs again
    } else {
        before.sa_handler(number);
    }
}

// A signal that somebody sent has no address of ours.
void OnSignal(int number, siginfo_t* info, void* context) {
    if (g_current_core == nullptr || info->si_code <= 0) return HandOn(number, info, context);
    g_address = reinterpret_cast<uintptr_t>(info->si_addr);
    mcontext_t& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    constexpr uint64_t kRedZone = 128;
    g_instruction = static_cast<uintptr_t>(registers.gregs[REG_RIP]);
    registers.gregs[REG_RSP] =
        static_cast<greg_t>(((static_cast<uint64_t>(registers.gregs[REG_RSP]) - kRedZone) & ~uint64_t{15}) - 8);
    registers.gregs[REG_RIP] = static_cast<greg_t>(reinterpret_cast<uintptr_t>(&Report));
#else
    g_instruction = registers.pc;
    registers.sp &= ~uint64_t{15};
    registers.pc = reinterpret_cast<uintptr_t>(&Report);
#endif
}

}  // namespace

BadAddresses::BadAddresses() {
    const std::lock_guard<std::mutex> guard(g_lock);
    if (g_users++ > 0) return;
    struct sigaction ours = {};
    ours.sa_sigaction = &OnSignal;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &ours, &g_before[i]);
}

BadAddresses::~BadAddresses() {
    const std::lock_guard<std::mutex> guard(g_lock);
    if (--g_users > 0) return;
    for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &g_before[i], nullptr);
}

}  // namespace twin::third_party
