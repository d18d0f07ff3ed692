// What the op compiler generates for a kernel, and, for headers that come without CANN's CPU-debug library,
// what they expect of that library. For compiling only: nothing here has a body worth running.
#pragma once
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

// Generated for every op. The copy is const, as it is when CANN compiles for one static shape.
template <class T>
T AscendMoeLoadTiling(const uint8_t* gm) {
    T tiling;
    memcpy(&tiling, gm, sizeof(T));
    return tiling;
}
#define GET_TILING_DATA_WITH_STRUCT(type, name, gm) const type name = AscendMoeLoadTiling<type>(gm)

#ifdef ASCEND_MOE_WITHOUT_CPU_LIBRARY

#define __global__
#define __aicore__
#define __host__
#define __host_aicore__
#define __simt_callee__
#define __simd_callee__
#define __simd_vf__
#define __BLOCK_LOCAL__
#define __WORKGROUP_LOCAL__
#define __VEC_SCOPE__
#define __disable_kernel_type_autoinfer__
#define __gm__
#define __ubuf__
#define __cbuf__
#define __ssbuf__
#define __ca__
#define __cb__
#define __cc__
#define __fbuf__
#define __sync_noalias__
#define __sync_alias__
#define __check_sync_alias__
#define __sync_in__
#define __sync_out__
#define __inout_pipe__(...)
#define __in_pipe__(...)
#define __out_pipe__(...)
#define ASCENDC_HOST_AICORE

// Storage types of the device compiler.
struct half {
    half() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    constexpr half(T) : bits(0) {}
    constexpr operator float() const { return 0.0f; }
    float ToFloat() const;
    uint16_t bits;
};
struct bfloat16_t {
    bfloat16_t() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
    constexpr bfloat16_t(T) : bits(0) {}
    float ToFloat() const;
    uint16_t bits;
};
#define ASCEND_MOE_OPAQUE_TYPE(name) \
    struct name {                    \
        uint8_t bits;                \
    }
ASCEND_MOE_OPAQUE_TYPE(fp4x2_e1m2_t);
ASCEND_MOE_OPAQUE_TYPE(fp4x2_e2m1_t);
ASCEND_MOE_OPAQUE_TYPE(fp8_e4m3fn_t);
ASCEND_MOE_OPAQUE_TYPE(fp8_e5m2_t);
ASCEND_MOE_OPAQUE_TYPE(fp8_e8m0_t);
ASCEND_MOE_OPAQUE_TYPE(hifloat8_t);
#undef ASCEND_MOE_OPAQUE_TYPE

extern int64_t block_idx;
extern int64_t block_num;
extern uint64_t g_tilingKey;
extern int32_t g_coreType;
extern int32_t g_taskRation;
extern int32_t sub_block_idx;
extern uint64_t g_fixpipeNdNzParam;

#include "ascendc_enums.h"

// Register types of later chips: the headers name them for every chip.
using vector_bool = uint8_t;
using vector_address = int32_t;
using vector_align = int8_t[32];

namespace AscendC {
extern const int MIX_TYPE;
extern const int AIC_TYPE;
extern const int AIV_TYPE;
extern bool g_isVdeq;
}  // namespace AscendC

// Instructions: declarations only. The vector unit's arithmetic is restricted to the operand types it has, so
// that a wrong type is an error here as it is under the device compiler; conversions are typed by the headers
// themselves.
template <class T, class... Allowed>
using Only = std::enable_if_t<(std::is_same_v<T, Allowed> || ...)>;
#define ANY(name)         \
    template <class... A> \
    int64_t name(A&&...);
#define ARITH(name)                                                                \
    template <class T, class... A, class = Only<T, half, float, int16_t, int32_t>> \
    void name(T*, A&&...);
#define FLOATS(name)                                             \
    template <class T, class... A, class = Only<T, half, float>> \
    void name(T*, A&&...);
#define COMPARE(name)                                                     \
    template <class T, class... A, class = Only<T, half, float, int32_t>> \
    void name(uint8_t*, T*, A&&...);
#define ROUNDED(name) ANY(name##a) ANY(name##c) ANY(name##f) ANY(name##r) ANY(name##z)
// clang-format off
ARITH(vadd) ARITH(vadds) ARITH(vmax) ARITH(vmaxs) ARITH(vmin) ARITH(vmins) ARITH(vmul) ARITH(vmuls)
ARITH(vsub)
FLOATS(vabs) FLOATS(vaxpy) FLOATS(vcadd) FLOATS(vcgadd) FLOATS(vcgmax) FLOATS(vcgmin) FLOATS(vcmax)
FLOATS(vcmin) FLOATS(vcpadd) FLOATS(vdiv) FLOATS(vexp) FLOATS(vln) FLOATS(vlrelu) FLOATS(vrec)
FLOATS(vrsqrt) FLOATS(vsqrt)
COMPARE(vcmpv_eq) COMPARE(vcmpv_ge) COMPARE(vcmpv_gt) COMPARE(vcmpv_le) COMPARE(vcmpv_lt) COMPARE(vcmpv_ne)
COMPARE(vcmpvs_eq) COMPARE(vcmpvs_ge) COMPARE(vcmpvs_gt) COMPARE(vcmpvs_le) COMPARE(vcmpvs_lt)
COMPARE(vcmpvs_ne)
ROUNDED(vconv_bf162s32) ROUNDED(vconv_f162s16) ROUNDED(vconv_f162s32) ROUNDED(vconv_f162s4)
ROUNDED(vconv_f162s8) ROUNDED(vconv_f162u8) ROUNDED(vconv_f322bf16) ROUNDED(vconv_f322f16)
ROUNDED(vconv_f322f32) ROUNDED(vconv_f322s16) ROUNDED(vconv_f322s32) ROUNDED(vconv_f322s64)
ROUNDED(vconv_s162f16) ROUNDED(vconv_s322f32) ROUNDED(vconv_s642f32)
ANY(vaddrelu) ANY(vaddreluconv_f162s8) ANY(vaddreluconv_f322f16) ANY(vaddreluconv_s162s8)
ANY(vaddreluconv_vdeqs162b8) ANY(vand) ANY(vbitsort) ANY(vbrcb) ANY(vcmp_eq) ANY(vcmp_ge) ANY(vcmp_gt)
ANY(vcmp_le) ANY(vcmp_lt) ANY(vcmp_ne) ANY(vconv_bf162f32) ANY(vconv_deq) ANY(vconv_deqs162b8h)
ANY(vconv_deqs162b8l) ANY(vconv_f162f32) ANY(vconv_f162s4) ANY(vconv_f162s8) ANY(vconv_f162u8)
ANY(vconv_f322f16) ANY(vconv_f322f16o) ANY(vconv_s162f16) ANY(vconv_s162f32) ANY(vconv_s322f32)
ANY(vconv_s322s16) ANY(vconv_s322s64) ANY(vconv_s42f16) ANY(vconv_s642s32) ANY(vconv_s82f16)
ANY(vconv_u82f16) ANY(vconv_vdeqs162b8h) ANY(vconv_vdeqs162b8l) ANY(vcopy) ANY(vector_dup) ANY(vgather)
ANY(vgatherb) ANY(vld_va_reg) ANY(vmadd) ANY(vmaddrelu) ANY(vmla) ANY(vmrgsort4) ANY(vmulconv_f162s8)
ANY(vmulconv_f162u8) ANY(vnot) ANY(vor) ANY(vreducev2) ANY(vrelu) ANY(vsel) ANY(vshl) ANY(vshr)
ANY(vsubrelu) ANY(vsubreluconv_f162s8) ANY(vsubreluconv_f322f16) ANY(vsubreluconv_s162s8) ANY(vtranspose)
ANY(copy_cbuf_to_bt) ANY(copy_cbuf_to_fbuf) ANY(copy_cbuf_to_gm) ANY(copy_gm_to_cbuf)
ANY(copy_gm_to_cbuf_multi_nd2nz_b16) ANY(copy_gm_to_cbuf_multi_nd2nz_b32s)
ANY(copy_gm_to_cbuf_multi_nd2nz_b8) ANY(copy_gm_to_ubuf) ANY(copy_gm_to_ubuf_align_b16)
ANY(copy_gm_to_ubuf_align_b32) ANY(copy_gm_to_ubuf_align_b8) ANY(copy_matrix_cbuf_to_cc)
ANY(copy_matrix_cc_to_cbuf) ANY(copy_matrix_cc_to_gm) ANY(copy_ubuf_to_gm) ANY(copy_ubuf_to_gm_align_b16)
ANY(copy_ubuf_to_gm_align_b32) ANY(copy_ubuf_to_gm_align_b8) ANY(copy_ubuf_to_ubuf) ANY(create_ca_matrix)
ANY(create_ca_matrix_bf16) ANY(create_cb_matrix) ANY(create_cb_matrix_bf16) ANY(create_cbuf_matrix)
ANY(create_cbuf_matrix_bf16) ANY(img2colv2_cbuf_to_ca) ANY(img2colv2_cbuf_to_ca_s4)
ANY(img2colv2_cbuf_to_cb) ANY(load_cbuf_to_ca) ANY(load_cbuf_to_ca_s4) ANY(load_cbuf_to_ca_transpose)
ANY(load_cbuf_to_cb) ANY(load_cbuf_to_cb_s4) ANY(load_cbuf_to_cb_sp) ANY(load_cbuf_to_cb_transpose)
ANY(load_cbuf_to_cb_transpose_s4) ANY(load_gm_to_ca) ANY(load_gm_to_cb) ANY(load_gm_to_cbuf) ANY(mad)
ANY(mad_s4) ANY(mad_sp) ANY(scatter_vnchwconv_b16) ANY(scatter_vnchwconv_b32) ANY(scatter_vnchwconv_b8)
ANY(bcnt0) ANY(bcnt1) ANY(clz) ANY(conv_f322f16o) ANY(conv_f322s32a) ANY(conv_f322s32c) ANY(conv_f322s32f)
ANY(conv_f322s32r) ANY(dc_preload) ANY(dcci) ANY(dsb) ANY(ffts_cross_core_sync) ANY(get_acc_val)
ANY(get_arch_ver) ANY(get_block_idx) ANY(get_block_num) ANY(get_cmpmask) ANY(get_coreid) ANY(get_ctrl)
ANY(get_ffts_base_addr) ANY(get_fpc) ANY(get_icache_prl_st) ANY(get_imm) ANY(get_max_min_cnt)
ANY(get_overflow_status) ANY(get_pc) ANY(get_rsvd_cnt) ANY(get_st_atomic_cfg) ANY(get_status)
ANY(get_subblockdim) ANY(get_subblockid) ANY(get_vms4_sr) ANY(hset_flag) ANY(hwait_flag) ANY(ld_dev)
ANY(pipe_barrier) ANY(preload) ANY(sbitset0) ANY(sbitset1) ANY(set_aipp_spr_0) ANY(set_aipp_spr_1)
ANY(set_aipp_spr_18) ANY(set_aipp_spr_19) ANY(set_aipp_spr_2) ANY(set_aipp_spr_20) ANY(set_aipp_spr_21)
ANY(set_aipp_spr_3) ANY(set_aipp_spr_4) ANY(set_aipp_spr_5) ANY(set_aipp_spr_6) ANY(set_aipp_spr_7)
ANY(set_aipp_spr_8) ANY(set_aipp_spr_9) ANY(set_atomic_add) ANY(set_atomic_bf16) ANY(set_atomic_f16)
ANY(set_atomic_f32) ANY(set_atomic_max) ANY(set_atomic_min) ANY(set_atomic_none) ANY(set_atomic_s16)
ANY(set_atomic_s32) ANY(set_atomic_s8) ANY(set_cmpmask) ANY(set_ctrl) ANY(set_data_exp_0)
ANY(set_data_exp_1) ANY(set_data_exp_2) ANY(set_data_exp_3) ANY(set_deqscale) ANY(set_ffts_base_addr)
ANY(set_flag) ANY(set_fmatrix) ANY(set_fmatrix_b) ANY(set_fpc) ANY(set_l1_3d_size) ANY(set_l3d_rpt)
ANY(set_lrelu_alpha) ANY(set_mask_count) ANY(set_mask_norm) ANY(set_mov_pad_val) ANY(set_nd_para)
ANY(set_padding) ANY(set_quant_pre) ANY(set_st_atomic_cfg) ANY(set_va_reg_sb) ANY(set_vector_mask) ANY(sff0)
ANY(sff1) ANY(sflbits) ANY(st_dev) ANY(trap) ANY(wait_flag) ANY(wait_flag_dev)
ANY(AscendCBufAbsAddr) ANY(AscendCBufAlloc) ANY(AscendCBufDeque) ANY(AscendCBufEnque) ANY(AscendCBufFree)
ANY(AscendCBufGet) ANY(AscendCBufInit) ANY(AscendCQueCreate) ANY(AscendCRecordPoolHierarchy)
ANY(AscendCTBufPoolInit) ANY(AscendCTBufPoolResetCheck) ANY(AscendCUpdateTbufPoolStatus) ANY(__ib_set_stub)
ANY(__ib_wait_stub) ANY(__sync_all_stub)
// clang-format on
#undef ANY
#undef ARITH
#undef FLOATS
#undef COMPARE
#undef ROUNDED

#endif  // ASCEND_MOE_WITHOUT_CPU_LIBRARY
