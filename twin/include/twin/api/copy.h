// DataCopy and DataCopyPad: GM to UB on MTE2, UB to GM on MTE3, UB to UB on V.
#pragma once

#include <cstring>

#include "twin/api/pipe.h"
#include "twin/engine/atomic_store.h"
#include "twin/engine/host_cpu.h"
#include "twin/engine/timeline.h"

namespace AscendC {

struct DataCopyParams {
    uint16_t blockCount = 1;
    uint16_t blockLen = 0;  // 32-byte units
    union {
        uint16_t srcGap;
        uint16_t srcStride;
    };
    union {
        uint16_t dstGap;
        uint16_t dstStride;
    };
    DataCopyParams() : srcGap(0), dstGap(0) {}
    DataCopyParams(uint16_t count, uint16_t len, uint16_t src, uint16_t dst)
        : blockCount(count), blockLen(len), srcGap(src), dstGap(dst) {}
};

struct DataCopyExtParams {
    uint16_t blockCount = 1;
    uint32_t blockLen = 0;   // bytes
    uint32_t srcStride = 0;  // tail to head: bytes in GM, 32-byte blocks in UB
    uint32_t dstStride = 0;
    uint32_t rsv = 0;
    DataCopyExtParams() = default;
    DataCopyExtParams(uint16_t count, uint32_t len, uint32_t src, uint32_t dst, uint32_t reserved)
        : blockCount(count), blockLen(len), srcStride(src), dstStride(dst), rsv(reserved) {}
};

template <class T>
struct DataCopyPadExtParams {
    bool isPad = false;
    uint8_t leftPadding = 0;
    uint8_t rightPadding = 0;
    T paddingValue = T();
    DataCopyPadExtParams() = default;
    DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
        : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
    // half and bfloat16_t are built in on an NPU: numbers convert to them.
    template <class V, class = std::enable_if_t<std::is_arithmetic_v<V> && !std::is_arithmetic_v<T>>>
    DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, V value)
        : DataCopyPadExtParams(pad, left, right, static_cast<T>(value)) {}
};

struct DataCopyPadParams {
    bool isPad = false;
    uint8_t leftPadding = 0;
    uint8_t rightPadding = 0;
    uint64_t paddingValue = 0;
    DataCopyPadParams() = default;
    DataCopyPadParams(bool pad, uint8_t left, uint8_t right, uint64_t value)
        : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
};

namespace detail {

constexpr uint32_t kMaxCopyBlocks = 4095;
constexpr uint32_t kMaxCopyBlockBytes = 2097151;
constexpr uint8_t kPoison = 0xA5;
constexpr uint64_t kLeastStreamed = 1024;

// A checked, strided copy: `count` pieces of `bytes`, steps in bytes on both sides.
struct Pieces {
    uint32_t count;
    uint64_t bytes;
    uint64_t gm_step;
    uint64_t ub_step;
    bool any_gm = false;  // DataCopyPad: GM at any byte, DataCopy: at multiples of the element
};

inline uint64_t Extent(uint32_t count, uint64_t bytes, uint64_t step) { return (count - 1) * step + bytes; }

// The bytes of a copy by count: whole blocks, as on an NPU.
inline uint64_t CheckCount(uint64_t bytes, const char* what, const twin::Loc& loc) {
    TWIN_RULE_IF(bytes == 0, kEmptyCopy, kBadArgument, loc, "%s of 0 bytes", what);
    TWIN_RULE_IF(bytes % twin::kBlockBytes != 0, kCopyTail, kTruncatedCopy, loc,
                 "%s of %llu bytes: the last %llu would be dropped silently; use DataCopyPad or a multiple of 32", what,
                 static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(bytes % twin::kBlockBytes));
    return bytes / twin::kBlockBytes * twin::kBlockBytes;
}

inline void CheckPieces(uint32_t count, uint64_t bytes, uint32_t element, const twin::Loc& loc) {
    TWIN_RAISE_IF(count > kMaxCopyBlocks, kBadArgument, loc, "blockCount %u is over %u", count, kMaxCopyBlocks);
    TWIN_RAISE_IF(bytes > kMaxCopyBlockBytes, kBadArgument, loc, "blockLen %llu is over %u bytes",
                  static_cast<unsigned long long>(bytes), kMaxCopyBlockBytes);
    TWIN_RULE_IF(bytes % element != 0, kPadElement, kBadArgument, loc,
                 "blockLen %llu is not a multiple of the %u-byte element", static_cast<unsigned long long>(bytes),
                 element);
}

// What a padded copy does around the bytes of each piece in UB.
struct Around {
    uint64_t left = 0;    // padding before
    uint64_t behind = 0;  // bytes up to the block end
    bool filled = true;   // with defined bytes, else with garbage
};

// Call before a copy from GM is made. True when the copy is deferred too; else deferred copies are made as
// far as this copy needs it: the order of status stores and status reads stays as the kernel wrote it.
inline bool CopyInForwarded(twin::Forward& forward, const twin::GmRange& range, const Pieces& p, const Around& around,
                            uintptr_t ub, uintptr_t gm) {
    if (__builtin_expect(forward.enabled, 1) && p.count == 1 && p.bytes >= twin::Forward::kLeastBytes &&
        around.left + around.behind == 0 && !range.atomic_blocks &&
        (range.bulk || range.kind == twin::GmKind::kWindowData || range.kind == twin::GmKind::kWindowRegistered)) {
        twin::ForwardCopy(forward, ub, gm, p.bytes);
        return true;
    }
    if (__builtin_expect(!forward.Any(), 1)) return false;
    if (range.atomic_blocks || range.kind == twin::GmKind::kWindowState) twin::ForwardComplete(forward);
    // The copy writes the padding around the pieces as well.
    const uintptr_t begin = ub - around.left;
    const uintptr_t end = ub + Extent(p.count, p.bytes + around.behind, p.ub_step);
    if (around.left + around.behind != 0 && forward.MayOverlap(begin, end)) twin::ForwardWrite(forward, begin, end);
    return false;
}
// The same before a copy to GM: once for all its pieces.
inline void CopyOutForwarded(twin::Forward& forward, const twin::GmRange& range, const Pieces& p, uintptr_t gm) {
    if (range.atomic_blocks || range.doorbell != nullptr || range.kind == twin::GmKind::kWindowState) {
        twin::ForwardComplete(forward);
    } else {
        twin::ForwardStore(forward, gm, gm + Extent(p.count, p.bytes, p.gm_step));
    }
}
// Where the bytes of a piece are: in UB, or at the GM address that a deferred copy would have read.
TWIN_HOT const uint8_t* SourceOf(const uint8_t* piece, uint64_t bytes) {
    if constexpr (!twin::kChecked) {
        twin::Forward& forward = twin::current_core().forward;
        if (__builtin_expect(forward.Any(), 0)) {
            const uint8_t* source = twin::ForwardSource(forward, reinterpret_cast<uintptr_t>(piece), bytes);
            if (source != nullptr) return source;
        }
    }
    return piece;
}

// GM to UB. `tail(piece start in UB)` fills what lies behind each piece.
template <class T, class Tail>
inline void CopyIn(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Pieces& p, const Around& around,
                   uint64_t ub_bytes, const char* name, const twin::Loc& loc, Tail&& tail) {
    const uint64_t ub_offset = around.left;
    uint8_t* to = reinterpret_cast<uint8_t*>(dst.Span((ub_bytes + sizeof(T) - 1) / sizeof(T), loc, name)) + ub_offset;
    const auto from = src.Span(Extent(p.count, p.bytes, p.gm_step), loc, name, p.any_gm ? 1 : sizeof(T));
    const uint8_t* gm = reinterpret_cast<const uint8_t*>(from.first);
    const bool atomic = from.range->atomic_blocks;
    twin::Core& core = twin::current_core();
    core.traffic.read[static_cast<int>(from.range->kind)] += p.count * p.bytes;
    twin::WatchRead(core, reinterpret_cast<uintptr_t>(gm), loc);
    const uintptr_t first = reinterpret_cast<uintptr_t>(to);
    if constexpr (!twin::kChecked) {
        if (CopyInForwarded(core.forward, *from.range, p, around, first, reinterpret_cast<uintptr_t>(gm))) return;
    }
    const twin::Access written =
        around.filled ? twin::Access{first - around.left, around.left + p.bytes + around.behind, p.count, p.ub_step}
                      : twin::Access{first, p.bytes, p.count, p.ub_step};
    twin::Access garbage;
    if (!around.filled)
        garbage = twin::Access{first - around.left, around.left + p.bytes + around.behind, p.count, p.ub_step};
    const twin::Access read{reinterpret_cast<uintptr_t>(gm), p.bytes, p.count, p.gm_step, true};
    const double began = twin::CopyBegins(core);
    twin::IssueExact({name, twin::Pipe::kMte2, loc, written, {read}, garbage}, [=] {
        for (uint32_t i = 0; i < p.count; ++i) {
            uint8_t* piece = to + i * p.ub_step;
            if (atomic) {
                twin::ReadBlocks(piece, gm + i * p.gm_step, p.bytes);
            } else {
                memcpy(piece, gm + i * p.gm_step, p.bytes);
            }
            tail(piece);
        }
    });
    twin::CopyEnds(core, began,
                   {name, twin::Pipe::kMte2, *from.range, reinterpret_cast<uintptr_t>(gm), to, p.count, p.bytes,
                    p.gm_step, p.ub_step});
}

// How pieces are stored. Rows of an output larger than this core's share of the last cache go past the caches: when the
// op's caller reads them they have left it anyway. Of rows in windows `RowStores` knows.
enum class Stored { kPlain, kStreamed, kWindowRows };
inline Stored StoredHow(const twin::Core& core, const twin::GmRange& range, const Pieces& p) {
    if (twin::kChecked || core.stores == nullptr || p.bytes < kLeastStreamed) return Stored::kPlain;
    if (range.kind == twin::GmKind::kWindowData) return Stored::kWindowRows;
    const uint64_t written = core.traffic.written[static_cast<int>(range.kind)];
    const bool streamed = range.kind == twin::GmKind::kTensor && written > twin::g_cache_share_bytes;
    return streamed ? Stored::kStreamed : Stored::kPlain;
}

// UB to GM, honouring SetAtomic*.
template <class T>
inline void CopyOut(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const Pieces& p, uint64_t ub_bytes,
                    const char* name, const twin::Loc& loc) {
    const uint8_t* from = reinterpret_cast<const uint8_t*>(src.Span((ub_bytes + sizeof(T) - 1) / sizeof(T), loc, name));
    twin::Core& core = twin::current_core();
    const bool any = p.any_gm && core.atomic_op == 0;  // an update is of whole elements
    const auto to = dst.Span(Extent(p.count, p.bytes, p.gm_step), loc, name, any ? 1 : sizeof(T));
    uint8_t* gm = reinterpret_cast<uint8_t*>(to.first);
    const twin::GmRange range = *to.range;
    core.traffic.written[static_cast<int>(range.kind)] += p.count * p.bytes;
    twin::ForgetReads(core);
    const uint8_t atomic_op = core.atomic_op;
    TWIN_RAISE_IF(atomic_op != 0 && core.atomic_type != twin::AtomicTypeOf<T>(), kBadArgument, loc,
                  "%s while SetAtomic of another element type is in force", name);
    if constexpr (!twin::kChecked) {
        if (__builtin_expect(core.forward.Any(), 0))
            CopyOutForwarded(core.forward, range, p, reinterpret_cast<uintptr_t>(gm));
    }
    const Stored how = StoredHow(core, range, p);
    twin::RowStores* const stores = core.stores;
    if constexpr (!twin::kChecked) {
        // What says that rows are there must come after rows that went past the caches.
        if (range.kind == twin::GmKind::kWindowState || range.atomic_blocks || range.doorbell != nullptr)
            twin::StreamFence();
    }
    const twin::Access written{reinterpret_cast<uintptr_t>(gm), p.bytes, p.count, p.gm_step, true};
    const twin::Access read{reinterpret_cast<uintptr_t>(from), p.bytes, p.count, p.ub_step};
    const double began = twin::CopyBegins(core);
    twin::IssueSourced({name, twin::Pipe::kMte3, loc, written, {read}, {}, atomic_op != 0}, [=] {
        for (uint32_t i = 0; i < p.count; ++i) {
            uint8_t* piece = gm + i * p.gm_step;
            const uint8_t* source = SourceOf(from + i * p.ub_step, p.bytes);
            if (atomic_op != 0) {
                twin::AtomicUpdate<T>(atomic_op, piece, source, p.bytes);
            } else if (range.atomic_blocks) {
                twin::PublishBlocks(piece, source, p.bytes);
            } else if (how == Stored::kWindowRows) {
                stores->Copy(piece, source, p.bytes);
            } else if (how == Stored::kStreamed) {
                twin::StreamCopy(piece, source, p.bytes);
            } else {
                memcpy(piece, source, p.bytes);
            }
        }
        if (range.doorbell != nullptr) twin::RingDoorbell(range.doorbell);
    });
    twin::CopyEnds(core, began,
                   {name, twin::Pipe::kMte3, range, reinterpret_cast<uintptr_t>(gm), from, p.count, p.bytes, p.gm_step,
                    p.ub_step});
}

inline uint64_t Blocks(uint64_t n) { return n * twin::kBlockBytes; }
inline uint64_t CeilBlock(uint64_t n) { return (n + twin::kBlockBytes - 1) / twin::kBlockBytes * twin::kBlockBytes; }
inline Pieces PiecesOf(const DataCopyParams& p, uint64_t gm_gap, uint64_t ub_gap, const twin::Loc& loc) {
    CheckPieces(p.blockCount, 0, 1, loc);
    return {p.blockCount, Blocks(p.blockLen), Blocks(p.blockLen + gm_gap), Blocks(p.blockLen + ub_gap)};
}

}  // namespace detail

template <class T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count, TWIN_CALLER) {
    const uint64_t bytes = detail::CheckCount(static_cast<uint64_t>(count) * sizeof(T), "DataCopy GM->UB", loc);
    if (bytes == 0) return;
    detail::CopyIn(dst, src, {1, bytes, 0, 0}, {}, bytes, "DataCopy GM->UB", loc, [](uint8_t*) {});
}

template <class T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count, TWIN_CALLER) {
    const uint64_t bytes = detail::CheckCount(static_cast<uint64_t>(count) * sizeof(T), "DataCopy UB->GM", loc);
    if (bytes == 0) return;
    detail::CopyOut(dst, src, {1, bytes, 0, 0}, bytes, "DataCopy UB->GM", loc);
}

template <class T>
inline void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params, TWIN_CALLER) {
    const detail::Pieces p = detail::PiecesOf(params, params.srcGap, params.dstGap, loc);
    if (p.count == 0 || p.bytes == 0) return;
    detail::CopyIn(dst, src, p, {}, detail::Extent(p.count, p.bytes, p.ub_step), "DataCopy GM->UB", loc,
                   [](uint8_t*) {});
}

template <class T>
inline void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params, TWIN_CALLER) {
    const detail::Pieces p = detail::PiecesOf(params, params.dstGap, params.srcGap, loc);
    if (p.count == 0 || p.bytes == 0) return;
    detail::CopyOut(dst, src, p, detail::Extent(p.count, p.bytes, p.ub_step), "DataCopy UB->GM", loc);
}

// UB to UB: a vector instruction.
template <class T>
inline void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count, TWIN_CALLER) {
    const uint64_t bytes = detail::CheckCount(static_cast<uint64_t>(count) * sizeof(T), "DataCopy UB->UB", loc);
    if (bytes == 0) return;
    T* to = dst.Span(bytes / sizeof(T), loc, "DataCopy UB->UB");
    const T* from = src.Span(bytes / sizeof(T), loc, "DataCopy UB->UB");
    const uintptr_t target = reinterpret_cast<uintptr_t>(to), source = reinterpret_cast<uintptr_t>(from);
    TWIN_RAISE_IF(target != source && target < source + bytes && source < target + bytes, kBadArgument, loc,
                  "DataCopy UB->UB: source and destination overlap in part; only all of it or nothing may");
    twin::IssueExact({"DataCopy UB->UB", twin::Pipe::kV, loc, {target, bytes}, {{source, bytes}}},
                     [=] { memmove(to, from, bytes); });
}

template <class T>
inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                        const DataCopyPadExtParams<T>& pad, TWIN_CALLER) {
    detail::CheckPieces(params.blockCount, params.blockLen, sizeof(T), loc);
    if (params.blockCount == 0 || params.blockLen == 0) return;
    const uint64_t left = pad.leftPadding * sizeof(T), right = pad.rightPadding * sizeof(T);
    TWIN_RAISE_IF(left > twin::kBlockBytes || right > twin::kBlockBytes, kBadArgument, loc,
                  "DataCopyPad pads more than 32 bytes on one side");
    const uint64_t whole = detail::CeilBlock(left + params.blockLen + right);
    const detail::Pieces p{params.blockCount, params.blockLen,
                           static_cast<uint64_t>(params.blockLen) + params.srcStride,
                           whole + detail::Blocks(params.dstStride), true};
    // Padding is random bytes unless a value is given. Without padding the dummy bytes up to the block end repeat the
    // first element of their piece.
    const twin::Core& core = twin::current_core();
    const bool padded = (left | right) != 0, filled = !padded || pad.isPad || core.pad_value_set;
    T value = pad.paddingValue;
    if (!pad.isPad) memcpy(&value, &core.pad_value, std::min(sizeof(T), sizeof(core.pad_value)));
    const detail::Around around{left, whole - left - params.blockLen, filled};
    detail::CopyIn(
        dst, src, p, around, detail::Extent(p.count, whole, p.ub_step), "DataCopyPad GM->UB", loc, [=](uint8_t* piece) {
            if (left != 0) memset(piece - left, detail::kPoison, left);
            for (uint64_t i = 0; filled && i < left; i += sizeof(T)) memcpy(piece - left + i, &value, sizeof(T));
            const uint64_t tail = whole - left - p.bytes;
            if (tail == 0) return;
            memset(piece + p.bytes, detail::kPoison, tail);
            for (uint64_t i = 0; filled && i + sizeof(T) <= tail; i += sizeof(T))
                memcpy(piece + p.bytes + i, padded ? reinterpret_cast<const uint8_t*>(&value) : piece, sizeof(T));
        });
}

template <class T>
inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params,
                        TWIN_CALLER) {
    detail::CheckPieces(params.blockCount, params.blockLen, sizeof(T), loc);
    if (params.blockCount == 0 || params.blockLen == 0) return;
    const uint64_t whole = detail::CeilBlock(params.blockLen);
    const detail::Pieces p{params.blockCount, params.blockLen,
                           static_cast<uint64_t>(params.blockLen) + params.dstStride,
                           whole + detail::Blocks(params.srcStride), true};
    detail::CopyOut(dst, src, p, detail::Extent(p.count, p.bytes, p.ub_step), "DataCopyPad UB->GM", loc);
}

// The older parameter structs: blockLen in bytes, 16-bit fields.
template <class T>
inline void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params,
                        const DataCopyPadParams& pad, TWIN_CALLER) {
    T value{};
    memcpy(&value, &pad.paddingValue, sizeof(T));
    DataCopyPad(dst, src, DataCopyExtParams(params.blockCount, params.blockLen, params.srcGap, params.dstGap, 0),
                DataCopyPadExtParams<T>(pad.isPad, pad.leftPadding, pad.rightPadding, value), loc);
}
template <class T>
inline void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
                        TWIN_CALLER) {
    DataCopyPad(dst, src, DataCopyExtParams(params.blockCount, params.blockLen, params.srcGap, params.dstGap, 0), loc);
}

#define TWIN_SET_ATOMIC(Name, kOp)                                                                          \
    template <class T>                                                                                      \
    inline void Name(TWIN_CALLER) {                                                                         \
        static_assert(twin::AtomicTypeOf<T>() != 0, #Name ": float, half, bfloat16_t, int32, int16, int8"); \
        twin::current_core().atomic_op = kOp;                                                               \
        twin::current_core().atomic_at = loc;                                                               \
        twin::current_core().atomic_type = twin::AtomicTypeOf<T>();                                         \
    }
TWIN_SET_ATOMIC(SetAtomicAdd, 1)
TWIN_SET_ATOMIC(SetAtomicMax, 2)
TWIN_SET_ATOMIC(SetAtomicMin, 3)
#undef TWIN_SET_ATOMIC
inline void SetAtomicNone() { twin::current_core().atomic_op = 0; }
inline void DisableDmaAtomic() { SetAtomicNone(); }
// The element type alone.
template <class T>
inline void SetAtomicType() {
    static_assert(twin::AtomicTypeOf<T>() != 0, "SetAtomicType: float, half, bfloat16_t, int32, int16, int8");
    twin::current_core().atomic_type = twin::AtomicTypeOf<T>();
}

}  // namespace AscendC
