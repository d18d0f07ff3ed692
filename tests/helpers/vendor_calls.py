"""Calls of the vendor operators on real CPU tensors: at least one an operator and mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ascend_moe.experts import npu_dynamic_quant, quantize_weight

TOKENS, TOPK, EXPERTS, HIDDEN = 7, 2, 5, 16


@dataclass(frozen=True)
class Call:
    """One call of an operator, by its name with overload.

    ``undefined``: outputs an NPU leaves as they are, by index: from which row on.
    """

    label: str
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    undefined: dict[int, int] = field(default_factory=dict)

    def overload(self) -> Any:
        name, _, variant = self.op.partition(".")
        return getattr(getattr(torch.ops.ascend_moe, name), variant or "default")

    def run(self) -> Any:
        return self.overload()(*self.args, **self.kwargs)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids(*shape: int, seed: int = 1, top: int = EXPERTS) -> torch.Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def _expert_calls() -> list[Call]:
    x, counts = values(9, 8), torch.tensor([2, 0, 4])
    w = values(3, 8, 12, seed=2)
    codes, scales = npu_dynamic_quant(x)
    w_codes, w_scales = quantize_weight(w)
    rows = torch.tensor([0, 3, 1, 3, 2, 0, 0, 0, 0])
    used = int(counts.sum())
    grouped = {"group_list": counts, "group_type": 0, "group_list_type": 1, "split_item": 2}
    fused = (codes, w_codes, torch.tensor([2, 2, 6]), w_scales, scales)
    return [
        Call("float", "npu_grouped_matmul", ([x], [w]), grouped, {0: used}),
        Call("half", "npu_grouped_matmul", ([x.bfloat16()], [w.bfloat16()]), grouped, {0: used}),
        Call(
            "int8",
            "npu_grouped_matmul",
            ([codes], [w_codes]),
            grouped | {"output_dtype": torch.int32},
            {0: used},
        ),
        Call(
            "int8 scaled",
            "npu_grouped_matmul",
            ([codes], [w_codes]),
            grouped | {"scale": [w_scales], "per_token_scale": [scales], "output_dtype": torch.bfloat16},
            {0: used},
        ),
        Call("lists", "npu_grouped_matmul", ([x[:2], x[2:]], [w[0], w[1]]), {"group_type": -1}),
        Call(
            "list",
            "npu_grouped_matmul.List",
            ([x], list(w)),
            {"group_list": [2, 5, 9], "split_item": 3},
        ),
        Call(
            "list, a tensor a group",
            "npu_grouped_matmul.List",
            ([x], list(w)),
            {"group_list": [2, 5, 9], "output_dtype": torch.float32},
        ),
        Call("2-D", "npu_swiglu", (x,)),
        Call("first dimension", "npu_swiglu", (values(4, 3, 5, dtype=torch.bfloat16), 0)),
        Call("dynamic", "npu_dequant_swiglu_quant", (x,), {"quant_mode": 1, "activate_left": True}),
        Call(
            "grouped",
            "npu_dequant_swiglu_quant",
            (ids(9, 12, top=99),),
            {"weight_scale": w_scales, "activation_scale": scales, "group_index": counts, "quant_mode": 1},
            {0: used, 1: used},
        ),
        Call("int8", "npu_grouped_matmul_swiglu_quant", fused, {}, {0: used, 1: used, 2: 0}),
        Call(
            "counts",
            "npu_grouped_matmul_swiglu_quant_v2",
            (codes, [w_codes], [w_scales], scales, counts),
            {"group_list_type": 1, "smooth_scale": values(3, 6, seed=5).abs()},
            {0: used, 1: used},
        ),
        Call(
            "all",
            "npu_grouped_matmul_finalize_routing",
            (codes, w_codes, counts),
            {
                "scale": w_scales,
                "pertoken_scale": scales,
                "row_index": rows,
                "logit": values(9, seed=6),
                "shared_input": values(2, 12, dtype=torch.bfloat16, seed=7),
                "shared_input_offset": 1,
                "shared_input_weight": 0.5,
                "output_bs": 4,
            },
        ),
        Call(
            "plain",
            "npu_grouped_matmul_finalize_routing",
            (codes, w_codes, counts),
            {"scale": w_scales, "row_index": rows},
        ),
        Call("rows", "npu_dynamic_quant", (x.bfloat16(),)),
        Call("tensor", "npu_dynamic_quant", (x,), {"quant_mode": "pertensor", "smooth_scales": values(8)}),
    ]


def _gate_calls() -> list[Call]:
    logits = values(TOKENS, EXPERTS)
    finished = torch.arange(TOKENS) % 3 == 0
    return [
        Call("softmax", "npu_moe_gating_top_k", (logits, TOPK), {}, {2: 0}),
        Call(
            "sigmoid",
            "npu_moe_gating_top_k",
            (logits.bfloat16(), TOPK),
            {"norm_type": 1, "bias": values(EXPERTS, dtype=torch.bfloat16), "out_flag": True},
        ),
        Call("2-D", "npu_moe_gating_top_k_softmax", (logits, finished, TOPK)),
        Call("3-D", "npu_moe_gating_top_k_softmax", (values(2, 3, EXPERTS), None, TOPK)),
        Call("plain", "npu_moe_gating_top_k_softmax_v2", (logits,), {"k": TOPK}),
        Call(
            "softmax out",
            "npu_moe_gating_top_k_softmax_v2",
            (values(2, 3, EXPERTS, dtype=torch.float16),),
            {"k": TOPK, "output_softmax": True},
        ),
        Call(
            "renorm",
            "npu_moe_gating_top_k_softmax_v2",
            (logits,),
            {"k": TOPK, "renorm": 1, "finished": finished, "output_softmax": True},
        ),
    ]


def _routing_calls() -> list[Call]:
    x, chosen = values(TOKENS, HIDDEN), ids(TOKENS, TOPK)
    names = torch.arange(TOKENS * TOPK, dtype=torch.int32).reshape(TOPK, TOKENS).t()
    all_experts = {"expert_num": EXPERTS, "expert_tokens_num_flag": True}
    smooth = values(3, HIDDEN, seed=3).abs()
    v2 = "npu_moe_init_routing_v2"
    active = int(((chosen >= 1) & (chosen < 4)).sum())  # pairs of the range [1, 4)
    return [
        Call("all", "npu_moe_init_routing", (x, names, chosen, TOKENS)),
        Call("some", "npu_moe_init_routing", (x.bfloat16(), names, chosen, 3)),
        Call("running sums", v2, (x, chosen), all_experts, {3: 0}),
        Call("nothing counted", v2, (x, chosen), {"expert_num": EXPERTS, "scale": values(TOKENS)}, {2: 0}),
        Call(
            "range, pairs, scatter",
            v2,
            (x.half(), chosen),
            all_experts
            | {
                "active_expert_range": [1, 4],
                "expert_tokens_num_type": 2,
                "row_idx_type": 1,
                "active_num": 5,
            },
            {3: 0},
        ),
        Call(
            "dynamic",
            v2,
            (x, chosen),
            all_experts
            | {
                "active_expert_range": [1, 4],
                "quant_mode": 1,
                "scale": smooth,
                "expert_tokens_num_type": 1,
            },
            {0: active, 3: active},
        ),
        Call(
            "static",
            v2,
            (x, chosen),
            all_experts | {"quant_mode": 0, "scale": torch.tensor([20.0]), "offset": torch.tensor([-3.0])},
            {3: 0},
        ),
        Call(
            "dropped",
            v2,
            (x, chosen),
            all_experts | {"drop_pad_mode": 1, "expert_capacity": 2, "expert_tokens_num_type": 1},
            {3: 0},
        ),
        Call("tokens", "npu_moe_compute_expert_tokens", (chosen.flatten().sort().values, EXPERTS)),
    ]


def _move_calls() -> list[Call]:
    x, chosen, scores = values(TOKENS, HIDDEN), ids(TOKENS, TOPK), values(TOKENS, TOPK, seed=4)
    rows, places = torch.ops.ascend_moe.npu_moe_token_permute(x, chosen)
    bias, flat = values(EXPERTS, HIDDEN, seed=8), ids(TOKENS * TOPK, top=3 * 4)
    return [
        Call("all", "npu_moe_token_permute", (x, chosen)),
        Call("cut", "npu_moe_token_permute", (x, chosen.long(), 9)),
        Call("cut from behind", "npu_moe_token_permute", (x.bfloat16(), chosen, -3)),
        Call("1-D", "npu_moe_token_permute", (x, chosen[:, 0])),
        Call("weighted", "npu_moe_token_unpermute", (rows, places, scores)),
        Call("plain", "npu_moe_token_unpermute", (rows, places)),
        Call("columns", "npu_moe_finalize_routing", (rows, x, x, bias, scores, places, chosen)),
        Call(
            "dropped",
            "npu_moe_finalize_routing",
            (rows[:12].reshape(3, 4, HIDDEN), x, None, None, scores, flat, None, 3),
        ),
        Call(
            "scaled",
            "npu_moe_re_routing",
            (x.bfloat16(), torch.tensor([[1, 2], [0, 2], [1, 0]], dtype=torch.int32)),
            {"per_token_scales": values(TOKENS)},
        ),
        Call("plain", "npu_moe_re_routing", (x, torch.tensor([[1, 2, 4]])), {}, {1: 0}),
        Call(
            "by rank",
            "npu_moe_update_expert",
            (ids(TOKENS, TOPK, top=3), torch.tensor([[2, 0, 4], [1, 1, 0], [2, 2, 3]], dtype=torch.int32)),
            {"local_rank_id": 1, "world_size": 4},
            {1: 0},
        ),
        Call(
            "by token, pruned",
            "npu_moe_update_expert",
            (
                ids(TOKENS, TOPK, top=3).long(),
                torch.tensor([[2, 0, 4], [1, 1, 0], [2, 2, 3]], dtype=torch.int32),
            ),
            {
                "balance_mode": 1,
                "expert_scales": scores.abs(),
                "pruning_threshold": torch.tensor([0.3, 0.4]),
                "active_mask": torch.arange(TOKENS) < 5,
            },
        ),
    ]


CALLS: list[Call] = [*_expert_calls(), *_gate_calls(), *_routing_calls(), *_move_calls()]
