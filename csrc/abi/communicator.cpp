#include "communicator.h"

#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "ascend_moe.h"
#include "twin/api/hccl_context.h"
#include "twin/engine/atomic_store.h"

namespace ops {

namespace {

constexpr uint32_t kSpinsAlone = 2000;  // every rank has a processor of its own
constexpr uint32_t kSpinsCrowded = 20;  // spinning would steal the peer's time
constexpr uint32_t kGuardBytes = 64;

}  // namespace

Communicator::Communicator(int rank, int world, void* const* bases, uint64_t data_bytes, uint64_t registered_bytes,
                           const int* live_fds)
    : GroupWindows(rank, world, bases, data_bytes, registered_bytes),
      lost_(new std::atomic<bool>[static_cast<size_t>(world)]),
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
    WriteLabel();
}

Communicator::~Communicator() { DropStaging(); }

uint8_t* Communicator::Workspace(uint64_t bytes) {
    if (workspace_.size() < bytes + kGuardBytes) workspace_.resize(bytes + kGuardBytes);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(workspace_.data());
    return workspace_.data() + (moe::CeilTo(begin, kGuardBytes) - begin);
}

std::shared_ptr<RegisteredArea> Communicator::OpenRegisteredArea() {
    const std::lock_guard<std::mutex> lock(registered_mutex_);
    if (!registered_area_ && registered_bytes_ > 0)
        registered_area_ = std::make_shared<RegisteredArea>(rank_, registered(rank_), registered_bytes_);
    registered_now_.store(registered_area_.get(), std::memory_order_release);
    return registered_area_;
}

void Communicator::CloseRegisteredArea() {
    const std::lock_guard<std::mutex> lock(registered_mutex_);
    registered_now_.store(nullptr, std::memory_order_release);
    registered_area_.reset();
}

void Communicator::SetEpoch(uint32_t epoch) {
    uint32_t* control = Word(state(rank_), moe::kControlOffset);
    control[moe::kControlMagicWord] = moe::kControlMagic;
    control[moe::kControlEpochWord] = epoch;
}

uint32_t Communicator::EpochOfLaunch(uint32_t part) const {
    return part == moe::kPartFinish ? Epoch() : moe::NextEpoch(Epoch());
}

void Communicator::PostAbort(int peer, uint32_t epoch, uint32_t code, int culprit) {
    uint8_t* target = state(peer) + moe::AbortOffset(static_cast<uint32_t>(rank_));
    if (__atomic_load_n(Word(target, 0), __ATOMIC_ACQUIRE) == moe::kAbortMagic) return;  // the first cause stays
    uint32_t block[moe::kBlockWords] = {};
    block[moe::kAbMagic] = moe::kAbortMagic;
    block[moe::kAbEpoch] = epoch;
    block[moe::kAbCode] = code;
    block[moe::kAbCulprit] = static_cast<uint32_t>(culprit);
    block[moe::kAbReporter] = static_cast<uint32_t>(rank_);
    block[moe::kAbTag] = moe::kAbortMagic;
    twin::PublishBlocks(target, reinterpret_cast<const uint8_t*>(block), sizeof(block));
    twin::RingDoorbell(DoorbellOf(bases_[static_cast<size_t>(peer)]));
}

bool Communicator::Gone(int peer) const {
    if (lost_[static_cast<size_t>(peer)].load()) return true;
    pollfd query{live_fds_[static_cast<size_t>(peer)], POLLIN, 0};
    if (query.fd < 0) return false;
    if (__atomic_load_n(ClosedOf(bases_[static_cast<size_t>(peer)]), __ATOMIC_ACQUIRE) != 0) return true;
    return poll(&query, 1, 0) > 0 && (query.revents & (POLLIN | POLLHUP | POLLERR)) != 0;
}

// Whether this op, or an earlier one, has failed on some rank; see AbortWatch.
bool Communicator::Aborted() const {
    uint8_t* own = state(rank_);
    const uint32_t next = moe::NextEpoch(Epoch());
    for (uint32_t peer = 0; peer < static_cast<uint32_t>(world_); ++peer) {
        const uint32_t* block = Word(own, moe::AbortOffset(peer));
        if (__atomic_load_n(block + moe::kAbMagic, __ATOMIC_ACQUIRE) == moe::kAbortMagic &&
            __atomic_load_n(block + moe::kAbEpoch, __ATOMIC_RELAXED) != next)
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

// While all cores wait: an awaited peer that has ended becomes an abort block, which the kernel's wait reads.
void Communicator::LookAtPeers() {
    for (int peer = 0; peer < world_; ++peer) {
        if (peer == rank_ || Arrived(peer) || !Gone(peer)) continue;
        if (Arrived(peer)) continue;  // it ended right after delivering
        if (Aborted()) return;        // it ended after a failure that it has reported
        PostAbort(rank_, Epoch(), moe::kPeerLost, peer);
        return;
    }
}

// ---- what kernels see: the areas of all windows, the context that points to them, and HCCL's server ----

namespace {

twin::GmRange RangeOf(uint8_t* begin, uint64_t bytes, twin::GmKind kind, const char* name, int owner,
                      uint32_t* doorbell = nullptr) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
    return {address, address + bytes, kind, kind == twin::GmKind::kWindowState, doorbell, name, owner};
}

uint64_t AddressOf(const void* p) { return reinterpret_cast<uintptr_t>(p); }

}  // namespace

bool Communicator::IsInterNodeStatus(uintptr_t address) const {
    for (int peer = 0; peer < world_; ++peer) {
        if (inter_node(peer) &&
            (address == AddressOf(StatusMessageOf(peer, 0)) || address == AddressOf(StatusMessageOf(peer, 1))))
            return true;
    }
    return false;
}

void Communicator::UseContext(uint32_t kind) {
    kind_ = kind;
    if (kind != moe::kContextA2) {
        DropStaging();
        ranks_per_server_ = 0;
    }
    FillTable();
    FillContext();
    ListRanges();
    WriteLabel();
}

void Communicator::UseServers(uint32_t ranks_per_server, bool intra_node_stores) {
    DropStaging();
    ranks_per_server_ = ranks_per_server;
    intra_node_ranks_ = intra_node_stores ? static_cast<int>(std::max(1u, ranks_per_server)) : 1;
    if (kind_ == moe::kContextA2 && ranks_per_server > 0 && ranks_per_server < static_cast<uint32_t>(world_)) {
        void* mapped =
            mmap(nullptr, staging_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        staging_ = static_cast<uint8_t*>(mapped);
        several_servers_ = true;
    }
    FillContext();
    ListRanges();
    WriteLabel();
}

void Communicator::UseLinks(Links links) {
    links_ = links;
    ListRanges();
}

// HCCL maps no window of another server. Those of this one it maps, or reaches by RDMA as well, by its algConfig.
twin::Reach Communicator::ReachOf(int peer) const {
    if (staging_ == nullptr || peer == rank_) return twin::Reach::kAll;
    const int share = static_cast<int>(std::max(1u, ranks_per_server_));
    if (peer / share != rank_ / share || links_ == Links::kRdma) return twin::Reach::kRdma;
    return links_ == Links::kMemory ? twin::Reach::kMemory : twin::Reach::kAll;
}

void Communicator::DropStaging() {
    agent_.reset();  // it may still read there
    if (staging_ != nullptr) munmap(staging_, staging_bytes());
    staging_ = nullptr;
    several_servers_ = false;
}

void Communicator::FillTable() {
    table_.magic = moe::kWindowTableMagic;
    table_.rank = static_cast<uint32_t>(rank_);
    table_.world = static_cast<uint32_t>(world_);
    table_.windowBytes = data_bytes_ + registered_bytes_;
    table_.stateBytes = kStateAreaBytes;
    for (int r = 0; r < world_; ++r) {
        table_.data[r] = AddressOf(data(r));
        table_.state[r] = AddressOf(state(r));
    }
}

void Communicator::FillContext() {
    blob_.reset();
    if (kind_ == moe::kContextTable) return;
    const bool a2 = kind_ == moe::kContextA2;
    const uint32_t world = static_cast<uint32_t>(world_);
    std::vector<uint64_t> in, out(world, 0), exp;
    for (int r = 0; r < world_; ++r) {
        in.push_back(AddressOf(data(r)));
        exp.push_back(a2 ? 0 : AddressOf(state(r)));
    }
    out[static_cast<size_t>(rank_)] = AddressOf(staging_);
    // Both published places of A3's peer table are in use.
    const twin::hccl::GroupWindows group = {a2 ? twin::hccl::Layout::kA2 : twin::hccl::Layout::kA3,
                                            world,
                                            twin::hccl::kA3PeerTables[rank_ % 2],
                                            data_bytes_ + registered_bytes_ + (a2 ? kStateAreaBytes : 0),
                                            a2 ? 0 : kStateAreaBytes,
                                            0,
                                            in.data(),
                                            out.data(),
                                            exp.data(),
                                            "twin",
                                            staging_ != nullptr};
    // A3's table of ranks is 2 MiB, of which a group touches a few entries.
    blob_.reset(static_cast<uint8_t*>(calloc(1, twin::hccl::ContextBlobBytes(group.layout, world))));
    if (blob_ == nullptr) throw std::bad_alloc();
    twin::hccl::FillContext(group, static_cast<uint32_t>(rank_), blob_.get(), 0);
}

void* Communicator::context() {
    return blob_ == nullptr ? static_cast<void*>(&table_) : twin::hccl::ContextOf(blob_.get());
}

void Communicator::ListRanges() {
    const bool levels =
        staging_ != nullptr && ranks_per_server_ > 1 && world_ % static_cast<int>(ranks_per_server_) == 0;
    relay_ranges_.clear();
    if (levels) {
        ListAreas(true);
        relay_ranges_ = std::move(ranges_);
    }
    ListAreas(false);
}

// `levels`: for ops of hierarchy.
void Communicator::ListAreas(bool levels) {
    ranges_.clear();
    const uint64_t state_bytes = moe::StateBytes(static_cast<uint32_t>(world_));
    for (int r = 0; r < world_; ++r) {
        const size_t first = ranges_.size();
        uint32_t* doorbell = DoorbellOf(bases_[static_cast<size_t>(r)]);
        // Inter-node peers poll in their data; this rank stores status messages of hierarchy into its neighbours'.
        const int share = levels ? static_cast<int>(ranks_per_server_) : 1;
        if (staging_ != nullptr && r / share == rank_ / share) {
            ListData(r, levels, r == rank_ ? nullptr : doorbell);
        } else {
            ranges_.push_back(RangeOf(data(r), data_bytes_, twin::GmKind::kWindowData, "data window", r,
                                      staging_ != nullptr ? doorbell : nullptr));
        }
        // Only this rank's cores use the control block and the core barrier: they are no messages and no flags.
        const uint64_t shared_bytes =
            r == rank_ ? moe::CoreBarrierOffset(static_cast<uint32_t>(world_), 0) : state_bytes;
        if (r == rank_) {
            ranges_.push_back(
                RangeOf(state(r), moe::kErrorRecordOffset, twin::GmKind::kWindowState, "control block", r));
            ranges_.back().atomic_blocks = false;
            ranges_.push_back(RangeOf(state(r) + shared_bytes, state_bytes - shared_bytes, twin::GmKind::kWindowState,
                                      "core barrier", r));
            ranges_.back().at = shared_bytes;
        }
        ranges_.push_back(RangeOf(state(r) + moe::kErrorRecordOffset, shared_bytes - moe::kErrorRecordOffset,
                                  twin::GmKind::kWindowState, "state window", r, doorbell));
        ranges_.back().at = moe::kErrorRecordOffset;
        // Of its own registered area a launch lists the tensors that lie in it.
        if (r != rank_ && registered_bytes_ > 0)
            ranges_.push_back(
                RangeOf(registered(r), registered_bytes_, twin::GmKind::kWindowRegistered, "registered window", r));
        for (size_t i = first; i < ranges_.size(); ++i) ranges_[i].reach = ReachOf(r);
    }
    if (staging_ != nullptr) {
        ranges_.push_back(RangeOf(staging_, data_bytes_ + state_bytes, twin::GmKind::kWindowData, "windowsOut", rank_));
    }
    if (blob_ == nullptr) {
        ranges_.push_back(
            RangeOf(reinterpret_cast<uint8_t*>(&table_), sizeof(table_), twin::GmKind::kWorkspace, "window table", -1));
    } else {
        const twin::hccl::Layout layout = kind_ == moe::kContextA2 ? twin::hccl::Layout::kA2 : twin::hccl::Layout::kA3;
        ranges_.push_back(RangeOf(blob_.get(), twin::hccl::ContextBlobBytes(layout, static_cast<uint32_t>(world_)),
                                  twin::GmKind::kWorkspace, "communication context", -1));
    }
}

// A rank's data where status messages arrive, of inter-node peers or of hierarchy; blocks are read whole.
void Communicator::ListData(int rank, bool levels, uint32_t* doorbell) {
    const uint32_t world = static_cast<uint32_t>(world_), local_ranks = levels ? ranks_per_server_ : 0;
    const uint32_t regions = moe::RegionsOf(world, local_ranks),
                   mine = levels ? static_cast<uint32_t>(rank) / local_ranks : 0;
    const uint64_t run = moe::RowsEnd(data_bytes_, world, regions);
    uint64_t at = 0;
    const auto list = [&](uint64_t end, const char* name, bool blocks) {
        if (end == at) return;
        ranges_.push_back(RangeOf(data(rank) + at, end - at, twin::GmKind::kWindowData, name, rank, doorbell));
        ranges_.back().atomic_blocks = blocks;
        at = end;
    };
    for (uint32_t i = 0; i < 2 * regions; ++i) {
        const uint32_t region = i % regions;
        const bool of_server = region >= world;
        const bool awaited = of_server ? region - world != mine
                             : levels  ? region / local_ranks != mine
                                       : inter_node(static_cast<int>(region));
        if (!awaited) continue;
        const uint64_t rows = of_server ? moe::RelayEnd(data_bytes_, world, local_ranks) : run;
        const uint64_t begin = moe::RegionOffset(data_bytes_, regions, i / regions, region) + rows;
        list(begin, "data window", false);
        list(begin + (of_server ? moe::RelayMessageOffset(world, local_ranks) : moe::StatusStride(world)),
             "status messages in the data window", true);
    }
    list(data_bytes_, "data window", false);
}

void Communicator::TellInOp(bool in_op) {
    __atomic_store_n(InOpOf(bases_[static_cast<size_t>(rank_)]), in_op ? 1u : 0u, __ATOMIC_RELEASE);
}

void Communicator::BeginLaunch(uint32_t op, uint32_t algorithm, uint32_t epoch) {
    levels_ = algorithm == moe::kAlgorithmHierarchy;
    dispatches_ = op == moe::kOpDispatch;
    LabelOf(bases_[static_cast<size_t>(rank_)])->Begin(op, algorithm, epoch);
    TellInOp(true);
    if (kind_ == moe::kContextA2) reinterpret_cast<twin::hccl::Header*>(blob_.get())->served = 0;
    if (staging_ == nullptr) return;
    if (!agent_) agent_ = twin::MakeCopyAgent();
    agent_->Begin();
    reinterpret_cast<twin::hccl::Header*>(blob_.get())->agent = agent_.get();
}

void Communicator::EndLaunch(bool failed) {
    TellInOp(false);
    if (agent_) agent_->End(failed);
}

void Communicator::CheckServed() const {
    if (kind_ == moe::kContextA2 && reinterpret_cast<const twin::hccl::Header*>(blob_.get())->served != 1)
        throw std::logic_error("a launch on an A2 context ended without one Finalize, for which HCCL's server waits");
}

namespace {

constexpr uint64_t kTouchedBytes = uint64_t{2} << 20;
constexpr int kMostTouchedRanks = 8;

void Touch(const uint8_t* begin, uint64_t bytes) {
    const uintptr_t from = reinterpret_cast<uintptr_t>(begin) & ~uintptr_t{kHeaderBytes - 1};
    madvise(reinterpret_cast<void*>(from), reinterpret_cast<uintptr_t>(begin) + bytes - from,
            MADV_POPULATE_WRITE);  // older systems refuse: then pages are mapped when they are touched
}

// Maps the first pages of a window, so that the first ops need not.
void TouchWindow(void* base, uint64_t data_bytes, int world) {
    if (world > kMostTouchedRanks) return;
    Touch(StateOf(base), moe::StateBytes(static_cast<uint32_t>(world)));
    const uint64_t bytes = std::min(kTouchedBytes, moe::PingPongBytes(data_bytes));
    for (uint32_t parity = 0; parity < 2; ++parity)
        Touch(DataOf(base) + moe::PingPongOffset(data_bytes, parity), bytes);
}

}  // namespace

}  // namespace ops

uint64_t am_window_total_bytes(uint64_t data_bytes, uint64_t registered_bytes) {
    return ops::WindowBytes(data_bytes, registered_bytes);
}

void* am_window_alloc(uint64_t total_bytes) {
    void* base = mmap(nullptr, total_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? nullptr : base;
}

const void* am_window_look(int fd, uint64_t offset, uint64_t total_bytes) {
    void* base = mmap(nullptr, total_bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, static_cast<off_t>(offset));
    return base == MAP_FAILED ? nullptr : base;
}

void* am_window_map(int fd, uint64_t total_bytes) {
    void* base = mmap(nullptr, total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    return base == MAP_FAILED ? nullptr : base;
}

void am_window_unmap(void* base, uint64_t total_bytes) {
    if (base != nullptr) munmap(base, total_bytes);
}

uint32_t am_window_ballot(void* base, uint32_t word, uint32_t expected, uint32_t desired) {
    if (word >= ops::kBallotWords) return 0;
    auto* words = reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(base) + ops::kBallotOffset);
    __atomic_compare_exchange_n(words + word, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;  // what was there, if the exchange failed
}

void am_window_layout(int world, uint64_t* out) {
    out[0] = ops::kHeaderBytes + ops::kStateAreaBytes;
    out[1] = ops::kHeaderBytes;
    out[2] = moe::StateBytes(static_cast<uint32_t>(world));
}

void* am_comm_create(int rank, int world, void* const* bases, uint64_t data_bytes, uint64_t registered_bytes,
                     const int* live_fds) {
    return ops::Made([=] {
        auto made = std::make_unique<ops::Communicator>(rank, world, bases, data_bytes, registered_bytes, live_fds);
        for (int peer = 0; peer < world; ++peer) ops::TouchWindow(bases[peer], data_bytes, world);
        return made.release();
    });
}
int am_comm_in_op(void* comm, int rank) {
    const ops::Communicator& communicator = *static_cast<const ops::Communicator*>(comm);
    return rank >= 0 && rank < communicator.world() && communicator.InOp(rank) ? 1 : 0;
}
int am_comm_use_context(void* comm, int kind) {
    if (kind < static_cast<int>(moe::kContextTable) || kind > static_cast<int>(moe::kContextA2)) return 1;
    return ops::Tried([=] { static_cast<ops::Communicator*>(comm)->UseContext(static_cast<uint32_t>(kind)); });
}
int am_comm_use_servers(void* comm, int ranks_per_server, int intra_node_stores) {
    if (ranks_per_server < 0) return 1;
    return ops::Tried([=] {
        static_cast<ops::Communicator*>(comm)->UseServers(static_cast<uint32_t>(ranks_per_server),
                                                          intra_node_stores != 0);
    });
}
void am_comm_use_links(void* comm, int stores) {
    using Links = ops::Communicator::Links;
    static_cast<ops::Communicator*>(comm)->UseLinks(stores != 0 ? Links::kMemory : Links::kRdma);
}
void am_comm_destroy(void* comm) { delete static_cast<ops::Communicator*>(comm); }
void am_comm_mark_lost(void* comm, int peer) { static_cast<ops::Communicator*>(comm)->MarkLost(peer); }
uint32_t am_comm_epoch(const void* comm) { return static_cast<const ops::Communicator*>(comm)->Epoch(); }
void am_comm_set_epoch(void* comm, uint32_t epoch) { static_cast<ops::Communicator*>(comm)->SetEpoch(epoch); }

void am_comm_traffic(void* comm, uint64_t* bytes) {
    const twin::Traffic& traffic = static_cast<ops::Communicator*>(comm)->device().traffic();
    constexpr int kKinds = static_cast<int>(twin::GmKind::kKinds);
    for (int kind = 0; kind < kKinds; ++kind) {
        bytes[kind] = traffic.read[kind];
        bytes[kKinds + kind] = traffic.written[kind];
    }
}
