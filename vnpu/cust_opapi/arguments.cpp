// From a captured call to op_host's description of it, and to the tiling that op_host's own function gives.
#include <algorithm>
#include <cstring>

#include "cann_standin/standin.h"
#include "cust_opapi.h"

extern "C" {  // libopapi.so, as in CANN's acl_meta.h
int aclGetViewShape(const aclTensor* tensor, int64_t** dims, uint64_t* rank);
int aclGetViewStrides(const aclTensor* tensor, int64_t** strides, uint64_t* rank);
int aclGetViewOffset(const aclTensor* tensor, int64_t* offset);
int aclGetDataType(const aclTensor* tensor, int32_t* type);
int aclGetRawTensorAddr(const aclTensor* tensor, void** address);
}

namespace vnpu_moe {

bool ReadTensor(const aclTensor* tensor, Tensor& out);

namespace {

uint32_t TypeOf(int32_t cann) {
    switch (cann) {
        case 0: return moe::kTypeFp32;
        case 1: return moe::kTypeFp16;
        case 2: return moe::kTypeInt8;
        case 3: return moe::kTypeInt32;
        case 9: return moe::kTypeInt64;
        case 12: return moe::kTypeBool;
        case 27: return moe::kTypeBf16;
        default: return moe::kTypeOther;
    }
}

std::vector<int64_t> Take(int64_t* values, uint64_t count) {
    const std::unique_ptr<int64_t[]> owned(values);
    return {values, values + count};
}

bool Contiguous(const std::vector<int64_t>& dims, const std::vector<int64_t>& strides) {
    int64_t expected = 1;
    for (size_t i = dims.size(); i > 0; --i) {
        if (dims[i - 1] != 1 && strides[i - 1] != expected) return false;
        expected *= dims[i - 1];
    }
    return true;
}

uint32_t IndexOf(const moe::OpInterface& op, const char* name) {
    uint32_t index = 0;
    while (strcmp(op.attributes[index].name, name) != 0)
        ++index;  // only names of the definition are asked for
    return index;
}

}  // namespace

bool Tensor::empty() const {
    return !given || std::any_of(dims.begin(), dims.end(), [](int64_t size) { return size == 0; });
}

int64_t Arguments::Integer(const char* name) const { return integers[IndexOf(interface(), name)]; }
const std::string& Arguments::String(const char* name) const { return strings[IndexOf(interface(), name)]; }

bool ReadTensor(const aclTensor* tensor, Tensor& out) {
    if (tensor == nullptr) return true;
    int64_t *dims = nullptr, *strides = nullptr, offset = 0;
    uint64_t rank = 0;
    void* base = nullptr;
    if (aclGetViewShape(tensor, &dims, &rank) != 0) return false;
    out.dims = Take(dims, rank);
    if (aclGetViewStrides(tensor, &strides, &rank) != 0 || aclGetViewOffset(tensor, &offset) != 0 ||
        aclGetDataType(tensor, &out.cann_type) != 0 || aclGetRawTensorAddr(tensor, &base) != 0) {
        return false;
    }
    const std::vector<int64_t> steps = Take(strides, rank);
    out.given = true;
    out.desc.dtype = static_cast<int32_t>(TypeOf(out.cann_type));
    out.desc.rank = static_cast<int32_t>(out.dims.size());
    std::copy_n(out.dims.begin(), std::min<size_t>(out.dims.size(), 3), out.desc.dims);
    if (!out.empty() && !Contiguous(out.dims, steps)) {
        vnpu_error("an operator's tensor of %zu dimensions is not contiguous", out.dims.size());
        return false;
    }
    const int64_t bytes = offset * static_cast<int64_t>(moe::TypeSize(static_cast<uint32_t>(out.desc.dtype)));
    out.data = base == nullptr ? nullptr : static_cast<uint8_t*>(base) + bytes;
    return true;
}

// ---- op_host's tiling function, run over a captured call through the stand-in of CANN's tiling context ----

namespace {

constexpr uint32_t kCoresA3 = 48, kCoresA2 = 40;  // vector cores of the dies that vnpu pretends to have

standin::Call Described(const Arguments& arguments) {
    const moe::OpInterface op = arguments.interface();
    standin::Call call;
    call.opType = op.type;
    call.soc = vnpu_soc();
    call.vectorCores = call.soc.rfind("Ascend910B", 0) == 0 ? kCoresA2 : kCoresA3;
    for (const Tensor& input : arguments.inputs) {
        call.inputs.emplace_back();
        call.inputs.back().given = input.given;
        call.inputs.back().type = input.cann_type;
        call.inputs.back().dims = input.dims;
    }
    for (size_t i = 0; i < op.attributes.size; ++i) {
        if (op.attributes[i].text != nullptr) {
            call.attributes.emplace_back(arguments.strings[i]);
        } else {
            call.attributes.emplace_back(arguments.integers[i]);
        }
    }
    return call;
}

}  // namespace

bool RunTiling(const Arguments& arguments, Tiling& tiling, std::string& why) {
    standin::Tiling made = standin::Tile(Described(arguments));
    if (!made.ok) {
        why = made.error;
        return false;
    }
    tiling.bytes = std::move(made.bytes);
    tiling.key = made.tilingKey;
    tiling.block_dim = made.blockDim;
    for (const size_t bytes : made.workspaces) tiling.workspace += bytes;
    return true;
}

}  // namespace vnpu_moe
