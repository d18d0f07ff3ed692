// The timed engine across the C ABI: one op of all ranks of a world in this process, with modelled times.
#include "abi/ascend_moe.h"

#ifdef TWIN_TIMED

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "engines/local_ranks.h"
#include "twin/engine/predict.h"

extern "C" {

// One op of one rank.
struct am_timed_step {
    int32_t rank;
    void* plan;
    const void* const* inputs;
    void* const* outputs;
};

struct am_timed_options {
    uint64_t payload_bytes;  // copies of rows from this size on are left out; 0: none
    double limit_ns;
    uint64_t events;
};

struct am_timed_result {
    double total_ns, vector_ns;
    uint64_t instructions, switches, status_stores, looks, events, sync_alls, core_barriers;
    uint32_t failed;
    char message[1020];
};

}  // extern "C"

namespace ops {

namespace {

// Windows of all ranks, and the op that each of them ran last.
struct TimedWorld {
    TimedWorld(uint32_t world, uint64_t data_bytes, uint64_t registered_bytes)
        : ranks_(world, data_bytes, registered_bytes) {}

    void Run(const am_timed_step* steps, int count, const double* costs, const am_timed_options& options,
             am_timed_result& result);
    // A block of a rank's registered area: all of it. No op of a timed world consumes it.
    void* Register(int rank) {
        Communicator& comm = ranks_.Of(rank);
        if (comm.registered_area() == nullptr) {
            RegisteredArea::Grant grant;
            const std::shared_ptr<RegisteredArea> area = comm.OpenRegisteredArea();
            if (!area || !area->Take(comm.registered_bytes(), grant)) return nullptr;
        }
        return comm.registered(rank);
    }

    LocalRanks ranks_;
    std::vector<std::unique_ptr<LocalOp>> ops_;
    twin::TimedEngine engine_;
    twin::TimedResult last_;
};

void TimedWorld::Run(const am_timed_step* steps, int count, const double* costs, const am_timed_options& options,
                     am_timed_result& result) {
    memset(&result, 0, sizeof(result));
    ops_.clear();
    std::vector<twin::RankProgram> programs(ranks_.size());
    for (size_t rank = 0; rank < ranks_.size(); ++rank) programs[rank].rank = static_cast<int>(rank);
    for (const am_timed_step* step = steps; step != steps + count; ++step) {
        ops_.push_back(std::make_unique<LocalOp>(ranks_.Of(step->rank), *static_cast<Plan*>(step->plan), step->inputs,
                                                 step->outputs));
        programs[static_cast<size_t>(step->rank)].steps.push_back(&ops_.back()->program);
    }
    twin::TimedOptions run;
    run.payload = options.payload_bytes == 0;
    run.payload_bytes = options.payload_bytes;
    run.limit_ns = options.limit_ns;
    run.events = options.events;
    last_ = engine_.Run(programs, twin::CostsFrom(costs), run);
    result.total_ns = last_.total_ns;
    result.vector_ns = last_.vector_ns;
    result.instructions = last_.instructions;
    result.switches = last_.switches;
    result.status_stores = last_.status_stores;
    result.looks = last_.looks;
    result.events = last_.events.size();
    result.sync_alls = last_.sync_alls;
    result.core_barriers = last_.core_barriers;
    result.failed = last_.failed;
    snprintf(result.message, sizeof(result.message), "%s", last_.message.c_str());
}

TimedWorld& WorldAt(void* timed) { return *static_cast<TimedWorld*>(timed); }

}  // namespace
}  // namespace ops

void* am_timed_create(int world, uint64_t data_bytes, uint64_t registered_bytes) {
    return ops::Made([=] { return new ops::TimedWorld(static_cast<uint32_t>(world), data_bytes, registered_bytes); });
}
void am_timed_destroy(void* timed) { delete static_cast<ops::TimedWorld*>(timed); }

void* am_timed_communicator(void* timed, int rank) { return &ops::WorldAt(timed).ranks_.Of(rank); }
void* am_timed_registered(void* timed, int rank) { return ops::WorldAt(timed).Register(rank); }

int am_timed_servers(void* timed, int ranks_per_server) {
    return ops::Tried([=] { ops::WorldAt(timed).ranks_.UseServers(static_cast<uint32_t>(ranks_per_server), false); });
}

const char* am_timed_cost_names(void) { return twin::CostNames(); }

void am_timed_run(void* timed, const void* steps, int count, const double* costs, const void* options, void* result) {
    am_timed_result& out = *static_cast<am_timed_result*>(result);
    try {
        ops::WorldAt(timed).Run(static_cast<const am_timed_step*>(steps), count, costs,
                                *static_cast<const am_timed_options*>(options), out);
    } catch (const std::exception& error) {
        out.failed = 1;
        snprintf(out.message, sizeof(out.message), "%s", error.what());
    }
}

uint64_t am_timed_path(void* timed, char* text, uint64_t bytes) {
    return ops::GiveText(twin::PathText(ops::WorldAt(timed).last_), text, bytes);
}

uint64_t am_timed_links(void* timed, char* text, uint64_t bytes) {
    return ops::GiveText(twin::LinkText(ops::WorldAt(timed).last_), text, bytes);
}

int am_timed_outcome(void* timed, int step, double* times, int32_t* record) {
    const auto& op = *ops::WorldAt(timed).ops_[static_cast<size_t>(step)];
    const auto& steps = ops::WorldAt(timed).last_.steps;
    const size_t rank = static_cast<size_t>(op.comm.rank());
    if (times != nullptr && rank < steps.size() && !steps[rank].empty()) {
        times[0] = steps[rank].back().start_ns;
        times[1] = steps[rank].back().end_ns;
    }
    memcpy(record, op.record, sizeof(op.record));
    return op.code();
}

uint64_t am_timed_events(void* timed, void* out, uint64_t capacity) {
    const auto& events = ops::WorldAt(timed).last_.events;
    std::copy_n(events.data(), std::min<uint64_t>(events.size(), capacity), static_cast<twin::TimelineEvent*>(out));
    return events.size();
}

#endif  // TWIN_TIMED
