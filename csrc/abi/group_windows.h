// The windows of a group's ranks as one rank uses them: where their areas lie, and which messages have arrived.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "protocol/window.h"
#include "window.h"

namespace ops {

inline uint32_t* Word(uint8_t* area, uint64_t offset) { return reinterpret_cast<uint32_t*>(area + offset); }

class GroupWindows {
public:
    GroupWindows(int rank, int world, void* const* bases, uint64_t data_bytes, uint64_t registered_bytes)
        : rank_(rank),
          world_(world),
          bases_(bases, bases + world),
          data_bytes_(data_bytes),
          registered_bytes_(registered_bytes) {}
    // A rank's windows as mapped by another process, by what it has written about itself. Without that the window
    // contains a copy of the state area.
    GroupWindows(int rank, int world, void* const* bases);

    int rank() const { return rank_; }
    int world() const { return world_; }
    // Where an area of a rank's window begins in this process.
    uint8_t* data(int rank) const;
    uint8_t* state(int rank) const;
    void* base(int rank) const { return bases_[static_cast<size_t>(rank)]; }
    uint64_t data_bytes() const { return data_bytes_; }
    uint64_t registered_bytes() const { return registered_bytes_; }
    uint32_t context_kind() const { return kind_; }
    bool inter_node(int peer) const;
    // Whether a rank is in a launch, by its window.
    bool InOp(int peer) const;
    uint32_t Epoch() const;
    // One line about this rank: process, op, algorithm, epoch, phase, nanoseconds in the op, the ranks that it waits
    // for, its fatal error and the rank that this is about; separated by tabs.
    std::string Text() const;

protected:
    bool Arrived(int peer) const;
    // The status message of a peer, in this rank's window.
    uint8_t* StatusMessageOf(int peer, uint32_t parity) const;
    void WriteLabel() const;

    int rank_;
    int world_;
    std::vector<void*> bases_;
    uint64_t data_bytes_;
    uint64_t registered_bytes_;
    uint32_t kind_ = 0;
    uint32_t ranks_per_server_ = 0;
    int intra_node_ranks_ = 1;  // that stores reach
    bool several_servers_ = false;
    bool levels_ = false, dispatches_ = false;  // of this launch

private:
    bool Delivered(uint8_t* message) const;
    bool Sent(int peer) const;
    bool ArrivedByLevels(uint32_t peer) const;
    const char* Phase(const std::vector<int>& awaited) const;
};

}  // namespace ops
