"""What torch's modes, tracers, transforms, profilers and subclasses see of a call of the public functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_calls import VARIANTS, Variant, overload

import ascend_moe
from ascend_moe.errors import AscendMoeError

PLAIN = VARIANTS[0]
Each = Callable[[str], None]


@pytest.fixture
def on_a_rank() -> Iterator[Callable[[Each], None]]:
    with ascend_moe.LocalCluster(1) as cluster:
        yield lambda work: cluster.run(lambda _, group_ep: work(group_ep)) and None


def public(variant: Variant = PLAIN) -> Any:
    return getattr(ascend_moe, variant.dispatch_name)


def same(one: Any, other: Any) -> bool:
    pairs = list(zip(one, other, strict=True))
    filled = int(one[4][-1])
    assert all((a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) for a, b in pairs)
    return all(torch.equal(a[:filled], b[:filled]) for a, b in pairs[:3])


def test_however_the_arguments_are_given(on_a_rank: Any) -> None:
    def work(group_ep: str) -> None:
        args, kwargs = PLAIN.dispatch(0, 1, group_ep)
        names = [a.name for a in overload(PLAIN.dispatch_name)._schema.arguments]
        named = dict(zip(names, args, strict=False)) | kwargs
        wanted = public()(*args, **kwargs)
        for given in (named, dict(reversed(named.items())), {**named, "scales": None, "global_bs": 0}):
            rows = public()(**given)
            assert same(wanted, rows)
        held = [sys.getrefcount(value) for value in (*args[:2], *names, None)][:-1]
        for _ in range(100):
            public()(*args, **kwargs)
        assert [sys.getrefcount(value) for value in (*args[:2], *names, None)][:-1] == held

    on_a_rank(work)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, SeenFunctions])
def test_modes_see_the_op(mode: Any, on_a_rank: Any) -> None:
    def work(group_ep: str) -> None:
        args, kwargs = PLAIN.dispatch(0, 1, group_ep)
        wanted = public()(*args, **kwargs)
        with mode() as watching:
            rows = public()(*args, **kwargs)
        assert same(wanted, rows)
        assert overload(PLAIN.dispatch_name) in watching.ops

    on_a_rank(work)


def test_profilers_see_the_op(on_a_rank: Any) -> None:
    def work(group_ep: str) -> None:
        args, kwargs = PLAIN.dispatch(0, 1, group_ep)
        public()(*args, **kwargs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            _ = public()(*args, **kwargs)
        assert any(f"ascend_moe::{PLAIN.dispatch_name}" == event.name for event in profile.events())

    on_a_rank(work)


def test_tracers_get_the_op(on_a_rank: Any) -> None:
    def work(group_ep: str) -> None:
        (x, ids, *place), kwargs = PLAIN.dispatch(0, 1, group_ep)
        public()(x, ids, *place, **kwargs)

        def rows(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = public()(x, ids, *place, **kwargs)[0]
            return made

        def calls(graph: torch.fx.Graph) -> int:
            return sum(node.target is overload(PLAIN.dispatch_name) for node in graph.nodes)

        traced: list[Callable[[], int]] = [
            lambda: calls(torch.fx.symbolic_trace(rows).graph),
            lambda: calls(make_fx(rows)(x, ids).graph),
            lambda: calls(make_fx(rows, tracing_mode="fake")(x, ids).graph),
        ]
        for trace in traced:
            assert trace() == 1
        with FakeTensorMode() as fake:
            fakes = fake.from_tensor(x), fake.from_tensor(ids)
            made = public()(*fakes, *place, **kwargs)
        assert all(isinstance(one, FakeTensor) for one in made)

    on_a_rank(work)


def test_compiled_programs_hold_the_op(on_a_rank: Any) -> None:
    def work(group_ep: str) -> None:
        (x, *rest), kwargs = PLAIN.dispatch(0, 1, group_ep)
        wanted = public()(x, *rest, **kwargs)[0]
        torch._dynamo.reset()
        program = torch.compile(
            lambda x: public()(x, *rest, **kwargs)[0] * 2, fullgraph=True, backend="aot_eager"
        )
        rows = program(x)
        filled = int(public()(x, *rest, **kwargs)[4][-1])
        assert torch.equal(rows[:filled], wanted[:filled] * 2)

    on_a_rank(work)


class Sub(torch.Tensor):
    """Of another type, with nothing of its own."""


class Marked(torch.Tensor):
    asked: list[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Marked.asked.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_go_by_torch(on_a_rank: Any) -> None:
    def work(group_ep: str) -> None:
        (x, *rest), kwargs = PLAIN.dispatch(0, 1, group_ep)
        public()(x, *rest, **kwargs)
        Marked.asked = []
        for kind in (Sub, Marked):
            public()(x.as_subclass(kind), *rest, **kwargs)
        assert overload(PLAIN.dispatch_name) in Marked.asked
        # A parameter is a tensor to every op.
        parameter = torch.nn.Parameter(x, requires_grad=False)
        assert same(public()(parameter, *rest, **kwargs), public()(x, *rest, **kwargs))

    on_a_rank(work)


def test_gradients_and_where_there_are_none(on_a_rank: Any) -> None:
    def work(group_ep: str) -> None:
        (x, *rest), kwargs = PLAIN.dispatch(0, 1, group_ep)
        public()(x, *rest, **kwargs)
        needing = x.clone().requires_grad_()
        rows = public()(needing, *rest, **kwargs)
        assert rows[0].requires_grad
        with pytest.raises(AscendMoeError, match="not differentiable yet"):
            rows[0].float().sum().backward()
        modes: list[tuple[Callable[[], AbstractContextManager[Any]], torch.Tensor]] = [
            (torch.no_grad, needing),
            (torch.inference_mode, needing),
            (nullcontext, x),
            (lambda: torch.autocast("cpu"), x),
        ]
        for mode, given in modes:
            with mode():
                rows = public()(given, *rest, **kwargs)
            assert not rows[0].requires_grad
            assert rows[0].is_inference() == (mode is torch.inference_mode)

    on_a_rank(work)


def test_transforms_are_torchs(on_a_rank: Any) -> None:
    def work(group_ep: str) -> None:
        (x, *rest), kwargs = PLAIN.dispatch(0, 1, group_ep)
        public()(x, *rest, **kwargs)
        batched = torch.stack([x, x])

        def both(call: Any) -> Any:
            return torch.func.vmap(lambda one: call(one, *rest, **kwargs)[4])(batched)

        counts = both(public())
        assert counts.dim() == 2
        assert torch.equal(counts, both(overload(PLAIN.dispatch_name)))

    on_a_rank(work)


def test_wrong_calls_fail_as_torchs(on_a_rank: Any) -> None:
    def work(group_ep: str) -> None:
        args, kwargs = PLAIN.dispatch(0, 1, group_ep)
        public()(*args, **kwargs)
        x, ids, *place = args
        wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((x, ids, None, *place[1:]), kwargs),
            ((None, ids, *place), kwargs),
            ((x, ids, *place[:-1], 2**70), kwargs),
            ((x, ids, *place[:-1], "4"), kwargs),
            (([1.0], ids, *place), kwargs),
            ((x, ids, "\ud800", *place[1:]), kwargs),
            ((x, ids, "no group", *place[1:]), kwargs),
        ]
        for given, named in wrong:
            with pytest.raises(Exception) as theirs:
                overload(PLAIN.dispatch_name)(*given, **named)
            with pytest.raises(type(theirs.value)) as ours:
                public()(*given, **named)
            assert str(ours.value) == str(theirs.value)
        for given, named in (
            (args, {**kwargs, "no_such_argument": 1}),
            (args, {**kwargs, "x": x}),
            ((x,), kwargs),
            ((*args, None), kwargs),
        ):
            with pytest.raises(TypeError, match=rf"^{PLAIN.dispatch_name}\(\) "):
                public()(*given, **named)

    on_a_rank(work)
