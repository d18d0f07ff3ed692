// An argument of an op as a key and a launch see it, from a stack or from Python; it owns nothing.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string_view>

// What the extension module (csrc/torch/python) uses of the library of the kernels.
#define ASCEND_MOE_TORCH_SHARED __attribute__((visibility("default")))

namespace ascend_moe_torch {

struct Argument {
    enum Kind : uint8_t { kOther, kNone, kTensor, kInt, kText };

    Kind kind = kOther;
    const at::Tensor* tensor = nullptr;
    int64_t number = 0;
    std::string_view text;

    static Argument Of(const c10::IValue& value) {
        Argument made;
        if (value.isTensor()) {
            made.kind = kTensor;
            made.tensor = &value.toTensor();
        } else if (value.isInt()) {
            made.kind = kInt;
            made.number = value.toInt();
        } else if (value.isString()) {
            made.kind = kText;
            made.text = value.toStringRef();
        } else if (value.isNone()) {
            made.kind = kNone;
        }
        return made;
    }
};

constexpr size_t kMostArguments = 32;

}  // namespace ascend_moe_torch
