// Calls that Python has checked and planned, by key.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gate.h"
#include "group.h"
#include "key.h"

namespace ascend_moe_torch {

struct Output {
    at::ScalarType type;
    c10::SmallVector<int64_t, 2> sizes;
};

struct Entry {
    std::vector<uint64_t> key;
    std::shared_ptr<void> plan;  // destroyed with its last entry and Python's Plan
    std::shared_ptr<Gate> gate;
    uint64_t communicator_id;  // by which Python finds the communicator of an error
    Run run;
    Group group;                     // that the communicator belongs to
    std::vector<int16_t> positions;  // by argument: its place among am_run's inputs; -1: no tensor
    std::vector<Output> outputs;
};

struct Lender;  // lend.h

// A number that Forget changes: what was found out before it is not remembered after it.
uint64_t Generation();
std::shared_ptr<const Entry> Find(const Key& key);
void Remember(uint64_t generation, std::shared_ptr<const Entry> entry, const Key& key);
std::shared_ptr<const Lender> FindLender(std::string_view group_ep, int64_t world, int64_t rank);
void RememberLender(uint64_t generation, std::shared_ptr<const Lender> lender);
void Forget();

}  // namespace ascend_moe_torch
