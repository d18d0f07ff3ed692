// The name that kernels include; what it declares is in twin/hccl.h.
#pragma once

#include "twin/api/hccl.h"
