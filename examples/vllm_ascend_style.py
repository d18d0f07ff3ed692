"""MC2 dispatch and combine called as vllm-ascend calls them, keyword for keyword, on CPU processes.

    python examples/vllm_ascend_style.py                          starts 4 processes over gloo
    torchrun --nproc-per-node 4 examples/vllm_ascend_style.py     the same under torchrun

The first half is NPU code: beside its import, only the line marked HERE differs from what runs on an NPU,
and ascend_moe.comm_name works there too. The second half plays the model around it: a router, four ways in
which versions call the ops (masks or global_bs, token counts or running sums, bf16 or W8A8, V1 or V2), and a
dense layer to compare with.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ascend_moe
from ascend_moe import npu as torch_npu  # on an NPU: import torch_npu


@dataclass
class How:
    """How the ops are called: on padded batches with a mask, or on unequal ones with global_bs."""

    mask: Tensor | None
    global_bs: int
    nums_type: int  # of expert_token_nums: 0 running sums, 1 counts
    quant: bool


class MC2Dispatcher:
    """Token dispatch and combine of one EP group."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int, use_v2: bool) -> None:
        self.num_experts = num_experts
        self.use_v2 = use_v2
        self.ep_rank_id = dist.get_rank(group)
        self.ep_world_size = dist.get_world_size(group)
        # HERE. On an NPU: group._get_backend(torch.device("npu")).get_hccl_comm_name(self.ep_rank_id)
        self.moe_all_to_all_group_name = ascend_moe.comm_name(group)

    def _common(self, how: How) -> dict[str, Any]:
        name = self.moe_all_to_all_group_name
        kwargs = {
            "expert_shard_type": 0,
            "shared_expert_rank_num": 0,
            "moe_expert_num": self.num_experts,
            "global_bs": how.global_bs,
            "group_ep": name,
            "ep_world_size": self.ep_world_size,
            "ep_rank_id": self.ep_rank_id,
            "group_tp": name,
            "tp_world_size": 1,
            "tp_rank_id": 0,
        }
        return kwargs | ({"x_active_mask": how.mask} if how.global_bs == 0 else {})

    def dispatch(self, x: Tensor, topk_ids: Tensor, how: How) -> tuple[Any, ...]:
        v1, v2 = torch_npu.npu_moe_distribute_dispatch, torch_npu.npu_moe_distribute_dispatch_v2
        return tuple(
            (v2 if self.use_v2 else v1)(
                x=x,
                expert_ids=topk_ids,
                expert_token_nums_type=how.nums_type,
                scales=None,
                quant_mode=2 if how.quant else 0,
                **self._common(how),
            )[0:7]
        )

    def combine(self, y: Tensor, topk_ids: Tensor, topk_weights: Tensor, how: How, sent: tuple[Any, ...]) -> Tensor:
        _, _, index, _, ep_recv_counts, tp_recv_counts, expand_scales = sent
        kwargs: dict[str, Any] = {
            "expand_x": y,
            "expert_ids": topk_ids,
            "expert_scales": topk_weights.to(torch.float32),
            "ep_send_counts": ep_recv_counts,
            "expand_scales": expand_scales,
            "comm_quant_mode": 0,
            # After a quantized dispatch this is memory that nobody has written: the op must not look at it.
            "tp_send_counts": torch.empty(1, dtype=torch.int32, device=y.device) if how.quant else tp_recv_counts,
            **self._common(how),
        }
        if self.use_v2:
            out: Tensor = torch_npu.npu_moe_distribute_combine_v2(assist_info_for_combine=index, **kwargs)
        else:
            out = torch_npu.npu_moe_distribute_combine(expand_idx=index, **kwargs)
        return out


@dataclass
class ExpertWeights:
    """w1 (L, H, 2I), w2 (L, I, H), and for int8 ones w1_scale (L, 2I) fp32 and w2_scale (L, H)."""

    w1: Tensor
    w2: Tensor
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None


def mlp(h: Tensor, scale: Tensor, weights: ExpertWeights, group_list: Tensor, list_type: int) -> Tensor:
    """Return the results of the experts; with int8 weights (W8A8) ``h`` contains codes, and ``scale`` their scales."""
    common: dict[str, Any] = {"group_list": group_list, "group_list_type": list_type, "group_type": 0}
    first: dict[str, Any] = {"x": [h], "weight": [weights.w1], **common}
    second: dict[str, Any] = {"weight": [weights.w2], "split_item": 2, **common}
    if weights.w1_scale is None or weights.w2_scale is None:
        gate_up = torch_npu.npu_grouped_matmul(**first, bias=None, split_item=2)[0]
        return torch_npu.npu_grouped_matmul(x=[torch_npu.npu_swiglu(gate_up)], bias=None, **second)[0]
    act, act_scale = torch_npu.npu_dequant_swiglu_quant(
        torch_npu.npu_grouped_matmul(**first, split_item=3, output_dtype=torch.int32)[0],
        weight_scale=weights.w1_scale,
        activation_scale=scale,
        bias=None,
        quant_scale=None,
        quant_offset=None,
        group_index=group_list if list_type == 1 else torch.diff(group_list, prepend=group_list.new_zeros(1)),
        activate_left=True,
        quant_mode=1,
    )
    return torch_npu.npu_grouped_matmul(
        x=[act], scale=[weights.w2_scale], per_token_scale=[act_scale], output_dtype=weights.w2_scale.dtype, **second
    )[0]


def fused_experts(
    dispatcher: MC2Dispatcher, weights: ExpertWeights, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, how: How
) -> Tensor:
    sent = dispatcher.dispatch(x, topk_ids, how)
    expand_x, dynamic_scale, _, expert_token_nums = sent[0:4]
    y = mlp(expand_x, dynamic_scale, weights, expert_token_nums, how.nums_type)
    return dispatcher.combine(y, topk_ids, topk_weights, how, sent)


# ---- the model around it

E, K, H, INNER, PADDED = 32, 4, 256, 64, 16


# Name, V2, W8A8, mask (else global_bs), type of the token counts
CASES = [
    ("V1, bf16, mask, counts", False, False, True, 1),
    ("V2, bf16, mask, running sums", True, False, True, 0),
    ("V2, bf16, global_bs, running sums", True, False, False, 0),
    ("V2, W8A8, global_bs, running sums", True, True, False, 0),
    ("V2, W8A8, mask, counts", True, True, True, 1),
]


def all_weights(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    w1 = torch.randn(E, H, 2 * INNER, generator=g) / H**0.5
    w2 = torch.randn(E, INNER, H, generator=g) / INNER**0.5
    return w1.bfloat16(), w2.bfloat16()


def int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight's int8 codes, and a scale for every output channel."""
    codes, scale = torch_npu.npu_dynamic_quant(weight.transpose(1, 2).contiguous())
    return codes.transpose(1, 2), scale


def local_weights(rank: int, world: int, quant: bool) -> ExpertWeights:
    mine = slice(rank * E // world, (rank + 1) * E // world)
    w1, w2 = (weight[mine] for weight in all_weights(0))
    if not quant:
        return ExpertWeights(w1, w2)
    (w1, w1_scale), (w2, w2_scale) = int8(w1), int8(w2)
    return ExpertWeights(w1, w2, w1_scale, w2_scale.bfloat16())


def route(x: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.randn(E, H, generator=torch.Generator().manual_seed(1)) / H**0.5
    weights, ids, _ = torch_npu.npu_moe_gating_top_k(
        x.float() @ gate.T,
        K,
        bias=torch.zeros(E),
        k_group=2,
        group_count=4,
        group_select_mode=1,
        renorm=0,
        norm_type=1,
        out_flag=False,
        routed_scaling_factor=1.0,
        eps=1e-20,
    )
    return weights, ids.to(torch.int32)


def dense(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    """Return the layer's output, computed token by token with all experts, in fp32."""
    w1, w2 = (weight.float() for weight in all_weights(0))
    out = torch.zeros(x.shape)
    for token in range(x.shape[0]):
        for k in range(K):
            expert = int(topk_ids[token, k])
            gate, up = (x[token].float() @ w1[expert]).chunk(2)
            out[token] += topk_weights[token, k] * ((torch.nn.functional.silu(gate) * up) @ w2[expert])
    return out


def run_case(
    group: dist.ProcessGroup, use_v2: bool, quant: bool, masked: bool, nums_type: int
) -> tuple[int, int, bool]:
    """Return this rank's number of tokens, the size of its batch, and whether its output is right."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    real = max(0, PADDED - 6 * rank)  # 16, 10, 4, 0, ...
    x = torch.randn(PADDED, H, generator=torch.Generator().manual_seed(10 + rank)).bfloat16()
    if masked:
        how = How(torch.arange(PADDED) < real, 0, nums_type, quant)
    else:
        x, how = x[:real], How(None, PADDED * world, nums_type, quant)
    topk_weights, topk_ids = route(x)
    weights = local_weights(rank, world, quant)
    out = fused_experts(MC2Dispatcher(group, E, use_v2), weights, x, topk_weights, topk_ids, how)
    want = dense(x[:real], topk_weights, topk_ids)
    tolerance = 0.1 if quant else 0.02  # of RMS + |value|
    rms = want.square().mean().sqrt() if real else 0.0
    right = bool(((out[:real].float() - want).abs() <= tolerance * (rms + want.abs())).all())
    return real, len(x), right and not bool(out[real:].any())


def rank_main(rank: int, world: int, store: str) -> None:
    if store:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    lines = []
    for name, *case in CASES:
        results: list[Any] = [None] * world
        dist.all_gather_object(results, run_case(group, *case))
        tokens = ", ".join(f"{real} of {given}" for real, given, _ in results)
        outcome = "equals dense" if all(right for *_, right in results) else "WRONG"
        lines.append(f"{name:<34} tokens {tokens:<38} {outcome}")
    if rank == 0:
        print("\n".join(lines))
        print("FAIL" if any(line.endswith("WRONG") for line in lines) else "PASS")
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        rank_main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "")
        return
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(rank_main, args=(4, f"{scratch}/store"), nprocs=4)


if __name__ == "__main__":
    main()

# Output:
# V1, bf16, mask, counts             tokens 16 of 16, 10 of 16, 4 of 16, 0 of 16   equals dense
# V2, bf16, mask, running sums       tokens 16 of 16, 10 of 16, 4 of 16, 0 of 16   equals dense
# V2, bf16, global_bs, running sums  tokens 16 of 16, 10 of 10, 4 of 4, 0 of 0     equals dense
# V2, W8A8, global_bs, running sums  tokens 16 of 16, 10 of 10, 4 of 4, 0 of 0     equals dense
# V2, W8A8, mask, counts             tokens 16 of 16, 10 of 16, 4 of 16, 0 of 16   equals dense
# PASS
