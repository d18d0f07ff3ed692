#include "group_windows.h"

#include <unistd.h>

#include "ascend_moe.h"
#include "rules/message.h"

namespace ops {

GroupWindows::GroupWindows(int rank, int world, void* const* bases) : GroupWindows(rank, world, bases, 0, 0) {
    const WindowLabel& label = *LabelOf(bases[rank]);
    if (label.magic != kLabelMagic) return;
    data_bytes_ = label.data_bytes;
    registered_bytes_ = label.registered_bytes;
    kind_ = label.context_kind;
    ranks_per_server_ = label.ranks_per_server;
    intra_node_ranks_ = static_cast<int>(label.intra_node_ranks);
    several_servers_ = label.several_servers != 0;
    levels_ = label.algorithm == moe::kAlgorithmHierarchy;
    dispatches_ = label.op == moe::kOpDispatch;
}

void GroupWindows::WriteLabel() const {
    WindowLabel& label = *LabelOf(bases_[static_cast<size_t>(rank_)]);
    label = {};
    label.rank = static_cast<uint32_t>(rank_);
    label.world = static_cast<uint32_t>(world_);
    label.pid = static_cast<uint32_t>(getpid());
    label.context_kind = kind_;
    label.ranks_per_server = ranks_per_server_;
    label.intra_node_ranks = static_cast<uint32_t>(intra_node_ranks_);
    label.several_servers = several_servers_ ? 1 : 0;
    label.data_bytes = data_bytes_;
    label.registered_bytes = registered_bytes_;
    __atomic_store_n(&label.magic, kLabelMagic, __ATOMIC_RELEASE);
}

uint8_t* GroupWindows::data(int rank) const {
    void* base = bases_[static_cast<size_t>(rank)];
    return kind_ == moe::kContextA2 ? StateOf(base) : DataOf(base);
}

// The same memory either way: on A2 the area that comes first is the data, and the state comes last.
uint8_t* GroupWindows::state(int rank) const {
    void* base = bases_[static_cast<size_t>(rank)];
    return kind_ == moe::kContextA2 ? StateOf(base) + data_bytes_ + registered_bytes_ : StateOf(base);
}

bool GroupWindows::inter_node(int peer) const {
    return several_servers_ && peer / intra_node_ranks_ != rank_ / intra_node_ranks_;
}

uint8_t* GroupWindows::StatusMessageOf(int peer, uint32_t parity) const {
    const uint32_t world = static_cast<uint32_t>(world_), source = static_cast<uint32_t>(peer);
    if (!inter_node(peer)) return state(rank_) + moe::StatusOffset(world, parity, source);
    return data(rank_) + moe::RegionOffset(data_bytes_, world, parity, source) +
           moe::RowsEnd(data_bytes_, world, world);
}

uint32_t GroupWindows::Epoch() const {
    return __atomic_load_n(Word(state(rank_), moe::kControlOffset) + moe::kControlEpochWord, __ATOMIC_ACQUIRE);
}

bool GroupWindows::InOp(int peer) const {
    return __atomic_load_n(InOpOf(bases_[static_cast<size_t>(peer)]), __ATOMIC_ACQUIRE) != 0;
}

// A peer that has delivered its whole status message of this epoch may end: no rank waits for it any more. A peer
// killed between two blocks has not delivered it.
bool GroupWindows::Delivered(uint8_t* message) const {
    const uint32_t epoch = Epoch(), world = static_cast<uint32_t>(world_);
    const auto marked = [&](uint32_t block, uint32_t first) {
        const uint32_t* words = Word(message, static_cast<uint64_t>(block) * moe::kBlock);
        return __atomic_load_n(words + moe::kFirstTag, __ATOMIC_ACQUIRE) == first &&
               __atomic_load_n(words + moe::kLastTag, __ATOMIC_ACQUIRE) == epoch;
    };
    if (!marked(0, moe::HeaderWord(epoch))) return false;
    const uint32_t count_blocks = __atomic_load_n(Word(message, 0) + moe::kH0OpPhase, __ATOMIC_RELAXED) & 0xFFFFu;
    const uint32_t most = moe::CountBlocks(moe::MaxLocalExperts(world));
    const uint32_t blocks = moe::kHeaderBlocks + moe::Min(count_blocks, most);
    for (uint32_t block = 1; block < blocks; ++block) {
        if (!marked(block, epoch)) return false;
    }
    return true;
}

// Whether a peer has sent all that this rank waits for in this op.
bool GroupWindows::Sent(int peer) const {
    if (!levels_) return Delivered(StatusMessageOf(peer, moe::Parity(Epoch())));
    return ArrivedByLevels(static_cast<uint32_t>(peer));
}

// Whether a rank waits for nothing more of a peer in this op.
bool GroupWindows::Arrived(int peer) const {
    const uint32_t* hint = Word(state(rank_), moe::AbortOffset(static_cast<uint32_t>(peer)));
    if (__atomic_load_n(hint + moe::kHtMagic, __ATOMIC_ACQUIRE) == moe::kHintMagic &&
        __atomic_load_n(hint + moe::kHtTag, __ATOMIC_ACQUIRE) == Epoch())
        return true;
    return Sent(peer);
}

// Hierarchy: a rank of this server owes its message and, in dispatch, those of its rail on other servers; a rank of
// this rail, in combine, its server's. Other ranks' data comes through these: they have arrived when their own window
// says that they have ended this op.
bool GroupWindows::ArrivedByLevels(uint32_t peer) const {
    const uint32_t world = static_cast<uint32_t>(world_), local_ranks = ranks_per_server_,
                   parity = moe::Parity(Epoch());
    const uint32_t rank = static_cast<uint32_t>(rank_), server = peer / local_ranks;
    uint8_t* own = state(rank_);
    bool all = true;
    if (server == rank / local_ranks) {
        for (uint32_t source = 0; source < world; ++source) {
            const bool owed = source == peer || (dispatches_ && source % local_ranks == peer % local_ranks);
            if (owed) all = all && Delivered(own + moe::StatusOffset(world, parity, source));
        }
        return all;
    }
    if (!dispatches_ && peer % local_ranks == rank % local_ranks) {
        uint8_t* region = data(rank_) + moe::RelayEnd(data_bytes_, world, local_ranks) +
                          moe::RegionOffset(data_bytes_, moe::RegionsOf(world, local_ranks), parity, world + server);
        for (uint32_t local_rank = 0; local_rank < local_ranks; ++local_rank)
            all = all && Delivered(region + moe::RelayMessageOffset(world, local_rank));
        return all;
    }
    const uint32_t seen = __atomic_load_n(
        Word(state(static_cast<int>(peer)), moe::kControlOffset) + moe::kControlEpochWord, __ATOMIC_ACQUIRE);
    return seen == moe::NextEpoch(Epoch()) || (seen == Epoch() && !InOp(static_cast<int>(peer)));
}

// ---- for readers outside of the rank ----

const char* GroupWindows::Phase(const std::vector<int>& awaited) const {
    const WindowLabel& label = *LabelOf(bases_[static_cast<size_t>(rank_)]);
    if (label.magic == kLabelMagic) {
        if (!InOp(rank_)) return "";
        if (label.epoch != Epoch()) return "start";
    }
    if (!Delivered(StatusMessageOf(rank_, moe::Parity(Epoch())))) return "send";
    if (awaited.empty()) return label.magic == kLabelMagic ? "end" : "";
    if (!levels_) return "WaitStatus";
    const int share = static_cast<int>(ranks_per_server_);
    for (int peer : awaited) {
        if (peer / share == rank_ / share) return "WaitStatus level 1";
    }
    return "WaitStatus level 2";
}

std::string GroupWindows::Text() const {
    const WindowLabel& label = *LabelOf(bases_[static_cast<size_t>(rank_)]);
    const bool known = label.magic == kLabelMagic;
    if (!known && Word(state(rank_), moe::kControlOffset)[moe::kControlMagicWord] != moe::kControlMagic) return "";
    uint8_t* const message = StatusMessageOf(rank_, moe::Parity(Epoch()));
    std::vector<int> awaited;
    const bool sent = Epoch() != 0 && Delivered(message) && (!known || (InOp(rank_) && label.epoch == Epoch()));
    for (int peer = 0; sent && peer < world_; ++peer) {
        if (peer != rank_ && !Sent(peer)) awaited.push_back(peer);
    }
    const uint64_t started = known && InOp(rank_) ? label.started : 0;
    const uint32_t op = known ? label.op : Word(message, 0)[moe::kH0OpPhase] >> 24;
    const uint32_t algorithm = known ? label.algorithm : Word(message, moe::kBlock)[moe::kH1Code] >> 8;
    const auto* record = reinterpret_cast<const int32_t*>(state(rank_) + moe::kErrorRecordOffset);
    const auto code = static_cast<uint32_t>(record[moe::kRecCode]);
    const bool failed = record[moe::kRecMagic] == moe::kRecordMagic && code >= moe::kFirstFatal;
    std::string ranks;
    for (int peer : awaited) ranks += (ranks.empty() ? "" : ",") + std::to_string(peer);
    const std::string fields[] = {std::to_string(known ? label.pid : 0),
                                  op == 0 ? "" : moe::OpName(static_cast<int32_t>(op)),
                                  moe::AlgorithmName(algorithm),
                                  std::to_string(Epoch()),
                                  Phase(awaited),
                                  std::to_string(started == 0 ? 0 : MonotonicNanoseconds() - started),
                                  ranks,
                                  failed ? moe::ErrorName(code) : "",
                                  std::to_string(failed ? record[moe::kRecCulprit] : -1)};
    std::string line;
    for (const std::string& field : fields) line += (line.empty() ? "" : "\t") + field;
    return line;
}

}  // namespace ops

uint64_t am_group_text(void* const* bases, int world, char* text, uint64_t bytes) {
    std::string lines;
    for (int rank = 0; rank < world; ++rank) lines += ops::GroupWindows(rank, world, bases).Text() + "\n";
    return ops::GiveText(lines, text, bytes);
}

int am_window_label(const void* base, uint64_t* out) {
    void* const window = const_cast<void*>(base);  // only read
    const ops::WindowLabel& label = *ops::LabelOf(window);
    out[0] = label.rank;
    out[1] = label.world;
    out[2] = label.pid;
    out[3] = ops::WindowBytes(label.data_bytes, label.registered_bytes);
    out[4] = *ops::ClosedOf(window);
    return label.magic == ops::kLabelMagic ? 1 : 0;
}
