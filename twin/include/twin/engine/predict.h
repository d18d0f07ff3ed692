// The timed engine from outside: what the hardware costs, programs of launches of all ranks, and the times
// that come out. Every time is modelled, in nanoseconds; bandwidths are bytes a nanosecond (GB/s).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "twin/engine/explore.h"
#include "twin/engine/timeline.h"

namespace twin {

// Names of the fields of Costs, in their order: am_timed_run reads a table of numbers in this order.
#define TWIN_COSTS(X)                                                                        \
    X(clock_ghz)         /* of an AIV core */                                                \
    X(scalar_ns)         /* a scalar instruction of the API: GetValue, SetValue */           \
    X(scalar_scale)      /* times scalar_ns, issue_ns and flag_ns: what S really takes */    \
    X(issue_ns)          /* S hands an instruction to another pipe */                        \
    X(flag_ns)           /* S executes SetFlag, WaitFlag or PipeBarrier */                   \
    X(flag_latency_ns)   /* from the end of the setter's work to the waiter's start */       \
    X(queue_depth)       /* instructions that a pipe holds before S has to wait */           \
    X(vector_add_cycles) /* Add and its like (VectorClass), a repeat of 256 bytes */         \
    X(vector_add_head)   /* cycles from its start to its first result */                     \
    X(vector_mul_cycles)                                                                     \
    X(vector_mul_head)                                                                       \
    X(vector_div_cycles)                                                                     \
    X(vector_div_head)                                                                       \
    X(vector_exp_cycles)                                                                     \
    X(vector_exp_head)                                                                       \
    X(vector_muls_cycles)                                                                    \
    X(vector_muls_head)                                                                      \
    X(vector_cast_cycles)                                                                    \
    X(vector_cast_head)                                                                      \
    X(vector_else_cycles)                                                                    \
    X(vector_else_head)                                                                      \
    X(vector_count_head)  /* more, of a call with a count in place of a mask */              \
    X(copy_issue_ns)      /* a copy occupies its MTE pipe at least this long */              \
    X(piece_ns)           /* each further piece of a strided copy */                         \
    X(read_gbps)          /* of a core, GM to UB */                                          \
    X(write_gbps)         /* of a core, UB to GM */                                          \
    X(unaligned_share)    /* of both, where the GM side is not at multiples of 512 bytes */  \
    X(read_latency_ns)    /* own GM, request to data */                                      \
    X(write_latency_ns)   /* own GM, store to acknowledgement */                             \
    X(latency_scale)      /* times read_latency_ns and write_latency_ns */                   \
    X(inflight_bytes)     /* of a core's reads, and of its stores, before the pipe stalls */ \
    X(memory_gbps)        /* of a rank's GM, all cores */                                    \
    X(package_gbps)       /* between the dies of a package, a direction */                   \
    X(link_gbps)          /* of a rank's link plane, a direction; in a mesh: to one peer */  \
    X(link_share)         /* of both, what copies get of the nominal rate */                 \
    X(package_latency_ns) /* round trip to the other die of the package */                   \
    X(server_latency_ns)  /* round trip to a rank of the same server */                      \
    X(far_latency_ns)     /* round trip to a rank of another server */                       \
    X(hop_scale)          /* times the three round trips to other ranks */                   \
    X(visible_ns)         /* from a status store's arrival to its being read */              \
    X(sync_ns)            /* SyncAll, after the last core has come */                        \
    X(launch_ns)          /* from the launch to a core's first instruction */                \
    X(stagger_ns)         /* each core starts this much after the one before */              \
    X(poll_ns)            /* between two looks of a declared poll, beside the look itself */ \
    X(nic_gbps)           /* between servers by BatchWrite, a direction */                   \
    X(nic_latency_ns)     /* of a BatchWrite item */                                         \
    X(post_ns)            /* the server posts a BatchWrite item, one after another */        \
    X(ranks_per_package)                                                                     \
    X(ranks_per_server)                                                                      \
    X(mesh) /* 1: a link a pair of ranks; 0: one link plane a rank, switched */

struct Costs {
#define TWIN_COST_FIELD(name) double name = 0;
    TWIN_COSTS(TWIN_COST_FIELD)
#undef TWIN_COST_FIELD
};
const char* CostNames();  // in their order, a blank after each
Costs CostsFrom(const double* values);

// Where a core's time goes on the critical path.
enum class Cause : uint8_t { kScalar, kVector, kMte2, kMte3, kSync, kStatus, kLaunch, kPost, kCount };
const char* CauseName(Cause cause);

struct TimedOptions {
    bool payload = true;            // false: copies of rows are timed, and not made
    uint64_t payload_bytes = 2048;  // pieces of GM marked as bulk, or of windows, from this size on
    double limit_ns = 1e9;          // of modelled time: longer is a hang
    uint64_t events = 0;            // at most so many are stored
};

struct PathPart {
    std::string phase;
    Cause cause;
    double ns;
};
struct LinkUse {
    std::string name;  // memory, package out, link out, link in, ...
    int rank;
    double bytes;
    double gbps;
};
struct StepTime {
    double start_ns = 0;  // of the launch
    double end_ns = 0;    // all its cores have left
};

struct TimedResult {
    bool failed = false;
    Finding kind = Finding::kHang;
    std::string message;
    double total_ns = 0;         // until the last rank has ended
    double vector_ns = 0;        // in which V of a core works, of the core that has most
    uint64_t sync_alls = 0;      // of the rank that had most
    uint64_t core_barriers = 0;  // that kernels have marked, as many
    uint64_t instructions = 0;
    uint64_t switches = 0;
    uint64_t status_stores = 0;
    uint64_t looks = 0;                        // fruitless ones
    std::vector<std::vector<StepTime>> steps;  // by program
    std::vector<PathPart> path;                // of the core that ended last; adds up to total_ns
    std::vector<LinkUse> links;
    std::vector<TimelineEvent> events;
    uint64_t dropped = 0;  // events that came when there were as many
};

// A line an entry, its fields separated by tabs: phase, cause, ns; name, rank, bytes, GB/s.
std::string PathText(const TimedResult& result);
std::string LinkText(const TimedResult& result);

namespace timed {
class World;
}

class TimedEngine {
public:
    TimedEngine();
    ~TimedEngine();
    TimedEngine(const TimedEngine&) = delete;
    TimedEngine& operator=(const TimedEngine&) = delete;

    // All programs from time 0 on, to their end or the first failure. Deterministic.
    TimedResult Run(std::vector<RankProgram>& programs, const Costs& costs, const TimedOptions& options);

private:
    std::unique_ptr<timed::World> world_;
};

}  // namespace twin
