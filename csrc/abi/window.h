// A rank's window in host memory: the addresses inside it, and the blocks of its own lent area.
//
// Lent memory is filled by the caller, and a combine publishes it without copying it. A block is held while
// its tensor lives. A direct combine spends it: peers read it until this rank has completed its next op. The
// bytes of a block are free again when no tensor holds it and no peer reads it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "protocol/window.h"

namespace ops {

// The first page is the twin's: a count of sleepers and the doorbell that wakes them, in a cache line of its own
// whether its rank is in an op, and behind that words and texts of ascend_moe/comm: the votes (vote.py), whether the
// rank has closed its communicator, and its side of an opening (peers.py). No kernel reads or writes it.
constexpr uint64_t kHeaderBytes = 4096;
constexpr uint64_t kSleepersOffset = 64;
constexpr uint64_t kDoorbellOffset = kSleepersOffset + sizeof(uint32_t);
constexpr uint64_t kInOpOffset = 256;
constexpr uint64_t kBallotOffset = 512;
constexpr uint64_t kBallotWords = (kHeaderBytes - kBallotOffset) / sizeof(uint32_t);
constexpr uint64_t kClosedWord = 63;  // of the votes' words: 1 once the rank has closed its communicator
constexpr uint64_t kStateAreaBytes = moe::kMiB;

// Header, state, data, lent area; on A2 contexts the state area comes last.
inline uint64_t WindowBytes(uint64_t data_bytes, uint64_t lent_bytes) {
    return kHeaderBytes + kStateAreaBytes + data_bytes + lent_bytes;
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

// ---- the lent area ----

constexpr int kLentRefused = -1;  // in the place of an error code

class LentArea {
public:
    enum class Use {
        kGood,        // or in no lent memory at all
        kSpent,       // by an earlier combine
        kMisaligned,  // not on a 32-byte block of its own
        kNoBlock,     // memory of no block, or beyond the end of one
        kElsewhere,   // in the area of another communicator, or of a closed one
        kCommQuant,   // rows travel as codes (comm_quant_mode 2), which cannot be made where they lie
    };
    // The state of the memory in which a combine's rows lie.
    struct State {
        Use use;
        uint32_t generation;
        uint32_t detail;  // kSpent: the epoch of that combine; kElsewhere: the rank whose area it is
    };
    // The reason why a combine may not publish rows in this state; null for kGood.
    static const char* Refusal(const State& state, char* text, uint64_t bytes);

    struct Grant {
        uint64_t offset;
        uint32_t generation;  // never 0
        uint32_t held;        // no room: blocks that tensors hold
        uint64_t needed;      // no room: bytes that the area would need
    };

    // `rank` is whose it is.
    LentArea(int rank, uint8_t* base, uint64_t bytes);
    ~LentArea();

    uint8_t* base() const { return base_; }
    bool Contains(const void* address) const;
    // False: no room.
    bool Take(uint64_t bytes, Grant& grant);
    // The tensor of a block has died. True: it was the last one of an area that is closed.
    bool Release(uint32_t generation);
    // No more blocks are lent. True when no tensor lives in the area.
    bool Close();
    // May a combine publish these rows?
    State StateOf(const void* rows, uint64_t bytes) const;
    // An op has completed, so peers have left the ones before it. `generation`: of the block that it spent.
    void Complete(uint32_t generation, uint32_t epoch, bool left);

    // Of rows outside the own area: kElsewhere in that of another communicator, or of a closed one; else kGood.
    static State ElsewhereOf(const LentArea* own, const void* rows);

private:
    struct Block {
        uint64_t bytes;
        uint32_t generation;
        uint32_t epoch = 0;  // of the combine that spent it; 0: none has
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
