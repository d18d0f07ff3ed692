#ifdef TWIN_CHECKED

#include "shadow.h"

namespace twin::checked {

namespace {
uint32_t Mask(uint32_t from, uint32_t count) { return count >= 32 ? ~0u : ((1u << count) - 1u) << from; }
}  // namespace

void Shadow::Reset(bool relaxed_scalar_reads) {
    relaxed_ = relaxed_scalar_reads;
    cells_.assign(kBlockBytes, Cell());
    free_splits_.clear();
    many_used_ = 0;
    for (uint32_t i = 0; i < used_; ++i) {
        Page& page = *pages_[i];
        for (Block& block : page.blocks) block = Block();
        page.begin = 0;
    }
    used_ = 0;
    by_address_.clear();
    for (Page*& page : recent_) page = nullptr;
}

Page* Shadow::FindPage(uintptr_t address) {
    const uintptr_t begin = address / kPageBytes * kPageBytes;
    Page*& recent = recent_[begin / kPageBytes % kRecent];
    if (recent != nullptr && recent->begin == begin) return recent;
    const auto page = by_address_.find(begin);
    return page == by_address_.end() ? nullptr : recent = page->second;
}

Page& Shadow::PageOf(uintptr_t address) {
    if (Page* page = FindPage(address)) return *page;
    if (used_ == pages_.size()) pages_.push_back(std::make_unique<Page>());
    Page* page = pages_[used_++].get();
    page->begin = address / kPageBytes * kPageBytes;
    page->written = false;
    by_address_[page->begin] = page;
    recent_[page->begin / kPageBytes % kRecent] = page;
    return *page;
}

// Whether `other` is known to be done before the access under check begins.
inline bool Shadow::Ordered(uint32_t other, const Toucher& t) const {
    if (other == 0 || other == t.number) return true;
    const Site& site = sites_[other];
    if (t.clock[site.agent] >= other) return true;
    if (site.agent == t.agent) return t.in_order && other < t.number;
    // A scalar read has its value before the next instruction is issued.
    return relaxed_ && !site.write && site.agent % kPipes == 0 && site.agent / kPipes == t.agent / kPipes &&
           other < t.number;
}

// Reads do not conflict with reads, nor atomic updates with atomic updates. An atomic store only reads UB.
inline bool Shadow::Conflicts(uint32_t other, const Toucher& t) const {
    const bool updated = sites_[other].atomic && !t.ub;
    return t.atomic ? !updated : t.write || updated;
}

// The first site in the cell that conflicts, or 0.
inline uint32_t Shadow::Check(const Cell& cell, const Toucher& t, bool& wrote) const {
    wrote = true;
    if (!Ordered(cell.write, t)) return cell.write;
    wrote = false;
    for (const uint32_t read : cell.reads) {
        if (read == 0) break;
        if ((read & kMany) == 0) {
            if (Conflicts(read, t) && !Ordered(read, t)) return read;
            continue;
        }
        for (const uint32_t reader : many_[read & ~kMany]) {
            if (Conflicts(reader, t) && !Ordered(reader, t)) return reader;
        }
    }
    return 0;
}

// An agent's last access stands for its earlier ones: MTE3 alone updates GM, and it reads none.
void Shadow::AddRead(Cell& cell, const Toucher& t) {
    for (uint32_t& read : cell.reads) {
        if (read == 0) {
            read = t.number;
            return;
        }
        if ((read & kMany) != 0) {
            std::vector<uint32_t>& list = many_[read & ~kMany];
            for (uint32_t& reader : list) {
                if (sites_[reader].agent == t.agent) {
                    reader = t.number;
                    return;
                }
            }
            list.push_back(t.number);
            return;
        }
        if (sites_[read].agent == t.agent) {
            read = t.number;
            return;
        }
    }
    if (many_used_ == many_.size()) many_.emplace_back();
    many_[many_used_].assign({cell.reads[2], t.number});
    cell.reads[2] = kMany | many_used_++;
}

inline void Shadow::Record(Cell& cell, const Toucher& t) {
    if (t.write && !t.atomic) {
        cell = Cell{t.number, {0, 0, 0}};
    } else {
        AddRead(cell, t);  // an atomic update is recorded like a read: several may be under way
    }
}

Cell* Shadow::Split(Block& block) {
    if (block.split == 0) {
        if (!free_splits_.empty()) {
            block.split = free_splits_.back();
            free_splits_.pop_back();
            for (uint32_t i = 0; i < kBlockBytes; ++i)
                cells_[static_cast<size_t>(block.split) * kBlockBytes + i] = block.whole;
        } else {
            block.split = static_cast<uint32_t>(cells_.size() / kBlockBytes);
            cells_.resize(cells_.size() + kBlockBytes, block.whole);
        }
        if ((block.whole.reads[2] & kMany) != 0) {  // each cell needs a list of its own
            for (uint32_t i = 1; i < kBlockBytes; ++i) {
                Cell& cell = cells_[static_cast<size_t>(block.split) * kBlockBytes + i];
                if (many_used_ == many_.size()) many_.emplace_back();
                many_[many_used_] = many_[block.whole.reads[2] & ~kMany];
                cell.reads[2] = kMany | many_used_++;
            }
        }
    }
    return &cells_[static_cast<size_t>(block.split) * kBlockBytes];
}

Shadow::Conflict Shadow::Touch(Block* block, uint32_t lead, uint64_t bytes, const Toucher& t) {
    Cell last, after;
    bool have = false, wrote = false;
    for (uint64_t done = 0; done < bytes; ++block, lead = 0) {
        const uint32_t part =
            static_cast<uint32_t>(bytes - done < kBlockBytes - lead ? bytes - done : kBlockBytes - lead);
        if (part == kBlockBytes && block->split == 0) {
            if (!have || !(block->whole == last)) {
                if (const uint32_t other = Check(block->whole, t, wrote)) return {other, wrote, done, false};
                last = block->whole;
                have = (last.reads[2] & kMany) == 0;
                Record(block->whole, t);
                after = block->whole;
                if ((after.reads[2] & kMany) != 0) have = false;
            } else {
                block->whole = after;
            }
        } else {
            Cell* cells = Split(*block);
            for (uint32_t i = lead; i < lead + part; ++i) {
                if (const uint32_t other = Check(cells[i], t, wrote)) return {other, wrote, done + i - lead, false};
            }
            if (part == kBlockBytes && t.write && !t.atomic) {
                free_splits_.push_back(block->split);  // uniform again
                block->split = 0;
                block->whole = Cell{t.number, {0, 0, 0}};
            } else {
                for (uint32_t i = lead; i < lead + part; ++i) Record(cells[i], t);
            }
        }
        done += part;
    }
    return {};
}

Shadow::Conflict Shadow::Note(Block& block, uint32_t lead, uint32_t bytes, const Toucher& t) {
    const Conflict conflict = Touch(&block, lead, bytes, t);
    if (conflict.other == 0) return conflict;
    if (block.split != 0) free_splits_.push_back(block.split);
    block.split = 0;
    block.whole = Cell();
    Record(block.whole, t);
    return conflict;
}

Shadow::Conflict Shadow::Filled(const Block* block, uint32_t lead, uint64_t bytes, bool whole_blocks) {
    for (uint64_t done = 0; done < bytes; ++block, lead = 0) {
        const uint32_t part =
            static_cast<uint32_t>(bytes - done < kBlockBytes - lead ? bytes - done : kBlockBytes - lead);
        const uint32_t wanted = Mask(lead, part), missing = wanted & ~block->filled;
        if (missing != 0 && (!whole_blocks || missing == wanted)) {
            return {0, false, done + static_cast<uint32_t>(__builtin_ctz(missing)) - lead, true};
        }
        done += part;
    }
    return {};
}

void Shadow::Fill(Block* block, uint32_t lead, uint64_t bytes, bool filled) {
    for (uint64_t done = 0; done < bytes; ++block, lead = 0) {
        const uint32_t part =
            static_cast<uint32_t>(bytes - done < kBlockBytes - lead ? bytes - done : kBlockBytes - lead);
        const uint32_t mask = Mask(lead, part);
        block->filled = filled ? block->filled | mask : block->filled & ~mask;
        done += part;
    }
}

}  // namespace twin::checked

#endif  // TWIN_CHECKED
