// The op AscendMoeDistributeDispatch for CANN.
#include "cann/def.h"

namespace ops {

class AscendMoeDistributeDispatch : public OpDef {
public:
    explicit AscendMoeDistributeDispatch(const char* name) : OpDef(name) {
        moe::DescribeOp(moe::kOpDispatch, moe::kFunctionsOf<moe::kOpDispatch>, *this);
    }
};

OP_ADD(AscendMoeDistributeDispatch);

}  // namespace ops
