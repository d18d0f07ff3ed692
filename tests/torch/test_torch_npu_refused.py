"""Every wrong argument of torch_npu's other MoE operators is named, by the public function and the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bad_arguments import refused
from torch import int8, int32, int64, ones, tensor, zeros
from torch_npu_calls import CALLS, OperatorCall, call, ids, values

from ascend_moe import MoELayer, npu
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError, AscendMoeError
from ascend_moe.experts import grouped_mlp, quantize_weight
from ascend_moe.experts.grouped_matmul import NPU_ONLY
from ascend_moe.npu import WINDOW_OPERATORS
from ascend_moe.routers import deepseek_v3, softmax_topk

TABLE = tensor([[1, 7, 0, 0, 0], [4, 0, 2, 4, 6], [2, 1, 3, 0, 0], [3, 5, 8, 9, 0]], dtype=int32)
GROUPED = {"group_list": tensor([1, 4]), "split_item": 2, "group_type": 0}
WEIGHT, PAIRS = ones(2, 8, 3), zeros(3, 2, dtype=int32)
FUSED = ones(12, 24).to(int8), ones(4, 24, 32).to(int8), tensor([3, 6, 9, 12]), ones(4, 32), ones(12)
ROWS, SOURCES = ones(5, 8), (torch.arange(10).to(int32), ids(5, 2, top=3))
BF16, STATIC = {"output_dtype": torch.bfloat16}, {"quant_mode": 0, "quant_scale": ones(1)}

# Valid calls; those of CALLS are valid too.
VALID = [
    call("npu_grouped_matmul", "floats", [ones(4, 8)], [WEIGHT], **GROUPED),
    call("npu_grouped_matmul", "int8", [ones(4, 8).to(int8)], [WEIGHT.to(int8)], **GROUPED, output_dtype=int32),
    call("npu_clipped_swiglu", "", ones(2, 4)),
    call("npu_dequant_swiglu_quant", "", ones(3, 8, dtype=int32), weight_scale=ones(1, 8), quant_mode=1),
    call("npu_grouped_matmul_swiglu_quant", "", *FUSED),
    call("npu_moe_gating_top_k", "", ones(2, 12), 3),
    call("npu_moe_init_routing", "", ones(3, 8), torch.arange(6, dtype=int32).reshape(3, 2), PAIRS, 3),
    call("npu_moe_finalize_routing", "", ones(10, 8), ROWS, ROWS, ones(3, 8), ones(5, 2), *SOURCES),
    call("npu_moe_re_routing", "", ones(4, 8), tensor([[2, 2]])),
    call("npu_moe_update_expert", "", tensor([[3]]), TABLE, local_rank_id=1, world_size=4),
]

# By call and argument: values that are refused.
WRONG: dict[str, dict[str, list[Any]]] = {
    "npu_grouped_matmul": {
        "x": [[], ones(4, 8), [ones(4, 7)], [ones(4, 8, dtype=int32)]],
        "weight": [[ones(2, 8, 3).bfloat16()], [ones(8)], [ones(8, 3), ones(8, 4)]],
        "bias": [[ones(3)], [ones(2, 3, dtype=int32)]],
        "scale": [[ones(2, 3)]],
        "per_token_scale": [[ones(4)]],
        "output_dtype": [torch.bfloat16, 12345],
        "split_item": [4],
        "group_type": [1, None, -1],
        "group_list_type": [3],
        "group_list": [None, *(tensor(ends) for ends in ([1, 5], [3, 2], [1, 2, 3])), ids(2)],
        "act_type": [1],
        "scale_dtype": [300],
        **{name: [[ones(2, 3)]] for name in ("offset", "antiquant_scale", "antiquant_offset", *NPU_ONLY[:3])},
    },
    "npu_grouped_matmul int8": {"output_dtype": [None, torch.bfloat16], "bias": [[ones(2, 3)]]},
    "npu_swiglu": {"dim": [2], "input": [ones(2, 4, dtype=int32)]},
    "npu_clipped_swiglu": {
        "dim": [2],
        "x": [ones(2, 4, dtype=int32)],
        "limit": [0.0, float("nan")],
        "group_index": [tensor([3]), tensor([-1])],
    },
    "npu_dynamic_quant": {
        "input": [ones(8), ones(2, 8, dtype=int32)],
        "dst_type": [torch.quint4x2, 291, 16, 290],
        "quant_mode": ["perchannel"],
        "dst_type_max": [15.0],
        "smooth_scales": [ones(7)],
        "group_index": [tensor([2])],
    },
    "npu_dequant_swiglu_quant": {
        "x": [ones(3, 7, dtype=int32), ones(8, dtype=int32), ones(3, 8, dtype=int64)],
        "weight_scale": [None, ones(2, 8)],
        "activation_scale": [ones(4)],
        "bias": [ones(7)],
        "quant_mode": [2],
        "quant_scale": [ones(8)],
        "quant_offset": [ones(4)],
        "group_index": [tensor([4]), tensor([-1])],
        "dst_type": [291, 5],
        "round_mode": [1],
        "activate_dim": [0],
        "swiglu_mode": [3],
        "clamp_limit": [0.0],
        "glu_alpha": [float("inf")],
    },
    "npu_grouped_matmul_swiglu_quant": {
        "x": [ones(12, 24)],
        # Five dimensions are the NPU's NZ.
        "weight": [ones(4, 24, 2, 16, dtype=int8), ones(4, 25, 32, dtype=int8)],
        "weight_scale": [ones(4, 16), ones(4, 32, dtype=int64)],
        "x_scale": [ones(11)],
        "group_list": [tensor([3, 6, 9]), tensor([3, 6, 9, 13])],
        "bias": [values(4, 32)],
        "offset": [values(4, 32)],
    },
    "npu_grouped_matmul_swiglu_quant_v2": {
        "dequant_mode": [2],
        "quant_mode": [1],
        "quant_dtype": [5, 24],
        "dequant_dtype": [15],
        "weight_assist_matrix": [[values(3, 12)]],
        "x_dtype": [296],
    },
    "npu_grouped_matmul_finalize_routing": {
        "offset": [values(3, 1, 12)],
        "bias": [values(3, 12)],
        "dtype": [torch.bfloat16],
        "scale_dtype": [293],
        "row_index": [None],
        "shared_input_offset": [-1, 5],
    },
    "npu_moe_gating_top_k": {
        "x": [ones(12), ones(2, 12, dtype=int32)],
        "k": [0, 13],
        "bias": [ones(11), ones(12).bfloat16()],
        "group_count": [5, 0],
        "group_select_mode": [2],
        "renorm": [2],
        "norm_type": [3],
        "input_ids": [ones(2, dtype=int64)],
        "tid2eid": [ones(5, 3, dtype=int64)],
    },
    "npu_moe_gating_top_k_softmax": {
        "x": [ones(12)],
        "k": [13, -1],
        "finished": [zeros(3, dtype=torch.bool), zeros(2)],
    },
    "npu_moe_gating_top_k_softmax_v2": {"renorm": [2]},
    "npu_moe_compute_expert_tokens": {
        "sorted_expert_for_source_row": [tensor([1, 0], dtype=int32)],
        "num_expert": [0, 2**31, 2**40],
    },
    "npu_moe_init_routing": {"row_idx": [torch.full((3, 2), row, dtype=int32) for row in (6, -1, 0)]},
    "npu_moe_init_routing_v2": {
        "quant_mode": [13, 2],
        "x_dtype": [290, torch.int8, "int8"],
        "expert_num": [-1],
        "active_expert_range": [[3, 9]],
    },
    "npu_moe_token_permute": {"padded_mode": [True], "num_out_tokens": [-99]},
    "npu_moe_token_unpermute": {"padded_mode": [True]},
    "npu_moe_finalize_routing": {
        "skip1": [ones(4, 8)],
        "export_for_source_row": [None, torch.full((5, 2), 3, dtype=int32)],
        "scales": [ones(4, 2)],
        "expanded_src_to_dst_row": [torch.full((10,), row, dtype=int32) for row in (10, -2)],
        "drop_pad_mode": [4],
    },
    "npu_moe_re_routing": {
        "expert_token_num_per_rank": [tensor([[2, 3]]), tensor([[-1, 2]])],
        "expert_token_num_type": [0],
        "idx_type": [1],
        "tokens_dtype": [1],
    },
    "npu_moe_update_expert": {
        "expert_ids": [tensor([[4]]), tensor([[-2]]), tensor([[1.0]])],
        "eplb_table": [TABLE.long(), *(tensor([[1, 1], [n, 1], *[[1, 1]] * 2]).to(int32) for n in (0, 2))],
        "local_rank_id": [4, -1],
        "world_size": [0],
        "expert_scales": [ones(1, 1)],
        "pruning_threshold": [ones(1)],
        "balance_mode": [2],
        "active_mask": [ones(7, dtype=torch.bool)],
    },
}

# Arguments that contradict each other: the first is named.
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("npu_grouped_matmul", {"group_list_type": 2, "split_item": 0}),
    ("npu_grouped_matmul", {"group_list": tensor([-1, 2]), "group_list_type": 1}),
    ("npu_grouped_matmul", {"group_list": tensor([[2, 1]]), "group_list_type": 2}),
    ("npu_grouped_matmul", {"group_list": tensor([1, 2]), "group_list_type": 2}),
    ("npu_grouped_matmul int8", {"output_dtype": None, "scale": [ones(2, 3)]}),
    ("npu_grouped_matmul int8", {"output_dtype": int8, "scale": [ones(2, 3)]}),
    ("npu_grouped_matmul int8", {"scale": [ones(2, 3, dtype=int64)], **BF16}),
    ("npu_grouped_matmul int8", {"per_token_scale": [ones(4)]}),
    ("npu_grouped_matmul int8", {"per_token_scale": [ones(3)], "scale": [ones(2, 3)], **BF16}),
    ("npu_swiglu", {"dim": -1, "input": ones(2, 5)}),
    ("npu_dynamic_quant", {"smooth_scales": ones(8), "group_index": tensor([2])}),
    ("npu_dynamic_quant", {"group_index": tensor([10]), "smooth_scales": ones(1, 8)}),
    ("npu_dequant_swiglu_quant", {"weight_scale": ones(1, 8), "x": ones(3, 8)}),
    ("npu_dequant_swiglu_quant", {"weight_scale": ones(1, 8), "group_index": tensor([1, 1])}),
    ("npu_dequant_swiglu_quant", {"activation_scale": ones(3), "x": ones(3, 8), "weight_scale": None}),
    ("npu_dequant_swiglu_quant", {"bias": ones(8), "x": ones(3, 8), "weight_scale": None}),
    ("npu_dequant_swiglu_quant", {"bias": ones(8), "group_index": tensor([2])}),
    ("npu_dequant_swiglu_quant", {"quant_scale": None, "quant_mode": 0}),
    ("npu_dequant_swiglu_quant", {"quant_offset": ones(1), **STATIC, "group_index": tensor([2])}),
    ("npu_grouped_matmul_finalize_routing", {"row_index": tensor([0, 3, 1] * 3), "output_bs": 3}),
    ("npu_moe_gating_top_k", {"k": 7, "group_count": 4, "k_group": 2}),
    ("npu_moe_gating_top_k", {"k_group": 5, "group_count": 4}),
    ("npu_moe_gating_top_k", {"k_group": 0, "group_count": 4}),
    ("npu_moe_gating_top_k", {"group_count": 12, "k_group": 3, "group_select_mode": 1}),
    ("npu_moe_init_routing_v2", {"expert_capacity": -1, "drop_pad_mode": 1}),
    ("npu_moe_finalize_routing", {"skip2": ones(5, 8), "skip1": None}),
    ("npu_moe_finalize_routing", {"k": 3, "scales": None}),
    ("npu_moe_finalize_routing", {"expanded_permuted_rows": ones(10, 8), "drop_pad_mode": 1}),
    ("npu_moe_update_expert", {"expert_ids": tensor([[3]]), "eplb_table": tensor([[0, 1]], dtype=int32)}),
    ("npu_moe_update_expert", {"pruning_threshold": ones(2), "expert_scales": ones(1, 1)}),
]


ALONE = [
    (call, {argument: value})
    for call, arguments in WRONG.items()
    for argument, wrong in arguments.items()
    for value in wrong
]


def valid(call: str) -> dict[str, Any]:
    op, _, label = call.partition(" ")
    one = next(call for call in (*VALID, *CALLS) if call.op == op and call.label.startswith(label))
    names = [argument.name for argument in one.overload()._schema.arguments]
    return dict(zip(names, one.args, strict=False)) | one.kwargs


@pytest.mark.parametrize(("call", "changed"), [*ALONE, *TOGETHER], ids=lambda value: f"{value!s:.40}")
def test_the_wrong_argument_is_named(call: str, changed: dict[str, Any]) -> None:
    name, argument = call.partition(" ")[0], next(iter(changed))
    given = valid(call)
    public, op = getattr(npu, name), getattr(torch.ops.ascend_moe, name).default
    public(**given)
    refused(argument, public, **given | changed, says=r"^[^\n]*$")
    with pytest.raises(RuntimeError) as by_op:  # torch's schema refuses some itself
        op(**given | changed)
    assert getattr(by_op.value, "argument", argument) == argument


def junk(value: Any) -> list[Any]:
    """Returns what might stand for an argument by mistake."""
    others: list[Any] = [None, "text", 2**62, -(2**62), [], [None], ones(()), zeros(0)]
    if isinstance(value, torch.Tensor):
        others += [value.to("meta"), value[None], value.reshape(-1)[:1], value.bool(), value.to(torch.complex64)]
    return others


def on_the_host() -> dict[str, OperatorCall]:
    """Returns a call of each operator that needs no group, by its name with overload."""
    return {call.op: call for call in (*CALLS, *VALID) if call.op.partition(".")[0] not in WINDOW_OPERATORS}


@pytest.mark.parametrize("op", on_the_host())
def test_a_value_of_another_kind_is_named_and_no_junk_is_without_a_type(op: str) -> None:
    """Named is a tensor that is required and None, and one that is on meta while others are not."""
    name, label = op.partition(".")[0], on_the_host()[op].label
    given, function = valid(f"{op} {label}"), getattr(npu, name)
    for argument in given:
        for value in junk(given[argument]):
            try:
                function(**given | {argument: value})
            except AscendMoeError as error:
                assert "\n" not in str(error)
    tensors = [argument for argument, value in given.items() if isinstance(value, torch.Tensor)]
    for argument, kind in function.__annotations__.items():
        if kind in ("torch.Tensor", "Tensor") and argument in given:
            says = f"^{argument} is a NoneType; it must be a tensor"
            refused(argument, function, **given | {argument: None}, says=says)
    for argument in tensors[1:]:
        with pytest.raises(ArgumentError, match=f"^{argument} is on meta, "):
            function(**given | {argument: given[argument].to("meta")})
        with pytest.raises(ArgumentError, match=rf"^{name}: {argument} is on "):
            getattr(torch.ops.ascend_moe, name)(**given | {argument: given[argument].to("meta")})


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (grouped_mlp, (None, ones(2, 4, 4), ones(2, 2, 4), tensor([1, 1]))),
        (grouped_mlp, (ones(2, 4), ones(2, 4, 4), ones(2, 2, 4), None)),
        *((quantize_weight, (wrong,)) for wrong in (None, ones(3))),
        *((softmax_topk, (*wrong, True)) for wrong in ((None, 2), (ones(12), 2), (ones(2, 12), 13), (ones(2, 12), 0))),
        (deepseek_v3, (None, None, 2)),
        (npu.npu_moe_distribute_combine_add_rms_norm, (*[None] * 7, "g", 1, 0, 2)),
        (MoELayer, (None, None)),
        (MC2Dispatcher, ("g", 2, 0, None)),
    ],
)
def test_functions_of_ours_alone_check_too(function: Any, given: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"^[^\n]*$"):
        function(*given)
