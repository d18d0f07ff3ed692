// The extension module that ascend_moe/compiled.py loads beside the compiled kernels.
#include "caller.h"

namespace {

PyCFunction Fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"caller", Fast(&ascend_moe_torch::MakeCaller), METH_FASTCALL, "Of one op: call(args, kwargs)."},
    {"lend", Fast(&ascend_moe_torch::LendCall), METH_FASTCALL, "A window tensor, or None."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "ascend_moe_calls", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_ascend_moe_calls() { return PyModule_Create(&module); }
