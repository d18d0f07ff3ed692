"""Calls of the operators of torch_npu_ops on real CPU tensors: at least one an operator and mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ascend_moe.experts import npu_dynamic_quant, quantize_weight

TOKENS, TOPK, EXPERTS, HIDDEN = 7, 2, 5, 16


@dataclass(frozen=True)
class OperatorCall:
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


def call(op: str, label: str, /, *args: Any, undefined: dict[int, int] | None = None, **kwargs: Any) -> OperatorCall:
    return OperatorCall(label, op, args, kwargs, undefined or {})


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids(*shape: int, seed: int = 1, top: int = EXPERTS) -> torch.Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def _expert_calls() -> list[OperatorCall]:
    x, counts = values(9, 8), torch.tensor([2, 0, 4])
    w = values(3, 8, 12, seed=2)
    codes, scales = npu_dynamic_quant(x)
    w_codes, w_scales = quantize_weight(w)
    rows = torch.tensor([0, 3, 1, 3, 2, 0, 0, 0, 0])
    used = int(counts.sum())
    matmul, lists = "npu_grouped_matmul", "npu_grouped_matmul.List"
    grouped: dict[str, Any] = {"group_list": counts, "group_type": 0, "group_list_type": 1, "split_item": 2}
    grouped["undefined"] = {0: used}
    columns: dict[str, Any] = {"group_type": 2, "undefined": {}}
    scaled = grouped | {"scale": [w_scales], "per_token_scale": [scales], "output_dtype": torch.bfloat16}
    dequant = {"weight_scale": w_scales, "activation_scale": scales, "group_index": counts, "quant_mode": 1}
    fused = (codes, w_codes, torch.tensor([2, 2, 6]), w_scales, scales)
    finalize: dict[str, Any] = {"scale": w_scales, "pertoken_scale": scales, "row_index": rows, "output_bs": 4}
    finalize |= {"shared_input": values(2, 12, dtype=torch.bfloat16, seed=7), "shared_input_offset": 1}
    finalize |= {"logit": values(9, seed=6), "shared_input_weight": 0.5}
    plain = {"scale": w_scales, "row_index": rows}
    chained = (codes, [w_codes], [w_scales], scales, counts)
    smoothed: dict[str, Any] = {"group_list_type": 1, "smooth_scale": values(3, 6, seed=5).abs()}
    smoothed["undefined"] = {0: used, 1: used}
    return [
        call(matmul, "float", [x], [w], **grouped),
        call(matmul, "half", [x.bfloat16()], [w.bfloat16()], **grouped),
        call(matmul, "int8", [codes], [w_codes], **grouped, output_dtype=torch.int32),
        call(matmul, "int8 scaled", [codes], [w_codes], **scaled),
        call(matmul, "lists", [x[:2], x[2:]], [w[0], w[1]], group_type=-1),
        call(lists, "list", [x], list(w), group_list=[2, 5, 9], split_item=3),
        call(lists, "list, a tensor a group", [x], list(w), group_list=[2, 5, 9], output_dtype=torch.float32),
        call(matmul, "columns", [x.T.contiguous()], [values(9, 12)], **(grouped | columns)),
        call("npu_clipped_swiglu", "interleaved", x),
        call("npu_clipped_swiglu", "groups", x, group_index=counts, interleaved=False, undefined={0: used}),
        call("npu_swiglu", "2-D", x),
        call("npu_swiglu", "first dimension", values(4, 3, 5, dtype=torch.bfloat16), 0),
        call("npu_dequant_swiglu_quant", "dynamic", x, quant_mode=1, activate_left=True),
        call("npu_dequant_swiglu_quant", "grouped", ids(9, 12, top=99), **dequant, undefined={0: used, 1: used}),
        call("npu_grouped_matmul_swiglu_quant", "int8", *fused, undefined={0: used, 1: used, 2: 0}),
        call("npu_grouped_matmul_swiglu_quant_v2", "counts", *chained, **smoothed),
        call("npu_grouped_matmul_finalize_routing", "all", codes, w_codes, counts, **finalize),
        call("npu_grouped_matmul_finalize_routing", "plain", codes, w_codes, counts, **plain),
        call("npu_dynamic_quant", "rows", x.bfloat16()),
        call("npu_dynamic_quant", "tensor", x, quant_mode="pertensor", smooth_scales=values(8)),
    ]


def _gate_calls() -> list[OperatorCall]:
    logits = values(TOKENS, EXPERTS)
    finished = torch.arange(TOKENS) % 3 == 0
    bias = values(EXPERTS, dtype=torch.bfloat16)
    gate, softmax, v2 = (f"npu_moe_gating_top_k{end}" for end in ("", "_softmax", "_softmax_v2"))
    half = values(2, 3, EXPERTS, dtype=torch.float16)
    return [
        call(gate, "softmax", logits, TOPK, undefined={2: 0}),
        call(gate, "sigmoid", logits.bfloat16(), TOPK, norm_type=1, bias=bias, out_flag=True),
        call(softmax, "2-D", logits, finished, TOPK),
        call(softmax, "3-D", values(2, 3, EXPERTS), None, TOPK),
        call(v2, "plain", logits, k=TOPK),
        call(v2, "softmax out", half, k=TOPK, output_softmax=True),
        call(v2, "renorm", logits, k=TOPK, renorm=1, finished=finished, output_softmax=True),
    ]


def _routing_calls() -> list[OperatorCall]:
    x, chosen = values(TOKENS, HIDDEN), ids(TOKENS, TOPK)
    names = torch.arange(TOKENS * TOPK, dtype=torch.int32).reshape(TOPK, TOKENS).t()
    all_experts: dict[str, Any] = {"expert_num": EXPERTS, "expert_tokens_num_flag": True}
    some = all_experts | {"active_expert_range": [1, 4]}
    smooth = values(3, HIDDEN, seed=3).abs()
    v2 = "npu_moe_init_routing_v2"
    active = int(((chosen >= 1) & (chosen < 4)).sum())  # pairs of the range [1, 4)
    pairs = some | {"expert_tokens_num_type": 2, "row_idx_type": 1, "active_num": 5}
    dynamic = some | {"quant_mode": 1, "scale": smooth, "expert_tokens_num_type": 1}
    static = all_experts | {"quant_mode": 0, "scale": torch.tensor([20.0]), "offset": torch.tensor([-3.0])}
    dropped = all_experts | {"drop_pad_mode": 1, "expert_capacity": 2, "expert_tokens_num_type": 1}
    return [
        call("npu_moe_init_routing", "all", x, names, chosen, TOKENS),
        call("npu_moe_init_routing", "some", x.bfloat16(), names, chosen, 3),
        call(v2, "running sums", x, chosen, **all_experts, undefined={3: 0}),
        call(v2, "nothing counted", x, chosen, expert_num=EXPERTS, scale=values(TOKENS), undefined={2: 0}),
        call(v2, "range, pairs, scatter", x.half(), chosen, **pairs, undefined={3: 0}),
        call(v2, "dynamic", x, chosen, **dynamic, undefined={0: active, 3: active}),
        call(v2, "static", x, chosen, **static, undefined={3: 0}),
        call(v2, "dropped", x, chosen, **dropped, undefined={3: 0}),
        call("npu_moe_compute_expert_tokens", "tokens", chosen.flatten().sort().values, EXPERTS),
    ]


def _move_calls() -> list[OperatorCall]:
    x, chosen, scores = values(TOKENS, HIDDEN), ids(TOKENS, TOPK), values(TOKENS, TOPK, seed=4)
    rows, places = torch.ops.ascend_moe.npu_moe_token_permute(x, chosen)
    bias, flat = values(EXPERTS, HIDDEN, seed=8), ids(TOKENS * TOPK, top=3 * 4)
    permute, unpermute = "npu_moe_token_permute", "npu_moe_token_unpermute"
    finalize, again, update = "npu_moe_finalize_routing", "npu_moe_re_routing", "npu_moe_update_expert"
    padded = rows[:12].reshape(3, 4, HIDDEN)
    counts = torch.tensor([[1, 2], [0, 2], [1, 0]], dtype=torch.int32)
    experts, table = (ids(TOKENS, TOPK, top=3), torch.tensor([[2, 0, 4], [1, 1, 0], [2, 2, 3]], dtype=torch.int32))
    pruned = {"expert_scales": scores.abs(), "pruning_threshold": torch.tensor([0.3, 0.4])}
    pruned["active_mask"] = torch.arange(TOKENS) < 5
    return [
        call(permute, "all", x, chosen),
        call(permute, "cut", x, chosen.long(), 9),
        call(permute, "cut from behind", x.bfloat16(), chosen, -3),
        call(permute, "1-D", x, chosen[:, 0]),
        call(unpermute, "weighted", rows, places, scores),
        call(unpermute, "plain", rows, places),
        call(finalize, "columns", rows, x, x, bias, scores, places, chosen),
        call(finalize, "dropped", padded, x, None, None, scores, flat, None, 3),
        call(again, "scaled", x.bfloat16(), counts, per_token_scales=values(TOKENS)),
        call(again, "plain", x, torch.tensor([[1, 2, 4]]), undefined={1: 0}),
        call(update, "by rank", experts, table, local_rank_id=1, world_size=4, undefined={1: 0}),
        call(update, "by token, pruned", experts.long(), table, balance_mode=1, **pruned),
    ]


CALLS: list[OperatorCall] = [*_expert_calls(), *_gate_calls(), *_routing_calls(), *_move_calls()]
