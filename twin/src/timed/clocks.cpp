// How the clocks of a core move: what each instruction, flag and barrier costs.
#ifdef TWIN_TIMED

#include <algorithm>
#include <string>
#include <unordered_map>

#include "twin/engine/atomic_store.h"
#include "world.h"

namespace twin::timed {

namespace {

constexpr Cause CauseOf(Pipe pipe) {
    return pipe == Pipe::kV      ? Cause::kVector
           : pipe == Pipe::kMte2 ? Cause::kMte2
           : pipe == Pipe::kMte3 ? Cause::kMte3
                                 : Cause::kScalar;
}
constexpr uint32_t Index(Pipe pipe) { return static_cast<uint32_t>(pipe); }

constexpr uint64_t kRepeatBytes = 256;

// The ends of rows that are left out: what kernels write behind a row, others read.
void CopyEnds(const Instruction& store) {
    constexpr uint64_t kEnd = 3 * kBlockBytes;
    const Access &to = store.write, &from = store.reads[0];
    if (to.count != from.count || to.bytes != from.bytes || to.bytes < kEnd) return;
    for (uint64_t i = 0; i < to.count; ++i) {
        memcpy(reinterpret_cast<void*>(to.begin + i * to.stride + to.bytes - kEnd),
               reinterpret_cast<const void*>(from.begin + i * from.stride + from.bytes - kEnd), kEnd);
    }
}

// The class of an instruction, by the name that its call gives. Names are literals: one look a literal.
VectorClass VectorClassOf(const char* name) {
    static const std::unordered_map<std::string, VectorClass> kClasses = {
        {"Add", VectorClass::kAdd},    {"Sub", VectorClass::kAdd},   {"Max", VectorClass::kAdd},
        {"Min", VectorClass::kAdd},    {"And", VectorClass::kAdd},   {"Or", VectorClass::kAdd},
        {"Mul", VectorClass::kMul},    {"Div", VectorClass::kDiv},   {"Exp", VectorClass::kExp},
        {"Ln", VectorClass::kExp},     {"Muls", VectorClass::kMuls}, {"Adds", VectorClass::kMuls},
        {"Maxs", VectorClass::kMuls},  {"Mins", VectorClass::kMuls}, {"Relu", VectorClass::kMuls},
        {"Rsqrt", VectorClass::kMuls}, {"Cast", VectorClass::kCast},
    };
    static std::unordered_map<const char*, VectorClass> known;
    const auto found = known.find(name);
    if (found != known.end()) return found->second;
    const auto listed = kClasses.find(name);
    return known[name] = listed == kClasses.end() ? VectorClass::kElse : listed->second;
}

}  // namespace

// Notices that the kernel has begun its next step: time is counted to that step from now on.
void World::Mark(CoreState& core) {
    if (core.phase == core.core.phase) return;
    EndPhase(core);
    core.phase = core.core.phase;
    uint32_t number = 0;
    while (number < phases_.size() && strcmp(phases_[number], core.phase) != 0) ++number;
    if (number == phases_.size()) {
        if (number < kPhases) {
            phases_.push_back(core.phase);
        } else {
            --number;
        }
    }
    core.phase_number = number;
    core.spent = &core.path.ns[number][static_cast<uint32_t>(Cause::kScalar)];
}

void World::EndPhase(CoreState& core) {
    if (core.phase != nullptr && options_.events != 0) {
        const char* const next = core.core.phase;
        core.core.phase = core.phase;
        Trace(core, Pipe::kS, "phase", core.phase_began, core.now);
        core.core.phase = next;
    }
    core.phase_began = core.now;
}

// Lets S wait until a time.
void World::Wait(CoreState& core, double until, Cause cause) {
    if (until <= core.now) return;
    core.path.ns[core.phase_number][static_cast<uint32_t>(cause)] += until - core.now;
    core.now = until;
}

// S issues an instruction. Returns when it starts on its pipe.
double World::Begin(CoreState& core, Pipe pipe) {
    PipeClock& clock = core.pipes[Index(pipe)];
    const uint32_t depth = static_cast<uint32_t>(costs_.queue_depth);
    if (clock.issued >= depth) Wait(core, clock.started[(clock.issued - depth) % kMaxDepth], CauseOf(pipe));
    Wait(core, core.now + costs_.issue_ns, Cause::kScalar);
    return std::max(core.now, std::max(clock.free, clock.ready));
}
void World::Given(CoreState& core, Pipe pipe, double start) {
    PipeClock& clock = core.pipes[Index(pipe)];
    clock.started[clock.issued++ % kMaxDepth] = start;
}

void World::Vector(CoreState& core, const Instruction& instruction) {
    uint64_t bytes = instruction.write.bytes * instruction.write.count;
    for (const Access& read : instruction.reads) bytes = std::max(bytes, read.bytes * read.count);
    const uint64_t repeats = instruction.repeats != 0 ? instruction.repeats : (bytes + kRepeatBytes - 1) / kRepeatBytes;
    const VectorCost& cost = vector_costs_[static_cast<size_t>(VectorClassOf(instruction.name))];
    const double head = cost.head_ns + (instruction.repeats != 0 ? 0 : vector_count_ns_);
    const double start = Begin(core, Pipe::kV);
    PipeClock& clock = core.pipes[Index(Pipe::kV)];
    clock.free = start + static_cast<double>(repeats) * cost.repeat_ns;
    core.vector_ns += std::max(0.0, clock.free + head - std::max(start, clock.done));
    clock.done = std::max(clock.done, clock.free + head);
    Given(core, Pipe::kV, start);
    Trace(core, Pipe::kV, instruction.name, start, clock.free + head);
}

// What a core moves of its rate: all of it where every piece begins at a multiple of 512 bytes of its area.
double World::ShareOf(const Access& gm, const GmRange& range) const {
    constexpr uint64_t kLine = 512;
    const uint64_t begin = range.at + (gm.begin - range.begin);
    const bool aligned = begin % kLine == 0 && (gm.count == 1 || gm.stride % kLine == 0);
    return aligned ? 1 : costs_.unaligned_share;
}

void World::Read(CoreState& core, const Instruction& instruction, Copy& copy) {
    PipeClock& clock = core.pipes[Index(Pipe::kMte2)];
    const uint32_t self = core.rank->index;
    const double trip = fabric_->RoundTrip(self, copy.owner, false);
    const double pieces = (instruction.reads[0].count - 1) * costs_.piece_ns;
    copy.start = clock.flights.Admit(Begin(core, Pipe::kMte2), copy.bytes, costs_.inflight_bytes);
    const double own = std::max(costs_.copy_issue_ns + pieces, copy.bytes / (costs_.read_gbps * copy.share));
    // The request travels half of the trip, the bytes the rest.
    const double carried = fabric_->Carry(copy.owner, self, copy.start + trip / 2, copy.bytes, copy.owner);
    copy.end = std::max(carried + trip / 2, copy.start + trip + own);
    clock.free = std::max(copy.start + own, copy.end - trip);
    clock.done = std::max(clock.done, copy.end);
    clock.flights.Add(copy.end, copy.bytes);
    Given(core, Pipe::kMte2, copy.start);
}

void World::Store(CoreState& core, const Instruction& instruction, Copy& copy) {
    PipeClock& clock = core.pipes[Index(Pipe::kMte3)];
    const uint32_t self = core.rank->index;
    const double trip = fabric_->RoundTrip(self, copy.owner, true);
    const double pieces = (instruction.write.count - 1) * costs_.piece_ns;
    copy.start = clock.flights.Admit(Begin(core, Pipe::kMte3), copy.bytes, costs_.inflight_bytes);
    const double own = std::max(costs_.copy_issue_ns + pieces, copy.bytes / (costs_.write_gbps * copy.share));
    const double carried = fabric_->Carry(self, copy.owner, copy.start, copy.bytes, copy.owner);
    clock.free = std::max(copy.start + own, carried);  // posted: the next may leave when the last byte has
    copy.arrived = clock.free + trip / 2;
    copy.end = clock.free + trip;
    clock.done = std::max(clock.done, copy.end);
    clock.flights.Add(copy.end, copy.bytes);
    Given(core, Pipe::kMte3, copy.start);
}

Outcome World::Schedule(CoreState& core, const Instruction& instruction) {
    if (unwinding_) return Outcome::kSkip;
    ++result_.instructions;
    Mark(core);
    if (instruction.pipe == Pipe::kV) {
        Vector(core, instruction);
        return Outcome::kNow;
    }
    // Cores with an earlier clock reserve bandwidth first.
    YieldUntil(core, core.now);
    const bool store = instruction.pipe == Pipe::kMte3;
    const Access& gm = store ? instruction.write : instruction.reads[0];
    const uint64_t extent = (gm.count - 1) * gm.stride + gm.bytes;
    Copy copy{&FindGm(core.core, gm.begin, extent, instruction.loc), 0, 0, 1, 0, 0, 0};
    copy.owner = copy.range->owner >= 0 ? static_cast<uint32_t>(copy.range->owner) : core.rank->index;
    copy.bytes = static_cast<double>(gm.bytes * gm.count);
    copy.share = ShareOf(gm, *copy.range);
    const bool window = copy.range->window();
    const int peer = window && copy.owner != core.rank->index ? static_cast<int>(copy.owner) : -1;
    const bool status = MayBeFlag(core, *copy.range, store);
    const double handed = core.now;
    if (store || !status || (core.core.watch != nullptr && !core.polled)) EndWait(core);
    core.polled = false;
    if (store) {
        Store(core, instruction, copy);
    } else {
        Read(core, instruction, copy);
    }
    const bool left_out = !options_.payload && !status && !instruction.atomic && gm.bytes >= options_.payload_bytes &&
                          (copy.range->bulk || (window && copy.range->kind != GmKind::kWindowState));
    if (store && status && (!instruction.atomic || core.core.watch != nullptr)) {
        const uint64_t flow = Defer(core, instruction, copy);
        Trace(core, Pipe::kMte3, instruction.name, copy.start, copy.end, gm.bytes * gm.count, peer, flow);
        return Outcome::kLater;
    }
    Trace(core, instruction.pipe, instruction.name, copy.start, copy.end, gm.bytes * gm.count, peer);
    if (!store && status) {
        // The value is the one that memory has when the request arrives.
        const double at = std::max(handed, copy.end - fabric_->RoundTrip(core.rank->index, copy.owner, false) / 2);
        YieldUntil(core, at);
        Look(core, gm, at);
    }
    // The row is not copied. Its first bytes are not zero, because kernels may treat rows of zeros
    // differently.
    if (left_out && !store) memset(reinterpret_cast<void*>(instruction.write.begin), 0x3F, kBlockBytes);
    if (left_out && store) CopyEnds(instruction);
    return left_out ? Outcome::kSkip : Outcome::kNow;
}

// Whether other cores may wait for a store into this range. Kernels that do not declare their polls may do so anywhere:
// then every store lands as status does. Tensors into which nothing is stored are only read.
bool World::MayBeFlag(CoreState& core, const GmRange& range, bool store) const {
    if (core.core.watch == nullptr || range.kind != GmKind::kTensor)
        return range.atomic_blocks || core.core.watch != nullptr;
    if (store) core.rank->stored.insert(range.begin);
    return core.rank->stored.count(range.begin) != 0;
}

void World::OrderScalarAccess(CoreState& core, const GmRange& range, const Access& access, bool store) {
    Mark(core);
    const uint32_t owner = range.owner >= 0 ? static_cast<uint32_t>(range.owner) : core.rank->index;
    const bool undeclared = core.core.watch != nullptr;
    if (undeclared && (store || !core.polled)) EndWait(core);
    core.polled = false;
    Wait(core, core.now + fabric_->RoundTrip(core.rank->index, owner, false), Cause::kScalar);
    YieldUntil(core, core.now);
    if (!undeclared) return;
    if (store) {
        ranks_[owner]->landings.push_back(
            {access.begin, access.bytes, core.now, ++flows_, std::make_shared<Path>(core.path)});
    } else {
        Look(core, access, core.now);
    }
}

// ---- flags ----

void World::FlagSet(CoreState& core, uint32_t flag, Pipe from) {
    Mark(core);
    Wait(core, core.now + costs_.flag_ns, Cause::kScalar);
    core.flag[flag] = std::max(core.now, from == Pipe::kS ? 0 : core.pipes[Index(from)].done);
    core.flag_from[flag] = from;
}
void World::FlagWait(CoreState& core, uint32_t flag, Pipe to) {
    Mark(core);
    Wait(core, core.now + costs_.flag_ns, Cause::kScalar);
    const double at = core.flag[flag] + costs_.flag_latency_ns;
    if (to == Pipe::kS) {
        Wait(core, at, CauseOf(core.flag_from[flag]));
        SeeLanded(core);
    } else {
        PipeClock& clock = core.pipes[Index(to)];
        clock.ready = std::max(clock.ready, at);
    }
}
void World::Barrier(CoreState& core, Pipe pipe) {
    Mark(core);
    Wait(core, core.now + costs_.flag_ns, Cause::kScalar);
    if (pipe != Pipe::kAll) {
        PipeClock& clock = core.pipes[Index(pipe)];
        clock.ready = std::max(clock.ready, clock.done);
        return;
    }
    for (Pipe each : {Pipe::kV, Pipe::kMte2, Pipe::kMte3}) WaitPipe(core, each);
}
void World::WaitPipe(CoreState& core, Pipe pipe) {
    Wait(core, core.pipes[Index(pipe)].done, CauseOf(pipe));
    SeeLanded(core);
}
// What S has waited for is in memory, also for reads past the API: of a kernel every store of which lands later.
void World::SeeLanded(CoreState& core) {
    if (core.core.watch != nullptr) YieldUntil(core, core.now);
}

// ---- status ----

// A store of the core to a rank's GM, under way until it is visible there.
World::Pending& World::Send(CoreState& core, double visible, uintptr_t to, uint32_t rank) {
    const auto pending =
        std::make_shared<Pending>(Pending{visible, ++stores_, to, rank, ++flows_, std::make_shared<Path>(core.path)});
    pending_.push(pending);
    ++result_.status_stores;
    return *pending;
}

// A store that other cores poll: its bytes are read now and become visible when they land.
uint64_t World::Defer(CoreState& core, const Instruction& instruction, const Copy& copy) {
    const Access& to = instruction.write;
    const Access& from = instruction.reads[0];
    const double visible = copy.arrived + costs_.visible_ns;
    // What a kernel knows to be complete is there, whatever it takes for a flag.
    const double seen = core.core.watch != nullptr ? std::min(visible, copy.end) : visible;
    Pending& pending = Send(core, seen, to.begin, copy.owner);
    pending.stride = to.count > 1 ? to.stride : to.bytes;
    pending.piece = to.bytes;
    pending.atomic_op = instruction.atomic ? core.core.atomic_op : uint8_t{0};
    pending.atomic_type = core.core.atomic_type;
    for (uint32_t i = 0; i < to.count; ++i) {
        const uint8_t* piece = reinterpret_cast<const uint8_t*>(from.begin + i * from.stride);
        pending.bytes.insert(pending.bytes.end(), piece, piece + to.bytes);
    }
    pending.path->ns[core.phase_number][static_cast<uint32_t>(Cause::kStatus)] += seen - core.now;
    return pending.flow;
}

// A BatchWrite item: its rows, and the status message at its end.
double World::Post(CoreState& core, const CopyItem& item, double& free) {
    if (unwinding_) return core.now;
    Mark(core);
    const double begin = std::max(core.now, free);
    free = begin + costs_.post_ns;
    const double end = fabric_->CarryByNic(core.rank->index, item.peer, free, static_cast<double>(item.bytes));
    Pending& pending = Send(core, end + costs_.nic_latency_ns + costs_.visible_ns, item.to, item.peer);
    pending.stride = pending.piece = item.bytes;
    pending.item = item;
    double* const spent = pending.path->ns[core.phase_number];
    spent[static_cast<uint32_t>(Cause::kPost)] += free - core.now;
    spent[static_cast<uint32_t>(Cause::kStatus)] += pending.visible - free;
    Trace(core, Pipe::kMte3, "BatchWrite", begin, pending.visible, item.bytes, static_cast<int>(item.peer),
          pending.flow);
    return pending.visible;
}

void World::LandItem(const CopyItem& item) {
    constexpr uint64_t kTail = 16 * 1024;  // more than any status message
    const uint64_t left_out = !options_.payload && item.bytes > kTail ? item.bytes - kTail : 0;
    memcpy(reinterpret_cast<void*>(item.to + left_out), reinterpret_cast<const void*>(item.from + left_out),
           item.bytes - left_out);
}

void World::Land(double until) {
    while (!pending_.empty() && pending_.top()->visible <= until) {
        const std::shared_ptr<Pending> first = pending_.top();
        pending_.pop();
        if (first->bytes.empty()) LandItem(first->item);
        LandBytes(*first);
        const uint64_t pieces = first->bytes.empty() ? 1 : first->bytes.size() / first->piece;
        RankState& rank = *ranks_[first->rank];
        rank.landings.push_back({first->to, (pieces - 1) * first->stride + first->piece, first->visible, first->flow,
                                 std::move(first->path)});
        if (rank.landings.size() >= rank.trim_at) Trim(rank);
    }
}

void World::LandBytes(const Pending& pending) const {
    using Update = void (*)(uint8_t, uint8_t*, const uint8_t*, uint64_t);
    static constexpr Update kUpdates[] = {nullptr,
                                          &AtomicUpdate<float>,
                                          &AtomicUpdate<half>,
                                          &AtomicUpdate<bfloat16_t>,
                                          &AtomicUpdate<int32_t>,
                                          &AtomicUpdate<int16_t>,
                                          &AtomicUpdate<int8_t>};  // by AtomicTypeOf
    for (uint64_t at = 0, piece = 0; at < pending.bytes.size(); at += pending.piece, ++piece) {
        uint8_t* const to = reinterpret_cast<uint8_t*>(pending.to + piece * pending.stride);
        if (pending.atomic_op != 0) {
            kUpdates[pending.atomic_type](pending.atomic_op, to, &pending.bytes[at], pending.piece);
        } else {
            PublishBlocks(to, &pending.bytes[at], pending.piece);
        }
    }
}

// Forgets the landings that came before the looks that go on: of a kernel every store of which lands they are many.
// Any core may look at any rank's windows, but waits are for what lands in its own rank.
void World::Trim(RankState& rank) {
    size_t needed = rank.landings.size();
    for (uint32_t i = 0; i < rank.cores; ++i) {
        const CoreState& core = *cores_[rank.first + i];
        if (core.status == CoreStatus::kDone) continue;
        if (core.fruitless_at >= 0) needed = std::min(needed, core.scan_from);
        if (core.looking) needed = std::min(needed, core.look_size);
    }
    rank.landings.erase(rank.landings.begin(), rank.landings.begin() + static_cast<long>(needed));
    for (uint32_t i = 0; i < rank.cores; ++i) {
        CoreState& core = *cores_[rank.first + i];
        core.scan_from -= std::min(core.scan_from, needed);
        core.look_size -= std::min(core.look_size, needed);
    }
    rank.trim_at = 2 * rank.landings.size() + 1024;
}

// A look at status. If it sees a block that landed after the latest look in vain, the wait was for that
// block: the critical path continues at the core that stored it.
void World::Look(CoreState& core, const Access& access, double at) {
    const std::vector<Landing>& landings = core.rank->landings;
    if (!core.looking) {
        core.looked_at = at;
        core.look_size = landings.size();
    }
    core.looking = true;
    if (core.fruitless_at < 0) return;
    const Landing* latest = nullptr;
    const uintptr_t end = access.begin + (access.count - 1) * access.stride + access.bytes;
    for (size_t i = core.scan_from; i < landings.size(); ++i) {
        const Landing& landing = landings[i];
        if (landing.begin < end && access.begin < landing.begin + landing.bytes &&
            landing.visible > core.fruitless_at && (latest == nullptr || landing.visible > latest->visible))
            latest = &landing;
    }
    if (latest == nullptr) return;
    core.path = *latest->path;
    core.released_by = latest->flow;
    // Counts the time from the landing to the present time of S; the rest of the look is counted later.
    core.path.ns[core.phase_number][static_cast<uint32_t>(Cause::kStatus)] += core.now - latest->visible;
}

// All looks since the last call were in vain. They may be at several places, and the first may have missed
// what landed after it.
void World::Poll(CoreState& core, const Loc& loc) {
    Mark(core);
    ++result_.looks;
    core.polled = true;
    if (core.fruitless_at < 0) core.wait_began = core.looked_at;
    core.fruitless_at = core.looked_at;
    core.scan_from = core.look_size;
    core.looking = false;
    Wait(core, core.now + costs_.poll_ns, Cause::kStatus);
    Idle(core, loc);
}

void World::Idle(CoreState& core, const Loc& loc) {
    core.core.blocked_at = loc;
    if (core.now > options_.limit_ns) {
        FailHanging("still polling at the limit of modelled time");
        Park(core, CoreStatus::kReady, loc);
    }
    YieldUntil(core, core.now);
}

// The core does something other than look: its wait is over.
void World::EndWait(CoreState& core) {
    core.looking = false;
    if (core.fruitless_at < 0) return;
    // A repeated read that nothing has ended was no wait.
    if (core.released_by != 0 || core.core.watch == nullptr)
        Trace(core, Pipe::kS, "wait", core.wait_began, core.now, 0, -1, core.released_by);
    core.fruitless_at = -1;
    core.released_by = 0;
}

void World::Trace(CoreState& core, Pipe pipe, const char* name, double start, double end, uint64_t bytes, int peer,
                  uint64_t flow) {
    if (result_.events.size() >= options_.events) {
        if (options_.events != 0) ++result_.dropped;
        return;
    }
    result_.events.push_back({start, end, bytes, flow, core.core.rank, core.core.index, peer,
                              static_cast<uint32_t>(pipe), name, core.core.phase});
}

// ---- the server beside the cores that executes Hccl::BatchWrite ----
}  // namespace twin::timed

namespace twin {

namespace {

using Engine = timed::World;

class TimedAgent final : public CopyAgent {
public:
    uint32_t Post(std::vector<CopyItem> items, const Loc&) override {
        double end = Engine::Here().now;
        for (const CopyItem& item : items) end = std::max(end, Engine::Running().Post(Engine::Here(), item, free_));
        ends_.push_back(ends_.empty() ? end : std::max(end, ends_.back()));
        return static_cast<uint32_t>(ends_.size());
    }
    uint32_t Finished() override {
        Engine::Call(&Engine::Ask);
        const double now = Engine::Here().now;
        return static_cast<uint32_t>(std::upper_bound(ends_.begin(), ends_.end(), now) - ends_.begin());
    }
    void Begin() override {
        ends_.clear();
        free_ = 0;
    }
    void End(bool) override {}  // copies under way land by the world's clock

private:
    std::vector<double> ends_;  // of each task, ascending
    double free_ = 0;           // it can post the next item
};

}  // namespace

std::unique_ptr<CopyAgent> MakeCopyAgent() { return std::make_unique<TimedAgent>(); }

}  // namespace twin

#endif  // TWIN_TIMED
