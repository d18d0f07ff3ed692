// What ranks say to each other when they meet, over an abstract unix socket.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include "control.h"

namespace vnpu {

struct Hello {
    int32_t rank;
    int32_t world;
    int32_t pid;
    int32_t reserved;
    uint64_t data_bytes;
};

struct Welcome {
    int32_t code;
    int32_t pids[kMaxRanks];
    char text[512];
};

struct Fd {
    explicit Fd(int fd_in = -1) : fd(fd_in) {}
    Fd(Fd&& other) noexcept : fd(other.fd) { other.fd = -1; }
    Fd(const Fd&) = delete;
    Fd& operator=(const Fd&) = delete;
    ~Fd() {
        if (fd >= 0) close(fd);
    }
    int fd;
};

// How long ranks wait for each other to come: $HCCL_CONNECT_TIMEOUT, default 120, as in HCCL.
double ConnectSeconds();

struct Deadline {
    explicit Deadline(double more_seconds = 0);
    int LeftMs() const;
    std::chrono::steady_clock::time_point end;
};

socklen_t AddressOf(const std::string& name, sockaddr_un* address);
bool WaitReadable(int fd, const Deadline& deadline);
// The process at the other end belongs to the same user.
bool SameUser(int socket);
// With the file descriptors of control memory and windows, or with none (count 0).
bool SendWelcome(int socket, const Welcome& welcome, const int* fds, int count);
bool ReceiveWelcome(int socket, Welcome* welcome, int* fds);

}  // namespace vnpu
