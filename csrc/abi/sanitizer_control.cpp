// Errors on purpose: proof that a sanitized build notices them. In any other build there is nothing here.
#include "ascend_moe.h"

#ifdef ASCEND_MOE_SANITIZE

#include <climits>
#include <memory>
#include <thread>

#include "twin/engine/atomic_store.h"
#include "twin/engine/launch.h"

namespace {

int PastTheEnd(bool wrong) {
    volatile int index = wrong ? 4 : 0;  // volatile: the compiler must not see the error coming
    const std::unique_ptr<int[]> block(new int[4]());
    return block[static_cast<size_t>(index)];
}

int Overflow() {
    volatile int large = INT_MAX;
    return large + 1;
}

// A row and the status block that announces it, as in a window.
struct Message {
    alignas(twin::kBlockBytes) uint32_t status[twin::kBlockBytes / sizeof(uint32_t)] = {};
    int row = 0;
};

bool Announced(const Message& message) {
    uint32_t words[twin::kBlockBytes / sizeof(uint32_t)];
    twin::ReadBlocks(reinterpret_cast<uint8_t*>(words), reinterpret_cast<const uint8_t*>(message.status),
                     sizeof(words));
    return words[0] != 0;
}

// Two ranks of two cores: the second core of rank 1 writes a row and announces it; the second core of rank 0 reads the
// row, after polling the status block or without waiting for it.
int RanksHandOver(bool wait) {
    Message message;
    int got = 0;
    std::thread sender([&] {
        twin::LaunchSpec spec;
        spec.block_dim = 2;
        twin::Device(1).Launch(spec, [&] {
            twin::SyncAllCores(twin::Loc::Here());
            if (twin::current_core().index != 1) return;
            message.row = 7;
            const uint32_t status[twin::kBlockBytes / sizeof(uint32_t)] = {1};
            twin::PublishBlocks(reinterpret_cast<uint8_t*>(message.status), reinterpret_cast<const uint8_t*>(status),
                                sizeof(status));
        });
    });
    twin::LaunchSpec spec;
    spec.block_dim = 2;
    twin::Device(0).Launch(spec, [&] {
        if (twin::current_core().index != 1) return;
        while (wait && !Announced(message)) twin::PollYield(twin::Loc::Here());
        got = message.row;
    });
    sender.join();
    return got;
}

}  // namespace

// 0: nothing wrong. 1: reads past the end of a heap block. 2: overflows a signed int. 3: a core reads another
// rank's row unannounced. 4: the same row, announced: nothing wrong.
int am_sanitizer_control(int which) {
    switch (which) {
        case 0: return PastTheEnd(false);
        case 1: return PastTheEnd(true);
        case 2: return Overflow();
        case 3: return RanksHandOver(false);
        case 4: return RanksHandOver(true) == 7 ? 0 : 1;
        default: return 1;
    }
}

#endif
