// torch's bindings let go of Python's lock before they call an op. Should a caller not, it is let go of here:
// an op may wait for another thread's.
#pragma once

namespace ascend_moe_torch {

class WithoutGil {
public:
    WithoutGil();
    ~WithoutGil();
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

private:
    void* thread_ = nullptr;
};

}  // namespace ascend_moe_torch
