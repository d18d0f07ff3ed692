// One op of all ranks as one launch, each rank on a group of its cores (op_kernel/protocol/tiling.h).
#pragma once

#include <utility>
#include <vector>

#include "engines/local_ranks.h"
#include "protocol/tiling.h"
#include "twin/engine/core.h"

extern "C" void ascend_moe_one_card(GM_ADDR, GM_ADDR, GM_ADDR);

namespace ops {

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
        Memory(ranks_.data(), ranks_.size() * sizeof(ranks_[0]), "ranks");
        GM_ADDR tiling = Memory(&card_, sizeof(card_), "tiling of the launch");
        GM_ADDR barrier = Memory(barrier_, sizeof(barrier_), "group barrier");
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
    GM_ADDR Memory(void* begin, uint64_t bytes, const char* name) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(begin);
        program.spec.ranges.push_back({at, at + bytes, twin::GmKind::kWorkspace, false, nullptr, name});
        return twin::GmOf(static_cast<uint8_t*>(begin));
    }

    std::vector<LocalOp*> ops_;
    std::vector<moe::OneCardRank> ranks_;
    moe::MoeOneCardTiling card_ = {};
    alignas(64) uint32_t barrier_[moe::kMaxCores * moe::kBlockWords] = {};
};

}  // namespace ops
