// What an equal call has in common with the one before: all that Python's checks and plans read of a call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "argument.h"

namespace ascend_moe_torch {

class ASCEND_MOE_TORCH_SHARED Key {
public:
    // False: no key tells this call from others (strided or foreign tensors, symbolic sizes, long texts).
    bool Make(uint64_t op, const Argument* arguments, size_t count);

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
    bool AddVariable(const std::string& name);
    bool AddTensor(const at::Tensor& tensor);
    bool AddArgument(const Argument& argument);

    std::array<uint64_t, 256> words_;
    size_t size_ = 0;
};

// Environment variables that every call depends on, separated by blanks; before the first call. os.environ
// hands each change on to the C environment, which is read here.
void Watch(const char* names);

// Which rank of which LocalCluster the calling thread is; 0: none.
void SetPlace(uint64_t place);
uint64_t Place();

}  // namespace ascend_moe_torch
