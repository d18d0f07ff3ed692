// Memory in the checked engine: the checks of UB and GM, stores that have not landed, the scalar unit's
// cache.
#ifdef TWIN_CHECKED

#include <algorithm>
#include <cstring>

#include "world.h"

namespace twin {

namespace {
constexpr uint64_t kLineBytes = 64;
constexpr size_t kMostLooks = 32;
}  // namespace

// ---- UB ----

void World::TouchUb(CoreState& core, const Access& access, Toucher t) {
    t.ub = true;
    ForEachUbPiece(core, access, [&](Block* blocks, uint32_t lead, uint64_t at, uint64_t bytes) {
        const Shadow::Conflict conflict = shadow_.Touch(blocks, lead, bytes, t);
        if (conflict.other != 0) RaiseConflict(t, conflict, "UB byte " + std::to_string(at + conflict.offset));
        if (t.write) Shadow::Fill(blocks, lead, bytes, true);
    });
}

void World::NeedFilled(CoreState& core, const Access& access, const Instruction& in, uint32_t number) {
    // A copy may include undefined bytes, but not only undefined bytes.
    const bool copies = in.pipe == Pipe::kMte3 || strcmp(in.name, "DataCopy UB->UB") == 0;
    ForEachUbPiece(core, access, [&](Block* blocks, uint32_t lead, uint64_t at, uint64_t bytes) {
        const Shadow::Conflict conflict = Shadow::Filled(blocks, lead, bytes, copies);
        if (conflict.uninitialised) RaiseUnfilled(core, in, number, at + conflict.offset, bytes);
    });
}

// ---- GM ----

void World::TouchGm(CoreState& core, Pipe pipe, const Access& access, const Toucher& t, const Instruction& in) {
    const GmRange range = FindGm(core.core, access.begin, access.bytes, in.loc);
    const bool small_block =
        access.bytes == kBlockBytes && access.begin % kBlockBytes == 0 && access.stride % kBlockBytes == 0;
    // Status blocks are flags by declaration; in windows of other people's kernels a store of single blocks.
    const bool flag_store = t.write && (range.atomic_blocks || (small_block && GuessesFlags(core, range)));
    for (uint32_t i = 0; i < access.count; ++i) {
        const uintptr_t begin = access.begin + i * access.stride;
        const bool ruled = range.kind == GmKind::kWindowData || range.kind == GmKind::kWindowRegistered;
        if (ruled && core.rank->step->spec.window_rule) {
            const char* reason = core.rank->step->spec.window_rule(begin, access.bytes, t.write);
            TWIN_RAISE_IF(reason != nullptr, kWrongWindowPart, in.loc, "%s of %llu bytes at byte %llu of \"%s\": %s",
                          in.name, static_cast<unsigned long long>(access.bytes),
                          static_cast<unsigned long long>(begin - range.begin), range.name, reason);
        }
        if (!t.write && dirty_lines_ > 0) CheckDirty(core, pipe, begin, access.bytes, t);
        TouchGmPiece(core, pipe, begin, access.bytes, t, range, flag_store);
        // Single blocks among rows are flags of rows that an agent brings: the core may poll them.
        if (!t.write && small_block && range.kind == GmKind::kWindowData)
            core.looked.push_back({begin, begin + access.bytes});
        if (!t.write && options_.trace && range.window()) Trace(core, "load", &range, begin, access.bytes, 0);
    }
    if (!t.write) Mix(access.begin ^ static_cast<uint64_t>(core.global) << 48 ^ landings_ << 20);
}

void World::FlagAt(CoreState&, uintptr_t address, bool certain) {
    Block& block = shadow_.PageOf(address).blocks[address % kPageBytes / kBlockBytes];
    block.sync = std::max<uint8_t>(block.sync, certain ? 2 : 1);
}

// Whether kernels that do not declare their flags may have some there.
bool World::GuessesFlags(const CoreState& core, const GmRange& range) {
    return core.core.watch != nullptr && range.kind != GmKind::kTensor && !range.data;
}

void World::TouchGmPiece(CoreState& core, Pipe pipe, uintptr_t begin, uint64_t bytes, const Toucher& t,
                         const GmRange& range, bool flag_store) {
    bool looked = core.core.watch != nullptr && !t.write;
    const uintptr_t end = begin + bytes;
    for (uintptr_t at = begin; at < end;) {
        Page& page = shadow_.PageOf(at);
        const uintptr_t stop = std::min(end, page.begin + kPageBytes);
        while (at < stop) {
            Block& block = page.blocks[(at - page.begin) / kBlockBytes];
            const uintptr_t next = std::min(stop, at / kBlockBytes * kBlockBytes + kBlockBytes);
            if (flag_store || range.atomic_blocks) block.sync = std::max<uint8_t>(block.sync, 1);
            if (block.sync != 0) {
                if (!range.atomic_blocks && block.sync == 1) Suspect(t, block, at, next - at, range);
                if (!t.write) {
                    clocks_.Join(core.clock[static_cast<uint32_t>(pipe)].data(), block.release);
                    looked = true;
                }
                at = next;
                continue;
            }
            uintptr_t run = next;  // as far as plain data goes
            while (run < stop && page.blocks[(run - page.begin) / kBlockBytes].sync == 0)
                run = std::min(stop, run + kBlockBytes);
            const Shadow::Conflict conflict =
                shadow_.Touch(&block, static_cast<uint32_t>(at % kBlockBytes), run - at, t);
            if (conflict.other != 0) {
                RaiseConflict(t, conflict,
                              std::string("byte ") + std::to_string(at + conflict.offset - range.begin) + " of \"" +
                                  range.name + "\"");
            }
            at = run;
        }
    }
    if (!looked) return;
    core.looked.push_back({begin, end});
    // A scalar look at a flag is a poll only where polls are not declared.
    if (pipe != Pipe::kS || core.core.watch != nullptr) {
        const Loc& place = sites_[t.number].loc;
        bool known = core.looks.size() >= kMostLooks;
        for (const Loc& other : core.looks) known = known || (other.line == place.line && other.file == place.file);
        if (!known) core.looks.push_back(place);
    }
}

// ---- stores in flight ----

void World::MakeStore(CoreState& core, QueuedOp& op, const GmRange& where, ClockId release, bool force) {
    const Access& to = op.instruction.write;
    const Access& from = op.instruction.reads[0];
    const GmRange range = where;
    const bool flag = shadow_.PageOf(to.begin).blocks[to.begin % kPageBytes / kBlockBytes].sync != 0;
    if (options_.trace && range.window()) {
        for (uint32_t i = 0; i < to.count; ++i)
            Trace(core, "store", &range, to.begin + i * to.stride, to.bytes, op.number);
    }
    Store store;
    store.number = op.number;
    store.release = release;
    store.flag = flag;
    store.target = range.begin;
    store.status = flag && range.kind == GmKind::kWindowState && range.doorbell != nullptr;
    store.owner = range.owner;
    size_t used = core.store_bytes.size();
    core.store_bytes.resize(used + to.bytes * to.count);
    for (uint32_t i = 0; i < to.count; ++i) {
        const uintptr_t begin = to.begin + i * to.stride;
        memcpy(core.store_bytes.data() + used, reinterpret_cast<const uint8_t*>(from.begin + i * from.stride),
               to.bytes);
        uint64_t part = to.bytes;
        if (flag) {
            part = kBlockBytes;
        } else if (options_.unordered && !force && to.bytes > kBlockBytes) {
            const uint32_t blocks = static_cast<uint32_t>(std::min<uint64_t>(to.bytes / kBlockBytes, 60000));
            const uint32_t cut = Choose(blocks, 4);
            if (cut != 0) part = static_cast<uint64_t>(cut) * kBlockBytes;
        }
        for (uint64_t done = 0; done < to.bytes; done += part) {
            const uint32_t bytes = static_cast<uint32_t>(std::min(part, to.bytes - done));
            const uint32_t half = flag && options_.torn && !force ? Choose(3, 2) * kBlockBytes / 2 : 0;
            if (half == 0) {
                store.pieces.push_back({begin + done, bytes, used + done, false});
                continue;
            }
            for (uint32_t at : {half % kBlockBytes, kBlockBytes / 2 - half % kBlockBytes})
                store.pieces.push_back({begin + done + at, kBlockBytes / 2, used + done + at, false});
        }
        used += to.bytes;
    }
    store.left = static_cast<uint32_t>(store.pieces.size());
    core.stores.push_back(std::move(store));
    if (force) LandAll(core);
}

// Whoever reads this flag from now on knows what the clock knows.
void World::Release(uintptr_t at, ClockId clock) {
    Block& block = shadow_.PageOf(at).blocks[at % kPageBytes / kBlockBytes];
    clocks_.Hold(clock);
    clocks_.Drop(block.release);
    block.release = clock;
}

// A status block that an item brings orders what its sender had observed before its reader, as a stored one does.
void World::ReleaseFlags(const CoreState& core, const CopyItem& piece) {
    Block& block = shadow_.PageOf(piece.to).blocks[piece.to % kPageBytes / kBlockBytes];
    if (core.core.launch->ranges.Find(piece.to, piece.bytes, {"", 0}).atomic_blocks) block.sync = 1;
    if (block.sync != 0) Release(piece.to, piece.clock);
}

void World::LandPiece(CoreState& core, Store& store, size_t index) {
    Store::Piece& piece = store.pieces[index];
    const uint8_t* bytes = core.store_bytes.data() + piece.from;
    uint8_t changed[kBlockBytes];
    const bool status = store.status && piece.bytes == kBlockBytes;
    result_.status_blocks += status;
    if (status && result_.status_blocks == options_.injection.corrupt_block) {
        memcpy(changed, bytes, kBlockBytes);
        Corrupt(piece, changed);
        bytes = changed;
    }
    memcpy(reinterpret_cast<void*>(piece.to), bytes, piece.bytes);
    if (store.flag) Release(piece.to, store.release);
    piece.landed = true;
    --store.left;
    Landed(core, piece.to, piece.bytes, store.number);
}

void World::Corrupt(const Store::Piece& piece, uint8_t* bytes) const {
    const Injection& in = options_.injection;
    const uint8_t* before = reinterpret_cast<const uint8_t*>(piece.to);
    if (in.corrupt_stale) {
        memcpy(bytes, before, kBlockBytes);
    } else if (in.corrupt_torn) {
        memcpy(bytes + kBlockBytes / 2, before + kBlockBytes / 2, kBlockBytes / 2);
    } else {
        uint32_t word;
        memcpy(&word, bytes + in.corrupt_word % 8 * sizeof(word), sizeof(word));
        word ^= in.corrupt_xor;
        memcpy(bytes + in.corrupt_word % 8 * sizeof(word), &word, sizeof(word));
    }
}

// Bytes have become visible: wakes the cores that poll them.
void World::Landed(CoreState& core, uintptr_t to, uint64_t bytes, uint32_t number) {
    ++landings_;
    idle_rounds_ = 0;
    for (uintptr_t at = to / kPageBytes * kPageBytes; at < to + bytes; at += kPageBytes)
        shadow_.PageOf(at).written = true;
    Mix(to << 8 ^ bytes ^ static_cast<uint64_t>(core.global) << 56);
    for (uint32_t i = 0; i < core_count_; ++i) {
        CoreState& other = *cores_[i];
        other.fruitless = 0;
        if (other.status == CoreStatus::kDone || other.woken) continue;
        bool woken = other.looked.empty() || other.looked.size() > kMostLooks;
        for (size_t k = 0; k < other.looked.size() && !woken; ++k)
            woken = to < other.looked[k].end && other.looked[k].begin < to + bytes;
        other.woken = woken;
    }
    if (options_.trace) {
        const GmRange& range = core.core.launch->ranges.Find(to, bytes, {"", 0});
        if (range.window()) Trace(core, "land", &range, to, bytes, number);
    }
}

void World::DropLanded(CoreState& core) {
    for (size_t i = 0; i < core.stores.size();) {
        if (core.stores[i].left != 0) {
            ++i;
            continue;
        }
        clocks_.Drop(core.stores[i].release);
        core.stores.erase(core.stores.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (core.stores.empty()) core.store_bytes.clear();
}

// A schedule's step: one piece of a flag store, or a part or all of a data store.
void World::LandSome(CoreState& core) {
    std::vector<Store>& stores = core.stores;
    scratch_.clear();
    for (uint32_t i = 0; i < stores.size(); ++i) {
        bool first = true;  // in order: the oldest to its range only
        for (uint32_t k = 0; k < i && first; ++k) first = options_.unordered || stores[k].target != stores[i].target;
        if (first) scratch_.push_back(i);
    }
    Store& store = stores[scratch_[Choose(static_cast<uint32_t>(scratch_.size()), 1)]];
    const uint32_t skip = options_.unordered ? Choose(store.left, 2) : 0;
    const bool all = !store.flag && Choose(2, 4) == 0;
    uint32_t position = 0;
    for (size_t i = 0; i < store.pieces.size(); ++i) {
        if (store.pieces[i].landed) continue;
        if (all || position == skip) LandPiece(core, store, i);
        ++position;
    }
    DropLanded(core);
}

void World::LandAll(CoreState& core) {
    for (Store& store : core.stores) {
        for (size_t i = 0; i < store.pieces.size(); ++i) {
            if (!store.pieces[i].landed) LandPiece(core, store, i);
        }
    }
    DropLanded(core);
}

// ---- the scalar unit's data cache ----

CacheLine& World::Fetch(CoreState& core, uintptr_t line, const GmRange& range, const Loc& loc) {
    const auto cached = core.cache.find(line);
    if (cached != core.cache.end()) return cached->second;
    CacheLine& line_read = core.cache[line];
    const uintptr_t begin = std::max(line, range.begin), end = std::min(line + kLineBytes, range.end);
    memcpy(line_read.bytes + (begin - line), reinterpret_cast<const void*>(begin), end - begin);
    memcpy(line_read.fetched, line_read.bytes, kLineBytes);
    for (uintptr_t at = begin; at < end; ++at) line_read.valid |= 1ull << (at - line);
    line_read.fetched_at = loc;
    return line_read;
}

void World::LoadCached(CoreState& core, uintptr_t from, uint32_t bytes, void* value, const GmRange& where,
                       const Loc& loc) {
    const GmRange range = where;
    MaybeYield(core);
    const uint32_t number = sites_.Add({"GetValue of GM", loc, core.Agent(Pipe::kS), false, false});
    const Toucher t = ToucherOf(core, Pipe::kS, number, false, false);
    const uintptr_t line = from / kLineBytes * kLineBytes;
    const uint64_t at = from - line, mask = ((bytes >= 64 ? 0 : 1ull << bytes) - 1) << at;
    if (dirty_lines_ > 0) CheckDirty(core, Pipe::kS, from, bytes, t);
    CacheLine& held = Fetch(core, line, range, loc);
    if ((held.dirty & mask) != mask) {
        TouchGmPiece(core, Pipe::kS, from, bytes, t, range, false);
        Learns(core);  // it may have read a flag
        TWIN_RAISE_IF(
            (held.dirty & mask) == 0 && memcmp(held.bytes + at, reinterpret_cast<const void*>(from), bytes) != 0,
            kStaleRead, loc,
            "GetValue of byte %llu of \"%s\" reads the cache line fetched at %s, but GM has changed "
            "since: needs DataCacheCleanAndInvalid before the read",
            static_cast<unsigned long long>(from - range.begin), range.name, PlaceOf(held.fetched_at).c_str());
    }
    memcpy(value, held.bytes + at, bytes);
    core.pipes[0].last = number;
    Mix(from ^ static_cast<uint64_t>(core.global) << 48);
}

void World::StoreCached(CoreState& core, uintptr_t to, uint32_t bytes, const void* value, const GmRange& where,
                        const Loc& loc) {
    const GmRange range = where;
    MaybeYield(core);
    const uint32_t number = sites_.Add({"SetValue of GM", loc, core.Agent(Pipe::kS), true, false});
    const uintptr_t line = to / kLineBytes * kLineBytes;
    for (uint32_t i = 0; i < core_count_ && dirty_lines_ > core.dirty_lines; ++i) {
        const CoreState& other = *cores_[i];
        if (&other == &core || other.dirty_lines == 0) continue;
        const auto theirs = other.cache.find(line);
        if (theirs == other.cache.end() || theirs->second.dirty == 0) continue;
        Raise(Finding::kSharedLine, loc,
              "SetValue of byte %llu of \"%s\" dirties a 64-byte line that %s has dirtied at %s: whole lines "
              "are written back, one of the two is lost; put them on lines of their own",
              static_cast<unsigned long long>(to - range.begin), range.name, Actor(other.Agent(Pipe::kS)).c_str(),
              PlaceOf(sites_[theirs->second.stored_by].loc).c_str());
    }
    CacheLine& held = Fetch(core, line, range, loc);
    if (held.dirty == 0) {
        ++core.dirty_lines;
        ++dirty_lines_;
    }
    memcpy(held.bytes + (to - line), value, bytes);
    held.dirty |= ((bytes >= 64 ? 0 : 1ull << bytes) - 1) << (to - line);
    held.stored_by = number;
    core.pipes[0].last = number;
}

void World::CleanLines(CoreState& core, uintptr_t address, bool all, const Loc& loc) {
    MaybeYield(core);
    for (auto entry = core.cache.begin(); entry != core.cache.end();) {
        const uintptr_t line = entry->first;
        CacheLine& held = entry->second;
        if (!all && line != address / kLineBytes * kLineBytes) {
            ++entry;
            continue;
        }
        if (held.dirty != 0) {
            const Site site = sites_[held.stored_by];
            for (uint32_t i = 0; i < kLineBytes; ++i) {
                const uint64_t bit = 1ull << i;
                if ((held.valid & bit) == 0 || (held.dirty & bit) != 0) continue;
                TWIN_RAISE_IF(*reinterpret_cast<const uint8_t*>(line + i) != held.fetched[i], kSharedLine, loc,
                              "writing back the 64-byte line that SetValue at %s dirtied undoes what another "
                              "writer has put into its byte %u since it was fetched at %s: put them on lines of "
                              "their own",
                              PlaceOf(site.loc).c_str(), i, PlaceOf(held.fetched_at).c_str());
            }
            const Toucher t = ToucherOf(core, Pipe::kS, held.stored_by, true, false);
            const ClockId release = ScalarClock(core);
            for (uint32_t i = 0; i < kLineBytes;) {
                if ((held.dirty >> i & 1) == 0) {
                    ++i;
                    continue;
                }
                uint32_t n = i;
                while (n < kLineBytes && (held.dirty >> n & 1) != 0) ++n;
                const GmRange& range = FindGm(core.core, line + i, n - i, loc);
                const bool flag = range.atomic_blocks || GuessesFlags(core, range);
                TouchGmPiece(core, Pipe::kS, line + i, n - i, t, range, flag);
                if (options_.trace && range.window()) Trace(core, "store", &range, line + i, n - i, held.stored_by);
                memcpy(reinterpret_cast<void*>(line + i), held.bytes + i, n - i);
                if (flag) Release(line + i, release);
                Landed(core, line + i, n - i, held.stored_by);
                i = n;
            }
            clocks_.Drop(release);
            --core.dirty_lines;
            --dirty_lines_;
        }
        entry = core.cache.erase(entry);
        if (!all) break;
    }
}

// Bytes that a core has written by SetValue and still has in its cache: other readers of GM do not see them.
void World::CheckDirty(CoreState& core, Pipe pipe, uintptr_t begin, uint64_t bytes, const Toucher& t) {
    for (uint32_t i = 0; i < core_count_; ++i) {
        const CoreState& other = *cores_[i];
        if (other.dirty_lines == 0 || (&other == &core && pipe == Pipe::kS)) continue;
        for (const auto& entry : other.cache) {
            const CacheLine& held = entry.second;
            if (held.dirty == 0 || entry.first >= begin + bytes || entry.first + kLineBytes <= begin) continue;
            for (uint32_t k = 0; k < kLineBytes; ++k) {
                const uintptr_t at = entry.first + k;
                if ((held.dirty >> k & 1) == 0 || at < begin || at >= begin + bytes) continue;
                const Site& site = sites_[held.stored_by];
                if (&other != &core && t.clock[site.agent] < held.stored_by) continue;  // may come later
                Raise(Finding::kUnflushedWrite, sites_[t.number].loc,
                      "%s misses what SetValue at %s (%s) has left in the data cache: needs "
                      "DataCacheCleanAndInvalid after the write",
                      sites_[t.number].name, PlaceOf(site.loc).c_str(), Actor(site.agent).c_str());
            }
        }
    }
}

void World::CheckDirtyAtEnd(CoreState& core) {
    if (core.dirty_lines == 0) return;
    for (const auto& entry : core.cache) {
        if (entry.second.dirty == 0) continue;
        const Site& site = sites_[entry.second.stored_by];
        Raise(Finding::kUnflushedWrite, site.loc,
              "SetValue of GM is still in the data cache when the kernel ends: needs "
              "DataCacheCleanAndInvalid after the write");
    }
}

void World::Trace(const CoreState& core, const char* event, const GmRange* range, uintptr_t begin, uint64_t bytes,
                  uint64_t issue) {
    TraceEvent entry = {};
    entry.time = result_.trace.size();
    entry.rank = core.rank->program->rank;
    entry.core = core.core.index;
    entry.launch = static_cast<uint32_t>(core.rank->next - 1);
    entry.event = event;
    entry.target = -1;
    entry.issue = issue;
    if (range != nullptr) {
        entry.target = range->owner;
        entry.area = range->kind;
        entry.offset = begin - range->begin + range->at;
        entry.bytes = bytes;
        if (range->kind == GmKind::kWindowState) {
            const uintptr_t end = std::min<uintptr_t>(begin + sizeof(entry.words), range->end);
            memcpy(entry.words, reinterpret_cast<const void*>(begin), end - begin);
        }
    }
    result_.trace.push_back(entry);
}

}  // namespace twin

#endif  // TWIN_CHECKED
