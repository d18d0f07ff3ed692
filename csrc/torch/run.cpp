#include <dlfcn.h>
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include "call.h"
#include "rules/shape.h"

namespace ascend_moe_torch {

using Outputs = std::array<Tensor, moe::kMostOutputs>;

// The tensors of a call with their elements in order, by index.
struct Inputs {
    Inputs(const Op& op, const Arguments& arguments) {
        size_t copies = 0;
        for (const Parameter& parameter : op.parameters) {
            const AtenTensorHandle tensor = arguments.tensor(parameter);
            if (tensor != nullptr) tensors[parameter.index] = Contiguous(tensor, made[copies++]);
        }
    }
    AtenTensorHandle tensors[moe::kTensorCount] = {};
    Tensor made[moe::kTensorCount];
};

// An op in flight: it has sent, and its second launch needs this.
struct OpenCall {
    OpenCall(const Op& op_of_it, const StableIValue* stack) : op(op_of_it), arguments(op_of_it, stack) {}
    const Op& op;
    const Arguments arguments;
    std::optional<Inputs> inputs;
    Outputs outputs;
    std::shared_ptr<const Prepared> call;
    Device device = {};
};

namespace {

constexpr uint64_t kTextBytes = 1024;

using SharedOpen = std::shared_ptr<OpenCall>;

constexpr uint64_t kMostOps = 4;
std::deque<Op> ops;          // for good
std::atomic<int> always{0};  // above 0: every call is prepared anew
std::atomic<uint64_t> known{0}, prepared{0};
// Monotonic nanoseconds of this thread's last call.
thread_local struct {
    int64_t entered, launched, returned, left;
} times = {};

// This thread's last call, for its record. `number`: among the calls of `handle`; 0: it was refused before it was one.
thread_local struct {
    uint64_t serial, handle, number;
    int64_t rank, took;
    CallText text;
} last_call = {};

thread_local bool send_only = false;  // this thread's next op
thread_local SharedOpen last_open;    // which that left open

// Looked up in the running interpreter, so that this library belongs to no version of Python.
struct Interpreter {
    int (*holds)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    void* (*save)() = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    void (*restore)(void*) = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
};
const Interpreter interpreter;

// torch's bindings release the GIL before they call an op. This releases it if a caller has not: an op may wait for
// another thread's.
class WithoutGil {
public:
    WithoutGil() {
        const Interpreter& python = interpreter;
        const bool there = python.holds != nullptr && python.save != nullptr && python.restore != nullptr;
        if (there && python.holds() != 0) thread_ = python.save();
    }
    ~WithoutGil() {
        if (thread_ != nullptr) interpreter.restore(thread_);
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

private:
    void* thread_ = nullptr;
};

int64_t Now() { return NanosOf(CLOCK_MONOTONIC); }

void Allocate(const Prepared& call, const Device& device, Outputs& outputs) {
    for (size_t i = 0; i < call.outputs.size(); ++i) {
        const Output& output = call.outputs[i];
        outputs[i] = Empty(output.sizes, output.rank, output.dtype, device);
    }
}

// The kernel on the twin. The handle's lock is held.
void RunOnCpu(const Prepared& call, void* plan, const Inputs& inputs, const Outputs& outputs) {
    const void* from[moe::kTensorCount] = {};
    void* to[moe::kMostOutputs] = {};
    for (uint32_t i = 0; i < moe::kTensorCount; ++i) {
        if (inputs.tensors[i] != nullptr) from[i] = DataOf(inputs.tensors[i]);
    }
    for (size_t i = 0; i < call.outputs.size(); ++i) to[i] = const_cast<void*>(DataOf(outputs[i].get()));
    const AmTorchHandle& handle = call.handle->facts();
    int32_t record[kMostRecordWords] = {};
    char fault[kTextBytes] = {};
    times.launched = Now();
    const int code = engine().run(handle.communicator, plan, from, to, record, fault, sizeof(fault));
    times.returned = Now();
    if (code != 0) Raise(python().failed(handle.number, code, record, fault));
}

// A direct combine publishes rows of the own registered area in place, so their tensor must not be consumed yet.
void ConsumeRegisteredRows(const Prepared& call, uint32_t part, AtenTensorHandle expand_x) {
    const CommHandle& handle = *call.handle;
    if (handle.registered_area() == nullptr) return;
    int32_t record[kMostRecordWords] = {};
    char fault[kTextBytes] = {};
    const void* rows = expand_x == nullptr ? nullptr : DataOf(expand_x);
    const int code = engine().registered_use(handle.registered_area(), call.plan.get(), part, rows,
                                             handle.launches() + 1, record, fault, sizeof(fault));
    if (code != 0) Raise(python().failed(handle.facts().number, code, record, fault));
}

// Queues the kernel on the NPU. The handle's lock is held.
void QueueOnNpu(const Op& op, const Prepared& call, uint32_t part, const Arguments& arguments, const Inputs& inputs,
                const Device& device, const Outputs& outputs) {
    AtenTensorHandle tensors[moe::kTensorCount];
    std::copy(std::begin(inputs.tensors), std::end(inputs.tensors), tensors);
    AtenTensorHandle& scales = tensors[moe::kTensor_expand_scales];
    if (scales != nullptr && RankOf(scales) > 0 && SizesOf(scales)[0] == 0)
        scales = nullptr;  // how callers say that there are none
    AtenTensorHandle& index = tensors[moe::kTensor_expand_idx];
    if (index == nullptr) index = tensors[moe::kTensor_assist_info_for_combine];
    void* to[moe::kMostOutputs] = {};
    for (size_t i = 0; i < call.outputs.size(); ++i) to[i] = outputs[i].get();
    CommHandle& handle = *call.handle;
    ConsumeRegisteredRows(call, part, inputs.tensors[moe::kTensor_expand_x]);
    AmNpuLaunch launch = {};
    launch.op = static_cast<int32_t>(op.code);
    launch.contract = static_cast<int32_t>(op.contract);
    launch.inputs = reinterpret_cast<void* const*>(tensors);
    launch.attributes = arguments.attributes();
    launch.group_ep = call.group_ep.c_str();
    launch.group_tp = call.group_tp.c_str();
    launch.comm_alg = call.comm_alg.c_str();
    launch.window_mib = handle.facts().buffer_mib;
    launch.timeout_us = handle.launched() ? call.timeout_us : call.first_timeout_us;
    launch.part = part;
    launch.ranks_per_server = handle.facts().ranks_per_server;
    launch.core_barrier = handle.facts().core_barrier;
    launch.outputs = to;
    launch.record = handle.record();
    launch.host_record = handle.host_record();
    char text[kTextBytes] = {};
    times.launched = Now();
    const int result = npu_launch(&launch, text, sizeof(text));
    times.returned = Now();
    if (result == kNpuOther) throw std::runtime_error(text);
    if (result != kNpuQueued) {
        const AmTorchCall described = Describe(op, arguments, device, true);
        const std::string place = "group '" + call.group_ep + "', rank " + std::to_string(handle.facts().rank) + ": ";
        const char* kind = result == kNpuNoOperator ? "LibraryError" : "AscendMoeError";
        Raise(python().refused(&described, kind, result == kNpuNoOperator ? text : (place + text).c_str(), ""));
    }
    if (part != moe::kPartSend) handle.Launched(call.algorithm);  // the first that waits has the longer deadline
}

bool Alive(const AmTorchHandle& handle) { return !handle.of_process_group || python().alive(handle.number) != 0; }

[[noreturn]] void RefuseOpen(const Op& op, const Arguments& arguments, const Device& device, bool on_npu,
                             const Prepared& call, const OpenCall& open) {
    const AmTorchCall described = Describe(op, arguments, device, on_npu);
    const std::string in_flight = open.op.code == moe::kOpDispatch ? "begin_dispatch" : "begin_combine";
    const std::string text =
        op.name + ": rank " + std::to_string(call.handle->facts().rank) + " has an open " + in_flight + " on group '" +
        std::string(arguments.group_ep()) +
        "', no other op may come before its end: call finish() of it, or its hook, or close the group";
    Raise(python().refused(&described, "ArgumentError", text.c_str(), "group_ep"));
    throw std::runtime_error(text);
}

// Returns false if the handle is closed or has failed. `opening`: receives what the second launch needs.
bool Launch(const Op& op, const std::shared_ptr<const Prepared>& call, const Arguments& arguments, const Device& device,
            bool on_npu, Outputs& outputs, const SharedOpen& opening) {
    CommHandle& handle = *call->handle;
    if (!Alive(handle.facts())) return false;
    const std::lock_guard<CommHandle> turn(handle);
    if (!handle.open()) return false;
    if (const SharedOpen open = handle.opened()) RefuseOpen(op, arguments, device, on_npu, *call, *open);
    if (on_npu && handle.ErrorSeen()) Raise(python().unusable(handle.facts().number));
    Allocate(*call, device, outputs);
    std::optional<Inputs> own;
    const Inputs& inputs = (opening ? opening->inputs : own).emplace(op, arguments);
    last_call.handle = handle.facts().number;
    last_call.number = handle.last_calls().Begin(call->text);
    if (on_npu) {
        const uint32_t part = opening ? moe::kPartSend : moe::kPartWhole;
        QueueOnNpu(op, *call, part, arguments, inputs, device, outputs);
    } else {
        RunOnCpu(*call, call->plan.get(), inputs, outputs);
    }
    last_call.took = Now() - times.entered;
    last_call.text = call->text;
    handle.last_calls().Returned(last_call.number, last_call.took);
    if (opening) {
        opening->call = call;
        opening->device = device;
        for (size_t i = 0; i < call->outputs.size(); ++i) {
            AtenTensorHandle same = nullptr;
            Check(aoti_torch_new_tensor_handle(outputs[i].get(), &same), "a tensor");
            opening->outputs[i].reset(same);
        }
        handle.SetOpened(opening);
        last_open = opening;
    }
    return true;
}

void Finish(const OpenCall& open) {
    const std::shared_ptr<CommHandle>& handle = open.call->handle;
    const std::lock_guard<CommHandle> turn(*handle);
    const uint64_t number = handle->facts().number;
    if (!Alive(handle->facts()) || !handle->open()) {
        Raise(python().unusable(number));
        throw std::runtime_error(open.op.name + ": the communicator was closed by another thread");
    }
    if (handle->opened().get() != &open) throw std::runtime_error(open.op.name + ": finish() has been called");
    handle->SetOpened(nullptr);  // whatever comes of it
    if (open.device.type != aoti_torch_device_type_privateuse1())
        return RunOnCpu(*open.call, open.call->finish.get(), *open.inputs, open.outputs);
    QueueOnNpu(open.op, *open.call, moe::kPartFinish, open.arguments, *open.inputs, open.device, open.outputs);
    if (handle->ErrorSeen()) Raise(python().unusable(number));  // peers need this launch all the same
}

void Call(const Op& op, const Arguments& arguments, bool on_npu, Outputs& outputs, const SharedOpen& opening) {
    const Device device = OneDevice(op, arguments, on_npu);
    const uint32_t part = opening ? moe::kPartSend : moe::kPartWhole;
    const Key key(op, arguments, device, part);
    const bool cached = key.valid() && always.load(std::memory_order_relaxed) == 0;
    if (cached) {
        const std::shared_ptr<const Prepared> call = Find(key);
        if (call != nullptr && Launch(op, call, arguments, device, on_npu, outputs, opening)) {
            known.fetch_add(1, std::memory_order_relaxed);
            return;
        }
    }
    const uint64_t generation = Generation();
    const std::shared_ptr<Prepared> call = Prepare(op, arguments, device, on_npu, part);
    prepared.fetch_add(1, std::memory_order_relaxed);
    if (cached) {
        call->key = key.bytes();
        Remember(generation, call);
    }
    if (Launch(op, call, arguments, device, on_npu, outputs, opening)) return;
    Raise(python().unusable(call->handle->facts().number));
    throw std::runtime_error(op.name + ": the communicator was closed by another thread");
}

// A call, with what its record is made from.
void CallRecorded(const Op& op, const Arguments& arguments, bool on_npu, Outputs& outputs, const SharedOpen& opening) {
    ++last_call.serial;
    last_call.handle = last_call.number = 0;
    last_call.took = -1;
    last_call.rank = arguments.attribute(moe::kAttribute_ep_rank_id);
    try {
        Call(op, arguments, on_npu, outputs, opening);
    } catch (...) {
        last_call.took = Now() - times.entered;
        last_call.text = TextOf(op, arguments);
        throw;
    }
}

template <uint64_t kNumber, bool kOnNpu>
void Kernel(StableIValue* stack, uint64_t, uint64_t) {
    const WithoutGil without_gil;
    times.entered = Now();
    const Op& op = ops[kNumber];
    Outputs outputs;
    if (std::exchange(send_only, false)) {
        const auto opening = std::make_shared<OpenCall>(op, stack);
        CallRecorded(op, opening->arguments, kOnNpu, outputs, opening);
    } else {
        const Arguments arguments(op, stack);
        CallRecorded(op, arguments, kOnNpu, outputs, nullptr);
    }
    for (uint64_t i = 0; i < op.outputs(); ++i) stack[i] = reinterpret_cast<StableIValue>(outputs[i].release());
    times.left = Now();
}

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);
struct Kernels {
    Boxed cpu, npu;
};
template <uint64_t kNumber>
constexpr Kernels KernelsOf() {
    return {&Kernel<kNumber, false>, &Kernel<kNumber, true>};
}
constexpr Kernels kKernels[kMostOps] = {KernelsOf<0>(), KernelsOf<1>(), KernelsOf<2>(), KernelsOf<3>()};

// Tensors of other layouts come to the kernel of dense ones, which refuses them by name.
constexpr const char* kCpuKeys[] = {"CPU",          "SparseCPU",  "SparseCsrCPU", "MkldnnCPU",
                                    "QuantizedCPU", "SparseMeta", "SparseCsrMeta"};
constexpr const char* kNpuKeys[] = {"PrivateUse1", "SparsePrivateUse1", "SparseCsrPrivateUse1"};

// take_record(int end, Tensor record, Tensor host) -> (): an op, as tensors come from Python by torch alone.
void TakeRecord(StableIValue* stack, uint64_t, uint64_t) {
    auto* handle = reinterpret_cast<std::shared_ptr<CommHandle>*>(stack[0]);
    (*handle)->TakeRecord(Tensor(reinterpret_cast<AtenTensorHandle>(stack[1])),
                          Tensor(reinterpret_cast<AtenTensorHandle>(stack[2])));
}

// finish(int open) -> (): an op, so that its errors are raised as those of the other ops are.
void FinishOpen(StableIValue* stack, uint64_t, uint64_t) {
    const WithoutGil without_gil;
    times.entered = Now();
    const SharedOpen open = *reinterpret_cast<SharedOpen*>(stack[0]);
    Finish(*open);
    times.left = Now();
}

void RegisterKernel(const char* space, const char* key, const char* name, Boxed kernel) {
    TorchLibraryHandle library = nullptr;  // for good: what still runs when the process ends needs its kernels
    Check(aoti_torch_library_init_impl(space, key, __FILE__, __LINE__, &library), "a library of kernels");
    Check(torch_library_impl(library, name, kernel, kTorchTarget), "a kernel");
}

// The kernels for tensors on CPU and NPU.
void RegisterOp(const char* name, const char* schema) {
    const uint64_t number = ops.size();
    if (number >= kMostOps) throw std::runtime_error("there are more ops than kernels");
    ops.push_back(Op::Parse(number, name, schema));
    for (const char* key : kCpuKeys) RegisterKernel("ascend_moe", key, name, kKernels[number].cpu);
    for (const char* key : kNpuKeys) RegisterKernel("ascend_moe", key, name, kKernels[number].npu);
}

// torch.ops.ascend_moe_binding: take_record passes an NPU handle's error record, finish ends an op in flight.
void RegisterBinding() {
    TorchLibraryHandle library = nullptr;
    Check(aoti_torch_library_init_fragment("ascend_moe_binding", __FILE__, __LINE__, &library), "a library");
    Check(aoti_torch_library_def(library, "take_record(int end, Tensor record, Tensor host) -> ()"), "an op");
    RegisterKernel("ascend_moe_binding", "CompositeExplicitAutograd", "take_record", &TakeRecord);
    Check(aoti_torch_library_def(library, "finish(int open) -> ()"), "an op");
    RegisterKernel("ascend_moe_binding", "CompositeExplicitAutograd", "finish", &FinishOpen);
}

}  // namespace

}  // namespace ascend_moe_torch

// ---- the C interface ----

using namespace ascend_moe_torch;
using SharedHandle = std::shared_ptr<CommHandle>;

namespace {

constexpr int kInterface = 9;

CommHandle& HandleOf(void* handle) { return **static_cast<SharedHandle*>(handle); }

// Copies as much of a text as fits. Returns the bytes of all of it.
uint64_t GiveText(const std::string& from, char* to, uint64_t bytes) {
    memcpy(to, from.data(), std::min<uint64_t>(from.size(), bytes));
    return from.size();
}

// 0, or 1 when `function` throws: `text` says what. One thread at a time.
template <class Function>
int CatchErrors(Function function, char* text, uint64_t bytes) {
    static std::mutex turn;
    const std::lock_guard<std::mutex> guard(turn);
    try {
        function();
        return 0;
    } catch (const std::exception& error) {
        strncpy(text, error.what(), bytes - 1);
        text[bytes - 1] = '\0';
        return 1;
    }
}

}  // namespace

int am_torch_interface() { return kInterface; }

int am_torch_python(const AmTorchPython* python, const char* variables, char* text, uint64_t bytes) {
    UsePython(*python);
    Watch(variables);
    return CatchErrors([] { RegisterBinding(); }, text, bytes);
}

int am_torch_register(const char* name, const char* schema, char* text, uint64_t bytes) {
    return CatchErrors([=] { RegisterOp(name, schema); }, text, bytes);
}
int am_torch_use_engine(const char* path, char* text, uint64_t bytes) {
    return CatchErrors([=] { UseEngine(path); }, text, bytes);
}
int am_torch_use_adapter(const char* path, char* text, uint64_t bytes) {
    return CatchErrors([=] { UseAdapter(path); }, text, bytes);
}

void* am_torch_handle_create(const AmTorchHandle* handle) { return new SharedHandle(new CommHandle(*handle)); }
void am_torch_handle_destroy(void* handle) { delete static_cast<SharedHandle*>(handle); }
void am_torch_handle_acquire(void* handle, int milliseconds, int* held) {
    *held = HandleOf(handle).AcquireFor(milliseconds) ? 1 : 0;
}
void am_torch_handle_release(void* handle) { HandleOf(handle).unlock(); }
void am_torch_handle_shut(void* handle) { HandleOf(handle).Shut(); }
uint32_t am_torch_handle_algorithm(void* handle) { return HandleOf(handle).algorithm(); }
void am_torch_handle_register(void* handle, void* area) { HandleOf(handle).TakeRegisteredArea(area); }

uint64_t am_torch_last_call(int64_t* out, char* text, uint64_t bytes) {
    if (last_call.serial == 0) return 0;
    const int64_t words[] = {static_cast<int64_t>(last_call.serial), static_cast<int64_t>(last_call.handle),
                             static_cast<int64_t>(last_call.number), last_call.rank, last_call.took};
    std::copy(std::begin(words), std::end(words), out);
    return last_call.text ? GiveText(*last_call.text, text, bytes) : 0;
}
void am_torch_handle_failed(void* handle, uint64_t number, int64_t took, uint64_t epoch, const char* outcome) {
    HandleOf(handle).last_calls().Failed(number, took, epoch, outcome);
}
uint64_t am_torch_handle_calls(void* handle, char* text, uint64_t bytes) {
    return GiveText(HandleOf(handle).last_calls().Text(), text, bytes);
}

void am_torch_forget() { Forget(); }
void am_torch_set_place(uint64_t place) { SetPlace(place); }
void am_torch_prepare_always(int by) { always.fetch_add(by); }

void am_torch_send_only(int next) {
    send_only = next != 0;
    last_open.reset();
}
void* am_torch_take_open() { return last_open ? new SharedOpen(std::move(last_open)) : nullptr; }
void am_torch_drop_open(void* open) { delete static_cast<SharedOpen*>(open); }

void am_torch_counts(uint64_t* out) {
    out[0] = known.load();
    out[1] = prepared.load();
}

void am_torch_call_times(int64_t* out) {
    out[0] = times.entered;
    out[1] = times.launched;
    out[2] = times.returned;
    out[3] = times.left;
}
