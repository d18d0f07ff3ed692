#include "comm.h"

#include <cstdio>
#include <cstring>

#include "abi/window.h"

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
        const uint64_t offset = comm.parity * HalfBytes(comm);
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

uint64_t HalfBytes(const Comm& comm) { return comm.data_bytes / 2 / 64 * 64; }

uint64_t ShareBytes(const Comm& comm, int shares) {
    return HalfBytes(comm) / static_cast<uint64_t>(shares) / 64 * 64;
}

HcclResult Enqueue(std::shared_ptr<Comm> comm, Collective collective, void* stream) {
    return vnpu_enqueue_call(stream, [comm = std::move(comm), collective = std::move(collective)] {
        if (Run(*comm, collective) != kHcclSuccess) vnpu_fault();
    });
}

}  // namespace vnpu
