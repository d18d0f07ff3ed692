// Launches the kernels on the twin.
#include "run.h"

#include <cstring>

#include "ascend_moe.h"
#include "op_launch.h"
#include "trace.h"

int am_run(void* comm, void* plan, const void* const* inputs, void* const* outputs, int32_t* record,
           char* fault, uint64_t fault_bytes) {
    ops::Communicator& end = *static_cast<ops::Communicator*>(comm);
    const std::lock_guard<std::mutex> lock(end.mutex());
    memset(record, 0, moe::kErrorRecordWords * sizeof(int32_t));
    try {
        ops::OpLaunch launch(end, *static_cast<ops::Plan*>(plan), inputs, outputs, record);
        const ops::TracedLaunch traced(launch.spec());
        launch.Begin();
        end.device().Launch(launch.spec(), launch.kernel());
        launch.End(false);
        launch.Finish();
        return record[moe::kRecMagic] == moe::kRecordMagic ? record[moe::kRecCode]
                                                           : static_cast<int>(moe::kOk);
    } catch (const std::exception& error) {
        end.EndLaunch(true);
        // The others need not wait for a rank whose kernel has stopped.
        for (int peer = 0; peer < end.world(); ++peer) end.PostAbort(peer, moe::kKernelFault, end.rank());
        strncpy(fault, error.what(), fault_bytes - 1);
        fault[fault_bytes - 1] = '\0';
        return static_cast<int>(moe::kKernelFault);
    }
}
