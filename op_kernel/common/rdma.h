// HCCL's server, which carries data between the servers of an A2 cluster: BatchWrite copies items of this
// rank's windowsOut to its peers' windowsIn. Core 0 alone talks to it, and owes it a Finalize in every launch
// on an A2 context, whether or not anything was posted.
#ifndef ASCEND_MOE_DISTRIBUTE_RDMA_H
#define ASCEND_MOE_DISTRIBUTE_RDMA_H

#include "contexts.h"

// The header of Hccl<> has moved between toolkits.
#if __has_include("lib/hccl/hccl.h")
#include "lib/hccl/hccl.h"
#else
#include "adv_api/hccl/hccl.h"
#endif

namespace moe {

inline constexpr AscendC::HcclServerConfig kServerClient = {AscendC::CoreType::DEFAULT, 0};  // core 0

class RdmaLink {
public:
    using Server = AscendC::Hccl<AscendC::HCCL_SERVER_TYPE_AICPU, kServerClient>;

    // `head` is the copy of the tiling's head in this core's memory, `tiling` the tiling in GM: newer
    // toolkits take the one, older ones the other.
    __aicore__ inline void Open(GM_ADDR context, GM_ADDR tiling, const MoeDistributeMc2Head& head) {
        slot_.server = Server();
        Start(slot_.server, context, tiling, head, 0);
        open_ = true;
    }
    // Hands a list of `count` items in GM to the server. Everything they copy must have drained.
    __aicore__ inline void Post(GM_ADDR list, uint32_t count) {
        if (count > 0) slot_.server.BatchWrite(list, count);
    }
    // Returns when all that was posted has left; the server may go then.
    __aicore__ inline void Close() {
        if (open_) slot_.server.Finalize();
        open_ = false;
    }

private:
    // The server's object is only made where it is used: most launches have none.
    union Slot {
        __aicore__ inline Slot() {}
        Server server;
    };

    template <typename S>
    static __aicore__ inline auto Start(S& server, GM_ADDR context, GM_ADDR, const MoeDistributeMc2Head& head,
                                        int) -> decltype(server.InitV2(context, &head)) {
        server.InitV2(context, &head);
        server.SetCcTilingV2(sizeof(head.init));
    }
    template <typename S>
    static __aicore__ inline void Start(S& server, GM_ADDR context, GM_ADDR tiling,
                                        const MoeDistributeMc2Head& head, long) {
        server.Init(context, tiling);
        server.SetCcTiling(tiling + sizeof(head.init));
    }

    Slot slot_;
    bool open_ = false;
};

}  // namespace moe

#endif  // ASCEND_MOE_DISTRIBUTE_RDMA_H
