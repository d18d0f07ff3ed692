// HCCL's collectives of unequal sizes: each is an exchange of one stretch of bytes per pair of ranks.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "collective.h"
#include "reduce.h"

using namespace vnpu;

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
