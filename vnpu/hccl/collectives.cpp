// HCCL's collectives: of equal sizes, then of unequal sizes.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "comm.h"

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

// ---- unequal sizes: each collective is an exchange of one stretch of bytes per pair of ranks ----

namespace {

// A stretch of bytes of a rank's input or output.
struct Stretch {
    uint64_t offset;
    uint64_t bytes;
};
using Stretches = std::vector<Stretch>;

Stretches FromCounts(const void* counts, const void* offsets, int world, uint64_t size) {
    Stretches result;
    for (int r = 0; r < world; ++r) {
        result.push_back({static_cast<const uint64_t*>(offsets)[r] * size,
                          static_cast<const uint64_t*>(counts)[r] * size});
    }
    return result;
}

// Every row must be what its receiver expects; the longest stretch of all decides the number of rounds.
int64_t Rounds(Comm& comm, const Stretches& receive, uint64_t piece, const char* op) {
    uint64_t longest = 0;
    for (int from = 0; from < comm.world; ++from) {
        const RankControl* control = RankOf(comm.control, from);
        for (int to = 0; to < comm.world; ++to) longest = std::max(longest, control->row[to]);
        const uint64_t sent = control->row[comm.rank];
        if (sent == receive[from].bytes) continue;
        return -Fail(comm, kHcclParameter, from,
                     std::string(op) + ": rank " + std::to_string(from) + " sends " + std::to_string(sent) +
                         " bytes to rank " + std::to_string(comm.rank) + ", which expects " +
                         std::to_string(receive[from].bytes));
    }
    return static_cast<int64_t>((longest + piece - 1) / piece);
}

// Bytes of piece `round` of a stretch; 0 when it is finished.
uint64_t Part(const Stretch& stretch, uint64_t piece, uint64_t round) {
    const uint64_t begin = round * piece;
    return begin >= stretch.bytes ? 0 : std::min(piece, stretch.bytes - begin);
}

HcclResult Exchange(const char* op, const void* input, const Stretches& send, void* output,
                    const Stretches& receive, DataType type, std::shared_ptr<Comm> comm, void* stream) {
    const uint64_t piece = ShareBytes(*comm, comm->world);
    Collective collective;
    std::snprintf(collective.call.op, sizeof collective.call.op, "%s", op);
    collective.call.type = static_cast<int32_t>(type);
    collective.call.reduce = collective.call.root = -1;
    for (const Stretch& stretch : send) collective.row.push_back(stretch.bytes);
    collective.rounds = [=](Comm& c) { return Rounds(c, receive, piece, op); };
    collective.write = [=](Comm& c, uint64_t round, uint8_t* own) {
        for (int r = 0; r < c.world; ++r) {
            if (const uint64_t bytes = Part(send[r], piece, round)) {
                std::memcpy(own + static_cast<uint64_t>(r) * piece,
                            static_cast<const uint8_t*>(input) + send[r].offset + round * piece, bytes);
            }
        }
    };
    collective.read = [=](Comm& c, uint64_t round, const auto& half) {
        for (int r = 0; r < c.world; ++r) {
            if (const uint64_t bytes = Part(receive[r], piece, round)) {
                std::memcpy(static_cast<uint8_t*>(output) + receive[r].offset + round * piece,
                            half(r) + static_cast<uint64_t>(c.rank) * piece, bytes);
            }
        }
    };
    return Enqueue(std::move(comm), std::move(collective), stream);
}

HcclResult Prepare(const char* function, void* handle, DataType type, std::shared_ptr<Comm>* comm) {
    *comm = Find(handle, function);
    if (!*comm) return kHcclNotFound;
    if (SizeOf(type)) return kHcclSuccess;
    vnpu_error("%s: data type %d is not supported", function, static_cast<int>(type));
    return kHcclNotSupported;
}

Stretches Equal(int world, uint64_t bytes) {
    Stretches result;
    for (uint64_t r = 0; r < static_cast<uint64_t>(world); ++r) result.push_back({r * bytes, bytes});
    return result;
}

}  // namespace

VNPU_EXPORT HcclResult HcclAlltoAll(const void* send, uint64_t send_count, DataType send_type,
                                    const void* receive, uint64_t receive_count, DataType receive_type,
                                    void* handle, void* stream) {
    std::shared_ptr<Comm> comm;
    if (HcclResult code = Prepare("HcclAlltoAll", handle, send_type, &comm)) return code;
    return Exchange("AlltoAll", send, Equal(comm->world, send_count * SizeOf(send_type)),
                    const_cast<void*>(receive), Equal(comm->world, receive_count * SizeOf(receive_type)),
                    send_type, comm, stream);
}

VNPU_EXPORT HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_offsets,
                                     DataType send_type, const void* receive, const void* receive_counts,
                                     const void* receive_offsets, DataType receive_type, void* handle,
                                     void* stream) {
    std::shared_ptr<Comm> comm;
    if (HcclResult code = Prepare("HcclAlltoAllV", handle, send_type, &comm)) return code;
    return Exchange("AlltoAllV", send, FromCounts(send_counts, send_offsets, comm->world, SizeOf(send_type)),
                    const_cast<void*>(receive),
                    FromCounts(receive_counts, receive_offsets, comm->world, SizeOf(receive_type)), send_type,
                    comm, stream);
}

// The matrix holds what rank i sends to rank j at [i * world + j]; both sides lie packed.
VNPU_EXPORT HcclResult HcclAlltoAllVC(const void* send, const void* matrix, DataType send_type,
                                      const void* receive, DataType receive_type, void* handle,
                                      void* stream) {
    std::shared_ptr<Comm> comm;
    if (HcclResult code = Prepare("HcclAlltoAllVC", handle, send_type, &comm)) return code;
    const auto* counts = static_cast<const uint64_t*>(matrix);
    const auto world = static_cast<uint64_t>(comm->world);
    const auto rank = static_cast<uint64_t>(comm->rank);
    Stretches out, in;
    uint64_t sent = 0, received = 0;
    for (uint64_t r = 0; r < world; ++r) {
        out.push_back({sent, counts[rank * world + r] * SizeOf(send_type)});
        in.push_back({received, counts[r * world + rank] * SizeOf(receive_type)});
        sent += out.back().bytes;
        received += in.back().bytes;
    }
    return Exchange("AlltoAllVC", send, out, const_cast<void*>(receive), in, send_type, comm, stream);
}

VNPU_EXPORT HcclResult HcclAllGatherV(void* send, uint64_t send_count, void* receive,
                                      const void* receive_counts, const void* receive_offsets, DataType type,
                                      void* handle, void* stream) {
    std::shared_ptr<Comm> comm;
    if (HcclResult code = Prepare("HcclAllGatherV", handle, type, &comm)) return code;
    Stretches out(static_cast<size_t>(comm->world), Stretch{0, send_count * SizeOf(type)});
    return Exchange("AllGatherV", send, out, receive,
                    FromCounts(receive_counts, receive_offsets, comm->world, SizeOf(type)), type, comm,
                    stream);
}

// Every rank's share of the reduction is exchanged into scratch memory and reduced there.
VNPU_EXPORT HcclResult HcclReduceScatterV(void* send, const void* send_counts, const void* send_offsets,
                                          void* receive, uint64_t receive_count, DataType type, int op,
                                          void* handle, void* stream) {
    std::shared_ptr<Comm> comm;
    if (HcclResult code = Prepare("HcclReduceScatterV", handle, type, &comm)) return code;
    if (!Reducible(type) || op < 0 || op > 3) {
        vnpu_error("HcclReduceScatterV: %s with reduction %d is not supported", NameOf(type), op);
        return kHcclNotSupported;
    }
    const int world = comm->world;
    const uint64_t bytes = receive_count * SizeOf(type);
    auto scratch = std::make_shared<std::vector<uint8_t>>(bytes * static_cast<uint64_t>(world));
    const HcclResult code =
        Exchange("ReduceScatterV", send, FromCounts(send_counts, send_offsets, world, SizeOf(type)),
                 scratch->data(), Equal(world, bytes), type, comm, stream);
    if (code) return code;
    struct Task {
        std::shared_ptr<std::vector<uint8_t>> scratch;
        void* receive;
        uint64_t count;
        DataType type;
        int op;
        int world;
    };
    return vnpu_enqueue(
        stream,
        [](void* arg) {
            auto* task = static_cast<Task*>(arg);
            std::vector<const void*> sources;
            const uint64_t stride = task->count * SizeOf(task->type);
            for (uint64_t r = 0; r < static_cast<uint64_t>(task->world); ++r) {
                sources.push_back(task->scratch->data() + r * stride);
            }
            Reduce(task->type, static_cast<ReduceOp>(task->op), task->receive, sources.data(), task->world,
                   task->count);
        },
        new Task{scratch, receive, receive_count, type, op, world},
        [](void* arg) { delete static_cast<Task*>(arg); });
}
