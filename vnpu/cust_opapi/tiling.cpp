// op_host's tiling function, run over a captured call through the stand-in of CANN's tiling context.
#include "cann_standin/standin.h"

#include "cust_opapi.h"

namespace vnpu_moe {

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
