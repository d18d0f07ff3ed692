// HCCL's collectives: how one runs; those of equal sizes; those of unequal sizes.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "abi/window.h"
#include "comm.h"

namespace vnpu {
namespace {

std::string Describe(const Call& call) {
    char text[192];
    int at = std::snprintf(text, sizeof text, "%s(", call.op);
    const char* comma = "";
    auto add = [&](const char* name, const char* value) {
        at += std::snprintf(text + at, sizeof text - static_cast<size_t>(at), "%s%s%s", comma, name, value);
        comma = ", ";
    };
    if (call.count) add("count ", std::to_string(call.count).c_str());
    if (call.type >= 0) add("", NameOf(static_cast<DataType>(call.type)));
    if (call.reduce >= 0) add("", NameOf(static_cast<ReduceOp>(call.reduce)));
    if (call.root >= 0) add("root ", std::to_string(call.root).c_str());
    std::snprintf(text + at, sizeof text - static_cast<size_t>(at), ")");
    return text;
}

HcclResult Enter(Comm& comm, const Collective& collective, const std::string& what) {
    RankControl* own = RankOf(comm.control, comm.rank);
    own->call = collective.call;
    own->call.sequence = comm.sequence;
    for (size_t r = 0; r < collective.row.size(); ++r) own->row[r] = collective.row[r];
    if (HcclResult code = Barrier(comm, what)) return code;
    for (int r = 0; r < comm.world; ++r) {
        const Call theirs = RankOf(comm.control, r)->call;
        if (theirs == own->call) continue;
        return Fail(comm, kHcclParameter, r,
                    "ranks call different collectives: rank " + std::to_string(comm.rank) + " calls " +
                        Describe(own->call) + ", rank " + std::to_string(r) + " calls " + Describe(theirs) +
                        " as number " + std::to_string(comm.sequence) + " of this group");
    }
    return kHcclSuccess;
}

HcclResult Run(Comm& comm, const Collective& collective) {
    std::lock_guard<std::mutex> lock(comm.mutex);
    if (HcclResult code = CheckFailed(comm)) return code;
    ++comm.sequence;
    const std::string what = Describe(collective.call) + " (number " + std::to_string(comm.sequence) + ")";
    if (HcclResult code = Enter(comm, collective, what)) return code;
    const int64_t rounds = collective.rounds(comm);
    if (rounds < 0) return static_cast<HcclResult>(-rounds);
    for (int64_t round = 0; round < rounds; ++round) {
        const uint64_t offset = comm.parity * PingPongBytes(comm);
        comm.parity ^= 1;
        const auto half = [&](int r) -> const uint8_t* { return ops::DataOf(comm.bases[r]) + offset; };
        if (collective.write) {
            collective.write(comm, static_cast<uint64_t>(round), ops::DataOf(comm.bases[comm.rank]) + offset);
        }
        if (HcclResult code = Barrier(comm, what)) return code;
        if (collective.read) collective.read(comm, static_cast<uint64_t>(round), half);
    }
    return Barrier(comm, what);
}

}  // namespace

bool Call::operator==(const Call& other) const {
    return !std::strncmp(op, other.op, sizeof op) && sequence == other.sequence && count == other.count &&
           type == other.type && reduce == other.reduce && root == other.root;
}

uint64_t PingPongBytes(const Comm& comm) { return comm.data_bytes / 2 / 64 * 64; }

uint64_t ShareBytes(const Comm& comm, int shares) {
    return PingPongBytes(comm) / static_cast<uint64_t>(shares) / 64 * 64;
}

HcclResult Enqueue(std::shared_ptr<Comm> comm, Collective collective, void* stream) {
    return vnpu_enqueue(stream, [comm = std::move(comm), collective = std::move(collective)] {
        if (Run(*comm, collective) != kHcclSuccess) vnpu_fault();
    });
}

}  // namespace vnpu

using namespace vnpu;

namespace {

Collective Named(const char* name, uint64_t count, DataType type, int reduce, int64_t root) {
    Collective collective;
    std::snprintf(collective.call.op, sizeof collective.call.op, "%s", name);
    collective.call.count = count;
    collective.call.type = static_cast<int32_t>(type);
    collective.call.reduce = reduce;
    collective.call.root = static_cast<int32_t>(root);
    return collective;
}

// Bytes of piece `round` of `bytes`; 0 when they are finished.
uint64_t Part(uint64_t bytes, uint64_t piece, uint64_t round) {
    return round * piece >= bytes ? 0 : std::min(piece, bytes - round * piece);
}

constexpr int kNoReduction = -1;

HcclResult Prepare(const char* name, void* handle, DataType type, int reduce, std::shared_ptr<Comm>* comm) {
    const std::string function = std::string("Hccl") + name;
    *comm = Find(handle, function.c_str());
    if (!*comm) return kHcclNotFound;
    const bool reduces = reduce != kNoReduction;
    if (SizeOf(type) && (!reduces || (Reducible(type) && reduce >= 0 && reduce <= 3))) return kHcclSuccess;
    vnpu_error("%s: data type %d (%s)%s is not supported", function.c_str(), static_cast<int>(type), NameOf(type),
               reduces ? " with this reduction" : "");
    return kHcclNotSupported;
}

// What a collective of equal sizes does.
struct Shape {
    const char* name;
    bool shares = false;         // what a rank gives has a share for each rank
    int reduce = kNoReduction;   // over the ranks
    int64_t from = -1, to = -1;  // the only rank that gives, or takes; -1: all
};

// `count`: elements of a share, or of everything where there are none.
HcclResult EqualSizes(const Shape& shape, const void* send, void* receive, uint64_t count, DataType type, void* handle,
                      void* stream) {
    std::shared_ptr<Comm> comm;
    if (HcclResult code = Prepare(shape.name, handle, type, shape.reduce, &comm)) return code;
    const int64_t root = std::max(shape.from, shape.to);
    if (root >= comm->world) {
        vnpu_error("Hccl%s: root %u is not one of the %d ranks", shape.name, static_cast<uint32_t>(root), comm->world);
        return kHcclParameter;
    }
    const int shares = shape.shares ? comm->world : 1;
    const uint64_t bytes = count * SizeOf(type), piece = ShareBytes(*comm, shares);
    Collective collective = Named(shape.name, count, type, shape.reduce, root);
    collective.rounds = [=](Comm&) { return static_cast<int64_t>((bytes + piece - 1) / piece); };
    collective.write = [=](Comm& c, uint64_t round, uint8_t* own) {
        if (shape.from >= 0 && shape.from != c.rank) return;
        const auto* source = static_cast<const uint8_t*>(send) + round * piece;
        for (uint64_t share = 0; share < static_cast<uint64_t>(shares); ++share)
            std::memcpy(own + share * piece, source + share * bytes, Part(bytes, piece, round));
    };
    collective.read = [=](Comm& c, uint64_t round, const auto& half) {
        if (shape.to >= 0 && shape.to != c.rank) return;
        const uint64_t offset = shape.shares ? static_cast<uint64_t>(c.rank) * piece : 0;
        auto* out = static_cast<uint8_t*>(receive) + round * piece;
        std::vector<const void*> sources;
        for (int r = 0; r < c.world; ++r) sources.push_back(half(r) + offset);
        const uint64_t part = Part(bytes, piece, round);
        if (shape.reduce != kNoReduction) {
            Reduce(type, static_cast<ReduceOp>(shape.reduce), out, sources.data(), c.world, part / SizeOf(type));
        } else if (shape.from >= 0) {
            std::memcpy(out, sources[static_cast<size_t>(shape.from)], part);
        } else {
            for (size_t r = 0; r < sources.size(); ++r) std::memcpy(out + r * bytes, sources[r], part);
        }
    };
    return Enqueue(comm, std::move(collective), stream);
}

}  // namespace

VNPU_EXPORT HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, DataType type, int op, void* comm,
                                     void* stream) {
    return EqualSizes({"AllReduce", false, op}, send, receive, count, type, comm, stream);
}

VNPU_EXPORT HcclResult HcclReduce(void* send, void* receive, uint64_t count, DataType type, int op, uint32_t root,
                                  void* comm, void* stream) {
    return EqualSizes({"Reduce", false, op, -1, root}, send, receive, count, type, comm, stream);
}

VNPU_EXPORT HcclResult HcclBroadcast(void* data, uint64_t count, DataType type, uint32_t root, void* comm,
                                     void* stream) {
    return EqualSizes({"Broadcast", false, kNoReduction, root}, data, data, count, type, comm, stream);
}

VNPU_EXPORT HcclResult HcclAllGather(void* send, void* receive, uint64_t count, DataType type, void* comm,
                                     void* stream) {
    return EqualSizes({"AllGather"}, send, receive, count, type, comm, stream);
}

VNPU_EXPORT HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, DataType type, int op, void* comm,
                                         void* stream) {
    return EqualSizes({"ReduceScatter", true, op}, send, receive, count, type, comm, stream);
}

VNPU_EXPORT HcclResult HcclScatter(void* send, void* receive, uint64_t count, DataType type, uint32_t root, void* comm,
                                   void* stream) {
    return EqualSizes({"Scatter", true, kNoReduction, root}, send, receive, count, type, comm, stream);
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
        result.push_back(
            {static_cast<const uint64_t*>(offsets)[r] * size, static_cast<const uint64_t*>(counts)[r] * size});
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

HcclResult Exchange(const char* op, const void* input, const Stretches& send, void* output, const Stretches& receive,
                    DataType type, std::shared_ptr<Comm> comm, void* stream) {
    const uint64_t piece = ShareBytes(*comm, comm->world);
    Collective collective = Named(op, 0, type, kNoReduction, -1);
    for (const Stretch& stretch : send) collective.row.push_back(stretch.bytes);
    collective.rounds = [=](Comm& c) { return Rounds(c, receive, piece, op); };
    collective.write = [=](Comm& c, uint64_t round, uint8_t* own) {
        for (int r = 0; r < c.world; ++r) {
            if (const uint64_t bytes = Part(send[r].bytes, piece, round)) {
                std::memcpy(own + static_cast<uint64_t>(r) * piece,
                            static_cast<const uint8_t*>(input) + send[r].offset + round * piece, bytes);
            }
        }
    };
    collective.read = [=](Comm& c, uint64_t round, const auto& half) {
        for (int r = 0; r < c.world; ++r) {
            if (const uint64_t bytes = Part(receive[r].bytes, piece, round)) {
                std::memcpy(static_cast<uint8_t*>(output) + receive[r].offset + round * piece,
                            half(r) + static_cast<uint64_t>(c.rank) * piece, bytes);
            }
        }
    };
    return Enqueue(std::move(comm), std::move(collective), stream);
}

Stretches Equal(int world, uint64_t bytes) {
    Stretches result;
    for (uint64_t r = 0; r < static_cast<uint64_t>(world); ++r) result.push_back({r * bytes, bytes});
    return result;
}

}  // namespace

VNPU_EXPORT HcclResult HcclAlltoAll(const void* send, uint64_t send_count, DataType send_type, const void* receive,
                                    uint64_t receive_count, DataType receive_type, void* handle, void* stream) {
    std::shared_ptr<Comm> comm;
    if (HcclResult code = Prepare("AlltoAll", handle, send_type, kNoReduction, &comm)) return code;
    return Exchange("AlltoAll", send, Equal(comm->world, send_count * SizeOf(send_type)), const_cast<void*>(receive),
                    Equal(comm->world, receive_count * SizeOf(receive_type)), send_type, comm, stream);
}

VNPU_EXPORT HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_offsets,
                                     DataType send_type, const void* receive, const void* receive_counts,
                                     const void* receive_offsets, DataType receive_type, void* handle, void* stream) {
    std::shared_ptr<Comm> comm;
    if (HcclResult code = Prepare("AlltoAllV", handle, send_type, kNoReduction, &comm)) return code;
    return Exchange("AlltoAllV", send, FromCounts(send_counts, send_offsets, comm->world, SizeOf(send_type)),
                    const_cast<void*>(receive),
                    FromCounts(receive_counts, receive_offsets, comm->world, SizeOf(receive_type)), send_type, comm,
                    stream);
}

// The matrix holds what rank i sends to rank j at [i * world + j]; both sides are contiguous.
VNPU_EXPORT HcclResult HcclAlltoAllVC(const void* send, const void* matrix, DataType send_type, const void* receive,
                                      DataType receive_type, void* handle, void* stream) {
    std::shared_ptr<Comm> comm;
    if (HcclResult code = Prepare("AlltoAllVC", handle, send_type, kNoReduction, &comm)) return code;
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

VNPU_EXPORT HcclResult HcclAllGatherV(void* send, uint64_t send_count, void* receive, const void* receive_counts,
                                      const void* receive_offsets, DataType type, void* handle, void* stream) {
    std::shared_ptr<Comm> comm;
    if (HcclResult code = Prepare("AllGatherV", handle, type, kNoReduction, &comm)) return code;
    Stretches out(static_cast<size_t>(comm->world), Stretch{0, send_count * SizeOf(type)});
    return Exchange("AllGatherV", send, out, receive,
                    FromCounts(receive_counts, receive_offsets, comm->world, SizeOf(type)), type, comm, stream);
}

// Every rank's share of the reduction is exchanged into scratch memory and reduced there.
VNPU_EXPORT HcclResult HcclReduceScatterV(void* send, const void* send_counts, const void* send_offsets, void* receive,
                                          uint64_t receive_count, DataType type, int op, void* handle, void* stream) {
    std::shared_ptr<Comm> comm;
    if (HcclResult code = Prepare("ReduceScatterV", handle, type, op, &comm)) return code;
    const int world = comm->world;
    const uint64_t bytes = receive_count * SizeOf(type);
    auto scratch = std::make_shared<std::vector<uint8_t>>(bytes * static_cast<uint64_t>(world));
    const HcclResult code = Exchange("ReduceScatterV", send, FromCounts(send_counts, send_offsets, world, SizeOf(type)),
                                     scratch->data(), Equal(world, bytes), type, comm, stream);
    if (code) return code;
    return vnpu_enqueue(stream, [=] {
        std::vector<const void*> sources;
        for (uint64_t r = 0; r < static_cast<uint64_t>(world); ++r) sources.push_back(scratch->data() + r * bytes);
        Reduce(type, static_cast<ReduceOp>(op), receive, sources.data(), world, receive_count);
    });
}
