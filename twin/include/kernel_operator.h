// The AscendC API on the host. Kernel sources include this name and compile unchanged with bisheng and g++.
#pragma once

#include "twin/api/copy.h"
#include "twin/api/debug.h"
#include "twin/api/entry.h"
#include "twin/api/pipe.h"
#include "twin/api/refused.h"
#include "twin/api/scalar.h"
#include "twin/api/sync.h"
#include "twin/api/system.h"
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

// ---- what the emulator refuses by name ----
//
// refused.h has the names and the reasons; other unknown names are unknown to the compiler as well.

namespace AscendC {

#define TWIN_REFUSED_950(Name) TWIN_REFUSED_CALL(Name, TWIN_WHY_950, )
#define TWIN_REFUSED_OTHER(Name) TWIN_REFUSED_CALL(Name, TWIN_WHY_OTHER, )
#define TWIN_REFUSED_CUBE(Name) TWIN_REFUSED_CALL(Name, TWIN_WHY_CUBE, )
#define TWIN_REFUSED_ADVANCED(Name) TWIN_REFUSED_CALL(Name, TWIN_WHY_ADVANCED, )
#define TWIN_REFUSED_SYSTEM(Name) TWIN_REFUSED_CALL(Name, TWIN_WHY_SYSTEM, )
#define TWIN_REFUSED_REPLACED(Name, why) TWIN_REFUSED_CALL(Name, why, )
#define TWIN_REFUSED_CLASS_T(Name, why) TWIN_REFUSED_TEMPLATE(Name, why, Types..., class... Types)
#define TWIN_REFUSED_CLASS_V(Name, why) TWIN_REFUSED_TEMPLATE(Name, why, decltype(value), auto value, auto... values)
TWIN_CALLS_950(TWIN_REFUSED_950)
TWIN_CALLS_OTHER(TWIN_REFUSED_OTHER)
TWIN_CALLS_CUBE(TWIN_REFUSED_CUBE)
TWIN_CALLS_ADVANCED(TWIN_REFUSED_ADVANCED)
TWIN_CALLS_SYSTEM(TWIN_REFUSED_SYSTEM)
TWIN_CALLS_REPLACED(TWIN_REFUSED_REPLACED)
TWIN_CLASSES(TWIN_REFUSED_CLASS)
TWIN_CLASSES_T(TWIN_REFUSED_CLASS_T)
TWIN_CLASSES_V(TWIN_REFUSED_CLASS_V)
namespace Reg {
TWIN_CALLS_REG(TWIN_REFUSED_950)
TWIN_REFUSED_CLASS_T(RegTensor, TWIN_WHY_950)
}  // namespace Reg
namespace MicroAPI = Reg;

}  // namespace AscendC

// Of the toolkit's matmul: kernels open it without using it.
namespace matmul {}

// Last: it needs the headers above.
#include "lib/hccl/hccl.h"
