"""Megatron-LM's MoELayer, its groups, its experts and its shared expert."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from gloo_ranks import threads
from megatron_layers import (
    FP32,
    KINDS,
    LAYOUTS,
    Case,
    E,
    F,
    H,
    close,
    dispatcher,
    experts_of,
    loss_of,
    mlp,
    on_ranks,
    overlapped,
    shared_expert,
)
from routed_tokens import randn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_moe.errors import AscendMoeError
from ascend_moe.interop.megatron import (
    GroupedMLP,
    MoEAuxLossAutoScaler,
    MoELayer,
    RankGenerator,
    RouterConfig,
    SharedExpertMLP,
    TopKRouter,
    folded_groups,
    rank_groups,
)


def layer_of(
    case: Case, kind: str, rank: int, group: Any, etp: int = 1, shared: Any = None, **options: Any
) -> MoELayer:
    config = RouterConfig(E, H, case.topk, **options.pop("router", {}))
    router = TopKRouter(config)
    router.weight.data = randn(E, H, seed=5) / math.sqrt(H)
    given = {name: options.pop(name) for name in ("tensor_model_parallel_size", "sequence_parallel") if name in options}
    transport = dispatcher(kind, case, etp, rank, group, **options)
    return MoELayer(router, transport, experts_of(case, transport), shared, **given)


def test_shapes_stay_in_five_dimensional_parallelism(clusters: Any) -> None:
    """Attention gives (S / cp / tp, B, H); training with tp needs sequence parallelism."""
    case = Case(1)

    def run(rank: int, group: str) -> None:
        x = randn(6, 2, H)
        layer = layer_of(case, "mc2", rank, group, tensor_model_parallel_size=2)
        with pytest.raises(ValueError, match="sequence_parallel is False in training with tp 2"):
            layer(x)
        assert layer.eval()(x)[0].shape == x.shape
        found, bias = layer_of(case, "mc2", rank, group, tensor_model_parallel_size=2, sequence_parallel=True)(x)
        assert found.shape == x.shape and found.dtype == x.dtype and bias is None

    clusters[1].run(run)


def groups_by_loop(order: str, sizes: dict[str, int], token: str) -> list[list[int]]:
    """Ranks that differ in the axes of the token only."""
    axes = order.split("-")
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(math.prod(sizes.values())):
        rest, place = rank, {}
        for axis in axes:
            rest, place[axis] = divmod(rest, sizes.get(axis, 1))
        found.setdefault(tuple(place[axis] for axis in axes if axis not in token.split("-")), []).append(rank)
    return list(found.values())


def test_a_rank_generator_gives_the_groups_of_drawn_layouts() -> None:
    """200 orders, sizes and tokens, in letters of any case; axes that are left out; groups ascend from the offset."""
    draw = random.Random(3)
    for _ in range(200):
        axes = draw.sample(["tp", "pp", "dp", "ep", "cp"], draw.randint(1, 5))
        sizes = {axis: draw.randint(1, 3) if axis in axes else 1 for axis in ("tp", "ep", "dp", "pp", "cp")}
        sizes[draw.choice(["ep", "cp"])] = 1
        order, offset = "-".join(axes), draw.choice([0, 5])
        made = RankGenerator(**sizes, order=draw.choice([order, order.upper()]), rank_offset=offset)
        token = "-".join(draw.sample(made.order.split("-"), draw.randint(1, 5)))
        wanted = sorted(groups_by_loop(made.order, sizes, token))
        assert sorted(made.get_ranks(token)) == [[rank + offset for rank in group] for group in wanted], (order, token)
        assert made.order.startswith(order) and made.world_size == math.prod(sizes.values())
    # Megatron-LM's own example of its documentation: tp 2, dp 4, pp 2.
    known = RankGenerator(tp=2, ep=1, dp=4, pp=2, cp=1, order="tp-dp-pp")
    assert known.get_ranks("dp") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert known.get_ranks("pp")[:2] == [[0, 8], [1, 9]] and known.get_ranks("dp-tp")[1] == list(range(8, 16))
    for wrong, message in (
        ({"ep": 2, "cp": 2}, "ep is 2 and cp 2; one of them must be 1"),
        ({"pp": 2, "order": "tp-dp"}, "order is 'tp-dp' without pp, which has 2 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            RankGenerator(**{"tp": 1, "ep": 1, "dp": 1, "pp": 1, "cp": 1, "order": "tp-cp-ep-dp-pp"} | wrong)
    with pytest.raises(ValueError, match="token is 'tp-xp'; need axes of 'tp-dp-pp-ep-cp'"):
        known.get_ranks("tp-xp")


def test_folded_groups_give_experts_axes_of_their_own() -> None:
    order = "tp-cp-ep-dp-pp"
    dense, experts = folded_groups(order, 8, tp=2, cp=2, ep=8)
    assert experts["ep"] == [list(range(8))] and dense["tp-cp"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    dense, experts = folded_groups(order, 8, tp=4, etp=2, ep=2)
    assert experts["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]] and dense["tp"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert experts["ep"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert experts["tp-ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]] and experts["dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    dense, experts = folded_groups(order, 16, tp=2, cp=2, ep=4, pp=2)
    assert dense["pp"] == experts["pp"] == [[rank, rank + 8] for rank in range(8)]
    with pytest.raises(ValueError, match="different pipeline groups; put pp last"):
        folded_groups("tp-cp-ep-pp-dp", 16, tp=2, ep=4, pp=2)
    with pytest.raises(ValueError, match=r"world is 8; it must be a multiple of etp \* ep \* pp = 3"):
        folded_groups(order, 8, ep=3)
    with pytest.raises(ValueError, match="is not an axis"):
        rank_groups(order, {"etp": 2})


class NoHostReads(TorchDispatchMode):
    """Raises where a value leaves a tensor: item, int(), bool()."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read on the host"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_host_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a host copy")

    for name in ("cpu", "item", "tolist"):
        monkeypatch.setattr(Tensor, name, refused)


@pytest.mark.parametrize("world, etp", LAYOUTS)
@pytest.mark.parametrize("pad", [False, True])
def test_a_forward_makes_no_host_copy(world: int, etp: int, pad: bool, clusters: Any, no_host_copies: None) -> None:
    """Router with losses, dispatch, experts, shared expert, combine. Shapes do not depend on the routing."""
    capacity = {"capacity_factor": 1.0, "pad_to_capacity": True} if pad else {}
    losses = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.1]}
    router: dict[str, Any] = losses | {"moe_z_loss_coeff": 0.1}
    router |= {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True} if pad else {}
    case = Case(world, [8] * world)

    def run(rank: int, group: str) -> tuple[Any, Tensor]:
        shared = SharedExpertMLP(H, F, dtype=FP32)
        layer = layer_of(case, "mc2", rank, group, etp, shared, router=dict(router), **capacity)
        shapes, kept = [], []
        original = layer.experts.forward
        layer.experts.forward = lambda *given: (shapes.append(given[0].shape), kept.append(given[1]), original(*given))[
            2
        ]  # type: ignore[method-assign,func-returns-value]
        for seed in (1, 2):
            with NoHostReads():
                layer(randn(8, 1, H, seed=seed + rank))
        assert shapes[0] == shapes[1]
        return shapes[0], kept[0]

    for shape, counts in clusters[world].run(run):
        if pad:  # C = 8 * 3 / 8 rows of every expert from every rank
            assert shape == (E // (world // etp) * world * 3, H) and bool((counts == 3 * world).all())


@pytest.mark.nightly  # tracing takes seconds
def test_a_compiler_keeps_the_layer_in_one_graph(clusters: Any, loss_scale_of_1: None) -> None:
    """A value that Python reads would break the graph: so none is read on an NPU either.

    With all losses, whose scale is set between a compiled forward and its backward.
    """
    case = Case(1)
    losses = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]}

    def run(rank: int, group: str) -> None:
        shared = shared_expert(None, 0, 1, True, False)
        layer = layer_of(case, "mc2", rank, group, 1, shared, router=losses | {"moe_z_loss_coeff": 0.1})
        whole = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
        found = []
        for call, scale in itertools.product((layer, whole), (2.0, 3.0)):
            layer.zero_grad()
            y, _ = call(case.x[0])
            MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale))
            loss_of(y).backward()
            found.append(
                [y.detach(), *(weight.grad.clone() for weight in layer.parameters() if weight.grad is not None)]
            )
        for one, other in zip(found[:2], found[2:], strict=True):
            assert len(one) > 4
            for expected, compiled in zip(one, other, strict=True):
                close(compiled, expected, rtol=1e-4, atol=1e-5)
        assert any(not torch.equal(first, second) for first, second in zip(*found[:2], strict=True))

    clusters[1].run(run)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shared_expert_between_the_phases_is_added(kind: str, clusters: Any) -> None:
    case = Case(2)

    def run(rank: int, group: Any) -> None:
        shared = shared_expert(None, 0, 1, True, False)
        x = case.x[rank].view(5, 1, H)
        without, _ = layer_of(case, kind, rank, group)(x)
        with_shared, _ = layer_of(case, kind, rank, group, shared=shared)(x)
        close(with_shared, without + shared(x))

    on_ranks(kind, 2, clusters, run)


# ---- experts and shared experts


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_overlapped_shared_expert_gives_the_bits_of_the_plain(world: int, gate: bool, sequence: bool) -> None:
    whole = randn(8, 2, H, seed=24)
    weights = (randn(2, F, H, seed=21) / 5).reshape(-1, H), randn(H, F, seed=22) / 4
    own = whole.clone().requires_grad_()
    expected = mlp(own, weights[0].t(), weights[1].t())
    expected = expected * torch.sigmoid(own @ randn(1, H, seed=23).t()) if gate else expected
    loss_of(expected).backward()
    weighing = (1 + torch.arange(whole.numel()).view(whole.shape) % 5).float()

    def run(rank: int, group: Any) -> None:
        module = shared_expert(group, rank, world, gate, sequence)
        share = slice(rank * 8 // world, (rank + 1) * 8 // world) if sequence else slice(None)
        found = []
        for call in (module, lambda x: overlapped(module, x)):
            module.zero_grad()
            x = whole[share].clone().requires_grad_()
            y = call(x)
            (y * weighing[share]).sum().backward()
            found.append([y.detach(), x.grad, module.linear_fc1.weight.grad, module.linear_fc2.weight.grad])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        close(found[0][0], expected.detach()[share])
        assert own.grad is not None
        close(found[0][1], own.grad[share], atol=1e-5)

    threads(world).run(run)


def test_steps_of_the_shared_expert_in_another_order_raise() -> None:
    x, module = randn(3, H), shared_expert(None, 0, 1, True, False)
    plain = module(x)
    with pytest.raises(AscendMoeError, match="linear_fc1_forward_and_act was called, expected pre_forward_comm"):
        module.linear_fc1_forward_and_act()
    module.wait_current_stream()
    module.pre_forward_comm(x, wait_current_stream=False)
    with pytest.raises(AscendMoeError, match="pre_forward_comm was called, expected linear_fc1_forward_and_act"):
        module.pre_forward_comm(x)
    with pytest.raises(AscendMoeError, match="get_output was called"):
        module.get_output()
    module.linear_fc1_forward_and_act()
    with pytest.raises(AscendMoeError, match="post_forward_comm was called, expected linear_fc2_forward"):
        module.post_forward_comm()
    module.linear_fc2_forward()
    module.post_forward_comm()
    assert torch.equal(module.get_output(), plain)
    assert torch.equal(overlapped(module, x), plain)
    call = module.begin()
    call.pre_forward_comm(x)
    assert torch.equal(overlapped(module, x), plain)  # two calls at once


def test_shards_of_grouped_mlp_have_megatrons_shapes() -> None:
    mlps = GroupedMLP(3, H, F, etp_size=2, dtype=FP32)
    assert mlps.weight1.shape == (H, 3 * F) and mlps.weight2.shape == (3 * F // 2, H)
    with pytest.raises(ValueError, match="ffn_hidden_size is 16; it must be a multiple of etp_size 3"):
        GroupedMLP(3, H, F, etp_size=3)
