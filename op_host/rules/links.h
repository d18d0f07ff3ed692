// Which links HCCL is to make for a group, as the algConfig of its communication task says. HCCL makes them once, for
// the group's first launch, and keeps them.
#pragma once

#include <cstring>

#include "protocol/tiling.h"

namespace moe {

// HCCL's numbers of the operations whose resources a launch asks for, and the engine that runs nothing on the AICPU.
constexpr uint32_t kMc2AllToAll = 8, kMc2BatchWrite = 18;
constexpr uint32_t kEngineAiCpu = 0, kEngineAiv = 3;

struct Mc2Task {
    uint32_t opType;
    const char* algorithm;
    uint32_t engine;
};
// A3 reads and writes its peers' windows itself. On A2 the AICPU carries what goes by BatchWrite.
constexpr Mc2Task kMc2TaskA3 = {kMc2AllToAll, "AlltoAll=level0:fullmesh;level1:pairwise", kEngineAiv};
// Of one server; of several, with toolkits that have no other name. There HCCL_INTRA_PCIE_ENABLE=1 with
// HCCL_INTRA_ROCE_ENABLE=0 makes it kMc2Stores, else it is kMc2Rdma.
constexpr Mc2Task kMc2TaskA2 = {kMc2BatchWrite, "BatchWrite=level0:fullmesh", kEngineAiCpu};
// Of several servers: the windows of the own server are mapped, or all ranks are reached by RDMA and none is.
constexpr Mc2Task kMc2Stores = {kMc2BatchWrite, "BatchWrite=level1:hierarchy", kEngineAiCpu};
constexpr Mc2Task kMc2Rdma = {kMc2BatchWrite, "BatchWrite=level1:fullmesh", kEngineAiCpu};

// The first toolkit whose HCCL knows level1.
constexpr int32_t kLevelsMajor = 8, kLevelsMinor = 3;

// HCCL's variables; null: not set.
struct HcclVariables {
    const char* pcie;
    const char* roce;
    bool MapsServer() const {
        return pcie != nullptr && strcmp(pcie, "1") == 0 && (roce == nullptr || strcmp(roce, "0") == 0);
    }
};

// The task of a launch on A2 whose kernel stores to `intraNodeRanks` ranks, of groups with `ranksPerServer` a server.
// Null: this toolkit cannot make these links, for the reason in `why`.
inline const Mc2Task* Mc2TaskOfA2(uint32_t world, uint32_t ranksPerServer, uint32_t intraNodeRanks, bool hasLevels,
                                  const HcclVariables& variables, const char*& why) {
    if (ranksPerServer == 0 || ranksPerServer >= world) return &kMc2TaskA2;
    const bool stores = intraNodeRanks > 1;
    if (hasLevels) return stores ? &kMc2Stores : &kMc2Rdma;
    const bool alone = ranksPerServer == 1;  // no window to map, and RDMA to all others with either links
    if (alone || variables.MapsServer() == stores) return &kMc2TaskA2;
    why = stores ? "stores within a server (comm_alg 'hierarchy', ASCEND_MOE_INTRA_NODE_STORES=1, a probe) need CANN "
                   "8.3, or "
                   "HCCL_INTRA_PCIE_ENABLE=1 and HCCL_INTRA_ROCE_ENABLE=0 on all ranks before the group is made"
                 : "RDMA between all ranks (comm_alg 'window') needs CANN 8.3 where HCCL_INTRA_PCIE_ENABLE is 1 and "
                   "HCCL_INTRA_ROCE_ENABLE 0: unset both on all ranks before the group is made";
    return nullptr;
}

}  // namespace moe
