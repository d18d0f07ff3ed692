#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "../lend.h"
#include "caller.h"

namespace ascend_moe_torch {

namespace {

constexpr Py_ssize_t kMostSizes = 8;

bool ToInt(PyObject* object, int64_t& to) {
    if (!PyLong_CheckExact(object)) return false;
    int overflow = 0;
    to = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0;
}

// An int alone is a shape too, but Python's: nobody takes one of those between large ops.
bool ToSizes(PyObject* shape, c10::SmallVector<int64_t, kMostSizes>& sizes) {
    if (!PyTuple_Check(shape) && !PyList_Check(shape)) return false;  // torch.Size is a tuple
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(shape);
    if (count > kMostSizes) return false;
    sizes.resize(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (!ToInt(PySequence_Fast_GET_ITEM(shape, i), sizes[static_cast<size_t>(i)])) return false;
    }
    return true;
}

}  // namespace

PyObject* LendCall(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 5, "lend takes shape, dtype, group_ep, ep_world_size and ep_rank_id");
    c10::SmallVector<int64_t, kMostSizes> sizes;
    int64_t world = 0, rank = 0;
    if (!NobodyWatches() || !ToSizes(given[0], sizes) || !THPDtype_Check(given[1]) ||
        !PyUnicode_CheckExact(given[2]) || !ToInt(given[3], world) || !ToInt(given[4], rank))
        Py_RETURN_NONE;
    Py_ssize_t bytes = 0;
    const char* group = PyUnicode_AsUTF8AndSize(given[2], &bytes);
    if (group == nullptr) return nullptr;
    const at::ScalarType type = reinterpret_cast<THPDtype*>(given[1])->scalar_type;
    std::optional<at::Tensor> made = Lend(sizes, type, {group, static_cast<size_t>(bytes)}, world, rank);
    if (!made.has_value()) Py_RETURN_NONE;
    return THPVariable_Wrap(std::move(*made));
    END_HANDLE_TH_ERRORS
}

}  // namespace ascend_moe_torch
