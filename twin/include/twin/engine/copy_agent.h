// The agent that executes Hccl::BatchWrite beside the cores. It has a queue for each peer: copies of one
// queue are made in order, copies of different queues in any order. Every 32 bytes become visible on their
// own.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "twin/engine/atomic_store.h"

namespace twin {

// One contiguous copy from this rank's GM to a peer's window.
struct CopyItem {
    uintptr_t from;
    uintptr_t to;
    uint64_t bytes;
    uint32_t peer;
    uint32_t* doorbell;  // of the range written, or null
    uint32_t clock = 0;  // the checked engine's, of the core that posted it
};

// The server of a kernel's Hccl object, one for each rank and group. One core at a time posts.
class CopyAgent {
public:
    virtual ~CopyAgent() = default;
    // Queues a list of items as one task. Tasks count from 1 on within a launch; the number is returned.
    virtual uint32_t Post(std::vector<CopyItem> items, const Loc& loc) = 0;
    // How many tasks are complete: those numbered up to the result.
    virtual uint32_t Finished() = 0;
    // A launch begins: nothing is queued and no task is counted.
    virtual void Begin() = 0;
    // The kernel has ended; what it posted still goes out, unless it failed.
    virtual void End(bool failed) = 0;
};

// Makes the agent of one rank and group: a thread in the fast engine; in the checked engine the schedule
// moves it.
std::unique_ptr<CopyAgent> MakeCopyAgent();

// The queues of an agent. An engine calls Step, which moves the next 32 bytes of one peer's queue.
class CopyQueues {
public:
    uint32_t Add(std::vector<CopyItem> items) {
        ++posted_;
        remaining_.push_back(static_cast<uint32_t>(items.size()));
        for (CopyItem& item : items) {
            while (queues_.size() <= item.peer) queues_.emplace_back();
            queues_[item.peer].push_back({item, 0, posted_, 0});
        }
        return posted_;
    }
    uint32_t peers() const { return static_cast<uint32_t>(queues_.size()); }
    bool Pending(uint32_t peer) const { return !queues_[peer].empty(); }
    bool Pending() const {
        for (uint32_t peer = 0; peer < peers(); ++peer) {
            if (Pending(peer)) return true;
        }
        return false;
    }
    uint32_t Finished() const {
        uint32_t done = 0;
        while (done < remaining_.size() && remaining_[done] == 0) ++done;
        return done;
    }
    void Clear() { *this = CopyQueues(); }

    // Cuts the first item of a queue at multiples of 512 bytes of its destination. Returns how many blocks of it are
    // left, 0 in the middle of a block.
    uint32_t Cut(uint32_t peer) {
        std::deque<Waiting>& queue = queues_[peer];
        if (queue.front().moved != 0) return 0;
        if (queue.front().number == 0) {
            const Waiting whole = queue.front();
            queue.pop_front();
            --remaining_[whole.task - 1];
            ++cut_;
            for (uint64_t end = whole.item.bytes; end > 0;) {
                const uint64_t last = (whole.item.to + end - 1) / kCutBytes * kCutBytes;
                const uint64_t begin = last > whole.item.to ? last - whole.item.to : 0;
                CopyItem block = whole.item;
                block.from += begin;
                block.to += begin;
                block.bytes = end - begin;
                queue.push_front({block, 0, whole.task, cut_});
                ++remaining_[whole.task - 1];
                end = begin;
            }
        }
        uint32_t blocks = 0;
        while (blocks < queue.size() && queue[blocks].number == queue.front().number) ++blocks;
        return blocks;
    }
    // Of the blocks that Cut has counted, this moves next.
    void Prefer(uint32_t peer, uint32_t block) { std::swap(queues_[peer][0], queues_[peer][block]); }

    // The piece that Step would move now: at most 32 bytes, aligned so at its destination.
    CopyItem Next(uint32_t peer) const {
        const Waiting& first = queues_[peer].front();
        CopyItem piece = first.item;
        piece.from += first.moved;
        piece.to += first.moved;
        const uint64_t to_boundary = kBlockBytes - piece.to % kBlockBytes;
        const uint64_t left = first.item.bytes - first.moved;
        piece.bytes = left < to_boundary ? left : to_boundary;
        return piece;
    }
    // Counts `bytes` of Next as moved without copying them: for engines that copy themselves. True at the end
    // of an item.
    bool Advance(uint32_t peer, uint64_t bytes) {
        Waiting& first = queues_[peer].front();
        first.moved += bytes;
        if (first.moved < first.item.bytes) return false;
        --remaining_[first.task - 1];
        queues_[peer].pop_front();
        return true;
    }
    void Step(uint32_t peer) {
        const CopyItem piece = Next(peer);
        uint8_t block[kBlockBytes];
        const uint8_t* from = reinterpret_cast<const uint8_t*>(piece.from);
        ReadBlocks(block, from, piece.bytes);
        PublishBlocks(reinterpret_cast<uint8_t*>(piece.to), block, piece.bytes);
        if (Advance(peer, piece.bytes) && piece.doorbell != nullptr) RingDoorbell(piece.doorbell);
    }

private:
    struct Waiting {
        CopyItem item;
        uint64_t moved;
        uint32_t task;
        uint32_t number;  // of the item that it is a block of; 0: it is no block
    };
    static constexpr uint64_t kCutBytes = 512;
    std::vector<std::deque<Waiting>> queues_;  // by peer
    std::vector<uint32_t> remaining_;          // items of each task
    uint32_t posted_ = 0;
    uint32_t cut_ = 0;  // items that are
};

}  // namespace twin
