// The AscendC API on the host. Kernel sources include this name and compile unchanged with bisheng and g++.
#pragma once

#include "twin/copy.h"
#include "twin/entry.h"
#include "twin/pipe.h"
#include "twin/scalar.h"
#include "twin/sync.h"
#include "twin/tensor.h"
#include "twin/vector.h"
#include "twin/vector_reductions.h"
#include "twin/vector_selections.h"
#include "twin/vector_sorting.h"
#include "twin/vector_strided.h"
