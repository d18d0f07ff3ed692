// The control memory of a communicator, shared by its ranks. The windows follow it in the same file, and are
// mapped apart.
//
//   page 0                   its name, and the failure that ended it, if any
//   page 1 + r, r < 256      rank r: who it is, barrier counter, the call it is in, its row of byte counts
//   then, per (from, to)     a channel for point-to-point data: counters and a ring of two pieces
#pragma once

#include <atomic>
#include <cstdint>

#include "abi.h"

namespace vnpu {

constexpr uint64_t kPage = 4096;
constexpr int kMaxRanks = 256;
constexpr uint64_t kPieceBytes = 512 << 10;
constexpr uint64_t kPieces = 2;

struct Failure {
    std::atomic<uint32_t> state;  // 0 none, 1 being written, 2 readable
    int32_t code;
    int32_t culprit;
    int32_t reporter;
    char text[1024];
};

struct Front {
    Failure failure;
    char name[48];
};
static_assert(sizeof(Front) <= kPage);

// What a rank calls; equal on all ranks or the call is an error.
struct Call {
    char op[24];
    uint64_t sequence;
    uint64_t count;
    int32_t type;
    int32_t reduce;  // -1: none
    int32_t root;    // -1: none

    bool operator==(const Call& other) const;
};

struct RankControl {
    std::atomic<uint32_t> joined;  // 0 nobody, 1 being written, 2 the next three are readable
    int32_t pid;
    int32_t world;
    uint64_t data_bytes;
    std::atomic<uint64_t> arrived;
    std::atomic<uint32_t> left;
    alignas(64) Call call;
    alignas(64)
        uint64_t row[kMaxRanks];  // bytes that this rank sends to each other, in collectives of unequal size
};
static_assert(sizeof(RankControl) <= kPage);

struct Channel {
    std::atomic<uint64_t> written;  // pieces
    alignas(64) std::atomic<uint64_t> read;
    uint64_t piece_bytes[kPieces];
    uint64_t message_bytes[kPieces];
};

constexpr uint64_t kChannelBytes = kPage + kPieces * kPieceBytes;

constexpr uint64_t kFrontBytes = kPage * (1 + kMaxRanks);
constexpr uint64_t kMapAlign = 64 << 10;  // the largest page size in use

inline uint64_t ControlBytes(int world) {
    const auto w = static_cast<uint64_t>(world);
    return (kFrontBytes + kChannelBytes * w * w + kMapAlign - 1) / kMapAlign * kMapAlign;
}
inline Failure* FailureOf(uint8_t* control) { return &reinterpret_cast<Front*>(control)->failure; }
inline RankControl* RankOf(uint8_t* control, int rank) {
    return reinterpret_cast<RankControl*>(control + kPage * (1 + static_cast<uint64_t>(rank)));
}
inline Channel* ChannelOf(uint8_t* control, int world, int from, int to) {
    const auto w = static_cast<uint64_t>(world);
    const uint64_t index = static_cast<uint64_t>(from) * w + static_cast<uint64_t>(to);
    return reinterpret_cast<Channel*>(control + kFrontBytes + kChannelBytes * index);
}
inline uint8_t* PieceOf(Channel* channel, uint64_t piece) {
    return reinterpret_cast<uint8_t*>(channel) + kPage + piece % kPieces * kPieceBytes;
}

}  // namespace vnpu
