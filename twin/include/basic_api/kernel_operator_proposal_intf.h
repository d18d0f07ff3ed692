// A name that kernels include for a part of the API. The twin has it all in one place.
#pragma once

#include "kernel_operator.h"
