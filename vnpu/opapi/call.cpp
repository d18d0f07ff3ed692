// Captured calls: from the caller's argument objects to words, and from an executor to a stream.
#include "call.h"

#include "acl/python.h"

namespace vnpu {
void Call::put(int64_t number) { words.insert(words.end(), {kInt, number}); }

void Call::put(double number) {
    int64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    words.insert(words.end(), {kFloat, bits});
}

void Call::put(const char* text) {
    if (text == nullptr) return words.push_back(kNone);
    // A copy: the caller's text need not outlive the first half of the call.
    texts.push_back(std::make_shared<std::string>(text));
    words.insert(words.end(),
                 {kText, reinterpret_cast<int64_t>(texts.back()->data()), static_cast<int64_t>(texts.back()->size())});
}

void Call::put(const aclTensor* tensor) {
    if (tensor == nullptr) return words.push_back(kNone);
    const TensorValue& value = *tensor->value;
    tensors.push_back(tensor->value);
    words.insert(words.end(), {kTensor, value.dtype, value.format, reinterpret_cast<int64_t>(value.data), value.offset,
                               reinterpret_cast<int64_t>(value.dims.data()), static_cast<int64_t>(value.dims.size())});
    words.insert(words.end(), value.dims.begin(), value.dims.end());
    words.insert(words.end(), value.strides.begin(), value.strides.end());
}

void Call::put(const aclScalar* scalar) {
    if (scalar == nullptr) return words.push_back(kNone);
    switch (scalar->kind) {
        case aclScalar::kInteger: return put(scalar->integer);
        case aclScalar::kReal: return put(scalar->real);
        default: put("a complex scalar");  // no operator here takes text for a number: it says so
    }
}

int finish_capture(std::shared_ptr<Call> call, uint64_t* workspace_size, aclOpExecutor** executor) {
    if (workspace_size == nullptr || executor == nullptr) {
        vnpu_error("%sGetWorkspaceSize: workspaceSize and executor must not be null", call->name);
        return kNullArgument;
    }
    *workspace_size = 0;
    *executor = new aclOpExecutor{std::move(call)};
    return kOk;
}

int execute(aclOpExecutor* executor, void* stream) {
    if (executor == nullptr) {
        vnpu_error("an aclnn function was called without the executor that its GetWorkspaceSize gives");
        return kNullArgument;
    }
    // The graph of a capture keeps its own reference, so that it can be replayed when the executor is gone.
    const std::shared_ptr<Call> call = executor->call;
    delete executor;
    const auto run = [call] {
        const std::string problem = run_in_python(*call);
        if (problem.empty()) return;
        vnpu_error("%s", problem.c_str());
        vnpu_fault();
    };
    return vnpu_enqueue(stream, run, kNeedsPython);
}

// ---- into the Python that runs the caller's script; the queue holds its lock ----

namespace {

// run() never raises, except for an interrupt.
std::string raised(const char* what) {
    Python::the().print_error();
    return std::string(what) + " has raised the Python error above";
}

// The error, or empty when there is none.
std::string call_python(const Call& call) {
    const Python& python = Python::the();
    void* module = python.import_module("ascend_vnpu.operators");
    if (module == nullptr) return raised("the import of ascend_vnpu.operators");
    void* answer =
        python.call_method(module, "run", "sKK", call.name, reinterpret_cast<unsigned long long>(call.words.data()),
                           static_cast<unsigned long long>(call.words.size()));
    python.release_object(module);
    if (answer == nullptr) return raised("the operator");
    const char* utf8 = python.as_utf8(answer);
    std::string problem = utf8 == nullptr ? "run() gave no text" : utf8;
    python.release_object(answer);
    return problem;
}

}  // namespace

std::string run_in_python(const Call& call) {
    const std::string problem = call_python(call);
    return problem.empty() ? problem : std::string(call.name) + ": " + problem;
}

}  // namespace vnpu

VNPU_EXPORT int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
    delete executor;
    return vnpu::kOk;
}
