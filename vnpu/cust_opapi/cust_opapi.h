// The functions below the hand-written aclnn functions of our operators. For a device CANN generates them
// from the operators' definition (aclnnInner*); here they run the twin.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "abi/ascend_moe.h"
#include "acl/vnpu_stream.h"
#include "rules/op.h"

struct aclTensor;

namespace vnpu_moe {

// aclnn status codes, as CANN has them.
constexpr int kOk = 0;
constexpr int kNullArgument = 161001;
constexpr int kBadArgument = 161002;
constexpr int kInnerError = 561000;
constexpr int kTilingError = 561002;

// A contiguous tensor as CANN passes it to an operator; absent where `given` is false.
struct Tensor {
    bool given = false;
    int32_t cann_type = -1;  // aclDataType
    moe::TensorDesc desc = {};
    std::vector<int64_t> dims;
    void* data = nullptr;

    bool empty() const;
};

// The arguments of one call, in the order of the operator's definition.
struct Arguments {
    uint32_t op = 0;  // moe::kOpDispatch, kOpCombine, kOpProbe
    std::vector<Tensor> inputs;
    std::vector<Tensor> outputs;
    std::vector<int64_t> integers;     // by attribute; of strings 0
    std::vector<std::string> strings;  // by attribute; of integers ""

    const moe::OpInterface interface() const { return moe::InterfaceOf(op); }
    // Of an attribute of the definition.
    int64_t Integer(const char* name) const;
    const std::string& String(const char* name) const;
};

// The result of the operator's tiling function.
struct Tiling {
    std::vector<uint8_t> bytes;
    uint64_t key = 0;
    uint32_t block_dim = 0;
    uint64_t workspace = 0;
};

// Runs op_host's own tiling function over the arguments. False: it refuses them, `why` in one line.
bool RunTiling(const Arguments& arguments, Tiling& tiling, std::string& why);

// The twin's communicator over HCCL's windows of a group, made once. 0, or an aclnn status.
int CommunicatorOf(const std::string& group, int32_t context_kind, int32_t ranks_per_server, void*& comm);

// A captured call, ready to be launched any number of times.
class Call {
public:
    virtual ~Call() = default;
    virtual const char* type() const = 0;
    virtual bool skipped() const { return false; }  // nothing to launch
    virtual void Run() = 0;
};
// 0 and a call; else an aclnn status, told with vnpu_error. A call whose outputs are all empty is never
// launched.
int Prepare(Arguments arguments, std::shared_ptr<Call>& call, uint64_t& workspace);
int Enqueue(const std::shared_ptr<Call>& call, void* stream);
// Of AscendMoeProbe, which has a tiling of its own.
int PrepareProbe(const Arguments& arguments, Tiling tiling, std::shared_ptr<Call>& call);

void SetServerType(int32_t type);  // of the calls of this process, for the report

}  // namespace vnpu_moe

// Launches of an operator type by this process.
VNPU_EXPORT uint64_t vnpu_launches(const char* op_type);

namespace vnpu_moe {

// ---- libascend_moe.so, the twin with our kernels, opened where this process's Python finds it.

// clang-format off
#define VNPU_MOE_FUNCTIONS(X)                                                                    \
    X(am_comm_create) X(am_comm_destroy) X(am_comm_use_context) X(am_comm_use_servers)           \
    X(am_spec_bytes) X(am_plan_create) X(am_plan_destroy) X(am_plan_tiling) X(am_run) X(am_probe)
// clang-format on

struct Library {
#define VNPU_MOE_FUNCTION(name) decltype(&::name) name = nullptr;
    VNPU_MOE_FUNCTIONS(VNPU_MOE_FUNCTION)
#undef VNPU_MOE_FUNCTION
    std::string path;
    std::string error;  // one line; empty when everything above is there
};

const Library& TheLibrary();

// ---- What was launched, for tests: no fallback can pass for a launch.

void CountLaunch(const char* op_type);
void CountSkip(const char* op_type);  // all outputs empty

}  // namespace vnpu_moe
