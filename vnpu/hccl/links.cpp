// How HCCL links the ranks of a server in a communicator of an A2: by memory, with windows that are mapped, or by RDMA,
// with windows that only BatchWrite reaches. Lines are those of github.com/libochao-huawei/hcomm, src/legacy/ascend910.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "comm.h"

namespace {

enum class Servers { kOne, kSeveral };
enum class Variables { kAny, kMapping, kOthers };  // HCCL_INTRA_PCIE_ENABLE=1 with HCCL_INTRA_ROCE_ENABLE 0 or not set

struct Row {
    const char* alg_config;  // null: any, it is not read
    Servers
        servers;  // HCCL counts modules of 8 devices: framework/communicator/.../hccl_communicator_attrs_host.cc:462
    Variables variables;
    int major, minor;  // of the first CANN whose HCCL has the name
    bool mapped;
};

constexpr Row kRows[] = {
    // framework/op_base/src/op_base.cc:4947: algConfig is read where there are several.
    {nullptr, Servers::kOne, Variables::kAny, 0, 0, true},
    // framework/communicator/impl/hccl_communicator_host.cc:7346-7351, and comm_factory.cc:445 of the links it leads to
    {"BatchWrite=level0:fullmesh", Servers::kSeveral, Variables::kMapping, 0, 0, true},
    // algorithm/base/communicator/legacy/comm_factory.cc:448
    {"BatchWrite=level0:fullmesh", Servers::kSeveral, Variables::kOthers, 0, 0, false},
    // hccl_communicator.cc:75, hccl_communicator_host.cc:7349
    {"BatchWrite=level1:hierarchy", Servers::kSeveral, Variables::kAny, 8, 3, true},
    // hccl_communicator.cc:74, comm_factory.cc:448
    {"BatchWrite=level1:fullmesh", Servers::kSeveral, Variables::kAny, 8, 3, false},
};

bool Is(const char* variable, const char* wanted, bool or_unset) {
    const char* text = std::getenv(variable);
    return text == nullptr ? or_unset : std::strcmp(text, wanted) == 0;
}

// Of $ASCEND_MOE_VNPU_CANN, the CANN whose HCCL this one is to be; without it the newest.
bool Has(const Row& row) {
    const char* text = std::getenv("ASCEND_MOE_VNPU_CANN");
    int major = 0, minor = 0;
    if (text == nullptr || std::sscanf(text, "%d.%d", &major, &minor) != 2) return true;
    return major > row.major || (major == row.major && minor >= row.minor);
}

const Row* RowOf(const char* alg_config, Servers servers) {
    const bool maps = Is("HCCL_INTRA_PCIE_ENABLE", "1", false) && Is("HCCL_INTRA_ROCE_ENABLE", "0", true);
    for (const Row& row : kRows) {
        if (row.servers != servers || !Has(row)) continue;
        if (row.alg_config != nullptr && std::strcmp(row.alg_config, alg_config) != 0) continue;
        if (row.variables == Variables::kAny || (row.variables == Variables::kMapping) == maps) return &row;
    }
    return nullptr;
}

}  // namespace

int vnpu_comm_links(const char* group_name, const char* alg_config, int several_servers, int* mapped) {
    if (!group_name || !alg_config || !mapped) return vnpu::kHcclPointer;
    const std::shared_ptr<vnpu::Comm> comm = vnpu::FindByName(group_name);
    if (!comm) return vnpu::kHcclNotFound;
    const std::lock_guard<std::mutex> lock(comm->mutex);
    // hccl_communicator_host.cc:8288: what the first launch has made serves all later ones, whatever they ask for.
    if (comm->links < 0) {
        const Row* row = RowOf(alg_config, several_servers ? Servers::kSeveral : Servers::kOne);
        if (row == nullptr) {  // hccl_communicator.cc:2830
            vnpu_error("HCCL: invalid algConfig=[%s] for group %s", alg_config, group_name);
            return vnpu::kHcclParameter;
        }
        comm->links = row->mapped ? 1 : 0;
    }
    *mapped = comm->links;
    return vnpu::kHcclSuccess;
}
