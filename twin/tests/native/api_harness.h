// One kernel an API call. A test passes bytes for `a`, `b` and `out`, and numbers that the kernel uses as
// masks, repeats and strides; it gets `out` back, or what the twin said.
#pragma once

#include <cstring>

#include "kernel_operator.h"
#include "twin/engine/launch.h"

namespace api {

using namespace AscendC;  // NOLINT

constexpr uint32_t kBytes = 8192;  // of each tensor
constexpr uint32_t kNumbers = 16;

// What a kernel works with. `tmp` is left as it comes.
struct Args {
    LocalTensor<uint8_t> out, a, b, tmp;
    const int64_t* p;

    template <class T>
    static LocalTensor<T> As(const LocalTensor<uint8_t>& tensor) {
        return tensor.ReinterpretCast<T>();
    }
    int32_t Int(int i) const { return static_cast<int32_t>(p[i]); }
    uint8_t Byte(int i) const { return static_cast<uint8_t>(p[i]); }
    uint16_t Short(int i) const { return static_cast<uint16_t>(p[i]); }
    uint64_t Mask() const { return static_cast<uint64_t>(p[1]); }
    // `a` from the byte on that a number gives; below 0: out.
    template <class T>
    LocalTensor<T> InA(int i) const {
        return p[i] < 0 ? As<T>(out) : a[static_cast<uint32_t>(p[i])].ReinterpretCast<T>();
    }
    void AToOut() const {
        PipeBarrier<PIPE_V>();
        DataCopy(out, a, kBytes);
    }
};

inline BinaryRepeatParams Binary(const Args& g) {
    return {g.Byte(4), g.Byte(5), g.Byte(6), g.Byte(7), g.Byte(8), g.Byte(9)};
}
inline UnaryRepeatParams Unary(const Args& g) { return {g.Short(4), g.Short(5), g.Byte(7), g.Byte(8)}; }

// Form 0: the first n elements; 1: the first n lanes; else a mask of bits.
template <class Count, class Masked>
void ByForm(const Args& g, Count count, Masked masked) {
    uint64_t bits[2] = {g.Mask(), static_cast<uint64_t>(g.p[2])};
    if (g.p[0] == 0) return count(static_cast<uint32_t>(g.p[1]));
    if (g.p[0] == 1) return masked(g.Mask());
    masked(bits);
}

struct Entry {
    const char* name;
    void (*kernel)(const Args&);
};

inline uint8_t* Memory(int which) {
    alignas(64) static uint8_t memory[3][kBytes];
    return memory[which];
}

// Copies everything in, runs the kernel, copies `out` back.
inline void Run(void (*kernel)(const Args&), const int64_t* numbers) {
    TPipe pipe;
    TBuf<> buffers[4];
    GlobalTensor<uint8_t> gm[3];
    for (int i = 0; i < 4; ++i) {
        pipe.InitBuffer(buffers[i], kBytes);
        if (i == 3) break;
        gm[i].SetGlobalBuffer(twin::GmOf(Memory(i)), kBytes);
        DataCopy(buffers[i].Get<uint8_t>(), gm[i], kBytes);
    }
    PipeBarrier<PIPE_ALL>();
    kernel({buffers[0].Get<uint8_t>(), buffers[1].Get<uint8_t>(), buffers[2].Get<uint8_t>(), buffers[3].Get<uint8_t>(),
            numbers});
    PipeBarrier<PIPE_ALL>();
    DataCopy(gm[0], buffers[0].Get<uint8_t>(), kBytes);
}

inline const char* RunNamed(const Entry* entry, const char* name, const uint8_t* a, const uint8_t* b, uint8_t* out,
                            const int64_t* numbers) {
    static char text[1024];
    while (strcmp(entry->name, name) != 0) ++entry;
    const uint8_t* given[3] = {out, a, b};
    twin::LaunchSpec spec;
    for (int m = 0; m < 3; ++m) {
        memcpy(Memory(m), given[m], kBytes);
        const uintptr_t at = reinterpret_cast<uintptr_t>(Memory(m));
        spec.ranges.push_back({at, at + kBytes, twin::GmKind::kTensor, false, nullptr, "gm"});
    }
    text[0] = '\0';
    try {
        twin::Device(0).Launch(spec, [&] { Run(entry->kernel, numbers); });
    } catch (const std::exception& error) {
        strncpy(text, error.what(), sizeof(text) - 1);
    }
    memcpy(out, Memory(0), kBytes);
    return text;
}

}  // namespace api

#define API_MAIN(entries)                                                                               \
    extern "C" const char* run_call(const char* name, const uint8_t* a, const uint8_t* b, uint8_t* out, \
                                    const int64_t* numbers) {                                           \
        return api::RunNamed(entries, name, a, b, out, numbers);                                        \
    }
