// Vector clocks: for every agent (a pipe of a core) the latest of its instructions that is known to be done.
// Shadow memory: the last writer and readers of all bytes. It has one entry for each 32-byte block, or one
// for each byte where parts of a block are used.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "twin/engine/engine.h"

namespace twin::checked {

using ClockId = uint32_t;
constexpr ClockId kNoClock = 0;

// Joins two clocks: the later of both for every agent.
inline void JoinClock(std::vector<uint32_t>& into, const std::vector<uint32_t>& from) {
    for (size_t i = 0; i < into.size(); ++i) into[i] = into[i] > from[i] ? into[i] : from[i];
}

// Counted references; 0 is no clock.
class ClockPool {
public:
    void Reset(uint32_t agents) {
        if (agents != agents_) {
            chunks_.clear();
            agents_ = agents;
        }
        free_.clear();
        used_ = 1;
    }
    uint32_t agents() const { return agents_; }
    uint32_t* At(ClockId id) { return chunks_[id / kChunk].get() + static_cast<size_t>(id % kChunk) * agents_; }
    ClockId Copy(const uint32_t* from) {
        const ClockId id = New();
        memcpy(At(id), from, agents_ * sizeof(uint32_t));
        return id;
    }
    void Hold(ClockId id) {
        if (id != kNoClock) ++references_[id];
    }
    void Drop(ClockId id) {
        if (id != kNoClock && --references_[id] == 0) free_.push_back(id);
    }
    void Join(uint32_t* into, ClockId from) {
        if (from == kNoClock) return;
        const uint32_t* other = At(from);
        for (uint32_t i = 0; i < agents_; ++i) into[i] = into[i] > other[i] ? into[i] : other[i];
    }

private:
    static constexpr uint32_t kChunk = 256;
    ClockId New() {
        if (!free_.empty()) {
            const ClockId id = free_.back();
            free_.pop_back();
            references_[id] = 1;
            return id;
        }
        const ClockId id = used_++;
        while (id / kChunk >= chunks_.size())
            chunks_.push_back(std::unique_ptr<uint32_t[]>(new uint32_t[static_cast<size_t>(kChunk) * agents_]));
        if (references_.size() <= id) references_.resize(chunks_.size() * kChunk);
        references_[id] = 1;
        return id;
    }
    uint32_t agents_ = 0;
    uint32_t used_ = 1;
    std::vector<std::unique_ptr<uint32_t[]>> chunks_;
    std::vector<uint32_t> references_;
    std::vector<ClockId> free_;
};

// An instruction that touched memory. Its number orders the instructions of one core as the program does.
struct Site {
    const char* name;
    Loc loc;
    uint16_t agent;
    bool write;
    bool atomic;
};

// Numbers of sites; 0: nobody. A read entry with kMany set is an index of a list.
struct Cell {
    uint32_t write = 0;
    uint32_t reads[3] = {0, 0, 0};
    bool operator==(const Cell& other) const {
        return write == other.write && reads[0] == other.reads[0] && reads[1] == other.reads[1] &&
               reads[2] == other.reads[2];
    }
};
constexpr uint32_t kMany = 0x80000000u;

struct Block {
    Cell whole;
    uint32_t split = 0;   // index of 32 cells, or 0
    uint32_t filled = 0;  // UB: bytes that have been written, one bit each
    ClockId release = kNoClock;
    uint8_t sync = 0;  // GM: 1 a flag, its accesses order others; 2 one that the kernel has declared
};

// An access that is being checked.
struct Toucher {
    uint32_t number;
    uint16_t agent;
    bool write;
    bool atomic;
    bool in_order;  // the agent's pipe completes in order
    const uint32_t* clock;
    bool ub = false;
};

class Sites {
public:
    void Reset() { sites_.assign(1, Site{}); }
    uint32_t Add(const Site& site) {
        sites_.push_back(site);
        return static_cast<uint32_t>(sites_.size() - 1);
    }
    const Site& operator[](uint32_t number) const { return sites_[number]; }
    Site& operator[](uint32_t number) { return sites_[number]; }
    uint32_t last() const { return static_cast<uint32_t>(sites_.size() - 1); }

private:
    std::vector<Site> sites_;
};

constexpr uint32_t kPageBytes = 4096;
constexpr uint32_t kPageBlocks = kPageBytes / kBlockBytes;

struct Page {
    uintptr_t begin;
    bool written;
    Block blocks[kPageBlocks];
};

class Shadow {
public:
    struct Conflict {
        uint32_t other = 0;   // the site that is not ordered before
        bool wrote = false;   // it wrote these bytes
        uint64_t offset = 0;  // first byte, from the start of the range
        bool uninitialised = false;
    };

    explicit Shadow(Sites& sites) : sites_(sites) {}
    void Reset(bool relaxed_scalar_reads);

    // Checks and records one contiguous access; `blocks` is the block that holds the first byte, `lead` the
    // bytes before it there. The range must not leave the array.
    Conflict Touch(Block* blocks, uint32_t lead, uint64_t bytes, const Toucher& t);
    // The same of a part of a flag's block, and recorded in any case.
    Conflict Note(Block& block, uint32_t lead, uint32_t bytes, const Toucher& t);
    // UB: whether all bytes have been written. `whole_blocks`: only blocks without any written byte count as
    // unwritten.
    static Conflict Filled(const Block* blocks, uint32_t lead, uint64_t bytes, bool whole_blocks);
    static void Fill(Block* blocks, uint32_t lead, uint64_t bytes, bool filled);

    Page& PageOf(uintptr_t address);
    Page* FindPage(uintptr_t address);
    template <class Visit>
    void ForEachPage(Visit&& visit) const {
        for (uint32_t i = 0; i < used_; ++i) visit(*pages_[i]);
    }

private:
    bool Ordered(uint32_t other, const Toucher& t) const;
    bool Conflicts(uint32_t other, const Toucher& t) const;
    uint32_t Check(const Cell& cell, const Toucher& t, bool& wrote) const;
    void Record(Cell& cell, const Toucher& t);
    void AddRead(Cell& cell, const Toucher& t);
    Cell* Split(Block& block);

    Sites& sites_;
    bool relaxed_ = false;
    std::vector<Cell> cells_;  // 32 a split block; index 0 is unused
    std::vector<uint32_t> free_splits_;
    std::vector<std::vector<uint32_t>> many_;
    uint32_t many_used_ = 0;
    std::vector<std::unique_ptr<Page>> pages_;
    uint32_t used_ = 0;
    std::unordered_map<uintptr_t, Page*> by_address_;
    static constexpr uint32_t kRecent = 64;
    Page* recent_[kRecent] = {};
};

}  // namespace twin::checked
