// The start and the end of ACL in this process, and of a device in a thread: what waits for the queue beside streams.
#include <atomic>

#include "device.h"
#include "queue.h"

using namespace vnpu;

static std::atomic<bool> initialised{false};

VNPU_EXPORT AclError aclInit(const char*) {
    if (initialised.exchange(true)) return 100002;  // ACL_ERROR_REPEAT_INITIALIZE, which callers expect
    return kSuccess;
}

VNPU_EXPORT AclError aclFinalize() {
    initialised = false;
    return WaitForAll();
}

VNPU_EXPORT AclError aclrtResetDevice(int32_t device) {
    if (device < 0 || device >= DeviceCount()) return kInvalidDevice;
    LeaveDevice(device);
    return WaitForAll();
}
