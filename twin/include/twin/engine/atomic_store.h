// Stores and loads of memory that other cores or other processes poll: 32-byte blocks, atomics, doorbells.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "twin/engine/core.h"
#include "twin/math/numeric.h"

namespace twin {

// A CPU gives no 32-byte atomicity, so word 0 of a block is published last, with release, and read first and
// last: a reader that gets the new word 0 gets the whole new block. There are no fences, because
// ThreadSanitizer does not understand them.
inline void PublishBlocks(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at += kBlockBytes) {
        const uint64_t piece = bytes - at < kBlockBytes ? bytes - at : kBlockBytes;
        const bool whole = piece == kBlockBytes && reinterpret_cast<uintptr_t>(to + at) % kBlockBytes == 0;
        if (!whole) {
            memcpy(to + at, from + at, piece);
            continue;
        }
        uint32_t words[8];
        memcpy(words, from + at, sizeof(words));
        uint32_t* block = reinterpret_cast<uint32_t*>(to + at);
        for (int i = 1; i < 8; ++i) __atomic_store_n(block + i, words[i], __ATOMIC_RELAXED);
        __atomic_store_n(block, words[0], __ATOMIC_RELEASE);
    }
}

// Reads the words of a block after its word 0: none of them is older than that word 0. On x86 loads of any
// width keep their order, so a few wide loads are enough.
inline void ReadBlockWords(uint32_t* words, const uint32_t* block) {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
    asm volatile("" ::: "memory");
    memcpy(words, block, kBlockBytes);
    asm volatile("" ::: "memory");
#else
    // Acquire, so that the second read of word 0 comes after these.
    for (uint32_t i = 1; i < kBlockBytes / sizeof(uint32_t); ++i)
        words[i] = __atomic_load_n(block + i, __ATOMIC_ACQUIRE);
#endif
}

inline void ReadBlocks(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    constexpr int kTries = 16;
    for (uint64_t at = 0; at < bytes; at += kBlockBytes) {
        const uint64_t piece = bytes - at < kBlockBytes ? bytes - at : kBlockBytes;
        const bool whole = piece == kBlockBytes && reinterpret_cast<uintptr_t>(from + at) % kBlockBytes == 0;
        if (!whole) {
            memcpy(to + at, from + at, piece);
            continue;
        }
        const uint32_t* block = reinterpret_cast<const uint32_t*>(from + at);
        uint32_t words[kBlockBytes / sizeof(uint32_t)];
        for (int attempt = 0; attempt < kTries; ++attempt) {
            const uint32_t first = __atomic_load_n(block, __ATOMIC_ACQUIRE);
            ReadBlockWords(words, block);
            words[0] = first;
            if (__atomic_load_n(block, __ATOMIC_RELAXED) == first) break;
        }
        memcpy(to + at, words, sizeof(words));
    }
}

// Wakes the rank that sleeps on this word, if any. The word before it counts sleepers.
void RingDoorbell(uint32_t* doorbell);

template <class T>
constexpr uint8_t AtomicTypeOf() {
    if (std::is_same<T, float>::value) return 1;
    if (std::is_same<T, half>::value) return 2;
    if (std::is_same<T, bfloat16_t>::value) return 3;
    if (std::is_same<T, int32_t>::value) return 4;
    if (std::is_same<T, int16_t>::value) return 5;
    if (std::is_same<T, int8_t>::value) return 6;
    return 0;
}

template <class T>
inline T Combine(uint8_t op, T a, T b) {
    using Wide = typename std::conditional<std::is_integral<T>::value, int64_t, float>::type;
    const Wide x = static_cast<Wide>(a), y = static_cast<Wide>(b);
    return static_cast<T>(op == 1 ? x + y : op == 2 ? (x > y ? x : y) : (x < y ? x : y));
}

template <class T>
inline void AtomicUpdate(uint8_t op, uint8_t* to, const uint8_t* from, uint64_t bytes) {
    using Bits = typename std::conditional<sizeof(T) == 4, uint32_t,
                                           typename std::conditional<sizeof(T) == 2, uint16_t, uint8_t>::type>::type;
    if constexpr (sizeof(T) <= 4 && AtomicTypeOf<T>() != 0) {
        for (uint64_t at = 0; at < bytes; at += sizeof(T)) {
            Bits* cell = reinterpret_cast<Bits*>(to + at);
            T addend;
            memcpy(&addend, from + at, sizeof(T));
            Bits seen = __atomic_load_n(cell, __ATOMIC_RELAXED), next;
            do {
                T value;
                memcpy(&value, &seen, sizeof(T));
                value = Combine<T>(op, value, addend);
                memcpy(&next, &value, sizeof(T));
            } while (!__atomic_compare_exchange_n(cell, &seen, next, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
        }
    }
}

}  // namespace twin
