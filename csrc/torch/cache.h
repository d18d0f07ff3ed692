// Prepared calls, by key: checked and planned for one end of a communicator.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "end.h"
#include "key.h"

namespace ascend_moe_torch {

struct Output {
    int32_t dtype;
    int64_t rank;
    int64_t sizes[2];
};

struct Prepared {
    std::vector<uint64_t> key;
    std::shared_ptr<End> end;
    std::shared_ptr<void> plan;  // of the engine's library
    std::vector<Output> outputs;
    // NPU: the texts and times that the launch hands on.
    std::string group_ep, group_tp, comm_alg;
    int64_t timeout_us = 0, first_timeout_us = 0;
    uint32_t algorithm = 0;
};

// A number that Forget changes: what was looked up before it is not remembered after it.
uint64_t Generation();
std::shared_ptr<const Prepared> Find(const Key& key);
void Remember(uint64_t generation, std::shared_ptr<const Prepared> call, const Key& key);
void Forget();

}  // namespace ascend_moe_torch
