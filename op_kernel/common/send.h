// Transports. Intra-node ranks are written by MTE3 stores. For inter-node ranks the same calls stage rows and status
// message in this rank's windowsOut; its region begins with the first row and ends with the message at a fixed place,
// and one contiguous BatchWrite item carries both, the message last. Over RDMA every other rank is inter-node unless
// the caller says that stores reach the own server.
#ifndef ASCEND_MOE_COMMON_SEND_H
#define ASCEND_MOE_COMMON_SEND_H

#include "contexts.h"
#include "core_group.h"

// The header of Hccl<> has moved between toolkits.
#if __has_include("lib/hccl/hccl.h")
#include "lib/hccl/hccl.h"
#else
#include "adv_api/hccl/hccl.h"
#endif

namespace moe {

// Flagged blocks (ASCEND_MOE_RDMA_FLAGS): rows between servers are stored in blocks of 512 bytes, 480 of rows and then
// a flag, all of whose words are the epoch's. A reader checks the flag of every block of an item before it reads its
// rows, so it depends only on the order of bytes within a block.
//
// Rows for ranks that stores reach use the same layout, so that there is one reader, but their flags are unused.
// Regions begin at multiples of 512 bytes of the window, and windows at multiples of more.
//
// FlaggedPieces splits `bytes` of rows from `place` on into pieces for strided copies: up to the next flag, whole
// blocks, the rest. Both are multiples of 32.
class FlaggedPieces {
public:
    __aicore__ inline FlaggedPieces(GM_ADDR place, uint32_t bytes)
        : next_(reinterpret_cast<uint64_t>(place)), left_(bytes) {}
    // Returns false if no piece is left.
    __aicore__ inline bool Next() {
        if (left_ == 0) return false;
        place_ = next_;
        offset_ += count_ * length_;
        const uint32_t room = kFlaggedPayload - static_cast<uint32_t>(place_ % kFlaggedBlock);
        const bool whole = room == kFlaggedPayload && left_ >= kFlaggedPayload;
        count_ = whole ? left_ / kFlaggedPayload : 1;
        length_ = whole ? kFlaggedPayload : Min(room, left_);
        left_ -= count_ * length_;
        next_ = place_ - place_ % kFlaggedBlock + static_cast<uint64_t>(count_) * kFlaggedBlock;
        return true;
    }
    __aicore__ inline uint32_t offset() const { return offset_; }  // of the piece in the rows
    __aicore__ inline GlobalTensor<int8_t> Gm() const {
        GlobalTensor<int8_t> piece;
        piece.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(place_),
                              static_cast<uint64_t>(count_ - 1) * kFlaggedBlock + length_);
        return piece;
    }
    __aicore__ inline DataCopyExtParams Loading() const { return {Pieces(count_), length_, Gap(), 0, 0}; }
    __aicore__ inline DataCopyExtParams Storing() const { return {Pieces(count_), length_, 0, Gap(), 0}; }

private:
    __aicore__ inline uint32_t Gap() const { return kFlaggedBlock - length_; }
    uint64_t place_ = 0, next_ = 0;
    uint32_t left_ = 0;
    uint32_t offset_ = 0;
    uint32_t count_ = 0, length_ = 0;  // of the piece: blocks, bytes of each
};

__aicore__ inline void LoadFlagged(const LocalTensor<int8_t>& rows, GM_ADDR place, uint32_t bytes) {
    const DataCopyPadExtParams<int8_t> pad{false, 0, 0, 0};
    for (FlaggedPieces pieces(place, bytes); pieces.Next();)
        AscendC::DataCopyPad(rows[pieces.offset()], pieces.Gm(), pieces.Loading(), pad);
}
__aicore__ inline void StoreFlagged(GM_ADDR place, const LocalTensor<int8_t>& rows, uint32_t bytes) {
    for (FlaggedPieces pieces(place, bytes); pieces.Next();)
        AscendC::DataCopyPad(pieces.Gm(), rows[pieces.offset()], pieces.Storing());
}
// The place of byte `offset` of the rows that begin at `place`.
__aicore__ inline GM_ADDR FlaggedPlace(GM_ADDR place, uint64_t offset) {
    const uint64_t within = reinterpret_cast<uint64_t>(place) % kFlaggedBlock, at = within + offset;
    return place - within + at / kFlaggedPayload * kFlaggedBlock + at % kFlaggedPayload;
}

// The flags of the blocks that end at `end`. Block 0 is the last.
class BlockFlags {
public:
    __aicore__ inline void Init(TPipe& pipe, const MoeDistributeInfo& info, uint32_t epoch) {
        word_ = static_cast<int32_t>(FlagWord(epoch));
        pipe.InitBuffer(flagBuf_, BlockFlagsUb(info).flags);
        AscendC::Duplicate(flagBuf_.Get<int32_t>(), word_, kLanes);
    }
    // Additional UB of a reader.
    __aicore__ inline void InitBits(TPipe& pipe, const MoeDistributeInfo& info) {
        pipe.InitBuffer(bitBuf_, BlockFlagsUb(info).bits);
    }
    // Stores this epoch's flag into each of `blocks` blocks.
    __aicore__ inline void Put(GM_ADDR end, uint64_t blocks) {
        SyncFunc<HardEvent::V_MTE3>();
        for (uint64_t first = 0; first < blocks; first += kFlagsAtOnce) {
            const uint32_t count = AtOnce(blocks - first);
            const DataCopyExtParams params{Pieces(count), kBlock, 0, kFlaggedPayload, 0};
            AscendC::DataCopyPad(Flags(end, first, count), flagBuf_.Get<int32_t>(), params);
        }
    }
    // Whether all `blocks` blocks have arrived. Progress is stored: the next call for the same blocks continues there.
    __aicore__ inline bool Come(GM_ADDR end, uint64_t blocks) {
        while (seen_ < blocks) {
            const uint32_t count = AtOnce(blocks - seen_);
            if (!Look(end, seen_, count)) return false;
            seen_ += count;
        }
        seen_ = 0;
        return true;
    }

private:
    static constexpr uint32_t kLanes = kFlagsAtOnce * kBlockWords;
    static constexpr uint32_t kFlagsOfWord = sizeof(uint64_t);  // a flag has eight words, and a bit for each

    __aicore__ inline uint32_t AtOnce(uint64_t left) const {
        return left < kFlagsAtOnce ? static_cast<uint32_t>(left) : kFlagsAtOnce;
    }
    __aicore__ inline GlobalTensor<int32_t> Flags(GM_ADDR end, uint64_t first, uint32_t count) const {
        GlobalTensor<int32_t> flags;
        flags.SetGlobalBuffer(
            reinterpret_cast<__gm__ int32_t*>(end - (first + count) * kFlaggedBlock + kFlaggedPayload),
            ((count - 1) * kFlaggedBlock + kBlock) / sizeof(int32_t));
        return flags;
    }
    __aicore__ inline bool Look(GM_ADDR end, uint64_t first, uint32_t count) {
        const LocalTensor<int32_t> flags = flagBuf_.Get<int32_t>();
        const DataCopyExtParams params{Pieces(count), kBlock, kFlaggedPayload, 0, 0};
        const DataCopyPadExtParams<int32_t> pad{false, 0, 0, 0};
        SyncFunc<HardEvent::V_MTE2>();
        AscendC::DataCopyPad(flags, Flags(end, first, count), params, pad);
        SyncFunc<HardEvent::MTE2_V>();
        SyncFunc<HardEvent::S_V>();
        AscendC::CompareScalar(bitBuf_.Get<uint8_t>(), flags, word_, AscendC::CMPMODE::EQ, kLanes);
        SyncFunc<HardEvent::V_S>();
        const LocalTensor<uint64_t> bits = bitBuf_.Get<uint64_t>();
        for (uint32_t at = 0; at < count; at += kFlagsOfWord) {
            const uint64_t all = ~uint64_t{0}, left = count - at;
            const uint64_t wanted = left < kFlagsOfWord ? ~(all << (left * kBlockWords)) : all;
            if ((bits.GetValue(at / kFlagsOfWord) & wanted) != wanted) return false;
        }
        return true;
    }

    UbBuf flagBuf_, bitBuf_;
    uint64_t seen_ = 0;
    int32_t word_ = 0;
};

// Where an inter-node rank's status message arrives.
__aicore__ inline __gm__ uint32_t* InterNodeMessage(const WindowContext& context, uint32_t parity, uint32_t rank) {
    return reinterpret_cast<__gm__ uint32_t*>(context.data(context.rank()) +
                                              RegionOffset(context.data_bytes(), context.regions(), parity, rank) +
                                              RowsEnd(context.data_bytes(), context.world(), context.regions()));
}

// Hierarchy: the end of a server's rows, in this rank's window or in its windowsOut; and the message of one of its
// ranks.
__aicore__ inline uint64_t RelayOffset(const WindowContext& context, const MoeDistributeInfo& info, uint32_t parity,
                                       uint32_t server) {
    return RegionOffset(context.data_bytes(), info.regions, parity, info.world + server) +
           RelayEnd(context.data_bytes(), info.world, info.intraNodeRanks);
}
__aicore__ inline __gm__ uint32_t* RelayedMessage(const WindowContext& context, const MoeDistributeInfo& info,
                                                  uint32_t parity, uint32_t server, uint32_t localRank) {
    return reinterpret_cast<__gm__ uint32_t*>(context.data(info.rank) + RelayOffset(context, info, parity, server) +
                                              RelayMessageOffset(info.world, localRank));
}

// Hierarchy: servers of which a part of an op is; counted from this rank's on, [first, last).
struct ServerPass {
    uint32_t first = 0, last = kMaxWorld;
    __aicore__ inline bool Has(const MoeDistributeInfo& info, uint32_t server) const {
        const uint32_t servers = Servers(info), at = (server + servers - Server(info, info.rank)) % servers;
        return at >= first && at < last;
    }
    // The server at a place of the pass.
    __aicore__ inline uint32_t At(const MoeDistributeInfo& info, uint32_t at) const {
        return (Server(info, info.rank) + at) % Servers(info);
    }
    __aicore__ inline bool Own() const { return first == 0; }
};

// Which ranks are inter-node: all except a contiguous range.
class ServerMap {
public:
    // Makes all ranks intra-node.
    __aicore__ inline void InitIntraNode(uint32_t world) {
        begin_ = 0;
        world_ = end_ = world;
    }
    __aicore__ inline void Init(const MoeDistributeInfo& info) {
        world_ = info.world;
        end_ = world_;
        if (info.transport != kTransportRdma) return;
        begin_ = Server(info, info.rank) * info.intraNodeRanks;
        end_ = Min(begin_ + info.intraNodeRanks, world_);
    }
    __aicore__ inline bool InterNode(uint32_t rank) const { return rank < begin_ || rank >= end_; }
    __aicore__ inline uint32_t begin() const { return begin_; }
    __aicore__ inline uint32_t end() const { return end_; }
    __aicore__ inline uint32_t InterNodeCount() const { return world_ - (end_ - begin_); }
    // Numbers the inter-node ranks without gaps.
    __aicore__ inline uint32_t InterNodeIndex(uint32_t rank) const {
        return rank < begin_ ? rank : rank - (end_ - begin_);
    }

private:
    uint32_t world_ = 0;
    uint32_t begin_ = 0;
    uint32_t end_ = 0;
};

__aicore__ inline void StoreRows(GM_ADDR to, const LocalTensor<int8_t>& rows, uint32_t bytes) {
    GlobalTensor<int8_t> window;
    window.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(to), bytes);
    CopyOut(window, rows, bytes);
}
// Stores `count` rows of `bytes` bytes, which begin every `step` bytes in GM.
__aicore__ inline void StoreRows(GM_ADDR to, const LocalTensor<int8_t>& rows, uint32_t bytes, uint32_t step,
                                 uint32_t count) {
    if (step == bytes) return StoreRows(to, rows, count * bytes);
    GlobalTensor<int8_t> window;
    window.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(to), static_cast<uint64_t>(count - 1) * step + bytes);
    const DataCopyExtParams params{Pieces(count), bytes, 0, step - bytes, 0};
    AscendC::DataCopyPad(window, rows, params);
}
// Loads rows stored in that way.
__aicore__ inline void LoadRows(const LocalTensor<int8_t>& rows, GM_ADDR from, uint32_t bytes, uint32_t step,
                                uint32_t count) {
    GlobalTensor<int8_t> window;
    window.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(from), static_cast<uint64_t>(count - 1) * step + bytes);
    if (step == bytes) return AscendC::DataCopy(rows, window, count * bytes);
    const DataCopyExtParams params{Pieces(count), bytes, step - bytes, 0, 0};
    const DataCopyPadExtParams<int8_t> pad{false, 0, 0, 0};
    AscendC::DataCopyPad(rows, window, params, pad);
}
__aicore__ inline void StoreWords(GM_ADDR to, const LocalTensor<uint32_t>& words, uint32_t bytes) {
    GlobalTensor<uint32_t> window;
    window.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(to), bytes / sizeof(uint32_t));
    AscendC::DataCopy(window, words, bytes / sizeof(uint32_t));
}

class WindowSender {
public:
    __aicore__ inline void Init(const WindowContext& context, const MoeDistributeInfo& info, uint32_t op,
                                uint32_t epoch) {
        context_ = &context;
        parity_ = Parity(epoch);
        servers_.Init(info);
        if (info.transport == kTransportRdma) rowsAt_ = RowsEnd(context.data_bytes(), info.world, info.regions);
        info_ = &info;
        relays_ = info.algorithm == kAlgorithmHierarchy;
        toForwarder_ = op == kOpCombine;
        flagged_ = info.rdmaFlags != 0;
    }
    // Where row 0 of a region lies: at its start, or over RDMA where its rows end; rows then count from below 0.
    __aicore__ inline uint64_t rows_at() const { return rowsAt_; }
    __aicore__ inline const ServerMap& servers() const { return servers_; }

    // `offset`: within this rank's region of the peer's ping-pong buffer.
    template <bool kRdma>
    __aicore__ inline void PutRows(uint32_t peer, uint64_t offset, const LocalTensor<int8_t>& rows, uint32_t bytes) {
        if constexpr (kRdma) {
            const bool interNode = servers_.InterNode(peer);
            if (flagged_) {
                const uint64_t place = rowsAt_ + FlaggedRowOffset(offset - rowsAt_);
                StoreFlagged((interNode ? Staged(parity_, peer) : Own(peer)) + place, rows, bytes);
                return;
            }
            if (interNode) {
                StoreRows(Staged(parity_, peer) + offset, rows, bytes);
                return;
            }
        }
        StoreRows(Own(peer) + offset, rows, bytes);
    }
    // Consecutive rows of `bytes` bytes.
    template <bool kRdma>
    __aicore__ inline void PutChunk(uint32_t peer, uint64_t offset, const LocalTensor<int8_t>& rows, uint32_t bytes,
                                    uint32_t count) {
        if constexpr (kRdma) {
            PutRows<true>(peer, offset, rows, count * bytes);
        } else {
            StoreRows(Own(peer) + offset, rows, bytes, RowStep(*info_, bytes), count);
        }
    }
    // `offset`: within the peer's ping-pong buffer: the return path of rows with source indices.
    __aicore__ inline void PutIndexed(uint32_t peer, uint64_t offset, const LocalTensor<int8_t>& rows, uint32_t bytes) {
        StoreRows(context_->data(peer) + PingPongOffset(context_->data_bytes(), parity_) + offset, rows, bytes);
    }
    // All rows of this core have left. Rows of other cores also need a SyncAll.
    __aicore__ inline void Flush() { AscendC::PipeBarrier<PIPE_ALL>(); }

    // This rank's status message, after every core's Flush. An inter-node peer's is staged, and leaves with its item.
    __aicore__ inline void PutStatus(uint32_t peer, const LocalTensor<uint32_t>& message, uint32_t bytes) {
        if (servers_.InterNode(peer)) {
            StoreWords(relays_ ? Relayed(peer) : Staged(parity_, peer) + rowsAt_, message, bytes);
        } else {
            StoreWords(context_->state(peer) + StatusOffset(context_->world(), parity_, context_->rank()), message,
                       bytes);
        }
    }
    __aicore__ inline void PutAbort(uint32_t peer, const LocalTensor<uint32_t>& block) {
        StoreWords(context_->state(peer) + AbortOffset(context_->rank()), block, kBlock);
    }
    // Stages the abort block, or the hint, for all inter-node peers. An abort replaces the hint, also in its items that
    // have yet to leave.
    __aicore__ inline void StageAbort(const LocalTensor<uint32_t>& block) { StoreWords(StagedAbort(), block, kBlock); }

    // Flags the staged blocks with `rowBytes` of rows for an inter-node peer.
    __aicore__ inline void PutFlags(uint32_t peer, uint64_t rowBytes, BlockFlags& flags) {
        flags.Put(Staged(parity_, peer) + rowsAt_, FlaggedBlocks(rowBytes));
    }
    // The item for an inter-node peer: `rowBytes` of rows, or of flagged blocks, and the message after them.
    __aicore__ inline BatchItem ItemOf(uint32_t peer, uint64_t rowBytes, uint32_t runBytes) const {
        const uint64_t target = Region(parity_, context_->rank());
        return Item(Staged(parity_, peer) + rowsAt_ - rowBytes, context_->data(peer) + target + rowsAt_ - rowBytes,
                    rowBytes + runBytes, peer);
    }
    __aicore__ inline BatchItem AbortItemOf(uint32_t peer) const {
        return Item(StagedAbort(), context_->state(peer) + AbortOffset(context_->rank()), kBlock, peer);
    }
    static __aicore__ inline void SetItem(const LocalTensor<uint64_t>& words, const BatchItem& item) {
        words.SetValue(0, item.local);
        words.SetValue(1, item.remote);
        words.SetValue(2, item.bytes);
        words.SetValue(3, static_cast<uint64_t>(item.peer) << 32 | item.type);
    }

private:
    __aicore__ inline uint64_t Region(uint32_t pingPong, uint32_t rank) const {
        return RegionOffset(context_->data_bytes(), context_->regions(), pingPong, rank);
    }
    // This rank's region of the peer's ping-pong buffer.
    __aicore__ inline GM_ADDR Own(uint32_t peer) const {
        return context_->data(peer) + Region(parity_, context_->rank());
    }
    __aicore__ inline GM_ADDR Staged(uint32_t pingPong, uint32_t peer) const {
        return context_->staging() + Region(pingPong, peer);
    }
    // Hierarchy: where the message to another server's rank lies until it is relayed. In dispatch after the records for
    // that server; in combine at this server's rank with the peer's local rank, after the rows of that peer.
    __aicore__ inline GM_ADDR Relayed(uint32_t peer) const {
        const uint32_t server = Server(*info_, peer), localRank = LocalRank(*info_, peer);
        if (!toForwarder_)
            return context_->staging() + RelayOffset(*context_, *info_, parity_, server) +
                   RelayMessageOffset(info_->world, localRank);
        const uint32_t region = server * info_->intraNodeRanks + LocalRank(*info_, info_->rank);
        return context_->data(servers_.begin() + localRank) + Region(parity_, region) + rowsAt_;
    }
    __aicore__ inline GM_ADDR StagedAbort() const {
        return context_->staging() + context_->data_bytes() + AbortOffset(context_->rank());
    }
    __aicore__ inline BatchItem Item(GM_ADDR local, GM_ADDR remote, uint64_t bytes, uint32_t peer) const {
        BatchItem item;
        item.local = reinterpret_cast<uint64_t>(local);
        item.remote = reinterpret_cast<uint64_t>(remote);
        item.bytes = bytes;
        item.type = 0;
        item.peer = peer;
        return item;
    }
    const WindowContext* context_ = nullptr;
    ServerMap servers_;
    uint32_t parity_ = 0;
    uint64_t rowsAt_ = 0;
    const MoeDistributeInfo* info_ = nullptr;
    bool relays_ = false;       // hierarchy: messages to inter-node ranks
    bool toForwarder_ = false;  // go to this server's rank of their rail, not to windowsOut
    bool flagged_ = false;
};

inline constexpr AscendC::HcclServerConfig kServerClient = {AscendC::CoreType::DEFAULT, 0};  // core 0

// The BatchWrite lists of a launch, in the workspace: [kItemLists][W] blocks. Every core stores its inter-node peers'
// items in the first; core 0 posts all lists.
class ItemList {
public:
    __aicore__ inline void Init(WindowSender& sender, const MoeDistributeInfo& info, GM_ADDR workspace) {
        sender_ = &sender;
        world_ = info.world;
        items_ = workspace + ItemsOffset(info.cores, info.experts, info.world, info.localExperts);
    }
    __aicore__ inline void BuffInit(TPipe& pipe, const MoeDistributeInfo& info, uint32_t epoch) {
        pipe.InitBuffer(buf_, ItemListUb(info).item);
        flagged_ = info.rdmaFlags != 0;
        if (flagged_) flags_.Init(pipe, info, epoch);
    }
    // The item with `rowBytes` of rows for a peer and the message after them. The previous item has left: the caller
    // waited before it filled this message.
    __aicore__ inline void Put(uint32_t peer, uint64_t rowBytes, uint32_t messageBytes) {
        LocalTensor<uint64_t> words = buf_.Get<uint64_t>();
        if (flagged_) {
            sender_->PutFlags(peer, rowBytes, flags_);
            rowBytes = FlaggedBytes(rowBytes);
        }
        WindowSender::SetItem(words, sender_->ItemOf(peer, rowBytes, messageBytes));
        SyncFunc<HardEvent::S_MTE3>();
        GlobalTensor<uint64_t> list;
        list.SetGlobalBuffer(reinterpret_cast<__gm__ uint64_t*>(items_), static_cast<uint64_t>(world_) * kItemWords);
        const uint32_t at = sender_->servers().InterNodeIndex(peer);
        AscendC::DataCopy(list[static_cast<uint64_t>(at) * kItemWords], words, kItemWords);
    }
    __aicore__ inline GM_ADDR address() const { return items_; }
    __aicore__ inline GM_ADDR aborts() const {
        return items_ + static_cast<uint64_t>(kAbortItemList) * world_ * kBlock;
    }
    __aicore__ inline GM_ADDR hints() const { return items_ + static_cast<uint64_t>(kHintItemList) * world_ * kBlock; }

private:
    static constexpr uint32_t kItemWords = kBlock / sizeof(uint64_t);
    static_assert(sizeof(BatchItem) == kBlock, "an item is a block");
    WindowSender* sender_ = nullptr;
    GM_ADDR items_ = nullptr;
    UbBuf buf_;
    BlockFlags flags_;
    bool flagged_ = false;
    uint32_t world_ = 0;
};

// HCCL's server, which moves data between the servers of an A2 cluster: BatchWrite copies items of this rank's
// windowsOut to its peers' windowsIn. Only core 0 talks to it, and must call Finalize in every launch on an A2 context.
class RdmaLink {
public:
    using Server = AscendC::Hccl<AscendC::HCCL_SERVER_TYPE_AICPU, kServerClient>;

    // `head`: this core's copy of the tiling's head; `tiling`: the tiling in GM. Newer toolkits take the former, older
    // ones the latter.
    __aicore__ inline void Open(const WindowContext& context, uint32_t core, GM_ADDR tiling,
                                const MoeDistributeMc2Head& head) {
        if (core != 0 || !context.a2() || context.address() == nullptr) return;
        slot_.server = Server();
        Start(slot_.server, context.address(), tiling, head, 0);
        open_ = true;
    }
    // One card: instead of Open. Items are copied by the core that posts them.
    __aicore__ inline void CopyItems() { copies_ = true; }
    // Posts a list of `count` items in GM, in parts, because HCCL's server counts the items of a list in 8 bits.
    // Everything they copy must have drained.
    __aicore__ inline void Post(GM_ADDR list, uint32_t count) {
        for (uint32_t i = 0; copies_ && i < count; ++i) ItemCopier().Copy(list + static_cast<uint64_t>(i) * kBlock);
        if (copies_) return;
        for (uint32_t at = 0; at < count; at += kMostItems) {
            slot_.server.template BatchWrite<true>(list + static_cast<uint64_t>(at) * kBlock,
                                                   Min(kMostItems, count - at));
        }
    }
    // Returns when all posted items have left; the server may then go.
    __aicore__ inline void Close() {
        if (open_) slot_.server.Finalize();
        open_ = false;
    }

private:
    static constexpr uint32_t kMostItems = 255;
    // The server object is constructed only where it is used; most launches have none.
    union Slot {
        __aicore__ inline Slot() {}
        Server server;
    };

    template <typename S>
    static __aicore__ inline auto Start(S& server, GM_ADDR context, GM_ADDR, const MoeDistributeMc2Head& head, int)
        -> decltype(server.InitV2(context, &head)) {
        server.InitV2(context, &head);
        server.SetCcTilingV2(sizeof(head.init));
    }
    template <typename S>
    static __aicore__ inline void Start(S& server, GM_ADDR context, GM_ADDR tiling, const MoeDistributeMc2Head& head,
                                        long) {
        server.Init(context, tiling);
        server.SetCcTiling(tiling + sizeof(head.init));
    }

    Slot slot_;
    bool open_ = false;
    bool copies_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_SEND_H
