#ifdef TWIN_CHECKED

#include "world.h"

#include <algorithm>

namespace twin {

namespace {
constexpr int64_t kJumpCycles = 50'000'000;  // one second
constexpr uint32_t kMaxIdleRounds = 5000;
constexpr uint32_t kSuspectedRounds = 64;
}  // namespace

// ---- what the API headers call ----

namespace checked {
void* Reserve(size_t bytes) { return World::Running().Reserve(World::Here(), bytes); }
void Enqueue(const Instruction& instruction, void (*run)(void*), void* effect) {
    World::Call(&World::Enqueue, instruction, run, effect);
}
void CheckScalar(const Instruction& instruction) { World::Call(&World::CheckScalar, instruction); }
void LoadCached(const void* from, uint32_t bytes, void* value, const GmRange& range, const Loc& loc) {
    World::Call(&World::LoadCached, reinterpret_cast<uintptr_t>(from), bytes, value, range, loc);
}
void StoreCached(void* to, uint32_t bytes, const void* value, const GmRange& range, const Loc& loc) {
    World::Call(&World::StoreCached, reinterpret_cast<uintptr_t>(to), bytes, value, range, loc);
}
uint32_t ScalarClock() { return World::Running().ScalarClock(World::Here()); }
void AddAgent(CopyQueues* queues) { World::Call(&World::AddAgent, queues); }
}  // namespace checked

void FlagSet(uint32_t flag, Pipe from, const Loc& loc) { World::Call(&World::FlagSet, flag, from, loc); }
void FlagWait(uint32_t flag, Pipe to, const Loc& loc) { World::Call(&World::FlagWait, flag, to, loc); }
void Barrier(Pipe pipe, const Loc& loc) { World::Call(&World::Barrier, pipe, loc); }
void CompletePipe(Pipe pipe) { World::Call(&World::ForcePipe, static_cast<uint32_t>(pipe)); }
void UbCarved(uint32_t begin, uint32_t bytes) { World::Call(&World::Carved, begin, bytes); }
void UbExposed() { World::Here().ub_high = kUbBytes; }
void UbPointed() {
    UbExposed();
    Shadow::Fill(World::Here().ub_blocks.data(), 0, kUbBytes, true);
}
void UbReleased() { World::Call(&World::Released); }
void CleanLines(uintptr_t address, bool all, const Loc& loc) { World::Call(&World::CleanLines, address, all, loc); }
void FlagAt(uintptr_t address, bool certain) { World::Call(&World::FlagAt, address, certain); }
void SyncAllCores(const Loc& loc) { World::Call(&World::SyncAll, loc); }
void PollYield(const Loc& loc) { World::Call(&World::Poll, loc, false); }
uint32_t PollSleeps() { return World::Running().polls(); }
void SuspectedPoll(const Loc& loc) { World::Call(&World::Poll, loc, true); }
void Yield(const Loc& loc, bool idle) { World::Call(&World::Yield, loc, idle); }
int64_t SystemCycle() { return World::Running().cycles(); }
void CrossCoreSet(int mode, Pipe pipe, int id, const Loc& loc) { World::Call(&World::CrossSet, mode, pipe, id, loc); }
void CrossCoreWait(int id, const Loc& loc) { World::Call(&World::CrossWait, id, loc); }

// ---- a run ----

World::World() : shadow_(sites_) {}

World::~World() {
    for (const auto& core : cores_) UnmapUb(core->ub, 1);
}

void World::Prepare(std::vector<RankProgram>& programs, const RunOptions& options) {
    options_ = options;
    result_ = RunResult();
    suspected_.clear();
    result_.trace_hash = 0x2545F4914F6CDD1Dull;
    last_run_ = nullptr;
    cycles_ = 1;
    dirty_lines_ = 0;
    idle_rounds_ = 0;
    landings_ = 0;
    rank_count_ = live_ranks_ = static_cast<uint32_t>(programs.size());
    while (ranks_.size() < rank_count_) ranks_.push_back(std::make_unique<RankState>());
    core_count_ = 0;
    for (uint32_t r = 0; r < rank_count_; ++r) {
        RankState& rank = *ranks_[r];
        rank.program = &programs[r];
        rank.program->traffic = Traffic();
        rank.next = 0;
        rank.step = nullptr;
        rank.first = core_count_;
        rank.most_cores = 0;
        rank.dead = rank.stalled = false;
        for (const ProgramStep* step : programs[r].steps)
            rank.most_cores = std::max(rank.most_cores, step->spec.block_dim);
        core_count_ += rank.most_cores;
    }
    while (cores_.size() < core_count_) {
        auto core = std::make_unique<CoreState>();
        core->ub = MapUb(1);
        core->ub_blocks.resize(kUbBytes / kBlockBytes);
        cores_.push_back(std::move(core));
    }
    clocks_.Reset(core_count_ * kPipes);
    sites_.Reset();
    shadow_.Reset(!options.explicit_sync);
    for (uint32_t i = 0; i < core_count_; ++i) {
        CoreState& core = *cores_[i];
        core.global = i;
        core.status = CoreStatus::kDone;
        core.cache.clear();
        core.dirty_lines = 0;
        core.stores.clear();
        core.looked.clear();
        core.looks.clear();
        core.agents.clear();
        core.issue_clock = kNoClock;
    }
    SeedSchedule();
}

void World::StartRanks() {
    for (uint32_t r = 0; r < rank_count_; ++r) {
        ranks_[r]->clock.assign(core_count_ * kPipes, 0);
        StartStep(*ranks_[r]);
    }
}

void World::StartStep(RankState& rank) {
    if (rank.next == rank.program->steps.size()) {
        rank.step = nullptr;
        --live_ranks_;
        return;
    }
    rank.step = rank.program->steps[rank.next++];
    if (rank.step->begin) rank.step->begin();
    rank.launch.Begin(rank.step->spec, rank.step->kernel);
    rank.cross_clocks.clear();
    for (const HostWrite& write : rank.step->writes) WriteFromHost(rank, write);
    rank.cores = rank.step->spec.block_dim;
    for (uint32_t i = 0; i < rank.cores; ++i) {
        CoreState& core = *cores_[rank.first + i];
        core.rank = &rank;
        StartFiber(core, i, rank.program->rank, core.ub, rank.launch);
        for (uint32_t b = 0; b < core.ub_high / kBlockBytes; ++b) core.ub_blocks[b] = Block();
        core.ub_high = rank.step->spec.lists_all ? kUbBytes : 0;  // then writes may pass what is carved
        for (uint32_t p = 0; p < kPipes; ++p) {
            core.pipes[p].ops.clear();
            core.pipes[p].head = 0;
            core.pipes[p].last = sites_.last();
            core.clock[p] = rank.clock;
        }
        for (FlagState& flag : core.flags) flag = FlagState();
        Learns(core);
        core.effect_chunk = core.effect_used = 0;
        core.store_bytes.clear();
        if (!options_.explicit_sync) {  // a launch starts with an empty cache
            core.cache.clear();
        } else {  // the host keeps lines of tensors coherent
            for (auto line = core.cache.begin(); line != core.cache.end();) {
                const auto& ranges = rank.step->spec.ranges;
                const bool held = std::any_of(ranges.begin(), ranges.end(), [&](const GmRange& range) {
                    return range.window() && line->first + 63 >= range.begin && line->first < range.end;
                });
                line = held ? std::next(line) : core.cache.erase(line);
            }
        }
        core.woken = false;
        core.in_vain = 0;
        core.looked.clear();
        core.suspected = false;
        core.fruitless = 0;
        core.idle_since = std::chrono::steady_clock::time_point::max();
        if (options_.trace) Trace(core, "begin", nullptr, 0, 0, 0);
    }
}

// The host's write comes after all launches of its rank that have ended. Any other reader races with it.
void World::WriteFromHost(RankState& rank, const HostWrite& write) {
    CoreState& core = *cores_[rank.first];
    core.rank = &rank;
    core.core.rank = rank.program->rank;
    const uint16_t agent = core.Agent(Pipe::kS);
    const Loc here{"host", 0};
    const uint32_t number = sites_.Add({"write of the host", here, agent, true, false});
    const Toucher toucher = {number, agent, true, false, true, rank.clock.data()};
    for (uintptr_t at = write.to, end = write.to + write.bytes; at < end;) {
        Page& page = shadow_.PageOf(at);
        page.written = true;
        const uintptr_t stop = std::min(end, page.begin + kPageBytes);
        Block& block = page.blocks[(at - page.begin) / kBlockBytes];
        const Shadow::Conflict conflict =
            shadow_.Touch(&block, static_cast<uint32_t>(at % kBlockBytes), stop - at, toucher);
        if (conflict.other != 0)
            RaiseConflict(toucher, conflict,
                          "byte " + std::to_string(at + conflict.offset - write.to) + " of what it writes");
        at = stop;
    }
    rank.clock[agent] = number;
    memcpy(reinterpret_cast<void*>(write.to), write.from, write.bytes);
}

void World::FinishStep(RankState& rank) {
    for (uint32_t i = 0; i < rank.cores; ++i) {
        CoreState& core = *cores_[rank.first + i];
        MoveAgents(core, true);
        core.agents.clear();
        for (uint32_t p = 0; p < kPipes; ++p) {
            checked::JoinClock(rank.clock, core.clock[p]);
            rank.clock[core.Agent(static_cast<Pipe>(p))] = sites_.last();
        }
        rank.program->traffic.Add(core.core.traffic);
    }
    if (rank.step->end) rank.step->end();
    StartStep(rank);
}

RunResult World::Run(std::vector<RankProgram>& programs, const RunOptions& options) {
    Prepare(programs, options);
    RunFibers(cores_, [&] {
        StartRanks();
        Loop();
    });  // what is left then: fibers of a killed rank
    result_.failed = failure_ != nullptr;
    if (failure_) result_.message = TextOf(failure_, &result_.kind);
    result_.instructions = sites_.last();
    result_.suspect = FirstSuspect();
    return result_;
}

void World::Loop() {
    while (live_ranks_ > 0 && !failure_) {
        if (!Gather()) {
            if (!Idle()) return;
            continue;
        }
        ++cycles_;
        if (++result_.steps > options_.max_steps) FailHanging("still busy after max_steps steps");
        if (failure_) return;
        Inject();
        const size_t picked = PickEntity();
        if (Frozen(*enabled_[picked].core->rank)) continue;
        Step(enabled_[picked]);
    }
}

bool World::FiberEnabled(const CoreState& core) const {
    switch (core.status) {
        case CoreStatus::kReady: return true;
        case CoreStatus::kFlag: return FlagReady(core, core.wait_flag, core.wait_turn);
        case CoreStatus::kDrain: return Idle(core);
        case CoreStatus::kPolling: return core.woken;
        case CoreStatus::kCross:
            return core.rank->launch.cross.Passed(core.core.index, core.rank->cores, core.cross_id, core.cross_turn);
        default: return false;
    }
}

bool World::PipeEnabled(const CoreState& core, uint32_t pipe) const {
    const PipeQueue& queue = core.pipes[pipe];
    if (queue.empty()) return false;
    const QueuedOp& op = queue.ops[queue.head];
    if (op.kind == Queued::kWait) return FlagReady(core, op.flag, op.turn);
    if (op.kind != Queued::kEffect && pipe == static_cast<uint32_t>(Pipe::kMte3)) return core.stores.empty();
    return true;
}

// Lists everything that can move. Choice 0 comes first: the core that ran last, then the other cores in
// order, then pipes, then stores.
bool World::Gather() {
    enabled_.clear();
    const uint32_t start = last_run_ != nullptr ? last_run_->global : 0;
    for (uint32_t n = 0; n < core_count_; ++n) {
        CoreState& core = *cores_[(start + n) % core_count_];
        if (core.rank == nullptr || core.status == CoreStatus::kDone || Frozen(*core.rank)) continue;
        if (FiberEnabled(core)) enabled_.push_back({&core, kFiber});
    }
    if (options_.policy == Policy::kLate && !enabled_.empty()) return true;
    for (uint32_t n = 0; n < core_count_; ++n) {
        CoreState& core = *cores_[(start + n) % core_count_];
        if (core.rank == nullptr || core.rank->step == nullptr || Frozen(*core.rank)) continue;
        for (uint32_t pipe = 1; pipe < kPipes; ++pipe) {
            if (PipeEnabled(core, pipe)) enabled_.push_back({&core, static_cast<Kind>(pipe)});
        }
        if (!core.stores.empty()) enabled_.push_back({&core, kStores});
        if (AgentPending(core)) enabled_.push_back({&core, kAgents});
    }
    return !enabled_.empty();
}

void World::Step(const Entity& entity) {
    CoreState& core = *entity.core;
    if (entity.kind == kFiber) {
        last_run_ = &core;
        Resume(core);
        RankState& rank = *core.rank;
        if (core.status == CoreStatus::kBarrier || core.status == CoreStatus::kDone) {
            if (rank.launch.live == 0) {
                FinishStep(rank);
            } else {
                ReleaseBarrier(rank);
            }
        }
        return;
    }
    g_current_core = &core.core;
    try {
        if (entity.kind == kStores) {
            LandSome(core);
        } else if (entity.kind == kAgents) {
            MoveAgents(core, false);
        } else {
            const uint32_t pipe = entity.kind;
            RunHead(core, pipe, false);
            // Instructions that touch only this core's memory run without a choice between them: no other
            // core can observe the order.
            while (pipe == static_cast<uint32_t>(Pipe::kV) && PipeEnabled(core, pipe)) RunHead(core, pipe, false);
        }
    } catch (...) {
        Fail(std::current_exception());
    }
    g_current_core = nullptr;
}

// ---- fibers ----

void World::EndKernel(CoreState& core) {
    Drain(core, {"end of kernel", 0});
    CheckDirtyAtEnd(core);
    Look(core, false);
    if (options_.trace) Trace(core, "end", nullptr, 0, 0, 0);
}

void World::Park(CoreState& core, CoreStatus status, const Loc& loc) {
    LeaveFiber(core, status, loc);
    core.status = CoreStatus::kReady;
}

void World::MaybeYield(CoreState& core) {
    if (unwinding_ || current_ != &core) return;
    if (ChangePoint()) Park(core, CoreStatus::kReady, core.core.blocked_at);
}

// ---- barriers ----

void World::SyncAll(CoreState& core, const Loc& loc) {
    ++core.core.sync_all_calls;
    ForgetReads(core.core);
    Look(core, false);
    Drain(core, loc);
    Park(core, CoreStatus::kBarrier, loc);
    if (options_.trace) Trace(core, "sync", nullptr, 0, 0, 0);
}

void World::ReleaseBarrier(RankState& rank) {
    const uint32_t cores = AllAtBarrier(cores_, rank.first, rank.cores);
    if (cores == 0) return;
    scratch_.assign(core_count_ * kPipes, 0);
    for (uint32_t i = 0; i < cores; ++i) {
        CoreState& core = *cores_[rank.first + i];
        checked::JoinClock(scratch_, core.clock[static_cast<uint32_t>(Pipe::kS)]);
    }
    for (uint32_t i = 0; i < cores; ++i) {
        CoreState& core = *cores_[rank.first + i];
        core.clock[static_cast<uint32_t>(Pipe::kS)] = scratch_;
        Learns(core);
        core.status = CoreStatus::kReady;
    }
    Mix(0xB0 + rank.first);
}

// What the cores knew that have set a flag for the turn.
std::vector<uint32_t>& World::CrossClock(CoreState& core, int id, uint32_t turn) {
    const uint32_t first = core.rank->launch.cross.First(core.core.index, id);
    std::vector<uint32_t>& clock = core.rank->cross_clocks[{id, first, turn}];
    clock.resize(core_count_ * kPipes);
    return clock;
}

void World::CrossSet(CoreState& core, int mode, Pipe pipe, int id, const Loc& loc) {
    const uint32_t turn = core.rank->launch.cross.Set(core.core.index, core.rank->cores, mode, id, loc);
    // The flag is set when the pipe's earlier work is done; the wait of this turn joins its clock, and no other wait.
    const uint32_t index = static_cast<uint32_t>(pipe);
    ForcePipe(core, index);
    if (pipe == Pipe::kMte3) LandAll(core);
    std::vector<uint32_t>& clock = CrossClock(core, id, turn);
    checked::JoinClock(clock, core.clock[0]);  // it is issued after what the scalar unit has waited for
    checked::JoinClock(clock, core.clock[index]);
    clock[core.Agent(pipe)] = core.pipes[index].last;
    MaybeYield(core);
}

void World::CrossWait(CoreState& core, int id, const Loc& loc) {
    core.cross_id = id;
    CrossFlags& cross = core.rank->launch.cross;
    core.cross_turn = cross.Expect(core.core.index, id, loc);
    if (!cross.Passed(core.core.index, core.rank->cores, id, core.cross_turn)) Park(core, CoreStatus::kCross, loc);
    checked::JoinClock(core.clock[static_cast<uint32_t>(Pipe::kS)], CrossClock(core, id, core.cross_turn));
    Learns(core);
}

// ---- polling and idling ----

// Counts the latest looks at flags: they ended a wait or, if `waiting`, did not.
void World::Look(CoreState& core, bool waiting) {
    for (const Loc& place : core.looks) {
        PollCount& count = result_.polls[PlaceOf(place)];
        ++(waiting ? count.waiting : count.ready);
    }
    core.looks.clear();
}

void World::Poll(CoreState& core, const Loc& loc, bool suspected) {
    Look(core, true);
    core.suspected = suspected;
    if (!suspected && ++core.in_vain < options_.polls) {
        Park(core, CoreStatus::kReady, loc);
        return;
    }
    core.in_vain = 0;
    Park(core, CoreStatus::kPolling, loc);
    core.looked.clear();
    core.woken = false;
}

// A loop that may be an undeclared poll lets all others run first, whatever the policy.
void World::Yield(CoreState& core, const Loc& loc, bool idle) {
    if (!idle) core.idle_since = std::chrono::steady_clock::time_point::max();
    const auto now = std::chrono::steady_clock::now();
    core.idle_since = std::min(core.idle_since, now);
    const std::chrono::duration<double> idled = now - core.idle_since;
    const double deadline_s = core.rank->launch.spec->deadline_s;
    if (deadline_s > 0 && idled.count() > deadline_s) FailHanging("only reads of the same words until the deadline");
    last_run_ = cores_[(core.global + 1) % core_count_].get();
    core.priority[kFiber] = --lowest_;
    Park(core, CoreStatus::kReady, loc);
}

// Called when nothing can move. True when it has woken something. A rank to be killed later dies now, and the others
// see that before a stalled rank moves on, and before a deadline passes.
bool World::Idle() {
    ++idle_rounds_;
    const auto dies = std::find_if(ranks_.begin(), ranks_.begin() + rank_count_, [this](const auto& rank) {
        return rank->program->rank == options_.injection.kill_rank && !rank->dead;
    });
    const bool killed = dies != ranks_.begin() + rank_count_;
    for (uint32_t r = 0; r < rank_count_ && !killed; ++r) {
        if (ranks_[r]->stalled) {
            ranks_[r]->stalled = false;
            options_.injection.stall_rank = -1;
            return true;
        }
    }
    bool suspected = false;
    for (uint32_t i = 0; i < core_count_; ++i) {
        CoreState& core = *cores_[i];
        if (core.status == CoreStatus::kPolling && core.suspected && !Frozen(*core.rank) &&
            core.fruitless < kSuspectedRounds) {
            ++core.fruitless;
            core.woken = suspected = true;
        }
    }
    if (suspected) return true;
    if (options_.hang_is_finding || idle_rounds_ > kMaxIdleRounds) {
        FailHanging("nothing can move any more");
        return false;
    }
    // Time passes: waits expire, hosts check whether their peers live.
    result_.time_passed = true;
    if (killed) {
        Kill(**dies);
    } else {
        cycles_ += kJumpCycles;
    }
    bool anybody = false;
    for (uint32_t r = 0; r < rank_count_; ++r) {
        RankState& rank = *ranks_[r];
        if (rank.step == nullptr || rank.dead) continue;
        anybody = true;
        if (rank.stalled) continue;
        const IdlePolicy* idle = rank.program->idle;
        if (idle != nullptr && idle->on_idle != nullptr) idle->on_idle(idle->on_idle_argument);
    }
    for (uint32_t i = 0; i < core_count_; ++i) {
        CoreState& core = *cores_[i];
        if (core.status == CoreStatus::kPolling) core.woken = true;
    }
    if (!anybody) live_ranks_ = 0;  // only dead ranks are left
    return true;
}

void World::FailHanging(const char* how) {
    const auto counts = [this](const CoreState& core) { return !Frozen(*core.rank); };
    if (!FiberHost::FailHanging(cores_, how, counts)) live_ranks_ = 0;
}

void World::Kill(RankState& rank) {
    rank.dead = true;
    if (rank.step != nullptr) --live_ranks_;
}

void World::Inject() {
    const Injection& in = options_.injection;
    for (uint32_t r = 0; r < rank_count_; ++r) {
        RankState& rank = *ranks_[r];
        if (rank.program->rank == in.kill_rank && result_.steps >= in.kill_step && !rank.dead) Kill(rank);
        if (rank.program->rank == in.stall_rank && result_.steps >= in.stall_step) rank.stalled = true;
    }
}

}  // namespace twin

#endif  // TWIN_CHECKED
