"""Schemas of vllm-ascend's MoE operators ``torch.ops._C_ascend.*``, by release.

They equal those that the compiled part of each wheel registers (a test compares them); 0.24.0 to 0.26.0 are from the
release candidates.
"""

from __future__ import annotations

import logging
import re
from importlib import metadata

from ascend_moe.errors import need
from ascend_moe.native import log

# Operator, first release, schema; "gone": removed in this release.
_SCHEMAS = """
dequant_situ_quant 0.26.0
    (Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None, Tensor?
    quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, float beta=4.0, float linear_beta=25.0,
    bool activate_left=True, str quant_mode="dynamic") -> (Tensor y, Tensor scale)
dispatch_ffn_combine 0.18.0
    (Tensor x, Tensor[] weight1, Tensor[] weight2, Tensor expert_idx, Tensor[] scale1, Tensor[] scale2, Tensor
    probs, str group, int max_output_size, Tensor! out, Tensor! expert_token_nums) -> (Tensor out, Tensor
    expert_token_nums)
dispatch_ffn_combine 0.23.0
    (Tensor x, Tensor[] weight1, Tensor[] weight2, Tensor expert_idx, Tensor[] scale1, Tensor[] scale2, Tensor[]
    bias1, Tensor[] bias2, Tensor probs, str group, int max_output_size, Tensor! out, Tensor! expert_token_nums,
    Tensor? x_active_mask=None, float swiglu_limit=1000000.0) -> (Tensor out, Tensor expert_token_nums)
dispatch_gmm_combine_decode 0.18.0
    (Tensor x, Tensor expert_ids, Tensor[] gmm1_permuted_weight, Tensor[] gmm1_permuted_weight_scale, Tensor[]
    gmm2_weight, Tensor[] gmm2_weight_scale, Tensor expert_scales, Tensor? expert_smooth_scales=None, Tensor?
    x_active_mask=None, str group_ep='', int ep_rank_size=0, int ep_rank_id=0, int moe_expert_num=0, int
    shared_expert_num=1, int shared_expert_rank_num=0, int quant_mode=0, int global_bs=0) -> (Tensor output, Tensor
    expert_token_nums)
dispatch_gmm_combine_decode 0.24.0
    gone
grouped_matmul_swiglu_quant 0.18.0
    (Tensor x, Tensor weight, Tensor weight_scale, Tensor x_scale, Tensor group_list, *, Tensor? bias=None, Tensor?
    offset=None) -> (Tensor output, Tensor output_scale, Tensor output_offset)
grouped_matmul_swiglu_quant 0.23.0
    (Tensor x, Tensor weight, Tensor weight_scale, Tensor x_scale, Tensor group_list, *, Tensor? bias=None, Tensor?
    offset=None, float swiglu_limit=0.0) -> (Tensor output, Tensor output_scale, Tensor output_offset)
grouped_matmul_swiglu_quant_v2 0.23.0
    (Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, Tensor group_list, Tensor? smooth_scale=None,
    Tensor[]? weight_assist_matrix=None, Tensor? bias=None, int? dequant_mode=0, int? dequant_dtype=0, int?
    quant_mode=0, int? quant_dtype=0, bool transpose_weight=False, int group_list_type=0, int[2] tuning_config=[],
    float swiglu_limit=0.0) -> (Tensor output, Tensor output_scale)
grouped_matmul_swiglu_quant_weight_nz 0.23.0
    (Tensor x, Tensor weight, Tensor weight_scale, Tensor x_scale, Tensor group_list, *, Tensor? bias=None, Tensor?
    offset=None, float swiglu_limit=0.0) -> (Tensor output, Tensor output_scale, Tensor output_offset)
grouped_matmul_swiglu_quant_weight_nz_tensor_list 0.18.0
    (Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, Tensor group_list, *, Tensor? bias=None,
    Tensor? offset=None) -> (Tensor output, Tensor output_scale, Tensor output_offset)
grouped_matmul_swiglu_quant_weight_nz_tensor_list 0.23.0
    (Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale, Tensor group_list, *, Tensor? bias=None,
    Tensor? offset=None, float swiglu_limit=0.0) -> (Tensor output, Tensor output_scale, Tensor output_offset)
moe_gating_top_k 0.18.0
    (Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, int norm_type, bool out_flag,
    float routed_scaling_factor, float eps, Tensor? bias_opt=None) -> (Tensor y, Tensor expert_idx, Tensor out)
moe_gating_top_k_hash 0.23.0
    (Tensor x, int k, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, int k_group=1, int
    group_count=1, float routed_scaling_factor=1.0, float eps=1e-20, int group_select_mode=0, int renorm=0, int
    norm_type=0, bool out_flag=False) -> (Tensor y, Tensor expert_idx, Tensor out)
moe_grouped_matmul 0.18.0
    (Tensor x, Tensor weight, Tensor group_list, int split_item, int group_type, int group_list_type) -> Tensor[]
npu_dequant_swiglu_quant 0.23.0
    (Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None, Tensor?
    quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, bool activate_left=True, int
    quant_mode=0, int swiglu_mode=0, float clamp_limit=0.0, float glu_alpha=1.0, float glu_bias=0.0) -> (Tensor y,
    Tensor scale)
npu_moe_init_routing_custom 0.18.0
    (Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int active_num=-1, int
    expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, bool
    expert_tokens_num_flag=False, int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0) -> (Tensor,
    Tensor, Tensor, Tensor)
npu_moe_init_routing_custom 0.25.1
    gone
npu_swiglu_group_quant 0.23.0
    (Tensor x, Tensor? topk_weight, Tensor? group_index, ScalarType dst_type=39, int quant_mode=1, int
    group_size=128, bool round_scale=False, bool ue8m0_scale=False, bool output_origin=False, int group_list_type=0,
    float clamp_value=0.0) -> (Tensor y, Tensor scale, Tensor y_origin)
situ_mx_quant 0.26.0
    (Tensor x, float beta=1.0, float linear_beta=0.0, bool activate_left=False, int dst_type=36) -> (Tensor y,
    Tensor mxscale)
"""


def _read(text: str) -> dict[str, dict[str, str | None]]:
    schemas: dict[str, dict[str, str | None]] = {}
    for name, release, lines in re.findall(r"^(\w+) (\S+)\n((?: .*\n)+)", text, re.MULTILINE):
        schema = " ".join(lines.split())
        schemas.setdefault(name, {})[release] = None if schema == "gone" else schema
    return schemas


SCHEMAS = _read(_SCHEMAS)
_FFN, _FFN_BIASES = (str(SCHEMAS["dispatch_ffn_combine"][release]) for release in ("0.18.0", "0.23.0"))
# Overloads of dispatch_ffn_combine besides the release's: vllm-ascend's tests pass a tensor of biases.
OVERLOADS = {
    "dispatch_ffn_combine.bias_tensor": _FFN_BIASES.replace("[] bias", " bias"),
    "dispatch_ffn_combine.release_0_18": _FFN,
    "dispatch_ffn_combine.release_0_13": _FFN.replace(", Tensor! expert_token_nums", "").replace(
        "(Tensor out, Tensor expert_token_nums)", "Tensor"
    ),
}


_FIRST = (0, 7)  # its first release; a checkout without git tags has version 0.1.dev


def _number(release: str) -> tuple[int, ...]:
    """Return the three numbers; a release candidate counts as its release."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", release)
    need(found is not None, "release", "is {!r}; need a release of vllm-ascend, such as {}", release, "0.23.0")
    return tuple(int(part or 0) for part in found.groups()) if found else ()


RELEASES = sorted({release for changes in SCHEMAS.values() for release in changes}, key=_number)


def installed() -> str | None:
    """Return the installed release of vllm-ascend, without importing it; None if it is not installed."""
    try:
        return metadata.version("vllm-ascend")
    except metadata.PackageNotFoundError:
        return None


def choose(release: str | None = None) -> str:
    """Return the newest known release that is not newer than ``release``, or with a warning the oldest.

    None: the installed release, or else the newest. A checkout without a release number counts as the newest.
    """
    wanted = release or installed() or RELEASES[-1]
    if _number(wanted) < _FIRST:
        wanted = RELEASES[-1]
    known = [each for each in RELEASES if _number(each) <= _number(wanted)]
    if not known:
        text = "vllm-ascend %s is older than all known releases: using the operators of %s"
        log.say(logging.WARNING, text, wanted, RELEASES[0])
    return known[-1] if known else RELEASES[0]


def of_release(release: str) -> dict[str, str]:
    """Return the schemas of a known release by operator name, then of the overloads by operator.overload."""
    made: dict[str, str] = {}
    for name, changes in SCHEMAS.items():
        schema = [text for since, text in changes.items() if _number(since) <= _number(release)]
        if schema and schema[-1] is not None:
            made[name] = schema[-1]
    return made | {name: text for name, text in OVERLOADS.items() if text != made["dispatch_ffn_combine"]}
