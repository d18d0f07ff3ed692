#include "op_launch.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "ascend_moe.h"
#include "twin/engine/timeline.h"

namespace ops {

// A kernel entry with one argument per place: its type, and its call with an array of them.
template <class Places>
struct Entry;
template <size_t... kPlace>
struct Entry<std::index_sequence<kPlace...>> {
    template <size_t>
    using Argument = GM_ADDR;
    using Type = void(Argument<kPlace>...);
    template <Type* kEntry>
    static void Call(GM_ADDR const* arguments) {
        kEntry(arguments[kPlace]...);
    }
};
using DispatchEntry = Entry<std::make_index_sequence<moe::DispatchArgument::kCount>>;
using CombineEntry = Entry<std::make_index_sequence<moe::CombineArgument::kCount>>;

}  // namespace ops

extern "C" ops::DispatchEntry::Type ascend_moe_distribute_dispatch;
// One a dtype: the same source compiled three times under three names.
extern "C" ops::CombineEntry::Type ascend_moe_distribute_combine_bf16, ascend_moe_distribute_combine_fp16,
    ascend_moe_distribute_combine_fp32;

namespace ops {

namespace {

// An entry; arguments by moe::DispatchArgument, CombineArgument.
using Kernel = void(GM_ADDR const* arguments);

// Outputs are undefined past the received rows. Small ones are zeroed anyway, so that tools that
// compare whole tensors twice (opcheck) see equal bytes; large ones would cost as much as the op.
constexpr uint64_t kZeroUndefinedBytes = 32 * 1024;

// Of a tensor of more dimensions than are known, which no kernel reads, a part.
template <class Desc>
uint64_t BytesOf(const Desc& tensor) {
    constexpr int kKnown = sizeof(tensor.dims) / sizeof(tensor.dims[0]);
    uint64_t bytes = moe::TypeSize(static_cast<uint32_t>(tensor.dtype));
    for (int i = 0; i < std::min<int>(tensor.rank, kKnown); ++i) bytes *= static_cast<uint64_t>(tensor.dims[i]);
    return bytes;
}

// Of expand_x of a direct combine, in memory of `own` or not.
RegisteredArea::State StateOfRows(const Plan& plan, const RegisteredArea* own, const void* rows) {
    if (own == nullptr || !own->Contains(rows)) return RegisteredArea::ElsewhereOf(own, rows);
    RegisteredArea::State state = own->StateOf(rows, BytesOf(moe::Tensor(plan.spec, moe::kTensor_expand_x)));
    if (state.use == RegisteredArea::Use::kGood && moe::CommQuantMode(plan.info()) != 0)
        state.use = RegisteredArea::Use::kCommQuant;
    return state;
}

// Whether a combine depends on its rows lying in registered memory: direct reads them there; codes cannot lie there.
bool UsesRegistered(const moe::MoeDistributeInfo& info) {
    return info.algorithm == moe::kAlgorithmDirect || moe::CommQuantMode(info) != 0;
}

bool IsRows(const moe::OpTensor& tensor) { return tensor.type == moe::kRows || tensor.type == moe::kWireRows; }

Kernel* KernelOf(const moe::CallPlan& call) {
    if (call.op == moe::kOpDispatch) return &DispatchEntry::Call<&ascend_moe_distribute_dispatch>;
    if (call.xType == moe::kTypeBf16) return &CombineEntry::Call<&ascend_moe_distribute_combine_bf16>;
    if (call.xType == moe::kTypeFp16) return &CombineEntry::Call<&ascend_moe_distribute_combine_fp16>;
    return &CombineEntry::Call<&ascend_moe_distribute_combine_fp32>;
}

}  // namespace

OpLaunch::OpLaunch(Communicator& comm, const Plan& plan, const void* const* inputs, void* const* outputs,
                   int32_t* record)
    : comm_(comm), plan_(plan), inputs_(inputs), outputs_(outputs) {
    const moe::MoeDistributeInfo& info = plan_.info();
    spec_.block_dim = plan.call.blockDim;
    spec_.name = plan.dispatch() ? "dispatch" : "combine";
    spec_.tiling_key = plan.call.tilingKey;
    spec_.hccl_context[0] = reinterpret_cast<uintptr_t>(comm.context());
    const std::vector<twin::GmRange>& areas = comm.ranges(info.algorithm);
    spec_.ranges.reserve(areas.size() + kMostArguments);  // a range an argument
    spec_.ranges = areas;
    if (twin::kChecked) {
        // Missing ranks have as long to come as the kernel would wait for them.
        spec_.deadline_s = static_cast<double>(info.deadlineCycles) / (moe::kCyclesPerMicro * 1e6);
        spec_.window_rule = [this](uintptr_t begin, uint64_t bytes, bool write) {
            return WindowRule(begin, bytes, write);
        };
    }
    scratch_bytes_ = plan.call.workspaceBytes;
    scratch_ = comm.Workspace(scratch_bytes_);
    workspace_ = Add(scratch_, scratch_bytes_, twin::GmKind::kWorkspace, "workspace");
    record_ = Add(record, moe::kErrorRecordWords * sizeof(int32_t), twin::GmKind::kWorkspace, "error_record");
    spec_.ranges.back().atomic_blocks = true;  // any core may write it
    Prepare();
}

GM_ADDR OpLaunch::Add(const void* begin, uint64_t bytes, twin::GmKind kind, const char* name, bool rows) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
    if (begin != nullptr && bytes > 0) {
        if (Registered(address)) kind = twin::GmKind::kWindowRegistered;
        const int owner = kind == twin::GmKind::kWindowRegistered ? comm_.rank() : -1;
        spec_.ranges.push_back({address, address + bytes, kind, false, nullptr, name, owner, rows});
    }
    return twin::GmOf(static_cast<uint8_t*>(const_cast<void*>(begin)));
}

// Whether a tensor begins in this rank's own registered area.
bool OpLaunch::Registered(uintptr_t begin) const {
    const uintptr_t registered = reinterpret_cast<uintptr_t>(comm_.registered(comm_.rank()));
    return begin >= registered && begin < registered + comm_.registered_bytes();
}

void OpLaunch::Prepare() {
    const moe::OpInterface& op = moe::InterfaceOf(plan_.call.op);
    moe::OutputDesc shapes[moe::kMostOutputs];
    const uint32_t outputs = moe::OutputsOf(plan_.spec, shapes);
    GM_ADDR* next = arguments_.data();
    for (const moe::OpTensor& input : op.inputs) {
        const moe::TensorIndex index = moe::IndexOf(input, plan_.spec.contract);
        if (moe::Given(plan_.spec, index))
            *next = Add(inputs_[index], BytesOf(moe::Tensor(plan_.spec, index)), twin::GmKind::kTensor,
                        moe::kTensorNames[index], IsRows(input));
        ++next;
    }
    for (uint32_t i = 0; i < outputs; ++i) {
        const moe::OpTensor& output = op.outputs[i];
        *next++ = Add(outputs_[i], BytesOf(shapes[i]), twin::GmKind::kTensor, output.name, IsRows(output));
    }
    *next++ = record_;
    *next++ = workspace_;
    const void* tiling = plan_.dispatch() ? plan_.tiling() : CombineTiling();
    *next++ = Add(tiling, plan_.tiling_bytes(), twin::GmKind::kWorkspace, "tiling");
    kernel_ = [kernel = KernelOf(plan_.call), arguments = arguments_] { kernel(arguments.data()); };
}

// The plan's, unless expand_x lies in the registered area and this op publishes it there.
const void* OpLaunch::CombineTiling() {
    const void* rows = inputs_[moe::kTensor_expand_x];
    if (!UsesRegistered(plan_.info()) || rows == nullptr) return plan_.tiling();
    const bool own = Registered(reinterpret_cast<uintptr_t>(rows));
    if (own && comm_.registered_area() == nullptr) return plan_.tiling();  // a device's memory: its host has looked
    registered_ = StateOfRows(plan_, comm_.registered_area(), rows);
    if (!own) return plan_.tiling();
    tiling_ = plan_.call.combine;
    tiling_.info.registeredGeneration = registered_.generation;
    return &tiling_;
}

// Window: rows go into this op's ping-pong buffer, into this rank's own region (indexed combine: anywhere), and a rank
// reads only its own window's buffer. Direct: a rank writes only its own window's buffer, and reads every rank's.
const char* OpLaunch::WindowRule(uintptr_t begin, uint64_t bytes, bool write) const {
    const moe::MoeDistributeInfo& info = plan_.info();
    const uint32_t parity = moe::Parity(epoch_);
    const bool indexed = plan_.call.op == moe::kOpCombine && info.sourceIndices != 0;
    const uint64_t bytes_of_data = comm_.data_bytes();
    const uint64_t ping_pong = moe::PingPongOffset(bytes_of_data, parity);
    const auto other_ping_pong = [&](uint64_t at) {
        return at < ping_pong || at + bytes > ping_pong + moe::PingPongBytes(bytes_of_data);
    };
    static const char* const kOtherPingPong = "it lies in the other ping-pong buffer, not in that of this op's epoch";
    const uintptr_t staging = reinterpret_cast<uintptr_t>(comm_.staging());
    if (staging != 0 && begin >= staging && begin < staging + bytes_of_data)
        return other_ping_pong(begin - staging) ? kOtherPingPong : nullptr;
    for (uint32_t owner = 0; owner < info.world; ++owner) {
        const uintptr_t registered = reinterpret_cast<uintptr_t>(comm_.registered(static_cast<int>(owner)));
        if (begin >= registered && begin < registered + comm_.registered_bytes())
            return write ? "registered memory belongs to its owner's caller: kernels only read it" : nullptr;
        const uintptr_t data = reinterpret_cast<uintptr_t>(comm_.data(static_cast<int>(owner)));
        if (begin < data || begin >= data + bytes_of_data) continue;
        const uint64_t at = begin - data;
        if (info.algorithm == moe::kAlgorithmDirect) {
            if (write && owner != info.rank) return "rows are left in a rank's own window only";
            return other_ping_pong(at) ? kOtherPingPong : nullptr;
        }
        if (!write && owner != info.rank) return "rows are read from a rank's own window only";
        // After a failure the kernel reads the status message of an inter-node rank's last op.
        if (other_ping_pong(at) && !comm_.IsInterNodeStatus(begin)) return kOtherPingPong;
        // A rank of hierarchy stores rows for others into their regions at its server.
        if (info.algorithm == moe::kAlgorithmHierarchy) return other_ping_pong(at) ? kOtherPingPong : nullptr;
        const uint64_t region = moe::RegionOffset(bytes_of_data, info.world, parity, info.rank);
        if (write && !indexed && (at < region || at + bytes > region + moe::RegionBytes(bytes_of_data, info.world)))
            return "it lies outside this rank's own region";
    }
    return nullptr;
}

void OpLaunch::Finish() {
    if (plan_.call.op != moe::kOpDispatch || plan_.info().part == moe::kPartSend) return;
    moe::OutputDesc shapes[moe::kMostOutputs];
    moe::OutputsOf(plan_.spec, shapes);
    const moe::MoeDistributeInfo& info = plan_.call.dispatch.info;
    using Out = moe::DispatchOutput;
    const int32_t* counts = static_cast<const int32_t*>(outputs_[Out::ep_recv_counts]);
    const uint32_t segments = info.world * info.localExperts;
    const uint64_t rows = static_cast<uint64_t>(counts[segments - 1]);
    const bool quantized = info.quantMode != 0, source_indices = info.sourceIndices != 0;
    ZeroUndefined(Out::expand_x, shapes, rows * info.hidden * moe::TypeSize(info.wireType));
    ZeroUndefined(Out::dynamic_scales, shapes, quantized ? rows * sizeof(float) : 0);
    if (info.algorithm != moe::kAlgorithmHierarchy)  // it has records there
        ZeroUndefined(Out::expand_idx, shapes,
                      (source_indices ? rows * moe::kSourceIndexWords : static_cast<uint64_t>(info.batch) * info.topK) *
                          sizeof(int32_t));
    ZeroUndefined(Out::ep_recv_counts, shapes, segments * sizeof(int32_t));
    ZeroUndefined(Out::expand_scales, shapes, info.hasWeights != 0 ? rows * sizeof(float) : 0);
}

void OpLaunch::ZeroUndefined(uint32_t index, const moe::OutputDesc* shapes, uint64_t defined) {
    const uint64_t bytes = BytesOf(shapes[index]);
    if (bytes > defined && bytes - defined <= kZeroUndefinedBytes)
        memset(static_cast<uint8_t*>(outputs_[index]) + defined, 0, bytes - defined);
}

// ---- timelines of launches ----

namespace {

// All ranks of a process share one recording; each launch has its own timeline until it ends.
struct Recording {
    std::mutex mutex;
    twin::Timeline all;
};
// Both by std::atomic_load and the like. A launch keeps the one that was going on when it began.
std::shared_ptr<Recording> g_going_on, g_last;

#if defined(TWIN_CHECKED) || defined(TWIN_TIMED)
constexpr bool kRecords = false;
#else
constexpr bool kRecords = true;
#endif

int32_t SenderOf(const uint8_t* block) {
    uint32_t source;
    std::memcpy(&source, block + moe::kH0Source * sizeof(source), sizeof(source));
    return static_cast<int32_t>(source);
}

// Scope of a launch: records its timeline while am_trace_start is in effect, and stores its events afterwards.
class TracedLaunch {
public:
    explicit TracedLaunch(twin::LaunchSpec& spec) : spec_(spec), recording_(std::atomic_load(&g_going_on)) {
        if (!recording_) return;
        timeline_.limit = recording_->all.limit;
        timeline_.sender = SenderOf;
        spec_.timeline = &timeline_;
    }
    ~TracedLaunch() {
        if (!recording_) return;
        spec_.timeline = nullptr;
        const std::lock_guard<std::mutex> lock(recording_->mutex);
        twin::Timeline& all = recording_->all;
        const uint64_t room = all.limit - std::min<uint64_t>(all.limit, all.events.size());
        const uint64_t taken = std::min<uint64_t>(room, timeline_.events.size());
        all.dropped += timeline_.dropped + timeline_.events.size() - taken;
        all.events.insert(all.events.end(), timeline_.events.begin(),
                          timeline_.events.begin() + static_cast<int64_t>(taken));
    }
    TracedLaunch(const TracedLaunch&) = delete;
    TracedLaunch& operator=(const TracedLaunch&) = delete;

private:
    twin::LaunchSpec& spec_;
    const std::shared_ptr<Recording> recording_;
    twin::Timeline timeline_;
};

}  // namespace

}  // namespace ops

// ---- am_run ----

namespace {

bool Refused(const ops::RegisteredArea::State& state, int32_t* record, char* text, uint64_t bytes) {
    const std::string why = ops::RegisteredArea::Refusal(state);
    if (why.empty()) return false;
    ops::GiveText(why, text, bytes);
    record[0] = static_cast<int32_t>(state.generation);
    record[1] = static_cast<int32_t>(state.detail);
    return true;
}

// The effect of an op on this rank's registered area. A combine that has taken its epoch consumes the block of expand_x
// even if it fails: peers may be reading it. In split mode the second launch reports it, with the first one's epoch.
class RegisteredAreaOfRun {
public:
    RegisteredAreaOfRun(ops::Communicator& comm, uint32_t part) : comm_(comm), part_(part), epoch_(comm.Epoch()) {}
    bool Refused(const ops::RegisteredArea::State& state, int32_t* record, char* text, uint64_t bytes) {
        generation_ = state.generation;
        return ::Refused(state, record, text, bytes);
    }
    void Complete(bool left, bool good) {
        if (part_ == moe::kPartSend && good) return;
        if (comm_.registered_area() != nullptr && (part_ == moe::kPartFinish || comm_.Epoch() != epoch_))
            comm_.registered_area()->Complete(generation_, comm_.Epoch(), left);
    }

private:
    ops::Communicator& comm_;
    const uint32_t part_, epoch_;
    uint32_t generation_ = 0;
};

}  // namespace

uint32_t am_comm_algorithm_run(void* comm) { return static_cast<ops::Communicator*>(comm)->algorithm(); }

int am_run(void* comm, void* plan, const void* const* inputs, void* const* outputs, int32_t* record, char* fault,
           uint64_t fault_bytes) {
    ops::Communicator& communicator = *static_cast<ops::Communicator*>(comm);
    const std::lock_guard<std::mutex> lock(communicator.mutex());
    const uint32_t part = static_cast<ops::Plan*>(plan)->info().part, epoch = communicator.EpochOfLaunch(part);
    RegisteredAreaOfRun registered(communicator, part);
    try {
        ops::OpLaunch launch(communicator, *static_cast<ops::Plan*>(plan), inputs, outputs, record);
        if (registered.Refused(launch.registered(), record, fault, fault_bytes)) return ops::kRegisteredRefused;
        const ops::TracedLaunch traced(launch.spec());
        launch.Begin();
        communicator.device().Launch(launch.spec(), launch.kernel());
        launch.End(false);
        communicator.CheckServed();
        launch.Finish();
        communicator.set_algorithm(static_cast<ops::Plan*>(plan)->info().algorithm);
        const int code =
            record[moe::kRecMagic] == moe::kRecordMagic ? record[moe::kRecCode] : static_cast<int>(moe::kOk);
        registered.Complete(code < static_cast<int>(moe::kFirstFatal), code == static_cast<int>(moe::kOk));
        return code;
    } catch (const std::exception& error) {
        communicator.EndLaunch(true);
        registered.Complete(false, false);
        // The others need not wait for a rank whose kernel has stopped.
        for (int peer = 0; peer < communicator.world(); ++peer)
            communicator.PostAbort(peer, epoch, moe::kKernelFault, communicator.rank());
        ops::GiveText(error.what(), fault, fault_bytes);
        return static_cast<int>(moe::kKernelFault);
    }
}

int am_registered_use(void* area, const void* plan, uint32_t part, const void* expand_x, uint32_t number,
                      int32_t* record, char* fault, uint64_t fault_bytes) {
    if (part == moe::kPartFinish) return 0;
    const ops::Plan& of = *static_cast<const ops::Plan*>(plan);
    const std::shared_ptr<ops::RegisteredArea> registered = *static_cast<std::shared_ptr<ops::RegisteredArea>*>(area);
    ops::RegisteredArea::State state = {};
    if (!of.dispatch() && ops::UsesRegistered(of.info())) state = ops::StateOfRows(of, registered.get(), expand_x);
    if (Refused(state, record, fault, fault_bytes)) return ops::kRegisteredRefused;
    registered->Complete(state.generation, number, part == moe::kPartWhole);
    return 0;
}

int am_trace_start(uint64_t limit) {
    if (!ops::kRecords) return 2;
    const auto made = std::make_shared<ops::Recording>();
    made->all.limit = limit;
    std::shared_ptr<ops::Recording> none;
    if (!std::atomic_compare_exchange_strong(&ops::g_going_on, &none, made)) return 1;
    std::atomic_store(&ops::g_last, made);
    return 0;
}

void am_trace_stop(void) { std::atomic_store(&ops::g_going_on, {}); }

uint64_t am_trace_events(void* out, uint64_t most, uint64_t* dropped) {
    if (dropped != nullptr) *dropped = 0;
    const std::shared_ptr<ops::Recording> last = std::atomic_load(&ops::g_last);
    if (!last) return 0;
    const std::lock_guard<std::mutex> lock(last->mutex);
    const twin::Timeline& all = last->all;
    std::copy_n(all.events.data(), std::min<uint64_t>(most, all.events.size()), static_cast<twin::TimelineEvent*>(out));
    if (dropped != nullptr) *dropped = all.dropped;
    return all.events.size();
}

uint64_t am_trace_event_bytes(void) { return sizeof(twin::TimelineEvent); }

// ---- timestamps that cores leave of a launch's phases (op_kernel/common/exchange.h) ----

namespace {

#define AM_NAME(name) #name,
constexpr const char* kPhaseNames[] = {"launch", ASCEND_MOE_PHASES(AM_NAME) "end"};
#undef AM_NAME

const uint32_t* TimestampsOf(const uint32_t* words, uint32_t core) { return words + core * moe::kTimestampWords; }

// Cores whose timestamps are of the same launch as core 0's; 0: there are none.
uint32_t CoresOf(const uint32_t* words) {
    uint32_t cores = 0;
    if (words[moe::kStTag] == 0) return 0;
    while (cores < moe::kMaxCores && TimestampsOf(words, cores)[moe::kStTag] == words[moe::kStTag]) ++cores;
    return cores;
}

}  // namespace

uint64_t am_timestamp_words(void) { return moe::kTimestampWords; }

void am_comm_timestamps(void* comm, int op, uint32_t* words) {
    const ops::Communicator& communicator = *static_cast<ops::Communicator*>(comm);
    const uint32_t world = static_cast<uint32_t>(communicator.world());
    memcpy(words, communicator.state(communicator.rank()) + moe::TimestampsOffset(world, static_cast<uint32_t>(op), 0),
           moe::kMaxCores * moe::kTimestampWords * sizeof(uint32_t));
}

uint64_t am_timestamps_text(const uint32_t* words, char* text, uint64_t bytes) {
    const uint32_t cores = CoresOf(words);
    uint32_t first = words[moe::kStCycles];  // they wrap around: the least is that from which the others are near
    for (uint32_t core = 0; core < cores; ++core) {
        const uint32_t launched = TimestampsOf(words, core)[moe::kStCycles];
        if (static_cast<int32_t>(launched - first) < 0) first = launched;
    }
    std::string lines;
    for (uint32_t core = 0; core < cores; ++core) {
        const uint32_t* timestamps = TimestampsOf(words, core);
        const uint32_t count = std::min(timestamps[moe::kStCount] & 0xFF, moe::kMostTimestamps);
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t shift = i % moe::kTimestampsOfWord * 8;
            const uint32_t phase = timestamps[moe::kStPhases + i / moe::kTimestampsOfWord] >> shift & 0xFF;
            lines += std::to_string(core) + "\t" + kPhaseNames[std::min<uint32_t>(phase, moe::kAtEnd)] + "\t" +
                     std::to_string(timestamps[moe::kStCycles + i] - first) + "\n";
        }
    }
    return ops::GiveText(lines, text, bytes);
}
