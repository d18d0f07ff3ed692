// Window tensors without Python: ascend_moe.window_empty asks here first, and answers itself where this finds
// nobody that lends.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "argument.h"
#include "gate.h"
#include "group.h"

namespace ascend_moe_torch {

// The lent area of a communicator; functions of csrc/ops/ascend_moe.h, in the library that made it.
using Take = int (*)(void* area, uint64_t bytes, uint64_t* out);
using Release = int (*)(void* area, uint32_t generation);
struct Lent {
    void* area;
    Take take;
    Release release;
    void (*unused)();  // the last tensor of a closed communicator has died
    int process;       // a forked child has none of its parent's tensors
};

struct Lender {
    std::string group_ep;
    int64_t world, rank;
    uint64_t place;  // of the thread, as Place says
    Group group;
    std::shared_ptr<Gate> gate;
    Lent lent;
};

// No tensor: Python has to look.
ASCEND_MOE_TORCH_SHARED std::optional<at::Tensor> Lend(at::IntArrayRef sizes, at::ScalarType type,
                                                       std::string_view group_ep, int64_t world,
                                                       int64_t rank);

// Python ends: tensors that die from now on call nobody.
void EndLending();

}  // namespace ascend_moe_torch
