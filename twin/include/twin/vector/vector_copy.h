// DataCopy within UB by DataCopyParams: a vector instruction.
#pragma once

#include "twin/api/copy.h"
#include "twin/vector/vector_call.h"

namespace AscendC {

template <class T>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
                     twin::Loc loc = twin::Loc::Here()) {
    constexpr const char* kName = "DataCopy UB->UB";
    detail::CheckPieces(params.blockCount, 0, 1, loc);
    const uint32_t count = params.blockCount;
    const uint64_t bytes = detail::Blocks(params.blockLen);
    if (count == 0 || bytes == 0) return;
    const uint64_t from_step = bytes + detail::Blocks(params.srcGap),
                   to_step = bytes + detail::Blocks(params.dstGap);
    const uint64_t from_bytes = detail::Extent(count, bytes, from_step),
                   to_bytes = detail::Extent(count, bytes, to_step);
    const uintptr_t to = reinterpret_cast<uintptr_t>(dst.Span(to_bytes / sizeof(T), loc, kName));
    const uintptr_t from = reinterpret_cast<uintptr_t>(src.Span(from_bytes / sizeof(T), loc, kName));
    if (to != from || to_step != from_step)
        detail::CheckApart(kName, "source", to, to_bytes, from, from_bytes, loc);
    const auto access = [=](uintptr_t begin, uint64_t step) {
        return step == bytes ? twin::Access{begin, count * bytes} : twin::Access{begin, bytes, count, step};
    };
    twin::Issue({kName,
                 twin::Pipe::kV,
                 loc,
                 {0, count * bytes / sizeof(T)},
                 access(to, to_step),
                 {access(from, from_step)}},
                [=] {
                    for (uint32_t i = 0; i < count; ++i) {
                        std::memmove(detail::UbPointer<T>(to + i * to_step),
                                     detail::UbPointer<T>(from + i * from_step), bytes);
                    }
                });
}

}  // namespace AscendC
