// What a kernel sees of its communication contexts, by places in bytes and through Hccl<>.
#include "adv_api/hccl/hccl.h"
#include "moe_mc2_base.h"

using namespace Mc2Sample;

// A2: windows of 32 ranks; of more through a table of blocks of 120 bytes.
constexpr uint64_t kInsAt = 32, kOutsAt = 288, kManyAt = 8872, kBlocksAt = 8880, kBlocksBytesAt = 8888;
constexpr uint64_t kLimitAt = 8912, kBlockBytes = 120, kBlockInAt = 8, kBlockOutAt = 32, kBlockOwnAt = 56;

// words[0..7] the context's own, then in/out/exp of every rank, then in/out of every rank through Hccl<>.
template <uint32_t group>
__aicore__ inline void Show(GM_ADDR to, bool a3, uint32_t peers) {
    __gm__ uint64_t* words = (__gm__ uint64_t*)to;
    GM_ADDR context = AscendC::GetHcclContext<group>();
    if (context == nullptr) {
        words[0] = ~0ull;
        return;
    }
    AscendC::Hccl<AscendC::HCCL_SERVER_TYPE_AICPU> hccl;
    hccl.Init(context);
    words[0] = hccl.GetRankId();
    words[1] = hccl.GetRankDim();
    for (uint32_t r = 0; r < peers; ++r) {
        words[8 + 3 * peers + 2 * r] = (uint64_t)hccl.GetWindowsInAddr(r);
        words[8 + 3 * peers + 2 * r + 1] = (uint64_t)hccl.GetWindowsOutAddr(r);
    }
    words[2] = At<uint32_t>(context, kRankAt);
    words[3] = At<uint32_t>(context, kWorldAt);
    words[4] = At<uint64_t>(context, kWindowBytesAt);
    if (a3) {
        words[5] = At<uint64_t>(context, kExpBytesAt);
        words[6] = At<uint32_t>(context, kTableStartAt);
        words[7] = At<char>(context, kNameAt);
        for (uint32_t r = 0; r < peers; ++r) {
            words[8 + 3 * r] = At<uint64_t>(Peer(context, r), kPeerInAt);
            words[8 + 3 * r + 1] = At<uint64_t>(Peer(context, r), kPeerOutAt);
            words[8 + 3 * r + 2] = At<uint64_t>(Peer(context, r), kPeerExpAt);
        }
    } else {
        const bool many = At<uint8_t>(context, kManyAt) != 0;
        words[5] = many;
        words[6] = At<uint64_t>((GM_ADDR)At<uint64_t>(context, kLimitAt), 0);
        words[7] = At<uint64_t>(context, kBlocksBytesAt) / kBlockBytes;
        for (uint32_t r = 0; r < peers; ++r) {
            GM_ADDR block = (GM_ADDR)At<uint64_t>(context, kBlocksAt) + r * kBlockBytes;
            words[8 + 3 * r] = many ? At<uint64_t>(block, kBlockInAt) : At<uint64_t>(context, kInsAt + 8 * r);
            words[8 + 3 * r + 1] = many ? At<uint64_t>(block, kBlockOutAt) : At<uint64_t>(context, kOutsAt + 8 * r);
            words[8 + 3 * r + 2] = At<uint64_t>(block, kBlockOwnAt);
        }
    }
}

// tiling: peers of either group, and whether its context is an A3 one.
struct ShowTilingData {
    uint32_t peers[2];
    uint32_t a3[2];
};
extern "C" __global__ __aicore__ void show_contexts(GM_ADDR first, GM_ADDR second, GM_ADDR tiling) {
    GET_TILING_DATA_WITH_STRUCT(ShowTilingData, t, tiling);
    Show<0>(first, t.a3[0] != 0, t.peers[0]);
    Show<1>(second, t.a3[1] != 0, t.peers[1]);
}
