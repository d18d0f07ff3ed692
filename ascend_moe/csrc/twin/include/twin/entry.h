// What the op compiler generates around a kernel entry on the NPU: tiling, tiling keys, kernel types,
// context.
#pragma once

#include <cstring>

#include "twin/copy.h"

// A declared poll: the wait found nothing, so somebody else must run. Nothing of the kind exists on an NPU.
#define TWIN_POLL_HINT() twin::PollYield(twin::Loc::Here())

#define GET_TILING_DATA_WITH_STRUCT(Struct, name, address) \
    Struct name;                                           \
    AscendC::detail::CopyTiling(&(name), (address), sizeof(name), twin::Loc::Here())
#define TILING_KEY_IS(key) (twin::TilingKey() == static_cast<uint64_t>(key))
#define REGISTER_TILING_DEFAULT(Struct) \
    static_assert(std::is_trivially_copyable<Struct>::value, "tiling must be POD")
#define REGISTER_TILING_FOR_TILINGKEY(expression, Struct) REGISTER_TILING_DEFAULT(Struct)
enum KernelMetaType : uint8_t { KERNEL_TYPE_AIV_ONLY = 1, KERNEL_TYPE_MIX_AIV_1_0 };
#define KERNEL_TASK_TYPE_DEFAULT(type) static_assert((type) > 0, "unknown kernel type")
#define KERNEL_TASK_TYPE(key, type) KERNEL_TASK_TYPE_DEFAULT(type)

namespace AscendC {

constexpr int HCCL_GROUP_ID_0 = 0;
constexpr int HCCL_GROUP_ID_1 = 1;

template <uint32_t index>
inline GM_ADDR GetHcclContext() {
    return twin::GmOf(reinterpret_cast<uint8_t*>(twin::HcclContext(index)));
}

namespace detail {
inline void CopyTiling(void* to, GM_ADDR from, size_t bytes, const twin::Loc& loc) {
    GlobalTensor<uint8_t> source;
    source.SetGlobalBuffer(from, bytes);
    memcpy(to, source.Span(bytes, loc, "GET_TILING_DATA").first, bytes);
}
}  // namespace detail
}  // namespace AscendC
