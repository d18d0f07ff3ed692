// A communicator: the ranks of one machine, their windows and control memory, and waiting for each other.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "control.h"

namespace vnpu {

struct Comm {
    ~Comm();

    std::string name;
    int rank = 0;
    int world = 0;
    uint64_t data_bytes = 0;
    uint8_t* control = nullptr;
    uint8_t* windows = nullptr;
    std::vector<void*> bases;
    std::vector<int32_t> live_fds;  // pidfds; -1 for oneself
    bool windows_lent = false;      // handed to an operator library: stay mapped unless it has left a hook
    std::function<void()> before_unmap;

    std::mutex mutex;  // one call at a time
    uint64_t sequence = 0;
    uint64_t arrivals = 0;
    uint64_t parity = 0;
};

// Meets the other ranks and maps the memory. kHcclSuccess and *out, or a code after vnpu_error.
HcclResult Meet(const RootInfo& info, int rank, int world, uint64_t data_bytes, const std::string& name,
                std::shared_ptr<Comm>* out);

double TimeoutSeconds();
// The process behind this pidfd has ended.
bool Gone(int pidfd);
// Ends the communicator for every rank, unless it has ended already; tells it and returns the code.
HcclResult Fail(Comm& comm, HcclResult code, int culprit, const std::string& text);
// kHcclSuccess, or the code of the failure that has ended the communicator, told again.
HcclResult CheckFailed(Comm& comm);
// Waits until awaited(r) is false for every rank r. Ends with a code that names the rank when it is gone,
// when it has left the communicator, or after TimeoutSeconds().
HcclResult WaitFor(Comm& comm, const std::function<bool(int)>& awaited, const std::string& what);
// All ranks of the communicator.
HcclResult Barrier(Comm& comm, const std::string& what);

// The communicators of this process.
std::shared_ptr<Comm> Find(void* handle, const char* function);
std::shared_ptr<Comm> FindByName(const std::string& name);
void* Register(std::shared_ptr<Comm> comm);
void Forget(void* handle);

}  // namespace vnpu
