// Explore mode across the C ABI: a world of ranks in this process, programs of ops, many schedules.
#include "abi/ascend_moe.h"

#ifdef TWIN_CHECKED

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <unordered_set>
#include <utility>

#include "engines/local_ranks.h"
#include "rules/message.h"

extern "C" {

// One op of one rank. Ops of a rank run in the order in which they are listed.
struct am_explore_step {
    int32_t rank;
    int32_t compare;  // whether the outputs are compared when the op succeeds
    void* plan;
    const void* const* inputs;
    void* const* outputs;
    const void* const* expected;     // by output; null: not compared
    const uint64_t* expected_bytes;  // of each output, from its start
    const uint64_t* output_bytes;
    uint32_t outputs_count;
    uint32_t accepted;    // error codes that are no finding, one bit each; bit 0: success
    uint32_t registered;  // kRegistered...: where a combine's expand_x lies
    uint32_t reserved;
};

struct am_explore_options {
    uint64_t seed;         // of the first schedule; each one after it has the next
    uint64_t schedules;    // how many
    uint64_t max_steps;    // of one schedule
    uint32_t policy;       // twin::Policy, or kMixedPolicy
    uint32_t store_order;  // 0 in order, 1 unordered, 2 by seed
    uint32_t explicit_sync;
    uint32_t hang_is_finding;
    uint32_t pct_depth;   // 0: 2 or 3 by seed
    uint32_t epoch;       // that the first op follows
    uint32_t vary_epoch;  // by seed: new windows, or just before the wrap
    uint32_t trace;
    uint32_t reordered;
    const uint16_t* choices;
    uint64_t choice_count;
    twin::Injection faults;
};

struct am_explore_result {
    uint64_t schedules;  // that ran
    uint64_t steps;
    uint64_t instructions;
    uint64_t switches;
    uint64_t status_blocks;
    uint64_t last_hash;
    uint64_t choices;  // of the last schedule
    uint64_t failed_seed;
    uint32_t failed;  // 0 none, 1 a finding, 2 another result than expected, 3 another error than accepted
    uint32_t time_passed;
    char kind[64];
    char message[1024];
};

}  // extern "C"

namespace ops {
// The host copies the rows in `inputs` into a block of its registered area before the op, and frees the block after it.
// Early: as if its bytes were free at once, not one op later.
constexpr uint32_t kRegisteredNot = 0, kRegisteredRows = 1, kRegisteredEarly = 2;
constexpr uint32_t kMixedPolicy = 100;  // half PCT, three tenths random, two tenths lazy
namespace {

constexpr uint8_t kWindowPoison = 0xA5, kOutputPoison = 0xCD;

const char* AreaName(twin::GmKind kind) {
    return kind == twin::GmKind::kWindowState        ? "state"
           : kind == twin::GmKind::kWindowRegistered ? "registered"
                                                     : "data";
}

struct Exploration {
    Exploration(uint32_t world, uint64_t data_bytes, uint64_t registered_bytes)
        : ranks_(world, data_bytes, registered_bytes), failed_(world, 0) {
        UseServers(0, false);
    }

    // Ranks that share a server (A2 contexts), or 0: one window table for all. Before the program.
    void UseServers(uint32_t ranks_per_server, bool intra_node_stores) {
        ops_.clear();
        ranks_.UseServers(ranks_per_server, intra_node_stores);
        areas_.clear();
        for (size_t rank = 0; rank < ranks_.size(); ++rank) {
            const Communicator& comm = ranks_[rank];
            const int own = static_cast<int>(rank);
            areas_.push_back({comm.data(own), comm.data_bytes() + comm.registered_bytes(), kWindowPoison});
            areas_.push_back({comm.state(own), kStateAreaBytes, 0});
            if (comm.staging() != nullptr) areas_.push_back({comm.staging(), comm.staging_bytes(), kWindowPoison});
        }
        for (const Area& area : areas_) memset(area.begin, area.fill, area.bytes);
    }

    void SetProgram(const am_explore_step* steps, uint32_t count) {
        ops_.clear();
        sent_.assign(ranks_.size(), nullptr);
        for (size_t rank = 0; rank < ranks_.size(); ++rank) ranks_[rank].CloseRegisteredArea();
        for (uint32_t i = 0; i < count; ++i) ops_.push_back(std::make_unique<Op>(*this, steps[i]));
        cards_.clear();
        if (one_card_) DealCards();
    }
    // Whether all ranks of an op are one launch, see protocol/tiling.h. Before the program.
    void UseOneCard(bool one_card) { one_card_ = one_card; }

    void Run(const am_explore_options& options, am_explore_result& result);
    bool WriteTrace(const char* path, const char* header) const;

    // The rows that a combine's host registers, which the kernel gets instead of the caller's.
    struct RegisteredRows {
        // `sent`: the first launch of the same op, which has the rows.
        RegisteredRows(Communicator& communicator, const am_explore_step& given, const RegisteredRows* sent)
            : step(given),
              inputs(given.inputs, given.inputs + moe::kTensorCount),
              registered(sent == nullptr ? RegisterRows(communicator) : twin::HostWrite()) {
            if (sent == nullptr) return;
            inputs = sent->inputs;
            generation = sent->generation;
        }
        // Takes a block for this op, as a caller of window_empty would at this point of the rank's program.
        twin::HostWrite RegisterRows(Communicator& comm) {
            const Plan& plan = *static_cast<Plan*>(step.plan);
            const moe::MoeDistributeInfo& info = plan.info();
            const void*& rows = inputs[moe::kTensor_expand_x];
            if (step.registered == kRegisteredNot || plan.call.op != moe::kOpCombine || rows == nullptr) return {};
            const uint64_t bytes = static_cast<uint64_t>(info.expandRows) * info.hidden * moe::TypeSize(info.xType);
            RegisteredArea::Grant grant;
            if (!comm.OpenRegisteredArea()->Take(bytes, grant)) throw std::bad_alloc();
            generation = grant.generation;
            const twin::HostWrite write = {reinterpret_cast<uintptr_t>(comm.registered(step.rank)) + grant.offset, rows,
                                           bytes};
            rows = reinterpret_cast<const void*>(write.to);
            return write;
        }
        am_explore_step step;
        std::vector<const void*> inputs;
        uint32_t generation = 0;  // of the block
        twin::HostWrite registered;
    };
    struct Op : RegisteredRows, LocalOp {
        Op(Exploration& world, const am_explore_step& given)
            : RegisteredRows(world.ranks_.Of(given.rank), given, world.TakeSent(given)),
              LocalOp(world.ranks_.Of(given.rank), *static_cast<Plan*>(given.plan), inputs.data(), given.outputs) {
            // After a fatal error nothing is registered any more: window_empty raises.
            char& failed = world.failed_[static_cast<size_t>(given.rank)];
            program.begin = [this, &failed] {
                launch.Begin();
                program.writes.assign(registered.bytes > 0 && !failed ? 1 : 0, registered);
            };
            program.end = [this, &failed] {
                launch.End(false);
                finished = true;
                if (code() >= static_cast<int32_t>(moe::kFirstFatal)) failed = 1;
            };
            if (PartOf(step) == moe::kPartSend) {
                world.sent_[static_cast<size_t>(step.rank)] = this;
            } else {
                GiveBack();
            }
        }
        // The calls that am_run and the end of the tensor make after this op.
        void GiveBack() {
            const std::shared_ptr<RegisteredArea> area = comm.OpenRegisteredArea();
            if (!area) return;
            area->Complete(launch.registered().generation, 1, true);
            if (generation == 0) return;
            if (step.registered == kRegisteredEarly) area->Complete(0, 1, true);
            area->Release(generation);
        }
        // performance_info, or null.
        uint64_t* Times() const {
            return static_cast<uint64_t*>(const_cast<void*>(inputs[moe::kTensor_performance_info]));
        }
        bool finished = false;
    };

    static uint32_t PartOf(const am_explore_step& step) { return static_cast<Plan*>(step.plan)->info().part; }
    const RegisteredRows* TakeSent(const am_explore_step& step) {
        return PartOf(step) == moe::kPartFinish ? std::exchange(sent_[static_cast<size_t>(step.rank)], nullptr)
                                                : nullptr;
    }
    // The first op of each rank, then the second of each, are a launch each.
    void DealCards() {
        std::vector<std::vector<Op*>> of_rank(ranks_.size());
        for (const auto& op : ops_) of_rank[static_cast<size_t>(op->step.rank)].push_back(op.get());
        for (size_t number = 0; number < of_rank[0].size(); ++number) {
            std::vector<LocalOp*> ops;
            for (const auto& own : of_rank) ops.push_back(own[number]);
            cards_.push_back(std::make_unique<CardOp>(ops));
        }
    }
    void Restore(uint32_t epoch);
    static void LeavesNothing(const Op& op, uint32_t number, am_explore_result& result);
    void AddsToTimes(const Op& op, uint32_t number, am_explore_result& result) const;
    // What earlier ops have left in performance_info: of every other source a microsecond carries into the upper half.
    static uint64_t TimeBefore(uint32_t source) { return source % 2 == 0 ? 5 : 0xFFFFFFFFu; }
    void CompareOutcome(am_explore_result& result, uint64_t seed);
    static twin::RunOptions Translate(const am_explore_options& options, uint64_t seed);

    // A memory area that kernels write, and its content before the first op.
    struct Area {
        uint8_t* begin;
        uint64_t bytes;
        uint8_t fill;
    };
    LocalRanks ranks_;
    std::vector<Area> areas_;
    std::vector<char> failed_;  // ranks, by number
    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<std::unique_ptr<CardOp>> cards_;  // one card: the ops by launch
    bool one_card_ = false;
    std::vector<const RegisteredRows*> sent_;  // by rank: the op that the next step finishes
    twin::Explorer explorer_;
    twin::RunResult last_;
    std::unordered_set<uint64_t> hashes_;
    std::map<std::string, twin::PollCount> polls_;
};

// Resets the windows to the state of a new communicator, and fills outputs with poison.
void Exploration::Restore(uint32_t epoch) {
    explorer_.ForEachWrittenPage([&](uintptr_t begin, uint64_t bytes) {
        for (const Area& area : areas_) {
            const uintptr_t at = reinterpret_cast<uintptr_t>(area.begin);
            if (begin >= at && begin < at + area.bytes) memset(reinterpret_cast<void*>(begin), area.fill, bytes);
        }
    });
    failed_.assign(failed_.size(), 0);
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        // Hosts write aborts and epochs without the shadow's knowledge, so all of this small area is reset.
        memset(ranks_[rank].state(static_cast<int>(rank)), 0, moe::StatusBase(static_cast<uint32_t>(ranks_.size())));
        if (epoch != 0) ranks_[rank].SetEpoch(epoch);
        ranks_[rank].ForgetLost();
    }
    for (const auto& op : ops_) {
        memset(op->record, 0, sizeof(op->record));
        op->finished = false;
        for (uint32_t r = 0; op->Times() != nullptr && r < ranks_.size(); ++r) op->Times()[r] = TimeBefore(r);
        for (uint32_t i = 0; i < op->step.outputs_count; ++i) {
            if (op->step.outputs[i] != nullptr) memset(op->step.outputs[i], kOutputPoison, op->step.output_bytes[i]);
        }
    }
}

twin::RunOptions Exploration::Translate(const am_explore_options& options, uint64_t seed) {
    twin::RunOptions run;
    run.seed = seed;
    run.max_steps = options.max_steps;
    if (options.policy == kMixedPolicy) {
        const uint64_t tenth = seed % 10;
        run.policy = tenth < 5 ? twin::Policy::kPct : tenth < 8 ? twin::Policy::kRandom : twin::Policy::kLazy;
        run.polls = seed % 8 == 5 ? 2 : 1;  // one right behind another, as on an NPU, where no core sleeps
    } else {
        run.policy = static_cast<twin::Policy>(options.policy);
    }
    run.unordered = options.store_order == 2 ? seed / 10 % 2 == 1 : options.store_order == 1;
    run.explicit_sync = options.explicit_sync != 0;
    run.hang_is_finding = options.hang_is_finding != 0;
    run.pct_depth = options.pct_depth != 0 ? options.pct_depth : 2 + seed / 20 % 2;
    run.trace = options.trace != 0;
    run.choices.assign(options.choices, options.choices + options.choice_count);
    run.injection = options.faults;
    // If every schedule is run, or a block is changed whole, half blocks would only add the same schedules.
    run.reordered = options.reordered != 0;
    run.torn = run.unordered && run.policy != twin::Policy::kExhaustive && run.injection.corrupt_block == 0;
    return run;
}

void Exploration::Run(const am_explore_options& options, am_explore_result& result) {
    static constexpr uint32_t kEpochs[] = {0, 1, 2, 0xFFFFFFFDu, 0xFFFFFFFEu, 0xFFFFFFFFu};
    memset(&result, 0, sizeof(result));
    for (uint64_t n = 0; n < options.schedules; ++n) {
        const uint64_t seed = options.seed + n;
        Restore(options.vary_epoch != 0 ? kEpochs[seed / 40 % 6] : options.epoch);
        std::vector<twin::RankProgram> programs(ranks_.size());
        for (size_t rank = 0; rank < ranks_.size(); ++rank) {
            programs[rank].rank = static_cast<int>(rank);
            programs[rank].idle = &ranks_[rank].device().idle();
            if (options.faults.kill_rank >= 0 && !options.faults.kill_unseen)
                ranks_[rank].MarkLost(options.faults.kill_rank);
        }
        if (one_card_) {
            programs.resize(1);
            for (const auto& card : cards_) programs[0].steps.push_back(&card->program);
        } else {
            for (const auto& op : ops_) programs[static_cast<size_t>(op->step.rank)].steps.push_back(&op->program);
        }
        last_ = explorer_.Run(programs, Translate(options, seed));
        ++result.schedules;
        result.steps += last_.steps;
        result.instructions += last_.instructions;
        result.switches += last_.switches;
        result.status_blocks += last_.status_blocks;
        result.time_passed += last_.time_passed;
        result.last_hash = last_.trace_hash;
        result.choices = last_.choices.size();
        hashes_.insert(last_.trace_hash);
        for (const auto& poll : last_.polls) {
            polls_[poll.first].waiting += poll.second.waiting;
            polls_[poll.first].ready += poll.second.ready;
        }
        CompareOutcome(result, seed);
        if (result.failed != 0) return;
    }
}

// A failed combine leaves zeros in x, a failed dispatch in ep_recv_counts and expert_token_nums.
void Exploration::LeavesNothing(const Op& op, uint32_t number, am_explore_result& result) {
    const Plan& plan = *static_cast<Plan*>(op.step.plan);
    const moe::MoeDistributeInfo& info = plan.info();
    const uint64_t nums = info.localExperts * sizeof(int64_t),
                   counts = info.world * info.localExperts * sizeof(int32_t);
    for (uint32_t k = plan.dispatch() ? 3 : 0; k <= (plan.dispatch() ? 4 : 0); ++k) {
        const uint8_t* got = static_cast<const uint8_t*>(op.step.outputs[k]);
        const uint64_t bytes = !plan.dispatch() ? op.step.output_bytes[k] : k == 3 ? nums : counts;
        uint64_t at = 0;
        while (at < bytes && got[at] == 0) ++at;
        if (at == bytes) continue;
        result.failed = 2;
        snprintf(result.kind, sizeof(result.kind), "wrong result");
        snprintf(result.message, sizeof(result.message),
                 "op %u of rank %d (%s): it failed, but output %u is not zeros from byte %llu on: %#x", number,
                 op.step.rank, op.program.name, k, static_cast<unsigned long long>(at), got[at]);
        return;
    }
}

// An op adds at most the time of the schedule; unless waits expired, that is a cycle a step.
void Exploration::AddsToTimes(const Op& op, uint32_t number, am_explore_result& result) const {
    const uint64_t most = last_.time_passed ? 0xFFFFFFFFu : last_.steps / moe::kCyclesPerMicro + 1;
    for (uint32_t r = 0; op.Times() != nullptr && r < ranks_.size(); ++r) {
        const uint64_t added = op.Times()[r] - TimeBefore(r);
        if (added <= most) continue;
        result.failed = 2;
        snprintf(result.kind, sizeof(result.kind), "wrong result");
        snprintf(result.message, sizeof(result.message),
                 "op %u of rank %d (%s): performance_info of source %u was %llu and is %llu after at most %llu us",
                 number, op.step.rank, op.program.name, r, static_cast<unsigned long long>(TimeBefore(r)),
                 static_cast<unsigned long long>(op.Times()[r]), static_cast<unsigned long long>(most));
        return;
    }
}

void Exploration::CompareOutcome(am_explore_result& result, uint64_t seed) {
    if (last_.failed) {
        result.failed = 1;
        snprintf(result.kind, sizeof(result.kind), "%s", twin::FindingName(last_.kind));
        snprintf(result.message, sizeof(result.message), "%s", last_.message.c_str());
    }
    for (uint32_t i = 0; i < ops_.size() && result.failed == 0; ++i) {
        const Op& op = *ops_[i];
        if (!op.finished) continue;  // of a killed rank
        const int32_t code = op.code();
        if ((op.step.accepted >> code & 1) == 0) {
            result.failed = 3;
            snprintf(result.kind, sizeof(result.kind), "%s",
                     code == 0 ? "success" : moe::ErrorName(static_cast<uint32_t>(code)));
            snprintf(result.message, sizeof(result.message), "op %u of rank %d (%s): %s", i, op.step.rank,
                     op.program.name, code == 0 ? "it succeeded" : moe::RecordText(op.record).Message().c_str());
            break;
        }
        AddsToTimes(op, i, result);
        if (code != 0) LeavesNothing(op, i, result);
        if (code != 0 || op.step.compare == 0) continue;
        for (uint32_t k = 0; k < op.step.outputs_count && result.failed == 0; ++k) {
            const uint8_t* expected = static_cast<const uint8_t*>(op.step.expected[k]);
            const uint8_t* got = static_cast<const uint8_t*>(op.step.outputs[k]);
            if (expected == nullptr || memcmp(expected, got, op.step.expected_bytes[k]) == 0) continue;
            uint64_t at = 0;
            while (expected[at] == got[at]) ++at;
            result.failed = 2;
            snprintf(result.kind, sizeof(result.kind), "wrong result");
            snprintf(result.message, sizeof(result.message),
                     "op %u of rank %d (%s): output %u differs from the reference from byte %llu on: %#x, not %#x", i,
                     op.step.rank, op.program.name, k, static_cast<unsigned long long>(at), got[at], expected[at]);
        }
    }
    if (result.failed != 0) result.failed_seed = seed;
}

// One JSON object a line; areas are named as in the window header.
bool Exploration::WriteTrace(const char* path, const char* header) const {
    FILE* file = fopen(path, "w");
    if (file == nullptr) return false;
    fprintf(file, "%s\n", header);
    for (const twin::TraceEvent& event : last_.trace) {
        fprintf(file, "{\"t\":%llu,\"rank\":%d,\"core\":%u,\"launch\":%u,\"event\":\"%s\"",
                static_cast<unsigned long long>(event.time), event.rank, event.core, event.launch, event.event);
        if (strcmp(event.event, "begin") == 0) {
            uint32_t position = 0;
            for (const auto& op : ops_) {
                if (op->step.rank == event.rank && position++ == event.launch)
                    fprintf(file, ",\"op\":\"%s\"", op->program.name);
            }
        }
        if (event.target >= 0) {
            const bool state = event.area == twin::GmKind::kWindowState;
            fprintf(file, ",\"target\":%d,\"area\":\"%s\",\"offset\":%llu,\"bytes\":%llu,\"issue\":%llu", event.target,
                    AreaName(event.area), static_cast<unsigned long long>(event.offset),
                    static_cast<unsigned long long>(event.bytes), static_cast<unsigned long long>(event.issue));
            if (state) {
                fprintf(file, ",\"words\":\"");
                for (uint32_t i = 0; i < 8; ++i) fprintf(file, i == 0 ? "%08x" : " %08x", event.words[i]);
                fprintf(file, "\"");
            }
        }
        fprintf(file, "}\n");
    }
    return fclose(file) == 0;
}

}  // namespace

}  // namespace ops

namespace {
ops::Exploration& ExplorationAt(void* exploration) { return *static_cast<ops::Exploration*>(exploration); }
}  // namespace

int am_engine_is_checked(void) { return 1; }
void* am_explore_create(int world, uint64_t data_bytes, uint64_t registered_bytes) {
    return ops::Made([=] { return new ops::Exploration(static_cast<uint32_t>(world), data_bytes, registered_bytes); });
}
void am_explore_destroy(void* exploration) { delete static_cast<ops::Exploration*>(exploration); }
int am_explore_servers(void* exploration, int ranks_per_server, int intra_node_stores) {
    return ops::Tried([=] {
        ExplorationAt(exploration).UseServers(static_cast<uint32_t>(ranks_per_server), intra_node_stores != 0);
    });
}
void am_explore_one_card(void* exploration, int one_card) { ExplorationAt(exploration).UseOneCard(one_card != 0); }
int am_explore_program(void* exploration, const void* steps, int count) {
    return ops::Tried([=] {
        ExplorationAt(exploration).SetProgram(static_cast<const am_explore_step*>(steps), static_cast<uint32_t>(count));
    });
}
void am_explore_run(void* exploration, const void* options, void* result) {
    ExplorationAt(exploration)
        .Run(*static_cast<const am_explore_options*>(options), *static_cast<am_explore_result*>(result));
}
uint64_t am_explore_distinct(void* exploration) { return ExplorationAt(exploration).hashes_.size(); }
void am_explore_forget(void* exploration) {
    ExplorationAt(exploration).hashes_.clear();
    ExplorationAt(exploration).polls_.clear();
}
uint64_t am_explore_choices(void* exploration, int widths, uint16_t* out, uint64_t capacity) {
    const twin::RunResult& last = ExplorationAt(exploration).last_;
    const std::vector<uint16_t>& from = widths != 0 ? last.options : last.choices;
    std::copy_n(from.begin(), std::min<uint64_t>(from.size(), capacity), out);
    return from.size();
}
uint64_t am_explore_polls(void* exploration, char* text, uint64_t bytes) {
    std::string lines;
    for (const auto& [place, count] : ExplorationAt(exploration).polls_)
        lines += place + " " + std::to_string(count.waiting) + " " + std::to_string(count.ready) + "\n";
    return ops::GiveText(lines, text, bytes);
}
int am_explore_trace(void* exploration, const char* path, const char* header) {
    return ExplorationAt(exploration).WriteTrace(path, header) ? 1 : 0;
}
int am_explore_code(void* exploration, int step, int32_t* record) {
    const auto& op = *ExplorationAt(exploration).ops_[static_cast<size_t>(step)];
    if (!op.finished) return -1;
    memcpy(record, op.record, sizeof(op.record));
    return op.code();
}

#else  // the fast engine explores nothing

int am_engine_is_checked(void) { return 0; }

#endif
