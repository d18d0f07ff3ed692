// The one way in which data is carried in a collective: pieces through the data areas of the windows.
//
//   entry   every rank writes what it calls, then a barrier; calls that differ are an error on every rank,
//   and no
//           window has been written yet, so what the operators of this group left there is safe until all
//           have come
//   rounds  every rank writes a piece into one half of its own window's data area; barrier; every rank reads
//   exit    a barrier, so that whoever returns may let an operator write into anybody's window
//
// The data areas are overwritten: as on a device, nothing survives in them from one operator to the next.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

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

}  // namespace vnpu
