"""Features of a layer together: every two values that can meet do, and the outputs are the reference's bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import option_sets
import pytest
import torch
from option_sets import Pair
from survivor_cases import results_of

import ascend_moe
from ascend_moe import reference
from ascend_moe.call import CallOptions, SpecialExperts
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import Dispatched, MC2Dispatcher
from ascend_moe.layer import MoEConfig, MoELayer
from ascend_moe.placement import balance, remap
from ascend_moe.reference import RankInput
from ascend_moe.routers.replay import RouterReplay, RouterReplayAction

WORLD, LOST, HIDDEN, EXPERTS, TOPK, MOST = 3, 2, 64, 6, 3, 7
FEATURES: dict[str, tuple[str, ...]] = {
    "special experts": ("none", "zero", "copy", "const"),
    "placement": ("plain", "copies"),
    "ranks": ("all", "one lost"),
    "ids": ("the router's", "replayed"),
    "weights": ("bf16", "int8"),
    "shared expert": ("none", "dense"),
    "comm_quant_mode": ("0", "2"),
    "calls": ("forward", "whole", "begin and finish"),
    "performance_info": ("none", "given"),
    "mode": ("eager", "compiled"),
}
#: `MoELayer.forward` has no such argument: the dispatcher's calls take it.
REFUSED: tuple[Pair, ...] = ((("calls", "forward"), ("performance_info", "given")),)
SPECIAL = {
    "none": SpecialExperts(),
    "zero": SpecialExperts(2, 0, 0),
    "copy": SpecialExperts(1, 2, 0),
    "const": SpecialExperts(0, 1, 2),
}


ONE_AT_A_TIME = threading.Lock()
NO_TIME = torch.zeros(2, dtype=torch.int64)


class Dies(BaseException):
    """What the lost rank raises."""


@dataclass(frozen=True)
class FeatureSet:
    """A value of each of ``FEATURES``."""

    seed: int
    values: dict[str, str]

    @property
    def pairs(self) -> list[Pair]:
        """Every two values that meet in it."""
        return list(combinations(sorted(self.values.items()), 2))

    def has(self, feature: str, value: str) -> bool:
        return self.values[feature] == value


def draw(seed: int, features: dict[str, tuple[str, ...]]) -> FeatureSet:
    """A set by chance, the same one for a seed."""
    return FeatureSet(seed, option_sets.chosen_values(np.random.default_rng([seed, 12]), features, REFUSED))


def layer_of(features: FeatureSet, place: Place) -> MoELayer:
    """The layer of one rank, made before a rank is lost."""
    config = MoEConfig(
        HIDDEN, 32, EXPERTS, TOPK, shared_intermediate_size=0 if features.has("shared expert", "none") else 48,
        **SPECIAL[features.values["special experts"]].given,
    )  # fmt: skip
    copies = balance(torch.arange(1.0, EXPERTS + 1)[None], 2 * EXPERTS, WORLD)
    placement = copies if features.has("placement", "copies") else None
    options = CallOptions(comm_quant_mode=int(features.values["comm_quant_mode"]), **config.special.given).options
    physical = EXPERTS * (1 if placement is None else 2)
    dispatcher = MC2Dispatcher(place.group_ep, place.world, place.rank, physical, **options)
    layer = MoELayer(config, dispatcher, placement=placement, global_bs=WORLD * MOST).init_weights(features.seed)
    return layer.quantize_() if features.has("weights", "int8") else layer


def steps(features: FeatureSet, layer: MoELayer) -> Callable[..., torch.Tensor]:
    """The layer as a function of x and of the tensors of performance_info: by its forward, or by its dispatcher."""
    transport, started = layer.dispatcher, features.has("calls", "begin and finish")

    def by_calls(x: torch.Tensor, *times: torch.Tensor) -> torch.Tensor:
        first, second = ({"performance_info": each} for each in times) if times else ({}, {})
        weights, ids = routed(layer, x)
        given: dict[str, Any] = {"quant_mode": layer.quant_mode, "global_bs": layer.global_bs}
        dispatch = transport.begin_dispatch if started else transport.dispatch
        sent = dispatch(x, ids, **given, **first)
        shared = layer.run_shared(x)
        sent = sent.finish() if started else sent
        combine = transport.begin_combine if started else transport.combine
        out = combine(layer.run_experts(sent), sent, weights, **layer.local_addends(x, shared), **second)
        return out.finish() if started else out

    call = (lambda x: layer(x)) if features.has("calls", "forward") else by_calls
    return call


def routed(layer: MoELayer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and physical ids of a forward."""
    weights, ids = layer.route(x)
    if layer.copies is not None:
        rank, world, number = layer.dispatcher.rank, layer.dispatcher.world_size, layer.dispatcher.num_experts
        ids = remap(ids, layer.copies, source_rank=rank, world_size=world, replicas=number)
    return weights, ids


@dataclass
class RankRun:
    """What a rank has given and got."""

    layer: MoELayer
    given: RankInput
    out: torch.Tensor
    times: list[torch.Tensor]


@torch.no_grad()
def work(features: FeatureSet, rank: int, group_ep: str) -> RankRun:
    """One rank: its layer, a loss where one is asked for, and a forward."""
    layer, draw = layer_of(features, Place(group_ep, WORLD, rank)), torch.Generator().manual_seed(features.seed + rank)
    x = torch.randn(MOST - 2 * rank, HIDDEN, generator=draw).bfloat16()
    if features.has("ids", "replayed"):
        layer.replay = RouterReplay(register=False)
        layer.replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        layer.replay.set_target_indices(
            torch.rand(len(x), layer.config.all_experts, generator=draw).argsort(1)[:, :TOPK]
        )
    if features.has("ranks", "one lost"):
        layer(x)
        if rank == LOST:
            raise Dies
        alive = ascend_moe.agree(group_ep)
        layer.shrink(ascend_moe.shrink(group_ep, alive), alive)
        assert layer.global_bs == len(alive) * MOST
    transport = layer.dispatcher
    given = features.has("performance_info", "given")
    times = [torch.zeros(transport.world_size, dtype=torch.int64) for _ in range(2 * given)]
    call = steps(features, layer)
    if features.has("mode", "compiled"):
        with ONE_AT_A_TIME:  # Dynamo traces in one thread
            call = torch._dynamo.export(call)(x, *times).graph_module
    out = call(x, *times)
    weights, ids = routed(layer, x)
    shared = layer.run_shared(x)
    terms = {name: tensor for name, tensor in layer.local_addends(x, shared).items() if tensor is not None}
    return RankRun(layer, RankInput(x, ids, expert_scales=weights, **terms), out, times)


def check(features: FeatureSet, outcomes: list[RankRun]) -> None:
    """Every rank's output against the reference's combine of what the experts make of the reference's dispatch."""
    first, inputs = outcomes[0].layer, [each.given for each in outcomes]
    common: dict[str, Any] = {"moe_expert_num": first.dispatcher.num_experts, "global_bs": first.global_bs}
    common["special"] = SPECIAL[features.values["special experts"]]
    mode = int(features.values["comm_quant_mode"])
    sent = reference.dispatch(inputs, quant_mode=first.quant_mode, **common)
    rows = []
    for each, came in zip(outcomes, sent, strict=True):
        none = torch.empty(0)
        scales = none if came.dynamic_scales is None else came.dynamic_scales
        counts = (came.expert_token_nums, came.ep_recv_counts, none, none)
        with torch.no_grad():
            rows.append(each.layer.run_experts(Dispatched(came.expand_x, scales, *counts)))
    want = reference.combine(inputs, rows, sent, comm_quant_mode=mode, **common)
    for each, expected in zip(outcomes, want, strict=True):
        assert reference.same_bits(each.out, expected), f"max difference {(each.out - expected).abs().max()}"
        assert all(bool((waited >= 0).all()) for waited in each.times), each.times


def run(features: FeatureSet) -> torch.Tensor:
    """Runs a set; returns the microseconds that its ranks waited in dispatch and in combine."""
    lost = features.has("ranks", "one lost")
    with ascend_moe.LocalCluster(WORLD, window_mib=2) as cluster:
        try:
            outcomes = cluster.run(lambda rank, group_ep: work(features, rank, group_ep))
        except Dies as error:
            assert lost
            found = results_of(error, [rank for rank in range(WORLD) if rank != LOST])
            outcomes = [found[rank] for rank in sorted(found)]
    check(features, outcomes)
    return sum((torch.stack([waited.sum() for waited in each.times]) for each in outcomes if each.times), NO_TIME)


@pytest.mark.parametrize(
    ("features", "most"),
    [(FEATURES | {"mode": ("eager",)}, 20), pytest.param(FEATURES, 24, marks=pytest.mark.nightly)],
    ids=["eager", "compiled too"],
)
def test_every_two_features_of_a_layer_together(features: dict[str, tuple[str, ...]], most: int) -> None:
    sets = option_sets.covering([draw(seed, features) for seed in range(200)])
    met = {frozenset(pair) for each in sets for pair in each.pairs}
    legal = {frozenset(pair) for pair in option_sets.legal_pairs(features, REFUSED)}
    assert met == legal and len(sets) < most, len(sets)
    waited = NO_TIME
    for each in sets:
        try:
            waited = waited + run(each)
        except Exception as error:
            raise AssertionError(f"{each}") from error
    assert bool((waited > 0).all()), waited
