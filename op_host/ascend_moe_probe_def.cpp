// Definition of the op AscendMoeProbe for CANN.
#include "cann/def.h"

namespace ops {

class AscendMoeProbe : public OpDef {
public:
    explicit AscendMoeProbe(const char* name) : OpDef(name) { moe::DescribeOp(moe::kOpProbe, *this); }
};

OP_ADD(AscendMoeProbe);

}  // namespace ops
