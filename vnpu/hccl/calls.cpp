// HCCL's collectives of equal sizes.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "collective.h"
#include "reduce.h"

using namespace vnpu;

namespace {

Collective Named(const char* op, uint64_t count, DataType type, int reduce = -1, int root = -1) {
    Collective collective;
    std::snprintf(collective.call.op, sizeof collective.call.op, "%s", op);
    collective.call.count = count;
    collective.call.type = static_cast<int32_t>(type);
    collective.call.reduce = reduce;
    collective.call.root = root;
    return collective;
}

uint64_t Pieces(uint64_t bytes, uint64_t piece) { return (bytes + piece - 1) / piece; }

// Bytes of piece `round` of `bytes`.
uint64_t Part(uint64_t bytes, uint64_t piece, uint64_t round) {
    return std::min(piece, bytes - round * piece);
}

HcclResult CheckType(const char* function, DataType type, bool reduces, int op) {
    if (!SizeOf(type) || (reduces && (!Reducible(type) || op < 0 || op > 3))) {
        vnpu_error("%s: data type %d (%s)%s is not supported", function, static_cast<int>(type), NameOf(type),
                   reduces ? " with this reduction" : "");
        return kHcclNotSupported;
    }
    return kHcclSuccess;
}

HcclResult CheckRoot(const char* function, const Comm& comm, uint32_t root) {
    if (root < static_cast<uint32_t>(comm.world)) return kHcclSuccess;
    vnpu_error("%s: root %u is not one of the %d ranks", function, root, comm.world);
    return kHcclParameter;
}

// out = reduction over the ranks of each one's piece at `offset` of its half.
void ReducePieces(const Comm& comm, DataType type, ReduceOp op, void* out,
                  const std::function<const uint8_t*(int)>& half, uint64_t offset, uint64_t bytes) {
    std::vector<const void*> sources;
    for (int r = 0; r < comm.world; ++r) sources.push_back(half(r) + offset);
    Reduce(type, op, out, sources.data(), comm.world, bytes / SizeOf(type));
}

// All ranks write their whole input; `root` (-1: everyone) reduces it.
HcclResult AllToRoot(const char* function, const void* send, void* receive, uint64_t count, DataType type,
                     int op, int root, void* handle, void* stream) {
    std::shared_ptr<Comm> comm = Find(handle, function);
    if (!comm) return kHcclNotFound;
    if (HcclResult code = CheckType(function, type, true, op)) return code;
    const uint64_t bytes = count * SizeOf(type);
    const uint64_t piece = ShareBytes(*comm, 1);
    Collective collective = Named(function + 4, count, type, op, root);
    collective.rounds = [=](Comm&) { return static_cast<int64_t>(Pieces(bytes, piece)); };
    collective.write = [=](Comm&, uint64_t round, uint8_t* own) {
        std::memcpy(own, static_cast<const uint8_t*>(send) + round * piece, Part(bytes, piece, round));
    };
    collective.read = [=](Comm& c, uint64_t round, const auto& half) {
        if (root >= 0 && root != c.rank) return;
        ReducePieces(c, type, static_cast<ReduceOp>(op), static_cast<uint8_t*>(receive) + round * piece, half,
                     0, Part(bytes, piece, round));
    };
    return Enqueue(comm, std::move(collective), stream);
}

}  // namespace

VNPU_EXPORT HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, DataType type, int op,
                                     void* comm, void* stream) {
    return AllToRoot("HcclAllReduce", send, receive, count, type, op, -1, comm, stream);
}

VNPU_EXPORT HcclResult HcclReduce(void* send, void* receive, uint64_t count, DataType type, int op,
                                  uint32_t root, void* handle, void* stream) {
    std::shared_ptr<Comm> comm = Find(handle, "HcclReduce");
    if (!comm) return kHcclNotFound;
    if (HcclResult code = CheckRoot("HcclReduce", *comm, root)) return code;
    return AllToRoot("HcclReduce", send, receive, count, type, op, static_cast<int>(root), handle, stream);
}

VNPU_EXPORT HcclResult HcclBroadcast(void* data, uint64_t count, DataType type, uint32_t root, void* handle,
                                     void* stream) {
    std::shared_ptr<Comm> comm = Find(handle, "HcclBroadcast");
    if (!comm) return kHcclNotFound;
    if (HcclResult code = CheckRoot("HcclBroadcast", *comm, root)) return code;
    if (HcclResult code = CheckType("HcclBroadcast", type, false, 0)) return code;
    const uint64_t bytes = count * SizeOf(type);
    const uint64_t piece = ShareBytes(*comm, 1);
    const int from = static_cast<int>(root);
    Collective collective = Named("Broadcast", count, type, -1, from);
    collective.rounds = [=](Comm&) { return static_cast<int64_t>(Pieces(bytes, piece)); };
    collective.write = [=](Comm& c, uint64_t round, uint8_t* own) {
        if (c.rank == from)
            std::memcpy(own, static_cast<uint8_t*>(data) + round * piece, Part(bytes, piece, round));
    };
    collective.read = [=](Comm& c, uint64_t round, const auto& half) {
        if (c.rank == from) return;
        std::memcpy(static_cast<uint8_t*>(data) + round * piece, half(from), Part(bytes, piece, round));
    };
    return Enqueue(comm, std::move(collective), stream);
}

VNPU_EXPORT HcclResult HcclAllGather(void* send, void* receive, uint64_t count, DataType type, void* handle,
                                     void* stream) {
    std::shared_ptr<Comm> comm = Find(handle, "HcclAllGather");
    if (!comm) return kHcclNotFound;
    if (HcclResult code = CheckType("HcclAllGather", type, false, 0)) return code;
    const uint64_t bytes = count * SizeOf(type);
    const uint64_t piece = ShareBytes(*comm, 1);
    Collective collective = Named("AllGather", count, type);
    collective.rounds = [=](Comm&) { return static_cast<int64_t>(Pieces(bytes, piece)); };
    collective.write = [=](Comm&, uint64_t round, uint8_t* own) {
        std::memcpy(own, static_cast<uint8_t*>(send) + round * piece, Part(bytes, piece, round));
    };
    collective.read = [=](Comm& c, uint64_t round, const auto& half) {
        for (int r = 0; r < c.world; ++r) {
            auto* out = static_cast<uint8_t*>(receive) + static_cast<uint64_t>(r) * bytes + round * piece;
            std::memcpy(out, half(r), Part(bytes, piece, round));
        }
    };
    return Enqueue(comm, std::move(collective), stream);
}

VNPU_EXPORT HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, DataType type, int op,
                                         void* handle, void* stream) {
    std::shared_ptr<Comm> comm = Find(handle, "HcclReduceScatter");
    if (!comm) return kHcclNotFound;
    if (HcclResult code = CheckType("HcclReduceScatter", type, true, op)) return code;
    const uint64_t bytes = count * SizeOf(type);  // of one rank's result
    const uint64_t piece = ShareBytes(*comm, comm->world);
    Collective collective = Named("ReduceScatter", count, type, op);
    collective.rounds = [=](Comm&) { return static_cast<int64_t>(Pieces(bytes, piece)); };
    collective.write = [=](Comm& c, uint64_t round, uint8_t* own) {
        for (uint64_t r = 0; r < static_cast<uint64_t>(c.world); ++r) {
            std::memcpy(own + r * piece, static_cast<uint8_t*>(send) + r * bytes + round * piece,
                        Part(bytes, piece, round));
        }
    };
    collective.read = [=](Comm& c, uint64_t round, const auto& half) {
        ReducePieces(c, type, static_cast<ReduceOp>(op), static_cast<uint8_t*>(receive) + round * piece, half,
                     static_cast<uint64_t>(c.rank) * piece, Part(bytes, piece, round));
    };
    return Enqueue(comm, std::move(collective), stream);
}

VNPU_EXPORT HcclResult HcclScatter(void* send, void* receive, uint64_t count, DataType type, uint32_t root,
                                   void* handle, void* stream) {
    std::shared_ptr<Comm> comm = Find(handle, "HcclScatter");
    if (!comm) return kHcclNotFound;
    if (HcclResult code = CheckRoot("HcclScatter", *comm, root)) return code;
    if (HcclResult code = CheckType("HcclScatter", type, false, 0)) return code;
    const uint64_t bytes = count * SizeOf(type);
    const uint64_t piece = ShareBytes(*comm, comm->world);
    const int from = static_cast<int>(root);
    Collective collective = Named("Scatter", count, type, -1, from);
    collective.rounds = [=](Comm&) { return static_cast<int64_t>(Pieces(bytes, piece)); };
    collective.write = [=](Comm& c, uint64_t round, uint8_t* own) {
        for (uint64_t r = 0; c.rank == from && r < static_cast<uint64_t>(c.world); ++r) {
            std::memcpy(own + r * piece, static_cast<uint8_t*>(send) + r * bytes + round * piece,
                        Part(bytes, piece, round));
        }
    };
    collective.read = [=](Comm& c, uint64_t round, const auto& half) {
        std::memcpy(static_cast<uint8_t*>(receive) + round * piece,
                    half(from) + static_cast<uint64_t>(c.rank) * piece, Part(bytes, piece, round));
    };
    return Enqueue(comm, std::move(collective), stream);
}

VNPU_EXPORT HcclResult HcclBarrier(void* handle, void* stream) {
    std::shared_ptr<Comm> comm = Find(handle, "HcclBarrier");
    if (!comm) return kHcclNotFound;
    Collective collective = Named("Barrier", 0, DataType::kUint8);
    collective.call.type = -1;
    return Enqueue(comm, std::move(collective), stream);
}
