// The checked engine: all ranks and all their cores are fibers of one thread; a schedule moves pipes and
// stores.
#pragma once

#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "../core/fiber.h"
#include "shadow.h"
#include "twin/engine/copy_agent.h"
#include "twin/engine/explore.h"

namespace twin {

namespace checked {

// ---- one core ----

enum class Queued : uint8_t { kEffect, kSet, kWait, kBarrier };

// An instruction, or a token between instructions, in flight through a pipe.
struct QueuedOp {
    Queued kind;
    uint32_t number;  // program order, and the site of an effect
    ClockId clock;    // what the scalar pipe knew when it issued this
    uint32_t flag;
    uint32_t turn;  // which set of the flag, or which one is waited for
    void (*run)(void*);
    void* effect;
    Instruction instruction;
};

struct PipeQueue {
    std::vector<QueuedOp> ops;
    size_t head = 0;
    uint32_t last = 0;  // number of the latest instruction that ran
    bool empty() const { return head == ops.size(); }
};

// A UB to GM copy that has left its pipe; pieces of it land one after another.
struct Store {
    struct Piece {
        uintptr_t to;
        uint32_t bytes;
        size_t from;  // in the core's store memory
        bool landed;
    };
    uint32_t number;
    uint32_t left;
    ClockId release;
    bool flag;         // of status blocks: they land one by one
    bool status;       // other ranks wait for them
    uintptr_t target;  // begin of the range it goes to
    int owner;         // windows: whose
    std::vector<Piece> pieces;
};

struct FlagState {
    static constexpr uint32_t kDepth = 16;
    uint32_t sets_issued = 0, waits_issued = 0, sets_done = 0, waits_done = 0;
    ClockId clocks[kDepth] = {};
};

struct CacheLine {
    uint8_t bytes[64];
    uint64_t valid = 0;  // bits: bytes that lie in the range
    uint64_t dirty = 0;
    uint8_t fetched[64];  // as they were in GM
    uint32_t stored_by = 0;
    Loc fetched_at = {"", 0};
};

struct PollRange {
    uintptr_t begin;
    uintptr_t end;
};

// Two accesses in no order to a block that counts as a flag by a guess, by their places.
struct Suspected {
    Loc here, there;
    std::string text;
};

struct RankState;

struct CoreState : FiberCore {
    uint32_t global = 0;  // index over all ranks
    RankState* rank = nullptr;
    bool woken = false;      // polling: bytes that it looked at have landed
    bool suspected = false;  // its poll was noticed, not declared
    uint32_t fruitless = 0;  // suspected polls since anything landed
    uint32_t in_vain = 0;    // failed polls since it slept or stored to GM
    std::chrono::steady_clock::time_point idle_since = std::chrono::steady_clock::time_point::max();  // in Yield
    uint32_t wait_flag = 0, wait_turn = 0;
    int cross_id = 0;
    uint32_t cross_turn = 0;
    bool eager_vector = false;
    int64_t priority[6] = {};  // fiber, V, MTE2, MTE3, stores, agents
    uint8_t* ub = nullptr;
    std::vector<Block> ub_blocks;
    uint32_t ub_high = 0;  // bytes of UB that were ever carved in this launch, or may be touched without
    PipeQueue pipes[kPipes];
    std::vector<uint32_t> clock[kPipes];
    ClockId issue_clock = kNoClock;  // copy of clock[S], or none
    FlagState flags[kFlags];
    std::vector<Store> stores;
    std::vector<uint8_t> store_bytes;
    std::vector<std::unique_ptr<uint8_t[]>> effect_chunks;
    size_t effect_chunk = 0, effect_used = 0;
    std::unordered_map<uintptr_t, CacheLine> cache;
    uint32_t dirty_lines = 0;
    std::vector<PollRange> looked;    // GM that was read as flags since the last poll
    std::vector<Loc> looks;           // where, since the last poll
    std::vector<CopyQueues*> agents;  // the copy agents' queues of tasks that this core posted

    uint16_t Agent(Pipe pipe) const { return static_cast<uint16_t>(global * kPipes + static_cast<uint32_t>(pipe)); }
};

// ---- one rank ----

struct RankState {
    RankProgram* program = nullptr;
    size_t next = 0;  // step to start
    const ProgramStep* step = nullptr;
    uint32_t first = 0;  // global index of its first core
    uint32_t cores = 0;  // of the running launch
    uint32_t most_cores = 0;
    bool dead = false;
    bool stalled = false;
    LaunchState launch;
    std::vector<uint32_t> clock;  // the host's clock: all its launches so far
    // Of flags between its cores, by flag id, first core and turn.
    std::map<std::tuple<int, uint32_t, uint32_t>, std::vector<uint32_t>> cross_clocks;
};

}  // namespace checked

using namespace checked;

class World : public FiberHost<World, CoreState> {
public:
    World();
    ~World();
    RunResult Run(std::vector<RankProgram>& programs, const RunOptions& options);
    template <class Visit>
    void ForEachPage(Visit&& visit) const {
        shadow_.ForEachPage(visit);
    }

    // ---- called from fibers, by Call ----
    void Enqueue(CoreState& core, const Instruction& instruction, void (*run)(void*), void* effect);
    void* Reserve(CoreState& core, size_t bytes);
    void CheckScalar(CoreState& core, const Instruction& instruction);
    void LoadCached(CoreState& core, uintptr_t from, uint32_t bytes, void* value, const GmRange& range, const Loc& loc);
    void StoreCached(CoreState& core, uintptr_t to, uint32_t bytes, const void* value, const GmRange& range,
                     const Loc& loc);
    void CleanLines(CoreState& core, uintptr_t address, bool all, const Loc& loc);
    void FlagAt(CoreState& core, uintptr_t address, bool certain);
    void FlagSet(CoreState& core, uint32_t flag, Pipe from, const Loc& loc);
    void FlagWait(CoreState& core, uint32_t flag, Pipe to, const Loc& loc);
    void Barrier(CoreState& core, Pipe pipe, const Loc& loc);
    void ForcePipe(CoreState& core, uint32_t pipe);  // runs all that the pipe holds
    void Carved(CoreState& core, uint32_t begin, uint32_t bytes);
    void Released(CoreState& core);
    void SyncAll(CoreState& core, const Loc& loc);
    void Poll(CoreState& core, const Loc& loc, bool suspected);
    void Yield(CoreState& core, const Loc& loc, bool idle);
    void CrossSet(CoreState& core, int mode, Pipe pipe, int id, const Loc& loc);
    void CrossWait(CoreState& core, int id, const Loc& loc);
    ClockId ScalarClock(CoreState& core);
    void AddAgent(CoreState& core, CopyQueues* queues);
    int64_t cycles() const { return cycles_; }
    uint32_t polls() const { return options_.polls; }

private:
    friend class FiberHost<World, CoreState>;
    enum Kind : uint8_t { kFiber, kVector, kMte2, kMte3, kStores, kAgents, kKinds };
    struct Entity {
        CoreState* core;
        Kind kind;
    };

    // ---- world.cpp ----
    void Prepare(std::vector<RankProgram>& programs, const RunOptions& options);
    void StartRanks();
    void StartStep(RankState& rank);
    void WriteFromHost(RankState& rank, const HostWrite& write);
    void FinishStep(RankState& rank);
    void Loop();
    bool Gather();
    bool FiberEnabled(const CoreState& core) const;
    bool PipeEnabled(const CoreState& core, uint32_t pipe) const;
    void Step(const Entity& entity);
    void EndKernel(CoreState& core);
    void Park(CoreState& core, CoreStatus status, const Loc& loc);
    void MaybeYield(CoreState& core);
    void ReleaseBarrier(RankState& rank);
    std::vector<uint32_t>& CrossClock(CoreState& core, int id, uint32_t turn);
    bool Idle();
    void FailHanging(const char* how);
    void Inject();
    void Kill(RankState& rank);
    void Look(CoreState& core, bool waiting);
    bool Frozen(const RankState& rank) const { return rank.dead || rank.stalled; }

    // ---- schedule.cpp: choices ----
    void SeedSchedule();
    uint64_t Random();
    // Returns 0..n-1; 0 is the ordinary choice. When chance decides, one in `odds` choices is not 0.
    uint32_t Choose(uint32_t n, uint32_t odds);
    size_t PickEntity();
    bool Eager(CoreState& core, uint32_t pipe);
    bool ChangePoint();

    // ---- pipes.cpp ----
    ClockId IssueClock(CoreState& core);
    void Learns(CoreState& core);
    void Push(CoreState& core, Queued kind, Pipe to, uint32_t flag, uint32_t turn, const Loc& loc, const Access& freed);
    void KnowAll(CoreState& core);
    bool RunHead(CoreState& core, uint32_t pipe, bool force);
    void RunEffect(CoreState& core, uint32_t pipe, QueuedOp& op, bool force);
    void ForceFlag(CoreState& core, uint32_t flag, uint32_t turn);
    void Drain(CoreState& core, const Loc& loc);
    void ForceAll(CoreState& core);
    bool Idle(const CoreState& core) const;
    bool FlagReady(const CoreState& core, uint32_t flag, uint32_t turn) const;
    Toucher ToucherOf(CoreState& core, Pipe pipe, uint32_t number, bool write, bool atomic);

    // ---- memory.cpp ----
    // Calls visit(blocks, lead, at, bytes) for each contiguous part, at byte `at` of UB.
    template <class Visit>
    static void ForEachUbPiece(CoreState& core, const Access& access, Visit&& visit) {
        ForEachPiece(access, [&](uintptr_t begin, uint64_t bytes) {
            const uint64_t at = begin - reinterpret_cast<uintptr_t>(core.ub);
            visit(&core.ub_blocks[at / kBlockBytes], static_cast<uint32_t>(at % kBlockBytes), at, bytes);
        });
    }
    void TouchUb(CoreState& core, const Access& access, Toucher t);
    void NeedFilled(CoreState& core, const Access& access, const Instruction& in, uint32_t number);
    void TouchGm(CoreState& core, Pipe pipe, const Access& access, const Toucher& t, const Instruction& in);
    void TouchGmPiece(CoreState& core, Pipe pipe, uintptr_t begin, uint64_t bytes, const Toucher& t,
                      const GmRange& range, bool flag_store);
    static bool GuessesFlags(const CoreState& core, const GmRange& range);
    void MakeStore(CoreState& core, QueuedOp& op, const GmRange& range, ClockId release, bool force);
    void LandSome(CoreState& core);
    void LandAll(CoreState& core);
    void Release(uintptr_t at, ClockId clock);
    void ReleaseFlags(const CoreState& core, const CopyItem& piece);
    void LandPiece(CoreState& core, Store& store, size_t index);
    void Landed(CoreState& core, uintptr_t to, uint64_t bytes, uint32_t number);
    void DropLanded(CoreState& core);
    void Corrupt(const Store::Piece& piece, uint8_t* bytes) const;
    CacheLine& Fetch(CoreState& core, uintptr_t line, const GmRange& range, const Loc& loc);
    void CheckDirty(CoreState& core, Pipe pipe, uintptr_t begin, uint64_t bytes, const Toucher& t);
    void CheckDirtyAtEnd(CoreState& core);
    void Trace(const CoreState& core, const char* event, const GmRange* range, uintptr_t begin, uint64_t bytes,
               uint64_t issue);
    void Mix(uint64_t value) { result_.trace_hash = (result_.trace_hash ^ value) * 0x9E3779B97F4A7C15ull; }

    // ---- pipes.cpp: agents ----
    bool AgentPending(const CoreState& core) const;
    void MoveAgents(CoreState& core, bool all);

    // ---- report.cpp ----
    [[noreturn]] void RaiseConflict(const Toucher& t, const Shadow::Conflict& conflict, const std::string& where);
    [[noreturn]] void RaiseOrder(uint32_t first, bool first_wrote, uint32_t second, bool second_wrote,
                                 const std::string& where);
    [[noreturn]] void RaiseUnfilled(const CoreState& core, const Instruction& in, uint32_t number, uint64_t at,
                                    uint64_t bytes);
    void Suspect(const Toucher& t, Block& block, uintptr_t at, uint64_t bytes, const GmRange& range);
    std::string FirstSuspect() const;
    std::string Describe(uint32_t number, bool wrote) const;
    std::string Actor(uint16_t agent) const;

    RunOptions options_;
    RunResult result_;
    ClockPool clocks_;
    Sites sites_;
    Shadow shadow_;
    std::vector<std::unique_ptr<CoreState>> cores_;
    uint32_t core_count_ = 0;
    std::vector<std::unique_ptr<RankState>> ranks_;
    uint32_t rank_count_ = 0;
    uint32_t live_ranks_ = 0;
    std::vector<Entity> enabled_;
    CoreState* last_run_ = nullptr;  // whose fiber ran last
    int64_t cycles_ = 0;
    uint64_t random_ = 0;
    size_t choice_ = 0;
    std::vector<uint64_t> change_points_;
    uint64_t yields_ = 0;
    int64_t lowest_ = 0;
    uint32_t dirty_lines_ = 0;
    uint32_t idle_rounds_ = 0;
    uint64_t landings_ = 0;
    std::vector<uint32_t> scratch_;
    std::vector<Suspected> suspected_;
};

}  // namespace twin
