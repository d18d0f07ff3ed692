// The functions below the aclnn functions of our operators (aclnnInner*). For a device CANN generates them from the
// operators' definition; here a call is planned, compared with what op_host's tiling function says, launched on a
// stream of the virtual NPU with the twin, and counted.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "abi/ascend_moe.h"
#include "acl/device.h"
#include "acl/queue.h"
#include "cann/tiling.h"
#include "cann_shim/cann_shim.h"
#include "hccl/abi.h"
#include "opapi/objects.h"

// A captured call, ready to be launched.
struct aclOpExecutor {
    const char* type = "";
    std::function<void()> run;  // null: all outputs are empty, and CANN has nothing to launch
};

// Launches of an operator type by this process.
VNPU_EXPORT uint64_t vnpu_launches(const char* op_type);

namespace {

// aclnn status codes, as CANN has them.
constexpr int kOk = 0;
constexpr int kNullArgument = 161001;
constexpr int kBadArgument = 161002;
constexpr int kInnerError = 561000;
constexpr int kTilingError = 561002;

// ---- libascend_moe.so, the twin with our kernels, opened where this process's Python finds it ----

// clang-format off
#define VNPU_MOE_FUNCTIONS(X)                                                                    \
    X(am_comm_create) X(am_comm_destroy) X(am_comm_use_context) X(am_comm_use_servers)           \
    X(am_comm_use_links) X(am_spec_bytes) X(am_plan_create) X(am_plan_destroy) X(am_plan_tiling) X(am_run) X(am_probe)  \
    X(am_card_launch)
// clang-format on

struct Library {
#define VNPU_MOE_FUNCTION(name) decltype(&::name) name = nullptr;
    VNPU_MOE_FUNCTIONS(VNPU_MOE_FUNCTION)
#undef VNPU_MOE_FUNCTION
    std::string path;
    std::string error;  // one line; empty when everything above is there
};

std::string FileOfEngine() {
    const char* engine = getenv("ASCEND_MOE_ENGINE");
    return engine != nullptr && strcmp(engine, "checked") == 0 ? "libascend_moe_checked.so" : "libascend_moe.so";
}

// As the tiling function reads it.
int IntraNodeStores() {
    const char* given = getenv("ASCEND_MOE_INTRA_NODE_STORES");
    return given != nullptr && strcmp(given, "1") == 0 ? 1 : 0;
}

// $ASCEND_MOE_LIBRARY, else in the nearest folder above this library that has it: lib/ of the package.
std::string PathOfLibrary() {
    const char* given = getenv("ASCEND_MOE_LIBRARY");
    if (given != nullptr && *given != '\0') return given;
    Dl_info here;
    if (dladdr(reinterpret_cast<void*>(&vnpu_launches), &here) == 0 || here.dli_fname == nullptr) return FileOfEngine();
    std::string folder = here.dli_fname;
    for (size_t end = folder.rfind('/'); end != std::string::npos; end = folder.rfind('/')) {
        folder.resize(end);
        const std::string path = folder + "/" + FileOfEngine();
        if (access(path.c_str(), R_OK) == 0) return path;
    }
    return FileOfEngine();
}

Library Open() {
    Library library;
    library.path = PathOfLibrary();
    void* handle = dlopen(library.path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        library.error = std::string("the twin cannot be opened: ") + dlerror();
        return library;
    }
#define VNPU_MOE_FUNCTION(name)                                                    \
    library.name = reinterpret_cast<decltype(library.name)>(dlsym(handle, #name)); \
    if (library.name == nullptr) library.error = library.path + " has no " #name ": build it again";
    VNPU_MOE_FUNCTIONS(VNPU_MOE_FUNCTION)
#undef VNPU_MOE_FUNCTION
    if (library.error.empty() && library.am_spec_bytes() != sizeof(moe::CallSpec))
        library.error = library.path + " describes calls differently: build it again";
    return library;
}

const Library& TheLibrary() {
    static const Library* library = new Library(Open());
    return *library;
}

// ---- what was launched, for tests: no fallback can pass for a launch. $ASCEND_MOE_VNPU_REPORT names a file
// to which every process adds a line of JSON when it exits ----

struct Counts {
    std::mutex mutex;
    std::map<std::string, uint64_t> launches, skips;
    int32_t server_type = -1;  // of HCCL, as the operators have set it; -1: never
    ~Counts() { Write(); }

    static std::string Object(const std::map<std::string, uint64_t>& counts) {
        std::string text = "{";
        for (const auto& [name, count] : counts)
            text += (text.size() > 1 ? ", \"" : "\"") + name + "\": " + std::to_string(count);
        return text + "}";
    }
    void Write() {
        const char* path = getenv("ASCEND_MOE_VNPU_REPORT");
        if (path == nullptr || *path == '\0') return;
        const char* rank = getenv("RANK");
        const std::string line = "{\"pid\": " + std::to_string(getpid()) + ", \"rank\": \"" +
                                 (rank != nullptr ? rank : "") + "\", \"soc\": \"" + vnpu_soc() +
                                 "\", \"server_type\": " + std::to_string(server_type) +
                                 ", \"launches\": " + Object(launches) + ", \"skips\": " + Object(skips) + "}\n";
        const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (file < 0) return;
        if (write(file, line.data(), line.size()) < 0) perror(path);
        close(file);
    }
};

Counts counts;  // its destructor writes, at the end of the process

void Count(std::map<std::string, uint64_t>& of, const char* op_type) {
    const std::lock_guard<std::mutex> lock(counts.mutex);
    ++of[op_type];
}

// ---- a call on the twin ----

constexpr uint32_t kCoresA3 = 48, kCoresA2 = 40;  // vector cores of the dies that vnpu pretends to have

struct Communicator {
    const void* window;  // of rank 0: distinguishes communicators of the same name
    void* handle;
};

// What op_host asks of HCCL, as the shim of CANN's tiling has it at the head of the tiling data.
std::string AlgConfigOf(const std::vector<uint8_t>& tiling) {
    AscendC::Mc2CcTilingConfig::Task task;
    memcpy(&task, tiling.data() + offsetof(moe::MoeDistributeMc2Head, cc), sizeof(task));
    return std::string(task.algorithm, strnlen(task.algorithm, sizeof(task.algorithm)));
}

// The twin's communicator over HCCL's windows of a group, made once. 0, or an aclnn status.
int CommunicatorOf(const char* group, int32_t context_kind, int32_t ranks_per_server,
                   const std::vector<uint8_t>& tiling, void*& comm) {
    static std::mutex mutex;
    static std::map<std::string, Communicator> known;
    const std::lock_guard<std::mutex> lock(mutex);
    VnpuWindows windows = {};
    if (vnpu_comm_windows(group, &windows) != 0) {
        vnpu_error("group_ep '%s' is no HCCL communicator of this process", group);
        return kBadArgument;
    }
    Communicator& made = known[group];
    if (made.handle == nullptr || made.window != windows.bases[0]) {
        if (made.handle != nullptr) TheLibrary().am_comm_destroy(made.handle);
        made.window = windows.bases[0];
        // On an A2 the state area is the last of HCCL's own MiB.
        const uint64_t state = context_kind == static_cast<int32_t>(moe::kContextA2) ? moe::kMiB : 0;
        const uint64_t registered = static_cast<uint64_t>(moe::RegisteredMiBOf()) * moe::kMiB;
        made.handle =
            TheLibrary().am_comm_create(windows.rank, windows.world, windows.bases,
                                        windows.data_bytes - state - registered, registered, windows.live_fds);
        if (made.handle == nullptr || TheLibrary().am_comm_use_context(made.handle, context_kind) != 0 ||
            TheLibrary().am_comm_use_servers(made.handle, ranks_per_server, IntraNodeStores()) != 0) {
            vnpu_error("no communicator of the twin over group_ep '%s' (context kind %d, %d ranks a server)", group,
                       context_kind, ranks_per_server);
            return kInnerError;
        }
        const bool several = ranks_per_server > 0 && ranks_per_server < windows.world;
        int mapped = 1;
        if (context_kind == static_cast<int32_t>(moe::kContextA2) &&
            vnpu_comm_links(group, AlgConfigOf(tiling).c_str(), several, &mapped) != 0) {
            TheLibrary().am_comm_destroy(std::exchange(made.handle, nullptr));
            return kInnerError;
        }
        if (several) TheLibrary().am_comm_use_links(made.handle, mapped);
    }
    comm = made.handle;
    return kOk;
}

void Fault(const char* type, const char* text) {
    vnpu_error("%s: %s", type, text);
    vnpu_fault();
}

// Settings that op_host's tiling function takes from the machine come back in its own words.
void Complete(moe::CallSpec& spec, const std::vector<uint8_t>& tiling) {
    moe::MoeDistributeInfo info;
    memcpy(&info, tiling.data() + sizeof(moe::MoeDistributeMc2Head), sizeof(info));
    spec.context_kind = static_cast<int32_t>(info.contextKind);
    spec.ranks_per_server = static_cast<int32_t>(info.ranksPerServer);
    spec.intra_node_stores = info.intraNodeRanks > 1 ? 1 : 0;
    spec.rdma_flags = static_cast<int32_t>(info.rdmaFlags);
    spec.core_barrier = static_cast<int32_t>(info.coreBarrier);
    spec.timestamps = static_cast<int32_t>(info.timestamps);
    spec.window_mib = info.windowMiB;
    spec.registered_mib = static_cast<int64_t>(info.registeredBytes / moe::kMiB);
    spec.cores = info.cores;
    spec.deadline_micros = static_cast<int64_t>(info.deadlineCycles / moe::kCyclesPerMicro);
}

// Null when the twin plans this call otherwise than CANN's tiling function did, or not at all.
std::shared_ptr<void> PlanOf(const moe::CallSpec& spec, const std::vector<uint8_t>& tiling) {
    moe::CheckResult check;
    const std::shared_ptr<void> plan(TheLibrary().am_plan_create(&spec, &check), [](void* made) {
        if (made != nullptr) TheLibrary().am_plan_destroy(made);
    });
    if (plan == nullptr) return vnpu_error("%s", check.message), nullptr;
    std::vector<uint8_t> bytes(TheLibrary().am_plan_tiling(plan.get(), nullptr, 0));
    TheLibrary().am_plan_tiling(plan.get(), bytes.data(), bytes.size());
    // The head of the tiling data is CANN's own (HCCL's tasks), which the twin does not have.
    const auto skip = static_cast<std::ptrdiff_t>(sizeof(moe::MoeDistributeMc2Head));
    const auto differ = std::mismatch(bytes.begin() + skip, bytes.end(), tiling.begin() + skip, tiling.end());
    if (differ.first == bytes.end() && differ.second == tiling.end()) return plan;
    vnpu_error("op_host's tiling of %zu bytes differs from the twin's of %zu at byte %zd", tiling.size(), bytes.size(),
               differ.first - bytes.begin());
    return nullptr;
}

int PrepareOp(const cann_shim::Call& call, const moe::OpInterface& op, moe::CallSpec spec, const char* group,
              const std::vector<uint8_t>& tiling, aclOpExecutor& made) {
    Complete(spec, tiling);
    void* comm = nullptr;
    if (const int status = CommunicatorOf(group, spec.context_kind, spec.ranks_per_server, tiling, comm)) return status;
    const std::shared_ptr<void> plan = PlanOf(spec, tiling);
    if (plan == nullptr) return kTilingError;
    std::vector<const void*> inputs(moe::kTensorCount);
    std::vector<void*> outputs;
    for (size_t i = 0; i < op.inputs.size; ++i) inputs[moe::IndexOf(op.inputs[i], spec.contract)] = call.inputs[i].data;
    for (const cann_shim::Tensor& output : call.outputs) outputs.push_back(output.data);
    made.run = [=, type = op.type] {
        Count(counts.launches, type);
        char fault[1024] = "";
        // The record keeps what earlier launches found.
        int32_t* record = static_cast<int32_t*>(outputs.back());
        TheLibrary().am_run(comm, plan.get(), inputs.data(), outputs.data(), record, fault, sizeof(fault));
        if (fault[0] != '\0') Fault(type, fault);
    };
    return kOk;
}

// Of AscendMoeProbe, the kernel of the bring-up, which has a tiling of its own.
int PrepareProbe(const cann_shim::Call& call, std::vector<uint8_t> tiling, aclOpExecutor& made) {
    const cann_shim::Tensor& report = call.outputs.back();
    const moe::OpInterface& op = moe::InterfaceOf(moe::kOpProbe);
    const char *type = op.type, *group = call.attributes.GetStr(0);
    const std::vector<int64_t> wanted = {moe::kProbeReportBlocks, moe::kBlockWords};
    if (report.shape.origin.dims != wanted || report.desc.type != ge::DT_INT32) {
        vnpu_error("%s: report must be int32[%u, %u]", type, moe::kProbeReportBlocks, moe::kBlockWords);
        return kBadArgument;
    }
    moe::MoeProbeTiling probe;
    memcpy(&probe, tiling.data(), sizeof(probe));
    const auto share = std::find_if(op.attributes.begin(), op.attributes.end(), [](const moe::OpAttribute& attribute) {
        return strcmp(attribute.name, "ranks_per_server") == 0;
    });
    const auto ranks = *call.attributes.GetInt(static_cast<size_t>(share - op.attributes.begin()));
    void* comm = nullptr;
    if (const int status =
            CommunicatorOf(group, static_cast<int32_t>(probe.contextKind), static_cast<int32_t>(ranks), tiling, comm))
        return status;
    made.run = [comm, type, tiling = std::move(tiling), words = static_cast<uint32_t*>(report.data)] {
        Count(counts.launches, type);
        char fault[1024] = "";
        if (TheLibrary().am_probe(comm, tiling.data(), tiling.size(), words, fault, sizeof(fault)) != 0)
            Fault(type, fault);
    };
    return kOk;
}

// Of AscendMoeOneCard: the caller has planned and placed everything.
int PrepareOneCard(const cann_shim::Call& call, const cann_shim::Tiling& tiling, aclOpExecutor& made) {
    moe::MoeOneCardTiling card;
    memcpy(&card, tiling.data.bytes.data(), sizeof(card));
    auto* const barrier = static_cast<uint32_t*>(call.outputs.back().data);
    made.run = [=, type = made.type, key = tiling.tilingKey] {
        Count(counts.launches, type);
        constexpr uint64_t kEverything[] = {0, UINT64_MAX};
        char fault[1024] = "";
        const auto* const ranks = reinterpret_cast<const uint64_t*>(card.ranks);
        if (TheLibrary().am_card_launch(ranks, barrier, card.world, card.cores, key, kEverything, 1, fault,
                                        sizeof(fault)) != 0)
            Fault(type, fault);
    };
    return kOk;
}

bool Empty(const cann_shim::Tensor& tensor) {
    const std::vector<int64_t>& dims = tensor.shape.origin.dims;
    return !tensor.given || std::find(dims.begin(), dims.end(), 0) != dims.end();
}

// Plans a call of an operator, whose tensors are contiguous. Returns 0, or an aclnn status after vnpu_error.
int Prepare(uint32_t op, cann_shim::Call call, aclOpExecutor& made, uint64_t& workspace) {
    workspace = 0;
    const moe::OpInterface& known = moe::InterfaceOf(op);
    made.type = known.type;
    if (!TheLibrary().error.empty()) return vnpu_error("%s", TheLibrary().error.c_str()), kInnerError;
    if (std::all_of(call.outputs.begin(), call.outputs.end(), Empty)) return kOk;
    const cann_shim::Tensor& last = call.outputs.back();
    const bool has_record = op == moe::kOpDispatch || op == moe::kOpCombine;
    if (has_record && (Empty(last) || last.shape.origin.dims[0] != moe::kErrorRecordWords))
        return vnpu_error("%s: error_record must have %u elements", known.type, moe::kErrorRecordWords), kBadArgument;
    call.soc = vnpu_soc();
    call.vectorCores = call.soc.rfind("Ascend910B", 0) == 0 ? kCoresA2 : kCoresA3;
    cann_shim::Tiling tiling = cann_shim::Tile(call);
    if (!tiling.ok) return vnpu_error("%s: tiling failed: %s", known.type, tiling.error.c_str()), kTilingError;
    for (const size_t bytes : tiling.workspaces) workspace += bytes;
    if (op == moe::kOpOneCard) return PrepareOneCard(call, tiling, made);
    if (op == moe::kOpProbe) return PrepareProbe(call, std::move(tiling.data.bytes), made);
    // What the tiling function has just read, as it has.
    moe::CallSpec spec;
    moe::CannAttributes given;
    if (!moe::ReadCall(gert::InferShapeContext(call), op, spec, given)) return kTilingError;
    return PrepareOp(call, known, spec, given.group_ep, tiling.data.bytes, made);
}

// ---- a call as it comes ----

// Also of a tensor without elements.
bool Contiguous(const std::vector<int64_t>& dims, const std::vector<int64_t>& strides) {
    bool dense = true, empty = false;
    int64_t expected = 1;
    for (size_t i = dims.size(); i-- > 0; expected *= dims[i]) {
        dense = dense && (dims[i] == 1 || strides[i] == expected);
        empty = empty || dims[i] == 0;
    }
    return dense || empty;
}

bool ReadTensor(const aclTensor* tensor, cann_shim::Tensor& out) {
    if (tensor == nullptr) return true;
    const vnpu::TensorValue& value = *tensor->value;
    out.given = true;
    out.shape.origin.dims = value.dims;
    out.desc.type = static_cast<ge::DataType>(value.dtype);
    if (!Contiguous(value.dims, value.strides)) {
        vnpu_error("an operator's tensor of %zu dimensions is not contiguous", value.dims.size());
        return false;
    }
    const uint32_t bytes = moe::TypeSize(moe::TypeOf(out.desc.type));
    out.data = value.data == nullptr ? nullptr : static_cast<uint8_t*>(value.data) + value.offset * bytes;
    return true;
}

// Inputs, attributes and outputs in the order of the definition, each of 64 bits; workspace size, executor.
// The callers' functions have these parameters by name: on the ABIs served (x86-64, AArch64) they may be read
// as variable arguments.
int Capture(uint32_t op, int64_t first, va_list rest) {
    const moe::OpInterface& known = moe::InterfaceOf(op);
    int64_t value = first;
    bool more = false;
    const auto next = [&] {
        if (std::exchange(more, true)) value = va_arg(rest, int64_t);
        return value;
    };
    cann_shim::Call call;
    call.opType = known.type;
    bool good = true;
    const auto tensors = [&](size_t count, std::vector<cann_shim::Tensor>& all) {
        all.resize(count);
        for (cann_shim::Tensor& tensor : all)
            good = ReadTensor(reinterpret_cast<const aclTensor*>(next()), tensor) && good;
    };
    tensors(known.inputs.size, call.inputs);
    for (const moe::OpAttribute& attribute : known.attributes) {
        const char* text = attribute.text != nullptr ? reinterpret_cast<const char*>(next()) : nullptr;
        if (attribute.text == nullptr) {
            call.attributes.values.emplace_back(next());
        } else {
            call.attributes.values.emplace_back(std::string(text != nullptr ? text : ""));
        }
    }
    tensors(known.outputs.size, call.outputs);
    auto* workspace = reinterpret_cast<uint64_t*>(next());
    auto** executor = reinterpret_cast<aclOpExecutor**>(next());
    if (workspace == nullptr || executor == nullptr) return kNullArgument;
    if (!good) return kBadArgument;
    auto made = std::make_unique<aclOpExecutor>();
    const int status = Prepare(op, std::move(call), *made, *workspace);
    if (status == kOk) *executor = made.release();
    return status;
}

// As in CANN, an executor serves one launch.
int Run(aclOpExecutor* executor, void* stream) {
    if (executor == nullptr) return kNullArgument;
    const std::unique_ptr<aclOpExecutor> owned(executor);
    if (owned->run) return vnpu_enqueue(stream, std::move(owned->run));
    Count(counts.skips, owned->type);
    return kOk;
}

}  // namespace

#define VNPU_INNER(op, name, ...)                                                              \
    VNPU_EXPORT int aclnnInner##name##GetWorkspaceSize(int64_t first, ...) {                   \
        va_list rest;                                                                          \
        va_start(rest, first);                                                                 \
        const int status = Capture(moe::op, first, rest);                                      \
        va_end(rest);                                                                          \
        return status;                                                                         \
    }                                                                                          \
    VNPU_EXPORT int aclnnInner##name(void*, uint64_t, aclOpExecutor* executor, void* stream) { \
        return Run(executor, stream);                                                          \
    }
ASCEND_MOE_OPS(VNPU_INNER)

// In CANN's libnnopbase.so: who runs the communicator's tasks.
VNPU_EXPORT void NnopbaseSetHcclServerType(void*, int32_t type) {
    const std::lock_guard<std::mutex> lock(counts.mutex);
    counts.server_type = type;
}

uint64_t vnpu_launches(const char* op_type) {
    const std::lock_guard<std::mutex> lock(counts.mutex);
    const auto entry = counts.launches.find(op_type);
    return entry == counts.launches.end() ? 0 : entry->second;
}
