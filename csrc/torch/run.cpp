#include <dlfcn.h>
#include <time.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>

#include "call.h"
#include "rules/shape.h"

namespace ascend_moe_torch {

namespace {

constexpr uint64_t kTextBytes = 1024;
constexpr int64_t kNanosPerSecond = 1000000000;

using Outputs = std::array<Tensor, moe::kMostOutputs>;

constexpr uint64_t kMostOps = 4;
std::deque<Op> ops;          // for good
std::atomic<int> always{0};  // above 0: every call is prepared anew
std::atomic<uint64_t> known{0}, prepared{0};
// Monotonic nanoseconds of this thread's last call.
thread_local struct {
    int64_t entered, launched, returned, left;
} marks = {};

// Looked up in the running interpreter, so that this library belongs to no version of Python.
struct Interpreter {
    int (*holds)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
    void* (*save)() = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
    void (*restore)(void*) = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_DEFAULT, "PyEval_RestoreThread"));
};
const Interpreter interpreter;

// torch's bindings let go of Python's lock before they call an op. Should a caller not, it is let go of here:
// an op may wait for another thread's.
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

int64_t Now() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * kNanosPerSecond + now.tv_nsec;
}

void Allocate(const Prepared& call, const Device& device, Outputs& outputs) {
    for (size_t i = 0; i < call.outputs.size(); ++i) {
        const Output& output = call.outputs[i];
        outputs[i] = Empty(output.sizes, output.rank, output.dtype, device);
    }
}

// The tensors of a call with their elements in order, by index.
struct Inputs {
    Inputs(const Op& op, const Arguments& arguments) {
        size_t copies = 0;
        for (const Parameter& parameter : op.parameters) {
            const AtenTensorHandle tensor =
                parameter.kind == Parameter::kTensor ? arguments.tensor(parameter.index) : nullptr;
            if (tensor != nullptr) tensors[parameter.index] = Contiguous(tensor, made[copies++]);
        }
    }
    AtenTensorHandle tensors[moe::kTensorCount] = {};
    Tensor made[moe::kTensorCount];
};

// The kernel on the twin. The lock of the end is held.
void RunOnCpu(const Op& op, const Prepared& call, const Arguments& arguments, const Outputs& outputs) {
    const Inputs inputs(op, arguments);
    const void* from[moe::kTensorCount] = {};
    void* to[moe::kMostOutputs] = {};
    for (uint32_t i = 0; i < moe::kTensorCount; ++i) {
        if (inputs.tensors[i] != nullptr) from[i] = DataOf(inputs.tensors[i]);
    }
    for (size_t i = 0; i < call.outputs.size(); ++i) to[i] = const_cast<void*>(DataOf(outputs[i].get()));
    const AmTorchEnd& end = call.end->facts();
    int32_t record[kMostRecordWords] = {};
    char fault[kTextBytes] = {};
    marks.launched = Now();
    const int code = engine().run(end.communicator, call.plan.get(), from, to, record, fault, sizeof(fault));
    marks.returned = Now();
    if (code != 0) Raise(python().failed(end.number, code, record, fault));
}

// A direct combine publishes rows of the own lent area where they lie, so they must be a tensor that may be spent.
void SpendLentRows(const Prepared& call, AtenTensorHandle expand_x) {
    const End& end = *call.end;
    if (end.lent_area() == nullptr) return;
    int32_t record[kMostRecordWords] = {};
    char fault[kTextBytes] = {};
    const void* rows = expand_x == nullptr ? nullptr : DataOf(expand_x);
    const int code =
        engine().lent_use(end.lent_area(), call.plan.get(), rows, end.launches() + 1, record, fault, sizeof(fault));
    if (code != 0) Raise(python().failed(end.facts().number, code, record, fault));
}

// Queues the kernel on the NPU. The lock of the end is held.
void QueueOnNpu(const Op& op, const Prepared& call, const Arguments& arguments, const Device& device,
                const Outputs& outputs) {
    Inputs inputs(op, arguments);
    AtenTensorHandle& scales = inputs.tensors[moe::kTensor_expand_scales];
    if (scales != nullptr && RankOf(scales) > 0 && SizesOf(scales)[0] == 0)
        scales = nullptr;  // how callers say that there are none
    AtenTensorHandle& index = inputs.tensors[moe::kTensor_expand_idx];
    if (index == nullptr) index = inputs.tensors[moe::kTensor_assist_info_for_combine];
    void* to[moe::kMostOutputs] = {};
    for (size_t i = 0; i < call.outputs.size(); ++i) to[i] = outputs[i].get();
    End& end = *call.end;
    SpendLentRows(call, inputs.tensors[moe::kTensor_expand_x]);
    AmNpuLaunch launch = {};
    launch.op = static_cast<int32_t>(op.code);
    launch.contract = static_cast<int32_t>(op.contract);
    launch.inputs = reinterpret_cast<void* const*>(inputs.tensors);
    launch.attributes = arguments.attributes();
    launch.group_ep = call.group_ep.c_str();
    launch.group_tp = call.group_tp.c_str();
    launch.comm_alg = call.comm_alg.c_str();
    launch.window_mib = end.facts().buffer_mib;
    launch.timeout_us = end.launched() ? call.timeout_us : call.first_timeout_us;
    launch.outputs = to;
    launch.record = end.record();
    launch.host_record = end.host_record();
    char text[kTextBytes] = {};
    marks.launched = Now();
    const int result = npu_launch(&launch, text, sizeof(text));
    marks.returned = Now();
    if (result == kNpuOther) throw std::runtime_error(text);
    if (result != kNpuQueued) {
        const AmTorchCall told = Describe(op, arguments, device, true);
        const std::string place = "group '" + call.group_ep + "', rank " + std::to_string(end.facts().rank) + ": ";
        const char* kind = result == kNpuNoOperator ? "LibraryError" : "AscendMoeError";
        Raise(python().refused(&told, kind, result == kNpuNoOperator ? text : (place + text).c_str(), ""));
    }
    end.Launched(call.algorithm);
}

// False: the end was closed, or has failed.
bool Launch(const Op& op, const Prepared& call, const Arguments& arguments, const Device& device, bool on_npu,
            Outputs& outputs) {
    const AmTorchEnd& end = call.end->facts();
    if (end.of_process_group && python().alive(end.number) == 0) return false;
    const std::lock_guard<End> turn(*call.end);
    if (!call.end->open()) return false;
    if (on_npu && call.end->ErrorSeen()) Raise(python().unusable(end.number));
    Allocate(call, device, outputs);
    if (on_npu) {
        QueueOnNpu(op, call, arguments, device, outputs);
    } else {
        RunOnCpu(op, call, arguments, outputs);
    }
    return true;
}

void Call(const Op& op, const Arguments& arguments, bool on_npu, Outputs& outputs) {
    const Device device = OneDevice(op, arguments, on_npu);
    const Key key(op, arguments, device);
    const bool cached = key.valid() && always.load(std::memory_order_relaxed) == 0;
    if (cached) {
        const std::shared_ptr<const Prepared> call = Find(key);
        if (call != nullptr && Launch(op, *call, arguments, device, on_npu, outputs)) {
            known.fetch_add(1, std::memory_order_relaxed);
            return;
        }
    }
    const uint64_t generation = Generation();
    const std::shared_ptr<Prepared> call = Prepare(op, arguments, device, on_npu);
    prepared.fetch_add(1, std::memory_order_relaxed);
    if (cached) {
        call->key = key.bytes();
        Remember(generation, call);
    }
    if (Launch(op, *call, arguments, device, on_npu, outputs)) return;
    Raise(python().unusable(call->end->facts().number));
    throw std::runtime_error(op.name + ": the communicator was closed by another thread");
}

template <uint64_t kNumber, bool kOnNpu>
void Kernel(StableIValue* stack, uint64_t, uint64_t) {
    const WithoutGil without_gil;
    marks.entered = Now();
    const Op& op = ops[kNumber];
    Outputs outputs;
    {
        const Arguments arguments(op, stack);
        Call(op, arguments, kOnNpu, outputs);
    }
    for (uint64_t i = 0; i < op.outputs(); ++i) stack[i] = reinterpret_cast<StableIValue>(outputs[i].release());
    marks.left = Now();
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
    auto* end = reinterpret_cast<std::shared_ptr<End>*>(stack[0]);
    (*end)->TakeRecord(Tensor(reinterpret_cast<AtenTensorHandle>(stack[1])),
                       Tensor(reinterpret_cast<AtenTensorHandle>(stack[2])));
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

// torch.ops.ascend_moe_binding.take_record: hands the error record of an NPU's end over.
void RegisterTakeRecord() {
    TorchLibraryHandle library = nullptr;
    Check(aoti_torch_library_init_fragment("ascend_moe_binding", __FILE__, __LINE__, &library), "a library");
    Check(aoti_torch_library_def(library, "take_record(int end, Tensor record, Tensor host) -> ()"), "an op");
    RegisterKernel("ascend_moe_binding", "CompositeExplicitAutograd", "take_record", &TakeRecord);
}

}  // namespace

}  // namespace ascend_moe_torch

// ---- the C interface ----

using namespace ascend_moe_torch;
using SharedEnd = std::shared_ptr<End>;

namespace {

constexpr int kInterface = 5;

End& EndOf(void* end) { return **static_cast<SharedEnd*>(end); }

// 0, or 1 when `function` throws: `text` says what. One thread at a time.
template <class Function>
int Told(Function function, char* text, uint64_t bytes) {
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
    return Told([] { RegisterTakeRecord(); }, text, bytes);
}

int am_torch_register(const char* name, const char* schema, char* text, uint64_t bytes) {
    return Told([=] { RegisterOp(name, schema); }, text, bytes);
}
int am_torch_use_engine(const char* path, char* text, uint64_t bytes) {
    return Told([=] { UseEngine(path); }, text, bytes);
}
int am_torch_use_adapter(const char* path, char* text, uint64_t bytes) {
    return Told([=] { UseAdapter(path); }, text, bytes);
}

void* am_torch_end_create(const AmTorchEnd* end) { return new SharedEnd(new End(*end)); }
void am_torch_end_destroy(void* end) { delete static_cast<SharedEnd*>(end); }
void am_torch_end_acquire(void* end, int milliseconds, int* held) {
    *held = EndOf(end).AcquireFor(milliseconds) ? 1 : 0;
}
void am_torch_end_release(void* end) { EndOf(end).unlock(); }
void am_torch_end_shut(void* end) { EndOf(end).Shut(); }
uint32_t am_torch_end_algorithm(void* end) { return EndOf(end).algorithm(); }
void am_torch_end_lend(void* end, void* area) { EndOf(end).TakeLentArea(area); }

void am_torch_forget() { Forget(); }
void am_torch_set_place(uint64_t place) { SetPlace(place); }
void am_torch_prepare_always(int by) { always.fetch_add(by); }

void am_torch_counts(uint64_t* out) {
    out[0] = known.load();
    out[1] = prepared.load();
}

void am_torch_marks(int64_t* out) {
    out[0] = marks.entered;
    out[1] = marks.launched;
    out[2] = marks.returned;
    out[3] = marks.left;
}
