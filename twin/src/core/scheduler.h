// The fast engine: runs the cores of one device, every core a fiber, all on the calling thread; and records a
// launch where a timeline is wanted.
#pragma once

#include <exception>
#include <memory>
#include <unordered_map>
#include <vector>

#include "fiber.h"
#include "twin/engine/timeline.h"

namespace twin {

// The recording of one launch. Its cores are fibers of one thread, so nothing here is locked.
class Recorder {
public:
    Recorder(Timeline& timeline, const char* op, int rank, uint32_t cores);
    ~Recorder();
    Recorder(const Recorder&) = delete;
    Recorder& operator=(const Recorder&) = delete;

    void CoreBegins(const Core& core);
    void CoreEnds(const Core& core);
    void Phase(const Core& core);  // the one that ends
    void SyncAll(const Core& core, double began);
    // Around a look in vain. A wait lasts from the first look to the last look before the core does something
    // else.
    void PollBegins(const Core& core);
    void PollEnds(const Core& core);
    void Copy(const Core& core, double began, const RecordedCopy& copy);

private:
    struct CoreNotes {
        double phase_began = 0;
        double wait_began = 0;
        double wait_ends = 0;
        uint64_t released_by = 0;  // flow of the last block that arrived while waiting
        bool waiting = false;
        std::unordered_map<uintptr_t, uint32_t> blocks;  // first word of each piece of status looked at
    };
    CoreNotes& NotesOf(const Core& core) { return notes_[core.index]; }
    void Add(const TimelineEvent& event);
    void Look(const Core& core, const RecordedCopy& copy);
    void EndWait(const Core& core);

    Timeline& timeline_;
    const char* op_;
    int rank_;
    double began_;
    std::vector<CoreNotes> notes_;
};

struct FastCore : FiberCore {
    bool repeats = false;  // it gave way while reading again what it has read
};

class Scheduler : FiberHost<Scheduler, FastCore> {
public:
    explicit Scheduler(Device& device);
    ~Scheduler();
    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;

    void Run(const LaunchSpec& spec, const std::function<void()>& kernel);

    // Called from fibers.
    void SyncAll(const Loc& loc);
    void Poll(const Loc& loc);
    void Yield(const Loc& loc, bool idle);
    void CrossWait(int id, const Loc& loc);

private:
    friend class FiberHost<Scheduler, FastCore>;

    void BeginKernel(FastCore& slot);
    void EndKernel(FastCore& slot);
    void Loop();
    enum class Passed { kNothing, kRepeats, kProgress };
    Passed Pass();
    bool Overdue(int64_t now);
    void Idle(uint32_t fruitless);
    void Block(CoreStatus status, const Loc& loc);

    Device& device_;
    uint8_t* const ub_;
    std::vector<std::unique_ptr<FastCore>> slots_;
    LaunchState launch_;
    RowStores stores_;
    const bool forwards_;  // copies may be deferred: not with ASCEND_MOE_FORWARD=0
    uint32_t doorbell_seen_ = 0;
    int64_t idle_since_ = 0;
    int64_t last_idle_call_ = 0;
};

}  // namespace twin
