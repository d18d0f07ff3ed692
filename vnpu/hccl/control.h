// The control memory of a communicator: one mapping shared by its ranks, beside the windows and never in
// them.
//
//   page 0                   the failure that ended the communicator, if any
//   page 1 + r               rank r: barrier counter, the call it is in, its row of byte counts
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

inline uint64_t ControlBytes(int world) {
    const auto w = static_cast<uint64_t>(world);
    return kPage * (1 + w) + kChannelBytes * w * w;
}
inline Failure* FailureOf(uint8_t* control) { return reinterpret_cast<Failure*>(control); }
inline RankControl* RankOf(uint8_t* control, int rank) {
    return reinterpret_cast<RankControl*>(control + kPage * (1 + static_cast<uint64_t>(rank)));
}
inline Channel* ChannelOf(uint8_t* control, int world, int from, int to) {
    const auto w = static_cast<uint64_t>(world);
    const uint64_t index = static_cast<uint64_t>(from) * w + static_cast<uint64_t>(to);
    return reinterpret_cast<Channel*>(control + kPage * (1 + w) + kChannelBytes * index);
}
inline uint8_t* PieceOf(Channel* channel, uint64_t piece) {
    return reinterpret_cast<uint8_t*>(channel) + kPage + piece % kPieces * kPieceBytes;
}

}  // namespace vnpu
