// What the op compiler generates around a kernel entry on the NPU: tiling, tiling keys, kernel types,
// context.
#pragma once

#include <cstddef>
#include <cstring>

#include "twin/api/copy.h"

// A declared poll: the awaited value has not come, so other cores must run. On an NPU this macro does
// nothing.
#define TWIN_POLL_HINT() twin::PollYield(twin::Loc::Here())
#ifndef TWIN_TIMED
#define TWIN_POLL_SLEEPS twin::PollSleeps()  // after so many failed polls a core sleeps until something changes
#endif
// A kernel gives the step that it begins a name.
#define TWIN_PHASE(name) twin::MarkPhase(name)
// A kernel counts a core barrier of its rank that is no SyncAll.
#define TWIN_CORE_BARRIER() ++twin::current_core().core_barriers

#define GET_TILING_DATA_WITH_STRUCT(Struct, name, address) \
    Struct name;                                           \
    AscendC::detail::CopyTiling(&(name), (address), sizeof(name), twin::Loc::Here())
#define GET_TILING_DATA_PTR_WITH_STRUCT(Struct, name, address)          \
    GET_TILING_DATA_WITH_STRUCT(Struct, twin_tiling_##name, (address)); \
    const Struct* name = &twin_tiling_##name
#define GET_TILING_DATA_MEMBER(Struct, member, name, address) \
    decltype(Struct::member) name;                            \
    AscendC::detail::CopyTiling(&(name), (address) + offsetof(Struct, member), sizeof(name), twin::Loc::Here())
// GET_TILING_DATA without a struct uses the registered one, or -DTWIN_TILING_STRUCT=Name where the op's build
// generates it.
#ifdef TWIN_TILING_STRUCT
#define GET_TILING_DATA(name, address) GET_TILING_DATA_WITH_STRUCT(TWIN_TILING_STRUCT, name, address)
#else
#define GET_TILING_DATA(name, address) \
    GET_TILING_DATA_WITH_STRUCT(TWIN_TILING_STRUCT_is_not_registered_by_REGISTER_TILING_DEFAULT, name, address)
#endif
#define TILING_KEY_IS(key) (twin::TilingKey() == static_cast<uint64_t>(key))
#define TILING_KEY_VAR twin::TilingKey()
#define REGISTER_TILING_DEFAULT(Struct)                                             \
    static_assert(std::is_trivially_copyable<Struct>::value, "tiling must be POD"); \
    using TWIN_TILING_STRUCT_is_not_registered_by_REGISTER_TILING_DEFAULT [[maybe_unused]] = Struct
#define REGISTER_TILING_FOR_TILINGKEY(expression, Struct) \
    static_assert(std::is_trivially_copyable<Struct>::value, "tiling must be POD")
enum KernelMetaType : uint8_t {
    KERNEL_TYPE_AIV_ONLY,
    KERNEL_TYPE_AIC_ONLY,
    KERNEL_TYPE_MIX_AIV_1_0,
    KERNEL_TYPE_MIX_AIC_1_0,
    KERNEL_TYPE_MIX_AIC_1_1,
    KERNEL_TYPE_MIX_AIC_1_2
};
#define KERNEL_TASK_TYPE_DEFAULT(type)                                                 \
    static_assert((type) == KERNEL_TYPE_AIV_ONLY || (type) == KERNEL_TYPE_MIX_AIV_1_0, \
                  "the twin has vector cores only: AIV_ONLY or MIX_AIV_1_0")
#define KERNEL_TASK_TYPE(key, type) KERNEL_TASK_TYPE_DEFAULT(type)

namespace twin {
// Calls an instance of a template kernel with the words of a launch.
template <class... P, class... W>
inline void CallInstance(void (*entry)(P...), W... words) {
    entry((P)words...);
}
}  // namespace twin

// What tiling structs of communicating kernels begin with. The host fills both blocks; a kernel passes them
// on.
struct Mc2InitTiling {
    uint8_t reserved[64] = {};
};
#ifndef TWIN_CC_TILING_BYTES
#define TWIN_CC_TILING_BYTES 280  // 512 in newer toolkits
#endif
struct Mc2CcTiling {
    uint8_t reserved[TWIN_CC_TILING_BYTES] = {};
};

namespace AscendC {
namespace tiling {
using ::Mc2CcTiling;
using ::Mc2InitTiling;
}  // namespace tiling
}  // namespace AscendC

namespace AscendC {

constexpr int HCCL_GROUP_ID_0 = 0;
constexpr int HCCL_GROUP_ID_1 = 1;

// Each core has this variable; the launch sets it to the context of the group.
template <uint32_t index>
inline void SetHcclContext(GM_ADDR context) {
    if constexpr (index <= 1) twin::current_core().hccl_context[index] = reinterpret_cast<uintptr_t>(context);
}
template <uint32_t index>
inline GM_ADDR GetHcclContext() {
    if constexpr (index > 1) return nullptr;
    const uintptr_t own = twin::current_core().hccl_context[index & 1];
    return reinterpret_cast<GM_ADDR>(own != 0 ? own : twin::HcclContext(index));
}

// The whole workspace of a launch belongs to the user: the system takes no part of it.
inline GM_ADDR GetUserWorkspace(GM_ADDR workspace) { return workspace; }
inline void SetSysWorkspace(GM_ADDR) {}
inline void SetSysWorkspaceForce(GM_ADDR) {}

namespace detail {
inline void CopyTiling(void* to, GM_ADDR from, size_t bytes, const twin::Loc& loc) {
    GlobalTensor<uint8_t> source;
    source.SetGlobalBuffer(from, bytes);
    memcpy(to, source.Span(bytes, loc, "GET_TILING_DATA").first, bytes);
}
}  // namespace detail
}  // namespace AscendC
