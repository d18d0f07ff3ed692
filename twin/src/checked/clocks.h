// Vector clocks: for every agent (a pipe of a core) the latest of its instructions that is known to be done.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

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
    uint32_t* At(ClockId id) {
        return chunks_[id / kChunk].get() + static_cast<size_t>(id % kChunk) * agents_;
    }
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
            chunks_.push_back(
                std::unique_ptr<uint32_t[]>(new uint32_t[static_cast<size_t>(kChunk) * agents_]));
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

}  // namespace twin::checked
