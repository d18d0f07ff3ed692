// Launches the kernels on the twin.
#include "run.h"

#include <cstring>

#include "ascend_moe.h"
#include "op_launch.h"
#include "trace.h"

namespace {

constexpr int kLentRefused = -1;

// What an op does to this rank's lent area. A combine that has taken its epoch spends the block of expand_x,
// whatever came of it: peers may be reading.
class LentUse {
public:
    explicit LentUse(ops::Communicator& comm) : comm_(comm), epoch_(comm.Epoch()) {}
    bool Refused(const ops::LentArea::Found& found, int32_t* record, char* text, uint64_t bytes) {
        generation_ = found.generation;
        if (ops::LentArea::Refusal(found, text, bytes) == nullptr) return false;
        record[0] = static_cast<int32_t>(found.generation);
        record[1] = static_cast<int32_t>(found.detail);
        return true;
    }
    void Complete(bool left) {
        if (comm_.lent_area() != nullptr && comm_.Epoch() != epoch_)
            comm_.lent_area()->Complete(generation_, comm_.Epoch(), left);
    }

private:
    ops::Communicator& comm_;
    const uint32_t epoch_;
    uint32_t generation_ = 0;
};

}  // namespace

uint32_t am_comm_algorithm_run(void* comm) { return static_cast<ops::Communicator*>(comm)->algorithm(); }

int am_run(void* comm, void* plan, const void* const* inputs, void* const* outputs, int32_t* record,
           char* fault, uint64_t fault_bytes) {
    ops::Communicator& end = *static_cast<ops::Communicator*>(comm);
    const std::lock_guard<std::mutex> lock(end.mutex());
    memset(record, 0, moe::kErrorRecordWords * sizeof(int32_t));
    LentUse lent(end);
    try {
        ops::OpLaunch launch(end, *static_cast<ops::Plan*>(plan), inputs, outputs, record);
        if (lent.Refused(launch.lent(), record, fault, fault_bytes)) return kLentRefused;
        const ops::TracedLaunch traced(launch.spec());
        launch.Begin();
        end.device().Launch(launch.spec(), launch.kernel());
        launch.End(false);
        launch.Finish();
        end.set_algorithm(static_cast<ops::Plan*>(plan)->info().algorithm);
        const int code =
            record[moe::kRecMagic] == moe::kRecordMagic ? record[moe::kRecCode] : static_cast<int>(moe::kOk);
        lent.Complete(code < static_cast<int>(moe::kFirstFatal));
        return code;
    } catch (const std::exception& error) {
        end.EndLaunch(true);
        lent.Complete(false);
        // The others need not wait for a rank whose kernel has stopped.
        for (int peer = 0; peer < end.world(); ++peer) end.PostAbort(peer, moe::kKernelFault, end.rank());
        strncpy(fault, error.what(), fault_bytes - 1);
        fault[fault_bytes - 1] = '\0';
        return static_cast<int>(moe::kKernelFault);
    }
}
