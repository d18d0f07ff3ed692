// A communicator: the ranks of one machine, their windows and control memory, and waiting for each other.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"

namespace vnpu {

// ---- the control memory of a communicator, shared by its ranks. The windows follow it in the same file, and
// are mapped apart ----
//
//   page 0                   its name, and the failure that ended it, if any
//   page 1 + r, r < 384      rank r: who it is, barrier counter, the call it is in, its row of byte counts
//   then, per (from, to)     a channel for point-to-point data: counters and a ring of two pieces

constexpr uint64_t kPage = 4096;
constexpr int kMaxRanks = 384;
constexpr uint64_t kPieceBytes = 512 << 10;
constexpr uint64_t kPieces = 2;

struct Failure {
    std::atomic<uint32_t> state;  // 0 none, 1 being written, 2 readable
    int32_t code;
    int32_t culprit;
    int32_t reporter;
    char text[1024];
};

struct Front {
    Failure failure;
    char name[48];
};
static_assert(sizeof(Front) <= kPage);

// What a rank calls; equal on all ranks or the call is an error.
struct Call {
    char op[24];
    uint64_t sequence;
    uint64_t count;
    int32_t type;
    int32_t reduce;  // -1: none
    int32_t root;    // -1: none

    bool operator==(const Call& other) const;
};

struct RankControl {
    std::atomic<uint32_t> joined;  // 0 nobody, 1 being written, 2 the next three are readable
    int32_t pid;
    int32_t world;
    uint64_t data_bytes;
    std::atomic<uint64_t> arrived;
    std::atomic<uint32_t> left;
    alignas(64) Call call;
    alignas(64) uint64_t row[kMaxRanks];  // bytes that this rank sends to each other, in collectives of unequal size
};
static_assert(sizeof(RankControl) <= kPage);

struct Channel {
    std::atomic<uint64_t> written;  // pieces
    alignas(64) std::atomic<uint64_t> read;
    uint64_t piece_bytes[kPieces];
    uint64_t message_bytes[kPieces];
};

constexpr uint64_t kChannelBytes = kPage + kPieces * kPieceBytes;

constexpr uint64_t kFrontBytes = kPage * (1 + kMaxRanks);
constexpr uint64_t kMapAlign = 64 << 10;  // the largest page size in use

inline uint64_t ControlBytes(int world) {
    const auto w = static_cast<uint64_t>(world);
    return (kFrontBytes + kChannelBytes * w * w + kMapAlign - 1) / kMapAlign * kMapAlign;
}
inline Failure* FailureOf(uint8_t* control) { return &reinterpret_cast<Front*>(control)->failure; }
inline RankControl* RankOf(uint8_t* control, int rank) {
    return reinterpret_cast<RankControl*>(control + kPage * (1 + static_cast<uint64_t>(rank)));
}
inline Channel* ChannelOf(uint8_t* control, int world, int from, int to) {
    const auto w = static_cast<uint64_t>(world);
    const uint64_t index = static_cast<uint64_t>(from) * w + static_cast<uint64_t>(to);
    return reinterpret_cast<Channel*>(control + kFrontBytes + kChannelBytes * index);
}
inline uint8_t* PieceOf(Channel* channel, uint64_t piece) {
    return reinterpret_cast<uint8_t*>(channel) + kPage + piece % kPieces * kPieceBytes;
}

// ---- one rank's end ----

struct Comm {
    ~Comm();

    std::string name;
    int rank = 0;
    int world = 0;
    uint64_t data_bytes = 0;
    uint8_t* control = nullptr;
    uint8_t* windows = nullptr;
    int file = -1;  // of both; ascend-moe hang reads the windows through it
    std::vector<void*> bases;
    std::vector<int32_t> live_fds;    // pidfds; -1 for oneself
    bool windows_registered = false;  // handed to an operator library: stay mapped until the process ends
    int links = -1;                   // of the ranks of a server: memory (1), RDMA (0), or -1 before the first launch

    std::mutex mutex;  // one call at a time
    uint64_t sequence = 0;
    uint64_t arrivals = 0;
    uint64_t parity = 0;
};

// Connects to the other ranks and maps the memory. kHcclSuccess and *out, or a code after vnpu_error.
HcclResult ConnectRanks(const RootInfo& info, int rank, int world, uint64_t data_bytes, const std::string& name,
                        std::shared_ptr<Comm>* out);

// The process behind this pidfd has ended.
bool Gone(int pidfd);
// Ends the communicator for every rank, unless it has ended already; reports it and returns the code.
HcclResult Fail(Comm& comm, HcclResult code, int culprit, const std::string& text);
// kHcclSuccess, or the code of the failure that has ended the communicator, reported again.
HcclResult CheckFailed(Comm& comm);
// Waits until awaited(r) is false for every rank r. Ends with a code that names the rank when it is gone,
// when it has left the communicator, or after vnpu_timeout_seconds().
HcclResult WaitFor(Comm& comm, const std::function<bool(int)>& awaited, const std::string& what);
// All ranks of the communicator.
HcclResult Barrier(Comm& comm, const std::string& what);

// The communicators of this process.
std::shared_ptr<Comm> Find(void* handle, const char* function);
std::shared_ptr<Comm> FindByName(const std::string& name);
void* Register(std::shared_ptr<Comm> comm);
void Forget(void* handle);

// ---- rendezvous ----
// The root info says where the communicator's memory can be opened: a file without a name that the root
// holds until all have come.

// Makes the memory of a new communicator and writes its place into `info`.
HcclResult MakeRootInfo(RootInfo* info);

// Opens that memory as comm->rank of comm->world, fills comm->control and comm->live_fds, and waits for the
// other ranks. The caller closes *file.
HcclResult Rendezvous(const RootInfo& info, Comm* comm, std::string* name, int* file);

// ---- exchange ----
// How data moves between ranks. A collective moves it in pieces through the data areas of the windows:
//
//   entry   every rank writes its call, then a barrier; calls that differ are an error on every rank. Until
//           then no window is written: operators' rows in the windows are safe until all ranks have come
//   rounds  every rank writes a piece into one half of its own window's data area; barrier; every rank reads
//   exit    a barrier, so that after it an operator may write into any window
//
// The data areas are overwritten: as on a device, nothing survives in them from one operator to the next.

struct Collective {
    Call call{};
    // Bytes of this rank's row (kMaxRanks entries), shown to all ranks at entry; empty: not needed.
    std::vector<uint64_t> row;
    // After entry: how many rounds (equal on all ranks), or a negative HCCL code after Fail.
    std::function<int64_t(Comm&)> rounds = [](Comm&) { return 0; };
    std::function<void(Comm&, uint64_t round, uint8_t* own)> write;
    // half(r) is rank r's piece of this round.
    std::function<void(Comm&, uint64_t round, const std::function<const uint8_t*(int)>& half)> read;
};

// Bytes of one ping-pong buffer of a data area.
uint64_t PingPongBytes(const Comm& comm);
// Pieces of a share: the bytes of a buffer that are one of `shares`, whole elements of any type.
uint64_t ShareBytes(const Comm& comm, int shares);

// Puts it on the stream (recorded when the stream is captured).
HcclResult Enqueue(std::shared_ptr<Comm> comm, Collective collective, void* stream);

// ---- reduction of elements over the ranks ----

// The integers, fp16, bf16, fp32 and fp64.
bool Reducible(DataType type);

// out[i] = sources[0][i] op sources[1][i] op ..., in this order, so that every rank gets the same bits. fp16
// and bf16 are reduced in fp32 and rounded once. Integers wrap. A NaN stays a NaN in max and min.
void Reduce(DataType type, ReduceOp op, void* out, const void* const* sources, int ranks, uint64_t count);

// ---- messages that have been sent and not yet received. A send never waits for its receiver, as on a
// device: bytes that do not fit into the channel are stored, and a thread moves them on later ----

// Sends a message after those already in flight to that rank.
void Post(const std::shared_ptr<Comm>& comm, int peer, const void* data, uint64_t bytes);

// True while a message of this communicator for that rank is in flight.
bool InFlight(const Comm& comm, int peer);

}  // namespace vnpu
