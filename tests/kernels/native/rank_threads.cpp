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
#include <functional>
#include <memory>
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
    int64_t cores, micros;
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

// One rank's call: its description, its inputs by tensor index, its outputs.
class Call {
public:
    Call(const Shape& shape, int rank, uint32_t op) : spec_() {
        spec_.op = static_cast<int32_t>(op);
        spec_.contract = shape.contract;
        spec_.group_ep_length = 1;
        spec_.comm_world = shape.world;
        spec_.comm_rank = rank;
        spec_.window_mib = kWindowMiB;
        spec_.cores = shape.cores;
        spec_.deadline_micros = shape.micros;
        for (int64_t& value : spec_.attributes) value = moe::kNoValue;
        for (const auto index :
             {moe::kAttribute_tp_world_size, moe::kAttribute_tp_rank_id, moe::kAttribute_expert_shard_type,
              moe::kAttribute_shared_expert_num, moe::kAttribute_shared_expert_rank_num, moe::kAttribute_quant_mode,
              moe::kAttribute_expert_token_nums_type}) {
            spec_.attributes[index] = 0;
        }
        spec_.attributes[moe::kAttribute_ep_world_size] = shape.world;
        spec_.attributes[moe::kAttribute_ep_rank_id] = rank;
        spec_.attributes[moe::kAttribute_moe_expert_num] = shape.experts();
        spec_.attributes[moe::kAttribute_global_bs] = shape.world * shape.max_batch;
        if (op == moe::kOpDispatch) spec_.attributes[moe::kAttribute_quant_mode] = shape.quantised ? 2 : 0;
    }

    void Input(moe::TensorIndex index, uint32_t type, const void* data, std::vector<int64_t> dims) {
        moe::TensorDesc& tensor = spec_.tensors[index];
        tensor.dtype = static_cast<int32_t>(type);
        tensor.rank = static_cast<int32_t>(dims.size());
        for (size_t i = 0; i < dims.size(); ++i) tensor.dims[i] = dims[i];
        inputs_[index] = data;
    }

    // The error code of the op.
    int Run(void* comm) {
        moe::CheckResult check;
        void* plan = am_plan_create(&spec_, &check);
        if (plan == nullptr) {
            Check(false, std::string("the call was refused: ") + check.message);
            return -1;
        }
        int64_t desc[4];
        std::vector<void*> targets;
        outputs.clear();
        for (int i = 0; am_call_output(&spec_, i, desc); ++i) {
            const size_t elements = static_cast<size_t>(desc[2] * (desc[1] > 1 ? desc[3] : 1));
            outputs.emplace_back(elements * moe::TypeSize(static_cast<uint32_t>(desc[0])));
        }
        for (auto& output : outputs) targets.push_back(output.data());
        char text[512] = "";
        const int code = am_run(comm, plan, inputs_, targets.data(), record, text, sizeof(text));
        am_plan_destroy(plan);
        return code;
    }

    std::vector<std::vector<uint8_t>> outputs;
    int32_t record[moe::kErrorRecordWords];

private:
    moe::CallSpec spec_;
    const void* inputs_[moe::kTensorCount] = {};
};

class Rank {
public:
    Rank(const Shape& shape, int rank, void* comm) : shape_(shape), rank_(rank), comm_(comm) {}

    // Dispatches the tokens of `seed`, or other rows than are compared with. Returns the error code.
    int Dispatch(uint32_t seed, bool wrong = false) {
        const Tokens mine = MakeTokens(shape_, seed, rank_);
        const std::vector<float> other(mine.rows.size(), 9);
        Call call(shape_, rank_, moe::kOpDispatch);
        const float* rows = wrong ? other.data() : mine.rows.data();
        call.Input(moe::kTensor_x, moe::kTypeFp32, rows, {mine.batch, shape_.hidden});
        call.Input(moe::kTensor_expert_ids, moe::kTypeInt32, mine.ids.data(), {mine.batch, shape_.topk});
        call.Input(moe::kTensor_x_active_mask, moe::kTypeBool, mine.active.data(), {mine.batch});
        const int code = Run(call);
        if (code == static_cast<int>(moe::kOk)) {
            sent_ = mine;
            index_ = call.outputs[2];
            counts_ = call.outputs[4];
            SetRows(call);
        }
        return code;
    }

    // Combines the rows of the last dispatch unchanged; checks the sums. Returns the error code.
    int Combine() {
        const bool v2 = shape_.contract == static_cast<int>(moe::kContractV2);
        const int64_t rows = static_cast<int64_t>(rows_.size()) / shape_.hidden;
        const int64_t index = static_cast<int64_t>(index_.size() / sizeof(int32_t));
        Call call(shape_, rank_, moe::kOpCombine);
        call.Input(moe::kTensor_expand_x, moe::kTypeFp32, rows_.data(), {rows, shape_.hidden});
        call.Input(moe::kTensor_expert_ids, moe::kTypeInt32, sent_.ids.data(), {sent_.batch, shape_.topk});
        call.Input(v2 ? moe::kTensor_assist_info_for_combine : moe::kTensor_expand_idx, moe::kTypeInt32, index_.data(),
                   {index});
        call.Input(moe::kTensor_ep_send_counts, moe::kTypeInt32, counts_.data(), {shape_.experts()});
        call.Input(moe::kTensor_expert_scales, moe::kTypeFp32, sent_.weights.data(), {sent_.batch, shape_.topk});
        call.Input(moe::kTensor_x_active_mask, moe::kTypeBool, sent_.active.data(), {sent_.batch});
        const int code = Run(call);
        if (code == static_cast<int>(moe::kOk)) CheckSums(call);
        return code;
    }

    int culprit() const { return record_[moe::kRecCulprit]; }
    void* comm() const { return comm_; }

private:
    int Run(Call& call) {
        const int code = call.Run(comm_);
        memcpy(record_, call.record, sizeof(record_));
        return code;
    }
    // A code is less than half a step away from its whole number.
    void SetRows(const Call& call) {
        const std::vector<uint8_t>& rows = call.outputs[0];
        const size_t hidden = static_cast<size_t>(shape_.hidden);
        rows_.assign(shape_.quantised ? rows.size() : rows.size() / sizeof(float), 0);
        if (!shape_.quantised) memcpy(rows_.data(), rows.data(), rows.size());
        int32_t filled;
        memcpy(&filled, &counts_[counts_.size() - sizeof(filled)], sizeof(filled));
        for (size_t at = 0; shape_.quantised && at < static_cast<size_t>(filled) * hidden; ++at) {
            float scale;
            memcpy(&scale, &call.outputs[1][at / hidden * sizeof(float)], sizeof(float));
            rows_[at] = std::nearbyint(scale * static_cast<float>(static_cast<int8_t>(rows[at])));
        }
    }
    void CheckSums(const Call& call) {
        const size_t hidden = static_cast<size_t>(shape_.hidden), topk = static_cast<size_t>(shape_.topk);
        bool right = true;
        for (size_t at = 0; at < sent_.rows.size(); ++at) {
            const size_t token = at / hidden;
            float sum = 0;
            for (size_t k = 0; k < topk && sent_.active[token] != 0; ++k) {
                if (sent_.ids[token * topk + k] >= 0) sum += sent_.weights[token * topk + k] * sent_.rows[at];
            }
            right = right && memcmp(&call.outputs[0][at * sizeof(sum)], &sum, sizeof(sum)) == 0;
        }
        Check(right, "combine's x of rank " + std::to_string(rank_) + ", " + shape_.Text());
    }

    Shape shape_;
    int rank_;
    void* comm_;
    Tokens sent_;  // by the last dispatch, with three of its outputs
    std::vector<float> rows_;
    std::vector<uint8_t> index_, counts_;
    int32_t record_[moe::kErrorRecordWords] = {};
};

class Cluster {
public:
    Cluster(const Shape& shape, uint32_t epoch) : shape_(shape) {
        const uint64_t bytes = static_cast<uint64_t>(kWindowMiB) * moe::kMiB;
        total_ = am_window_total_bytes(bytes, 0);
        for (int rank = 0; rank < shape.world; ++rank) bases_.push_back(am_window_alloc(total_));
        for (int rank = 0; rank < shape.world; ++rank) {
            void* comm = am_comm_create(rank, shape.world, bases_.data(), bytes, 0, nullptr);
            if (epoch != 0) am_comm_set_epoch(comm, epoch);
            ranks_.push_back(std::make_unique<Rank>(shape, rank, comm));
        }
    }
    ~Cluster() {
        for (auto& rank : ranks_) am_comm_destroy(rank->comm());
        for (void* base : bases_) am_window_unmap(base, total_);
    }
    Cluster(const Cluster&) = delete;
    Cluster& operator=(const Cluster&) = delete;

    // Runs `body(rank number, rank)` on a thread a rank.
    void Run(const std::function<void(int, Rank&)>& body) {
        std::vector<std::thread> threads;
        for (int rank = 0; rank < shape_.world; ++rank) {
            threads.emplace_back([&, rank] { body(rank, *ranks_[static_cast<size_t>(rank)]); });
        }
        for (std::thread& thread : threads) thread.join();
    }
    // `gone` has left, as the others see it.
    void MarkLost(int gone) {
        for (int rank = 0; rank < shape_.world; ++rank) {
            if (rank != gone) am_comm_mark_lost(ranks_[static_cast<size_t>(rank)]->comm(), gone);
        }
    }

private:
    Shape shape_;
    uint64_t total_ = 0;
    std::vector<void*> bases_;
    std::vector<std::unique_ptr<Rank>> ranks_;
};

// ---- the checks ----

// Any order of the two ops, nothing between them. `wrong`: rank 0 must notice that its rows are not its own.
void Sequence(const Shape& shape, uint32_t seed, int ops, bool wrong = false) {
    Cluster cluster(shape, kFirstEpoch);
    cluster.Run([&](int number, Rank& rank) {
        std::mt19937 random(seed);  // the same choices on all ranks
        for (int op = 0; op < ops; ++op) {
            const bool dispatch = op == 0 || random() % 2 == 0;
            const uint32_t of_op = seed + static_cast<uint32_t>(op);
            const int code = dispatch ? rank.Dispatch(of_op, wrong && number == 0) : rank.Combine();
            Expect(code, moe::kOk, dispatch ? "dispatch" : "combine");
            if (code != static_cast<int>(moe::kOk)) return;
        }
    });
}

// Rank 0 goes while the others are on their way.
void Leaves(const Shape& shape, uint32_t seed) {
    Cluster cluster(shape, 0);
    cluster.Run([&](int number, Rank& rank) {
        for (uint32_t turn = 0;; ++turn) {
            if (number == 0 && turn == seed % 4) return cluster.MarkLost(0);
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
                                  kPatientMicros, contract, quantised});
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
