// Agents beside the cores, which execute Hccl::BatchWrite: in order to each peer, whenever the schedule says.
#ifdef TWIN_CHECKED

#include <algorithm>
#include <cstring>

#include "world.h"

namespace twin {

namespace {
constexpr uint32_t kPeerBits = 16;
}

namespace checked {
void AddAgent(Core& core, CopyQueues* queues) { core.checked->world->AddAgent(*core.checked, queues); }
}  // namespace checked

void World::AddAgent(CoreState& core, CopyQueues* queues) {
    if (unwinding_) return;
    if (std::find(core.agents.begin(), core.agents.end(), queues) == core.agents.end())
        core.agents.push_back(queues);
    MaybeYield(core);
}

bool World::AgentPending(const CoreState& core) const {
    return std::any_of(core.agents.begin(), core.agents.end(),
                       [](const CopyQueues* queues) { return queues->Pending(); });
}

// The next 32 bytes to some peer, or the rest of an item; `all`: everything that was posted.
void World::MoveAgents(CoreState& core, bool all) {
    while (AgentPending(core)) {
        scratch_.clear();
        for (uint32_t a = 0; a < core.agents.size(); ++a) {
            for (uint32_t peer = 0; peer < core.agents[a]->peers(); ++peer) {
                if (core.agents[a]->Pending(peer)) scratch_.push_back(a << kPeerBits | peer);
            }
        }
        const uint32_t picked = scratch_[Choose(static_cast<uint32_t>(scratch_.size()), 1)];
        CopyQueues& queues = *core.agents[picked >> kPeerBits];
        const uint32_t peer = picked & ((1u << kPeerBits) - 1);
        const bool whole = all || Choose(2, 4) == 0;
        bool ended = false;
        do {
            const CopyItem piece = queues.Next(peer);
            memcpy(reinterpret_cast<void*>(piece.to), reinterpret_cast<const void*>(piece.from), piece.bytes);
            ended = queues.Advance(peer, piece.bytes);
            Landed(core, piece.to, piece.bytes, sites_.last());
        } while (whole && !ended);
        if (ended) core.woken = true;  // it may wait for its task
        if (!all) return;
    }
}

}  // namespace twin

#endif  // TWIN_CHECKED
