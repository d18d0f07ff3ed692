// One rank's calls over the C ABI, checked on the spot, and a cluster that runs ranks as threads.
#pragma once

#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <thread>

#include "abi/ascend_moe.h"
#include "rules/plan.h"
#include "rank_tokens.h"

namespace ranks {

constexpr int64_t kWindowMiB = 1;

constexpr int kMaxReports = 20;

inline std::atomic<int> g_failures{0};

inline void Check(bool right, const std::string& what) {
    if (!right && ++g_failures <= kMaxReports) fprintf(stderr, "rank_threads: %s\n", what.c_str());
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
              moe::kAttribute_shared_expert_num, moe::kAttribute_shared_expert_rank_num,
              moe::kAttribute_quant_mode, moe::kAttribute_expert_token_nums_type}) {
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

    // The error code of the op; `fault` gets a kernel fault's text.
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
        fault = text;
        am_plan_destroy(plan);
        return code;
    }

    std::vector<std::vector<uint8_t>> outputs;
    int32_t record[moe::kErrorRecordWords];
    std::string fault;

private:
    moe::CallSpec spec_;
    const void* inputs_[moe::kTensorCount] = {};
};

// Changes a rank's own call before it is made.
using Spoil = std::function<void(Call&, Tokens&)>;

// One rank's last dispatch, and what came of it.
struct Sent {
    Tokens mine;
    Arrivals arrived;
    std::vector<uint8_t> rows;   // what combine gets: expand_x, dequantised
    std::vector<uint8_t> index;  // expand_idx or the triples
    std::vector<uint8_t> counts;
};

class Rank {
public:
    Rank(const Shape& shape, int rank, void* comm) : shape_(shape), rank_(rank), comm_(comm) {}

    // Dispatches the tokens of `seed`; checks expand_x and the counts row by row. Returns the error code.
    int Dispatch(uint32_t seed, const Spoil& spoil = nullptr) {
        std::vector<Tokens> all;
        for (int rank = 0; rank < shape_.world; ++rank) all.push_back(MakeTokens(shape_, seed, rank));
        Tokens mine = all[static_cast<size_t>(rank_)];
        const std::vector<uint8_t> x = Packed(shape_.type, mine.rows);
        Call call(shape_, rank_, moe::kOpDispatch);
        call.Input(moe::kTensor_x, shape_.type, x.data(), {mine.batch, shape_.hidden});
        if (spoil) spoil(call, mine);
        call.Input(moe::kTensor_expert_ids, moe::kTypeInt32, mine.ids.data(), {mine.batch, shape_.topk});
        call.Input(moe::kTensor_x_active_mask, moe::kTypeBool, mine.active.data(), {mine.batch});
        const int code = call.Run(comm_);
        Remember(call);
        if (code == static_cast<int>(moe::kOk)) {
            sent_ = Sent{mine, Expected(shape_, all, rank_), {}, call.outputs[2], call.outputs[4]};
            CheckDispatch(call, all);
        }
        return code;
    }

    // Combines the rows of the last dispatch unchanged; checks the sums. Returns the error code.
    int Combine() {
        const Tokens& mine = sent_.mine;
        const bool v2 = shape_.contract == static_cast<int>(moe::kContractV2);
        const int64_t rows = static_cast<int64_t>(sent_.rows.size() / RowBytes());
        const int64_t index = static_cast<int64_t>(sent_.index.size() / sizeof(int32_t));
        Call call(shape_, rank_, moe::kOpCombine);
        call.Input(moe::kTensor_expand_x, shape_.type, sent_.rows.data(), {rows, shape_.hidden});
        call.Input(moe::kTensor_expert_ids, moe::kTypeInt32, mine.ids.data(), {mine.batch, shape_.topk});
        call.Input(v2 ? moe::kTensor_assist_info_for_combine : moe::kTensor_expand_idx, moe::kTypeInt32,
                   sent_.index.data(), {index});
        call.Input(moe::kTensor_ep_send_counts, moe::kTypeInt32, sent_.counts.data(), {shape_.experts()});
        call.Input(moe::kTensor_expert_scales, moe::kTypeFp32, mine.weights.data(),
                   {mine.batch, shape_.topk});
        call.Input(moe::kTensor_x_active_mask, moe::kTypeBool, mine.active.data(), {mine.batch});
        const int code = call.Run(comm_);
        Remember(call);
        if (code == static_cast<int>(moe::kOk)) CheckCombine(call);
        return code;
    }

    void WaitAtMost(int64_t micros) { shape_.micros = micros; }
    int culprit() const { return record_[moe::kRecCulprit]; }
    const std::string& fault() const { return fault_; }
    void* comm() const { return comm_; }

private:
    size_t RowBytes() const { return static_cast<size_t>(shape_.hidden) * moe::TypeSize(shape_.type); }
    std::string Where(const char* what) const {
        return std::string(what) + " of rank " + std::to_string(rank_) + ", " + shape_.Text();
    }
    void Remember(const Call& call) {
        memcpy(record_, call.record, sizeof(record_));
        fault_ = call.fault;
    }

    void CheckDispatch(const Call& call, const std::vector<Tokens>& all) {
        const Arrivals& want = sent_.arrived;
        Check(memcmp(call.outputs[4].data(), want.counts.data(), want.counts.size() * sizeof(int32_t)) == 0,
              Where("ep_recv_counts"));
        const size_t room = call.outputs[0].size() / (shape_.quantised ? 1 : moe::TypeSize(shape_.type));
        sent_.rows.assign(room * moe::TypeSize(shape_.type), 0);
        const size_t hidden = static_cast<size_t>(shape_.hidden);
        bool right = true;
        for (size_t row = 0; row < want.rows.size(); ++row) {
            const Origin& from = want.rows[row];
            const float* tokens =
                &all[static_cast<size_t>(from.rank)].rows[static_cast<size_t>(from.token) * hidden];
            for (size_t i = 0; i < hidden; ++i) {
                const float value = Element(call, row, row * hidden + i);
                right = right && value == tokens[i];
                Store(shape_.type, value, &sent_.rows[(row * hidden + i) * moe::TypeSize(shape_.type)]);
            }
            if (shape_.contract == static_cast<int>(moe::kContractV2)) {
                int32_t triple[moe::kTripleWords];
                memcpy(triple, &call.outputs[2][row * sizeof(triple)], sizeof(triple));
                right = right && triple[0] == from.rank && triple[1] == from.token && triple[2] == from.k;
            }
        }
        Check(right, Where("expand_x"));
    }
    // Rows are whole numbers, and a code is less than half a step away from its own.
    float Element(const Call& call, size_t row, size_t at) const {
        if (!shape_.quantised) return Load(shape_.type, &call.outputs[0][at * moe::TypeSize(shape_.type)]);
        const float scale = Load(moe::kTypeFp32, &call.outputs[1][row * sizeof(float)]);
        return std::nearbyint(scale * static_cast<float>(static_cast<int8_t>(call.outputs[0][at])));
    }

    void CheckCombine(const Call& call) {
        const Tokens& mine = sent_.mine;
        const size_t hidden = static_cast<size_t>(shape_.hidden), topk = static_cast<size_t>(shape_.topk);
        bool right = true;
        for (size_t at = 0; at < mine.rows.size(); ++at) {
            const size_t token = at / hidden;
            float sum = 0;
            for (size_t k = 0; k < topk && mine.active[token] != 0; ++k) {
                if (mine.ids[token * topk + k] >= 0) sum += mine.weights[token * topk + k] * mine.rows[at];
            }
            right = right && Load(shape_.type, &call.outputs[0][at * moe::TypeSize(shape_.type)]) == sum;
        }
        Check(right, Where("combine's x"));
    }

    Shape shape_;
    int rank_;
    void* comm_;
    Sent sent_;
    int32_t record_[moe::kErrorRecordWords] = {};
    std::string fault_;
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

}  // namespace ranks
