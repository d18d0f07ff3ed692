// A rank's window in host memory: the addresses inside it, and the blocks of its own registered area.
//
// Registered memory is filled by the caller, and a combine publishes it without a copy. A block is held while its
// tensor lives. A direct combine consumes it: peers read it until this rank has completed its next op. The bytes of a
// block are free again when no tensor holds it and no peer reads it.
#pragma once

#include <time.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "protocol/window.h"

namespace ops {

// The first page is the emulator's: a count of sleepers and the doorbell that wakes them, in its own cache line whether
// its rank is in an op, its label, then words and texts of ascend_moe/comm: the votes (vote.py), whether the rank has
// closed its communicator, and its side of an opening (peers.py). No kernel uses it.
constexpr uint64_t kHeaderBytes = 4096;
constexpr uint64_t kSleepersOffset = 64;
constexpr uint64_t kDoorbellOffset = kSleepersOffset + sizeof(uint32_t);
constexpr uint64_t kInOpOffset = 256;
constexpr uint64_t kLabelOffset = 320;
constexpr uint64_t kBallotOffset = 512;
constexpr uint64_t kBallotWords = (kHeaderBytes - kBallotOffset) / sizeof(uint32_t);
constexpr uint64_t kClosedWord = 63;  // of the votes' words: 1 once the rank has closed its communicator
constexpr uint64_t kStateAreaBytes = moe::kMiB;

// Header, state, data, registered area; on A2 contexts the state area comes last.
inline uint64_t WindowBytes(uint64_t data_bytes, uint64_t registered_bytes) {
    return kHeaderBytes + kStateAreaBytes + data_bytes + registered_bytes;
}
inline uint8_t* StateOf(void* base) { return static_cast<uint8_t*>(base) + kHeaderBytes; }
inline uint8_t* DataOf(void* base) { return static_cast<uint8_t*>(base) + kHeaderBytes + kStateAreaBytes; }
inline uint32_t* DoorbellOf(void* base) {
    return reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(base) + kDoorbellOffset);
}
inline uint32_t* InOpOf(void* base) { return reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(base) + kInOpOffset); }
inline uint32_t* ClosedOf(void* base) {
    return reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(base) + kBallotOffset) + kClosedWord;
}

// Copies a text, as much as fits. Returns the bytes that all of it takes.
uint64_t GiveText(const std::string& from, char* to, uint64_t bytes);

inline uint64_t MonotonicNanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// What a rank writes about itself for readers outside of it (am_group_text): its communicator, and its last launch.
struct WindowLabel {
    uint32_t magic;
    uint32_t rank, world, pid;
    uint32_t context_kind, ranks_per_server, intra_node_ranks, several_servers;
    uint64_t data_bytes, registered_bytes;
    uint32_t op, algorithm, epoch;  // op 0: a probe, or none
    uint64_t started;

    void Begin(uint32_t new_op, uint32_t new_algorithm, uint32_t new_epoch) {
        op = new_op;
        algorithm = new_algorithm;
        epoch = new_epoch;
        started = MonotonicNanoseconds();
    }
};
constexpr uint32_t kLabelMagic = 0x4C41424C;
static_assert(kLabelOffset + sizeof(WindowLabel) <= kBallotOffset, "the label overlaps the votes");
inline WindowLabel* LabelOf(void* base) {
    return reinterpret_cast<WindowLabel*>(static_cast<uint8_t*>(base) + kLabelOffset);
}

// ---- the registered area ----

constexpr int kRegisteredRefused = -1;  // in the place of an error code

class RegisteredArea {
public:
    enum class Use {
        kGood,        // or in no registered memory at all
        kConsumed,    // by an earlier combine
        kMisaligned,  // not on a 32-byte block of its own
        kNoBlock,     // memory of no block, or beyond the end of one
        kElsewhere,   // in the area of another communicator, or of a closed one
        kCommQuant,   // rows travel as codes (comm_quant_mode 2), which cannot be made in place
    };
    // The state of the memory in which a combine's rows lie.
    struct State {
        Use use;
        uint32_t generation;
        uint32_t detail;  // kConsumed: the epoch of that combine; kElsewhere: the rank whose area it is
    };
    // Why a combine may not publish rows in this state; empty for kGood.
    static std::string Refusal(const State& state);

    struct Grant {
        uint64_t offset;
        uint32_t generation;  // never 0
        uint32_t held;        // no room: blocks that tensors hold
        uint64_t needed;      // no room: bytes that the area would need
    };

    // `rank` is whose it is.
    RegisteredArea(int rank, uint8_t* base, uint64_t bytes);
    ~RegisteredArea();

    uint8_t* base() const { return base_; }
    bool Contains(const void* address) const;
    // Returns false if there is no room.
    bool Take(uint64_t bytes, Grant& grant);
    // The tensor of a block was freed. Returns true if it was the last one of a closed area.
    bool Release(uint32_t generation);
    // No more blocks are registered. Returns true if no tensor lives in the area.
    bool Close();
    // Whether a combine may publish these rows.
    State StateOf(const void* rows, uint64_t bytes) const;
    // An op has completed, so peers have left the ones before it. `generation`: of the block that it consumed.
    void Complete(uint32_t generation, uint32_t epoch, bool left);

    // For rows outside the own area: kElsewhere if they lie in another communicator's or a closed one, otherwise kGood.
    static State ElsewhereOf(const RegisteredArea* own, const void* rows);

private:
    struct Block {
        uint64_t bytes;
        uint32_t generation;
        uint32_t epoch = 0;  // of the combine that consumed it; 0: none
        bool held = true;
        bool quiet = true;  // no peer reads it
    };
    using Blocks = std::map<uint64_t, Block>;  // by offset

    void Forget(Blocks::iterator block);

    const int rank_;
    uint8_t* const base_;
    const uint64_t bytes_;
    mutable std::mutex mutex_;
    Blocks blocks_;
    uint32_t generation_ = 0;
    uint32_t held_ = 0;
    bool closed_ = false;
};

}  // namespace ops
