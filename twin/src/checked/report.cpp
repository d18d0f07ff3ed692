// The texts of findings: both accesses, the bytes, the missing synchronisation.
#ifdef TWIN_CHECKED

#include "world.h"

namespace twin {

namespace {
constexpr size_t kMostSuspected = 64;

const char* PipeName(uint32_t pipe) {
    static constexpr const char* kNames[] = {"S", "V", "MTE2", "MTE3"};
    return kNames[pipe];
}
}  // namespace

std::string World::Actor(uint16_t agent) const {
    const CoreState& core = *cores_[agent / kPipes];
    return "rank " + std::to_string(core.rank->program->rank) + " core " + std::to_string(core.core.index);
}

// "MTE3 store at x.h:120".
std::string World::Describe(uint32_t number, bool wrote) const {
    const Site& site = sites_[number];
    const uint32_t pipe = site.agent % kPipes;
    const char* what = pipe == static_cast<uint32_t>(Pipe::kMte3)   ? "store"
                       : pipe == static_cast<uint32_t>(Pipe::kMte2) ? "load"
                       : wrote                                      ? "write"
                                                                    : "read";
    return std::string(PipeName(pipe)) + " " + what + " at " + PlaceOf(site.loc) + " (" + site.name + ")";
}

void World::RaiseConflict(const Toucher& t, const Shadow::Conflict& conflict, const std::string& where) {
    if (conflict.other < t.number) {
        RaiseOrder(conflict.other, conflict.wrote, t.number, t.write, where);
    } else {
        RaiseOrder(t.number, t.write, conflict.other, conflict.wrote, where);
    }
}

void World::RaiseOrder(uint32_t first, bool first_wrote, uint32_t second, bool second_wrote, const std::string& where) {
    const Site &a = sites_[first], &b = sites_[second];
    const uint32_t from = a.agent % kPipes, to = b.agent % kPipes;
    const CoreState &first_core = *cores_[a.agent / kPipes], &second_core = *cores_[b.agent / kPipes];
    g_current_core = &cores_[b.agent / kPipes]->core;
    const std::string left = Describe(first, first_wrote), right = Describe(second, second_wrote);
    TWIN_RAISE_IF(&first_core == &second_core && from == to, kPipeHazard, b.loc,
                  "%s is not ordered before %s: needs PipeBarrier<PIPE_%s>; %s", left.c_str(), right.c_str(),
                  PipeName(from), where.c_str());
    TWIN_RAISE_IF(&first_core == &second_core, kMissingSync, b.loc,
                  "%s is not ordered before %s: needs %s_%s or PipeBarrier<PIPE_ALL>; %s", left.c_str(), right.c_str(),
                  PipeName(from), PipeName(to), where.c_str());
    TWIN_RAISE_IF(first_core.rank == second_core.rank, kCoreRace, b.loc,
                  "%s of core %u is not ordered before %s of core %u: needs PipeBarrier<PIPE_ALL> and SyncAll "
                  "between them; %s",
                  left.c_str(), first_core.core.index, right.c_str(), second_core.core.index, where.c_str());
    Raise(Finding::kRankRace, b.loc,
          "%s of %s is not ordered before %s of %s: needs a status block that is sent when the first is done "
          "and read before the second begins; %s",
          left.c_str(), Actor(a.agent).c_str(), right.c_str(), Actor(b.agent).c_str(), where.c_str());
}

// An access to a block that counts as a flag though nobody has declared it. If it is data, this may be a race.
void World::Suspect(const Toucher& t, Block& block, uintptr_t at, uint64_t bytes, const GmRange& range) {
    const uint32_t lead = static_cast<uint32_t>(at % kBlockBytes);
    const Shadow::Conflict conflict = shadow_.Note(block, lead, static_cast<uint32_t>(bytes), t);
    if (conflict.other == 0 || suspected_.size() >= kMostSuspected) return;
    const Loc &here = sites_[t.number].loc, &there = sites_[conflict.other].loc;
    for (const Suspected& known : suspected_) {
        if (known.here.line == here.line && known.there.line == there.line && known.here.file == here.file &&
            known.there.file == there.file)
            return;
    }
    const uint16_t first = sites_[conflict.other].agent, second = sites_[t.number].agent;
    if (first / kPipes == second / kPipes) return;  // a core's own are in the order of its pipes
    suspected_.push_back(
        {here, there,
         Describe(conflict.other, conflict.wrote) + " of " + Actor(first) + " and " + Describe(t.number, t.write) +
             " of " + Actor(second) + " are in no order; they touch the 32-byte block at byte " +
             std::to_string(at / kBlockBytes * kBlockBytes - range.begin) + " of \"" + range.name + "\""});
}

// Of a place where a core has looked in vain it is known that it polls.
std::string World::FirstSuspect() const {
    const auto polls = [this](const Loc& place) {
        const auto found = result_.polls.find(PlaceOf(place));
        return found != result_.polls.end() && found->second.waiting > 0;
    };
    for (const Suspected& one : suspected_) {
        if (!polls(one.here) && !polls(one.there)) return one.text;
    }
    return "";
}

void World::RaiseUnfilled(const CoreState& core, const Instruction& in, uint32_t number, uint64_t at, uint64_t bytes) {
    // An instruction in a queue may be about to write the bytes: then a wait for it is missing.
    for (uint32_t pipe = 1; pipe < kPipes; ++pipe) {
        const PipeQueue& queue = core.pipes[pipe];
        for (size_t i = queue.head; i < queue.ops.size(); ++i) {
            const QueuedOp& op = queue.ops[i];
            const Access& write = op.instruction.write;
            if (op.kind != Queued::kEffect || op.number >= number || write.gm || write.bytes == 0) continue;
            const uintptr_t address = reinterpret_cast<uintptr_t>(core.ub) + at;
            ForEachPiece(write, [&](uintptr_t begin, uint64_t size) {
                if (address >= begin && address < begin + size)
                    RaiseOrder(op.number, true, number, false, "UB byte " + std::to_string(at));
            });
        }
    }
    Raise(Finding::kUninitialised, in.loc,
          "%s reads %llu bytes of UB, of which byte %llu has never been written (new, freed, or the dummy "
          "bytes behind a padded copy)",
          in.name, static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(at));
}

}  // namespace twin

#endif  // TWIN_CHECKED
