// The areas of a rank behind accessors, for each communication context: our own window table, A3's and A2's.
#ifndef ASCEND_MOE_COMMON_CONTEXTS_H
#define ASCEND_MOE_COMMON_CONTEXTS_H

#include "base.h"

namespace moe {

// HCCL's communication contexts as laid out in device memory. This is a private ABI: only the fields read here are
// named, and what a launch relies on is checked against the tiling before the first store. A test compares every offset
// with the structs that the emulator fills.

// ---- A3 (Ascend 910_93): HcclOpResParam; a peer is reached through remote[peer].device, `remoteStart` bytes into the
// context: 2984 or 3320, by release ----
struct A3Remote {  // HcclRankRelationResV2
    uint32_t rank;
    uint32_t worldRank;
    uint64_t windowsIn;
    uint64_t windowsOut;
    uint64_t windowsExp;
};
struct A3Pointer {  // RemoteResPtr
    uint64_t host;
    uint64_t device;  // A3Remote
};
constexpr uint32_t kA3RemoteStart = 2984;  // of the older releases
struct A3Context {
    uint64_t workspace;
    uint64_t workspaceBytes;
    uint32_t rank;
    uint32_t world;
    uint64_t windowBytes;
    uint64_t windowsIn;  // of this rank
    uint64_t windowsOut;
    uint8_t name[128];
    uint64_t expBytes;
    uint64_t windowsExp;
    uint32_t remoteStart;
    uint32_t remoteStep;
};
constexpr uint32_t kA3MostRemoteStart = 1u << 16;

// ---- A2 (Ascend 910B): HcclA2CombineOpParam; above 32 ranks, or with multiFlag, `data` leads to peers ----
constexpr uint32_t kA2Ranks = 32;
struct A2Memory {  // MemDetails
    uint64_t bytes;
    uint64_t address;
    uint32_t key;
    uint32_t reserved;
};
struct A2Remote {  // IbVerbsData
    A2Memory remoteIn;
    A2Memory remoteOut;
    A2Memory localIn;
    A2Memory localOut;
    uint8_t reserved[24];
};
struct A2Context {
    uint64_t workspace;
    uint64_t workspaceBytes;
    uint32_t rank;
    uint32_t world;
    uint64_t windowBytes;  // of windowsIn, and of windowsOut
    uint64_t windowsIn[kA2Ranks];
    uint64_t windowsOut[kA2Ranks];
    uint8_t resources[8328];
    uint8_t multiFlag;
    uint8_t padding[7];
    uint64_t data;  // A2Remote[world]
};

// One BatchWrite item: `bytes` from this rank's windowsOut to the windowsIn of a peer.
struct BatchItem {
    uint64_t local;
    uint64_t remote;
    uint64_t bytes;
    uint32_t type;  // HCCL_DATA_TYPE_INT8
    uint32_t peer;
};

// ---- WindowTable: for communicators that our own host code opens; the host fills it in GM with addresses as this rank
// sees them ----
struct WindowTable {
    uint32_t magic;
    uint32_t rank;
    uint32_t world;
    uint32_t reserved;
    uint64_t windowBytes;  // data and registered area, which follow each other
    uint64_t stateBytes;
    uint64_t data[kMaxWorld];
    uint64_t state[kMaxWorld];
};
constexpr uint32_t kWindowTableMagic = 0x57494E44u;

// The first field of the context that differs from the tiling.
struct ContextMismatch {
    uint32_t field = kContextFieldCount;  // none
    uint32_t ours = 0;                    // sizes in KiB
    uint32_t theirs = 0;
};

// One adapter for the three contexts. The registered area, if any, follows the data. On A2 the last MiB of windowsIn is
// the state area.
class WindowContext {
public:
    __aicore__ inline void Init(GM_ADDR context, const MoeDistributeInfo& info) {
        context_ = context;
        kind_ = info.contextKind;
        rank_ = info.rank;
        world_ = info.world;
        regions_ = info.regions;
        dataBytes_ = info.dataBytes;
        registeredBytes_ = info.registeredBytes;
    }
    // Compares the context with the tiling. No address may be used before this returns kContextFieldCount.
    __aicore__ inline ContextMismatch Check() {
        const ContextMismatch mismatch = Compare();
        if (mismatch.field != kContextFieldCount) return mismatch;
        if (kind_ == kContextA3) pointers_ = reinterpret_cast<__gm__ A3Pointer*>(context_ + A3()->remoteStart);
        if (kind_ == kContextA2 && (world_ > kA2Ranks || A2()->multiFlag != 0))
            many_ = reinterpret_cast<__gm__ A2Remote*>(A2()->data);
        own_ = WindowOf(rank_);
        return mismatch;
    }
    // Starts to load all ranks' window addresses: data() then finds them in UB until ForgetPeers. The caller waits for
    // MTE2 before it asks for another rank's. Above kMostPeersInUb ranks they stay in GM.
    __aicore__ inline void LoadPeers(TPipe& pipe, const MoeDistributeInfo& info) {
        const uint32_t bytes = PeersBytes(info);
        if (bytes == 0 || many_ != nullptr) return;  // many: they lie apart
        UbBuf buffer;
        pipe.InitBuffer(buffer, bytes);
        __gm__ void* from = pointers_;
        if (kind_ == kContextTable) from = Table()->data;
        if (kind_ == kContextA2) from = A2()->windowsIn;
        const uint32_t words = (kind_ == kContextA3 ? 2 : 1) * world_ * (kWordPairBytes / kIntBytes);
        GlobalTensor<uint32_t> source;
        source.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(from), words);
        CopyIn(buffer.Get<uint32_t>(), source, words);
        peers_ = buffer.Get<uint64_t>();
        loaded_ = true;
    }
    // Call when their UB layout ends.
    __aicore__ inline void ForgetPeers() { loaded_ = false; }
    __aicore__ inline uint32_t rank() const { return rank_; }
    __aicore__ inline uint32_t world() const { return world_; }
    __aicore__ inline uint32_t regions() const { return regions_; }  // of a ping-pong buffer
    __aicore__ inline uint64_t data_bytes() const { return dataBytes_; }
    // Window memory that callers own between window_empty and the combine that publishes it.
    __aicore__ inline uint64_t registered_bytes() const { return registeredBytes_; }
    __aicore__ inline GM_ADDR registered(uint32_t rank) const { return data(rank) + dataBytes_; }
    __aicore__ inline GM_ADDR data(uint32_t rank) const {
        if (rank == rank_) return own_;
        return loaded_ ? WindowInUb(rank) : WindowOf(rank);
    }
    __aicore__ inline GM_ADDR state(uint32_t rank) const {
        if (kind_ == kContextTable) return reinterpret_cast<GM_ADDR>(Table()->state[rank]);
        if (kind_ == kContextA2) return data(rank) + dataBytes_ + registeredBytes_;
        return reinterpret_cast<GM_ADDR>(rank == rank_ ? A3()->windowsExp : A3Of(rank)->windowsExp);
    }
    // A2: this rank's own windowsOut, laid out like windowsIn.
    __aicore__ inline GM_ADDR staging() const {
        return reinterpret_cast<GM_ADDR>(many_ != nullptr ? many_[rank_].localOut.address : A2()->windowsOut[rank_]);
    }
    __aicore__ inline GM_ADDR address() const { return context_; }
    __aicore__ inline bool a2() const { return kind_ == kContextA2; }

private:
    __aicore__ inline GM_ADDR WindowOf(uint32_t rank) const {
        if (kind_ == kContextTable) return reinterpret_cast<GM_ADDR>(Table()->data[rank]);
        if (kind_ == kContextA2) return A2Window(rank);
        return reinterpret_cast<GM_ADDR>(rank == rank_ ? A3()->windowsIn : A3Of(rank)->windowsIn);
    }
    // On A3 a rank has two words, a host and a device pointer; the latter leads to its address, which replaces the
    // first word on first use; the second becomes 0.
    __aicore__ inline GM_ADDR WindowInUb(uint32_t rank) const {
        if (kind_ != kContextA3) return reinterpret_cast<GM_ADDR>(peers_.GetValue(rank));
        const uint64_t pointer = peers_.GetValue(2 * rank + 1);
        if (pointer != 0) {
            peers_.SetValue(2 * rank, reinterpret_cast<__gm__ A3Remote*>(pointer)->windowsIn);
            peers_.SetValue(2 * rank + 1, 0);
        }
        return reinterpret_cast<GM_ADDR>(peers_.GetValue(2 * rank));
    }
    __aicore__ inline ContextMismatch Compare() const {
        if (context_ == nullptr) return Differs(kContextFieldAddress, 1, 0);
        if (kind_ == kContextA3) {
            const uint32_t start = A3()->remoteStart;
            if (start < sizeof(A3Context) || start > kA3MostRemoteStart || start % sizeof(uint64_t) != 0)
                return Differs(kContextFieldPeers, kA3RemoteStart, start);
            return Compare(A3()->rank, A3()->world, A3()->windowBytes, A3()->expBytes);
        }
        if (kind_ == kContextA2) {
            const uint64_t bytes = A2()->windowBytes, state = bytes < kA2StateBytes ? bytes : kA2StateBytes;
            return Compare(A2()->rank, A2()->world, bytes - state, state);
        }
        if (Table()->magic != kWindowTableMagic) return Differs(kContextFieldMagic, kWindowTableMagic, Table()->magic);
        return Compare(Table()->rank, Table()->world, Table()->windowBytes, Table()->stateBytes);
    }
    __aicore__ inline ContextMismatch Differs(uint32_t field, uint32_t ours, uint32_t theirs) const {
        ContextMismatch found;
        found.field = field;
        found.ours = ours;
        found.theirs = theirs;
        return found;
    }
    __aicore__ inline ContextMismatch Compare(uint32_t rank, uint32_t world, uint64_t window, uint64_t state) const {
        if (rank != rank_) return Differs(kContextFieldRank, rank_, rank);
        if (world != world_) return Differs(kContextFieldWorld, world_, world);
        const uint64_t ours = dataBytes_ + registeredBytes_;
        if (window < ours) return Differs(kContextFieldWindow, KiB(ours), KiB(window));
        const uint64_t need = StateBytes(world_);
        if (state < need) return Differs(kContextFieldState, KiB(need), KiB(state));
        return ContextMismatch();
    }
    // Saturates: any content of the context must fit the record.
    __aicore__ inline uint32_t KiB(uint64_t bytes) const {
        const uint64_t size = bytes / 1024;
        return static_cast<uint32_t>(size < kMostKiB ? size : kMostKiB);
    }
    __aicore__ inline __gm__ WindowTable* Table() const { return reinterpret_cast<__gm__ WindowTable*>(context_); }
    __aicore__ inline __gm__ A3Context* A3() const { return reinterpret_cast<__gm__ A3Context*>(context_); }
    __aicore__ inline __gm__ A3Remote* A3Of(uint32_t rank) const {
        return reinterpret_cast<__gm__ A3Remote*>(pointers_[rank].device);
    }
    __aicore__ inline __gm__ A2Context* A2() const { return reinterpret_cast<__gm__ A2Context*>(context_); }
    __aicore__ inline GM_ADDR A2Window(uint32_t rank) const {
        if (many_ == nullptr) return reinterpret_cast<GM_ADDR>(A2()->windowsIn[rank]);
        return reinterpret_cast<GM_ADDR>(rank == rank_ ? many_[rank].localIn.address : many_[rank].remoteIn.address);
    }

    static constexpr uint64_t kMostKiB = 0x7FFFFFFF;
    GM_ADDR context_ = nullptr;
    GM_ADDR own_ = nullptr;                 // this rank's window
    __gm__ A3Pointer* pointers_ = nullptr;  // A3
    __gm__ A2Remote* many_ = nullptr;       // A2, if windowsIn lacks the addresses
    LocalTensor<uint64_t> peers_;           // loaded by LoadPeers
    bool loaded_ = false;
    uint32_t kind_ = kContextTable;
    uint32_t rank_ = 0;
    uint32_t world_ = 0;
    uint32_t regions_ = 0;
    uint64_t dataBytes_ = 0;
    uint64_t registeredBytes_ = 0;
};

// The epoch word in this rank's control block. It is moved by MTE: the scalar cache would have to be cleaned, and its
// writes are not ordered with the stores of status messages.
class EpochWord {
public:
    // The block stays in UB for Publish until the first UB layout ends.
    __aicore__ inline void Init(TPipe& pipe, const WindowContext& context) {
        control_.SetGlobalBuffer(reinterpret_cast<__gm__ uint32_t*>(context.state(context.rank()) + kControlOffset),
                                 kBlockWords);
        pipe.InitBuffer(buf_, kEpochWordBytes);
    }
    // A control block without our magic is a new window with epoch 0.
    __aicore__ inline uint32_t Read() {
        LocalTensor<uint32_t> words = buf_.Get<uint32_t>();
        AscendC::DataCopy(words, control_, kBlockWords);
        SyncFunc<HardEvent::MTE2_S>();
        return words.GetValue(kControlMagicWord) == kControlMagic ? words.GetValue(kControlEpochWord) : 0;
    }
    __aicore__ inline void Publish(uint32_t epoch) {
        LocalTensor<uint32_t> words = buf_.Get<uint32_t>();
        words.SetValue(kControlMagicWord, kControlMagic);
        words.SetValue(kControlEpochWord, epoch);
        SyncFunc<HardEvent::S_MTE3>();
        AscendC::DataCopy(control_, words, kBlockWords);
    }

private:
    GlobalTensor<uint32_t> control_;
    UbBuf buf_;
};

}  // namespace moe

#endif  // ASCEND_MOE_COMMON_CONTEXTS_H
