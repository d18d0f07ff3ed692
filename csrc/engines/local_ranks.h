// All ranks of a communicator in this process, for the engines that run them together: their windows, each rank's
// communicator handle, and an op of a rank.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#include "abi/ascend_moe.h"
#include "abi/op_launch.h"
#include "twin/engine/explore.h"

namespace ops {

class LocalRanks {
public:
    LocalRanks(uint32_t world, uint64_t data_bytes, uint64_t registered_bytes) {
        if (world == 0 || world > moe::kMaxWorld) throw std::invalid_argument("ranks");
        const uint64_t bytes = WindowBytes(data_bytes, registered_bytes);
        for (uint32_t rank = 0; rank < world; ++rank) {
            windows_.emplace_back(am_window_alloc(bytes), Unmap{bytes});
            if (windows_.back() == nullptr) throw std::bad_alloc();
        }
        std::vector<void*> bases;
        for (const auto& window : windows_) bases.push_back(window.get());
        for (uint32_t rank = 0; rank < world; ++rank) {
            comms_.push_back(std::make_unique<Communicator>(static_cast<int>(rank), static_cast<int>(world),
                                                            bases.data(), data_bytes, registered_bytes, nullptr));
        }
    }

    // A2 contexts in which this many ranks share a server; 0: window tables, all ranks share one server.
    void UseServers(uint32_t ranks_per_server, bool intra_node_stores) {
        for (const auto& comm : comms_) {
            comm->UseContext(ranks_per_server == 0 ? moe::kContextTable : moe::kContextA2);
            comm->UseServers(ranks_per_server, intra_node_stores);
        }
    }

    size_t size() const { return comms_.size(); }
    Communicator& operator[](size_t rank) { return *comms_[rank]; }
    Communicator& Of(int32_t rank) { return *comms_[static_cast<size_t>(rank)]; }

private:
    struct Unmap {
        uint64_t bytes;
        void operator()(void* window) const { am_window_unmap(window, bytes); }
    };
    std::vector<std::unique_ptr<void, Unmap>> windows_;
    std::vector<std::unique_ptr<Communicator>> comms_;
};

// One op of one rank, as a step of that rank's program.
struct LocalOp {
    LocalOp(Communicator& communicator, const Plan& plan, const void* const* inputs, void* const* outputs)
        : comm(communicator), launch(communicator, plan, inputs, outputs, record) {
        program.spec = launch.spec();
        program.kernel = launch.kernel();
        program.name = plan.dispatch() ? "dispatch" : "combine";
        program.begin = [this] { launch.Begin(); };
        program.end = [this] { launch.End(false); };
    }
    LocalOp(const LocalOp&) = delete;
    LocalOp& operator=(const LocalOp&) = delete;
    int32_t code() const { return record[moe::kRecMagic] == moe::kRecordMagic ? record[moe::kRecCode] : 0; }

    Communicator& comm;
    int32_t record[moe::kErrorRecordWords] = {};
    OpLaunch launch;
    twin::ProgramStep program;
};

}  // namespace ops
