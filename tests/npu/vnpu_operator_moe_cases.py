"""torch_npu's operators of MoE layers on the virtual NPU, beside this package's functions of those names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vnpu_operator_cases import FLOATS, values

E, T, H, K = 4, 10, 16, 2
WIDE = 16  # gate and up
COUNTS, USED = [3, 0, 5, 1], 9  # rows of each expert; the last of the T rows belongs to nobody
GROUPS = {0: [3, 3, 8, 9], 1: COUNTS, 2: [[2, 5], [0, 3], [3, 1], [1, 0]]}


@dataclass(frozen=True)
class MoeCase:
    """One call. Rows from ``used`` on, and outputs not in ``looked_at``, are unspecified on a device."""

    name: str
    operator: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    used: int | None = None
    looked_at: tuple[int, ...] | None = None


def moe_cases() -> list[MoeCase]:
    return [case for part in (_matmuls, _quantised, _gating, _routing) for case in part()]


def _matmuls() -> Iterator[MoeCase]:
    op = "npu_grouped_matmul"
    for dtype in FLOATS:
        label = str(dtype).removeprefix("torch.")
        x, w = values(dtype, T, H), values(dtype, E, H, WIDE)
        for kind, groups in GROUPS.items():
            for split in (2, 3):
                call = {"group_list": torch.tensor(groups), "split_item": split, "group_type": 0}
                name = f"matmul-list{kind}-split{split}-{label}"
                yield MoeCase(name, op, ([x], [w]), {**call, "group_list_type": kind}, USED)
        counts = {"group_list": torch.tensor(COUNTS), "group_type": 0, "group_list_type": 1, "split_item": 2}
        transposed = w.transpose(1, 2).contiguous().transpose(1, 2)
        yield MoeCase(f"matmul-transposed-{label}", op, ([x], [transposed]), counts, USED)
        yield MoeCase(f"matmul-weights-{label}", op, ([x], list(w)), counts, USED)
        bias = values(torch.float32, E, WIDE)
        yield MoeCase(f"matmul-bias-{label}", op, ([x], [w]), {**counts, "bias": [bias]}, USED)
        none = {**counts, "group_list": torch.zeros(E, dtype=torch.int64)}
        yield MoeCase(f"matmul-no-rows-{label}", op, ([x], [w]), none, 0)
        apart = {"split_item": 0, "group_type": -1}
        yield MoeCase(f"matmul-apart-{label}", op, ([x[:3], x[3:7]], [w[0], w[1]]), apart)
        sums = {"group_list": torch.tensor([3, 3, 8, 10]), "split_item": 0, "group_type": 0}
        yield MoeCase(f"matmul-split0-{label}", op, ([x], [w]), sums)
        yield MoeCase(
            f"matmul-int-list-{label}", op, ([x], list(w)), {"group_list": [3, 3, 8, 10], "split_item": 3}
        )
        yield MoeCase(f"swiglu-{label}", "npu_swiglu", (x,))
        yield MoeCase(f"swiglu-rows-{label}", "npu_swiglu", (x,), {"dim": 0})
    codes, weights = values(torch.int8, T, H), values(torch.int8, E, H, WIDE)
    counts = {"group_list": torch.tensor(COUNTS), "group_type": 0, "group_list_type": 1, "split_item": 3}
    sums = {**counts, "output_dtype": torch.int32}
    yield MoeCase("matmul-int8", op, ([codes], [weights]), sums, USED)
    for out, scale in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        scales = {
            "scale": [values(torch.float32, E, WIDE).abs().to(scale)],
            "per_token_scale": [values(torch.float32, T).abs()],
        }
        name = f"matmul-int8-to-{str(out).removeprefix('torch.')}"
        yield MoeCase(name, op, ([codes], [weights]), {**counts, **scales, "output_dtype": out}, USED)


def _quantised() -> Iterator[MoeCase]:
    op = "npu_dynamic_quant"
    for dtype in FLOATS:
        label = str(dtype).removeprefix("torch.")
        x = values(dtype, T, H)
        groups = torch.tensor([4, 10], dtype=torch.int32)
        smooth = values(dtype, 2, H).abs()
        yield MoeCase(f"quant-{label}", op, (x,))
        yield MoeCase(f"quant-3d-{label}", op, (x.reshape(2, 5, H),))
        yield MoeCase(f"quant-zeros-{label}", op, (torch.zeros(3, H, dtype=dtype),))
        yield MoeCase(f"quant-smooth-{label}", op, (x,), {"smooth_scales": smooth[0]})
        yield MoeCase(f"quant-groups-{label}", op, (x,), {"smooth_scales": smooth, "group_index": groups})
        yield MoeCase(f"quant-tensor-{label}", op, (x,), {"quant_mode": "pertensor"})
        static = {"quant_mode": 0, "quant_scale": values(torch.float32, H // 2).abs() + 0.1}
        op_static = "npu_dequant_swiglu_quant"
        yield MoeCase(f"swiglu-quant-static-{label}", op_static, (x,), static, looked_at=(0,))
        dynamic = {"quant_mode": 1, "activate_left": True}
        yield MoeCase(f"swiglu-quant-{label}", op_static, (x,), dynamic)
        clamped = {**dynamic, "swiglu_mode": 2, "clamp_limit": 1.5, "glu_alpha": 1.25, "glu_bias": 0.5}
        yield MoeCase(f"swiglu-quant-clamped-{label}", op_static, (x,), clamped)
    sums = torch.randint(
        -5000, 5000, (T, WIDE), dtype=torch.int32, generator=torch.Generator().manual_seed(1)
    )
    call = {
        "weight_scale": values(torch.float32, E, WIDE).abs() * 1e-3,
        "activation_scale": values(torch.float32, T).abs(),
        "group_index": torch.tensor(COUNTS),
        "activate_left": True,
        "quant_mode": 1,
    }
    yield MoeCase("matmul-swiglu-quant", "npu_grouped_matmul_swiglu_quant", (
        values(torch.int8, T, H), values(torch.int8, E, H, WIDE), torch.tensor([3, 3, 8, 9]),
        values(torch.float32, E, WIDE).abs(), values(torch.float32, T).abs(),
    ), used=USED, looked_at=(0, 1))  # fmt: skip
    for kind in (0, 1):
        smooth = {"smooth_scale": values(torch.float32, E, WIDE // 2).abs(), "group_list_type": kind}
        yield MoeCase(f"matmul-swiglu-quant-v2-list{kind}", "npu_grouped_matmul_swiglu_quant_v2", (
            values(torch.int8, T, H), [values(torch.int8, E, H, WIDE)],
            [values(torch.float32, E, WIDE).abs()], values(torch.float32, T).abs(),
            torch.tensor(GROUPS[kind]),
        ), smooth, USED)  # fmt: skip
    yield MoeCase("dequant-swiglu-quant", "npu_dequant_swiglu_quant", (sums,), call, USED)


def _gating() -> Iterator[MoeCase]:
    for dtype in FLOATS:
        label = str(dtype).removeprefix("torch.")
        logits, bias = values(dtype, T, 2 * E), values(dtype, 2 * E)
        yield MoeCase(f"gating-{label}", "npu_moe_gating_top_k", (logits, K), looked_at=(0, 1))
        sigmoid = {
            "bias": bias, "k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1,
            "out_flag": True, "routed_scaling_factor": 2.5, "eps": 1e-3,
        }  # fmt: skip
        yield MoeCase(f"gating-sigmoid-{label}", "npu_moe_gating_top_k", (logits, K), sigmoid)
        name = "npu_moe_gating_top_k_softmax"
        yield MoeCase(f"gating-softmax-{label}", name, (logits, None, K))
        v2 = "npu_moe_gating_top_k_softmax_v2"
        yield MoeCase(f"gating-renorm-{label}", v2, (logits,), {"k": K, "renorm": 1}, looked_at=(0, 1))
        yield MoeCase(f"gating-scores-{label}", v2, (logits,), {"k": K, "output_softmax": True})
        yield MoeCase(f"gating-finished-{label}", name, (logits, torch.arange(T) % 3 == 0, K))


def _routing() -> Iterator[MoeCase]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)]).int()
    names = torch.arange(T * K, dtype=torch.int32).reshape(K, T).t().contiguous()
    v2, all_experts = "npu_moe_init_routing_v2", {"expert_num": E, "active_expert_range": [0, E]}
    for dtype in FLOATS:
        label = str(dtype).removeprefix("torch.")
        x = values(dtype, T, H)
        yield MoeCase(f"init-{label}", "npu_moe_init_routing", (x, names, ids, T))
        yield MoeCase(f"init-few-{label}", "npu_moe_init_routing", (x, names, ids, 4))
        for kind in (0, 1, 2):
            tokens = {"expert_tokens_num_type": kind, "expert_tokens_num_flag": True}
            call = {**all_experts, **tokens, "active_num": T * K}
            looked_at = (0, 1) if kind == 2 else (0, 1, 2)  # pairs end where the experts with rows do
            yield MoeCase(f"init-v2-tokens{kind}-{label}", v2, (x, ids), call, looked_at=looked_at)
        call = {**all_experts, "quant_mode": 1, "active_num": 7}
        yield MoeCase(f"init-v2-quant-{label}", v2, (x, ids), call, looked_at=(0, 1, 3))
        scaled = {**all_experts, "scale": values(torch.float32, T), "row_idx_type": 1}
        yield MoeCase(f"init-v2-scale-{label}", v2, (x, ids), scaled, looked_at=(0, 1, 3))
        rows, places = x[ids.reshape(-1).sort(stable=True).indices // K], _places(ids)
        weights = values(torch.float32, T, K).to(dtype)
        yield MoeCase(f"permute-{label}", "npu_moe_token_permute", (x, ids))
        yield MoeCase(f"permute-cut-{label}", "npu_moe_token_permute", (x, ids, 7))
        yield MoeCase(f"permute-one-{label}", "npu_moe_token_permute", (x, ids[:, 0].contiguous()))
        yield MoeCase(f"unpermute-{label}", "npu_moe_token_unpermute", (rows, places, weights))
        yield MoeCase(f"unpermute-one-{label}", "npu_moe_token_unpermute", (x, torch.arange(T).flip(0).int()))
        final = "npu_moe_finalize_routing"
        yield MoeCase(
            f"finalize-{label}", final, (rows, None, None, None, weights, places, None), {"drop_pad_mode": 2}
        )
        skips = (values(dtype, T, H, seed=3), values(dtype, T, H, seed=4), values(dtype, E, H))
        yield MoeCase(f"finalize-all-{label}", final, (rows, *skips, weights, places, ids))
        counts = torch.tensor([[2, 1, 0, 3], [1, 1, 2, 0]], dtype=torch.int32)
        scales = {"per_token_scales": values(torch.float32, T)}
        yield MoeCase(f"re-routing-{label}", "npu_moe_re_routing", (x, counts), scales)
    # The one shape that torch_npu gives to an older entry.
    old = {"expert_num": 128, "active_expert_range": [0, 128], "expert_tokens_num_type": 1}
    wide = (values(torch.float16, 3, 2048), torch.tensor([[5, 127], [0, 5], [64, 1]], dtype=torch.int32))
    yield MoeCase("init-v2-older", v2, wide, {**old, "expert_tokens_num_flag": True}, looked_at=(0, 1, 2))
    table = torch.tensor([[2, 4, 0, 0], [3, 1, 5, 6], [1, 2, 0, 0], [1, 3, 0, 0]], dtype=torch.int32)
    place = {"local_rank_id": 3, "world_size": 4, "balance_mode": 0}
    yield MoeCase("update-expert", "npu_moe_update_expert", (ids, table), place, looked_at=(0,))
    pruned = {
        "expert_scales": values(torch.float32, T, K).abs(), "pruning_threshold": torch.tensor([0.1, 0.6]),
        "active_mask": torch.arange(T) < 7, "balance_mode": 1,
    }  # fmt: skip
    yield MoeCase("update-expert-pruned", "npu_moe_update_expert", (ids, table), pruned)
    ordered = ids.reshape(-1).sort().values
    yield MoeCase("expert-tokens", "npu_moe_compute_expert_tokens", (ordered, E))


def _places(ids: torch.Tensor) -> torch.Tensor:
    order = ids.reshape(-1).sort(stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    return places.int()
