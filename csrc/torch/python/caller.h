// Calls of the ops straight from Python, past torch's binding of arguments and its dispatcher: between large
// ops each step of those runs from cold caches.
#pragma once

#include <torch/csrc/python_headers.h>

namespace ascend_moe_torch {

// Whether torch would do nothing for a call but run its CPU kernel: no mode, no trace, no transform, no
// profiler sees it.
bool NobodyWatches();

// caller(number, name, argument_names) -> call(args: tuple, kwargs: dict): what the op returns, or None where
// torch.ops has to be asked: a call that was not planned yet, that needs gradients, that is wrong.
PyObject* MakeCaller(PyObject* self, PyObject* const* given, Py_ssize_t count);

// lend(shape, dtype, group_ep, ep_world_size, ep_rank_id): a window tensor, or None: Python has to look.
PyObject* LendCall(PyObject* self, PyObject* const* given, Py_ssize_t count);

}  // namespace ascend_moe_torch
