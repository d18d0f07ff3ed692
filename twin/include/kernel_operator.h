// The AscendC API on the host. Kernel sources include this name and compile unchanged with bisheng and g++.
#pragma once

#include "twin/api/copy.h"
#include "twin/api/debug.h"
#include "twin/api/entry.h"
#include "twin/api/pipe.h"
#include "twin/api/scalar.h"
#include "twin/api/sync.h"
#include "twin/api/tensor.h"
#include "twin/vector/arguments.h"
#include "twin/vector/compare.h"
#include "twin/vector/convert.h"
#include "twin/vector/cumsum.h"
#include "twin/vector/elementwise.h"
#include "twin/vector/gather.h"
#include "twin/vector/reduce_repeats.h"
#include "twin/vector/reduce_total.h"
#include "twin/vector/select.h"
#include "twin/vector/sequence.h"
#include "twin/vector/sort.h"

// ---- calls that A2/A3 do not have, and calls that the twin does not run: each is a compile error that names
// the call; other missing calls are unknown to the compiler ----

namespace twin {
template <class...>
constexpr bool kNever = false;
}

// The first form is for calls whose template arguments are deduced or are types.
#define TWIN_REFUSED(Name, why)                                  \
    template <class... A, class... B>                            \
    inline void Name(B&&...) {                                   \
        static_assert(twin::kNever<A..., B...>, #Name ": " why); \
    }
#define TWIN_950_ONLY(Name) TWIN_REFUSED(Name, "Ascend 950 only, not on A2/A3")

namespace AscendC {

TWIN_950_ONLY(Interleave)
TWIN_950_ONLY(DeInterleave)
TWIN_950_ONLY(Truncate)
TWIN_950_ONLY(Histograms)
TWIN_950_ONLY(Ands)
TWIN_950_ONLY(Ors)
TWIN_950_ONLY(Subs)
TWIN_950_ONLY(Divs)
TWIN_950_ONLY(Neg)
TWIN_950_ONLY(Mull)
TWIN_950_ONLY(Prelu)
TWIN_950_ONLY(AbsSub)
TWIN_950_ONLY(ExpSub)
TWIN_950_ONLY(FusedExpSub)
TWIN_950_ONLY(MulsCast)
TWIN_950_ONLY(DataCopyUnAlign)
TWIN_950_ONLY(asc_vf_call)
TWIN_REFUSED(Arange, "not in CANN 8.1: use CreateVecIndex or ArithProgression")
TWIN_REFUSED(Scatter, "not on A2/A3")
TWIN_REFUSED(RpSort16, "not on A2/A3: use Sort32")
TWIN_REFUSED(MrgSort4, "not on A2/A3: use MrgSort")
TWIN_REFUSED(ProposalConcat, "not on A2/A3: use Concat")
TWIN_REFUSED(ProposalExtract, "not on A2/A3: use Extract")
TWIN_REFUSED(Transpose, "the twin does not run it")
TWIN_REFUSED(TransDataTo5HD, "the twin does not run it")
TWIN_REFUSED(VectorPadding, "not on A2/A3")
TWIN_REFUSED(BilinearInterpolation, "the twin does not run it")
TWIN_REFUSED(CastDeq, "the twin does not run it: use Cast after SetDeqScale(half)")
TWIN_REFUSED(CastDequant, "the twin does not run it: use Cast after SetDeqScale(half)")
TWIN_REFUSED(AddDeqRelu, "the twin does not run it")
TWIN_REFUSED(AddReluCast, "the twin does not run it")
TWIN_REFUSED(SubReluCast, "the twin does not run it")
TWIN_REFUSED(MulCast, "the twin does not run it")
TWIN_REFUSED(Mmad, "the twin has vector cores only")
TWIN_REFUSED(LoadData, "the twin has vector cores only")
TWIN_REFUSED(Fixpipe, "the twin has vector cores only")

}  // namespace AscendC

// Of the toolkit's matmul: kernels open it without using it.
namespace matmul {}

#undef TWIN_950_ONLY
#undef TWIN_REFUSED

// Last: it needs the headers above.
#include "lib/hccl/hccl.h"
