"""MoELayer over expert-parallel ranks against transformers' own MoE blocks and the dense reference."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from bad_arguments import refused
from gloo_ranks import threads
from hf_models import LAYER, MODELS, MORE_MODELS, RENAMED, first_of, run_block, saved

from ascend_moe.call import WithSpecialExperts
from ascend_moe.checkpoint import build_layer
from ascend_moe.comm import LocalCluster, lookup
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import AllGatherDispatcher, AllToAllDispatcher, Dispatcher, MC2Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.layer import MoEConfig, MoELayer
from ascend_moe.moe_config import ROUTERS
from ascend_moe.ops import calls

TRANSPORTS = ["window v2", "window v1", "all-to-all", "all-gather"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SMALL = MoEConfig(32, 24, 8, 3, shared_intermediate_size=16)


def run(transport: str, world: int, experts: int, body: Callable[[Dispatcher, int], Any], **special: int) -> list[Any]:
    """body(dispatcher, rank) on every rank of ``world``, over the named dispatcher; results by rank."""
    kind, _, contract = transport.partition(" ")
    if kind == "window":
        with LocalCluster(world) as cluster:
            made = functools.partial(MC2Dispatcher, num_experts=experts, contract=contract, **special)
            return cluster.run(lambda rank, group: body(made(group, world, rank), rank))
    peer = AllToAllDispatcher if kind == "all-to-all" else AllGatherDispatcher
    return threads(world).run(lambda rank, group: body(peer(group, experts, **special), rank))


def share(x: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    return x.chunk(world)[rank]


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_two_servers_of_hierarchy(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer gives dispatch the weights of combine, since rows are weighed on the servers of their experts."""
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    if by == "variable":
        monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "hierarchy")
    x = torch.randn(4, 6, SMALL.hidden_size, generator=torch.Generator().manual_seed(1))

    def run_layer(comm_alg: str) -> torch.Tensor:
        def body(rank: int, group: str) -> torch.Tensor:
            dispatcher = MC2Dispatcher(group, 4, rank, SMALL.num_experts, comm_alg=comm_alg)
            assert dispatcher.weighs_first == (comm_alg != "window")
            layer = MoELayer(SMALL, dispatcher, dtype=torch.float32).init_weights(2)
            with torch.no_grad():
                return layer(x[rank])

        with LocalCluster(4) as cluster:
            return torch.stack(cluster.run(body))

    torch.testing.assert_close(run_layer("hierarchy" if by == "argument" else ""), run_layer("window"))


@pytest.mark.parametrize(
    ("model", "transport", "world", "fused", "dtype"),
    [
        *itertools.product(MODELS, TRANSPORTS[:1], [1, 2, 4], [False], [FP32, BF16]),
        *itertools.product(MODELS, TRANSPORTS[1:], [2], [False], [FP32]),
        *itertools.product([*MODELS, *MORE_MODELS], TRANSPORTS[:1], [2], [True], [FP32]),
        *itertools.product([*MORE_MODELS, *RENAMED], TRANSPORTS[:1], [2], [False], [FP32]),
    ],
    ids=str,
)
def test_equals_transformers(model: str, transport: str, world: int, fused: bool, dtype: torch.dtype) -> None:
    checkpoint = saved(model, "fused" if fused else "published", dtype)
    x = torch.randn(24, checkpoint.hidden, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = run_block(checkpoint.block, x)
    rms = float(expected.float().square().mean().sqrt())
    assert 0.1 <= rms <= 10

    def body(dispatcher: Dispatcher, rank: int) -> torch.Tensor:
        layer = build_layer(checkpoint.directory, LAYER, dispatcher, dtype=dtype)
        assert layer.w_down.shape[0] == checkpoint.experts // world
        return first_of(layer(share(x, world, rank)[None]))[0]  # any leading dimensions

    result = torch.cat(run(transport, world, checkpoint.experts, body, **checkpoint.special))
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["dtype", "router_dtype"])
def test_dtypes_that_no_layer_has(name: str) -> None:
    transport = AllToAllDispatcher(threads(1).groups[0], SMALL.num_experts)
    for wrong in (torch.float64, torch.int8, None, "bf16"):
        refused(name, MoELayer, SMALL, transport, **{name: wrong}, says=rf"^{name} is {wrong}; need torch\.bfloat16")


ROUTED_SPECIAL = {
    "softmax": {"renormalize": False, "routed_scaling_factor": 2.5},
    "softmax_bias": {"renormalize": False, "routed_scaling_factor": 6.0},
    "deepseek_v3": {},
    "deepseek_v4": {"shared_intermediate_size": 16},
    "hash": {"vocab_size": 50},
    "sparsemixer": {"top_k": 2},
    "llama4": {"shared_intermediate_size": 16},
    "latent": {"router": "softmax", "latent_size": 16, "shared_intermediate_size": 16},
    "numbers": {"router": "softmax", "const_expert_gate": False, "router_bias": True},
}


@pytest.mark.parametrize("transport", TRANSPORTS[:1] + TRANSPORTS[2:])
@pytest.mark.parametrize("name", ROUTED_SPECIAL)
def test_special_experts_are_chosen_and_add_their_terms(name: str, transport: str) -> None:
    """Each router over experts of all kinds, K above E, against the formula; every gradient against one process's.

    Every second router has masks of routed tokens, a rank without tokens, and the batches' limit by call.
    """
    pairs = [*ROUTED_SPECIAL].index(name) % 2 == 1
    numbers = {"router": name, "num_experts": 4, "top_k": 7, **ROUTED_SPECIAL[name]}
    config = MoEConfig(32, 24, **numbers, zero_expert_num=2, copy_expert_num=1, const_expert_num=2)
    x = torch.randn(26, 32, generator=torch.Generator().manual_seed(1))
    mask = torch.rand(26, config.top_k if pairs else 1, generator=torch.Generator().manual_seed(2)) < 0.8
    mask[4], tokens, split = False, torch.arange(26), 26 if pairs else 17

    def body(dispatcher: Dispatcher, rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ranks = dispatcher.world_size
        mine = slice(*((0, split), (split, 26))[rank]) if ranks == 2 else slice(0, 26)
        limit = {"global_bs": ranks * 26}
        layer = MoELayer(config, dispatcher, dtype=FP32, trainable=True, **({} if pairs else limit)).init_weights(3)
        layer.eval()  # the sparse mixer draws no experts
        y = layer(x[mine], mask[mine], input_ids=tokens[mine], **(limit if pairs else {}))
        y.square().sum().backward()
        return y.detach(), {key: value.grad for key, value in layer.named_parameters() if value.requires_grad}

    special = config.special.given
    ((alone, grads),) = run("all-to-all", 1, config.num_experts, body, **special)
    whole = MoELayer(config, AllToAllDispatcher(threads(1).groups[0], config.num_experts, **special), dtype=FP32)
    with torch.no_grad():
        wanted, ids = of_the_formula(whole.init_weights(3), x, tokens, mask)
    torch.testing.assert_close(alone, wanted * mask.any(1, keepdim=True), rtol=1e-5, atol=1e-5)
    kinds = {int(kind) for kind in torch.bucketize(ids.long(), torch.tensor([0, 4, 6, 7]), right=True).unique()}
    assert kinds == {1, 2, 3, 4}
    found = run(transport, 2, config.num_experts, body, **special)
    torch.testing.assert_close(torch.cat([y for y, _ in found]), alone, rtol=1e-5, atol=1e-5)
    for key, grad in grads.items():
        parts = [each[key] for _, each in found]
        owned = key in ("w_gate_up", "w_down")
        torch.testing.assert_close(torch.cat(parts) if owned else sum(parts), grad, rtol=1e-3, atol=1e-3)
        assert grad.any(), key


def of_the_formula(
    layer: MoELayer, x: torch.Tensor, tokens: torch.Tensor, active: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's rows, every expert of every token by itself, and the chosen ids."""
    config, first = layer.config, layer.config.num_experts
    weights, ids = layer.route(x, tokens)
    weights = weights * active
    rows, row_ids, weights, _ = layer.enter(x, ids, weights)
    total = torch.zeros_like(rows)
    for token, k in itertools.product(range(len(rows)), range(row_ids.size(1))):
        expert, row = int(row_ids[token, k]), rows[token]
        place = expert - first - config.zero_expert_num - config.copy_expert_num
        if expert < first:
            term = layer.activation((row @ layer.w_gate_up[expert])[None])[0] @ layer.w_down[expert]
        elif expert < first + config.zero_expert_num:
            continue
        elif place < 0:
            term = row
        else:
            alphas = [layer.const_expert_alpha_1[place], layer.const_expert_alpha_2[place]]
            if config.const_expert_gate:
                alphas = list(torch.stack([alpha @ row for alpha in alphas]).softmax(0))
            term = alphas[0] * row + alphas[1] * layer.const_expert_v[place]
        total[token] += weights[token, k] * term
    return layer.leave(total, layer.run_shared(x)), ids


def test_the_dispatcher_has_the_configs_special_experts() -> None:
    config = replace(SMALL, copy_expert_num=3)
    with pytest.raises(ArgumentError, match=r"has copy_expert_num 0, the config 3; build it with \*\*config.special"):
        MoELayer(config, one_rank())
    layer = MoELayer(config, AllToAllDispatcher(threads(1).groups[0], 8, **config.special.given))
    assert layer.gate_weight.shape == (11, 32) and layer.w_down.shape[0] == 8
    refused("copy_expert_num", MC2Dispatcher, "g", 1, 0, 8, "v1", copy_expert_num=3, says="not supported by the V1")


def test_init_weights_do_not_depend_on_ranks() -> None:
    def states(world: int, seed: int) -> list[dict[str, torch.Tensor]]:
        layers = run("all-to-all", world, 8, lambda dispatcher, _: MoELayer(SMALL, dispatcher).init_weights(seed))
        return [layer.state_dict() for layer in layers]

    (whole,), parts, (other,) = states(1, 3), states(4, 3), states(1, 4)
    for name, value in whole.items():
        assert value.float().std() > 0.05
        joined = torch.cat([part[name] for part in parts]) if name.startswith("w_") else parts[3][name]
        assert torch.equal(joined, value), name
    assert not torch.equal(other["w_down"], whole["w_down"])


def one_rank() -> Dispatcher:
    return AllToAllDispatcher(threads(1).groups[0], 8)


def test_wrong_arguments_are_refused() -> None:
    layer = MoELayer(SMALL, one_rank(), dtype=torch.float32).init_weights()
    x = torch.ones(2, 32)
    for given, mask, argument in (
        (torch.ones(2, 31), None, "x"),
        (x.half(), None, "x"),
        (x, torch.ones(3, dtype=torch.bool), "x_active_mask"),
        (x, torch.ones(2, 4, dtype=torch.bool), "x_active_mask"),
        (x, torch.ones(2), "x_active_mask"),
        (x, [True, True], "x_active_mask"),
        (x.expand(3, 2, 32), torch.ones(2, 3, dtype=torch.bool), "x_active_mask"),
        (None, None, "x"),
    ):
        refused(argument, layer, given, mask)
    assert layer(x[:, None], torch.tensor([[True], [False]])).shape == (2, 1, 32)
    refused("dispatcher", MoELayer, MoEConfig(32, 24, 16, 3), one_rank(), says="8 experts, the config 16")
    refused("alive", layer.shrink, Place("pair", 2, 0), [0], says="has 1 ranks, the place 2")
    few, one_each = (
        MoELayer(replace(SMALL, router=router), MC2Dispatcher("of nobody", 4, 3, 8)) for router in ("softmax", "llama4")
    )
    refused("alive", few.shrink, Place("pair", 1, 0), [3], says="leaves 2 experts, fewer than top_k 3")
    one_each.shrink(Place("pair", 1, 0), [3])  # llama4's rows have one expert each
    assert (few.dispatcher.world_size, one_each.dispatcher.world_size) == (4, 1)
    llama4 = MoELayer(replace(SMALL, router="llama4"), one_rank(), dtype=torch.float32).init_weights()
    says = r"is 9; .* rows, .* 3 per token: divide them by 3 \(x has 5 tokens, global_bs is 3\)"
    refused("global_bs", llama4, torch.ones(5, 32), global_bs=3, says=says)


@pytest.mark.parametrize(
    ("values", "argument"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 2, "topk_group": 3}, "n_group"),
        ({"n_group": 8, "topk_group": 2}, "top_k"),
        ({"top_k": 9}, "top_k"),
        ({"shared_intermediate_size": -1}, "shared_intermediate_size"),
        ({"shared_intermediate_size": 0, "shared_expert_gate": True}, "shared_intermediate_size"),
        ({"input_jitter": -0.1}, "input_jitter"),
        ({"router": "deepseek_v3", "n_group": 8, "topk_group": 4}, "n_group"),
        ({"zero_expert_num": -1}, "zero_expert_num"),
        ({"top_k": 12, "copy_expert_num": 3}, "top_k"),
        ({"n_group": 2, "topk_group": 1, "copy_expert_num": 1}, "n_group"),
        *(({each.name: 1025}, each.name) for each in fields(WithSpecialExperts)),
        *(({each.name: "no"}, each.name) for each in fields(MoEConfig)),
        *(({each.name: True}, each.name) for each in fields(MoEConfig) if each.type != "bool"),
        ({"activation_numbers": {"alpha": 1.0}}, "alpha"),
        ({"activation": "silu", "activation_numbers": {"limit": -1.0}}, "limit"),
        ({"activation": "situ", "activation_numbers": {"beta": True}}, "beta"),
    ],
)
def test_wrong_configurations_name_the_argument(values: dict[str, Any], argument: str) -> None:
    refused(argument, MoEConfig, **{**vars(SMALL), **values})


def test_a_router_that_only_the_config_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTERS, "argmax", ROUTERS["softmax"])
    refused("router", MoELayer, MoEConfig(32, 24, 8, 3, router="argmax"), one_rank(), says="'argmax', which MoELayer")


# ---- rows in window tensors


def steps(cluster: LocalCluster, quantized: bool, **options: Any) -> list[list[tuple[torch.Tensor, int]]]:
    """By rank and step: the layer's output, bytes that its combine read from registered memory."""
    config = MoEConfig(64, 32, 8, 3, shared_intermediate_size=16)

    def body(rank: int, group: str) -> list[tuple[torch.Tensor, int]]:
        layer = MoELayer(config, MC2Dispatcher(group, 2, rank, 8, **options)).init_weights(1)
        if quantized:
            layer.quantize_()
        found = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(5 + 3 * rank, 64, generator=generator).bfloat16()
            y = layer(x, global_bs=2 * 8)
            found.append((y, calls.traffic(lookup(group, 2, rank))["read_window_registered"]))
        return found

    return cluster.run(body)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("comm_alg", ["direct", "auto"])
def test_zero_copy_gives_the_bits_of_the_copying_layer(comm_alg: str, quantized: bool) -> None:
    with LocalCluster(2, window_mib=1) as cluster:
        registered = steps(cluster, quantized, comm_alg=comm_alg, zero_copy=True)
        for other in ({}, {"comm_alg": "window"}, {"comm_alg": comm_alg}):
            for ours, theirs in zip(registered, steps(cluster, quantized, **other), strict=True):
                for (one, _), (two, read) in zip(ours, theirs, strict=True):
                    assert torch.equal(one, two) and one.any() and read == 0
    for rank, ours in enumerate(registered):
        assert all(read == (5 + 3 * rank) * 3 * 64 * 2 for _, read in ours)


def test_what_a_trainable_layer_has_no_gradient_for(group_ep: str) -> None:
    config = MoEConfig(32, 24, 8, 3, router="deepseek_v3", shared_intermediate_size=16, shared_expert_gate=True)
    dispatcher = MC2Dispatcher(group_ep, 1, 0, 8)
    layer = MoELayer(config, dispatcher, dtype=FP32, trainable=True).init_weights()
    layer(torch.randn(5, 32)).sum().backward()
    assert {name for name, weight in layer.named_parameters() if weight.grad is None} == {"gate_bias"}
    refused("trainable", layer.quantize_, says="trainable is True; quantized weights have no gradient")
    assert not any(weight.requires_grad for weight in MoELayer(config, dispatcher).parameters())


def test_the_gate_of_the_shared_expert_is_in_float32() -> None:
    config = MoEConfig(256, 24, 8, 3, shared_intermediate_size=16, shared_expert_gate=True)
    layer = MoELayer(config, AllToAllDispatcher(threads(1).groups[0], 8)).init_weights(2)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(6)).bfloat16()
    found = layer.run_shared(x)
    assert found is not None and layer.shared_gate is not None
    gate = torch.sigmoid(x.float() @ layer.shared_gate.float())
    layer.shared_gate = None
    plain = layer.run_shared(x)
    assert plain is not None and torch.equal(found, (plain.float() * gate[:, None]).bfloat16())


def test_a_trainable_layer_uses_registered_buffers_where_nothing_is_trained(clusters: Any) -> None:
    """Its gradients are those of a layer that copies."""

    def body(rank: int, group: str, zero_copy: bool = True) -> tuple[list[int], list[torch.Tensor]]:
        dispatcher = MC2Dispatcher(group, 2, rank, 8, comm_alg="direct", zero_copy=zero_copy)
        config, found = replace(SMALL, expert_bias=True), []
        layer = MoELayer(config, dispatcher, dtype=FP32, trainable=True).init_weights()
        x = torch.ones(4, 32) * (rank + 1)
        for enabled in (False, True):
            with torch.set_grad_enabled(enabled):
                y = layer(x)
            found.append(calls.traffic(lookup(group, 2, rank))["read_window_registered"])
        y.sum().backward()
        grads = [y.detach(), *(each.grad for each in layer.parameters() if each.grad is not None)]
        layer.requires_grad_(False)
        layer(torch.ones(4, 32, requires_grad=True)).sum().backward()  # rows that autograd follows
        layer.down_bias.requires_grad_()
        layer(x).sum().backward()  # rows that only a bias makes autograd follow
        return found, grads

    registered, copied = clusters[2].run(body), clusters[2].run(body, False)
    assert [found for found, _ in registered] == [[4 * 3 * 32 * 4, 0]] * 2
    for (_, ours), (_, theirs) in zip(registered, copied, strict=True):
        assert len(ours) > 3 and all(map(torch.equal, ours, theirs))
