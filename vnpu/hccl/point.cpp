// Point-to-point: pieces through the pair's channel, which lies beside the windows, because the ranks that
// take no part may have an operator's rows in theirs and in ours.
#include <algorithm>
#include <cstring>

#include "outbox.h"

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
                     "Recv from rank " + peer + " expects " + std::to_string(transfer.bytes) +
                         " bytes, rank " + peer + " sends " + std::to_string(message));
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
    transfers.erase(
        std::remove_if(transfers.begin(), transfers.end(), [](const Transfer& t) { return t.sends; }),
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

struct Task {
    std::shared_ptr<Comm> comm;
    std::vector<Transfer> transfers;
};

HcclResult EnqueueTransfers(const char* function, void* handle, std::vector<Transfer> transfers,
                            void* stream) {
    std::shared_ptr<Comm> comm = Find(handle, function);
    if (!comm) return kHcclNotFound;
    for (const Transfer& transfer : transfers) {
        if (transfer.peer < 0 || transfer.peer >= comm->world) {
            vnpu_error("%s: peer %d is not one of the %d ranks", function, transfer.peer, comm->world);
            return kHcclParameter;
        }
    }
    return vnpu_enqueue(
        stream,
        [](void* arg) {
            auto* task = static_cast<Task*>(arg);
            if (HcclResult code = Run(task->comm, task->transfers)) vnpu_fail(code);
        },
        new Task{comm, std::move(transfers)}, [](void* arg) { delete static_cast<Task*>(arg); });
}

HcclResult Add(const char* function, bool sends, void* data, uint64_t count, DataType type, uint32_t peer,
               std::vector<Transfer>* transfers) {
    if (!SizeOf(type)) {
        vnpu_error("%s: data type %d is not supported", function, static_cast<int>(type));
        return kHcclNotSupported;
    }
    transfers->push_back({sends, static_cast<uint8_t*>(data), count * SizeOf(type), static_cast<int>(peer)});
    return kHcclSuccess;
}

}  // namespace

VNPU_EXPORT HcclResult HcclSend(void* data, uint64_t count, DataType type, uint32_t peer, void* comm,
                                void* stream) {
    std::vector<Transfer> transfers;
    if (HcclResult code = Add("HcclSend", true, data, count, type, peer, &transfers)) return code;
    return EnqueueTransfers("HcclSend", comm, std::move(transfers), stream);
}

VNPU_EXPORT HcclResult HcclRecv(void* data, uint64_t count, DataType type, uint32_t peer, void* comm,
                                void* stream) {
    std::vector<Transfer> transfers;
    if (HcclResult code = Add("HcclRecv", false, data, count, type, peer, &transfers)) return code;
    return EnqueueTransfers("HcclRecv", comm, std::move(transfers), stream);
}

VNPU_EXPORT HcclResult HcclBatchSendRecv(SendRecvItem* items, uint32_t count, void* comm, void* stream) {
    std::vector<Transfer> transfers;
    for (uint32_t i = 0; i < count; ++i) {
        const SendRecvItem& item = items[i];
        if (item.kind != 0 && item.kind != 1) return kHcclParameter;
        if (HcclResult code = Add("HcclBatchSendRecv", item.kind == 0, item.data, item.count, item.type,
                                  item.peer, &transfers)) {
            return code;
        }
    }
    return EnqueueTransfers("HcclBatchSendRecv", comm, std::move(transfers), stream);
}
