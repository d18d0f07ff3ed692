// Ranks as threads over the C ABI, with nothing but the windows between them: no interpreter lock orders what
// they do. Made for the sanitizers, which see every access of every rank; a program of its own.
//
// Experts return rows unchanged, so combine must give each token times its weights. Rows are small whole
// numbers and weights powers of two: every sum is exact, and a quantised row comes back as it was.
//
//   rank_threads ops N [SEED]    N ops in each sequence, then the failures; exit status 0, or 1 and the
//   reasons rank_threads canary          wrong rows on purpose: exit status 1
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "abi/ascend_moe.h"
#include "rules/args.h"
#include "rules/plan.h"

namespace {

constexpr int64_t kWindowMiB = 1;
constexpr uint32_t kFirstEpoch = 0xFFFFFFF8u;  // sequences run across the wrap
constexpr int64_t kPatientMicros = 60 * 1000 * 1000;
constexpr int kMaxReports = 20;

std::atomic<int> g_failures{0};

void Check(bool right, const std::string& what) {
    if (!right && ++g_failures <= kMaxReports) fprintf(stderr, "rank_threads: %s\n", what.c_str());
}

void Expect(int code, moe::ErrorCode want, const char* what) {
    Check(code == static_cast<int>(want),
          std::string(what) + " returned " + std::to_string(code) + ", not " + std::to_string(want));
}

struct Shape {
    int world, local, topk, hidden, max_batch;
    int64_t cores;
    int contract;
    bool quantised;
    int experts() const { return world * local; }
    std::string Text() const {
        return "W" + std::to_string(world) + " L" + std::to_string(local) + " cores " + std::to_string(cores) + " V" +
               std::to_string(contract) + (quantised ? " int8" : "");
    }
};

// One rank's tokens in one dispatch.
struct Tokens {
    int batch = 0;
    std::vector<float> rows;      // batch * hidden
    std::vector<int32_t> ids;     // batch * topk, -1: none
    std::vector<float> weights;   // batch * topk
    std::vector<uint8_t> active;  // batch
};

Tokens MakeTokens(const Shape& shape, uint32_t seed, int rank) {
    std::mt19937 random(seed * 64 + static_cast<uint32_t>(rank));
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint32_t>(n)); };
    Tokens tokens;
    tokens.batch = below(4) == 0 ? 0 : 1 + below(shape.max_batch);
    const int hot = below(shape.experts());
    for (int token = 0; token < tokens.batch; ++token) {
        tokens.active.push_back(below(6) != 0);
        const size_t first = tokens.ids.size();
        while (tokens.ids.size() < first + static_cast<size_t>(shape.topk)) {
            const int id = below(3) == 0 ? hot : below(shape.experts() + 1) - 1;
            // A token that names an expert twice may be one row too many for the window.
            if (id >= 0 &&
                std::count(tokens.ids.begin() + static_cast<std::ptrdiff_t>(first), tokens.ids.end(), id) != 0)
                continue;
            tokens.ids.push_back(id);
            tokens.weights.push_back(std::ldexp(1.0f, below(3) - 1));
        }
        for (int i = 0; i < shape.hidden; ++i) tokens.rows.push_back(static_cast<float>(below(17) - 8));
    }
    return tokens;
}

struct Input {
    moe::TensorIndex index;
    uint32_t type;
    const void* data;
    std::vector<int64_t> dims;
};

class Rank {
public:
    Rank(const Shape& shape, int rank, void* comm) : number(rank), comm(comm), shape_(shape) {}

    // Dispatches the tokens of `seed`, or other rows than are compared with. Returns the error code.
    int Dispatch(uint32_t seed, bool wrong = false) {
        sent_ = MakeTokens(shape_, seed, number);
        const std::vector<float> rows = wrong ? std::vector<float>(sent_.rows.size(), 9) : sent_.rows;
        const int code = Run(moe::kOpDispatch, {{moe::kTensor_x, moe::kTypeFp32, rows.data(), Rows()},
                                                {moe::kTensor_expert_ids, moe::kTypeInt32, sent_.ids.data(), Pairs()},
                                                Mask()});
        if (code == static_cast<int>(moe::kOk)) SetRows();
        return code;
    }

    // Combines the rows of the last dispatch unchanged; checks the sums. Returns the error code.
    int Combine() {
        const bool v2 = shape_.contract == static_cast<int>(moe::kContractV2);
        const auto place = v2 ? moe::kTensor_assist_info_for_combine : moe::kTensor_expand_idx;
        const auto length = [](size_t bytes, size_t of) { return static_cast<int64_t>(bytes / of); };
        const int64_t rows = length(rows_.size(), static_cast<size_t>(shape_.hidden));
        const int64_t index = length(index_.size(), sizeof(int32_t));
        const int code =
            Run(moe::kOpCombine, {{moe::kTensor_expand_x, moe::kTypeFp32, rows_.data(), {rows, shape_.hidden}},
                                  {moe::kTensor_expert_ids, moe::kTypeInt32, sent_.ids.data(), Pairs()},
                                  {place, moe::kTypeInt32, index_.data(), {index}},
                                  {moe::kTensor_ep_send_counts, moe::kTypeInt32, counts_.data(), {shape_.experts()}},
                                  {moe::kTensor_expert_scales, moe::kTypeFp32, sent_.weights.data(), Pairs()},
                                  Mask()});
        if (code == static_cast<int>(moe::kOk)) CheckSums();
        return code;
    }

    int culprit() const { return record_[moe::kRecCulprit]; }

    const int number;
    void* const comm;

private:
    std::vector<int64_t> Rows() const { return {sent_.batch, shape_.hidden}; }
    std::vector<int64_t> Pairs() const { return {sent_.batch, shape_.topk}; }
    Input Mask() const { return {moe::kTensor_x_active_mask, moe::kTypeBool, sent_.active.data(), {sent_.batch}}; }

    moe::CallSpec Spec(uint32_t op) const {
        moe::CallSpec spec{};
        spec.op = static_cast<int32_t>(op);
        spec.contract = shape_.contract;
        spec.group_ep_length = 1;
        spec.comm_world = shape_.world;
        spec.comm_rank = number;
        spec.window_mib = kWindowMiB;
        spec.cores = shape_.cores;
        spec.deadline_micros = kPatientMicros;
        for (const auto absent : {moe::kAttribute_y_dtype, moe::kAttribute_x_dtype, moe::kAttribute_scales_dtype}) {
            spec.attributes[absent] = moe::kNoValue;
        }
        spec.attributes[moe::kAttribute_ep_world_size] = shape_.world;
        spec.attributes[moe::kAttribute_ep_rank_id] = number;
        spec.attributes[moe::kAttribute_moe_expert_num] = shape_.experts();
        spec.attributes[moe::kAttribute_global_bs] = shape_.world * shape_.max_batch;
        if (op == moe::kOpDispatch && shape_.quantised) spec.attributes[moe::kAttribute_quant_mode] = 2;
        return spec;
    }

    // The error code of the op; its outputs are in `outputs_`.
    int Run(uint32_t op, const std::vector<Input>& given) {
        moe::CallSpec spec = Spec(op);
        const void* inputs[moe::kTensorCount] = {};
        for (const Input& input : given) {
            moe::TensorDesc& tensor = spec.tensors[input.index];
            tensor.dtype = static_cast<int32_t>(input.type);
            tensor.rank = static_cast<int32_t>(input.dims.size());
            std::copy(input.dims.begin(), input.dims.end(), tensor.dims);
            inputs[input.index] = input.data;
        }
        moe::CheckResult check;
        void* plan = am_plan_create(&spec, &check);
        Check(plan != nullptr, std::string("the call was refused: ") + check.message);
        if (plan == nullptr) return -1;
        int64_t desc[4];
        std::vector<void*> targets;
        outputs_.clear();
        for (int i = 0; am_call_output(&spec, i, desc); ++i) {
            const size_t elements = static_cast<size_t>(desc[2] * (desc[1] > 1 ? desc[3] : 1));
            outputs_.emplace_back(elements * moe::TypeSize(static_cast<uint32_t>(desc[0])));
            targets.push_back(outputs_.back().data());
        }
        char text[512] = "";
        const int code = am_run(comm, plan, inputs, targets.data(), record_, text, sizeof(text));
        am_plan_destroy(plan);
        return code;
    }

    // What dispatch gave, for combine. A code is less than half a step away from its whole number.
    void SetRows() {
        index_ = outputs_[2];
        counts_ = outputs_[4];
        const std::vector<uint8_t>& rows = outputs_[0];
        const size_t hidden = static_cast<size_t>(shape_.hidden);
        rows_.assign(shape_.quantised ? rows.size() : rows.size() / sizeof(float), 0);
        if (!shape_.quantised) memcpy(rows_.data(), rows.data(), rows.size());
        int32_t filled;
        memcpy(&filled, &counts_[counts_.size() - sizeof(filled)], sizeof(filled));
        for (size_t at = 0; shape_.quantised && at < static_cast<size_t>(filled) * hidden; ++at) {
            float scale;
            memcpy(&scale, &outputs_[1][at / hidden * sizeof(float)], sizeof(float));
            rows_[at] = std::nearbyint(scale * static_cast<float>(static_cast<int8_t>(rows[at])));
        }
    }

    void CheckSums() {
        const size_t hidden = static_cast<size_t>(shape_.hidden), topk = static_cast<size_t>(shape_.topk);
        bool right = true;
        for (size_t at = 0; at < sent_.rows.size(); ++at) {
            const size_t token = at / hidden;
            float sum = 0;
            for (size_t k = 0; k < topk && sent_.active[token] != 0; ++k) {
                if (sent_.ids[token * topk + k] >= 0) sum += sent_.weights[token * topk + k] * sent_.rows[at];
            }
            right = right && memcmp(&outputs_[0][at * sizeof(sum)], &sum, sizeof(sum)) == 0;
        }
        Check(right, "combine's x of rank " + std::to_string(number) + ", " + shape_.Text());
    }

    Shape shape_;
    Tokens sent_;  // by the last dispatch, with three of its outputs
    std::vector<float> rows_;
    std::vector<uint8_t> index_, counts_;
    std::vector<std::vector<uint8_t>> outputs_;  // of the last op
    int32_t record_[moe::kErrorRecordWords] = {};
};

// Runs `body(rank, all ranks)` on a thread a rank, over fresh windows.
void OnRanks(const Shape& shape, uint32_t epoch, const std::function<void(Rank&, const std::deque<Rank>&)>& body) {
    const uint64_t bytes = static_cast<uint64_t>(kWindowMiB) * moe::kMiB;
    const uint64_t total = am_window_total_bytes(bytes, 0);
    std::vector<void*> bases;
    for (int rank = 0; rank < shape.world; ++rank) bases.push_back(am_window_alloc(total));
    std::deque<Rank> ranks;
    for (int rank = 0; rank < shape.world; ++rank) {
        void* comm = am_comm_create(rank, shape.world, bases.data(), bytes, 0, nullptr);
        if (epoch != 0) am_comm_set_epoch(comm, epoch);
        ranks.emplace_back(shape, rank, comm);
    }
    std::vector<std::thread> threads;
    for (Rank& rank : ranks) threads.emplace_back([&] { body(rank, ranks); });
    for (std::thread& thread : threads) thread.join();
    for (const Rank& rank : ranks) am_comm_destroy(rank.comm);
    for (void* base : bases) am_window_unmap(base, total);
}

// ---- the checks ----

// Any order of the two ops, nothing between them. `wrong`: rank 0 must notice that its rows are not its own.
void Sequence(const Shape& shape, uint32_t seed, int ops, bool wrong = false) {
    OnRanks(shape, kFirstEpoch, [&](Rank& rank, const std::deque<Rank>&) {
        std::mt19937 random(seed);  // the same choices on all ranks
        for (int op = 0; op < ops; ++op) {
            const bool dispatch = op == 0 || random() % 2 == 0;
            const uint32_t of_op = seed + static_cast<uint32_t>(op);
            const int code = dispatch ? rank.Dispatch(of_op, wrong && rank.number == 0) : rank.Combine();
            Expect(code, moe::kOk, dispatch ? "dispatch" : "combine");
            if (code != static_cast<int>(moe::kOk)) return;
        }
    });
}

// Rank 0 goes while the others are on their way.
void Leaves(const Shape& shape, uint32_t seed) {
    OnRanks(shape, 0, [&](Rank& rank, const std::deque<Rank>& all) {
        for (uint32_t turn = 0;; ++turn) {
            if (rank.number == 0 && turn == seed % 4) {
                for (const Rank& other : all) {
                    if (other.number != 0) am_comm_mark_lost(other.comm, 0);
                }
                return;
            }
            const int code = rank.Dispatch(seed + turn);
            if (code == static_cast<int>(moe::kOk)) continue;
            Expect(code, moe::kPeerLost, "dispatch after a rank went");
            // One op early where a third rank's rows are still awaited when a faster one says so.
            Check(rank.culprit() == 0 && (turn == seed % 4 || turn + 1 == seed % 4), "the rank that went is not named");
            return;
        }
    });
}

std::vector<Shape> Shapes() {
    std::vector<Shape> shapes;
    for (int world = 2; world <= 4; ++world) {
        for (int contract : {1, 2}) {
            for (bool quantised : {false, true}) {
                shapes.push_back({world, 1 + world % 3, 2 + contract % 2, 32 * (5 - world), 5, world == 3 ? 5 : world,
                                  contract, quantised});
            }
        }
    }
    return shapes;
}

void Everything(int ops, uint32_t seed) {
    const std::vector<Shape> shapes = Shapes();
    for (const Shape& shape : shapes) {
        Sequence(shape, ++seed, ops);
        Leaves(shape, ++seed);
    }
    printf("rank_threads: %zu shapes, each %d ops and a rank that goes: %d wrong\n", shapes.size(), ops,
           g_failures.load());
}

}  // namespace

int main(int argc, char** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    const int number = argc > 2 ? atoi(argv[2]) : 0;
    const uint32_t seed = argc > 3 ? static_cast<uint32_t>(atoi(argv[3])) : 1;
    if (what == "ops" && number > 0) {
        Everything(number, seed);
    } else if (what == "canary") {
        for (const Shape& shape : Shapes()) Sequence(shape, seed, 8, true);
    } else {
        fprintf(stderr, "usage: rank_threads ops N [SEED] | canary\n");
        return 2;
    }
    return g_failures == 0 ? 0 : 1;
}
