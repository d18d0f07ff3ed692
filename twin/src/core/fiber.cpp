#include "fiber.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#if defined(TWIN_ASAN)
#include <sanitizer/common_interface_defs.h>
#elif defined(TWIN_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace twin {

namespace {
constexpr size_t kGuard = 64 * 1024;  // the largest page there is
constexpr size_t kStack = 256 * 1024;
}  // namespace

extern "C" void twin_switch(void** save, void* load);
extern "C" void twin_fiber_start();
inline void Fiber::ToFiber() { twin_switch(&home_sp_, own_sp_); }
inline void Fiber::ToHome() { twin_switch(&own_sp_, home_sp_); }

Fiber::Fiber() {
    void* mapped =
        mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    mprotect(mapped, kGuard, PROT_NONE);
    stack_ = static_cast<uint8_t*>(mapped);
}

Fiber::~Fiber() {
#if defined(TWIN_TSAN)
    if (own_thread_ != nullptr) __tsan_destroy_fiber(own_thread_);
#endif
    munmap(stack_, kGuard + kStack);
}

void Fiber::Start(Fiber* self) {
#if defined(TWIN_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &self->home_bottom_, &self->home_size_);
#endif
#if defined(TWIN_TSAN)
    // A new fiber costs ThreadSanitizer a megabyte, so that a fiber that has ended is used again: it
    // continues after its last Leave().
    for (;;) self->entry_(self->argument_);
#else
    self->entry_(self->argument_);
    __builtin_unreachable();
#endif
}

void Fiber::Prepare(Entry entry, void* argument) {
    entry_ = entry;
    argument_ = argument;
#if defined(TWIN_ASAN)
    own_fake_ = nullptr;
#elif defined(TWIN_TSAN)
    if (ended_) return;
    if (own_thread_ != nullptr) __tsan_destroy_fiber(own_thread_);
    own_thread_ = __tsan_create_fiber(0);
#endif
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
#error "fibers: x86-64 and aarch64 only"
#endif
}

void Fiber::Enter() {
#if defined(TWIN_ASAN)
    __sanitizer_start_switch_fiber(&home_fake_, stack_ + kGuard, kStack);
    ToFiber();
    __sanitizer_finish_switch_fiber(home_fake_, nullptr, nullptr);
#elif defined(TWIN_TSAN)
    home_thread_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(own_thread_, 0);
    ToFiber();
#else
    ToFiber();
#endif
}

void Fiber::Leave(bool last) {
#if defined(TWIN_ASAN)
    __sanitizer_start_switch_fiber(last ? nullptr : &own_fake_, home_bottom_, home_size_);
    ToHome();
    __sanitizer_finish_switch_fiber(own_fake_, &home_bottom_, &home_size_);
#elif defined(TWIN_TSAN)
    ended_ = last;
    __tsan_switch_to_fiber(home_thread_, 0);
    ToHome();
#else
    (void)last;
    ToHome();
#endif
}

}  // namespace twin
