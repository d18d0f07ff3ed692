#include "communicator.h"

#include <poll.h>
#include <unistd.h>

#include "ascend_moe.h"
#include "twin/engine/atomic_store.h"

namespace ops {

namespace {

constexpr uint32_t kSpinsAlone = 2000;  // every rank has a processor of its own
constexpr uint32_t kSpinsCrowded = 20;  // spinning would steal the peer's time
constexpr uint32_t kGuardBytes = 64;

uint32_t* Word(uint8_t* area, uint64_t offset) { return reinterpret_cast<uint32_t*>(area + offset); }

}  // namespace

Communicator::Communicator(int rank, int world, void* const* bases, uint64_t data_bytes, uint64_t lent_bytes,
                           const int* live_fds)
    : rank_(rank),
      world_(world),
      bases_(bases, bases + world),
      lost_(new std::atomic<bool>[static_cast<size_t>(world)]),
      data_bytes_(data_bytes),
      lent_bytes_(lent_bytes),
      device_(rank) {
    for (int r = 0; r < world; ++r) {
        live_fds_.push_back(live_fds != nullptr ? live_fds[r] : -1);
        lost_[static_cast<size_t>(r)].store(false);
    }
    FillTable();
    ListRanges();
    device_.JoinGroup(bases[0], static_cast<uint32_t>(world));
    twin::IdlePolicy& idle = device_.idle();
    idle.spins = world <= sysconf(_SC_NPROCESSORS_ONLN) ? kSpinsAlone : kSpinsCrowded;
    idle.doorbell = DoorbellOf(bases[rank]);
    idle.on_idle = &Communicator::OnIdle;
    idle.on_idle_argument = this;
    idle.peer_gone = &Communicator::PeerGone;
}

Communicator::~Communicator() { DropStaging(); }

uint8_t* Communicator::Workspace(uint64_t bytes) {
    if (workspace_.size() < bytes + kGuardBytes) workspace_.resize(bytes + kGuardBytes);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(workspace_.data());
    return workspace_.data() + (moe::CeilTo(begin, kGuardBytes) - begin);
}

std::shared_ptr<LentArea> Communicator::OpenLentArea() {
    const std::lock_guard<std::mutex> lock(lent_mutex_);
    if (!lent_area_ && lent_bytes_ > 0)
        lent_area_ = std::make_shared<LentArea>(rank_, lent(rank_), lent_bytes_);
    lent_now_.store(lent_area_.get(), std::memory_order_release);
    return lent_area_;
}

void Communicator::CloseLentArea() {
    const std::lock_guard<std::mutex> lock(lent_mutex_);
    lent_now_.store(nullptr, std::memory_order_release);
    lent_area_.reset();
}

uint32_t Communicator::Epoch() const {
    return __atomic_load_n(Word(state(rank_), moe::kControlOffset) + moe::kControlEpochWord,
                           __ATOMIC_ACQUIRE);
}

void Communicator::SetEpoch(uint32_t epoch) {
    uint32_t* control = Word(state(rank_), moe::kControlOffset);
    control[moe::kControlMagicWord] = moe::kControlMagic;
    control[moe::kControlEpochWord] = epoch;
}

void Communicator::PostAbort(int peer, uint32_t code, int culprit) {
    uint8_t* target = state(peer) + moe::AbortOffset(static_cast<uint32_t>(rank_));
    if (__atomic_load_n(Word(target, 0), __ATOMIC_ACQUIRE) == moe::kAbortMagic)
        return;  // the first cause is kept
    uint32_t block[moe::kBlockWords] = {};
    block[moe::kAbMagic] = moe::kAbortMagic;
    block[moe::kAbEpoch] = Epoch();
    block[moe::kAbCode] = code;
    block[moe::kAbCulprit] = static_cast<uint32_t>(culprit);
    block[moe::kAbReporter] = static_cast<uint32_t>(rank_);
    twin::PublishBlocks(target, reinterpret_cast<const uint8_t*>(block), sizeof(block));
    twin::RingDoorbell(DoorbellOf(bases_[static_cast<size_t>(peer)]));
}

bool Communicator::Gone(int peer) const {
    if (lost_[static_cast<size_t>(peer)].load()) return true;
    pollfd query{live_fds_[static_cast<size_t>(peer)], POLLIN, 0};
    return query.fd >= 0 && poll(&query, 1, 0) > 0 && (query.revents & (POLLIN | POLLHUP | POLLERR)) != 0;
}

// A peer that has delivered its whole run of this epoch may go: nobody waits for it any more. One that was
// killed between two blocks has not.
bool Communicator::Arrived(int peer) const {
    const uint32_t epoch = Epoch(), world = static_cast<uint32_t>(world_);
    uint8_t* run = RunOf(peer, moe::Parity(epoch));
    if (__atomic_load_n(Word(run, 0), __ATOMIC_ACQUIRE) != moe::HeaderWord(epoch)) return false;
    const uint32_t said = __atomic_load_n(Word(run, 0) + moe::kH0OpPhase, __ATOMIC_RELAXED) & 0xFFFFu;
    const uint32_t most = moe::CountBlocks(moe::MaxLocalExperts(world));
    const uint32_t blocks = moe::kHeaderBlocks + moe::Min(said, most);
    for (uint32_t block = 1; block < blocks; ++block) {
        const uint32_t* word = Word(run, static_cast<uint64_t>(block) * moe::kBlock);
        if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != epoch) return false;
    }
    return true;
}

bool Communicator::Aborted() const {
    uint8_t* own = state(rank_);
    for (uint32_t peer = 0; peer < static_cast<uint32_t>(world_); ++peer) {
        if (__atomic_load_n(Word(own, moe::AbortOffset(peer)), __ATOMIC_ACQUIRE) == moe::kAbortMagic)
            return true;
    }
    return false;
}

bool Communicator::PeerGone(void* self) {
    const Communicator& comm = *static_cast<Communicator*>(self);
    for (int peer = 0; peer < comm.world_; ++peer) {
        if (peer != comm.rank_ && comm.Gone(peer)) return true;
    }
    return false;
}

void Communicator::OnIdle(void* self) { static_cast<Communicator*>(self)->LookAtPeers(); }

// While all cores wait: an awaited peer that is gone becomes an abort block, which the kernel's wait reads.
void Communicator::LookAtPeers() {
    for (int peer = 0; peer < world_; ++peer) {
        if (peer == rank_ || Arrived(peer) || !Gone(peer)) continue;
        if (Arrived(peer)) continue;  // it went right after delivering
        if (Aborted()) return;        // it went after a failure that it has told of
        PostAbort(rank_, moe::kPeerLost, peer);
        return;
    }
}

}  // namespace ops

void* am_comm_create(int rank, int world, void* const* bases, uint64_t data_bytes, uint64_t lent_bytes,
                     const int* live_fds) {
    try {
        auto made = std::make_unique<ops::Communicator>(rank, world, bases, data_bytes, lent_bytes, live_fds);
        for (int peer = 0; peer < world; ++peer) ops::TouchWindow(bases[peer], data_bytes, world);
        return made.release();
    } catch (...) {
        return nullptr;
    }
}
int am_comm_use_context(void* comm, int kind) {
    if (kind < static_cast<int>(moe::kContextTable) || kind > static_cast<int>(moe::kContextA2)) return 1;
    try {
        static_cast<ops::Communicator*>(comm)->UseContext(static_cast<uint32_t>(kind));
        return 0;
    } catch (...) {
        return 1;
    }
}
int am_comm_use_servers(void* comm, int ranks_per_server) {
    if (ranks_per_server < 0) return 1;
    try {
        static_cast<ops::Communicator*>(comm)->UseServers(static_cast<uint32_t>(ranks_per_server));
        return 0;
    } catch (...) {
        return 1;
    }
}
void am_comm_destroy(void* comm) { delete static_cast<ops::Communicator*>(comm); }
void am_comm_mark_lost(void* comm, int peer) { static_cast<ops::Communicator*>(comm)->MarkLost(peer); }
void am_comm_set_epoch(void* comm, uint32_t epoch) { static_cast<ops::Communicator*>(comm)->SetEpoch(epoch); }

void am_comm_traffic(void* comm, uint64_t* bytes) {
    const twin::Traffic& traffic = static_cast<ops::Communicator*>(comm)->device().traffic();
    constexpr int kKinds = static_cast<int>(twin::GmKind::kKinds);
    for (int kind = 0; kind < kKinds; ++kind) {
        bytes[kind] = traffic.read[kind];
        bytes[kKinds + kind] = traffic.written[kind];
    }
}
