// The pipes of a core: instructions and tokens leave each in order, when a flag or a schedule says so.
#ifdef TWIN_CHECKED

#include <algorithm>
#include <cstring>

#include "world.h"

namespace twin {

namespace {
constexpr uint32_t kPeerBits = 16;
constexpr size_t kEffectChunk = 64 * 1024;
constexpr uint8_t kUnwrittenUb = 0xA5;
}  // namespace

// The scalar pipe's clock at the moment when it issues an instruction.
ClockId World::IssueClock(CoreState& core) {
    if (core.issue_clock == kNoClock) core.issue_clock = clocks_.Copy(core.clock[0].data());
    clocks_.Hold(core.issue_clock);
    return core.issue_clock;
}

// The scalar pipe's clock moves on.
void World::Learns(CoreState& core) {
    clocks_.Drop(core.issue_clock);
    core.issue_clock = kNoClock;
}

void* World::Reserve(CoreState& core, size_t bytes) {
    bytes = (bytes + 15) / 16 * 16;
    if (core.effect_chunk < core.effect_chunks.size() && core.effect_used + bytes > kEffectChunk) {
        ++core.effect_chunk;
        core.effect_used = 0;
    }
    if (core.effect_chunk == core.effect_chunks.size()) {
        core.effect_chunks.push_back(std::unique_ptr<uint8_t[]>(new uint8_t[kEffectChunk]));
        core.effect_used = 0;
    }
    void* memory = core.effect_chunks[core.effect_chunk].get() + core.effect_used;
    core.effect_used += bytes;
    return memory;
}

Toucher World::ToucherOf(CoreState& core, Pipe pipe, uint32_t number, bool write, bool atomic) {
    const bool in_order = pipe == Pipe::kS || (pipe == Pipe::kV && !options_.explicit_sync);
    return {number, core.Agent(pipe), write, atomic, in_order, core.clock[static_cast<uint32_t>(pipe)].data()};
}

bool World::FlagReady(const CoreState& core, uint32_t flag, uint32_t turn) const {
    return core.flags[flag].sets_done >= turn;
}

bool World::Idle(const CoreState& core) const {
    return core.pipes[1].empty() && core.pipes[2].empty() && core.pipes[3].empty() && core.stores.empty();
}

void World::Enqueue(CoreState& core, const Instruction& instruction, void (*run)(void*), void* effect) {
    const uint32_t pipe = static_cast<uint32_t>(instruction.pipe);
    PipeQueue& queue = core.pipes[pipe];
    const bool writes = instruction.write.bytes != 0;
    const uint32_t number =
        sites_.Add({instruction.name, instruction.loc, core.Agent(instruction.pipe), writes, instruction.atomic});
    if (queue.head != 0 && queue.empty()) {
        queue.ops.clear();
        queue.head = 0;
    }
    queue.ops.push_back({Queued::kEffect, number, IssueClock(core), 0, 0, run, effect, instruction});
    core.core.blocked_at = instruction.loc;
    if (queue.ops.size() - queue.head == 1 && Eager(core, pipe)) {
        RunHead(core, pipe, false);
        if (pipe == static_cast<uint32_t>(Pipe::kMte3) && !core.stores.empty() && Eager(core, pipe)) LandAll(core);
    }
    if (instruction.write.gm) core.in_vain = 0;
    if (instruction.write.gm || instruction.reads[0].gm) MaybeYield(core);
}

void World::CheckScalar(CoreState& core, const Instruction& instruction) {
    const bool writes = instruction.write.bytes != 0;
    const uint32_t number = sites_.Add({instruction.name, instruction.loc, core.Agent(Pipe::kS), writes, false});
    const Toucher t = ToucherOf(core, Pipe::kS, number, writes, false);
    for (const Access& read : instruction.reads) {
        if (read.bytes == 0) continue;
        TouchUb(core, read, t);
        NeedFilled(core, read, instruction, number);
    }
    if (writes) TouchUb(core, instruction.write, t);
    core.pipes[0].last = number;
}

// ---- tokens ----

// Puts a token into a pipe. `freed`: UB whose contents are undefined when the token has left.
void World::Push(CoreState& core, Queued kind, Pipe to, uint32_t flag, uint32_t turn, const Loc& loc,
                 const Access& freed) {
    static constexpr const char* kNames[] = {"", "SetFlag", "WaitFlag", "PipeBarrier"};
    const uint32_t pipe = static_cast<uint32_t>(to);
    PipeQueue& queue = core.pipes[pipe];
    const Instruction token{kNames[static_cast<int>(kind)], to, loc, freed, {}};
    queue.ops.push_back({kind, sites_.last(), IssueClock(core), flag, turn, nullptr, nullptr, token});
    if (queue.ops.size() - queue.head == 1) RunHead(core, pipe, false);
}

// A new clock: what the core's scalar unit has observed, and its own last instruction.
ClockId World::ScalarClock(CoreState& core) {
    const ClockId clock = clocks_.Copy(core.clock[0].data());
    clocks_.At(clock)[core.Agent(Pipe::kS)] = core.pipes[0].last;
    return clock;
}

void World::FlagSet(CoreState& core, uint32_t flag, Pipe from, const Loc& loc) {
    FlagState& state = core.flags[flag];
    if (state.sets_issued - state.waits_done >= FlagState::kDepth) ForceAll(core);
    const uint32_t turn = ++state.sets_issued;
    if (from == Pipe::kS) {
        state.clocks[turn % FlagState::kDepth] = ScalarClock(core);
        ++state.sets_done;
        return;
    }
    Access freed;
    if (flag >= kQueueFlags && (flag - kQueueFlags) % 2 == 1) {  // a tensor is given back
        const UbBuffer& slot = core.core.buffers[(flag - kQueueFlags) / 2];
        freed = {reinterpret_cast<uintptr_t>(core.ub) + slot.begin, slot.bytes};
    }
    Push(core, Queued::kSet, from, flag, turn, loc, freed);
}

void World::FlagWait(CoreState& core, uint32_t flag, Pipe to, const Loc& loc) {
    FlagState& state = core.flags[flag];
    const uint32_t turn = ++state.waits_issued;
    if (to == Pipe::kS) {
        if (!FlagReady(core, flag, turn)) {
            core.core.blocked_at = loc;
            if (Choose(2, 8) != 0) {
                core.wait_flag = flag;
                core.wait_turn = turn;
                Park(core, CoreStatus::kFlag, loc);
            } else {
                ForceFlag(core, flag, turn);
            }
        }
        ClockId& clock = state.clocks[turn % FlagState::kDepth];
        clocks_.Join(core.clock[0].data(), clock);
        clocks_.Drop(clock);
        clock = kNoClock;
        ++state.waits_done;
        Learns(core);
        return;
    }
    Push(core, Queued::kWait, to, flag, turn, loc, {});
}

void World::Barrier(CoreState& core, Pipe pipe, const Loc& loc) {
    if (pipe == Pipe::kAll) {
        Drain(core, loc);
        return;
    }
    Push(core, Queued::kBarrier, pipe, 0, 0, loc, {});
}

// ---- running ----

// Runs the oldest instruction or token of a pipe. False: it has to wait (never when forced in program order).
bool World::RunHead(CoreState& core, uint32_t pipe, bool force) {
    PipeQueue& queue = core.pipes[pipe];
    QueuedOp& op = queue.ops[queue.head];
    std::vector<uint32_t>& clock = core.clock[pipe];
    FlagState& flag = core.flags[op.flag];
    const uint32_t self = core.Agent(static_cast<Pipe>(pipe));
    const bool stores =
        pipe == static_cast<uint32_t>(Pipe::kMte3) && op.kind != Queued::kEffect && op.kind != Queued::kWait;
    if (op.kind == Queued::kWait && !FlagReady(core, op.flag, op.turn)) {
        if (!force) return false;
        ForceFlag(core, op.flag, op.turn);
    }
    if (stores && !core.stores.empty()) {
        if (!force) return false;
        LandAll(core);
    }
    ++core.pipes[pipe].head;
    clocks_.Join(clock.data(), op.clock);
    switch (op.kind) {
        case Queued::kEffect:
            RunEffect(core, pipe, op, force);
            core.pipes[pipe].last = op.number;
            break;
        case Queued::kSet: {
            ClockId& published = flag.clocks[op.turn % FlagState::kDepth];
            published = clocks_.Copy(clock.data());
            clocks_.At(published)[self] = core.pipes[pipe].last;
            ++flag.sets_done;
            if (op.instruction.write.bytes != 0) {
                const uint32_t begin =
                    static_cast<uint32_t>(op.instruction.write.begin - reinterpret_cast<uintptr_t>(core.ub));
                memset(core.ub + begin, kUnwrittenUb, op.instruction.write.bytes);
                Shadow::Fill(&core.ub_blocks[begin / kBlockBytes], 0, op.instruction.write.bytes, false);
            }
            break;
        }
        case Queued::kWait: {
            ClockId& published = flag.clocks[op.turn % FlagState::kDepth];
            clocks_.Join(clock.data(), published);
            clocks_.Drop(published);
            published = kNoClock;
            ++flag.waits_done;
            break;
        }
        case Queued::kBarrier: clock[self] = core.pipes[pipe].last; break;
    }
    clocks_.Drop(op.clock);
    return true;
}

void World::RunEffect(CoreState& core, uint32_t pipe, QueuedOp& op, bool force) {
    const Instruction& in = op.instruction;
    const Pipe which = static_cast<Pipe>(pipe);
    const Toucher reader = ToucherOf(core, which, op.number, false, false);
    for (const Access& read : in.reads) {
        if (read.bytes == 0 || read.count == 0) continue;
        if (read.gm) {
            TouchGm(core, which, read, reader, in);
        } else {
            TouchUb(core, read, reader);
            NeedFilled(core, read, in, op.number);
        }
    }
    const Toucher writer = ToucherOf(core, which, op.number, true, in.atomic);
    if (in.clobber.bytes != 0) {
        TouchUb(core, in.clobber, writer);
        ForEachUbPiece(core, in.clobber, [](Block* blocks, uint32_t lead, uint64_t, uint64_t bytes) {
            Shadow::Fill(blocks, lead, bytes, false);
        });
    }
    if (in.write.bytes == 0 || in.write.count == 0) {
        op.run(op.effect);
        return;
    }
    if (!in.write.gm) {
        TouchUb(core, in.write, writer);
        op.run(op.effect);
        return;
    }
    // A reader of a flag of this store joins the clock of MTE3; if stores land in order, it also sees earlier
    // stores.
    const ClockId release = clocks_.Copy(core.clock[pipe].data());
    if (!options_.unordered) clocks_.At(release)[core.Agent(which)] = op.number - 1;
    TouchGm(core, which, in.write, writer, in);
    const GmRange& range = FindGm(core.core, in.write.begin, in.write.bytes, in.loc);
    if (in.atomic) {
        op.run(op.effect);
        for (uint32_t i = 0; i < in.write.count; ++i) {
            Landed(core, in.write.begin + i * in.write.stride, in.write.bytes, op.number);
        }
        clocks_.Drop(release);
        return;
    }
    MakeStore(core, op, range, release, force);
}

// Runs instructions in program order until a flag is set.
void World::ForceFlag(CoreState& core, uint32_t flag, uint32_t turn) {
    while (!FlagReady(core, flag, turn)) {
        // The missing SetFlag is in one of the queues: run the oldest instruction of its pipe.
        uint32_t pipe = 0;
        for (uint32_t p = 1; p < kPipes && pipe == 0; ++p) {
            const PipeQueue& queue = core.pipes[p];
            for (size_t i = queue.head; i < queue.ops.size(); ++i) {
                const QueuedOp& op = queue.ops[i];
                if (op.kind == Queued::kSet && op.flag == flag && op.turn <= turn) {
                    pipe = p;
                    break;
                }
            }
        }
        TWIN_RAISE_IF(pipe == 0, kEventMisuse, core.core.blocked_at, "WaitFlag on an event that no SetFlag has set");
        RunHead(core, pipe, true);
    }
}

void World::ForcePipe(CoreState& core, uint32_t pipe) {
    while (!core.pipes[pipe].empty()) RunHead(core, pipe, true);
}

void World::ForceAll(CoreState& core) {
    for (uint32_t pipe = 1; pipe < kPipes; ++pipe) ForcePipe(core, pipe);
    LandAll(core);
    if (Idle(core)) core.effect_chunk = core.effect_used = 0;
}

// PipeBarrier<PIPE_ALL>: everything the core has begun is done, and the clocks of all its pipes include it.
void World::Drain(CoreState& core, const Loc& loc) {
    core.core.blocked_at = loc;
    if (!Idle(core) && Choose(2, 4) != 0) Park(core, CoreStatus::kDrain, loc);
    ForceAll(core);
    KnowAll(core);
}

void World::KnowAll(CoreState& core) {
    std::vector<uint32_t>& all = core.clock[0];
    for (uint32_t pipe = 1; pipe < kPipes; ++pipe) {
        const std::vector<uint32_t>& clock = core.clock[pipe];
        checked::JoinClock(all, clock);
    }
    for (uint32_t pipe = 0; pipe < kPipes; ++pipe) all[core.Agent(static_cast<Pipe>(pipe))] = core.pipes[pipe].last;
    Learns(core);
}

// ---- UB is allocated and freed ----

void World::Carved(CoreState& core, uint32_t begin, uint32_t bytes) {
    if (bytes == 0) return;
    if (!Idle(core))
        ForceAll(core);  // instructions in the queues must not read the poison; the clocks show whether they race
    core.ub_high = std::max(core.ub_high, begin + bytes);
    memset(core.ub + begin, kUnwrittenUb, bytes);
    Shadow::Fill(&core.ub_blocks[begin / kBlockBytes], 0, bytes, false);
}

void World::Released(CoreState& core) {
    if (std::uncaught_exceptions() > 0) return;
    ForceAll(core);
    for (uint32_t flag = kQueueFlags; flag < kFlags; ++flag) {
        FlagState& state = core.flags[flag];
        for (ClockId& clock : state.clocks) {
            clocks_.Drop(clock);
            clock = kNoClock;
        }
        state = FlagState();
    }
}

// ---- agents beside the cores, which execute Hccl::BatchWrite: in order to each peer, whenever the schedule
// says ----

void World::AddAgent(CoreState& core, CopyQueues* queues) {
    if (std::find(core.agents.begin(), core.agents.end(), queues) == core.agents.end()) core.agents.push_back(queues);
    MaybeYield(core);
}

bool World::AgentPending(const CoreState& core) const {
    return std::any_of(core.agents.begin(), core.agents.end(),
                       [](const CopyQueues* queues) { return queues->Pending(); });
}

// The next 32 bytes to some peer, or the rest of an item, or of a block where items are reordered; `all`: everything
// that was posted.
void World::MoveAgents(CoreState& core, bool all) {
    while (AgentPending(core)) {
        scratch_.clear();
        for (uint32_t a = 0; a < core.agents.size(); ++a) {
            for (uint32_t peer = 0; peer < core.agents[a]->peers(); ++peer) {
                if (core.agents[a]->Pending(peer)) scratch_.push_back(a << kPeerBits | peer);
            }
        }
        const uint32_t picked = scratch_[Choose(static_cast<uint32_t>(scratch_.size()), 1)];
        CopyQueues& queues = *core.agents[picked >> kPeerBits];
        const uint32_t peer = picked & ((1u << kPeerBits) - 1);
        const uint32_t blocks = options_.reordered ? queues.Cut(peer) : 0;
        if (blocks > 1) queues.Prefer(peer, Choose(blocks, 1));
        const bool whole = all || Choose(2, 4) == 0;
        bool ended = false;
        do {
            const CopyItem piece = queues.Next(peer);
            memcpy(reinterpret_cast<void*>(piece.to), reinterpret_cast<const void*>(piece.from), piece.bytes);
            ended = queues.Advance(peer, piece.bytes);
            ReleaseFlags(core, piece);
            Landed(core, piece.to, piece.bytes, sites_.last());
        } while (whole && !ended);
        if (ended) core.woken = true;  // it may wait for its task
        if (!all) return;
    }
}

}  // namespace twin

#endif  // TWIN_CHECKED
