#include <cstring>

#include "call.h"
#include "rules/check.h"

namespace ascend_moe_torch {

namespace {

AmTorchPython the_python = {};

[[noreturn]] void Refuse(const AmTorchCall& call, const std::string& text, const std::string& argument) {
    Raise(python().refused(&call, "ArgumentError", text.c_str(), argument.c_str()));
    throw std::runtime_error(text);
}

// A call's description for rules and plan.
class Description {
public:
    Description(const Op& op, const Arguments& arguments, const AmTorchCall& call, const AmTorchSettings& settings)
        : op_(op), arguments_(arguments), call_(call), settings_(settings) {
        memset(&spec_, 0, sizeof(spec_));
        spec_.op = static_cast<int32_t>(op.code);
        spec_.contract = static_cast<int32_t>(op.contract);
        spec_.group_ep_length = static_cast<int32_t>(call.group_ep_bytes);
        // C would stop at a NUL and read another name.
        const bool whole = memchr(call.comm_alg, 0, call.comm_alg_bytes) == nullptr;
        spec_.comm_alg = whole ? engine().comm_algorithm(settings.comm_alg) : -1;
        spec_.cores = settings.cores;
        spec_.core_barrier = static_cast<int32_t>(settings.core_barrier);
        spec_.timestamps = static_cast<int32_t>(settings.timestamps);
        spec_.deadline_micros = settings.deadline_micros;
        memcpy(spec_.attributes, arguments.attributes(), sizeof(spec_.attributes));
        for (const Parameter& parameter : op.parameters) Add(parameter);
    }

    const moe::CallSpec& spec() const { return spec_; }
    // Whether the rules choose the algorithm.
    bool ByItself() const { return spec_.comm_alg >= moe::kCommAlgAuto; }

    // The rules that this rank can check before it knows the communicator.
    void CheckAlone() {
        spec_.comm_world = settings_.world >= 0 ? settings_.world : call_.world;
        spec_.comm_rank = settings_.rank >= 0 ? settings_.rank : call_.rank;
        spec_.window_mib = settings_.most_window_mib;
        Plan();
    }
    void PlaceAt(const AmTorchHandle& handle) {
        spec_.comm_world = handle.world;
        spec_.comm_rank = handle.rank;
        spec_.context_kind = handle.context_kind;
        spec_.ranks_per_server = handle.ranks_per_server;
        spec_.intra_node_stores = handle.intra_node_stores;
        spec_.rdma_flags = handle.rdma_flags;
        // Caches of CPUs load rows without gaps as fast; a device's contexts take the device's alignment.
        spec_.row_unit = handle.context_kind == static_cast<int32_t>(moe::kContextTable) ? moe::kBlock : 0;
        if (handle.auto_is_window != 0 && ByItself() && !moe::HasTwoLevels(spec_)) spec_.comm_alg = moe::kCommAlgWindow;
        spec_.window_mib = handle.window_mib;
        spec_.registered_mib = handle.registered_mib;
    }
    std::shared_ptr<void> Plan(uint32_t part = moe::kPartWhole) {
        spec_.part = static_cast<int32_t>(part);
        moe::CheckResult result = {};
        void* plan = engine().plan_create(&spec_, &result);
        if (plan == nullptr) Refuse(result);
        return {plan, engine().plan_destroy};
    }

private:
    void Add(const Parameter& parameter) {
        const AtenTensorHandle tensor = arguments_.tensor(parameter);
        if (tensor == nullptr) return;
        moe::TensorDesc& description = spec_.tensors[parameter.index];
        description.dtype = static_cast<int32_t>(TypeCode(DtypeOf(tensor)));
        description.rank = static_cast<int32_t>(RankOf(tensor));
        const int64_t* sizes = SizesOf(tensor);
        for (int32_t i = 0; i < description.rank && i < 3; ++i) description.dims[i] = sizes[i];
    }

    [[noreturn]] void Refuse(const moe::CheckResult& result) const {
        std::string dtype;
        for (const Parameter& parameter : op_.parameters) {
            const AtenTensorHandle tensor = arguments_.tensor(parameter);
            if (tensor != nullptr && parameter.name == result.argument) dtype = DtypeText(DtypeOf(tensor));
        }
        Raise(python().rule_broken(&call_, result.message, result.argument, result.needed_mib, dtype.c_str()));
        throw std::runtime_error(op_.name + ": " + result.message);
    }

    const Op& op_;
    const Arguments& arguments_;
    const AmTorchCall& call_;
    const AmTorchSettings& settings_;
    moe::CallSpec spec_;
};

std::vector<Output> OutputsOf(const moe::CallSpec& spec) {
    std::vector<Output> outputs;
    int64_t words[4];
    while (engine().call_output(&spec, static_cast<int>(outputs.size()), words) != 0)
        outputs.push_back({DtypeOfCode(static_cast<uint32_t>(words[0])), words[1], {words[2], words[3]}});
    return outputs;
}

uint32_t AlgorithmOf(const void* plan) {
    uint64_t words[9] = {};
    engine().plan_info(plan, words, sizeof(words) / sizeof(words[0]));
    return static_cast<uint32_t>(words[8]);
}

}  // namespace

void UsePython(const AmTorchPython& python) { the_python = python; }
const AmTorchPython& python() { return the_python; }

CallText TextOf(const Op& op, const Arguments& arguments) {
    std::string text = op.name + kFieldEnd + std::string(arguments.group_ep()) + kFieldEnd +
                       std::string(arguments.comm_alg()) + kFieldEnd;
    const char* between = "";
    for (const Parameter& parameter : op.parameters) {
        const AtenTensorHandle tensor = arguments.tensor(parameter);
        if (tensor == nullptr) continue;
        text += between + parameter.name + " " + DtypeText(DtypeOf(tensor)) + " (";
        const int64_t rank = RankOf(tensor), *sizes = SizesOf(tensor);
        for (int64_t i = 0; i < rank; ++i) text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
        text += rank == 1 ? ",)" : ")";  // as Python writes a tuple
        between = ", ";
    }
    return std::make_shared<const std::string>(std::move(text));
}

AmTorchCall Describe(const Op& op, const Arguments& arguments, const Device& device, bool on_npu) {
    AmTorchCall call = {};
    call.op = op.name.c_str();
    call.group_ep = arguments.group_ep().data();
    call.group_ep_bytes = arguments.group_ep().size();
    const std::string_view algorithm = arguments.comm_alg();
    call.comm_alg = algorithm.data() != nullptr ? algorithm.data() : "";
    call.comm_alg_bytes = algorithm.size();
    call.world = arguments.attribute(moe::kAttribute_ep_world_size);
    call.rank = arguments.attribute(moe::kAttribute_ep_rank_id);
    call.on_npu = on_npu ? 1 : 0;
    call.device_index = device.index;
    return call;
}

Device OneDevice(const Op& op, const Arguments& arguments, bool on_npu) {
    const int32_t type = on_npu ? aoti_torch_device_type_privateuse1() : aoti_torch_device_type_cpu();
    const Parameter *first = nullptr, *bad = nullptr;
    Device device{type, 0};
    for (const Parameter& parameter : op.parameters) {  // the tensor that all others have to be with
        if (arguments.tensor(parameter) == nullptr) continue;
        device = DeviceOf(arguments.tensor(parameter));
        if (device.type == type) {
            first = &parameter;
            break;
        }
        if (!on_npu) break;
    }
    for (const Parameter& parameter : op.parameters) {
        const AtenTensorHandle tensor = arguments.tensor(parameter);
        if (bad == nullptr && tensor != nullptr &&
            (first == nullptr || !(DeviceOf(tensor) == device) || !IsDense(tensor)))
            bad = &parameter;
    }
    if (bad == nullptr && arguments.lowest() == nullptr) return device;
    const AmTorchCall call = Describe(op, arguments, device, on_npu);
    if (arguments.lowest() != nullptr) {
        const std::string& name = arguments.lowest()->name;
        Refuse(call, name + " is " + std::to_string(moe::kNoValue) + ", which no rule allows: pass another", name);
    }
    const AtenTensorHandle tensor = arguments.tensor(bad->index);
    const Device other = DeviceOf(tensor);
    std::string text = op.name + ": " + bad->name + " is ";
    if (!on_npu) {
        text += "a " + LayoutText(tensor) + " tensor on " + Text(other) +
                ", all tensors must be dense and on the same device (cpu)";
    } else if (first == nullptr) {
        text += "on " + Text(other) + ", not on npu";
    } else if (!(other == device)) {
        text += "on " + Text(other) + ", " + first->name + " on " + Text(device) +
                ": they must be on one device, pass " + bad->name + ".to('" + Text(device) + "')";
    } else {
        text += "a " + LayoutText(tensor) + " tensor, it must be dense: pass " + bad->name + ".to_dense()";
    }
    Refuse(call, text, bad->name);
}

std::shared_ptr<Prepared> Prepare(const Op& op, const Arguments& arguments, const Device& device, bool on_npu,
                                  uint32_t part) {
    const AmTorchCall call = Describe(op, arguments, device, on_npu);
    AmTorchSettings settings = {};
    Raise(python().settings(&call, &settings));
    Description description(op, arguments, call, settings);
    description.CheckAlone();  // before the group is opened, which is collective
    void* handle = nullptr;
    Raise(python().open(&call, &handle));
    auto made = std::make_shared<Prepared>();
    made->handle = *static_cast<std::shared_ptr<CommHandle>*>(handle);
    made->text = TextOf(op, arguments);
    const bool by_itself = description.ByItself();
    description.PlaceAt(made->handle->facts());
    made->plan = description.Plan(part);
    if (part == moe::kPartSend) made->finish = description.Plan(moe::kPartFinish);
    made->outputs = OutputsOf(description.spec());
    if (on_npu) {
        made->group_ep = arguments.group_ep();
        made->group_tp = arguments.group_tp();
        made->timeout_us = settings.deadline_micros;
        made->first_timeout_us = settings.first_deadline_micros;
        made->algorithm = AlgorithmOf(made->plan.get());
        // The aclnn entry does not know the probe results: pass it what was chosen.
        const char* chosen = made->algorithm == moe::kAlgorithmDirect      ? "direct"
                             : made->algorithm == moe::kAlgorithmHierarchy ? "hierarchy"
                                                                           : "window";
        made->comm_alg = by_itself ? chosen : settings.comm_alg;
    }
    return made;
}

}  // namespace ascend_moe_torch
