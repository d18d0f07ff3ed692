// Functions whose whole answer is a constant, whatever their arguments (on the ABIs served, x86-64 and
// AArch64, a function may be called with more than it takes). VNPU_NOTHING: there is nothing to do on host
// memory, 0. VNPU_REFUSED: it would have to do something; it says so on stderr, by name, and returns an
// error.

#include <algorithm>
#include <cstring>

#include "queue.h"
#ifdef VNPU_OP_COMPILER
#include "opapi/objects.h"
#endif

#define VNPU_NOTHING(...) VNPU_EVERY(VNPU_RETURNS_0, int64_t, __VA_ARGS__)
#define VNPU_RETURNS_0(name, type) \
    VNPU_EXPORT type name() { return 0; }
#define VNPU_REFUSED(...) VNPU_EVERY(VNPU_REFUSES, int, __VA_ARGS__)
#define VNPU_REFUSES(name, type) \
    VNPU_EXPORT type name() { return vnpu::Unsupported(#name); }

#ifndef VNPU_OP_COMPILER  // libascendcl.so

// What torch_npu links must exist; what it looks up by name exists only when it does
// something.

// Profiling: no profiler listens here.
VNPU_NOTHING(MsprofRegisterCallback, MsprofReportApi, MsprofReportCompactInfo, MsprofReportAdditionalInfo,
             MsprofSysCycleTime, MsprofGetHashId)

// Dumps, logs and reports that nobody has asked for.
VNPU_NOTHING(aclmdlInitDump, aclmdlFinalizeDump, aclAppLog, aclrtSubscribeReport, aclrtUnSubscribeReport,
             aclrtProcessReport)

// Settings without a meaning on host memory: time limits of hardware queues, overflow modes, options.
VNPU_NOTHING(aclrtSetOpWaitTimeout, aclrtSetOpExecuteTimeOut, aclrtSetDeviceSatMode, aclrtSetStreamFailureMode,
             aclrtSetStreamAttribute, aclrtSetSysParamOpt, aclrtCtxSetSysParamOpt, aclrtCmoAsync, aclrtPeekAtLastError,
             aclrtGetLastError)

// Things that only a device can do.
VNPU_REFUSED(aclmdlSetDump, aclrtBinaryLoadFromData, aclrtBinaryGetFunction, aclrtGetFunctionAddr,
             aclrtMemExportToShareableHandle, aclrtMemImportFromShareableHandle, aclrtMemSetPidToShareableHandle,
             rtDevBinaryRegister, rtFunctionRegister, rtGetC2cCtrlAddr, rtKernelLaunch)

// CANN stores options; here every option is 0.
VNPU_EXPORT int aclrtGetSysParamOpt(int, int64_t* value) {
    if (!value) return vnpu::kParamInvalid;
    *value = 0;
    return 0;
}

#else  // libacl_op_compiler.so

// Single operators: they are compiled from CANN's operator library, which is not here, so running one is
// refused by its name. Only those that copy are here.

VNPU_EXPORT void* aclopCreateAttr() {
    static char anything;
    return &anything;
}

VNPU_NOTHING(aclGetTensorDescType, aclGetTensorDescFormat, aclGetTensorDescNumDims, aclGetTensorDescDimV2,
             aclSetTensorDescName, aclSetTensorFormat, aclSetTensorShape, aclSetTensorPlaceMent, aclopDestroyAttr,
             aclopSetAttrBool, aclopSetAttrInt, aclopSetAttrFloat, aclopSetAttrString, aclopSetAttrDataType,
             aclopSetAttrListBool, aclopSetAttrListInt, aclopSetAttrListFloat, aclopSetAttrListListInt,
             aclSetCompileopt)

struct TensorDesc {
    int dtype;
    std::vector<int64_t> dims;
};
VNPU_EXPORT TensorDesc* aclCreateTensorDesc(int dtype, int rank, const int64_t* dims, int) {
    return new TensorDesc{dtype, {dims, dims + rank}};
}
VNPU_EXPORT void aclDestroyTensorDesc(const TensorDesc* desc) { delete desc; }

struct DataBuffer {
    void* data;
    size_t bytes;
};
VNPU_EXPORT DataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new DataBuffer{data, bytes}; }
VNPU_EXPORT int aclDestroyDataBuffer(const DataBuffer* buffer) {
    delete buffer;
    return vnpu::kSuccess;
}

VNPU_EXPORT int aclnnInplaceCopyGetWorkspaceSize(const aclTensor*, const aclTensor*, uint64_t*, aclOpExecutor**);
VNPU_EXPORT int aclnnInplaceCopy(void*, uint64_t, aclOpExecutor* executor, void* stream);

// A buffer seen as the three inputs after it say: sizes, strides and offset.
static const aclTensor* ViewOf(const TensorDesc& desc, const DataBuffer* const* buffers) {
    const auto numbers = [&](int at) { return static_cast<const int64_t*>(buffers[at]->data); };
    return aclCreateTensor(numbers(1), buffers[1]->bytes / sizeof(int64_t), desc.dtype, numbers(2), *numbers(3), -1,
                           nullptr, 0, buffers[0]->data);
}

VNPU_EXPORT int aclopCompileAndExecute(const char* type, int, const TensorDesc* const* input_descs,
                                       const DataBuffer* const* inputs, int, const TensorDesc* const* output_descs,
                                       DataBuffer* const* outputs, const void*, int, int, const char*, void* stream) {
    const auto is = [&](const char* name) { return type != nullptr && strcmp(type, name) == 0; };
    // Tensors of blocked formats keep their plain bytes here, at the beginning of memory that is large enough for both.
    if (is("Identity") || is("TransData")) {
        const DataBuffer from = *inputs[0], to = *outputs[0];
        return vnpu_enqueue(stream, [from, to] { memmove(to.data, from.data, std::min(from.bytes, to.bytes)); });
    }
    // Of tensors on two devices: for those on one, torch_npu calls aclnnInplaceCopy and aclnnCast itself.
    if (is("ViewCopy") || is("AsStrided")) {
        const int source = is("ViewCopy") ? 4 : 0;  // before it: the target and its three inputs
        const aclTensor* to =
            source ? ViewOf(*input_descs[0], inputs)
                   : aclCreateTensor(output_descs[0]->dims.data(), output_descs[0]->dims.size(), output_descs[0]->dtype,
                                     nullptr, 0, -1, nullptr, 0, outputs[0]->data);
        const aclTensor* from = ViewOf(*input_descs[source], inputs + source);
        uint64_t workspace = 0;
        aclOpExecutor* executor = nullptr;
        int code = aclnnInplaceCopyGetWorkspaceSize(to, from, &workspace, &executor);
        if (code == vnpu::kOk) code = aclnnInplaceCopy(nullptr, 0, executor, stream);
        aclDestroyTensor(from);
        aclDestroyTensor(to);
        return code;
    }
    // A fault of the stream, not an error of the launch: after such an error torch_npu drops all further work
    // silently. A Cast is a copy whose result the other device's stream may read before it is there.
    vnpu_error("aclopCompileAndExecute: operator %s %s", type ? type : "(null)",
               is("Cast") ? "is not ordered by torch_npu between devices, on NPUs neither: use x.to(dtype).to(device)"
                          : "has no aclnn entry here; the virtual NPU compiles no operators");
    vnpu_fault();
    return vnpu::kSuccess;
}

#endif
