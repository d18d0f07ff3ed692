// The tiling function of both ops: describes the call, plans it with the code that the twin uses, hands the
// bytes to CANN.
#pragma once

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
#include "platform.h"
#include "../rules/plan.h"

namespace moe {

// How HCCL is to set up the communicator: opType and algorithm of the one communication task of the kernel.
// A3 reads and writes its peers' windows itself, A2 reaches other servers by BatchWrite.
struct Mc2Task {
    uint32_t opType;
    const char* algorithm;
};
constexpr Mc2Task kMc2TaskA3 = {8, "AlltoAll=level0:fullmesh;level1:pairwise"};
constexpr Mc2Task kMc2TaskA2 = {18, "BatchWrite=level0:fullmesh"};
constexpr uint32_t kBatchMode = 1;  // schedule mode: all cores start together, since they wait for each other

inline bool FillMc2Head(const char* op, const char* group, const Mc2Task& task, MoeDistributeMc2Head& head) {
    static_assert(sizeof(::Mc2InitTiling) <= sizeof(head.init), "MoeDistributeMc2Head::init is too small");
    static_assert(sizeof(::Mc2CcTiling) <= sizeof(head.cc), "MoeDistributeMc2Head::cc is too small");
    AscendC::Mc2CcTilingConfig config(group, task.opType, task.algorithm);
    if (config.GetTiling(*reinterpret_cast<::Mc2InitTiling*>(head.init)) == 0 &&
        config.GetTiling(*reinterpret_cast<::Mc2CcTiling*>(head.cc)) == 0) {
        return true;
    }
    return ReportError(op, "CANN refuses the communication tiling of group_ep; its log says why");
}

// SoC, window and deadline into the call; what cannot be known or is no number is an error.
inline bool DescribeMachine(const char* op, const SocName& soc, const CannAttributes& given, CallSpec& call) {
    if (!soc.IsA2() && !soc.IsA3()) {
        return ReportError(op, "the SoC is %s, the kernels are built for Ascend910B and Ascend910_93",
                           soc.text[0] != '\0' ? soc.text : "unknown");
    }
    call.window_mib = WindowMiBOf(given.window_mib);
    if (call.window_mib < 0) {
        return ReportError(op,
                           "HCCL_BUFFSIZE is no whole number of MiB above 0: export it alike on all ranks");
    }
    call.deadline_micros = DeadlineMicrosOf(given.timeout_us);
    if (call.deadline_micros < 0) {
        return ReportError(op, "ASCEND_MOE_TIMEOUT_S is no number of seconds above 0");
    }
    call.context_kind = static_cast<int32_t>(soc.IsA2() ? kContextA2 : kContextA3);
    call.ranks_per_server = soc.IsA2() ? static_cast<int32_t>(kA2RanksPerServer) : 0;
    if (soc.IsA2()) call.window_mib -= kA2StateMiB;
    if (call.window_mib > 0) return true;
    return ReportError(op, "HCCL_BUFFSIZE is %lld, it must be more than %lld on Ascend910B",
                       static_cast<long long>(kA2StateMiB), static_cast<long long>(kA2StateMiB));
}

inline bool HandOver(const char* op, gert::TilingContext& context, const CallPlan& plan,
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
    return true;
}

inline bool Tile(gert::TilingContext& context, uint32_t code) {
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
    CallPlan plan;
    CheckResult check;
    if (!PlanCall(call, plan, check)) return ReportError(op, "%s", check.message);
    const bool dispatch = code == kOpDispatch;
    MoeDistributeMc2Head& head = dispatch ? plan.dispatch.mc2 : plan.combine.mc2;
    if (!FillMc2Head(op, given.group_ep, soc.IsA2() ? kMc2TaskA2 : kMc2TaskA3, head)) return false;
    const void* bytes = dispatch ? static_cast<const void*>(&plan.dispatch) : &plan.combine;
    const size_t size = dispatch ? sizeof(plan.dispatch) : sizeof(plan.combine);
    return HandOver(op, context, plan, platform, bytes, size);
}

inline ge::graphStatus TileCall(gert::TilingContext* context, uint32_t code) {
    return context != nullptr && Tile(*context, code) ? ge::GRAPH_SUCCESS : ge::GRAPH_FAILED;
}

}  // namespace moe
