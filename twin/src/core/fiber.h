// A stack that can be left and entered again. The switch is written by hand, for x86-64 and aarch64.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#define TWIN_ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define TWIN_TSAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TWIN_ASAN 1
#elif __has_feature(thread_sanitizer)
#define TWIN_TSAN 1
#endif
#endif

namespace twin {

class Fiber {
public:
    using Entry = void (*)(void*);
    Fiber();
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // Prepares the stack so that the first Enter() calls entry(argument). `entry` must end with a last
    // Leave().
    void Prepare(Entry entry, void* argument);
    void Enter();           // from the scheduler: runs until Leave()
    void Leave(bool last);  // from the fiber: back to the scheduler

private:
    static void Start(Fiber* self);
    void ToFiber();
    void ToHome();
    uint8_t* stack_;
    Entry entry_ = nullptr;
    void* argument_ = nullptr;
    void* own_sp_ = nullptr;
    void* home_sp_ = nullptr;
#if defined(TWIN_ASAN)
    // Where AddressSanitizer keeps the frames of the stack that is left.
    void* own_fake_ = nullptr;
    void* home_fake_ = nullptr;
    const void* home_bottom_ = nullptr;
    size_t home_size_ = 0;
#elif defined(TWIN_TSAN)
    // What ThreadSanitizer takes for threads: the stack of this fiber, and the one it was entered from.
    void* own_thread_ = nullptr;
    void* home_thread_ = nullptr;
    bool ended_ = false;
#endif
};

}  // namespace twin
