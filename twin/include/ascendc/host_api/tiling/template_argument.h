// Template tiling keys: a kernel is a template whose arguments its tiling key holds, one after the other from bit 0.
//
//   ASCENDC_TPL_ARGS_DECL(Op, ...)   the template's parameters in their order, each with all its values
//   ASCENDC_TPL_SEL(...)             the combinations that exist, each an ASCENDC_TPL_ARGS_SEL(...) of subsets
//   GET_TPL_TILING_KEY(...)          on the host: the key of these arguments
//
// A kernel's build defines ASCENDC_TPL_KERNEL, and the macros are empty. ascendc_twin/template_keys.py reads what
// they leave under TWIN_TPL_SCAN. Elsewhere they are the host's.
#pragma once

#include <cstdint>

#define ASCENDC_TPL_AIV_ONLY 0
#define ASCENDC_TPL_AIC_ONLY 1
#define ASCENDC_TPL_MIX_AIV_1_0 4
#define ASCENDC_TPL_MIX_AIC_1_0 5
#define ASCENDC_TPL_MIX_AIC_1_1 6
#define ASCENDC_TPL_MIX_AIC_1_2 7
#define ASCENDC_TPL_AICORE 8
#define ASCENDC_TPL_VECTORCORE 9
#define ASCENDC_TPL_MIX_AICORE 10
#define ASCENDC_TPL_MIX_VECTOR_CORE 11

// Bits of a parameter in the key.
#define ASCENDC_TPL_1_BW 1
#define ASCENDC_TPL_2_BW 2
#define ASCENDC_TPL_4_BW 4
#define ASCENDC_TPL_8_BW 8

// How the values of a UINT are written: ranges (their number, then first and last of each), a list, ranges then a list.
#define ASCENDC_TPL_UI_RANGE 0
#define ASCENDC_TPL_UI_LIST 1
#define ASCENDC_TPL_UI_MIX 2

// Values of a data type or format that follow an input or an output of the op.
#define ASCENDC_TPL_INPUT(index) (100000000 + (index))
#define ASCENDC_TPL_OUTPUT(index) (900000000 + (index))

constexpr uint64_t INVALID_TILING_KEY = ~uint64_t{0};

#if defined(TWIN_TPL_SCAN) || !defined(ASCENDC_TPL_KERNEL)
#define C_DT_FLOAT 0
#define C_DT_FLOAT16 1
#define C_DT_INT8 2
#define C_DT_INT32 3
#define C_DT_UINT8 4
#define C_DT_INT16 6
#define C_DT_UINT16 7
#define C_DT_UINT32 8
#define C_DT_INT64 9
#define C_DT_UINT64 10
#define C_DT_DOUBLE 11
#define C_DT_BOOL 12
#define C_DT_COMPLEX64 16
#define C_DT_BF16 27
#define C_DT_INT4 29
#define C_DT_UINT1 30
#define C_DT_INT2 31
#define C_DT_COMPLEX32 33
#define C_DT_HIFLOAT8 34
#define C_DT_FLOAT8_E5M2 35
#define C_DT_FLOAT8_E4M3FN 36
#define C_DT_FLOAT4_E2M1 40
#define C_DT_FLOAT4_E1M2 41
#define C_FORMAT_NCHW 0
#define C_FORMAT_NHWC 1
#define C_FORMAT_ND 2
#define C_FORMAT_NC1HWC0 3
#define C_FORMAT_FRACTAL_Z 4
#define C_FORMAT_NC1C0HWPAD 5
#define C_FORMAT_NHWC1C0 6
#define C_FORMAT_FSR_NCHW 7
#define C_FORMAT_FRACTAL_DECONV 8
#define C_FORMAT_C1HWNC0 9
#define C_FORMAT_FRACTAL_DECONV_TRANSPOSE 10
#define C_FORMAT_FRACTAL_DECONV_SP_STRIDE_TRANS 11
#define C_FORMAT_NC1HWC0_C04 12
#define C_FORMAT_FRACTAL_Z_C04 13
#define C_FORMAT_CHWN 14
#define C_FORMAT_FRACTAL_DECONV_SP_STRIDE8_TRANS 15
#define C_FORMAT_HWCN 16
#define C_FORMAT_NC1KHKWHWC0 17
#define C_FORMAT_BN_WEIGHT 18
#define C_FORMAT_FILTER_HWCK 19
#define C_FORMAT_HASHTABLE_LOOKUP_LOOKUPS 20
#define C_FORMAT_HASHTABLE_LOOKUP_KEYS 21
#define C_FORMAT_HASHTABLE_LOOKUP_VALUE 22
#define C_FORMAT_HASHTABLE_LOOKUP_OUTPUT 23
#define C_FORMAT_HASHTABLE_LOOKUP_HITS 24
#define C_FORMAT_C1HWNCoC0 25
#define C_FORMAT_MD 26
#define C_FORMAT_NDHWC 27
#define C_FORMAT_FRACTAL_ZZ 28
#define C_FORMAT_FRACTAL_NZ 29
#define C_FORMAT_NCDHW 30
#define C_FORMAT_DHWCN 31
#define C_FORMAT_NDC1HWC0 32
#define C_FORMAT_FRACTAL_Z_3D 33
#define C_FORMAT_CN 34
#define C_FORMAT_NC 35
#define C_FORMAT_DHWNC 36
#define C_FORMAT_FRACTAL_Z_3D_TRANSPOSE 37
#define C_FORMAT_FRACTAL_ZN_LSTM 38
#define C_FORMAT_FRACTAL_Z_G 39
#define C_FORMAT_RESERVED 40
#define C_FORMAT_ALL 41
#define C_FORMAT_NULL 42
#define C_FORMAT_ND_RNN_BIAS 43
#define C_FORMAT_FRACTAL_ZN_RNN 44
#define C_FORMAT_NYUV 45
#define C_FORMAT_NYUV_A 46
#define C_FORMAT_NCL 47
#define C_FORMAT_FRACTAL_Z_WINO 48
#define C_FORMAT_C1HWC0 49
#define C_FORMAT_FRACTAL_NZ_C0_16 50
#define C_FORMAT_FRACTAL_NZ_C0_32 51
#define C_FORMAT_FRACTAL_NZ_C0_2 52
#define C_FORMAT_FRACTAL_NZ_C0_4 53
#define C_FORMAT_FRACTAL_NZ_C0_8 54
#endif

#if defined(TWIN_TPL_SCAN)

#define ASCENDC_TPL_DTYPE_DECL(name, ...) twin_tpl(DTYPE, #name, 8, __VA_ARGS__)
#define ASCENDC_TPL_DATATYPE_DECL(name, ...) twin_tpl(DATATYPE, #name, 8, __VA_ARGS__)
#define ASCENDC_TPL_FORMAT_DECL(name, ...) twin_tpl(FORMAT, #name, 8, __VA_ARGS__)
#define ASCENDC_TPL_UINT_DECL(name, bits, ...) twin_tpl(UINT, #name, bits, __VA_ARGS__)
#define ASCENDC_TPL_BOOL_DECL(name, ...) twin_tpl(BOOL, #name, 1, __VA_ARGS__)
#define ASCENDC_TPL_KERNEL_TYPE_DECL(name, ...) twin_tpl(KERNEL_TYPE, #name, 8, __VA_ARGS__)

#define ASCENDC_TPL_DTYPE_SEL(name, ...) twin_tpl(DTYPE, #name, 0, __VA_ARGS__)
#define ASCENDC_TPL_DATATYPE_SEL(name, ...) twin_tpl(DATATYPE, #name, 0, __VA_ARGS__)
#define ASCENDC_TPL_FORMAT_SEL(name, ...) twin_tpl(FORMAT, #name, 0, __VA_ARGS__)
#define ASCENDC_TPL_UINT_SEL(name, ...) twin_tpl(UINT, #name, 0, __VA_ARGS__)
#define ASCENDC_TPL_BOOL_SEL(name, ...) twin_tpl(BOOL, #name, 0, __VA_ARGS__)
#define ASCENDC_TPL_SHARED_KERNEL_TYPE_SEL(name, ...) twin_tpl(KERNEL_TYPE, #name, 0, __VA_ARGS__)
#define ASCENDC_TPL_KERNEL_TYPE_SEL(...) twin_tpl(CORES, "", 0, __VA_ARGS__)
#define ASCENDC_TPL_DETERMINISTIC_SEL(...) twin_tpl(DETERMINISTIC, "", 0, __VA_ARGS__)
#define ASCENDC_TPL_TILING_STRUCT_SEL(Struct) twin_tpl(STRUCT, #Struct, 0, 0)

#define ASCENDC_TPL_ARGS_DECL(Op, ...) twin_tpl_declared(#Op, __VA_ARGS__)
#define ASCENDC_TPL_ARGS_SEL(...) twin_tpl_combination(__VA_ARGS__)
#define ASCENDC_TPL_SEL(...) twin_tpl_selected(__VA_ARGS__)

#elif defined(ASCENDC_TPL_KERNEL)

#define ASCENDC_TPL_ARGS_DECL(...)
#define ASCENDC_TPL_SEL(...)

#else

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace twin {

struct TemplateParameter {
    uint32_t bits;
    bool listed;  // the key holds a value's place among the values, not the value
    std::vector<uint64_t> values;
};
// The values of a UINT, see ASCENDC_TPL_UI_*.
inline std::vector<uint64_t> UintValues(const std::vector<uint64_t>& written) {
    const uint64_t ranges = written[0] == ASCENDC_TPL_UI_LIST ? 0 : written[1];
    size_t at = written[0] == ASCENDC_TPL_UI_LIST ? 1 : 2;
    std::vector<uint64_t> values;
    for (uint64_t range = 0; range < ranges; ++range, at += 2) {
        for (uint64_t value = written.at(at); value <= written.at(at + 1); ++value) values.push_back(value);
    }
    values.insert(values.end(), written.begin() + static_cast<std::ptrdiff_t>(at), written.end());
    return values;
}
inline TemplateParameter UintParameter(uint32_t bits, const std::vector<uint64_t>& written) {
    return {bits, true, UintValues(written)};
}
// INVALID_TILING_KEY where the arguments are not as many as the parameters, or are none of a UINT's values.
inline uint64_t TemplateKey(const std::vector<TemplateParameter>& parameters, const std::vector<uint64_t>& arguments) {
    uint64_t key = 0;
    uint32_t begin = 0;
    if (parameters.size() != arguments.size()) return INVALID_TILING_KEY;
    for (size_t i = 0; i < arguments.size(); ++i) {
        const TemplateParameter& one = parameters[i];
        const auto found = std::find(one.values.begin(), one.values.end(), arguments[i]);
        if (one.listed && found == one.values.end()) return INVALID_TILING_KEY;
        const uint64_t code = one.listed ? static_cast<uint64_t>(found - one.values.begin()) : arguments[i];
        if (begin + one.bits > 64 || (one.bits < 64 && code >> one.bits != 0)) return INVALID_TILING_KEY;
        key |= code << begin;
        begin += one.bits;
    }
    return key;
}

}  // namespace twin

#define ASCENDC_TPL_DTYPE_DECL(name, ...) \
    twin::TemplateParameter {             \
        8, false, { __VA_ARGS__ }         \
    }
#define ASCENDC_TPL_DATATYPE_DECL(name, ...) ASCENDC_TPL_DTYPE_DECL(name, __VA_ARGS__)
#define ASCENDC_TPL_FORMAT_DECL(name, ...) ASCENDC_TPL_DTYPE_DECL(name, __VA_ARGS__)
#define ASCENDC_TPL_KERNEL_TYPE_DECL(name, ...) ASCENDC_TPL_DTYPE_DECL(name, __VA_ARGS__)
#define ASCENDC_TPL_UINT_DECL(name, bits, ...) twin::UintParameter(bits, {__VA_ARGS__})
#define ASCENDC_TPL_BOOL_DECL(name, ...) \
    twin::TemplateParameter {            \
        1, false, { __VA_ARGS__ }        \
    }

#define ASCENDC_TPL_ARGS_DECL(Op, ...) \
    [[maybe_unused]] static const std::vector<twin::TemplateParameter> twin_template_parameters { __VA_ARGS__ }
#define ASCENDC_TPL_SEL(...)

#define GET_TPL_TILING_KEY(...) twin::TemplateKey(twin_template_parameters, {__VA_ARGS__})
#define ASCENDC_TPL_SEL_PARAM(context, ...) (context)->SetTilingKey(GET_TPL_TILING_KEY(__VA_ARGS__))

#endif
