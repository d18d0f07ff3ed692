#include "fiber.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define TWIN_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#include <sanitizer/common_interface_defs.h>
#define TWIN_ASAN 1
#endif
#endif

namespace twin {

namespace {
constexpr size_t kGuard = 4096;
constexpr size_t kStack = 256 * 1024;
}  // namespace

#if defined(__x86_64__) || defined(__aarch64__)
extern "C" void twin_switch(void** save, void* load);
extern "C" void twin_fiber_start();
#endif

Fiber::Fiber() {
    void* mapped = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    mprotect(mapped, kGuard, PROT_NONE);
    stack_ = static_cast<uint8_t*>(mapped);
}

Fiber::~Fiber() { munmap(stack_, kGuard + kStack); }

void Fiber::Start(Fiber* self) {
#ifdef TWIN_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &self->home_bottom_, &self->home_size_);
#endif
    self->entry_(self->argument_);
    __builtin_unreachable();
}

void Fiber::Prepare(Entry entry, void* argument) {
    entry_ = entry;
    argument_ = argument;
    own_fake_ = nullptr;
    uint8_t* top = stack_ + kGuard + kStack;
#if defined(__x86_64__)
    // Popped by twin_switch: r15 r14 r13 r12 rbx rbp, then the return address; a null one ends unwinding.
    void* frame[8] = {nullptr,
                      nullptr,
                      nullptr,
                      reinterpret_cast<void*>(&Fiber::Start),
                      this,
                      nullptr,
                      reinterpret_cast<void*>(&twin_fiber_start),
                      nullptr};
    own_sp_ = memcpy(top - sizeof(frame), frame, sizeof(frame));
#elif defined(__aarch64__)
    void* frame[22] = {this, reinterpret_cast<void*>(&Fiber::Start)};
    frame[11] = reinterpret_cast<void*>(&twin_fiber_start);
    own_sp_ = memcpy(top - sizeof(frame), frame, sizeof(frame));
#else
    // makecontext passes ints only.
    const uintptr_t self = reinterpret_cast<uintptr_t>(this);
    void (*start)(unsigned, unsigned) = [](unsigned high, unsigned low) {
        Start(reinterpret_cast<Fiber*>(static_cast<uintptr_t>(static_cast<uint64_t>(high) << 32 | low)));
    };
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_ + kGuard;
    own_.uc_stack.ss_size = kStack;
    own_.uc_link = nullptr;
    makecontext(&own_, reinterpret_cast<void (*)()>(start), 2,
                static_cast<unsigned>(static_cast<uint64_t>(self) >> 32), static_cast<unsigned>(self));
    (void)top;
#endif
}

void Fiber::Enter() {
#ifdef TWIN_ASAN
    __sanitizer_start_switch_fiber(&home_fake_, stack_ + kGuard, kStack);
#endif
#if defined(__x86_64__) || defined(__aarch64__)
    twin_switch(&home_sp_, own_sp_);
#else
    swapcontext(&home_, &own_);
#endif
#ifdef TWIN_ASAN
    __sanitizer_finish_switch_fiber(home_fake_, nullptr, nullptr);
#endif
}

void Fiber::Leave(bool last) {
#ifdef TWIN_ASAN
    __sanitizer_start_switch_fiber(last ? nullptr : &own_fake_, home_bottom_, home_size_);
#else
    (void)last;
#endif
#if defined(__x86_64__) || defined(__aarch64__)
    twin_switch(&own_sp_, home_sp_);
#else
    swapcontext(&own_, &home_);
#endif
#ifdef TWIN_ASAN
    __sanitizer_finish_switch_fiber(own_fake_, &home_bottom_, &home_size_);
#endif
}

}  // namespace twin
