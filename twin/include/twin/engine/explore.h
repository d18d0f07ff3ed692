// The checked engine from outside: ranks as programs of launches, run together under a schedule.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "twin/engine/launch.h"

namespace twin {

enum class Policy : uint8_t {
    kLate,        // everything as late as the flags allow, cores in turn
    kRandom,      // every choice by chance
    kLazy,        // cores by chance, pipes and stores as late as they may
    kPct,         // priorities with a few change points
    kReplay,      // the choices of an earlier run; 0 past their end
    kExhaustive,  // all choices, few of them other than the first
};

// Faults that a run injects.
struct Injection {
    int kill_rank = -1;  // frozen for ever at step `kill_step`, or when nobody else can move before that
    uint64_t kill_step = 0;
    int stall_rank = -1;  // frozen until nobody else can move, from step `stall_step`
    uint64_t stall_step = 0;
    int slow_rank = -1;  // chosen a hundred times less often
    int slow_core = -1;  // core index of every rank
    int slow_link = -1;  // stores to this rank land as late as they may
    // The n-th status block that lands, counted from 1, is changed in flight: xor, or a word replaced.
    uint64_t corrupt_block = 0;
    uint32_t corrupt_word = 0;
    uint32_t corrupt_xor = 0;
    bool corrupt_stale = false;  // the block that was there stays
    bool corrupt_torn = false;   // only its first 16 bytes land
    bool kill_unseen = false;    // nobody reports the killed rank to the others
};

struct RunOptions {
    Policy policy = Policy::kLate;
    uint64_t seed = 0;
    bool unordered = false;       // stores of a core to one rank land in any order, piece by piece
    bool reordered = false;       // an item of BatchWrite moves in blocks of 512 bytes, which come in any order
    bool torn = false;            // and blocks of 32 bytes in two parts
    bool explicit_sync = true;    // no help from the compiler: dependent V instructions need PipeBarrier<PIPE_V>
    bool hang_is_finding = true;  // else time passes when nobody can move, and waits expire
    uint32_t pct_depth = 3;
    uint32_t polls = 1;  // failed ones, after which a core sleeps: see PollSleeps
    uint64_t max_steps = 50'000'000;
    bool trace = false;
    std::vector<uint16_t> choices;  // kReplay, and the prefix of kExhaustive
    Injection injection;
};

struct PollCount {
    uint64_t waiting = 0;  // looks in vain
    uint64_t ready = 0;    // looks that ended a wait
};

struct TraceEvent {
    uint64_t time;
    int rank;
    uint32_t core;
    uint32_t launch;
    const char* event;
    int target;
    GmKind area;
    uint64_t offset;
    uint64_t bytes;
    uint64_t issue;
    uint32_t words[8];
};

struct RunResult {
    bool failed = false;
    Finding kind = Finding::kHang;
    std::string message;
    uint64_t steps = 0;
    uint64_t instructions = 0;
    uint64_t switches = 0;  // choices other than the first
    uint64_t trace_hash = 0;
    uint64_t status_blocks = 0;  // that landed
    bool time_passed = false;    // a wait had to expire
    std::vector<uint16_t> choices;
    std::vector<uint16_t> options;  // kExhaustive: how many there were
    std::map<std::string, PollCount> polls;
    std::string suspect;  // two accesses of a single block in no order, which is a race if the block is no flag
    std::vector<TraceEvent> trace;
};

// Bytes that a rank's host puts into GM, between two of its launches.
struct HostWrite {
    uintptr_t to;
    const void* from;
    uint64_t bytes;
};

// One launch of a rank. `begin` runs on the host before it, then `writes` are made; `end` runs after all its
// cores have left.
struct ProgramStep {
    LaunchSpec spec;
    std::function<void()> kernel;
    std::function<void()> begin;
    std::vector<HostWrite> writes;
    std::function<void()> end;
    const char* name = "";
};

struct RankProgram {
    int rank = 0;
    IdlePolicy* idle = nullptr;  // on_idle is called when time passes
    std::vector<const ProgramStep*> steps;
    Traffic traffic = {};
};

class World;

// Keeps fibers and memory between runs.
class Explorer {
public:
    Explorer();
    ~Explorer();
    Explorer(const Explorer&) = delete;
    Explorer& operator=(const Explorer&) = delete;

    // Runs all programs to their end or to the first finding. Other exceptions of a kernel are findings too.
    RunResult Run(std::vector<RankProgram>& programs, const RunOptions& options);
    // GM pages that kernels wrote in the last run: for whoever has to restore them.
    void ForEachWrittenPage(const std::function<void(uintptr_t begin, uint64_t bytes)>& visit) const;

private:
    std::unique_ptr<World> world_;
};

}  // namespace twin
