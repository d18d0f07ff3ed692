// Records one launch of the fast engine, core by core.
#pragma once

#include <unordered_map>
#include <vector>

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

}  // namespace twin
