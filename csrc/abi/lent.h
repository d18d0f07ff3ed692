// The blocks of a rank's own lent area: window memory that its caller fills and a combine publishes where it
// lies. A block is held while its tensor lives. A direct combine spends it: peers read it until this rank has
// completed its next op. Its bytes are free again when it is not held, and was never spent or is read no
// more.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace ops {

class LentArea {
public:
    enum class Use {
        kGood,        // or in no lent memory at all
        kSpent,       // by an earlier combine
        kMisaligned,  // not on a 32-byte block of its own
        kNoBlock,     // memory of no block, or beyond the end of one
        kElsewhere,   // in the area of another communicator, or of a closed one
    };
    struct Found {
        Use use;
        uint32_t generation;
        uint32_t detail;  // kSpent: the epoch of that combine; kElsewhere: the rank whose area it is
    };
    // Why a combine may not publish rows in this state; null for kGood.
    static const char* Refusal(const Found& found, char* text, uint64_t bytes);

    struct Grant {
        uint64_t offset;
        uint32_t generation;  // never 0
        uint32_t held;        // no room: blocks that tensors hold
        uint64_t needed;      // no room: bytes that would do
    };

    // `rank` is whose it is.
    LentArea(int rank, uint8_t* base, uint64_t bytes);
    ~LentArea();
    LentArea(const LentArea&) = delete;
    LentArea& operator=(const LentArea&) = delete;

    uint8_t* base() const { return base_; }
    bool Contains(const void* address) const;
    // False: no room.
    bool Take(uint64_t bytes, Grant& grant);
    // The tensor of a block has died. True: it was the last one of an area that is closed.
    bool Release(uint32_t generation);
    // Nothing is taken any more. True: no tensor lives.
    bool Close();
    // May a combine publish these rows?
    Found Find(const void* rows, uint64_t bytes) const;
    // An op has completed, so peers have left the ones before it. `generation`: of the block that it spent.
    void Complete(uint32_t generation, uint32_t epoch, bool left);

    // An address in the area of another communicator, or of a closed one: its rank, or -1.
    static int Elsewhere(const LentArea* own, const void* address);

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
