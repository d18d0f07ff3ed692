// Ranks and cores of a timed run: fibers of one thread. The core with the earliest clock runs next.
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <vector>

#include "../core/fiber.h"
#include "fabric.h"
#include "twin/engine/copy_agent.h"
#include "twin/engine/engine.h"

namespace twin::timed {

// ---- a core's clocks, and the time that its critical path has spent so far ----

constexpr uint32_t kPhases = 20;  // names a run may have; later ones count as the last
constexpr uint32_t kCauses = static_cast<uint32_t>(Cause::kCount);
constexpr uint32_t kMaxDepth = 64;

// How the time from 0 to a core's `now` was spent, followed back through the cores for which it waited.
struct Path {
    double ns[kPhases][kCauses] = {};
};

// Bytes that a pipe has under way: no more than so many at once.
class Flights {
public:
    // The earliest time from `start` on at which `bytes` more may leave.
    double Admit(double start, double bytes, double most) {
        while (!flights_.empty() && bytes_ + bytes > most) {
            const Flight first = flights_[head_];
            if (first.end > start) start = first.end;
            bytes_ -= first.bytes;
            if (++head_ == flights_.size()) {
                flights_.clear();
                head_ = 0;
                bytes_ = 0;
            }
        }
        return start;
    }
    void Add(double end, double bytes) {
        if (head_ > 256 && 2 * head_ > flights_.size()) {
            flights_.erase(flights_.begin(), flights_.begin() + static_cast<long>(head_));
            head_ = 0;
        }
        flights_.push_back({end, bytes});
        bytes_ += bytes;
    }
    void Clear() { *this = Flights(); }

private:
    struct Flight {
        double end;
        double bytes;
    };
    std::vector<Flight> flights_;
    size_t head_ = 0;
    double bytes_ = 0;
};

struct PipeClock {
    double free = 0;   // the next instruction may start
    double ready = 0;  // flags that the pipe has waited for
    double done = 0;   // everything it was given is complete
    double started[kMaxDepth] = {};
    uint32_t issued = 0;
    Flights flights;
};

struct RankState;

struct CoreState : Hot, FiberCore {
    RankState* rank = nullptr;
    uint32_t global = 0;
    PipeClock pipes[kPipes];
    double flag[kFlags] = {};
    Pipe flag_from[kFlags] = {};
    double vector_ns = 0;         // in which V works
    const char* phase = nullptr;  // whose number is `phase_number`
    uint32_t phase_number = 0;
    double phase_began = 0;
    Path path;
    // Of the wait that is going on: when the looks that were fruitless last began, and the landings known
    // then.
    bool looking = false;
    bool polled = false;  // the next read is one more look of a poll that was noticed
    double looked_at = 0;
    double fruitless_at = -1;
    size_t look_size = 0;
    size_t scan_from = 0;
    double wait_began = 0;
    uint64_t released_by = 0;  // flow of the store that ended it, as far as is known
    int cross_id = 0;
    uint32_t cross_turn = 0;
};

// ---- ranks ----

// A store of status that has landed, for the cores that wait for it.
struct Landing {
    uintptr_t begin;
    uint64_t bytes;
    double visible;
    uint64_t flow;
    std::shared_ptr<Path> path;  // of the storing core, up to `visible`
};

// Instructions of V that cost alike.
enum class VectorClass { kAdd, kMul, kDiv, kExp, kMuls, kCast, kElse, kCount };
struct VectorCost {
    double repeat_ns;
    double head_ns;
};

struct RankState {
    RankProgram* program = nullptr;
    uint32_t index = 0;
    size_t at = 0;
    const ProgramStep* step = nullptr;
    LaunchState launch;
    double cross_time = 0;
    uint32_t first = 0;
    uint32_t cores = 0;
    double end = 0;                   // of the latest core of this step
    const CoreState* last = nullptr;  // that core
    Path path;                        // up to the end of the step before
    std::vector<Landing> landings;    // those that a wait may still be for
    size_t trim_at = 1024;            // as many are looked through
    std::set<uintptr_t> stored;       // begins of the tensors that a kernel with undeclared polls has stored into
};

class World : public FiberHost<World, CoreState> {
public:
    ~World();
    TimedResult Run(std::vector<RankProgram>& programs, const Costs& costs, const TimedOptions& options);

    // From fibers, those without a result by Call.
    Outcome Schedule(CoreState& core, const Instruction& instruction);
    void OrderScalarAccess(CoreState& core, const GmRange& range, const Access& access, bool store);
    void FlagSet(CoreState& core, uint32_t flag, Pipe from);
    void FlagWait(CoreState& core, uint32_t flag, Pipe to);
    void Barrier(CoreState& core, Pipe pipe);
    void WaitPipe(CoreState& core, Pipe pipe);
    void SyncAll(CoreState& core, const Loc& loc);
    void Poll(CoreState& core, const Loc& loc);
    void CrossSet(CoreState& core, int mode, Pipe pipe, int id, const Loc& loc);
    void CrossWait(CoreState& core, int id, const Loc& loc);
    // The core asks the server whether it is done: a read of its own memory.
    void Ask(CoreState& core) { Wait(core, core.now + std::max(1.0, costs_.read_latency_ns), Cause::kStatus); }
    // Posts a BatchWrite item, from `free` on, and sets `free` to the time at which the server can post the next.
    // Returns when the item has arrived.
    double Post(CoreState& core, const CopyItem& item, double& free);
    void YieldUntil(CoreState& core, double time);
    // A core that has read only what it had read before.
    void Idle(CoreState& core, const Loc& loc);

private:
    friend class FiberHost<World, CoreState>;
    struct Waiting {
        double time;
        uint32_t core;
        bool operator>(const Waiting& other) const {
            return time != other.time ? time > other.time : core > other.core;
        }
    };
    // Bytes that become visible at a time.
    struct Pending {
        double visible;
        uint64_t number;
        uintptr_t to;
        uint32_t rank;  // whose GM it is
        uint64_t flow;
        std::shared_ptr<Path> path;
        uint64_t stride = 0;
        uint64_t piece = 0;
        std::vector<uint8_t> bytes = {};  // taken at the store; empty: `item` is copied as it lands
        CopyItem item = {};
        uint8_t atomic_op = 0;  // 0: replaces what is there
        uint8_t atomic_type = 0;
    };
    struct Later {
        bool operator()(const std::shared_ptr<Pending>& a, const std::shared_ptr<Pending>& b) const {
            return a->visible != b->visible ? a->visible > b->visible : a->number > b->number;
        }
    };
    struct Copy {  // an MTE instruction, while it is timed
        const GmRange* range;
        uint32_t owner;
        double bytes;
        double share;  // of a core's rate
        double start;
        double end;      // complete, as flags see it
        double arrived;  // stores: in the target's memory
    };

    void Prepare(std::vector<RankProgram>& programs);
    void StartStep(RankState& rank);
    void FinishStep(RankState& rank);
    void Loop();
    void EndKernel(CoreState& core);
    void Park(CoreState& core, CoreStatus status, const Loc& loc);
    void Push(CoreState& core, double time) { waiting_.push({time, core.global}); }
    void ReleaseBarrier(RankState& rank);
    void Land(double until);
    void LandItem(const CopyItem& item);
    void LandBytes(const Pending& pending) const;
    void Trim(RankState& rank);
    void FailHanging(const char* how);

    void Mark(CoreState& core);
    void EndPhase(CoreState& core);
    void Wait(CoreState& core, double until, Cause cause);
    double Begin(CoreState& core, Pipe pipe);
    void Given(CoreState& core, Pipe pipe, double start);
    void Vector(CoreState& core, const Instruction& instruction);
    double ShareOf(const Access& gm, const GmRange& range) const;
    void Read(CoreState& core, const Instruction& instruction, Copy& copy);
    void Store(CoreState& core, const Instruction& instruction, Copy& copy);
    bool MayBeFlag(CoreState& core, const GmRange& range, bool store) const;
    void SeeLanded(CoreState& core);
    void Look(CoreState& core, const Access& access, double at);
    void EndWait(CoreState& core);
    Pending& Send(CoreState& core, double visible, uintptr_t to, uint32_t rank);
    uint64_t Defer(CoreState& core, const Instruction& instruction, const Copy& copy);
    void Trace(CoreState& core, Pipe pipe, const char* name, double start, double end, uint64_t bytes = 0,
               int peer = -1, uint64_t flow = 0);
    void Collect(TimedResult& result);

    Costs costs_;
    std::array<VectorCost, static_cast<size_t>(VectorClass::kCount)> vector_costs_ = {};
    double vector_count_ns_ = 0;
    TimedOptions options_;
    std::unique_ptr<Fabric> fabric_;
    std::vector<std::unique_ptr<CoreState>> cores_;
    std::vector<std::unique_ptr<RankState>> ranks_;
    uint8_t* ub_ = nullptr;
    size_t ub_cores_ = 0;
    std::priority_queue<Waiting, std::vector<Waiting>, std::greater<Waiting>> waiting_;
    std::priority_queue<std::shared_ptr<Pending>, std::vector<std::shared_ptr<Pending>>, Later> pending_;
    std::vector<const char*> phases_;
    uint32_t live_ranks_ = 0;
    uint64_t stores_ = 0;
    uint64_t flows_ = 0;
    TimedResult result_;
};

}  // namespace twin::timed
