// The template tiling key of template_key.cpp.
#pragma once

#include "ascendc/host_api/tiling/template_argument.h"

#define SCALE_NONE 3
#define SCALE_DOUBLE 5

ASCENDC_TPL_ARGS_DECL(TemplateKey, ASCENDC_TPL_DATATYPE_DECL(D_T, C_DT_FLOAT16, C_DT_FLOAT, ASCENDC_TPL_INPUT(0)),
                      ASCENDC_TPL_BOOL_DECL(HAS_MASK, 0, 1),
                      ASCENDC_TPL_UINT_DECL(SCALE, ASCENDC_TPL_4_BW, ASCENDC_TPL_UI_MIX, 1, 7, 8, SCALE_NONE,
                                            SCALE_DOUBLE),
                      ASCENDC_TPL_FORMAT_DECL(FORMAT, C_FORMAT_ND, C_FORMAT_FRACTAL_NZ),
                      ASCENDC_TPL_DTYPE_DECL(KIND, 20, 30),
                      ASCENDC_TPL_KERNEL_TYPE_DECL(CORES, ASCENDC_TPL_AIV_ONLY, ASCENDC_TPL_MIX_AIC_1_2), );

ASCENDC_TPL_SEL(ASCENDC_TPL_ARGS_SEL(ASCENDC_TPL_DATATYPE_SEL(D_T, C_DT_FLOAT16), ASCENDC_TPL_BOOL_SEL(HAS_MASK, 0),
                                     ASCENDC_TPL_UINT_SEL(SCALE, ASCENDC_TPL_UI_LIST, SCALE_NONE),
                                     ASCENDC_TPL_FORMAT_SEL(FORMAT, C_FORMAT_ND), ASCENDC_TPL_DTYPE_SEL(KIND, 20),
                                     ASCENDC_TPL_SHARED_KERNEL_TYPE_SEL(CORES, ASCENDC_TPL_AIV_ONLY,
                                                                        ASCENDC_TPL_MIX_AIC_1_2), ),
                ASCENDC_TPL_ARGS_SEL(ASCENDC_TPL_DATATYPE_SEL(D_T, C_DT_FLOAT), ASCENDC_TPL_BOOL_SEL(HAS_MASK, 0, 1),
                                     ASCENDC_TPL_UINT_SEL(SCALE, ASCENDC_TPL_UI_LIST, SCALE_DOUBLE, 8),
                                     ASCENDC_TPL_FORMAT_SEL(FORMAT, C_FORMAT_ND), ASCENDC_TPL_DTYPE_SEL(KIND, 30),
                                     ASCENDC_TPL_SHARED_KERNEL_TYPE_SEL(CORES, ASCENDC_TPL_AIV_ONLY)), );
