// The C ABI of a library of kernels, which ascendc_twin/abi.py mirrors field by field: launches them on
// the twin. The ranks of one launcher keep their devices and copy agents between launches.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bad_address.h"
#include "twin/api/hccl_context.h"
#include "twin/engine/copy_agent.h"
#include "twin/engine/engine.h"
#include "twin/engine/explore.h"
#include "twin/engine/predict.h"

extern "C" {

// One GM range of a launch. `name` outlives the launch.
struct TwinRange {
    const void* begin;
    uint64_t bytes;
    const char* name;
    uint32_t* doorbell;
    int32_t kind;  // twin::GmKind
    int32_t atomic_blocks;
    int32_t owner;  // the rank whose window it is, or -1
    int32_t data;   // stores of single blocks are no flags
    int32_t reach;  // twin::Reach
    int32_t reserved;
};

// One rank's launch.
struct TwinLaunch {
    void* entry;
    const uint64_t* arguments;
    uint32_t argument_count;
    uint32_t block_dim;
    uint64_t tiling_key;
    const char* name;
    const TwinRange* ranges;
    uint32_t range_count;
    uint32_t warn;       // rules that kernels in use break without harm are listed, not raised
    void* contexts[2];   // blobs that twin_context_fill has filled, or null
    uint32_t* doorbell;  // this rank's, or null
    double deadline_s;   // nothing moves this long: a hang. 0: wait for ever
};

// How the checked engine runs, then how the timed one does; the fast one has no choices.
struct TwinOptions {
    uint64_t seed;
    uint64_t max_steps;
    uint32_t policy;  // twin::Policy
    uint32_t unordered;
    uint32_t explicit_sync;
    uint32_t pct_depth;
    const double* costs;  // in the order of twin_cost_names
    double limit_ns;      // of modelled time, after which a poll is a hang
    uint64_t events;      // at most so many are stored
};

// What came of it. `finding` is empty where the kernel threw something else than a fault.
struct TwinOutcome {
    int32_t rank;  // that failed
    int32_t reserved;
    uint64_t steps;
    uint64_t trace_hash;
    double total_ns;  // of the timed engine, as all up to `event_count`
    double vector_ns;
    uint64_t sync_alls;
    const twin::TimelineEvent* events;  // until the next run
    uint64_t event_count;
    uint64_t dropped;  // further events
    char finding[64];
    char text[4096];
    char suspect[1024];   // of RunResult
    char warnings[8192];  // one a line
};

}  // extern "C"

namespace twin::third_party {

constexpr uint32_t kGroups = 2;

struct Rank {
    explicit Rank(int number) : device(number) {}
    Device device;
    std::unique_ptr<CopyAgent> agents[kGroups];

    void BeginAgents(const TwinLaunch& launch);
    void EndAgents(const TwinLaunch& launch, bool failed);
};

// All ranks of one launcher.
class RankSet {
public:
    explicit RankSet(uint32_t world);
    uint32_t size() const { return static_cast<uint32_t>(ranks_.size()); }
    bool Run(const TwinLaunch* launches, const TwinOptions& options, TwinOutcome* outcome);
    bool RunRank(uint32_t rank, const TwinLaunch& launch, TwinOutcome* outcome,
                 const std::atomic<bool>* stop = nullptr);
    // Of the last timed run: how the critical path was spent, an empty line, and what each link carried.
    std::string times() const { return times_; }

private:
#if defined(TWIN_CHECKED) || defined(TWIN_TIMED)
    struct Programs {
        std::vector<ProgramStep> steps;
        std::vector<RankProgram> ranks;
    };
    // All ranks' launches, for an engine that runs them together.
    Programs ProgramsOf(const TwinLaunch* launches, std::set<std::string>* warnings);
#endif
    std::vector<std::unique_ptr<Rank>> ranks_;
    std::string times_;
#if defined(TWIN_CHECKED)
    Explorer explorer_;
#elif defined(TWIN_TIMED)
    TimedEngine engine_;
    TimedResult last_;
#endif
};

namespace {

constexpr size_t kMaxArguments = 40;
constexpr uint32_t kSpinsAlone = 2000;  // every rank has a processor of its own
constexpr uint32_t kSpinsCrowded = 20;  // spinning would steal a peer's time
constexpr double kAtOnce = 1e-9;

template <size_t>
using Word = uint64_t;
template <size_t... kIndex>
void CallWith(void* entry, const uint64_t* words, std::index_sequence<kIndex...>) {
    reinterpret_cast<void (*)(Word<kIndex>...)>(entry)(words[kIndex]...);
}
template <size_t kCount>
void Call(void* entry, const uint64_t* words) {
    CallWith(entry, words, std::make_index_sequence<kCount>());
}
using Caller = void (*)(void*, const uint64_t*);
template <size_t... kCounts>
Caller CallerOf(size_t count, std::index_sequence<kCounts...>) {
    constexpr Caller kTable[] = {&Call<kCounts>...};
    return kTable[count];
}

void CopyText(char* to, size_t bytes, const char* text) {
    strncpy(to, text, bytes - 1);
    to[bytes - 1] = '\0';
}
void ReportFailure(TwinOutcome* outcome, uint32_t rank, const char* finding, const char* text) {
    outcome->rank = static_cast<int32_t>(rank);
    CopyText(outcome->finding, sizeof(outcome->finding), finding);
    CopyText(outcome->text, sizeof(outcome->text), text);
}

void ReportWarnings(TwinOutcome* outcome, const std::set<std::string>& warnings) {
    std::string text;
    for (const std::string& line : warnings) text += line + "\n";
    CopyText(outcome->warnings, sizeof(outcome->warnings), text.c_str());
}
void AddLines(std::set<std::string>* lines, const char* text) {
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) lines->insert(line);
}

// When a peer has failed, this rank stops waiting before its deadline.
struct StopWithPeer {
    const std::atomic<bool>* failed;
    LaunchSpec* spec;
    static void OnIdle(void* self) {
        const StopWithPeer& stop = *static_cast<StopWithPeer*>(self);
        if (stop.failed != nullptr && stop.failed->load()) stop.spec->deadline_s = kAtOnce;
    }
};

// Pointers and integers of up to 8 bytes are passed alike on x86-64 and aarch64, whatever their type.
void CallEntry(const TwinLaunch& launch) {
    CallerOf(launch.argument_count, std::make_index_sequence<kMaxArguments + 1>())(launch.entry, launch.arguments);
}

using Warnings = std::set<std::string>;

LaunchSpec SpecOf(const TwinLaunch& launch, Warnings* warnings) {
    if (launch.argument_count > kMaxArguments) throw std::runtime_error("an entry takes at most 40 arguments");
    LaunchSpec spec;
    spec.block_dim = launch.block_dim;
    spec.tiling_key = launch.tiling_key;
    spec.name = launch.name;
    spec.watch_polls = true;
    spec.deadline_s = launch.deadline_s;
    spec.warnings = warnings;
    spec.lists_all = launch.warn != 0;
    for (uint32_t i = 0; i < launch.range_count; ++i) {
        const TwinRange& range = launch.ranges[i];
        const uintptr_t begin = reinterpret_cast<uintptr_t>(range.begin);
        spec.ranges.push_back({begin, begin + range.bytes, static_cast<GmKind>(range.kind), range.atomic_blocks != 0,
                               range.doorbell, range.name, range.owner});
        spec.ranges.back().data = range.data != 0;
        spec.ranges.back().reach = static_cast<Reach>(range.reach);
    }
    for (uint32_t i = 0; i < kGroups; ++i) {
        if (launch.contexts[i] == nullptr) continue;
        spec.hccl_context[i] = reinterpret_cast<uintptr_t>(launch.contexts[i]) + sizeof(hccl::Header);
    }
    return spec;
}

}  // namespace

void Rank::BeginAgents(const TwinLaunch& launch) {
    for (uint32_t i = 0; i < kGroups; ++i) {
        if (launch.contexts[i] == nullptr) continue;
        if (!agents[i]) agents[i] = MakeCopyAgent();
        agents[i]->Begin();
        static_cast<hccl::Header*>(launch.contexts[i])->agent = agents[i].get();
    }
}

void Rank::EndAgents(const TwinLaunch& launch, bool failed) {
    for (uint32_t i = 0; i < kGroups; ++i) {
        if (launch.contexts[i] != nullptr && agents[i]) agents[i]->End(failed);
    }
}

RankSet::RankSet(uint32_t world) {
    for (uint32_t rank = 0; rank < world; ++rank) {
        ranks_.push_back(std::make_unique<Rank>(static_cast<int>(rank)));
        if (world > 1) ranks_.back()->device.JoinGroup(this, world);
    }
}

bool RankSet::RunRank(uint32_t number, const TwinLaunch& launch, TwinOutcome* outcome, const std::atomic<bool>* stop) {
    Rank& rank = *ranks_[number];
    bool started = false;
    Warnings warnings;
    const BadAddresses caught;
    try {
        LaunchSpec spec = SpecOf(launch, &warnings);
        StopWithPeer watch{stop, &spec};
        IdlePolicy& idle = rank.device.idle();
        idle.spins = size() <= std::thread::hardware_concurrency() ? kSpinsAlone : kSpinsCrowded;
        idle.doorbell = launch.doorbell;
        idle.on_idle = &StopWithPeer::OnIdle;
        idle.on_idle_argument = &watch;
        rank.BeginAgents(launch);
        started = true;
        rank.device.Launch(spec, [&] { CallEntry(launch); });
        rank.EndAgents(launch, false);
        ReportWarnings(outcome, warnings);
        return true;
    } catch (const Fault& fault) {
        ReportFailure(outcome, number, FindingName(fault.kind), fault.what());
    } catch (const std::exception& error) {
        ReportFailure(outcome, number, "", error.what());
    } catch (...) {
        ReportFailure(outcome, number, "", "the kernel threw something that is no exception");
    }
    if (started) rank.EndAgents(launch, true);
    return false;
}

#if defined(TWIN_CHECKED) || defined(TWIN_TIMED)

RankSet::Programs RankSet::ProgramsOf(const TwinLaunch* launches, Warnings* warnings) {
    Programs programs{std::vector<ProgramStep>(size()), std::vector<RankProgram>(size())};
    for (uint32_t rank = 0; rank < size(); ++rank) {
        const TwinLaunch& launch = launches[rank];
        Rank& owner = *ranks_[rank];
        ProgramStep& step = programs.steps[rank];
        step.spec = SpecOf(launch, warnings);
        step.kernel = [&launch] { CallEntry(launch); };
        step.begin = [&launch, &owner] { owner.BeginAgents(launch); };
        step.end = [&launch, &owner] { owner.EndAgents(launch, false); };
        step.name = launch.name;
        programs.ranks[rank].rank = static_cast<int>(rank);
        programs.ranks[rank].steps = {&step};
    }
    return programs;
}

#endif

#if defined(TWIN_CHECKED)

bool RankSet::Run(const TwinLaunch* launches, const TwinOptions& options, TwinOutcome* outcome) {
    const BadAddresses caught;
    Warnings warnings;
    Programs programs = ProgramsOf(launches, &warnings);
    RunOptions wanted;
    wanted.policy = static_cast<Policy>(options.policy);
    wanted.seed = options.seed;
    wanted.unordered = options.unordered != 0;
    wanted.explicit_sync = options.explicit_sync != 0;
    wanted.pct_depth = options.pct_depth;
    wanted.max_steps = options.max_steps;
    const RunResult result = explorer_.Run(programs.ranks, wanted);
    outcome->steps = result.steps;
    outcome->trace_hash = result.trace_hash;
    CopyText(outcome->suspect, sizeof(outcome->suspect), result.suspect.c_str());
    ReportWarnings(outcome, warnings);
    if (result.failed) ReportFailure(outcome, 0, FindingName(result.kind), result.message.c_str());
    return !result.failed;
}

#elif defined(TWIN_TIMED)

bool RankSet::Run(const TwinLaunch* launches, const TwinOptions& options, TwinOutcome* outcome) {
    const BadAddresses caught;
    Warnings warnings;
    Programs programs = ProgramsOf(launches, &warnings);
    TimedOptions wanted;
    wanted.limit_ns = options.limit_ns;
    wanted.events = options.events;
    last_ = engine_.Run(programs.ranks, CostsFrom(options.costs), wanted);
    times_ = PathText(last_) + "\n" + LinkText(last_);
    outcome->steps = last_.instructions;
    outcome->total_ns = last_.total_ns;
    outcome->vector_ns = last_.vector_ns;
    outcome->sync_alls = last_.sync_alls;
    outcome->events = last_.events.data();
    outcome->event_count = last_.events.size();
    outcome->dropped = last_.dropped;
    ReportWarnings(outcome, warnings);
    if (last_.failed) ReportFailure(outcome, 0, FindingName(last_.kind), last_.message.c_str());
    return !last_.failed;
}

#else

bool RankSet::Run(const TwinLaunch* launches, const TwinOptions&, TwinOutcome* outcome) {
    if (size() == 1) return RunRank(0, launches[0], outcome);
    std::atomic<bool> failed{false};
    std::vector<TwinOutcome> outcomes(size());
    std::atomic<int> first{-1};
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < size(); ++rank) {
        threads.emplace_back([&, rank] {
            if (RunRank(rank, launches[rank], &outcomes[rank], &failed)) return;
            int nobody = -1;
            first.compare_exchange_strong(nobody, static_cast<int>(rank));
            failed.store(true);
        });
    }
    for (std::thread& thread : threads) thread.join();
    if (first.load() >= 0) {
        *outcome = outcomes[static_cast<size_t>(first.load())];
        return false;
    }
    Warnings all;
    for (const TwinOutcome& one : outcomes) AddLines(&all, one.warnings);
    ReportWarnings(outcome, all);
    return true;
}

#endif

}  // namespace twin::third_party

#pragma GCC visibility push(default)
extern "C" {

uint32_t twin_abi() { return 5; }

#ifdef TWIN_TIMED
const char* twin_engine() { return "timed"; }
const char* twin_cost_names() { return twin::CostNames(); }
#else
const char* twin_engine() { return twin::kChecked ? "checked" : "fast"; }
const char* twin_cost_names() { return ""; }
#endif

// The names of the checked engine's policies, in the order of their numbers.
const char* twin_policies() { return "late,random,lazy,pct,replay,exhaustive"; }

// `world` ranks that share windows, reused between launches.
void* twin_world_create(uint32_t world) {
    try {
        return new twin::third_party::RankSet(world);
    } catch (...) {
        return nullptr;
    }
}
void twin_world_destroy(void* world) { delete static_cast<twin::third_party::RankSet*>(world); }

// Launches all ranks together; returns when all have ended. 0, or 1 with *outcome filled by the first
// failure.
int twin_world_run(void* world, const TwinLaunch* launches, const TwinOptions* options, TwinOutcome* outcome) {
    *outcome = TwinOutcome();
    return static_cast<twin::third_party::RankSet*>(world)->Run(launches, *options, outcome) ? 0 : 1;
}

// Launches one rank on the calling thread; the others are other threads' calls.
int twin_world_run_rank(void* world, uint32_t rank, const TwinLaunch* launch, TwinOutcome* outcome) {
    *outcome = TwinOutcome();
    return static_cast<twin::third_party::RankSet*>(world)->RunRank(rank, *launch, outcome) ? 0 : 1;
}

// Copies the text of the last timed run, as far as it fits; returns the bytes of all of it.
uint64_t twin_world_times(void* world, char* text, uint64_t bytes) {
    const std::string times = static_cast<twin::third_party::RankSet*>(world)->times();
    if (bytes != 0) twin::third_party::CopyText(text, bytes, times.c_str());
    return times.size() + 1;
}

// See ContextBlobBytes and FillContext of hccl_context.h.
uint64_t twin_context_bytes(uint32_t layout, uint32_t world) {
    return twin::hccl::ContextBlobBytes(static_cast<twin::hccl::Layout>(layout), world);
}
void twin_context_fill(const twin::hccl::GroupWindows* group, uint32_t rank, void* blob, uint64_t workspace) {
    twin::hccl::FillContext(*group, rank, blob, workspace);
}

}  // extern "C"
#pragma GCC visibility pop
