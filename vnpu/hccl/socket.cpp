#include "socket.h"

#include <poll.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace vnpu {

socklen_t AddressOf(const std::string& name, sockaddr_un* address) {
    std::memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    std::memcpy(address->sun_path + 1, name.data(), name.size());
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

double ConnectSeconds() {
    const char* text = std::getenv("HCCL_CONNECT_TIMEOUT");
    return text && std::atof(text) > 0 ? std::atof(text) : 120.0;
}

Deadline::Deadline(double more_seconds)
    : end(std::chrono::steady_clock::now() +
          std::chrono::milliseconds(static_cast<int64_t>((ConnectSeconds() + more_seconds) * 1e3))) {}

int Deadline::LeftMs() const {
    const auto left = end - std::chrono::steady_clock::now();
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(left).count();
    return ms > 0 ? static_cast<int>(ms) : 0;
}

bool WaitReadable(int fd, const Deadline& deadline) {
    pollfd poll_fd{fd, POLLIN, 0};
    int n;
    while ((n = poll(&poll_fd, 1, deadline.LeftMs())) < 0 && errno == EINTR) {
    }
    return n > 0;
}

bool SendWelcome(int socket, const Welcome& welcome, const int* fds, int count) {
    iovec data{const_cast<Welcome*>(&welcome), sizeof welcome};
    alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (count) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(static_cast<size_t>(count) * sizeof(int));
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(static_cast<size_t>(count) * sizeof(int));
        std::memcpy(CMSG_DATA(header), fds, static_cast<size_t>(count) * sizeof(int));
    }
    return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof welcome);
}

bool ReceiveWelcome(int socket, Welcome* welcome, int* fds) {
    iovec data{welcome, sizeof *welcome};
    alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL) != static_cast<ssize_t>(sizeof *welcome)) {
        return false;
    }
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header && header->cmsg_type == SCM_RIGHTS) std::memcpy(fds, CMSG_DATA(header), 2 * sizeof(int));
    return true;
}

bool SameUser(int socket) {
    ucred peer{};
    socklen_t size = sizeof peer;
    return !getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) && peer.uid == geteuid();
}

}  // namespace vnpu
