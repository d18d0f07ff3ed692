#include "kernels.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <chrono>
#include <string>

#include "without_gil.h"

namespace ascend_moe_torch {

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using torch::jit::Stack;

constexpr char kOps[] = "ascend_moe", kPython[] = "ascend_moe_python";
constexpr size_t kRecordWords = 64, kFaultBytes = 1024, kMostInputs = 64;

std::atomic<int> pauses{0};
thread_local const Pending* pending = nullptr;
std::atomic<bool> clocks{false};
thread_local Marks marks;

void Mark(int64_t& at) {
    if (!clocks.load(std::memory_order_relaxed)) return;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    at = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

OperatorHandle FindOp(const char* library, const std::string& name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow((std::string(library) + "::" + name).c_str(), "");
}

// While Python runs the call.
class Handed {
public:
    explicit Handed(const Pending* call) : before_(pending) { pending = call; }
    ~Handed() { pending = before_; }
    Handed(const Handed&) = delete;
    Handed& operator=(const Handed&) = delete;

private:
    const Pending* before_;
};

// Raises what an op's error record tells of, and marks its communicator; Python's, under the op's own turn.
[[noreturn]] void Raise(const Entry& entry, int code, const int32_t* record, const char* fault) {
    static const OperatorHandle op = FindOp(kPython, "raise_error");
    at::Tensor words = at::detail::empty_cpu({static_cast<int64_t>(kRecordWords)}, at::kInt);
    memcpy(words.mutable_data_ptr(), record, kRecordWords * sizeof(int32_t));
    Stack stack;
    torch::jit::push(stack, static_cast<int64_t>(entry.communicator_id), static_cast<int64_t>(code), words,
                     std::string(fault));
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
    TORCH_CHECK(false, "ascend_moe: an op failed with code ", code);
}

// Runs a known call. False: its communicator is closed or has failed, nothing was done.
bool Launch(const Entry& entry, const Argument* arguments, Made& made) {
    const void* inputs[kMostInputs] = {};
    for (size_t i = 0; i < entry.positions.size(); ++i) {
        const int16_t position = entry.positions[i];
        if (position >= 0 && arguments[i].kind == Argument::kTensor)
            inputs[position] = arguments[i].tensor->const_data_ptr();
    }
    void* outputs[kMostOutputs] = {};
    for (size_t i = 0; i < entry.outputs.size(); ++i) {
        made[i] = at::detail::empty_cpu(entry.outputs[i].sizes, entry.outputs[i].type);
        outputs[i] = made[i].mutable_data_ptr();
    }
    int32_t record[kRecordWords];
    char fault[kFaultBytes];
    fault[0] = '\0';
    const WithoutGil without_gil;
    const Turn turn(*entry.gate);
    if (entry.gate->communicator() == nullptr) return false;
    Mark(marks.launched);
    const int code =
        entry.run(entry.gate->communicator(), entry.plan.get(), inputs, outputs, record, fault, kFaultBytes);
    Mark(marks.returned);
    if (code != 0) Raise(entry, code, record, fault);
    return true;
}

class CpuKernel : public c10::OperatorKernel {
public:
    CpuKernel(uint64_t number, OperatorHandle op, OperatorHandle python)
        : number_(number), arguments_(op.schema().arguments().size()), python_(python) {}

    void operator()(const OperatorHandle&, DispatchKeySet, Stack* stack) {
        MarkEntered();
        Argument arguments[kMostArguments];
        const c10::IValue* given = stack->data() + (stack->size() - arguments_);
        for (size_t i = 0; i < arguments_; ++i) arguments[i] = Argument::Of(given[i]);
        Key key;
        const bool keyed = !Paused() && key.Make(number_, arguments, arguments_);
        if (!keyed) return Hand(nullptr, stack);
        Made made;
        size_t count = 0;
        if (RunKnown(key, arguments, made, count)) {
            torch::jit::drop(*stack, arguments_);
            for (size_t i = 0; i < count; ++i) stack->emplace_back(std::move(made[i]));
            MarkLeft();
            return;
        }
        const Pending call{&key, Generation()};
        Hand(&call, stack);
    }

private:
    void Hand(const Pending* call, Stack* stack) {
        counts().python.fetch_add(1, std::memory_order_relaxed);
        const Handed handed(call);
        python_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    }

    uint64_t number_;
    size_t arguments_;
    OperatorHandle python_;
};

class AutogradKernel : public c10::OperatorKernel {
public:
    AutogradKernel(OperatorHandle op, OperatorHandle python)
        : arguments_(op.schema().arguments().size()), python_(python) {}

    void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
        if (at::GradMode::is_enabled() && AnyNeedsGrad(*stack)) return python_.redispatchBoxed(keys, stack);
        const at::AutoDispatchBelowAutograd below;
        op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
    }

private:
    bool AnyNeedsGrad(const Stack& stack) const {
        for (size_t i = stack.size() - arguments_; i < stack.size(); ++i) {
            if (stack[i].isTensor() && stack[i].toTensor().requires_grad()) return true;
        }
        return false;
    }

    size_t arguments_;
    OperatorHandle python_;
};

// Never destroyed: taking kernels back while the process ends could only break what still runs.
torch::Library& Registered(DispatchKey key) {
    return *new torch::Library(torch::Library::IMPL, kOps, key, __FILE__, __LINE__);
}

}  // namespace

void MarkEntered() { Mark(marks.entered); }
void MarkLeft() { Mark(marks.left); }
const Marks& LastMarks() { return marks; }

void SetClocks(bool on) { clocks.store(on); }

const Pending* PendingCall() { return pending; }

Counts& counts() {
    static Counts all;
    return all;
}

bool Fits(uint64_t inputs, uint64_t outputs) { return inputs <= kMostInputs && outputs <= kMostOutputs; }

void Pause(int by) { pauses.fetch_add(by); }

bool Paused() { return pauses.load(std::memory_order_relaxed) != 0; }

bool RunKnown(const Key& key, const Argument* arguments, Made& made, size_t& count) {
    const std::shared_ptr<const Entry> entry = Find(key);
    if (entry == nullptr || !entry->group.lives()) return false;
    // Deterministic mode may ask torch.empty to fill what it returns.
    if (at::globalContext().deterministicAlgorithms() || !Launch(*entry, arguments, made)) return false;
    counts().compiled.fetch_add(1, std::memory_order_relaxed);
    count = entry->outputs.size();
    return true;
}

void RegisterOp(uint64_t number, const char* name) {
    const OperatorHandle op = FindOp(kOps, name), python = FindOp(kPython, name);
    TORCH_CHECK(op.schema().arguments().size() <= kMostArguments, name, " has too many arguments");
    Registered(DispatchKey::CPU)
        .impl(name,
              torch::CppFunction::makeFromBoxedFunctor(std::make_unique<CpuKernel>(number, op, python)));
    Registered(DispatchKey::Autograd)
        .impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<AutogradKernel>(op, python)));
}

}  // namespace ascend_moe_torch
