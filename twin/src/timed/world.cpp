#ifdef TWIN_TIMED

#include "world.h"

#include <algorithm>

#include "../core/runtime.h"

namespace twin {

namespace timed {

World::~World() {
    if (ub_ != nullptr) UnmapUb(ub_, ub_cores_);
}

TimedResult World::Run(std::vector<RankProgram>& programs, const Costs& costs, const TimedOptions& options) {
    costs_ = costs;
    vector_costs_ = {{{costs.vector_add_cycles, costs.vector_add_head},
                      {costs.vector_mul_cycles, costs.vector_mul_head},
                      {costs.vector_div_cycles, costs.vector_div_head},
                      {costs.vector_exp_cycles, costs.vector_exp_head},
                      {costs.vector_muls_cycles, costs.vector_muls_head},
                      {costs.vector_cast_cycles, costs.vector_cast_head},
                      {costs.vector_else_cycles, costs.vector_else_head}}};
    for (VectorCost& cost : vector_costs_) cost = {cost.repeat_ns / costs.clock_ghz, cost.head_ns / costs.clock_ghz};
    vector_count_ns_ = costs.vector_count_head / costs.clock_ghz;
    for (double* cost : {&costs_.scalar_ns, &costs_.issue_ns, &costs_.flag_ns}) *cost *= costs.scalar_scale;
    for (double* cost : {&costs_.read_latency_ns, &costs_.write_latency_ns}) *cost *= costs.latency_scale;
    for (double* cost : {&costs_.package_latency_ns, &costs_.server_latency_ns, &costs_.far_latency_ns})
        *cost *= costs.hop_scale;
    for (double* cost : {&costs_.package_gbps, &costs_.link_gbps}) *cost *= costs.link_share;
    options_ = options;
    result_ = TimedResult();
    phases_.assign(1, "launch");
    stores_ = flows_ = 0;
    waiting_ = {};
    RunFibers(cores_, [&] {
        Prepare(programs);
        Loop();
        Land(1e300);  // stores that no core waited for
    });
    pending_ = {};
    result_.failed = failure_ != nullptr;
    if (failure_) {
        result_.message = TextOf(failure_, &result_.kind);
    } else {
        Collect(result_);
    }
    return std::move(result_);
}

void World::Prepare(std::vector<RankProgram>& programs) {
    fabric_ = std::make_unique<Fabric>(costs_, static_cast<uint32_t>(programs.size()));
    ranks_.clear();
    uint32_t total = 0;
    for (RankProgram& program : programs) {
        ranks_.push_back(std::make_unique<RankState>());
        RankState& rank = *ranks_.back();
        rank.program = &program;
        rank.index = static_cast<uint32_t>(program.rank);
        rank.first = total;
        uint32_t most = 0;
        for (const ProgramStep* step : program.steps) most = std::max(most, step->spec.block_dim);
        total += most;
        result_.steps.emplace_back();
    }
    if (total > ub_cores_) {
        uint8_t* const more = MapUb(total);
        if (ub_ != nullptr) UnmapUb(ub_, ub_cores_);
        ub_ = more;
        ub_cores_ = total;
    }
    while (cores_.size() < total) cores_.push_back(std::make_unique<CoreState>());
    live_ranks_ = 0;
    for (auto& rank : ranks_) {
        if (rank->program->steps.empty()) continue;
        ++live_ranks_;
        StartStep(*rank);
    }
}

// The next launch of a rank begins when the one before has ended.
void World::StartStep(RankState& rank) {
    rank.step = rank.program->steps[rank.at];
    const LaunchSpec& spec = rank.step->spec;
    if (rank.step->begin) rank.step->begin();
    rank.launch.Begin(spec, rank.step->kernel);
    rank.cores = spec.block_dim;
    const double start = rank.end;
    result_.steps[rank.index].push_back({start, start});
    for (uint32_t i = 0; i < rank.cores; ++i) {
        CoreState& core = *cores_[rank.first + i];
        uint8_t* const ub = ub_ + static_cast<size_t>(rank.first + i) * kUbBytes;
        StartFiber(core, i, static_cast<int>(rank.index), ub, rank.launch);
        core.core.timed = &core;
        // Kernels that declare their polls name their steps as well.
        core.core.phase = spec.watch_polls ? rank.step->name : phases_[0];
        core.rank = &rank;
        core.global = rank.first + i;
        for (PipeClock& clock : core.pipes) clock = PipeClock();
        core.now = core.phase_began = start;
        core.scalar_ns = costs_.scalar_ns;
        core.vector_ns = 0;
        core.path = rank.path;
        core.phase = nullptr;
        core.fruitless_at = -1;
        core.looking = core.polled = false;
        core.scan_from = core.look_size = rank.landings.size();
        core.released_by = 0;
        Mark(core);
        Wait(core, start + costs_.launch_ns + i * costs_.stagger_ns, Cause::kLaunch);
        if (spec.watch_polls) core.phase_began = core.now;  // its only step is the kernel
        for (PipeClock& clock : core.pipes) clock.free = clock.ready = clock.done = core.now;
        Push(core, core.now);
    }
}

void World::FinishStep(RankState& rank) {
    StepTime& times = result_.steps[rank.index].back();
    times.end_ns = rank.end;
    if (result_.events.size() < options_.events) {
        result_.events.push_back({times.start_ns, times.end_ns, 0, 0, static_cast<int32_t>(rank.index), 0, -1,
                                  static_cast<uint32_t>(Pipe::kS), "launch", rank.step->name});
    } else if (options_.events != 0) {
        ++result_.dropped;
    }
    rank.path = rank.last->path;
    if (rank.step->end) rank.step->end();
    if (++rank.at < rank.program->steps.size()) {
        StartStep(rank);
    } else {
        rank.step = nullptr;
        --live_ranks_;
    }
}

void World::Loop() {
    while (live_ranks_ > 0 && !failure_) {
        if (waiting_.empty()) {
            FailHanging("nobody can move any more");
            return;
        }
        const Waiting first = waiting_.top();
        waiting_.pop();
        CoreState& core = *cores_[first.core];
        Land(first.time);
        core.status = CoreStatus::kReady;
        Resume(core);
        ++result_.switches;
        if (failure_) return;
        RankState& rank = *core.rank;
        if (core.status == CoreStatus::kDone && rank.launch.live == 0) {
            FinishStep(rank);
        } else if (core.status == CoreStatus::kDone || core.status == CoreStatus::kBarrier) {
            ReleaseBarrier(rank);
        }
    }
}

void World::Collect(TimedResult& result) {
    const RankState* last = ranks_[0].get();
    for (const auto& rank : ranks_) {
        if (rank->end > last->end) last = rank.get();
    }
    result.total_ns = last->end;
    for (uint32_t phase = 0; phase < phases_.size(); ++phase) {
        for (uint32_t cause = 0; cause < kCauses; ++cause) {
            const double ns = last->path.ns[phase][cause];
            if (ns != 0) result.path.push_back({phases_[phase], static_cast<Cause>(cause), ns});
        }
    }
    result.links = fabric_->Use();
}

// ---- fibers ----

void World::EndKernel(CoreState& core) {
    RankState& rank = *core.rank;
    Barrier(core, Pipe::kAll);
    result_.core_barriers = std::max<uint64_t>(result_.core_barriers, core.core.core_barriers);
    result_.vector_ns = std::max(result_.vector_ns, core.vector_ns);
    EndWait(core);
    EndPhase(core);
    if (core.now < rank.end && rank.last != nullptr) return;
    rank.end = core.now;
    rank.last = &core;
}

void World::Park(CoreState& core, CoreStatus status, const Loc& loc) { LeaveFiber(core, status, loc); }

// Lets all cores whose clock is before `time` run first.
void World::YieldUntil(CoreState& core, double time) {
    if (unwinding_) return;
    if (failure_ == nullptr && (waiting_.empty() || time <= waiting_.top().time)) {
        Land(time);
        return;
    }
    Push(core, time);
    Park(core, CoreStatus::kReady, core.core.blocked_at);
}

// ---- barriers ----

void World::SyncAll(CoreState& core, const Loc& loc) {
    ++core.core.sync_all_calls;
    EndWait(core);
    Barrier(core, Pipe::kAll);
    const double came = core.now;
    Park(core, CoreStatus::kBarrier, loc);
    Trace(core, Pipe::kS, "SyncAll", came, core.now);
}

// The last core to arrive decides when all continue, and all continue with its critical path.
void World::ReleaseBarrier(RankState& rank) {
    const uint32_t cores = AllAtBarrier(cores_, rank.first, rank.cores);
    if (cores == 0) return;
    CoreState* last = cores_[rank.first].get();
    for (uint32_t i = 1; i < cores; ++i) {
        CoreState& core = *cores_[rank.first + i];
        if (core.now > last->now) last = &core;
    }
    Wait(*last, last->now + costs_.sync_ns, Cause::kSync);
    result_.sync_alls = std::max<uint64_t>(result_.sync_alls, last->core.sync_all_calls);
    for (uint32_t i = 0; i < cores; ++i) {
        CoreState& core = *cores_[rank.first + i];
        if (&core != last) {
            core.path = last->path;
            core.now = last->now;
        }
        core.status = CoreStatus::kReady;
        Push(core, core.now);
    }
}

void World::CrossSet(CoreState& core, int mode, Pipe pipe, int id, const Loc& loc) {
    RankState& rank = *core.rank;
    rank.launch.cross.Set(core.core.index, rank.cores, mode, id, loc);
    Mark(core);
    const double done = std::max(core.now + costs_.flag_ns, core.pipes[static_cast<uint32_t>(pipe)].done);
    rank.cross_time = std::max(rank.cross_time, done);
    Wait(core, core.now + costs_.flag_ns, Cause::kScalar);
    for (uint32_t i = 0; i < rank.cores; ++i) {
        CoreState& other = *cores_[rank.first + i];
        if (other.status == CoreStatus::kCross &&
            rank.launch.cross.Passed(other.core.index, rank.cores, other.cross_id, other.cross_turn)) {
            other.status = CoreStatus::kReady;
            Push(other, std::max(other.now, done));
        }
    }
}

void World::CrossWait(CoreState& core, int id, const Loc& loc) {
    RankState& rank = *core.rank;
    core.cross_id = id;
    core.cross_turn = rank.launch.cross.Expect(core.core.index, id, loc);
    if (!rank.launch.cross.Passed(core.core.index, rank.cores, id, core.cross_turn))
        Park(core, CoreStatus::kCross, loc);
    Mark(core);
    Wait(core, rank.cross_time + costs_.flag_latency_ns, Cause::kSync);
}

void World::FailHanging(const char* how) {
    FiberHost::FailHanging(cores_, how, [](const CoreState&) { return true; });
    live_ranks_ = 0;
}

// ---- what the API headers call ----

Outcome Schedule(const Instruction& instruction) { return World::Running().Schedule(World::Here(), instruction); }
void OrderScalarAccess(const GmRange& range, const void* at, uint64_t bytes, bool store) {
    World::Call(&World::OrderScalarAccess, range, Access{reinterpret_cast<uintptr_t>(at), bytes}, store);
}

}  // namespace timed

using Engine = timed::World;

void FlagSet(uint32_t flag, Pipe from, const Loc&) { Engine::Call(&Engine::FlagSet, flag, from); }
void FlagWait(uint32_t flag, Pipe to, const Loc&) { Engine::Call(&Engine::FlagWait, flag, to); }
void Barrier(Pipe pipe, const Loc&) { Engine::Call(&Engine::Barrier, pipe); }
void CompletePipe(Pipe pipe) { Engine::Call(&Engine::WaitPipe, pipe); }
void SyncAllCores(const Loc& loc) { Engine::Call(&Engine::SyncAll, loc); }
void PollYield(const Loc& loc) { Engine::Call(&Engine::Poll, loc); }
void SuspectedPoll(const Loc& loc) { Engine::Call(&Engine::Poll, loc); }
void Yield(const Loc& loc, bool idle) {
    if (idle) {
        Engine::Call(&Engine::Idle, loc);
    } else {
        Engine::Call(&Engine::YieldUntil, Engine::Here().now);
    }
}
void CrossCoreSet(int mode, Pipe pipe, int id, const Loc& loc) { Engine::Call(&Engine::CrossSet, mode, pipe, id, loc); }
void CrossCoreWait(int id, const Loc& loc) { Engine::Call(&Engine::CrossWait, id, loc); }
int64_t SystemCycle() { return static_cast<int64_t>(Engine::Here().now / 20); }  // 50 cycles a microsecond

const char* CauseName(Cause cause) {
    static const char* const kNames[] = {"S", "V", "MTE2", "MTE3", "SyncAll", "status", "launch", "post"};
    return kNames[static_cast<int>(cause)];
}

const char* CostNames() {
#define TWIN_NAME(name) #name " "
    return TWIN_COSTS(TWIN_NAME);
#undef TWIN_NAME
}
Costs CostsFrom(const double* values) {
    Costs costs;
#define TWIN_COST(name) costs.name = *values++;
    TWIN_COSTS(TWIN_COST)
#undef TWIN_COST
    return costs;
}

std::string PathText(const TimedResult& result) {
    std::string lines;
    for (const PathPart& part : result.path)
        lines += part.phase + "\t" + CauseName(part.cause) + "\t" + std::to_string(part.ns) + "\n";
    return lines;
}
std::string LinkText(const TimedResult& result) {
    std::string lines;
    for (const LinkUse& use : result.links) {
        lines += use.name + "\t" + std::to_string(use.rank) + "\t" + std::to_string(use.bytes) + "\t" +
                 std::to_string(use.gbps) + "\n";
    }
    return lines;
}

TimedEngine::TimedEngine() : world_(std::make_unique<timed::World>()) {}
TimedEngine::~TimedEngine() = default;
TimedResult TimedEngine::Run(std::vector<RankProgram>& programs, const Costs& costs, const TimedOptions& options) {
    return world_->Run(programs, costs, options);
}

// The timed engine runs programs of all ranks: a single launch is refused.
class Scheduler {};
class Group {};
Device::Device(int rank) : rank_(rank) {}
Device::~Device() = default;
void Device::JoinGroup(const void*, uint32_t) {}
void Device::Launch(const LaunchSpec&, const std::function<void()>&) {
    throw std::runtime_error("the timed engine runs the programs of all ranks together: see twin/timed.h");
}

}  // namespace twin

#endif  // TWIN_TIMED
