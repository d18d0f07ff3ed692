// What a communicator shows its kernels: the areas of all windows, the context that points at them, and the
// server that carries data between servers.
#include <sys/mman.h>

#include <new>

#include "communicator.h"
#include "twin/api/hccl_context.h"

namespace ops {

namespace {

twin::GmRange RangeOf(uint8_t* begin, uint64_t bytes, twin::GmKind kind, const char* name, int owner,
                      uint32_t* doorbell = nullptr) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
    return {address, address + bytes, kind, kind == twin::GmKind::kWindowState, doorbell, name, owner};
}

uint64_t AddressOf(const void* p) { return reinterpret_cast<uintptr_t>(p); }

}  // namespace

uint8_t* Communicator::data(int rank) const {
    void* base = bases_[static_cast<size_t>(rank)];
    return kind_ == moe::kContextA2 ? StateOf(base) : DataOf(base);
}

// The same memory either way: on A2 the area that comes first is the data, and the state comes last.
uint8_t* Communicator::state(int rank) const {
    void* base = bases_[static_cast<size_t>(rank)];
    return kind_ == moe::kContextA2 ? StateOf(base) + data_bytes_ + lent_bytes_ : StateOf(base);
}

bool Communicator::far(int peer) const {
    const int share = static_cast<int>(ranks_per_server_);
    return staging_ != nullptr && peer / share != rank_ / share;
}

uint8_t* Communicator::RunOf(int peer, uint32_t parity) const {
    const uint32_t world = static_cast<uint32_t>(world_), source = static_cast<uint32_t>(peer);
    if (!far(peer)) return state(rank_) + moe::StatusOffset(world, parity, source);
    return data(rank_) + moe::RegionOffset(data_bytes_, world, parity, source) +
           moe::RowsEnd(data_bytes_, world);
}

bool Communicator::IsFarRun(uintptr_t address) const {
    for (int peer = 0; peer < world_; ++peer) {
        if (far(peer) && (address == AddressOf(RunOf(peer, 0)) || address == AddressOf(RunOf(peer, 1))))
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
}

void Communicator::UseServers(uint32_t ranks_per_server) {
    DropStaging();
    ranks_per_server_ = ranks_per_server;
    if (kind_ == moe::kContextA2 && ranks_per_server > 0 &&
        ranks_per_server < static_cast<uint32_t>(world_)) {
        void* mapped = mmap(nullptr, staging_bytes(), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        staging_ = static_cast<uint8_t*>(mapped);
    }
    FillContext();
    ListRanges();
}

void Communicator::DropStaging() {
    agent_.reset();  // it may still read there
    if (staging_ != nullptr) munmap(staging_, staging_bytes());
    staging_ = nullptr;
}

void Communicator::FillTable() {
    table_.magic = moe::kWindowTableMagic;
    table_.rank = static_cast<uint32_t>(rank_);
    table_.world = static_cast<uint32_t>(world_);
    table_.windowBytes = data_bytes_ + lent_bytes_;
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
    const twin::hccl::GroupWindows group = {a2 ? twin::hccl::Layout::kA2 : twin::hccl::Layout::kA3,
                                            world,
                                            data_bytes_ + lent_bytes_ + (a2 ? kStateAreaBytes : 0),
                                            a2 ? 0 : kStateAreaBytes,
                                            0,
                                            in.data(),
                                            out.data(),
                                            exp.data(),
                                            "twin"};
    // A3's table of ranks is 2 MiB, of which a group touches a few entries.
    blob_.reset(static_cast<uint8_t*>(calloc(1, twin::hccl::ContextBlobBytes(group.layout, world))));
    if (blob_ == nullptr) throw std::bad_alloc();
    twin::hccl::FillContext(group, static_cast<uint32_t>(rank_), blob_.get(), 0);
}

void* Communicator::context() {
    return blob_ == nullptr ? static_cast<void*>(&table_) : twin::hccl::ContextOf(blob_.get());
}

void Communicator::ListRanges() {
    ranges_.clear();
    const uint64_t state_bytes = moe::StateBytes(static_cast<uint32_t>(world_));
    for (int r = 0; r < world_; ++r) {
        uint32_t* doorbell = DoorbellOf(bases_[static_cast<size_t>(r)]);
        if (r == rank_ && staging_ != nullptr) {
            ListOwnData(data(r));
        } else {
            // Far peers poll in their data.
            ranges_.push_back(RangeOf(data(r), data_bytes_, twin::GmKind::kWindowData, "data window", r,
                                      staging_ != nullptr ? doorbell : nullptr));
        }
        ranges_.push_back(
            RangeOf(state(r), state_bytes, twin::GmKind::kWindowState, "state window", r, doorbell));
        // Of its own lent area a launch lists the tensors that lie in it.
        if (r != rank_ && lent_bytes_ > 0)
            ranges_.push_back(RangeOf(lent(r), lent_bytes_, twin::GmKind::kWindowLent, "lent window", r));
    }
    if (staging_ != nullptr) {
        ranges_.push_back(
            RangeOf(staging_, data_bytes_ + state_bytes, twin::GmKind::kWindowData, "windowsOut", rank_));
    }
    if (blob_ == nullptr) {
        ranges_.push_back(RangeOf(reinterpret_cast<uint8_t*>(&table_), sizeof(table_),
                                  twin::GmKind::kWorkspace, "window table", -1));
    } else {
        const twin::hccl::Layout layout =
            kind_ == moe::kContextA2 ? twin::hccl::Layout::kA2 : twin::hccl::Layout::kA3;
        ranges_.push_back(RangeOf(blob_.get(),
                                  twin::hccl::ContextBlobBytes(layout, static_cast<uint32_t>(world_)),
                                  twin::GmKind::kWorkspace, "communication context", -1));
    }
}

// This rank's own data: where a far peer's status run arrives, blocks are read whole.
void Communicator::ListOwnData(uint8_t* data) {
    const uint32_t world = static_cast<uint32_t>(world_);
    const uint64_t run = moe::RowsEnd(data_bytes_, world);
    uint64_t at = 0;
    const auto list = [&](uint64_t end, const char* name, bool blocks) {
        if (end == at) return;
        ranges_.push_back(RangeOf(data + at, end - at, twin::GmKind::kWindowData, name, rank_));
        ranges_.back().atomic_blocks = blocks;
        at = end;
    };
    for (uint32_t i = 0; i < 2 * world; ++i) {
        if (!far(static_cast<int>(i % world))) continue;
        const uint64_t begin = moe::RegionOffset(data_bytes_, world, i / world, i % world) + run;
        list(begin, "data window", false);
        list(begin + moe::StatusStride(world), "status runs in the data window", true);
    }
    list(data_bytes_, "data window", false);
}

void Communicator::BeginLaunch() {
    if (staging_ == nullptr) return;
    if (!agent_) agent_ = twin::MakeCopyAgent();
    agent_->Begin();
    reinterpret_cast<twin::hccl::Header*>(blob_.get())->agent = agent_.get();
}

void Communicator::EndLaunch(bool failed) {
    if (agent_) agent_->End(failed);
}

}  // namespace ops
