// For test_plan_sweep.py: draws legal calls of both ops from all that a plan depends on, plans them, and looks at UB
// and event ids of each plan.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "rules/plan.h"

#define PROBE_API extern "C" __attribute__((visibility("default")))

namespace {

class Dice {
public:
    explicit Dice(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 0x2545F4914F6CDD1Dull) {}
    uint32_t Below(uint32_t n) {
        state_ += 0x9E3779B97F4A7C15ull;
        uint64_t word = state_;
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
        word = (word ^ word >> 27) * 0x94D049BB133111EBull;
        return static_cast<uint32_t>((word ^ word >> 31) % n);
    }
    bool Odds(uint32_t of) { return Below(of) == 0; }
    template <size_t n>
    int64_t Of(const int64_t (&values)[n]) {
        return values[Below(n)];
    }
    // 1..most, small ones as often as large ones.
    int64_t Spread(int64_t most) {
        int64_t top = most;
        for (uint32_t halves = Below(6); halves > 0 && top > 1; --halves) top = (top + 1) / 2;
        return Odds(2) ? top : 1 + Below(static_cast<uint32_t>(top));
    }

private:
    uint64_t state_;
};

void Give(moe::CallSpec& call, uint32_t tensor, uint32_t type, std::initializer_list<int64_t> dims) {
    moe::TensorDesc& description = call.tensors[tensor];
    description = {static_cast<int32_t>(type), static_cast<int32_t>(dims.size()), {}};
    std::copy(dims.begin(), dims.end(), description.dims);
}

// What a sweep draws. kAll: at the two sizes of UB that platforms grant; kTiny: with less UB than any has; kSmall and
// kShort: calls that the checked engine runs in a moment, with what platforms grant, and with short rows in less UB;
// kFull: as kAll, calls that take most UB, with as many experts as there may be and rows of the least or most bytes.
enum Scope : uint32_t { kAll, kTiny, kSmall, kShort, kFull };
bool IsFew(Scope scope) { return scope == kSmall || scope == kShort; }

// Two servers or more, joined by RDMA: without flags, with flags, or with the two levels of hierarchy.
void SetServers(Dice& dice, moe::CallSpec& call) {
    const int64_t world = call.comm_world;
    call.context_kind = static_cast<int32_t>(moe::kContextA2);
    call.ranks_per_server = static_cast<int32_t>(1 + dice.Below(static_cast<uint32_t>(world)));
    call.near_stores = static_cast<int32_t>(dice.Below(2));
    call.rdma_flags = static_cast<int32_t>(dice.Below(2));
    call.comm_alg = 0;
    if (call.contract == static_cast<int32_t>(moe::kContractV1) || dice.Odds(2)) return;
    while (world % call.ranks_per_server != 0) --call.ranks_per_server;
    if (call.ranks_per_server == 1 || call.ranks_per_server == world) return;
    call.comm_alg = moe::kCommAlgHierarchy;
    call.rdma_flags = 0;
}

void SetPlace(Dice& dice, Scope scope, moe::CallSpec& call) {
    static const int64_t kWorlds[] = {1,  2,  3,  4,  5,  7,  8,   8,   12,  16,  16,  24,  32,  33,  48,  60,
                                      63, 64, 65, 72, 96, 97, 128, 144, 192, 255, 256, 288, 320, 341, 384, 384};
    static const int64_t kCores[] = {1, 2, 3, 7, 8, 9, 16, 20, 24, 40, 40, 48, 48, 63, 64};
    static const int32_t kAlgorithms[] = {0, moe::kCommAlgDirect, moe::kCommAlgDirect, moe::kCommAlgAuto};
    static const int64_t kFewWorlds[] = {1, 2, 2, 3, 4, 8}, kFewCores[] = {1, 2, 5, 8, 8, 9, 12};
    const bool few = IsFew(scope);
    const int64_t world = few ? dice.Of(kFewWorlds) : dice.Odds(4) ? dice.Spread(384) : dice.Of(kWorlds);
    call.contract = static_cast<int32_t>(dice.Odds(2) ? moe::kContractV1 : moe::kContractV2);
    call.group_ep_length = 5;
    call.comm_alg = kAlgorithms[dice.Below(4)];
    call.comm_world = world;
    call.window_mib = 1 << 20;
    call.cores = few ? dice.Of(kFewCores) : dice.Odds(4) ? dice.Spread(64) : dice.Of(kCores);
    call.deadline_micros = 1000000;
    call.ub_bytes = dice.Odds(2) ? 196352 : 180000;
    if (scope == kShort) call.ub_bytes = static_cast<int32_t>(24 * 1024 + dice.Below(80 * 1024));
    if (scope == kTiny) call.ub_bytes = static_cast<int32_t>(1024 + dice.Below(160000));
    if (!few && dice.Odds(4)) SetServers(dice, call);
    if (call.cores > 1 && dice.Odds(4))
        call.list_cores = static_cast<int32_t>(1 + dice.Below(static_cast<uint32_t>(call.cores) - 1));
    if (!few) call.part = static_cast<int32_t>(dice.Odds(4) ? 1 + dice.Below(2) : 0);
    if (few && call.comm_alg == moe::kCommAlgAuto) call.comm_alg = 0;
    call.attributes[moe::kAttribute_ep_world_size] = world;
    call.attributes[moe::kAttribute_shared_expert_num] = 1;
    for (const uint32_t absent : {moe::kAttribute_y_dtype, moe::kAttribute_x_dtype, moe::kAttribute_scales_dtype})
        call.attributes[absent] = moe::kNoValue;
    call.comm_rank = call.attributes[moe::kAttribute_ep_rank_id] = dice.Below(static_cast<uint32_t>(world));
}

// Zero, copy and const experts: none in half of the calls of V2, and few where the checked engine makes their rows.
moe::SpecialNumbers DrawSpecial(Dice& dice, Scope scope, int32_t contract) {
    if (contract == static_cast<int32_t>(moe::kContractV1) || dice.Odds(2)) return {};
    const int64_t most = IsFew(scope) ? 6 : moe::kMaxSpecialExperts;
    const auto number = [&] { return dice.Odds(3) ? 0 : dice.Spread(most); };
    const int64_t zero = number(), copy = number();
    return {zero, copy, number()};
}

struct Sizes {
    int64_t batch, topK, hidden, experts;
    uint32_t type;
    moe::SpecialNumbers special;
};
Sizes DrawSizes(Dice& dice, Scope scope, int64_t world, int32_t contract) {
    static const int64_t kHidden[] = {64, 1024, 2048, 4096, 5120, 7168, 7168, 7680, 8192, 12288, 16384, 16384};
    static const uint32_t kTypes[] = {moe::kTypeFp32, moe::kTypeFp32, moe::kTypeFp16, moe::kTypeBf16};
    Sizes sizes = {};
    sizes.type = kTypes[dice.Below(4)];
    const int64_t unit = moe::kBlock / moe::TypeSize(sizes.type);
    sizes.hidden = dice.Odds(4) ? dice.Spread(moe::kMaxHidden / unit) * unit : dice.Of(kHidden);
    if (scope == kFull) sizes.hidden = dice.Odds(2) ? moe::kMaxHidden : unit * (1 + dice.Below(3));
    const int64_t most = moe::kMaxExperts / world;
    sizes.experts = world * (scope == kFull ? most : dice.Spread(most));
    sizes.special = DrawSpecial(dice, scope, contract);
    sizes.topK = dice.Spread(std::min<int64_t>(moe::kMaxTopK, sizes.experts + sizes.special.All()));
    sizes.batch = dice.Odds(20) ? 0 : dice.Spread(moe::kMaxBatch);
    if (IsFew(scope)) sizes.topK = std::min<int64_t>(sizes.topK, 1 + dice.Below(4));
    if (scope == kSmall) sizes.batch = 1 + dice.Below(3);
    if (scope == kShort) {
        sizes.hidden = dice.Spread(16) * 64;
        sizes.batch = dice.Spread(80);
    }
    return sizes;
}

// What copy and const experts need: the tensors of a combine; with alphas of two dimensions the row says its factors.
void GiveSpecial(Dice& dice, const Sizes& sizes, moe::CallSpec& call) {
    const int64_t constant = sizes.special.constant;
    if (sizes.special.copy + constant == 0) return;
    Give(call, moe::kTensor_ori_x, sizes.type, {sizes.batch, sizes.hidden});
    if (constant == 0) return;
    const bool rows = !dice.Odds(3);
    for (const uint32_t alphas : {moe::kTensor_const_expert_alpha_1, moe::kTensor_const_expert_alpha_2}) {
        if (rows) {
            Give(call, alphas, sizes.type, {constant, sizes.hidden});
        } else {
            Give(call, alphas, sizes.type, {constant});
        }
    }
    Give(call, moe::kTensor_const_expert_v, sizes.type, {constant, sizes.hidden});
}

// A dispatch, or a combine of what the dispatch would return; `sent` is that dispatch then.
void DrawCall(uint64_t seed, Scope scope, moe::CallSpec& call, moe::CallSpec& sent) {
    Dice dice(seed);
    memset(&call, 0, sizeof(call));
    SetPlace(dice, scope, call);
    const int64_t world = call.comm_world;
    const Sizes sizes = DrawSizes(dice, scope, world, call.contract);
    call.op = static_cast<int32_t>(moe::kOpDispatch);
    call.attributes[moe::kAttribute_moe_expert_num] = sizes.experts;
    call.attributes[moe::kAttribute_expert_token_nums_type] = dice.Below(2);
    call.attributes[moe::kAttribute_zero_expert_num] = sizes.special.zero;
    call.attributes[moe::kAttribute_copy_expert_num] = sizes.special.copy;
    call.attributes[moe::kAttribute_const_expert_num] = sizes.special.constant;
    if (!IsFew(scope) && dice.Odds(3))
        call.attributes[moe::kAttribute_global_bs] =
            world * std::max<int64_t>(sizes.batch, dice.Spread(moe::kMaxBatch));
    Give(call, moe::kTensor_x, sizes.type, {sizes.batch, sizes.hidden});
    Give(call, moe::kTensor_expert_ids, moe::kTypeInt32, {sizes.batch, sizes.topK});
    if (dice.Odds(3)) {
        if (dice.Odds(2)) {
            Give(call, moe::kTensor_x_active_mask, moe::kTypeBool, {sizes.batch});
        } else {
            Give(call, moe::kTensor_x_active_mask, moe::kTypeBool, {sizes.batch, sizes.topK});
        }
    }
    const bool levels = call.comm_alg == moe::kCommAlgHierarchy, quantized = !dice.Odds(3);
    const bool smooth = quantized && !levels && !dice.Odds(3), weights = levels || !dice.Odds(3);
    if (!IsFew(scope) && call.contract == static_cast<int32_t>(moe::kContractV2) && !levels && dice.Odds(2))
        Give(call, moe::kTensor_performance_info, moe::kTypeInt64, {world});
    if (dice.Odds(2)) {
        if (quantized) call.attributes[moe::kAttribute_quant_mode] = 2;
        if (smooth) Give(call, moe::kTensor_scales, moe::kTypeFp32, {sizes.experts, sizes.hidden});
        if (weights) Give(call, moe::kTensor_expert_scales, moe::kTypeFp32, {sizes.batch, sizes.topK});
        return;
    }
    if (levels) Give(call, moe::kTensor_expert_scales, moe::kTypeFp32, {sizes.batch, sizes.topK});
    sent = call;
    moe::OutputDesc outputs[moe::kMostOutputs];
    moe::OutputsOf(call, outputs);
    call.op = static_cast<int32_t>(moe::kOpCombine);
    call.tensors[moe::kTensor_x] = {};
    Give(call, moe::kTensor_expand_x, sizes.type, {outputs[0].dims[0], sizes.hidden});
    const bool v1 = call.contract == static_cast<int32_t>(moe::kContractV1);
    Give(call, v1 ? moe::kTensor_expand_idx : moe::kTensor_assist_info_for_combine, moe::kTypeInt32,
         {outputs[2].dims[0]});
    Give(call, moe::kTensor_ep_send_counts, moe::kTypeInt32, {outputs[4].dims[0]});
    if (weights) {
        Give(call, moe::kTensor_expert_scales, moe::kTypeFp32, {sizes.batch, sizes.topK});
    } else {
        Give(call, moe::kTensor_expert_scales, moe::kTypeFp32, {0});
    }
    if (!v1 && dice.Odds(3)) Give(call, moe::kTensor_shared_expert_x, sizes.type, {sizes.batch, sizes.hidden});
    GiveSpecial(dice, sizes, call);
    if (sizes.type != moe::kTypeFp32 && dice.Odds(2))
        call.attributes[moe::kAttribute_comm_quant_mode] = moe::kCommQuantMode;
}

// The pair of pipes of which the queues of a step hold most ids, of all steps.
struct FullestPair {
    uint32_t ids;
    moe::EventPair pair;
};
FullestPair FullestPairOf(const moe::CallPlan& plan) {
    FullestPair most = {};
    for (const moe::Step step : moe::StepsOf(plan)) {
        const moe::EventBudget events(plan, step);
        if (events.Most() > most.ids) most = {events.Most(), events.Fullest()};
    }
    return most;
}

// Whether a step goes in smaller pieces than it would where UB were larger.
bool IsSplit(const moe::CallPlan& plan) {
    const moe::MoeDistributeInfo& info = plan.info();
    const uint32_t usualPiece = info.hidden <= moe::kQuantWhole ? info.hidden : moe::kQuantPieces[1];
    if (plan.op != moe::kOpDispatch) {
        moe::MoeDistributeCombineTiling usual = {};
        moe::SplitTokens(info, usual);
        if (info.algorithm == moe::kAlgorithmDirect) moe::ShareTokens(info, usual);
        return plan.combine.partElements != usual.partElements || plan.combine.returnRing == 1 ||
               (info.quantMode != 0 && plan.combine.quantPiece != usualPiece);
    }
    const moe::MoeDistributeDispatchTiling& tiling = plan.dispatch;
    if (info.algorithm == moe::kAlgorithmDirect && tiling.sharedLanes != moe::SharedLanes(info)) return true;
    return tiling.copyRing == 1 || (info.quantMode != 0 && tiling.quantPiece != usualPiece);
}

// Whether a direct combine that is refused for want of UB is not tried in its smallest chunks and parts.
bool MaySmallerFit(const moe::CallPlan& plan) {
    const moe::MoeDistributeInfo& info = plan.info();
    return plan.op == moe::kOpCombine && info.algorithm == moe::kAlgorithmDirect &&
           (plan.combine.sendRows > 1 || plan.combine.partElements > moe::PartUnit(info));
}

// "name=number;..." of what a program of explore takes, and of how the plan fits.
std::string Described(const moe::CallSpec& call, const moe::CallPlan& plan, uint64_t seed) {
    const moe::MoeDistributeInfo& info = plan.info();
    const moe::Step step = moe::FullestStep(plan);
    const uint64_t bytes = moe::UbBudget(plan, step).Bytes();
    const FullestPair fullest = FullestPairOf(plan);
    const bool dispatch = plan.op == moe::kOpDispatch;
    std::ostringstream line;
    line << "step=" << moe::StepName(step) << ";op=" << plan.op << ";seed=" << seed << ";world=" << info.world
         << ";cores=" << info.cores << ";local=" << info.localExperts << ";topk=" << info.topK
         << ";batch=" << info.batch << ";hidden=" << info.hidden << ";type=" << info.xType
         << ";quant=" << info.quantMode << ";scales=" << info.hasScales << ";weights=" << info.hasWeights
         << ";mask=" << info.maskRank << ";contract=" << info.contract << ";algorithm=" << info.algorithm
         << ";zero=" << info.firstCopy - info.experts << ";copy=" << info.firstConst - info.firstCopy
         << ";const=" << info.ids - info.firstConst << ";alphas=" << info.alphaRank << ";list_cores=" << call.list_cores
         << ";shared=" << (dispatch ? 0 : plan.combine.hasSharedExpertX) << ";ub_bytes=" << call.ub_bytes
         << ";free=" << static_cast<int64_t>(call.ub_bytes) - static_cast<int64_t>(bytes) << ";ids=" << fullest.ids
         << ";pair=" << moe::PairName(fullest.pair) << ";split=" << IsSplit(plan);
    return line.str();
}

void GiveText(const std::string& from, char* to, uint64_t bytes) {
    snprintf(to, static_cast<size_t>(bytes), "%s", from.c_str());
}

enum Total : uint32_t { kPlanned, kRefused, kAboveUb, kAboveIds, kIdsFrom };  // then plans by their most ids

}  // namespace

// Plans the calls of seeds first, first + 1, ... `totals`: see Total. `text`: the plans that are above a limit, and
// each reason of a refusal once, a line each. Those that could be smaller too.
PROBE_API void probe_sweep(uint64_t first, uint64_t count, uint32_t scope, uint64_t* totals, char* text,
                           uint64_t bytes) {
    std::map<std::string, std::string> reasons;
    std::string lines;
    for (uint64_t seed = first; seed < first + count; ++seed) {
        moe::CallSpec call, sent = {};
        DrawCall(seed, static_cast<Scope>(scope), call, sent);
        moe::CallPlan plan;
        moe::CheckResult result;
        if (!moe::PlanCall(call, plan, result)) {
            ++totals[kRefused];
            if (MaySmallerFit(plan)) lines += "could be smaller: " + Described(call, plan, seed) + "\n";
            reasons.emplace(std::string(result.argument) + std::to_string(call.op), result.message);
            continue;
        }
        ++totals[kPlanned];
        const uint32_t ids = FullestPairOf(plan).ids;
        ++totals[kIdsFrom + ids];
        const bool aboveUb = moe::UbBudget(plan, moe::FullestStep(plan)).Bytes() > static_cast<uint64_t>(call.ub_bytes);
        totals[kAboveUb] += aboveUb;
        totals[kAboveIds] += ids > moe::kMostRing;
        if (aboveUb || ids > moe::kMostRing) lines += Described(call, plan, seed) + "\n";
    }
    for (const auto& reason : reasons) lines += reason.second + "\n";
    GiveText(lines, text, bytes);
}

// Of `count` drawn calls the `most` with the least free UB, as many of each step and op as there are, those in
// smaller pieces than usual apart. None has kFew bytes to spare.
constexpr int64_t kFew = 16 * 1024;
PROBE_API void probe_tightest(uint32_t scope, uint64_t count, uint32_t most, char* text, uint64_t bytes) {
    std::map<std::string, std::vector<std::pair<int64_t, std::string>>> groups;
    for (uint64_t seed = 0; seed < count; ++seed) {
        moe::CallSpec call, sent = {};
        DrawCall(seed, static_cast<Scope>(scope), call, sent);
        moe::CallPlan plan;
        moe::CheckResult result;
        // A combine runs behind its dispatch.
        if (sent.op != 0 && !moe::PlanCall(sent, plan, result)) continue;
        if (!moe::PlanCall(call, plan, result)) continue;
        const std::string line = Described(call, plan, seed);
        const std::string step = line.substr(0, line.find(";seed")), split = line.substr(line.rfind(";split"));
        const uint64_t taken = moe::UbBudget(plan, moe::FullestStep(plan)).Bytes();
        const int64_t free = call.ub_bytes - static_cast<int64_t>(taken);
        if (free < kFew) groups[step + split].emplace_back(free, line);
    }
    std::string lines;
    for (auto& group : groups) std::sort(group.second.begin(), group.second.end());
    for (uint32_t round = 0, taken = 0; taken < most && round < most; ++round) {
        for (const auto& group : groups) {
            if (round < group.second.size() && taken++ < most) lines += group.second[round].second + "\n";
        }
    }
    GiveText(lines, text, bytes);
}
