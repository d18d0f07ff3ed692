// The op AscendMoeDistributeCombine for CANN.
#include "cann/def.h"

namespace ops {

class AscendMoeDistributeCombine : public OpDef {
public:
    explicit AscendMoeDistributeCombine(const char* name) : OpDef(name) {
        moe::DescribeOp(moe::kOpCombine, moe::kFunctionsOf<moe::kOpCombine>, *this);
    }
};

OP_ADD(AscendMoeDistributeCombine);

}  // namespace ops
