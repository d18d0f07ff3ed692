"""Holds a rank's tokens and experts, and the calls of a layer over them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from routed_tokens import randn, routed

from ascend_moe import LocalCluster
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import AscendMoeError
from ascend_moe.experts import grouped_mlp, quantize_weight, quantize_weight_int4
from ascend_moe.layer_ops import SymmBuffer, dispatch_ffn_combine, get_symm_buffer_for_mega_moe, mega_moe

BF16, FP32, I32, NAN = torch.bfloat16, torch.float32, torch.int32, float("nan")
K, H, F, L = 3, 64, 32, 4
MOST = 16  # tokens of a rank


class Rank:
    """Tokens and weights of one rank; ``int8``: W8A8; ``int4``: W4A8 by that many groups, 0: none."""

    def __init__(
        self, rank: int, world: int, tokens: int = 9, kind: str = "random", int8: bool = False, int4: int = 0
    ) -> None:
        self.rank, self.world, self.experts, self.int8 = rank, world, L * world, int8
        self.x = randn(tokens, H, seed=rank).to(BF16)
        self.ids = routed(tokens, self.experts, K, kind)
        self.probs = randn(tokens, K, seed=50 + rank).softmax(1)
        self.mask: torch.Tensor | None = None
        weights = [randn(L, *shape, seed=100 + rank) / shape[0] ** 0.5 for shape in ((H, 2 * F), (F, H))]
        self.w1, self.w2 = (weight.to(BF16) for weight in weights)
        self.s1: torch.Tensor | None = None
        self.s2: torch.Tensor | None = None
        self.b1: torch.Tensor | None = None
        self.b2: torch.Tensor | None = None
        if int8:
            (self.w1, self.s1), (self.w2, self.s2) = map(quantize_weight, weights)
        if int4:
            self.int8 = True  # of the rows
            made = [quantize_weight_int4(weight, weight.shape[1] // int4) for weight in weights]
            (self.w1, self.s1, self.b1), (self.w2, self.s2, self.b2) = made

    def to(self, device: str) -> Rank:
        """The same with its tensors there."""
        moved = copy.copy(self)
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        vars(moved).update({name: value.to(device) for name, value in tensors.items()})
        return moved

    def biases(self, form: str) -> list[Any]:
        if self.b1 is None or self.b2 is None:
            return [None, None]
        return [[bias] if form == "stacked" else list(bias) for bias in (self.b1, self.b2)]

    def scales(self, form: str) -> list[Any]:
        """scale1 and scale2 as the call takes them: stacked, or a list, or as int64 of their bits."""
        if self.s1 is None or self.s2 is None:
            return [None, None]
        both = [self.s1, self.s2]
        if form.endswith("int64"):  # uint64 as CANN's documents have it
            both = [scale.view(I32).to(torch.int64).view(getattr(torch, form)) for scale in both]
        return [[scale] if form == "stacked" else list(scale) for scale in both]

    def weights(self, form: str) -> list[list[torch.Tensor]]:
        return [[weight] if form == "stacked" else list(weight) for weight in (self.w1, self.w2)]

    def one_call(self, group: str, form: str = "stacked", limit: int = 0, **given: Any) -> tuple[torch.Tensor, ...]:
        out, nums = torch.full_like(self.x, NAN), torch.full((L,), -1, dtype=I32, device=self.x.device)
        made = dispatch_ffn_combine(
            self.x, *self.weights(form), self.ids, *self.scales(form), *self.biases(form), self.probs, group, limit,
            out, nums, self.mask, **given,
        )  # fmt: skip
        assert made[0] is out and made[1] is nums
        return made

    def buffer(self, group: str, **given: Any) -> SymmBuffer:
        sizes = {"dispatch_quant_mode": 2 if self.int8 else 0, **given}
        return get_symm_buffer_for_mega_moe(group, self.experts, MOST, K, H, F, **sizes)

    def mega(self, buffer: SymmBuffer, form: str = "stacked", **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scales = dict(zip(("l1_weights_sf", "l2_weights_sf"), self.scales(form), strict=True))
        scales |= dict(zip(("l1_bias", "l2_bias"), self.biases(form), strict=True))
        options = {**scales, "x_active_mask": self.mask, **given}
        return mega_moe(self.x, self.ids, self.probs, *self.weights(form), buffer, **options)

    def limited(self, group: str, limit: int, mega: bool) -> tuple[torch.Tensor, ...]:
        """One of both calls with the most rows that a rank may receive."""
        return self.mega(self.buffer(group, max_recv_token_num=limit)) if mega else self.one_call(group, limit=limit)

    def three_calls(
        self, group: str, limit: float = 0.0, shared: torch.Tensor | None = None, activation: Any = "swiglu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dispatcher = MC2Dispatcher(group, self.world, self.rank, self.experts)
        options = {"quant_mode": 2 if self.int8 else 0, "global_bs": self.world * MOST}
        sent = dispatcher.dispatch(self.x, self.ids, x_active_mask=self.mask, **options)
        rows = grouped_mlp(
            sent.expand_x, self.w1, self.w2, sent.expert_token_nums,
            dynamic_scales=sent.dynamic_scales if self.int8 else None, w_gate_up_scale=self.s1, w_down_scale=self.s2,
            output_dtype=BF16, activation=activation, swiglu_limit=limit, gate_up_bias=self.b1, down_bias=self.b2,
        )  # fmt: skip
        return dispatcher.combine(rows, sent, self.probs, shared_expert_x=shared), sent.expert_token_nums


def same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert found[0].dtype == BF16 and found[1].dtype == I32
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1].int())


def outcomes(cluster: LocalCluster, body: Callable[[int, str], Any]) -> list[Any]:
    """Returns what body returns on each rank, or its error; then the ranks use the group once more."""

    def guarded(rank: int, group: str) -> Any:
        try:
            found = body(rank, group)
        except AscendMoeError as error:
            found = error
        same(Rank(rank, cluster.world_size).one_call(group), Rank(rank, cluster.world_size).three_calls(group))
        return found

    return cluster.run(guarded)
