// Which core, pipe or store moves next. Every decision is one number, and 0 is the ordinary choice, so that a
// run can be replayed and shrunk.
#ifdef TWIN_CHECKED

#include <algorithm>

#include "world.h"

namespace twin {

namespace {
constexpr uint32_t kSlowOdds = 100;
constexpr uint64_t kPctYields = 2000;  // change points lie among this many chances to switch
}  // namespace

// splitmix64
uint64_t World::Random() {
    uint64_t z = (random_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}

void World::SeedSchedule() {
    random_ = options_.seed * 0xD1342543DE82EF95ull + 1;
    choice_ = 0;
    yields_ = 0;
    lowest_ = 0;
    change_points_.clear();
    for (uint32_t i = 0; i < core_count_; ++i) {
        CoreState& core = *cores_[i];
        core.eager_vector = false;
        if (options_.policy == Policy::kRandom) core.eager_vector = Random() % 2 == 0;
        for (int64_t& priority : core.priority)
            priority = options_.policy == Policy::kPct ? static_cast<int64_t>(Random() >> 2) : 0;
    }
    if (options_.policy == Policy::kPct) {
        for (uint32_t d = 1; d < options_.pct_depth; ++d) change_points_.push_back(Random() % kPctYields);
    }
}

uint32_t World::Choose(uint32_t n, uint32_t odds) {
    if (n <= 1) return 0;
    uint32_t chosen = 0;
    switch (options_.policy) {
        case Policy::kReplay:
        case Policy::kExhaustive:
            if (choice_ < options_.choices.size()) chosen = options_.choices[choice_] % n;
            ++choice_;
            if (options_.policy == Policy::kExhaustive) result_.options.push_back(static_cast<uint16_t>(n));
            break;
        case Policy::kRandom:
        case Policy::kLazy:
            if (odds <= 1 || Random() % odds == 0) chosen = static_cast<uint32_t>(Random() % n);
            break;
        case Policy::kPct: break;
        default: return 0;
    }
    result_.choices.push_back(static_cast<uint16_t>(chosen));
    result_.switches += chosen != 0;
    return chosen;
}

// Index into enabled_.
size_t World::PickEntity() {
    const size_t n = enabled_.size();
    if (n == 1) return 0;
    if (options_.policy == Policy::kPct) {
        size_t best = 0;
        for (size_t i = 1; i < n; ++i) {
            if (enabled_[i].core->priority[enabled_[i].kind] > enabled_[best].core->priority[enabled_[best].kind])
                best = i;
        }
        result_.choices.push_back(static_cast<uint16_t>(best));
        result_.switches += best != 0;
        return best;
    }
    size_t picked = Choose(static_cast<uint32_t>(n), 1);
    const Injection& in = options_.injection;
    if (in.slow_rank >= 0 || in.slow_core >= 0 || in.slow_link >= 0) {
        for (uint32_t tries = 0; tries < kSlowOdds; ++tries) {
            const Entity& entity = enabled_[picked];
            const bool slow =
                entity.core->rank->program->rank == in.slow_rank ||
                static_cast<int>(entity.core->core.index) == in.slow_core ||
                (entity.kind == kStores && in.slow_link >= 0 && entity.core->stores.front().owner == in.slow_link);
            if (!slow) break;
            picked = Choose(static_cast<uint32_t>(n), 1);
        }
    }
    return picked;
}

// Whether an instruction runs at once when its pipe is empty.
bool World::Eager(CoreState& core, uint32_t pipe) {
    switch (options_.policy) {
        case Policy::kPct: {
            const bool eager = core.priority[pipe] > core.priority[kFiber];
            result_.choices.push_back(eager);
            result_.switches += eager;
            return eager;
        }
        case Policy::kRandom:
            if (pipe == static_cast<uint32_t>(Pipe::kV)) {
                result_.choices.push_back(core.eager_vector);
                return core.eager_vector;
            }
            return Choose(2, 1) != 0;
        case Policy::kReplay: return Choose(2, 1) != 0;
        case Policy::kLazy: result_.choices.push_back(0); return false;
        default: return false;  // exhaustive: one pipe policy, all orders of cores
    }
}

// Whether the running core lets others run here.
bool World::ChangePoint() {
    switch (options_.policy) {
        case Policy::kLate: return false;
        case Policy::kPct: {
            const uint64_t now = yields_++;
            bool change = false;
            for (const uint64_t point : change_points_) change = change || point == now;
            if (change) current_->priority[kFiber] = --lowest_;
            result_.choices.push_back(change);
            return change;
        }
        case Policy::kRandom:
        case Policy::kLazy: return Choose(2, 4) != 0;
        default: return Choose(2, 1) != 0;
    }
}

}  // namespace twin

#endif  // TWIN_CHECKED
