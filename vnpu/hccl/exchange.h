// How data moves between ranks. A collective moves it in pieces through the data areas of the windows:
//
//   entry   every rank writes its call, then a barrier; calls that differ are an error on every rank. Until
//           then no window is written: operators' rows in the windows are safe until all ranks have come
//   rounds  every rank writes a piece into one half of its own window's data area; barrier; every rank reads
//   exit    a barrier, so that after it an operator may write into any window
//
// The data areas are overwritten: as on a device, nothing survives in them from one operator to the next.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "abi.h"
#include "comm.h"

namespace vnpu {

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

// Bytes of one half of a data area.
uint64_t HalfBytes(const Comm& comm);
// Pieces of a share: the bytes of a half that are one of `shares`, whole elements of any type.
uint64_t ShareBytes(const Comm& comm, int shares);

// Puts it on the stream (recorded when the stream is captured).
HcclResult Enqueue(std::shared_ptr<Comm> comm, Collective collective, void* stream);

// ---- reduction of elements over the ranks ----

// True when `op` over `type` is defined: the integers, fp16, bf16, fp32 and fp64.
bool Reducible(DataType type);

// out[i] = sources[0][i] op sources[1][i] op ..., in this order, so that every rank gets the same bits. fp16
// and bf16 are reduced in fp32 and rounded once, to nearest even. Integers wrap. A NaN stays a NaN in max and
// min.
void Reduce(DataType type, ReduceOp op, void* out, const void* const* sources, int ranks, uint64_t count);

// ---- messages that have been sent and not yet received. A send never waits for its receiver: bytes that do
// not fit into the channel are kept, and a thread moves them on later. All ranks may therefore send first and
// receive afterwards, as on a device, where every pair has its own stream ----

// Sends a message after those already on their way to that rank.
void Post(const std::shared_ptr<Comm>& comm, int peer, const void* data, uint64_t bytes);

// True while a message of this communicator for that rank is on its way.
bool OnItsWay(const Comm& comm, int peer);

}  // namespace vnpu
