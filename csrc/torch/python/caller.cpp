#include "caller.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <string>
#include <vector>

#include "../kernels.h"

namespace ascend_moe_torch {

namespace {

constexpr char kCapsule[] = "ascend_moe.caller";

// What a plain CPU tensor may have: nothing else asks to see its ops.
const c10::DispatchKeySet kPlainKeys = c10::DispatchKeySet(c10::DispatchKey::CPU) |
                                       c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                       c10::autocast_dispatch_keyset;

// Not operator-: it leaves the backends in.
bool Within(c10::DispatchKeySet keys, c10::DispatchKeySet all) {
    return (keys.raw_repr() & ~all.raw_repr()) == 0;
}

class Caller {
public:
    Caller(uint64_t number, const std::string& name, PyObject* names) : number_(number) {
        const c10::OperatorHandle op =
            c10::Dispatcher::singleton().findSchemaOrThrow(("ascend_moe::" + name).c_str(), "");
        const std::vector<c10::Argument>& arguments = op.schema().arguments();
        TORCH_CHECK(PyTuple_CheckExact(names) && arguments.size() <= kMostArguments &&
                        static_cast<size_t>(PyTuple_GET_SIZE(names)) == arguments.size(),
                    "the arguments of ", name, " are not those of its schema");
        for (size_t i = 0; i < arguments.size(); ++i) {
            PyObject* key = Py_NewRef(PyTuple_GET_ITEM(names, static_cast<Py_ssize_t>(i)));
            PyUnicode_InternInPlace(&key);
            names_.push_back(key);
            positional_ += arguments[i].kwarg_only() ? 0 : 1;
            values_.push_back(arguments[i].default_value().value_or(c10::IValue()));
        }
        for (size_t i = 0; i < arguments.size(); ++i) {
            const bool required = !arguments[i].default_value().has_value();
            defaults_.push_back(required ? Argument() : Argument::Of(values_[i]));
        }
    }

    // False: not for this way.
    bool Bind(PyObject* args, PyObject* kwargs, Argument* bound) const {
        const size_t count = names_.size(), given = static_cast<size_t>(PyTuple_GET_SIZE(args));
        if (given > positional_) return false;
        for (size_t i = 0; i < given; ++i) {
            if (!Take(PyTuple_GET_ITEM(args, static_cast<Py_ssize_t>(i)), bound[i])) return false;
        }
        std::copy(defaults_.begin() + given, defaults_.end(), bound + given);
        Py_ssize_t at = 0;
        PyObject *key, *value;
        for (size_t next = given; PyDict_Next(kwargs, &at, &key, &value); ++next) {
            next = Place(key, next);
            if (next == count || next < given || !Take(value, bound[next])) return false;
        }
        return true;
    }
    size_t size() const { return names_.size(); }
    uint64_t number() const { return number_; }

private:
    // Of the argument of this name; how many there are when there is none. Callers mostly keep the schema's
    // order, and names in their source are interned, as these are.
    size_t Place(PyObject* key, size_t likely) const {
        const size_t count = names_.size();
        for (size_t i = 0; i < count; ++i) {
            const size_t here = (likely + i) % count;
            if (names_[here] == key) return here;
        }
        for (size_t i = 0; i < count; ++i) {
            if (PyUnicode_Check(key) && PyUnicode_Compare(names_[i], key) == 0) return i;
        }
        return count;
    }
    static bool Take(PyObject* object, Argument& to) {
        to = Argument();
        if (object == Py_None) {
            to.kind = Argument::kNone;
        } else if (THPVariable_CheckExact(object)) {
            to.kind = Argument::kTensor;
            to.tensor = &THPVariable_Unpack(object);
            return to.tensor->defined() && Within(to.tensor->key_set(), kPlainKeys) &&
                   !(to.tensor->requires_grad() && at::GradMode::is_enabled());
        } else if (PyLong_CheckExact(object)) {
            int overflow = 0;
            to.kind = Argument::kInt;
            to.number = PyLong_AsLongLongAndOverflow(object, &overflow);
            return overflow == 0;
        } else if (PyUnicode_CheckExact(object)) {
            Py_ssize_t bytes = 0;
            const char* text = PyUnicode_AsUTF8AndSize(object, &bytes);
            if (text == nullptr) PyErr_Clear();
            to.kind = Argument::kText;
            to.text = {text, static_cast<size_t>(bytes)};
            return text != nullptr;
        }
        return to.kind != Argument::kOther;
    }

    uint64_t number_;
    size_t positional_ = 0;
    std::vector<PyObject*> names_;     // interned, for good
    std::vector<c10::IValue> values_;  // that texts of defaults lie in
    std::vector<Argument> defaults_;
};

PyObject* Wrap(Made& made, size_t count) {
    if (count == 1) return THPVariable_Wrap(std::move(made[0]));
    PyObject* all = PyTuple_New(static_cast<Py_ssize_t>(count));
    for (size_t i = 0; all != nullptr && i < count; ++i) {
        PyObject* one = THPVariable_Wrap(std::move(made[i]));
        if (one == nullptr) Py_CLEAR(all);
        if (all != nullptr) PyTuple_SET_ITEM(all, static_cast<Py_ssize_t>(i), one);
    }
    return all;
}

PyObject* Call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    const auto* caller = static_cast<const Caller*>(PyCapsule_GetPointer(self, kCapsule));
    if (caller == nullptr) return nullptr;
    TORCH_CHECK_TYPE(count == 2 && PyTuple_CheckExact(given[0]) && PyDict_CheckExact(given[1]),
                     "a call takes a tuple and a dict");
    MarkEntered();
    Argument arguments[kMostArguments];
    Key key;
    Made made;
    size_t outputs = 0;
    if (!NobodyWatches() || Paused() || !caller->Bind(given[0], given[1], arguments) ||
        !key.Make(caller->number(), arguments, caller->size()) || !RunKnown(key, arguments, made, outputs))
        Py_RETURN_NONE;
    counts().straight.fetch_add(1, std::memory_order_relaxed);
    PyObject* found = Wrap(made, outputs);
    MarkLeft();
    return found;
    END_HANDLE_TH_ERRORS
}

PyMethodDef call_method = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Call)),
                           METH_FASTCALL, "What the op returns, or None: ask torch.ops."};

}  // namespace

bool NobodyWatches() {
    const c10::impl::LocalDispatchKeySet here = c10::impl::tls_local_dispatch_key_set();
    return Within(here.included_, c10::default_included_set) && !c10::impl::dispatch_mode_enabled() &&
           !at::impl::torch_function_mode_enabled() && !at::hasCallbacks();
}

PyObject* MakeCaller(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 3, "caller takes number, name and argument names");
    const unsigned long long number = PyLong_AsUnsignedLongLong(given[0]);
    const char* name = PyUnicode_AsUTF8(given[1]);
    if (PyErr_Occurred() != nullptr) return nullptr;
    // For good, as the op itself.
    PyObject* capsule = PyCapsule_New(new Caller(number, name, given[2]), kCapsule, nullptr);
    return capsule == nullptr ? nullptr : PyCFunction_New(&call_method, capsule);
    END_HANDLE_TH_ERRORS
}

}  // namespace ascend_moe_torch
