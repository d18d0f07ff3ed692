// How ranks meet: the root listens on an abstract unix socket whose random name is the root info; the others
// connect, say who they are, and get the file descriptors of the control memory and the windows. No names in
// any file system, so nothing can be left behind.
#pragma once

#include <vector>

#include "socket.h"

namespace vnpu {

struct Joined {
    HcclResult code = kHcclSuccess;
    Fd control;
    Fd windows;
    std::vector<pid_t> pids;
};

// Listens under a new name and puts it into `info`.
HcclResult MakeRootInfo(RootInfo* info);
// The name in `info`; empty when it is not ours.
std::string RootOf(const RootInfo& info);
// Meets the other ranks under that name: as the root where this process listens, else as a guest.
HcclResult Rendezvous(const std::string& root, const Hello& own, Joined* joined);

}  // namespace vnpu
