// Faults: work that was launched well and failed on the device. As on a device, the next call that waits is
// told.
//
// A launch that returns an error instead makes torch_npu's task queue drop all further work without a word.
#include <mutex>
#include <string>

#include "state.h"

namespace vnpu {
namespace {

constexpr AclError kVectorCoreException = 507035;

std::mutex& FaultMutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
}

// Empty: none.
std::string& FaultText() {
    static auto* text = new std::string;
    return *text;
}

}  // namespace

AclError TakeFault() {
    std::lock_guard<std::mutex> lock(FaultMutex());
    if (FaultText().empty()) return kSuccess;
    SetRecentError(FaultText());
    FaultText().clear();
    return kVectorCoreException;
}

}  // namespace vnpu

using namespace vnpu;

VNPU_EXPORT void vnpu_fault(const char* text) {
    vnpu_error("%s", text);
    std::lock_guard<std::mutex> lock(FaultMutex());
    if (FaultText().empty()) FaultText() = text;  // the first one is the cause of what follows
}
