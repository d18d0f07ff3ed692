"""The ops under compilers: no call is dropped, merged or moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compile_utils import fx_graph_cse
from torch_calls import EXPERTS, VARIANTS, Variant, local_addends, overload

from ascend_moe import MoEConfig, MoELayer
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.native import binding
from ascend_moe.ops import callbacks
from ascend_moe.ops import calls as native

PLAIN = VARIANTS[0]
EACH_CONTRACT = pytest.mark.parametrize("variant", VARIANTS[:2], ids=lambda variant: variant.name)


class Graphs:
    """A backend of torch.compile that keeps the graphs it gets."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.backend = aot_autograd(fw_compiler=self._keep, partition_fn=min_cut_rematerialization_partition)

    def _keep(self, module: torch.fx.GraphModule, _: Any) -> Any:
        self.graphs.append(module)
        return make_boxed_func(module.forward)


def ops_in(graph: torch.fx.Graph) -> list[str]:
    """The calls of our ops in a graph, in its order: names without their prefix."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    targets = [target for node in calls for target in (node.target, *node.args)]
    ops = [op for op in targets if isinstance(op, torch._ops.OpOverload) and op.namespace == "ascend_moe"]
    return [op.__name__.removeprefix("npu_moe_distribute_").removesuffix(".default") for op in ops]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The op codes of every kernel launch."""
    seen: list[int] = []
    prepare = callbacks._open  # asked in every call below

    def counted(call: Any, end: Any) -> None:
        prepare(call, end)
        seen.append(native.OP_DISPATCH if b"dispatch" in call.contents.op else native.OP_COMBINE)

    monkeypatch.setattr(callbacks, "_open", counted)
    torch._dynamo.reset()
    with binding.prepare_always():
        yield seen


def program(variant: Variant, group_ep: str) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """A function of tensors: an unused dispatch, two equal ones, a combine of the first of them."""
    place = (group_ep, 1, 0, EXPERTS)
    dispatch, combine = overload(variant.dispatch_name), overload(variant.combine_name)
    (x, ids, *_), _ = variant.dispatch(0, 1, group_ep)

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        dispatch(x, ids, *place)
        first = dispatch(x, ids, *place)
        second = dispatch(x, ids, *place)
        y = combine(first[0], ids, first[2], first[4], weights, *place)
        # Twice sin(x): what a pass that merges equal calls does merge.
        return y + x.sin() + x.sin() + second[4].sum().to(x.dtype) * 0

    return layer, (x, ids, variant.weights(0))


CALLS = ["dispatch", "dispatch", "dispatch", "combine"]


@EACH_CONTRACT
def test_graph_passes_keep_every_call_in_order(variant: Variant, group_ep: str, launches: list[int]) -> None:
    expected = [call + variant.version for call in CALLS]

    def sines(graph: torch.fx.Graph) -> int:
        return len(graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default))

    layer, args = program(variant, group_ep)
    graphs = Graphs()
    y = torch.compile(layer, fullgraph=True, backend=graphs.backend)(*args)
    assert launches == [1, 1, 1, 2]
    assert torch.equal(y, layer(*args))
    (module,) = graphs.graphs
    assert ops_in(module.graph) == expected and sines(module.graph) == 2
    merged = fx_graph_cse(module.graph)
    merged.eliminate_dead_code()
    assert sines(merged) == 1  # the pass does merge
    assert ops_in(merged) == expected
    # Each call takes the token that the call before it gave out: there is no other order.
    calls = [n for n in merged.nodes if n.target is torch.ops.higher_order.with_effects]
    assert [call.args[0].args for call in calls[1:]] == [(before, 0) for before in calls[:-1]]


@EACH_CONTRACT
def test_inductor_keeps_the_order(variant: Variant, group_ep: str, launches: list[int]) -> None:
    """Two independent pairs, which inductor would like to run one after the other to save memory."""
    place = (group_ep, 1, 0, EXPERTS)
    dispatch, combine = overload(variant.dispatch_name), overload(variant.combine_name)

    def pairs(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        dispatch(x, ids, *place)
        both = [dispatch(x, ids, *place), dispatch(x, ids, *place, quant_mode=0)]
        return [combine(rows[0], ids, rows[2], rows[4], weights, *place) for rows in both]

    large = replace(variant, tokens=64)
    (x, ids, *_), _ = large.dispatch(0, 1, group_ep)
    args = x, ids, large.weights(0)
    with torch._inductor.config.patch(force_disable_caches=True):
        # Nothing but our ops: there is no C++ to compile.
        got = torch.compile(pairs, fullgraph=True, backend="inductor")(*args)
    assert launches == [1, 1, 1, 2, 2]
    assert all(torch.equal(a, b) for a, b in zip(got, pairs(*args), strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_export_keeps_every_call(dynamic: bool, group_ep: str, launches: list[int]) -> None:
    layer, args = program(PLAIN, group_ep)
    batch = torch.export.Dim("batch", min=2, max=4096)
    shapes = ({0: batch}, {0: batch}, {0: batch}) if dynamic else None
    module = torch.nn.Module()
    module.forward = layer
    exported = torch.export.export(module, args, dynamic_shapes=shapes)
    assert not launches  # exporting runs nothing
    for module in (exported.module(), exported.run_decompositions().module()):
        assert ops_in(module.graph) == CALLS
        assert torch.equal(module(*args), layer(*args))
        if dynamic:
            longer = tuple(torch.cat([tensor, tensor]) for tensor in args)
            assert torch.equal(module(*longer), layer(*longer))


def training_step(group_ep: str) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """A function whose every kind of gradient comes by a collective, and its float arguments in fp32."""
    (x, ids, *place), _ = replace(VARIANTS[1], dtype=torch.float32).dispatch(0, 1, group_ep)

    def layer(x: torch.Tensor, weights: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        sent = overload("npu_moe_distribute_dispatch_v2")(x, ids, *place, expert_scales=weights)
        rows = (sent[0] * sent[6][:, None], ids, sent[2], sent[4], weights)
        made: torch.Tensor = overload("npu_moe_distribute_combine_v2")(*rows, *place, **local_addends(own))
        return made.sin()

    return layer, (x, VARIANTS[1].weights(0), x.flip(0))


def gradients(layer: Callable[..., torch.Tensor], leaves: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    mine = [leaf.clone().requires_grad_() for leaf in leaves]
    y = layer(*mine)
    y.square().sum().backward()
    return [y.detach(), *(leaf.grad for leaf in mine if leaf.grad is not None)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_of_one_compiled_graph(dynamic: bool, group_ep: str, launches: list[int]) -> None:
    layer, leaves = training_step(group_ep)
    expected, eager = gradients(layer, leaves), [*launches]
    # combine's backward: dispatch, and the weights' gradients home; dispatch's: both gradients home in one.
    assert len(expected) == 4 and eager == [1, 2, 1, 2, 2]
    launches.clear()
    graphs = Graphs()
    found = gradients(torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=graphs.backend), leaves)
    assert launches == eager
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    forward = ["dispatch_v2", "combine_v2"]
    assert [ops_in(module.graph) for module in graphs.graphs] == [forward, ["dispatch_v2", *forward[1:] * 2]]


def test_gradients_of_an_exported_program(group_ep: str) -> None:
    layer, leaves = training_step(group_ep)
    module = torch.nn.Module()
    module.forward = layer
    found = gradients(torch.export.export(module, leaves).module(), leaves)
    assert all(torch.equal(one, other) for one, other in zip(found, gradients(layer, leaves), strict=True))


def test_a_trainable_layer_is_one_graph(group_ep: str) -> None:
    config = MoEConfig(hidden_size=64, moe_intermediate_size=32, num_experts=8, top_k=2)
    dispatcher = MC2Dispatcher(group_ep, 1, 0, num_experts=8)
    layer = MoELayer(config, dispatcher, dtype=torch.float32, trainable=True).init_weights()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = []
    for each in (layer, compiled):
        layer.zero_grad()
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        each(x).square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert len(found[0]) == 4
    for one, other in zip(*found, strict=True):
        assert bool((one != 0).any())
        torch.testing.assert_close(one, other)
