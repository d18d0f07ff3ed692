// Entries of the modelled kernels, with the arguments of the shipped ones. bf16 and the V2 contract only.
#pragma once

#include "twin/api/qualifiers.h"

extern "C" void model_cann_style_dispatch(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR,
                                          GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR,
                                          GM_ADDR);
extern "C" void model_cann_style_combine(GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR,
                                         GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR, GM_ADDR);
