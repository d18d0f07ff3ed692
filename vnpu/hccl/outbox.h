// What has been sent and not yet been taken. A send never waits for its receiver: what does not fit into the
// channel is kept here and moved on by a thread of its own, so that ranks may all send first and receive
// afterwards, as they may on a device, where every pair has its own stream.
#pragma once

#include <memory>

#include "comm.h"

namespace vnpu {

// Sends a message after those already on their way to that rank.
void Post(const std::shared_ptr<Comm>& comm, int peer, const void* data, uint64_t bytes);

// True while a message of this communicator for that rank is on its way.
bool OnItsWay(const Comm& comm, int peer);

}  // namespace vnpu
