// One rank's communicator on the emulator: its device, all ranks' windows, the liveness of the peers.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "common/contexts.h"
#include "group_windows.h"
#include "twin/engine/copy_agent.h"
#include "twin/engine/launch.h"
#include "window.h"

namespace ops {

// Returns 0, or 1 when `call` has thrown.
template <class Call>
int Tried(const Call& call) {
    try {
        call();
        return 0;
    } catch (...) {
        return 1;
    }
}

// Returns what `make` has made, or null when it has thrown.
template <class Make>
void* Made(const Make& make) {
    try {
        return make();
    } catch (...) {
        return nullptr;
    }
}

class Communicator : public GroupWindows {
public:
    Communicator(int rank, int world, void* const* bases, uint64_t data_bytes, uint64_t registered_bytes,
                 const int* live_fds);

    twin::Device& device() { return device_; }
    std::mutex& mutex() { return mutex_; }
    ~Communicator();

    // Sets the communication context of later launches: moe::kContextTable (the default), A3 or A2. On A2 the
    // state area comes last.
    void UseContext(uint32_t kind);
    // A2 only: this many ranks share a server; 0: all share one. Other ranks are reached through windowsOut, with
    // intra_node_stores those of other servers only.
    void UseServers(uint32_t ranks_per_server, bool intra_node_stores);
    // How HCCL links the ranks of a server on several servers: by memory, by RDMA, or, on the CPU, by both, so that one
    // communicator serves all algorithms.
    enum class Links : int { kBoth, kMemory, kRdma };
    void UseLinks(Links links);
    void* context();
    uint8_t* registered(int rank) const { return data(rank) + data_bytes_; }
    // Code of the last op's algorithm; 0: none has run.
    uint32_t algorithm() const { return algorithm_; }
    void set_algorithm(uint32_t code) { algorithm_ = code; }
    // The blocks of this rank's registered area: null until the first one is asked for, or without such an area.
    RegisteredArea* registered_area() const { return registered_now_.load(std::memory_order_acquire); }
    std::shared_ptr<RegisteredArea> OpenRegisteredArea();  // also while an op runs
    void CloseRegisteredArea();
    // This rank's windowsOut, or null without servers.
    uint8_t* staging() const { return staging_; }
    uint64_t staging_bytes() const { return data_bytes_ + kStateAreaBytes; }
    // Whether an inter-node peer's status message, of either parity, begins at this address of this rank's window.
    bool IsInterNodeStatus(uintptr_t address) const;

    // Call around each launch: the agent that carries what the kernel posts to HCCL's server. `op`, `algorithm`,
    // `epoch` of the launch, 0 for a probe; hierarchy's arrivals are detected from other messages.
    void BeginLaunch(uint32_t op = 0, uint32_t algorithm = 0, uint32_t epoch = 0);
    void EndLaunch(bool failed);
    // Throws if a launch on an A2 context has not finalized HCCL's server.
    void CheckServed() const;

    // Ranges of all windows and of the context; a launch adds its tensors.
    // `algorithm`: of the op; hierarchy polls other places of the data area than window.
    const std::vector<twin::GmRange>& ranges(uint32_t algorithm = moe::kAlgorithmWindow) const {
        return algorithm == moe::kAlgorithmHierarchy ? relay_ranges_ : ranges_;
    }
    // Scratch of at least this many bytes, reused by later launches.
    uint8_t* Workspace(uint64_t bytes);

    void MarkLost(int peer) { lost_[static_cast<size_t>(peer)].store(true); }
    void ForgetLost() {
        for (int peer = 0; peer < world_; ++peer) lost_[static_cast<size_t>(peer)].store(false);
    }
    void SetEpoch(uint32_t epoch);
    uint32_t EpochOfLaunch(uint32_t part) const;  // of the next one
    // Writes an abort block ("this rank has failed, in the op of `epoch`") for one rank, or for this rank itself.
    void PostAbort(int peer, uint32_t epoch, uint32_t code, int culprit);

private:
    static void OnIdle(void* self);
    static bool PeerGone(void* self);
    void LookAtPeers();
    void TellInOp(bool in_op);
    bool Gone(int peer) const;
    bool Aborted() const;
    void FillTable();
    void FillContext();
    void ListRanges();
    void ListAreas(bool levels);
    twin::Reach ReachOf(int peer) const;
    void ListData(int rank, bool levels, uint32_t* doorbell);
    void DropStaging();

    std::vector<int> live_fds_;
    std::unique_ptr<std::atomic<bool>[]> lost_;
    uint32_t algorithm_ = 0;
    std::mutex registered_mutex_;
    std::shared_ptr<RegisteredArea> registered_area_;
    std::atomic<RegisteredArea*> registered_now_{nullptr};
    Links links_ = Links::kBoth;
    uint8_t* staging_ = nullptr;
    moe::WindowTable table_ = {};
    std::unique_ptr<uint8_t, void (*)(void*)> blob_{nullptr, free};  // of an HCCL context
    std::unique_ptr<twin::CopyAgent> agent_;
    std::vector<twin::GmRange> ranges_;
    std::vector<twin::GmRange> relay_ranges_;  // for hierarchy, where ranks are on several servers
    std::vector<uint8_t> workspace_;
    twin::Device device_;
    std::mutex mutex_;
};

}  // namespace ops
