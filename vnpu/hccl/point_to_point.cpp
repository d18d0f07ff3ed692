// Point-to-point: pieces through the pair's channel, which lies beside the windows, because the ranks that
// take no part may have an operator's rows in theirs and in ours.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <list>
#include <thread>

#include "acl/device.h"
#include "comm.h"

using namespace vnpu;

namespace {

struct Transfer {
    bool sends;
    uint8_t* data;
    uint64_t bytes;
    int peer;
    uint64_t done = 0;
    bool finished = false;
};

// The next piece of a message, if it is there.
bool Pull(Comm& comm, Transfer& transfer, HcclResult* code) {
    Channel* channel = ChannelOf(comm.control, comm.world, transfer.peer, comm.rank);
    const uint64_t piece = channel->read.load(std::memory_order_relaxed);
    if (channel->written.load(std::memory_order_acquire) == piece) return false;
    const uint64_t message = channel->message_bytes[piece % kPieces];
    if (message != transfer.bytes) {
        const std::string peer = std::to_string(transfer.peer);
        *code = Fail(comm, kHcclParameter, transfer.peer,
                     "Recv from rank " + peer + " expects " + std::to_string(transfer.bytes) + " bytes, rank " + peer +
                         " sends " + std::to_string(message));
        return true;
    }
    const uint64_t bytes = channel->piece_bytes[piece % kPieces];
    if (bytes) std::memcpy(transfer.data + transfer.done, PieceOf(channel, piece), bytes);
    channel->read.store(piece + 1, std::memory_order_release);
    transfer.done += bytes;
    transfer.finished = transfer.done == transfer.bytes;
    return true;
}

// Takes what is there; messages of one peer in their order.
HcclResult Receive(Comm& comm, std::vector<Transfer>& transfers) {
    HcclResult code = kHcclSuccess;
    std::vector<bool> blocked(static_cast<size_t>(comm.world), false);
    for (Transfer& transfer : transfers) {
        if (blocked[static_cast<size_t>(transfer.peer)]) continue;
        while (!transfer.finished && !code && Pull(comm, transfer, &code)) {
        }
        if (code) return code;
        blocked[static_cast<size_t>(transfer.peer)] = !transfer.finished;
    }
    return code;
}

HcclResult Run(const std::shared_ptr<Comm>& comm, std::vector<Transfer> transfers) {
    std::lock_guard<std::mutex> lock(comm->mutex);
    if (HcclResult code = CheckFailed(*comm)) return code;
    for (const Transfer& transfer : transfers) {
        if (transfer.sends) Post(comm, transfer.peer, transfer.data, transfer.bytes);
    }
    transfers.erase(std::remove_if(transfers.begin(), transfers.end(), [](const Transfer& t) { return t.sends; }),
                    transfers.end());
    HcclResult received = kHcclSuccess;
    const auto awaited = [&](int rank) {
        if (!received) received = Receive(*comm, transfers);
        return !received && std::any_of(transfers.begin(), transfers.end(),
                                        [&](const Transfer& t) { return !t.finished && t.peer == rank; });
    };
    const HcclResult waited = WaitFor(*comm, awaited, "Recv");
    return received ? received : waited;
}

HcclResult EnqueueItems(const char* function, const SendRecvItem* items, uint32_t count, void* handle, void* stream) {
    std::shared_ptr<Comm> comm = Find(handle, function);
    if (!comm) return kHcclNotFound;
    std::vector<Transfer> transfers;
    for (const SendRecvItem* item = items; item != items + count; ++item) {
        if (item->kind != 0 && item->kind != 1) return kHcclParameter;
        if (!SizeOf(item->type)) {
            vnpu_error("%s: data type %d is not supported", function, static_cast<int>(item->type));
            return kHcclNotSupported;
        }
        const int peer = static_cast<int>(item->peer);
        if (peer < 0 || peer >= comm->world) {
            vnpu_error("%s: peer %d is not one of the %d ranks", function, peer, comm->world);
            return kHcclParameter;
        }
        transfers.push_back(
            {item->kind == 0, static_cast<uint8_t*>(item->data), item->count * SizeOf(item->type), peer});
    }
    return vnpu_enqueue(stream, [comm, transfers = std::move(transfers)] {
        if (Run(comm, transfers) != kHcclSuccess) vnpu_fault();
    });
}

}  // namespace

VNPU_EXPORT HcclResult HcclSend(void* data, uint64_t count, DataType type, uint32_t peer, void* comm, void* stream) {
    const SendRecvItem item = {0, data, count, type, peer};
    return EnqueueItems("HcclSend", &item, 1, comm, stream);
}

VNPU_EXPORT HcclResult HcclRecv(void* data, uint64_t count, DataType type, uint32_t peer, void* comm, void* stream) {
    const SendRecvItem item = {1, data, count, type, peer};
    return EnqueueItems("HcclRecv", &item, 1, comm, stream);
}

VNPU_EXPORT HcclResult HcclBatchSendRecv(SendRecvItem* items, uint32_t count, void* comm, void* stream) {
    return EnqueueItems("HcclBatchSendRecv", items, count, comm, stream);
}

// ---- messages that have been sent and not yet taken ----

namespace vnpu {
namespace {

struct Message {
    std::shared_ptr<Comm> comm;
    int peer;
    std::vector<uint8_t> data;
    uint64_t bytes;     // of the whole message
    uint64_t sent = 0;  // pieces of it are in the channel
    bool started = false;

    bool Done() const { return started && sent == bytes; }
};

struct Outbox {
    std::mutex mutex;
    std::list<Message> messages;
    std::atomic<pid_t> carrier{0};  // the process whose thread moves them; 0: no thread
};

Outbox& TheOutbox() {
    static auto* outbox = new Outbox;
    return *outbox;
}

// Into the channel as far as it has room; an empty message is one empty piece. `rest` is what has not been
// sent.
void Push(Message& message, const uint8_t* rest) {
    Comm& comm = *message.comm;
    Channel* channel = ChannelOf(comm.control, comm.world, comm.rank, message.peer);
    while (!message.Done()) {
        const uint64_t piece = channel->written.load(std::memory_order_relaxed);
        if (piece - channel->read.load(std::memory_order_acquire) >= kPieces) return;
        const uint64_t bytes = std::min(kPieceBytes, message.bytes - message.sent);
        if (bytes) std::memcpy(PieceOf(channel, piece), rest, bytes);
        channel->piece_bytes[piece % kPieces] = bytes;
        channel->message_bytes[piece % kPieces] = message.bytes;
        channel->written.store(piece + 1, std::memory_order_release);
        rest += bytes;
        message.sent += bytes;
        message.started = true;
    }
}

// No rank will receive it any more.
bool Undeliverable(const Message& message) {
    const Comm& comm = *message.comm;
    if (FailureOf(comm.control)->state.load(std::memory_order_acquire)) return true;
    if (RankOf(comm.control, message.peer)->left.load(std::memory_order_acquire)) return true;
    return Gone(comm.live_fds[static_cast<size_t>(message.peer)]);
}

bool BehindAnother(const std::list<Message>& messages, const Comm& comm, int peer) {
    return std::any_of(messages.begin(), messages.end(),
                       [&](const Message& other) { return other.comm.get() == &comm && other.peer == peer; });
}

void Carry() {
    Outbox& outbox = TheOutbox();
    for (;;) {
        std::list<Message> finished;  // freed outside the lock: it may hold the last reference to a communicator
        {
            std::lock_guard<std::mutex> lock(outbox.mutex);
            std::list<Message> waiting;
            while (!outbox.messages.empty()) {
                Message& message = outbox.messages.front();
                const bool behind = BehindAnother(waiting, *message.comm, message.peer);
                const uint64_t kept_from = message.bytes - message.data.size();
                if (!behind) Push(message, message.data.data() + (message.sent - kept_from));
                auto& target = message.Done() || Undeliverable(message) ? finished : waiting;
                target.splice(target.end(), outbox.messages, outbox.messages.begin());
            }
            outbox.messages.swap(waiting);
            if (outbox.messages.empty()) {
                outbox.carrier = 0;
                return;
            }
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
}

// At exit the receivers still get what was sent, within the usual limit. A forked child has no such thread.
__attribute__((destructor)) void Deliver() {
    const Outbox& outbox = TheOutbox();
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(vnpu_timeout_seconds());
    while (outbox.carrier == getpid() && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

}  // namespace

void Post(const std::shared_ptr<Comm>& comm, int peer, const void* data, uint64_t bytes) {
    Outbox& outbox = TheOutbox();
    Message message{comm, peer, {}, bytes};
    std::lock_guard<std::mutex> lock(outbox.mutex);
    const auto* begin = static_cast<const uint8_t*>(data);
    if (!BehindAnother(outbox.messages, *comm, peer)) Push(message, begin);
    if (message.Done()) return;
    message.data.assign(begin + message.sent, begin + bytes);
    outbox.messages.push_back(std::move(message));
    if (outbox.carrier == getpid()) return;
    outbox.carrier = getpid();
    std::thread(Carry).detach();
}

bool InFlight(const Comm& comm, int peer) {
    Outbox& outbox = TheOutbox();
    std::lock_guard<std::mutex> lock(outbox.mutex);
    return outbox.carrier == getpid() && BehindAnother(outbox.messages, comm, peer);
}

}  // namespace vnpu
