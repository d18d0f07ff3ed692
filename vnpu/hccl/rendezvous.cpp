#include "rendezvous.h"

#include <sys/mman.h>
#include <sys/random.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "comm.h"

namespace vnpu {
namespace {

constexpr char kMagic[16] = "ascend_moe vnpu";

struct Card {  // what is in HcclRootInfo
    char magic[16];
    char socket[48];
};

std::mutex& ListenersMutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
}
std::map<std::string, int>& Listeners() {
    static auto* listeners = new std::map<std::string, int>;
    return *listeners;
}

int NewMemory(const char* name, uint64_t bytes) {
    const int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes))) {
        close(fd);
        return -1;
    }
    return fd;
}

std::string MissingRanks(const std::vector<Fd*>& sockets, int root) {
    std::string text;
    for (int r = 0; r < static_cast<int>(sockets.size()); ++r) {
        if (r == root || sockets[r]) continue;
        text += (text.empty() ? "" : ", ") + std::to_string(r);
    }
    return text;
}

// What is wrong with a newcomer; empty: nothing.
std::string Objection(const Hello& hello, const Hello& own, bool taken) {
    char text[256] = "";
    if (hello.world != own.world) {
        std::snprintf(text, sizeof text, "rank %d has %d ranks, rank %d has %d", own.rank, own.world,
                      hello.rank, hello.world);
    } else if (hello.rank < 0 || hello.rank >= own.world || hello.rank == own.rank || taken) {
        std::snprintf(text, sizeof text, "process %d says it is rank %d of %d, which is no free place",
                      hello.pid, hello.rank, own.world);
    } else if (hello.data_bytes != own.data_bytes) {
        std::snprintf(
            text, sizeof text,
            "rank %d has windows of %llu MiB, rank %d of %llu MiB: HCCL_BUFFSIZE (or hccl_buffer_size of the "
            "group) must be equal on all ranks",
            own.rank, static_cast<unsigned long long>(own.data_bytes >> 20), hello.rank,
            static_cast<unsigned long long>(hello.data_bytes >> 20));
    }
    return text;
}

HcclResult Host(int listener, const Hello& own, Joined* joined) {
    const Deadline deadline;
    std::vector<std::unique_ptr<Fd>> sockets(static_cast<size_t>(own.world));
    std::vector<Fd*> present(static_cast<size_t>(own.world), nullptr);
    Welcome welcome{};
    welcome.pids[own.rank] = own.pid;
    std::string objection;
    HcclResult code = kHcclParameter;  // of the objection
    for (int have = 1; have < own.world && objection.empty();) {
        if (!WaitReadable(listener, deadline)) {
            objection = "rank " + std::to_string(own.rank) + " waited for rank(s) " +
                        MissingRanks(present, own.rank) +
                        ", which never came (HCCL_CONNECT_TIMEOUT sets the limit)";
            code = kHcclTimeout;
            break;
        }
        auto socket = std::make_unique<Fd>(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
        Hello hello{};
        if (socket->fd < 0 || !SameUser(socket->fd) || !WaitReadable(socket->fd, deadline) ||
            recv(socket->fd, &hello, sizeof hello, MSG_WAITALL) != static_cast<ssize_t>(sizeof hello)) {
            continue;  // not one of ours, or it died while talking
        }
        const bool valid = hello.rank >= 0 && hello.rank < own.world;
        objection = Objection(hello, own, valid && present[hello.rank]);
        if (!objection.empty()) {
            welcome.code = kHcclParameter;
            std::snprintf(welcome.text, sizeof welcome.text, "%s", objection.c_str());
            SendWelcome(socket->fd, welcome, nullptr, 0);
            break;
        }
        welcome.pids[hello.rank] = hello.pid;
        present[hello.rank] = socket.get();
        sockets[hello.rank] = std::move(socket);
        ++have;
    }
    if (objection.empty()) {
        joined->control.fd = NewMemory("ascend_moe_vnpu_control", ControlBytes(own.world));
        joined->windows.fd = NewMemory("ascend_moe_vnpu_windows",
                                       WindowStride(own.data_bytes) * static_cast<uint64_t>(own.world));
        if (joined->control.fd < 0 || joined->windows.fd < 0) {
            objection = "no memory for the windows (memfd_create)";
            code = kHcclMemory;
        }
    }
    welcome.code = objection.empty() ? kHcclSuccess : code;
    std::snprintf(welcome.text, sizeof welcome.text, "%s", objection.c_str());
    const int fds[2] = {joined->control.fd, joined->windows.fd};
    for (Fd* socket : present) {
        if (socket) SendWelcome(socket->fd, welcome, fds, objection.empty() ? 2 : 0);
    }
    if (!objection.empty()) {
        vnpu_error("HCCL rendezvous: %s", objection.c_str());
        return code;
    }
    joined->pids.assign(welcome.pids, welcome.pids + own.world);
    return kHcclSuccess;
}

HcclResult Join(const std::string& name, const Hello& own, Joined* joined) {
    const Deadline deadline(2);  // the root's answer, which names who is missing, comes first
    sockaddr_un address;
    const socklen_t length = AddressOf(name, &address);
    Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (socket.fd < 0 || connect(socket.fd, reinterpret_cast<sockaddr*>(&address), length)) {
        vnpu_error(
            "HCCL rendezvous: rank %d cannot reach the root (%s): it has ended, or it is on another machine; "
            "the virtual NPU joins ranks of one machine",
            own.rank, std::strerror(errno));
        return kHcclRemote;
    }
    if (!SameUser(socket.fd)) {
        vnpu_error("HCCL rendezvous: the root belongs to another user");
        return kHcclParameter;
    }
    Welcome welcome{};
    int fds[2] = {-1, -1};
    if (send(socket.fd, &own, sizeof own, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof own))
        return kHcclRemote;
    if (!WaitReadable(socket.fd, deadline)) {
        vnpu_error("HCCL rendezvous: rank %d waited for the root's answer; not all ranks have come",
                   own.rank);
        return kHcclTimeout;
    }
    if (!ReceiveWelcome(socket.fd, &welcome, fds)) {
        vnpu_error("HCCL rendezvous: the root has ended before all ranks had come (rank %d)", own.rank);
        return kHcclRemote;
    }
    if (welcome.code) {
        vnpu_error("HCCL rendezvous: %s", welcome.text);
        return welcome.code;
    }
    joined->control.fd = fds[0];
    joined->windows.fd = fds[1];
    joined->pids.assign(welcome.pids, welcome.pids + own.world);
    return kHcclSuccess;
}

}  // namespace

HcclResult MakeRootInfo(RootInfo* info) {
    unsigned char random[12];
    if (getrandom(random, sizeof random, 0) != static_cast<ssize_t>(sizeof random)) return kHcclSyscall;
    std::string name = "ascend_moe_vnpu.";
    for (unsigned char byte : random) {
        char hex[3];
        std::snprintf(hex, sizeof hex, "%02x", byte);
        name += hex;
    }
    sockaddr_un address;
    const socklen_t length = AddressOf(name, &address);
    Fd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (listener.fd < 0 || bind(listener.fd, reinterpret_cast<sockaddr*>(&address), length) ||
        listen(listener.fd, kMaxRanks)) {
        vnpu_error("HcclGetRootInfo: no unix socket (%s)", std::strerror(errno));
        return kHcclSyscall;
    }
    Card card{};
    std::memcpy(card.magic, kMagic, sizeof card.magic);
    std::snprintf(card.socket, sizeof card.socket, "%s", name.c_str());
    std::memset(info, 0, sizeof *info);
    std::memcpy(info->internal, &card, sizeof card);
    std::lock_guard<std::mutex> lock(ListenersMutex());
    Listeners()[name] = listener.fd;
    listener.fd = -1;
    return kHcclSuccess;
}

std::string RootOf(const RootInfo& info) {
    Card card;
    std::memcpy(&card, info.internal, sizeof card);
    if (std::memcmp(card.magic, kMagic, sizeof card.magic)) return "";
    return std::string(card.socket, strnlen(card.socket, sizeof card.socket));
}

HcclResult Rendezvous(const std::string& root, const Hello& own, Joined* joined) {
    Fd listener;
    {
        std::lock_guard<std::mutex> lock(ListenersMutex());
        auto found = Listeners().find(root);
        if (found != Listeners().end()) {
            listener.fd = found->second;
            Listeners().erase(found);
        }
    }
    return listener.fd >= 0 ? Host(listener.fd, own, joined) : Join(root, own, joined);
}

}  // namespace vnpu
