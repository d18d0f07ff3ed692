// How ranks meet: the root info tells where the communicator's memory can be opened, a file without a name
// that the root holds until all have come. Every rank writes into its place there who it is and reads the
// others'.
#pragma once

#include "comm.h"

namespace vnpu {

// Makes the memory of a new communicator and tells in `info` where it is.
HcclResult MakeRootInfo(RootInfo* info);

// Opens that memory as comm->rank of comm->world, maps comm->control and waits for the other ranks. Leaves
// their pidfds in comm->live_fds, the communicator's name in *name and the file in *file, which the caller
// closes.
HcclResult Rendezvous(const RootInfo& info, Comm* comm, std::string* name, int* file);

}  // namespace vnpu
