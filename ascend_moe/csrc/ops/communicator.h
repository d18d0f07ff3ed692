// One rank's end of a communicator on the twin: its device, the windows of all ranks, the liveness of the
// peers.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "moe_distribute_context.h"
#include "twin/launch.h"
#include "window.h"

namespace ops {

class Communicator {
public:
    Communicator(int rank, int world, void* const* bases, uint64_t data_bytes, const int* live_fds);

    int rank() const { return rank_; }
    int world() const { return world_; }
    twin::Device& device() { return device_; }
    std::mutex& mutex() { return mutex_; }
    moe::WindowTable* table() { return &table_; }
    // Ranges of all windows; a launch adds its tensors.
    const std::vector<twin::GmRange>& ranges() const { return ranges_; }
    // Scratch of at least this many bytes, kept between launches.
    uint8_t* Workspace(uint64_t bytes);

    void MarkLost(int peer) { lost_[static_cast<size_t>(peer)].store(true); }
    void ForgetLost() {
        for (int peer = 0; peer < world_; ++peer) lost_[static_cast<size_t>(peer)].store(false);
    }
    void SetEpoch(uint32_t epoch);
    uint32_t Epoch() const;
    void* base(int rank) const { return bases_[static_cast<size_t>(rank)]; }
    // Says "this rank has failed" to one rank, or to itself.
    void PostAbort(int peer, uint32_t code, int culprit);

private:
    static void OnIdle(void* self);
    static bool PeerGone(void* self);
    void LookAtPeers();
    bool Gone(int peer) const;
    bool Arrived(int peer) const;
    bool Aborted() const;

    int rank_;
    int world_;
    std::vector<void*> bases_;
    std::vector<int> live_fds_;
    std::unique_ptr<std::atomic<bool>[]> lost_;
    moe::WindowTable table_ = {};
    std::vector<twin::GmRange> ranges_;
    std::vector<uint8_t> workspace_;
    twin::Device device_;
    std::mutex mutex_;
};

}  // namespace ops
