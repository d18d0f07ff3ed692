// Kernel entry of AscendMoeOneCard: several ranks in one launch, each with the bodies of dispatch or combine on its
// group of cores (protocol/tiling.h). `ascend-moe validate --one-card` runs it on the twin and on one NPU.
#include "kernel_operator.h"

#include "direct/combine.h"
#include "direct/dispatch.h"
#include "hierarchy/combine.h"
#include "hierarchy/dispatch.h"
#include "window/combine.h"
#include "window/combine_indexed.h"
#include "window/dispatch.h"

namespace moe {

// A message, which ends an item, begins at a multiple of kFlaggedBlock in the peer's window. Where it may lie, blocks
// of so many bytes are copied one after another, so that it arrives after the rows.
static_assert(RelayTrailerBytes(2, 1) <= kCardPieceBytes && RelayTrailerBytes(8, 4) <= kCardPieceBytes,
              "the message lies in the last piece of an item");

// A rank of the launch: its arguments, and its tiling from GM.
template <typename Arguments, typename Tiling>
struct CardRank {
    Arguments arguments;
    Tiling tiling;

    __aicore__ inline CardRank(const MoeOneCardTiling& card, GM_ADDR barrier) {
        const uint32_t block = static_cast<uint32_t>(AscendC::GetBlockIdx()), rank = block / card.cores;
        const uint32_t first = rank * card.cores;
        __gm__ OneCardRank* const own = reinterpret_cast<__gm__ OneCardRank*>(card.ranks) + rank;
        arguments = Arguments();
        arguments.group = {reinterpret_cast<GM_ADDR>(own->context), block - first,
                           barrier + static_cast<uint64_t>(first) * kBlock};
        Take(own, arguments);
        __gm__ uint32_t* const words = reinterpret_cast<__gm__ uint32_t*>(arguments.tiling);
        constexpr uint32_t kWords = sizeof(Tiling) / sizeof(uint32_t);
        auto& copy = reinterpret_cast<uint32_t (&)[kWords]>(tiling);
        for (uint32_t i = 0; i < kWords; ++i) copy[i] = words[i];
    }

private:
    static __aicore__ inline GM_ADDR At(__gm__ OneCardRank* rank, uint32_t place) {
        return reinterpret_cast<GM_ADDR>(rank->arguments[place]);
    }
    static __aicore__ inline void Take(__gm__ OneCardRank* from, DispatchArguments& to) {
        to.x = At(from, 0);
        to.expertIds = At(from, 1);
        to.scales = At(from, 2);
        to.xActiveMask = At(from, 3);
        to.expertScales = At(from, 4);
        to.performanceInfo = At(from, 5);
        to.expandX = At(from, 6);
        to.dynamicScales = At(from, 7);
        to.expandIdx = At(from, 8);
        to.expertTokenNums = At(from, 9);
        to.epRecvCounts = At(from, 10);
        to.tpRecvCounts = At(from, 11);
        to.expandScales = At(from, 12);
        to.errorRecord = At(from, 13);
        to.workspace = At(from, 14);
        to.tiling = At(from, 15);
    }
    static __aicore__ inline void Take(__gm__ OneCardRank* from, CombineArguments& to) {
        to.expandX = At(from, 0);
        to.expertIds = At(from, 1);
        to.expandIdx = At(from, 2);
        to.epSendCounts = At(from, 3);
        to.expertScales = At(from, 4);
        to.xActiveMask = At(from, 6);
        to.sharedExpertX = At(from, 8);
        to.oriX = At(from, 9);
        to.constAlpha1 = At(from, 10);
        to.constAlpha2 = At(from, 11);
        to.constV = At(from, 12);
        to.performanceInfo = At(from, 13);
        to.x = At(from, 14);
        to.errorRecord = At(from, 15);
        to.workspace = At(from, 16);
        to.tiling = At(from, 17);
    }
};

template <typename Op, typename Arguments, typename Tiling>
__aicore__ inline void RunRank(GM_ADDR barrier, const MoeOneCardTiling& card) {
    if (static_cast<uint32_t>(AscendC::GetBlockIdx()) >= card.world * card.cores) return;
    CardRank<Arguments, Tiling> rank(card, barrier);
    TPipe pipe;
    Op op;
    op.Init(rank.arguments, rank.tiling);
    op.Process(pipe);
}
template <typename Op>
__aicore__ inline void RunDispatch(GM_ADDR barrier, const MoeOneCardTiling& card) {
    RunRank<Op, DispatchArguments, MoeDistributeDispatchTiling>(barrier, card);
}
template <typename Op>
__aicore__ inline void RunCombine(GM_ADDR barrier, const MoeOneCardTiling& card) {
    RunRank<Op, CombineArguments, MoeDistributeCombineTiling>(barrier, card);
}

}  // namespace moe

extern "C" __global__ __aicore__ void ascend_moe_one_card(GM_ADDR barrier, GM_ADDR workspaceGM, GM_ADDR tilingGM) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    REGISTER_TILING_DEFAULT(moe::MoeOneCardTiling);
    GET_TILING_DATA_WITH_STRUCT(moe::MoeOneCardTiling, card, tilingGM);
    (void)workspaceGM;
    if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH)) {
        moe::RunDispatch<moe::WindowDispatch<false>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH_QUANT)) {
        moe::RunDispatch<moe::WindowDispatch<true>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT)) {
        moe::RunDispatch<moe::DirectDispatch<false>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH_DIRECT_QUANT)) {
        moe::RunDispatch<moe::DirectDispatch<true>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH_HIERARCHY)) {
        moe::RunDispatch<moe::HierarchyDispatch<false>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_DISPATCH_HIERARCHY_QUANT)) {
        moe::RunDispatch<moe::HierarchyDispatch<true>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_CARD_COMBINE)) {
        moe::RunCombine<moe::WindowCombineCompacted<bfloat16_t, false>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_CARD_COMBINE_QUANT)) {
        moe::RunCombine<moe::WindowCombineCompacted<bfloat16_t, true>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_CARD_COMBINE_INDEXED)) {
        moe::RunCombine<moe::WindowCombineIndexed<bfloat16_t, false>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_CARD_COMBINE_INDEXED_QUANT)) {
        moe::RunCombine<moe::WindowCombineIndexed<bfloat16_t, true>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_CARD_COMBINE_DIRECT)) {
        moe::RunCombine<moe::DirectCombine<bfloat16_t, false>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_CARD_COMBINE_DIRECT_QUANT)) {
        moe::RunCombine<moe::DirectCombine<bfloat16_t, true>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_CARD_COMBINE_HIERARCHY)) {
        moe::RunCombine<moe::HierarchyCombine<bfloat16_t, false>>(barrier, card);
    } else if (TILING_KEY_IS(ASCEND_MOE_TILING_KEY_CARD_COMBINE_HIERARCHY_QUANT)) {
        moe::RunCombine<moe::HierarchyCombine<bfloat16_t, true>>(barrier, card);
    }
}
