#include "scheduler.h"

#include <time.h>

#include <cstring>

namespace twin {

namespace {

// The number of a status block comes from its place in its owner's window and from its first words, which
// hold the epoch: writer and reader compute the same number, also in different processes.
uint64_t FlowOf(const GmRange& range, uintptr_t gm, const uint8_t* block) {
    uint32_t words[2];
    memcpy(words, block, sizeof(words));
    uint64_t hash = 14695981039346656037ull;
    for (const uint64_t word : {static_cast<uint64_t>(range.owner), static_cast<uint64_t>(gm - range.begin),
                                static_cast<uint64_t>(words[0]), static_cast<uint64_t>(words[1])}) {
        hash = (hash ^ word) * 1099511628211ull;
        hash ^= hash >> 32;
    }
    return hash | 1;  // 0 says that there is none
}

int PeerOf(const GmRange& range, int rank) {
    const bool window = range.kind == GmKind::kWindowData || range.kind == GmKind::kWindowState;
    return window && range.owner != rank ? range.owner : -1;
}

uint32_t Number(Pipe pipe) { return static_cast<uint32_t>(pipe); }

}  // namespace

void RecordPhase(const Core& core) { core.recorder->Phase(core); }
void RecordCopy(const Core& core, double began, const RecordedCopy& copy) { core.recorder->Copy(core, began, copy); }

// CLOCK_MONOTONIC in ns: one clock for all processes of a machine.
double RecordedNow() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

Recorder::Recorder(Timeline& timeline, const char* op, int rank, uint32_t cores)
    : timeline_(timeline), op_(op), rank_(rank), began_(RecordedNow()), notes_(cores) {}

// Core 0 stands for the whole launch, failed or not.
Recorder::~Recorder() { Add({began_, RecordedNow(), 0, 0, rank_, 0, -1, Number(Pipe::kS), "launch", op_}); }

void Recorder::Add(const TimelineEvent& event) {
    if (timeline_.events.size() < timeline_.limit) {
        timeline_.events.push_back(event);
    } else {
        ++timeline_.dropped;
    }
}

void Recorder::CoreBegins(const Core& core) { NotesOf(core).phase_began = RecordedNow(); }

void Recorder::CoreEnds(const Core& core) { Phase(core); }

void Recorder::Phase(const Core& core) {
    EndWait(core);
    const double now = RecordedNow();
    Add({NotesOf(core).phase_began, now, 0, 0, rank_, core.index, -1, Number(Pipe::kS), "phase", core.phase});
    NotesOf(core).phase_began = now;
}

void Recorder::SyncAll(const Core& core, double began) {
    EndWait(core);
    Add({began, RecordedNow(), 0, 0, rank_, core.index, -1, Number(Pipe::kS), "SyncAll", core.phase});
}

void Recorder::PollBegins(const Core& core) {
    CoreNotes& notes = NotesOf(core);
    if (notes.waiting) return;
    notes.waiting = true;
    notes.released_by = 0;
    notes.wait_began = notes.wait_ends = RecordedNow();
}

void Recorder::PollEnds(const Core& core) { NotesOf(core).wait_ends = RecordedNow(); }

void Recorder::EndWait(const Core& core) {
    CoreNotes& notes = NotesOf(core);
    if (!notes.waiting) return;
    notes.waiting = false;
    Add({notes.wait_began, notes.wait_ends, 0, notes.released_by, rank_, core.index, -1, Number(Pipe::kS), "wait",
         core.phase});
}

// The blocks that have changed since the last look are the ones that the wait waited for.
void Recorder::Look(const Core& core, const RecordedCopy& copy) {
    CoreNotes& notes = NotesOf(core);
    const double now = RecordedNow();
    if (notes.waiting) notes.wait_ends = now;
    for (uint32_t i = 0; i < copy.count; ++i) {
        const uintptr_t gm = copy.gm + i * copy.gm_step;
        const uint8_t* block = copy.ub + i * copy.ub_step;
        uint32_t word;
        memcpy(&word, block, sizeof(word));
        const auto [known, is_new] = notes.blocks.emplace(gm, word);
        if (is_new || known->second == word) continue;
        known->second = word;
        if (!notes.waiting) continue;
        notes.released_by = FlowOf(copy.range, gm, block);
        const int32_t sender = timeline_.sender != nullptr ? timeline_.sender(block) : -1;
        Add({now, now, copy.bytes, notes.released_by, rank_, core.index, sender, Number(copy.pipe), "arrival",
             core.phase});
    }
}

void Recorder::Copy(const Core& core, double began, const RecordedCopy& copy) {
    const bool status = copy.range.atomic_blocks && copy.bytes >= kBlockBytes;
    if (status && copy.pipe == Pipe::kMte2) {
        Look(core, copy);
        return;
    }
    const uint64_t bytes = copy.count * copy.bytes;
    if (!status && bytes < kRecordedCopyBytes) return;
    EndWait(core);
    Add({began, RecordedNow(), bytes, status ? FlowOf(copy.range, copy.gm, copy.ub) : 0, rank_, core.index,
         PeerOf(copy.range, rank_), Number(copy.pipe), copy.name, core.phase});
}

}  // namespace twin
