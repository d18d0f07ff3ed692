// A call on the twin: planned, compared with what op_host's tiling function says, launched on a stream,
// counted.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "cann/platform.h"
#include "cust_opapi.h"
#include "hccl/vnpu_windows.h"
#include "rules/check.h"

namespace vnpu_moe {

namespace {

class OpCall : public Call {
public:
    OpCall(Arguments arguments, void* comm, void* plan)
        : arguments_(std::move(arguments)), comm_(comm), plan_(plan) {
        const moe::OpInterface op = arguments_.interface();
        const bool v2 = arguments_.Integer("contract") == static_cast<int64_t>(moe::kContractV2);
        inputs_.resize(moe::kTensorCount);
        for (size_t i = 0; i < op.inputs.size; ++i) {
            const bool assist = v2 && op.inputs[i].index == moe::kTensor_expand_idx;
            inputs_[assist ? moe::kTensor_assist_info_for_combine : op.inputs[i].index] =
                arguments_.inputs[i].data;
        }
        for (const Tensor& output : arguments_.outputs) outputs_.push_back(output.data);
    }
    ~OpCall() override {
        if (plan_ != nullptr) TheLibrary().am_plan_destroy(plan_);
    }
    OpCall(const OpCall&) = delete;
    OpCall& operator=(const OpCall&) = delete;

    bool skipped() const override { return plan_ == nullptr; }
    const char* type() const override { return arguments_.interface().type; }

    void Run() override {
        CountLaunch(type());
        char fault[1024] = "";
        int32_t record[moe::kErrorRecordWords];
        const int code =
            TheLibrary().am_run(comm_, plan_, inputs_.data(), outputs_.data(), record, fault, sizeof(fault));
        if (code == 0) return;
        if (fault[0] != '\0') {
            vnpu_error("%s: %s", type(), fault);
            vnpu_fault();
            return;
        }
        Tell(record);
    }

private:
    // The twin gives every launch its own record. On a device the record keeps the result of earlier
    // launches, and a kernel replaces it only by a worse one.
    void Tell(const int32_t* record) {
        int32_t* device = static_cast<int32_t*>(outputs_.back());
        const bool written = device[moe::kRecMagic] == moe::kRecordMagic;
        const auto fatal = [](const int32_t* words) {
            return words[moe::kRecCode] >= static_cast<int32_t>(moe::kFirstFatal);
        };
        if (!written || (fatal(record) && !fatal(device)))
            memcpy(device, record, moe::kErrorRecordWords * sizeof(int32_t));
    }

    Arguments arguments_;
    void* comm_;
    void* plan_;
    std::vector<const void*> inputs_;
    std::vector<void*> outputs_;
};

struct Communicator {
    const void* window;  // of rank 0: tells a communicator from a later one of the same name
    void* handle;
};

}  // namespace

int CommunicatorOf(const std::string& group, int32_t context_kind, int32_t ranks_per_server, void*& comm) {
    static std::mutex mutex;
    static std::map<std::string, Communicator> known;
    const std::lock_guard<std::mutex> lock(mutex);
    VnpuWindows windows = {};
    if (vnpu_comm_windows(group.c_str(), &windows) != 0) {
        vnpu_error("group_ep '%s' is no HCCL communicator of this process", group.c_str());
        return kBadArgument;
    }
    Communicator& made = known[group];
    if (made.handle == nullptr || made.window != windows.bases[0]) {
        if (made.handle != nullptr) TheLibrary().am_comm_destroy(made.handle);
        made.window = windows.bases[0];
        // On an A2 the state area is the last of HCCL's own MiB.
        const uint64_t state = context_kind == static_cast<int32_t>(moe::kContextA2) ? moe::kMiB : 0;
        made.handle = TheLibrary().am_comm_create(windows.rank, windows.world, windows.bases,
                                                  windows.data_bytes - state, 0, windows.live_fds);
        if (made.handle == nullptr || TheLibrary().am_comm_use_context(made.handle, context_kind) != 0 ||
            TheLibrary().am_comm_use_servers(made.handle, ranks_per_server) != 0) {
            vnpu_error("no communicator of the twin over group_ep '%s' (context kind %d, %d ranks a server)",
                       group.c_str(), context_kind, ranks_per_server);
            return kInnerError;
        }
    }
    comm = made.handle;
    return kOk;
}

namespace {

// The same description that op_host reads from CANN's context.
moe::CallSpec SpecOf(const Arguments& arguments) {
    moe::CallSpec spec;
    memset(&spec, 0, sizeof(spec));
    const moe::OpInterface op = arguments.interface();
    spec.op = static_cast<int32_t>(arguments.op);
    spec.contract = static_cast<int32_t>(arguments.Integer("contract"));
    spec.group_ep_length = static_cast<int32_t>(arguments.String("group_ep").size());
    spec.comm_alg = moe::AlgorithmIndexOf(arguments.String("comm_alg").c_str());
    std::fill_n(spec.attributes, static_cast<size_t>(moe::kAttributeCount), moe::kNoValue);
    for (size_t i = 0; i < op.attributes.size; ++i) {
        const uint32_t index = moe::AttributeIndexOf(op.attributes[i].name);
        if (index < moe::kAttributeCount) spec.attributes[index] = arguments.integers[i];
    }
    const bool v2 = spec.contract == static_cast<int32_t>(moe::kContractV2);
    for (size_t i = 0; i < op.inputs.size; ++i) {
        const bool assist = v2 && op.inputs[i].index == moe::kTensor_expand_idx;
        spec.tensors[assist ? moe::kTensor_assist_info_for_combine : op.inputs[i].index] =
            arguments.inputs[i].desc;
    }
    spec.comm_world = arguments.Integer("ep_world_size");
    spec.comm_rank = arguments.Integer("ep_rank_id");
    return spec;
}

// Settings that op_host's tiling function takes from the machine come back in its own words.
void Complete(moe::CallSpec& spec, const Tiling& tiling) {
    moe::MoeDistributeInfo info;
    memcpy(&info, tiling.bytes.data() + sizeof(moe::MoeDistributeMc2Head), sizeof(info));
    spec.context_kind = static_cast<int32_t>(info.contextKind);
    spec.ranks_per_server = static_cast<int32_t>(info.ranksPerServer);
    spec.window_mib = info.windowMiB;
    spec.lent_mib = static_cast<int64_t>(info.lentBytes / moe::kMiB);
    spec.cores = info.cores;
    spec.deadline_micros = static_cast<int64_t>(info.deadlineCycles / moe::kCyclesPerMicro);
}

// Null when the twin plans this call otherwise than CANN's tiling function did, or not at all.
void* PlanOf(const moe::CallSpec& spec, const Tiling& tiling) {
    moe::CheckResult check;
    void* plan = TheLibrary().am_plan_create(&spec, &check);
    if (plan == nullptr) {
        vnpu_error("%s", check.message);
        return nullptr;
    }
    std::vector<uint8_t> bytes(TheLibrary().am_plan_tiling(plan, nullptr, 0));
    TheLibrary().am_plan_tiling(plan, bytes.data(), bytes.size());
    // The head of the tiling data is CANN's own (HCCL's tasks), which the twin does not have.
    constexpr size_t kHead = sizeof(moe::MoeDistributeMc2Head);
    if (bytes.size() == tiling.bytes.size() &&
        memcmp(bytes.data() + kHead, tiling.bytes.data() + kHead, bytes.size() - kHead) == 0) {
        return plan;
    }
    const auto differ =
        std::mismatch(bytes.begin() + kHead, bytes.end(), tiling.bytes.begin() + kHead, tiling.bytes.end());
    vnpu_error("op_host's tiling of %zu bytes differs from the twin's of %zu at byte %zd",
               tiling.bytes.size(), bytes.size(), differ.first - bytes.begin());
    TheLibrary().am_plan_destroy(plan);
    return nullptr;
}

}  // namespace

int Prepare(Arguments arguments, std::shared_ptr<Call>& call, uint64_t& workspace) {
    workspace = 0;
    const Library& library = TheLibrary();
    if (!library.error.empty()) return vnpu_error("%s", library.error.c_str()), kInnerError;
    const auto empty = [](const Tensor& output) { return output.empty(); };
    if (std::all_of(arguments.outputs.begin(), arguments.outputs.end(), empty)) {
        // CANN has nothing to launch for such an operator.
        call = std::make_shared<OpCall>(std::move(arguments), nullptr, nullptr);
        return kOk;
    }
    const bool probe = arguments.op == moe::kOpProbe;
    if (!probe &&
        (arguments.outputs.back().empty() || arguments.outputs.back().dims[0] != moe::kErrorRecordWords))
        return vnpu_error("%s: error_record must have %u elements", arguments.interface().type,
                          moe::kErrorRecordWords),
               kBadArgument;
    Tiling tiling;
    std::string why;
    if (!RunTiling(arguments, tiling, why))
        return vnpu_error("%s: tiling failed: %s", arguments.interface().type, why.c_str()), kTilingError;
    if (probe) {
        workspace = tiling.workspace;
        return PrepareProbe(arguments, std::move(tiling), call);
    }
    moe::CallSpec spec = SpecOf(arguments);
    Complete(spec, tiling);
    void* comm = nullptr;
    if (const int status =
            CommunicatorOf(arguments.String("group_ep"), spec.context_kind, spec.ranks_per_server, comm))
        return status;
    void* plan = PlanOf(spec, tiling);
    if (plan == nullptr) return kTilingError;
    workspace = tiling.workspace;
    call = std::make_shared<OpCall>(std::move(arguments), comm, plan);
    return kOk;
}

int Enqueue(const std::shared_ptr<Call>& call, void* stream) {
    if (call->skipped()) {
        CountSkip(call->type());
        return kOk;
    }
    return vnpu_enqueue_call(stream, [call] { call->Run(); });
}

// ---- a launch of AscendMoeProbe, the kernel of the bring-up ----

namespace {

class ProbeCall : public Call {
public:
    ProbeCall(Tensor report, void* comm, std::vector<uint8_t> tiling)
        : report_(std::move(report)), comm_(comm), tiling_(std::move(tiling)) {}

    const char* type() const override { return moe::InterfaceOf(moe::kOpProbe).type; }
    void Run() override {
        CountLaunch(type());
        char fault[1024] = "";
        const int code = TheLibrary().am_probe(comm_, tiling_.data(), tiling_.size(),
                                               static_cast<uint32_t*>(report_.data), fault, sizeof(fault));
        if (code == 0) return;
        vnpu_error("%s: %s", type(), fault);
        vnpu_fault();
    }

private:
    Tensor report_;
    void* comm_;
    std::vector<uint8_t> tiling_;
};

}  // namespace

int PrepareProbe(const Arguments& arguments, Tiling tiling, std::shared_ptr<Call>& call) {
    const Tensor& report = arguments.outputs[0];
    const std::vector<int64_t> wanted = {moe::kProbeReportBlocks, moe::kBlockWords};
    if (report.dims != wanted || report.desc.dtype != static_cast<int32_t>(moe::kTypeInt32)) {
        vnpu_error("%s: report must be int32[%u, %u]", arguments.interface().type, moe::kProbeReportBlocks,
                   moe::kBlockWords);
        return kBadArgument;
    }
    moe::MoeProbeTiling probe;
    memcpy(&probe, tiling.bytes.data(), sizeof(probe));
    const bool a2 = probe.contextKind == moe::kContextA2;
    void* comm = nullptr;
    const int status = CommunicatorOf(arguments.String("group_ep"), static_cast<int32_t>(probe.contextKind),
                                      a2 ? static_cast<int32_t>(moe::kA2RanksPerServer) : 0, comm);
    if (status == kOk) call = std::make_shared<ProbeCall>(report, comm, std::move(tiling.bytes));
    return status;
}

}  // namespace vnpu_moe
