// The tiling function of both ops: describes the call, plans it with the emulator's code, and passes the bytes to CANN.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tiling/platform/platform_ascendc.h"
#if defined(__has_include)
#if __has_include("tiling/hccl/hccl_tiling.h")
#include "tiling/hccl/hccl_tiling.h"
#elif __has_include("adv_api/hccl/hccl_tiling.h")
#include "adv_api/hccl/hccl_tiling.h"
#else
#include "lib/hccl/hccl_tiling.h"
#endif
#endif

#include "call.h"
#include "../rules/plan.h"

// PlatformAscendC::GetSocVersion returns the same value for A2 and A3, by its documentation. The platform's own table
// distinguishes them, and so does the runtime if it is loaded.
#if defined(__has_include)
#if __has_include("platform/platform_infos_def.h")
#include "platform/platform_infos_def.h"
#define ASCEND_MOE_HAS_PLATFORM_INFOS 1
#endif
#endif
extern "C" __attribute__((weak)) const char* aclrtGetSocName();
extern "C" __attribute__((weak)) int aclrtGetOpExecuteTimeout(uint32_t* milliseconds);
// aclCANNPackageVersion: the version as text, then its parts.
struct AclPackageVersion {
    char text[128];
    char rest[512];
};
extern "C" __attribute__((weak)) int aclsysGetCANNVersion(int package, AclPackageVersion* version);

namespace moe {

// ---- which links HCCL makes for a group, once, for its first launch: the algConfig of its communication task

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

// ---- what the tiling function must know of the machine: SoC family, vector cores, window, deadline ----

constexpr int64_t kDefaultWindowMiB = 200;  // HCCL's own default of HCCL_BUFFSIZE
constexpr int64_t kA2StateMiB = 1;          // the last MiB of windowsIn; A3 has an area of its own for it
constexpr int64_t kMicros = 1000 * 1000;
constexpr int64_t kLongestWaitSeconds = 300, kTimeoutMarginSeconds = 10;

struct SocName {
    char text[64];
    bool IsA3() const { return strncmp(text, "Ascend910_93", 12) == 0; }
    bool IsA2() const { return strncmp(text, "Ascend910B", 10) == 0; }
};

// "Ascend910B" or "Ascend910_93", possibly with a model number after it; empty if unknown.
inline SocName SocOf(fe::PlatFormInfos* platform) {
    SocName soc = {};
    std::string name;
#ifdef ASCEND_MOE_HAS_PLATFORM_INFOS
    if (platform != nullptr) platform->GetPlatformRes("version", "Short_SoC_version", name);
#else
    (void)platform;
#endif
    if (name.empty() && aclrtGetSocName != nullptr) {
        const char* running = aclrtGetSocName();
        if (running != nullptr) name = running;
    }
    name.copy(soc.text, sizeof(soc.text) - 1);
    return soc;
}

// A number above zero from the environment, otherwise `otherwise`; -1 if the text is not such a number.
inline double NumberFromEnvironment(const char* name, double otherwise) {
    const char* text = getenv(name);
    if (text == nullptr || *text == '\0') return otherwise;
    char* end = nullptr;
    errno = 0;
    const double value = strtod(text, &end);
    return errno == 0 && end != text && *end == '\0' && value > 0 ? value : -1;
}

// MiB of a communicator's window from HCCL_BUFFSIZE; -1 if it is not a whole number.
inline int64_t WindowMiBOf(int64_t attribute) {
    if (attribute > 0) return attribute;
    const double given = NumberFromEnvironment("HCCL_BUFFSIZE", static_cast<double>(kDefaultWindowMiB));
    const int64_t whole = given > 0 && given < 1e9 ? static_cast<int64_t>(given) : -1;
    return static_cast<double>(whole) == given ? whole : -1;
}

// MiB of a window for tensors of window_empty; -1 if it is not a whole number.
inline int64_t RegisteredMiBOf() {
    const char* text = getenv("ASCEND_MOE_REGISTERED_MIB");
    if (text == nullptr || *text == '\0') return 0;
    char* end = nullptr;
    const long long given = strtoll(text, &end, 10);
    return *end == '\0' && given >= 0 && given < 1000000000 ? given : -1;
}

// Longest wait of a kernel: PROTOCOL's rule, the smaller of 300 s and the op-execute timeout less 10 s, unless the call
// or ASCEND_MOE_TIMEOUT_S sets it. -1 if the latter is no number above 0.
inline int64_t DeadlineMicrosOf(int64_t attribute) {
    if (attribute > 0) return attribute;
    const double given = NumberFromEnvironment("ASCEND_MOE_TIMEOUT_S", 0);
    if (given != 0) return given > 0 && given < 1e9 ? std::max<int64_t>(1, static_cast<int64_t>(given * kMicros)) : -1;
    int64_t seconds = kLongestWaitSeconds;
    uint32_t milliseconds = 0;
    if (aclrtGetOpExecuteTimeout != nullptr && aclrtGetOpExecuteTimeout(&milliseconds) == 0 && milliseconds > 0) {
        seconds = std::min(seconds, std::max<int64_t>(1, milliseconds / 1000 - kTimeoutMarginSeconds));
    }
    return seconds * kMicros;
}

// 1 if a variable that may be 0 or 1 is 1.
inline int32_t SwitchedOn(const char* variable) {
    const char* text = getenv(variable);
    return text != nullptr && strcmp(text, "1") == 0 ? 1 : 0;
}

// The core barrier: ASCEND_MOE_CORE_BARRIER, otherwise the faster one by this machine's probe results.
inline int32_t CoreBarrierOf(int64_t attribute) {
    const char* text = getenv("ASCEND_MOE_CORE_BARRIER");
    const bool given = text != nullptr && *text != '\0';
    const bool sync = given ? strcmp(text, "syncall") == 0 : attribute == kBarrierBySyncAll + 1;
    return static_cast<int32_t>(sync ? kBarrierBySyncAll : kBarrierByBlocks);
}

// ---- the tiling itself ----

constexpr uint32_t kBatchMode = 1;  // schedule mode: all cores start together, since they wait for each other
// AICPU threads of a launch above kAiCpuRanks ranks on A2; two of them post items, without this value only one.
constexpr uint32_t kAiCpuRanks = 8, kAiCpuBlocks = 6;

// Whether the installed HCCL knows level1 in an algConfig; true if its version is unknown.
inline bool HasLevels() {
    constexpr int kHccl = 3;  // ACL_PKG_NAME_HCCL
    AclPackageVersion version = {};
    int32_t major = 0, minor = 0;
    if (aclsysGetCANNVersion == nullptr || aclsysGetCANNVersion(kHccl, &version) != 0) return true;
    if (sscanf(version.text, "%d.%d", &major, &minor) != 2) return true;
    return major > kLevelsMajor || (major == kLevelsMajor && minor >= kLevelsMinor);
}

// Whether HCCL_INTRA_PCIE_ENABLE and HCCL_INTRA_ROCE_ENABLE make HCCL map the windows of the own server.
inline bool VariablesMapServer() {
    const char *pcie = getenv("HCCL_INTRA_PCIE_ENABLE"), *roce = getenv("HCCL_INTRA_ROCE_ENABLE");
    return pcie != nullptr && strcmp(pcie, "1") == 0 && (roce == nullptr || strcmp(roce, "0") == 0);
}

// The task of a launch whose kernel stores to `intraNodeRanks` ranks, of groups with `ranksPerServer` a server. Null:
// it is refused, because this toolkit cannot make these links.
inline const Mc2Task* TaskOf(const char* op, const SocName& soc, uint32_t world, uint32_t ranksPerServer,
                             uint32_t intraNodeRanks) {
    if (!soc.IsA2()) return &kMc2TaskA3;
    if (ranksPerServer == 0 || ranksPerServer >= world) return &kMc2TaskA2;
    const bool stores = intraNodeRanks > 1;
    if (HasLevels()) return stores ? &kMc2Stores : &kMc2Rdma;
    const bool alone = ranksPerServer == 1;  // no window to map, and RDMA to all others with either links
    if (alone || VariablesMapServer() == stores) return &kMc2TaskA2;
    ReportError(op, "%u ranks with %u a server: %s", world, ranksPerServer,
                stores ? "stores within a server (comm_alg 'hierarchy', ASCEND_MOE_INTRA_NODE_STORES=1, a probe) need "
                         "CANN 8.3, or HCCL_INTRA_PCIE_ENABLE=1 and HCCL_INTRA_ROCE_ENABLE=0 on all ranks before the "
                         "group is made"
                       : "RDMA between all ranks (comm_alg 'window') needs CANN 8.3 where HCCL_INTRA_PCIE_ENABLE is 1 "
                         "and HCCL_INTRA_ROCE_ENABLE 0: unset both on all ranks before the group is made");
    return nullptr;
}

// Available in newer toolkits: the communication engine of a task, and the number of AICPU threads of a launch.
template <typename Config>
auto SetEngine(Config& config, uint32_t engine, int) -> decltype(config.SetCommEngine(uint8_t{0})) {
    return config.SetCommEngine(static_cast<uint8_t>(engine));
}
template <typename Config>
uint32_t SetEngine(Config&, uint32_t, long) {
    return 0;
}
template <typename Context>
auto SetAiCpuBlocks(Context& context, uint32_t blocks, int) -> decltype(context.SetAicpuBlockDim(blocks)) {
    return context.SetAicpuBlockDim(blocks);
}
template <typename Context>
uint32_t SetAiCpuBlocks(Context&, uint32_t, long) {
    return 0;
}

inline bool FillMc2Head(const char* op, const char* group, const Mc2Task& task, MoeDistributeMc2Head& head) {
    static_assert(sizeof(::Mc2InitTiling) <= sizeof(head.init), "MoeDistributeMc2Head::init is too small");
    static_assert(sizeof(::Mc2CcTiling) <= sizeof(head.cc), "MoeDistributeMc2Head::cc is too small");
    AscendC::Mc2CcTilingConfig config(group, task.opType, task.algorithm);
    if (SetEngine(config, task.engine, 0) == 0 &&
        config.GetTiling(*reinterpret_cast<::Mc2InitTiling*>(head.init)) == 0 &&
        config.GetTiling(*reinterpret_cast<::Mc2CcTiling*>(head.cc)) == 0) {
        return true;
    }
    return ReportError(op, "CANN refuses the communication tiling of group_ep; its log says why");
}

// How many ranks of the group share a server. Only A2's transport depends on it, and no default is safe: loads and
// stores do not reach other servers. Servers of unequal sizes are refused, as in Python (ascend_moe/comm/servers.py).
inline bool DescribeServers(const char* op, const SocName& soc, const CannAttributes& given, CallSpec& call) {
    call.ranks_per_server = 0;
    const int64_t world = MOE_ATTRIBUTE(call, ep_world_size), ranks = given.ranks_per_server;
    if (!soc.IsA2() || world < 1 || world > kMaxWorld) return true;  // the rules refuse such a world
    if (ranks < 1 || ranks > world || world % ranks != 0) {
        return ReportError(op,
                           "ranks_per_server is %lld, it must divide the %lld ranks of group_ep: on Ascend910B it says "
                           "how many of them share each server",
                           static_cast<long long>(ranks), static_cast<long long>(world));
    }
    call.ranks_per_server = static_cast<int32_t>(ranks);
    return true;
}

// Writes SoC, window, deadline and servers into the call; reports what is unknown or no number.
inline bool DescribeMachine(const char* op, const SocName& soc, const CannAttributes& given, CallSpec& call) {
    if (!soc.IsA2() && !soc.IsA3()) {
        return ReportError(op, "the SoC is %s, the kernels are built for Ascend910B and Ascend910_93",
                           soc.text[0] != '\0' ? soc.text : "unknown");
    }
    call.window_mib = WindowMiBOf(given.window_mib);
    if (call.window_mib < 0) {
        return ReportError(op, "HCCL_BUFFSIZE is no whole number of MiB above 0: export it alike on all ranks");
    }
    call.deadline_micros = DeadlineMicrosOf(given.timeout_us);
    if (call.deadline_micros < 0) {
        return ReportError(op, "ASCEND_MOE_TIMEOUT_S is no number of seconds above 0");
    }
    call.context_kind = static_cast<int32_t>(soc.IsA2() ? kContextA2 : kContextA3);
    if (!DescribeServers(op, soc, given, call)) return false;
    call.intra_node_stores = SwitchedOn("ASCEND_MOE_INTRA_NODE_STORES");
    call.core_barrier = CoreBarrierOf(given.core_barrier);
    call.timestamps = SwitchedOn("ASCEND_MOE_TIMESTAMPS");
    call.rdma_flags = SwitchedOn("ASCEND_MOE_RDMA_FLAGS");
    call.registered_mib = RegisteredMiBOf();
    if (call.registered_mib < 0) return ReportError(op, "ASCEND_MOE_REGISTERED_MIB is no whole number of MiB");
    const int64_t taken = (soc.IsA2() ? kA2StateMiB : 0) + call.registered_mib;
    call.window_mib -= taken;
    if (call.window_mib > 0) return true;
    return ReportError(op,
                       "HCCL_BUFFSIZE is %lld, it must be more than %lld: the state area of Ascend910B and "
                       "ASCEND_MOE_REGISTERED_MIB are part of it",
                       static_cast<long long>(call.window_mib + taken), static_cast<long long>(taken));
}

// `aiCpu`: whether HCCL's server has work for more than one thread.
inline bool HandOver(const char* op, gert::TilingContext& context, const CallPlan& plan, bool aiCpu,
                     platform_ascendc::PlatformAscendC& platform, const void* bytes, size_t size) {
    gert::TilingData* raw = context.GetRawTilingData();
    size_t* workspace = context.GetWorkspaceSizes(1);
    if (raw == nullptr || workspace == nullptr || raw->GetCapacity() < size) {
        return ReportError(op, "CANN has room for %zu bytes of tiling data, it needs %zu",
                           raw == nullptr ? size_t(0) : raw->GetCapacity(), size);
    }
    memcpy(raw->GetData(), bytes, size);
    raw->SetDataSize(size);
    workspace[0] = platform.GetLibApiWorkSpaceSize() + plan.workspaceBytes;
    context.SetTilingKey(plan.tilingKey);
    context.SetBlockDim(platform.CalcTschBlockDim(plan.blockDim, 0, plan.blockDim));
    context.SetScheduleMode(kBatchMode);
    if (aiCpu) SetAiCpuBlocks(context, kAiCpuBlocks, 0);
    return true;
}

inline bool TileCall(gert::TilingContext& context, uint32_t code) {
    const char* op = InterfaceOf(code).type;
    CallSpec call;
    CannAttributes given;
    if (!ReadCall(context, code, call, given)) return false;
    fe::PlatFormInfos* infos = context.GetPlatformInfo();
    if (infos == nullptr) return ReportError(op, "the context has no platform");
    const SocName soc = SocOf(infos);
    platform_ascendc::PlatformAscendC platform(infos);
    if (!DescribeMachine(op, soc, given, call)) return false;
    call.cores = platform.GetCoreNumAiv();
    uint64_t ubBytes = 0;
    platform.GetCoreMemSize(platform_ascendc::CoreMemType::UB, ubBytes);
    call.ub_bytes = static_cast<int32_t>(ubBytes);
    CallPlan plan;
    CheckResult check;
    if (!PlanCall(call, plan, check)) return ReportError(op, "%s", check.message);
    const bool dispatch = code == kOpDispatch;
    MoeDistributeMc2Head& head = dispatch ? plan.dispatch.mc2 : plan.combine.mc2;
    const MoeDistributeInfo& info = plan.info();
    const Mc2Task* task = TaskOf(op, soc, info.world, info.ranksPerServer, info.intraNodeRanks);
    if (task == nullptr || !FillMc2Head(op, given.group_ep, *task, head)) return false;
    const void* bytes = dispatch ? static_cast<const void*>(&plan.dispatch) : &plan.combine;
    const size_t size = dispatch ? sizeof(plan.dispatch) : sizeof(plan.combine);
    return HandOver(op, context, plan, soc.IsA2() && info.world > kAiCpuRanks, platform, bytes, size);
}

template <uint32_t kCode>
ge::graphStatus Tile(gert::TilingContext* context) {
    return context != nullptr && TileCall(*context, kCode) ? ge::GRAPH_SUCCESS : ge::GRAPH_FAILED;
}

}  // namespace moe
