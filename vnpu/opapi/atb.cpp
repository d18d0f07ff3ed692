// ATB (Ascend Transformer Boost): what torch_npu's libop_plugin_atb.so links and looks up of libatb.so, which only
// names this library. An operation remembers its parameters; executing it is one captured call, "atb" and its name,
// with the parameters, the inputs and the outputs.
//
// Layouts as in the public headers atb/types.h, svector.h, context.h, operation.h and infer_op_params.h.
#include <cstdint>
#include <iterator>
#include <string>

#include "call.h"

namespace atb {

constexpr int kNotSupported = 1;  // ERROR_INVALID_PARAM

struct Tensor {
    int32_t dtype, format;
    int64_t dims[8];
    uint64_t rank;
    void* device_data;
    void* host_data;
    uint64_t bytes;
};

struct Tensors {  // SVector<Tensor>
    uint64_t capacity, size;
    Tensor storage[65];
    Tensor* heap;
    const Tensor* begin() const { return heap ? heap : storage; }
    const Tensor* end() const { return begin() + size; }
};

struct VariantPack {
    Tensors inputs, outputs;
};

class Context {
public:
    virtual ~Context() = default;
    virtual int SetExecuteStream(void* stream) { return stream_ = stream, 0; }
    virtual void* GetExecuteStream() const { return stream_; }
    virtual int SetAsyncTilingCopyStatus(bool) { return 0; }
    virtual bool GetAsyncTilingCopyStatus() const { return false; }

private:
    void* stream_ = nullptr;
};

class Operation {
public:
    explicit Operation(vnpu::Call call) : call_(std::move(call)) {}
    virtual ~Operation() = default;
    virtual std::string GetName() const { return call_.name; }
    virtual int InferShape(const void*, void*) const { return kNotSupported; }
    virtual uint32_t GetInputNum() const { return 0; }
    virtual uint32_t GetOutputNum() const { return 0; }
    virtual int Setup(const VariantPack&, uint64_t& workspace_size, Context*) { return workspace_size = 0, 0; }
    virtual int Execute(const VariantPack& pack, uint8_t*, uint64_t, Context* context) {
        auto call = std::make_shared<vnpu::Call>(call_);
        for (const Tensors* tensors : {&pack.inputs, &pack.outputs}) {
            for (const Tensor& tensor : *tensors) Put(*call, tensor);
        }
        return vnpu::execute(new aclOpExecutor{std::move(call)}, context->GetExecuteStream());
    }
    // The two halves of a function of libatb.so; the caller keeps the operation, and calls the first half again.
    void Remember(vnpu::Call call) { call_ = std::move(call); }
    int Run(const Context* context) const {
        return vnpu::execute(new aclOpExecutor{std::make_shared<vnpu::Call>(call_)}, context->GetExecuteStream());
    }

private:
    static void Put(vnpu::Call& call, const Tensor& tensor) {
        if (tensor.rank == 0) return call.words.push_back(vnpu::kNone);
        void* data = tensor.device_data;
        if (data == nullptr) {  // host memory, which the caller may change after the call
            const auto* bytes = static_cast<const char*>(tensor.host_data);
            call.texts.push_back(std::make_shared<std::string>(bytes, tensor.bytes));
            data = call.texts.back()->data();
        }
        const aclTensor* described =
            aclCreateTensor(tensor.dims, tensor.rank, tensor.dtype, nullptr, 0, tensor.format, nullptr, 0, data);
        call.put(described);
        aclDestroyTensor(described);
    }

    vnpu::Call call_;
};

namespace infer {
struct LinearParam {
    bool transpose_a, transpose_b, has_bias;
    int out_type;
    bool accumulates;
    uint8_t matmul_type, quant_mode;
};
struct RopeParam {
    int32_t coefficient, cos_format;
};
struct ReshapeAndCacheParam {
    int compress_type, cache_kind;
};
struct PagedAttentionParam {
    int32_t heads;
    float scale;
    int32_t kv_heads;
    int mask_type;
    bool batch_status;
    int quant_type, out_type;
    bool quant_offset;
    int compress_type, calc_type, scale_type, layout;
    uint32_t value_size;
    float query_scale;
};
struct ElewiseParam;
struct GroupTopkParam;
struct RmsNormParam;
struct SelfAttentionParam;
}  // namespace infer

#define VNPU_ATB_EXPORT __attribute__((visibility("default")))

namespace {
template <typename... Values>
vnpu::Call call_of(const char* name, Values... values) {
    vnpu::Call call;
    call.name = name;
    (call.put(values), ...);
    return call;
}

template <typename... Values>
int create(Operation** out, const char* name, Values... values) {
    return *out = new Operation(call_of(name, values...)), 0;
}

// So that the kind is in the message of whoever cannot have it.
int refuse(Operation** out, const char* name) {
    *out = nullptr;
    vnpu_error("%s: the virtual NPU has no such operation of ATB", name);
    return kNotSupported;
}
}  // namespace

template <typename Param>
VNPU_ATB_EXPORT int CreateOperation(const Param& param, Operation** out);

template <>
VNPU_ATB_EXPORT int CreateOperation(const infer::LinearParam& p, Operation** out) {
    if (!p.accumulates || p.has_bias || p.matmul_type || p.quant_mode) return refuse(out, "atbLinear");
    return create(out, "atbLinear", p.transpose_a, p.transpose_b);
}
template <>
VNPU_ATB_EXPORT int CreateOperation(const infer::RopeParam& p, Operation** out) {
    return p.cos_format ? refuse(out, "atbRope") : create(out, "atbRope", p.coefficient);
}
template <>
VNPU_ATB_EXPORT int CreateOperation(const infer::ReshapeAndCacheParam& p, Operation** out) {
    return p.compress_type ? refuse(out, "atbReshapeAndCache") : create(out, "atbReshapeAndCache", p.cache_kind);
}
template <>
VNPU_ATB_EXPORT int CreateOperation(const infer::PagedAttentionParam& p, Operation** out) {
    if (p.mask_type || p.quant_type || p.compress_type || p.calc_type || p.scale_type || p.layout || p.value_size) {
        return refuse(out, "atbPagedAttention");
    }
    return create(out, "atbPagedAttention", p.heads, p.kv_heads, p.scale);
}

#define VNPU_ATB_REFUSED(name)                                                        \
    template <>                                                                       \
    VNPU_ATB_EXPORT int CreateOperation(const infer::name##Param&, Operation** out) { \
        return refuse(out, "atb" #name);                                              \
    }
VNPU_ATB_REFUSED(Elewise)
VNPU_ATB_REFUSED(GroupTopk)
VNPU_ATB_REFUSED(RmsNorm)
VNPU_ATB_REFUSED(SelfAttention)

VNPU_ATB_EXPORT int DestroyOperation(Operation* operation) { return delete operation, 0; }
VNPU_ATB_EXPORT int CreateContext(Context** context) { return *context = new Context, 0; }
VNPU_ATB_EXPORT int DestroyContext(Context* context) { return delete context, 0; }

class VNPU_ATB_EXPORT Utils {
public:
    static uint64_t GetTensorSize(const Tensor& tensor);
};
uint64_t Utils::GetTensorSize(const Tensor& tensor) {
    constexpr uint8_t kBytes[] = {4, 2, 1, 4,  1, 0, 2, 2, 4, 8, 8, 8, 1, 0,
                                  8, 8, 8, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2};  // by aclDataType
    uint64_t bytes = static_cast<uint32_t>(tensor.dtype) < std::size(kBytes) ? kBytes[tensor.dtype] : 0;
    for (uint64_t i = 0; i < tensor.rank; i++) bytes *= static_cast<uint64_t>(tensor.dims[i]);
    return bytes;
}

}  // namespace atb

namespace {
template <typename... Values>
int plan(const char* name, uint64_t* workspace_size, atb::Operation** operation, Values... values) {
    if (*operation == nullptr) *operation = new atb::Operation({});
    (*operation)->Remember(atb::call_of(name, values...));
    return *workspace_size = 0, 0;
}
}  // namespace

#define VNPU_ATB_OP(name, ...)                                                                               \
    VNPU_EXPORT int name##GetWorkspaceSize(VNPU_EACH(VNPU_PARAMETER, __VA_ARGS__), uint64_t* workspace_size, \
                                           atb::Operation** operation, atb::Context*) {                      \
        return plan(#name, workspace_size, operation, VNPU_EACH(VNPU_NAME, __VA_ARGS__));                    \
    }                                                                                                        \
    VNPU_EXPORT int name(void*, uint64_t, atb::Operation* operation, atb::Context* context) {                \
        return operation->Run(context);                                                                      \
    }

using namespace vnpu::types;
// key_cache, value_cache, block_table, context_lens, key, value, seq_starts, cache kind, lengths are sums, has starts
VNPU_ATB_OP(AtbPagedCacheLoad, T, T, T, T, T, T, T, I8, B, B)
