// All ranks of a communicator in this process, for the engines that run them together: their windows, each rank's
// communicator handle, an op of a rank, and an op of all ranks in one launch.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "abi/ascend_moe.h"
#include "abi/op_launch.h"
#include "protocol/tiling.h"
#include "twin/engine/core.h"
#include "twin/engine/explore.h"

extern "C" void ascend_moe_one_card(GM_ADDR, GM_ADDR, GM_ADDR);

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

// One op of all ranks as one launch, each rank on a group of its cores (op_kernel/protocol/tiling.h).
class CardOp {
public:
    // `ops`: of rank 0, 1 and so on; they must outlive this.
    explicit CardOp(std::vector<LocalOp*> ops) : ops_(std::move(ops)), ranks_(ops_.size()) {
        const Plan& plan = ops_[0]->launch.plan();
        card_ = {reinterpret_cast<uintptr_t>(ranks_.data()), static_cast<uint32_t>(ops_.size()), plan.info().cores};
        twin::LaunchSpec& spec = program.spec;
        spec = ops_[0]->launch.spec();
        spec.block_dim = card_.world * card_.cores;
        spec.tiling_key = plan.card_key();
        spec.window_rule = [this](uintptr_t begin, uint64_t bytes, bool write) {
            OpLaunch& own = ops_[twin::g_current_core->index / card_.cores]->launch;
            return own.spec().window_rule(begin, bytes, write);
        };
        spec.ranges.clear();
        for (size_t rank = 0; rank < ops_.size(); ++rank) Add(rank);
        AddMemory(spec, ranks_.data(), ranks_.size() * sizeof(ranks_[0]), "ranks");
        GM_ADDR tiling = AddMemory(spec, &card_, sizeof(card_), "tiling of the launch");
        GM_ADDR barrier = AddMemory(spec, barrier_, sizeof(barrier_), "group barrier");
        spec.ranges.back().atomic_blocks = true;
        program.kernel = [=] { ascend_moe_one_card(barrier, nullptr, tiling); };
        program.name = ops_[0]->program.name;
        program.begin = [this] {
            memset(barrier_, 0, sizeof(barrier_));
            for (LocalOp* op : ops_) op->program.begin();
        };
        program.end = [this] {
            for (LocalOp* op : ops_) op->program.end();
        };
    }
    CardOp(const CardOp&) = delete;
    CardOp& operator=(const CardOp&) = delete;

    twin::ProgramStep program;

private:
    // A rank's tensors, and the areas of its own window.
    void Add(size_t rank) {
        OpLaunch& launch = ops_[rank]->launch;
        for (const twin::GmRange& range : launch.spec().ranges) {
            if (!range.window() || range.owner == static_cast<int>(rank)) program.spec.ranges.push_back(range);
        }
        moe::OneCardRank& own = ranks_[rank];
        own.context = launch.spec().hccl_context[0];
        for (size_t i = 0; i < kMostArguments; ++i)
            own.arguments[i] = reinterpret_cast<uintptr_t>(launch.arguments()[i]);
    }

    std::vector<LocalOp*> ops_;
    std::vector<moe::OneCardRank> ranks_;
    moe::MoeOneCardTiling card_ = {};
    alignas(64) uint32_t barrier_[moe::kMaxCores * moe::kBlockWords] = {};
};

}  // namespace ops
