"""What inactive tokens hold changes nothing: NaN in them, or coming back for them, is in no output and no gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_moe import npu, routers
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import make_dispatcher
from ascend_moe.interop import megatron
from ascend_moe.interop.fused_moe import fused_experts
from ascend_moe.layer import MoEConfig, MoELayer
from ascend_moe.layer_ops import get_symm_buffer_for_mega_moe, mega_moe
from ascend_moe.moe_config import ROUTERS

H, E, T = 32, 6, 7
ABSENT = (float("nan"), float("inf"), -float("inf"))


class Draw:
    """One layer, tokens and masks of its ranks, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        router = self.of(*ROUTERS)
        self.world, self.transport = self.of(1, 2), self.of("mc2", "v1", "alltoall", "allgather")
        special = [0, 0, 0] if self.transport == "v1" else [self.of(0, 1, 2) for _ in range(3)]
        self.config = MoEConfig(
            H, 24, E, 2 if router == "sparsemixer" else self.of(1, 3), router=router,
            shared_intermediate_size=self.of(0, 16), latent_size=self.of(0, 16), input_jitter=self.of(0.0, 0.1),
            vocab_size=9 if router == "hash" else 0, router_bias=self.of(False, True),
            const_expert_gate=self.of(False, True),
            **dict(zip(("zero_expert_num", "copy_expert_num", "const_expert_num"), special, strict=True)),
        )  # fmt: skip
        gated = bool(self.config.shared_intermediate_size) and self.of(False, True)
        self.config = dataclasses.replace(self.config, shared_expert_gate=gated)
        self.quantized, self.dtype = self.of(False, False, True), self.of(torch.float32, torch.bfloat16)
        pairs = self.of(False, True)
        self.x = [self.randn(T, H) for _ in range(self.world)]
        self.gy = [self.randn(T, H) for _ in range(self.world)]
        shape = (T, self.config.top_k) if pairs else (T,)
        self.masks = [torch.rand(shape, generator=self.generator) < 0.4 for _ in range(self.world)]
        self.value = self.of(*ABSENT)

    def of(self, *choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=self.generator))]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def active(self, rank: int) -> Tensor:
        mask = self.masks[rank]
        return mask if mask.dim() == 1 else mask.any(1)

    def layer(self, rank: int, group: Any) -> MoELayer:
        kind, more = ("mc2", {"contract": "v1"}) if self.transport == "v1" else (self.transport, {})
        transport = make_dispatcher(kind, Place(group, self.world, rank), E, **more, **self.config.special.given)
        layer = MoELayer(self.config, transport, dtype=self.dtype, trainable=not self.quantized).init_weights(3)
        if self.quantized:  # what no int8 row is made with may be trained
            layer.quantize_()
            for name, weight in layer.named_parameters():
                inside = name == "w_latent_in" or (
                    self.config.router == "llama4" and name in ("gate_weight", "logit_bias")
                )
                weight.requires_grad_(weight.is_floating_point() and name != "gate_bias" and not inside)
        return layer.train(self.world == 1)  # ranks are threads, which have one generator of random numbers

    def outcome(self, filled: bool, rank: int, group: Any) -> list[Tensor | None]:
        """Output and gradients; ``filled``: inactive tokens hold no numbers, nor does what comes back for them."""
        layer, idle = self.layer(rank, group), ~self.active(rank)[:, None]
        x, gy = self.x[rank].to(self.dtype), self.gy[rank].to(self.dtype)
        ids = torch.arange(T) % 9
        if filled:
            x, gy = (each.masked_fill(idle, self.value) for each in (x, gy))
            ids = ids.masked_fill(idle[:, 0], -100)
        x = x.detach().clone().requires_grad_(not self.quantized)  # int8 rows have no gradient
        torch.manual_seed(5)
        y = layer(x, self.masks[rank], input_ids=ids if self.config.router == "hash" else None)
        if y.requires_grad:
            y.backward(gy)
        if x.grad is not None:
            assert not x.grad[idle[:, 0]].any()
        return [y.detach(), x.grad, *(weight.grad for weight in layer.parameters())]


def equal(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one.isfinite().all() and torch.equal(one, other))


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(16, 1016))])
def test_a_layer_does_not_see_what_inactive_tokens_hold(seed: int, clusters: Any) -> None:
    draw = Draw(seed)
    wanted, found = (clusters[draw.world].run(functools.partial(draw.outcome, filled)) for filled in (False, True))
    for one, other in zip(found, wanted, strict=True):
        equal(one, other)


class Trip:
    """Dispatch, linear experts and combine of one rank that has all experts, with every tensor that a token has."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = Draw(seed)
        self.topk, self.quant_mode = draw.of(1, 3), draw.of(0, 0, 2)
        self.special = dict(zip(("zero_expert_num", "copy_expert_num", "const_expert_num"), (1, 1, 2), strict=True))
        if draw.transport == "v1":
            self.special = {}
        self.ids = torch.randint(-1, E + sum(self.special.values()), (T, self.topk), generator=draw.generator).int()
        self.pairs = torch.rand((T, self.topk) if draw.of(False, True) else (T,), generator=draw.generator) < 0.5
        gate = draw.of((2,), (2, H))
        self.of_tokens = [draw.randn(T, H), draw.randn(T, self.topk).sigmoid(), draw.randn(T, H), draw.randn(T, H)]
        self.constants = [draw.randn(*shape) for shape in (gate, gate, (2, H))]

    def run(self, value: float | None, split: bool, group: str) -> list[Tensor | None]:
        """``split``: by begin and finish, without gradients."""
        draw, idle = self.draw, ~(self.pairs if self.pairs.dim() == 1 else self.pairs.any(1))
        kind, more = ("mc2", {"contract": "v1"}) if draw.transport == "v1" else (draw.transport, {})
        way = make_dispatcher(kind, Place(group, 1, 0), E, **more, **self.special)
        leaves = [seen(each, idle, value) for each in self.of_tokens]
        constants = [seen(each, idle, None) for each in self.constants]
        x, weights, shared, ori_x = leaves
        own = {} if draw.transport == "v1" else {"shared_expert_x": shared}
        if self.special:
            names = ("const_expert_alpha_1", "const_expert_alpha_2", "const_expert_v")
            own |= {"ori_x": ori_x} | dict(zip(names, constants, strict=True))
        if self.pairs.dim() == 2 and value is not None:  # nor weights of pairs that are not active
            weights = torch.where(self.pairs, weights, value)
        options = {"x_active_mask": self.pairs, "quant_mode": self.quant_mode}
        if split:
            with torch.no_grad():
                sent = way.begin_dispatch(x, self.ids, **options).finish()
                return [way.begin_combine(self.experts(sent), sent, weights, **own).finish()]
        quantized = x.detach() if self.quant_mode else x  # int8 rows have no gradient
        sent = way.dispatch(quantized, self.ids, **options)
        y = way.combine(self.experts(sent), sent, weights, **own)
        y.backward(draw.gy[0] if value is None else draw.gy[0].masked_fill(idle[:, None], value))
        for leaf in leaves:
            assert leaf.grad is None or not leaf.grad[idle].any()
        return [y.detach(), *(leaf.grad for leaf in (*leaves, *constants))]

    def experts(self, sent: Any) -> Tensor:
        rows = sent.expand_x.float() * (sent.dynamic_scales[:, None] if self.quant_mode else 2)
        return rows.where(torch.arange(len(rows))[:, None] < sent.ep_recv_counts[E - 1], 0)


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 1020), marks=pytest.mark.nightly)])
def test_a_dispatcher_does_not_see_what_inactive_tokens_hold(seeds: range, group_ep: str) -> None:
    for seed in seeds:
        trip = Trip(seed)
        for split in (False, True):
            wanted, found = (trip.run(value, split, group_ep) for value in (None, trip.draw.value))
            equal(found, wanted)


def seen(tensor: Tensor, idle: Tensor, value: float | None) -> Tensor:
    """A leaf with ``value`` in the rows (T, ...) that are ``idle``; None: as it is."""
    filled = tensor if value is None else tensor.masked_fill(idle.view(-1, *(1,) * (tensor.dim() - 1)), value)
    return filled.clone().requires_grad_(tensor.is_floating_point())


IDLE = torch.arange(T) % 3 == 1


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def megatron_layer(value: float | None, group: str, pad: bool) -> list[Tensor | None]:
    """Megatron-LM's layer with every loss, a capacity and a shared expert with a gate."""
    config = megatron.RouterConfig(
        E, H, 2, ["aux_loss", "seq_aux_loss"], [0.1, 0.2], moe_z_loss_coeff=0.1, moe_expert_capacity_factor=1.5,
        moe_pad_expert_input_to_capacity=pad, add_bias_linear=True,
    )  # fmt: skip
    router, experts = megatron.TopKRouter(config), megatron.GroupedMLP(E, H, 16, dtype=torch.float32)
    limits = {"capacity_factor": 1.5, "pad_to_capacity": pad}
    transport = megatron.TokenDispatcher("mc2", group, E, 2, world_size=1, rank=0, **limits)
    shared = megatron.SharedExpertMLP(H, 16, gate=True, dtype=torch.float32)
    layer = megatron.MoELayer(router, transport, experts, shared)
    for weight in layer.parameters():
        weight.data.copy_(drawn(*weight.shape) / 5)
    x = seen(drawn(T, H), IDLE, value)
    y, _ = layer(x, ~IDLE)
    assert not y[IDLE].any()
    y.backward(seen(drawn(T, H) + 1, IDLE, value).detach())
    return [y.detach(), x.grad, *(weight.grad for weight in layer.parameters())]


def router_from_logits(value: float | None, group: str) -> list[Tensor | None]:
    router = megatron.TopKRouter(megatron.RouterConfig(E, H, 2, "aux_loss", 0.1, moe_z_loss_coeff=0.1))
    logits = seen(drawn(T, E), IDLE, value)
    probs, chosen = router.routing(logits[:, None], ~IDLE[:, None])
    probs.backward(seen(drawn(T, E) + 1, IDLE, value).detach())
    return [probs.detach(), chosen.float(), logits.grad]


def losses(value: float | None, group: str) -> list[Tensor | None]:
    logits, probs = seen(drawn(T, E), IDLE, value), seen(drawn(T, E).sigmoid(), IDLE, value)
    chosen, scores = routers.compute_routing_scores_for_aux_loss(logits, 2, "sigmoid", mask=~IDLE)
    parts = [
        routers.z_loss_func(logits, 0.1, mask=~IDLE),
        routers.switch_load_balancing_loss_func(scores, chosen.sum(0), 5, 2, E, 0.1),
        routers.switch_load_balancing_loss_func(probs, chosen.sum(0), 5, 2, E, 0.1, mask=~IDLE),
        (routers.sinkhorn_routing(logits, 2, mask=~IDLE)[0] * drawn(T, E)).sum(),
    ]
    sum(parts[1:], parts[0]).backward()
    return [*(part.detach() for part in parts), logits.grad, probs.grad]


def mega_moe_with_a_shared_expert(value: float | None, group: str) -> list[Tensor | None]:
    weights = {
        f"{kind}{name}_weights": [seen((drawn(*shape) / 5).bfloat16(), IDLE, None) for _ in range(count)]
        for kind, count in (("", E), ("shared_", 1))
        for name, shape in (("l1", (H, 32)), ("l2", (16, H)))
    }
    x = seen(drawn(T, H).bfloat16(), IDLE, value)
    chosen = drawn(T, E).topk(2)
    buffer = get_symm_buffer_for_mega_moe(group, E, T, 2, H, 32)
    scores = seen(chosen.values, IDLE, value)
    y, _ = mega_moe(x, chosen.indices.int(), scores, sym_buffer=buffer, x_active_mask=~IDLE, **weights)
    y.backward(seen(drawn(T, H).bfloat16(), IDLE, value).detach())
    return [y.detach(), x.grad, scores.grad, *(weight.grad for each in weights.values() for weight in each)]


def combine_and_norm(value: float | None, group: str, partly: bool = False) -> list[Tensor | None]:
    """The output of an inactive token is of its residual, so those are left out."""
    x, ids, place = drawn(T, H), drawn(T, E).topk(2).indices.int(), (group, 1, 0, E)
    mask = torch.stack([~IDLE, torch.zeros_like(IDLE)], 1) if partly else ~IDLE
    sent = npu.npu_moe_distribute_dispatch_v2(x, ids, *place, x_active_mask=mask)
    residual, gamma, rows = seen(drawn(T, 1, H), IDLE, value), seen(drawn(H), IDLE, None), sent[0].requires_grad_()
    tensors = (rows, ids, sent[2], sent[4], drawn(T, 2).sigmoid(), residual, gamma)
    made = npu.npu_moe_distribute_combine_add_rms_norm(*tensors, *place, x_active_mask=mask, norm_eps=0.0)
    torch.autograd.backward(made, [seen(torch.ones_like(each), IDLE, value).detach() for each in made])
    assert residual.grad is not None and bool(residual.grad[~IDLE].any(-1).all())
    return [*(each.detach()[~IDLE] for each in made), residual.grad, gamma.grad, rows.grad]


def blocks_of_vllm(value: float | None, group: str) -> list[Tensor | None]:
    """Tokens without an expert here, whose weight multiplies the input."""
    x, weights = seen(drawn(T, H), IDLE, value), seen(drawn(T, 1), IDLE, value)
    w1, w2 = (seen(drawn(*shape) / 5, IDLE, None) for shape in ((E, 32, H), (E, H, 16)))
    ids = (torch.arange(T) % E).masked_fill(IDLE, -1)[:, None]
    y = fused_experts(x, w1, w2, weights, ids, apply_router_weight_on_input=True, block_size=4)
    y.backward(seen(drawn(T, H), IDLE, value).detach())
    return [y.detach(), x.grad, weights.grad, w1.grad, w2.grad]


CALLS: dict[str, Callable[[float | None, str], list[Tensor | None]]] = {
    "Megatron-LM's layer": functools.partial(megatron_layer, pad=False),
    "Megatron-LM's layer, padded": functools.partial(megatron_layer, pad=True),
    "Megatron-LM's router from logits on": router_from_logits,
    "losses": losses,
    "mega_moe": mega_moe_with_a_shared_expert,
    "combine_add_rms_norm": combine_and_norm,
    "combine_add_rms_norm, one of a token's pairs": functools.partial(combine_and_norm, partly=True),
    "fused_experts": blocks_of_vllm,
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_seen_of_inactive_tokens(name: str, group_ep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    wanted = CALLS[name](None, group_ep)
    for value in ABSENT[:2]:
        equal(CALLS[name](value, group_ep), wanted)
