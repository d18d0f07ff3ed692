// What equal calls have in common: all that checks, plans and look-ups read of a call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "op.h"

namespace ascend_moe_torch {

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

}  // namespace ascend_moe_torch
