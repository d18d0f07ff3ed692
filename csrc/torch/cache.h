// Prepared calls, checked and planned for one end of a communicator, and the key that equal calls share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "end.h"
#include "op.h"

namespace ascend_moe_torch {

// All that checks, plans and look-ups read of a call.
class Key {
public:
    // `valid` is false where nothing tells this call from others: too long texts, tensors of many dimensions.
    Key(const Op& op, const Arguments& arguments, const Device& device);

    bool valid() const { return valid_; }
    const uint64_t* begin() const { return words_.data(); }
    size_t size() const { return size_; }
    uint64_t hash() const;
    bool operator==(const std::vector<uint64_t>& words) const;

private:
    bool Add(uint64_t word) {
        if (size_ == words_.size()) return false;
        words_[size_++] = word;
        return true;
    }
    bool AddText(std::string_view text);
    bool AddVariables();
    bool AddVariable(const char* name);
    bool AddTensor(AtenTensorHandle tensor);

    std::array<uint64_t, 256> words_;
    size_t size_ = 0;
    bool valid_;
};

// Environment variables that every call depends on, separated by blanks; before the first call. os.environ
// hands each change on to the C environment, which is read here.
void Watch(const char* names);

// Which rank of which LocalCluster the calling thread is; 0: none.
void SetPlace(uint64_t place);

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
