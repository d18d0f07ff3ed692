// Several ranks in one launch (op_kernel/protocol/tiling.h): contexts and arguments of the ranks by their addresses,
// on this machine or on an NPU, and the launch on the twin.
#include "protocol/tiling.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "ascend_moe.h"
#include "op_launch.h"
#include "rules/call_plan.h"

extern "C" void ascend_moe_one_card(GM_ADDR, GM_ADDR, GM_ADDR);

namespace {

static_assert(ops::kMostArguments == moe::kCardArguments, "an address an argument");
static_assert(moe::kCardUbAt + moe::kCardUbBytes == moe::kUbBytes, "the end of UB");

template <class Context>
uint64_t Give(const Context& context, void* out) {
    if (out != nullptr) memcpy(out, &context, sizeof(context));
    return sizeof(context);
}

}  // namespace

uint64_t am_card_rank(const void* plan, uint64_t context, const uint64_t* inputs, const uint64_t* outputs,
                      const uint64_t* others, uint64_t* words) {
    const ops::Plan& of = *static_cast<const ops::Plan*>(plan);
    const moe::OpInterface& op = moe::InterfaceOf(of.call.op);
    moe::OneCardRank rank = {};
    rank.context = context;
    uint64_t* out = rank.arguments;
    for (const moe::OpTensor& input : op.inputs) *out++ = inputs[moe::IndexOf(input, of.spec.contract)];
    out = std::copy_n(outputs, op.outputs.size - 1, out);  // the record is the last
    std::copy_n(others, 3, out);
    Give(rank, words);
    return of.card_key();
}

uint64_t am_card_rank_words(void) { return sizeof(moe::OneCardRank) / sizeof(uint64_t); }

uint64_t am_card_context(int rank, int world, uint64_t window, uint64_t staging, uint64_t stride, uint64_t data_bytes,
                         void* out) {
    if (staging == 0) {
        moe::WindowTable table = {};
        table.magic = moe::kWindowTableMagic;
        table.rank = static_cast<uint32_t>(rank);
        table.world = static_cast<uint32_t>(world);
        table.windowBytes = data_bytes;
        table.stateBytes = ops::kStateAreaBytes;
        for (int r = 0; r < world; ++r) {
            table.data[r] = window + static_cast<uint64_t>(r) * stride;
            table.state[r] = table.data[r] + data_bytes;
        }
        return Give(table, out);
    }
    moe::A2Context context = {};
    context.rank = static_cast<uint32_t>(rank);
    context.world = static_cast<uint32_t>(world);
    context.windowBytes = data_bytes + ops::kStateAreaBytes;
    for (int r = 0; r < world; ++r) {
        context.windowsIn[r] = window + static_cast<uint64_t>(r) * stride;
        context.windowsOut[r] = staging + static_cast<uint64_t>(r) * stride;
    }
    return Give(context, out);
}

uint32_t am_card_ub_bytes(void) { return moe::kCardUbAt; }

#ifndef TWIN_TIMED
int am_card_launch(const uint64_t* ranks, uint32_t* barrier, uint32_t world, uint32_t cores, uint64_t tiling_key,
                   const uint64_t* ranges, uint64_t count, char* fault, uint64_t fault_bytes) {
    moe::MoeOneCardTiling card = {reinterpret_cast<uintptr_t>(ranks), world, cores};
    twin::LaunchSpec spec;
    spec.block_dim = world * cores;
    spec.tiling_key = tiling_key;
    spec.name = "one card";
    for (uint64_t i = 0; i < count; ++i)
        ops::AddMemory(spec, reinterpret_cast<const void*>(ranges[2 * i]), ranges[2 * i + 1], "memory of the card");
    GM_ADDR tiling = ops::AddMemory(spec, &card, sizeof(card), "tiling of the launch");
    GM_ADDR group_barrier = twin::GmOf(reinterpret_cast<uint8_t*>(barrier));
    try {
        twin::Device(0).Launch(spec, [=] { ascend_moe_one_card(group_barrier, nullptr, tiling); });
        return 0;
    } catch (const std::exception& error) {
        ops::GiveText(error.what(), fault, fault_bytes);
        return static_cast<int>(moe::kKernelFault);
    }
}
#endif
