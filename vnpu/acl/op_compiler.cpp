// libacl_op_compiler.so: tensor descriptions and attributes of single operators. The operators themselves are
// compiled from CANN's operator library, which is not here: running one is refused by its name.
#include <cstdio>
#include <string>
#include <vector>

#include "device.h"

using namespace vnpu;

namespace {
struct TensorDesc {
    int type;
    int format;
    std::vector<int64_t> shape;
};
struct DataBuffer {
    void* data;
    size_t size;
};
struct Attributes {};
}  // namespace

VNPU_EXPORT void* aclCreateTensorDesc(int type, int dims, const int64_t* shape, int format) {
    if (dims < 0 || (dims && !shape)) return nullptr;
    return new TensorDesc{type, format, std::vector<int64_t>(shape, shape + dims)};
}
VNPU_EXPORT void aclDestroyTensorDesc(const void* desc) { delete static_cast<const TensorDesc*>(desc); }
VNPU_EXPORT int aclGetTensorDescType(const void* desc) { return static_cast<const TensorDesc*>(desc)->type; }
VNPU_EXPORT int aclGetTensorDescFormat(const void* desc) {
    return static_cast<const TensorDesc*>(desc)->format;
}
VNPU_EXPORT size_t aclGetTensorDescNumDims(const void* desc) {
    return static_cast<const TensorDesc*>(desc)->shape.size();
}
VNPU_EXPORT AclError aclGetTensorDescDimV2(const void* desc, size_t index, int64_t* size) {
    const auto& shape = static_cast<const TensorDesc*>(desc)->shape;
    if (index >= shape.size() || !size) return kParamInvalid;
    *size = shape[index];
    return kSuccess;
}
VNPU_EXPORT void aclSetTensorDescName(void*, const char*) {}
VNPU_EXPORT AclError aclSetTensorFormat(void* desc, int format) {
    static_cast<TensorDesc*>(desc)->format = format;
    return kSuccess;
}
VNPU_EXPORT AclError aclSetTensorShape(void* desc, int dims, const int64_t* shape) {
    static_cast<TensorDesc*>(desc)->shape.assign(shape, shape + dims);
    return kSuccess;
}
VNPU_EXPORT AclError aclSetTensorPlaceMent(void*, int) { return kSuccess; }

VNPU_EXPORT void* aclCreateDataBuffer(void* data, size_t size) { return new DataBuffer{data, size}; }
VNPU_EXPORT AclError aclDestroyDataBuffer(const void* buffer) {
    delete static_cast<const DataBuffer*>(buffer);
    return kSuccess;
}

VNPU_EXPORT void* aclopCreateAttr() { return new Attributes; }
VNPU_EXPORT void aclopDestroyAttr(const void* attributes) {
    delete static_cast<const Attributes*>(attributes);
}

VNPU_EXPORT AclError aclopCompileAndExecute(const char* type, int, const void* const*, const void* const*,
                                            int, const void* const*, void* const*, const void*, int, int,
                                            const char*, Handle) {
    // A fault of the stream, not an error of the launch: after such an error torch_npu drops all further work
    // silently.
    vnpu_error(
        "aclopCompileAndExecute: operator %s has no aclnn entry here; the virtual NPU compiles no operators",
        type ? type : "(null)");
    vnpu_fault();
    return kSuccess;
}

// Attributes of an operator that will be refused, and options of a compiler that is not there.
#define VNPU_IGNORED(name) \
    VNPU_EXPORT int name() { return 0; }
VNPU_IGNORED(aclopSetAttrBool)
VNPU_IGNORED(aclopSetAttrInt)
VNPU_IGNORED(aclopSetAttrFloat)
VNPU_IGNORED(aclopSetAttrString)
VNPU_IGNORED(aclopSetAttrDataType)
VNPU_IGNORED(aclopSetAttrListBool)
VNPU_IGNORED(aclopSetAttrListInt)
VNPU_IGNORED(aclopSetAttrListFloat)
VNPU_IGNORED(aclopSetAttrListListInt)
VNPU_IGNORED(aclSetCompileopt)
