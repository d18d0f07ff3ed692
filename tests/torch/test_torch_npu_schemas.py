"""Schemas of all ops; opcheck, Meta, autograd and the way to torch_npu of the operators of torch_npu_ops."""

from __future__ import annotations

import inspect
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bad_arguments import refused
from torch.utils import _pytree as pytree
from torch_npu_calls import CALLS, OperatorCall, values

from ascend_moe import experts, npu, torch_npu_ops
from ascend_moe.errors import AscendMoeError, LibraryError
from ascend_moe.experts.grouped_matmul import NPU_ONLY
from ascend_moe.native.torch_npu import OLDER
from ascend_moe.ops.registration import NAMESPACE, SCHEMAS, TORCH_NPU_SCHEMAS

ALL_SCHEMAS = {**SCHEMAS, **TORCH_NPU_SCHEMAS}
NAMES = sorted({name.partition(".")[0] for name in TORCH_NPU_SCHEMAS})
COLLECTIVE = {
    "npu_moe_distribute_combine_add_rms_norm", "_npu_distribute_barrier", "npu_alltoallv_gmm", "npu_gmm_alltoallv",
}  # fmt: skip
EACH_CALL = pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.op} {call.label}")


def overload(qualified: str) -> Any:
    name, _, variant = qualified.partition(".")
    return getattr(getattr(torch.ops.ascend_moe, name), variant or "default")


def public(call: OperatorCall) -> Any:
    return getattr(npu, call.op.partition(".")[0])


def flat(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


# ---- names


def test_every_operator_is_called_and_the_absent_ones_are_absent() -> None:
    assert {call.op for call in CALLS} == set(TORCH_NPU_SCHEMAS) - COLLECTIVE
    assert not [name for name in OLDER.more if hasattr(torch.ops.ascend_moe, name)]


@pytest.mark.parametrize("name", sorted({*NAMES, *SCHEMAS}))
def test_public_function_has_the_schemas_arguments_and_explains_them(name: str) -> None:
    """Names, order, kinds and defaults; so that a call with any of them means the same."""
    function = getattr(npu, name)
    parameters = list(inspect.signature(function).parameters.values())
    schema = overload(name)._schema
    assert schema == torch._C.parse_schema(f"{NAMESPACE}::{name}{ALL_SCHEMAS[name]}")
    arguments = schema.arguments
    assert [p.name for p in parameters] == [a.name for a in arguments]
    for parameter, argument in zip(parameters, arguments, strict=True):
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only
        assert (parameter.default is not inspect.Parameter.empty) == argument.has_default_value()
        if argument.has_default_value():
            default = list(parameter.default) if parameter.default == () else parameter.default
            assert default == argument.default_value, parameter.name
        assert ("Tensor" in str(parameter.annotation)) == ("Tensor" in str(argument.type))
    assert function.__name__ == name and name in npu.__all__
    words = set(re.findall(r"\w+", function.__doc__))
    words |= set(NPU_ONLY) if "NPU_ONLY" in words else set()
    assert not {p.name for p in parameters} - words and "Returns" in words


# ---- torch's own checks


@EACH_CALL
def test_opcheck_and_the_public_function(call: OperatorCall) -> None:
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(call.overload(), call.args, call.kwargs, test_utils=tests)
    for one, other in zip(flat(call.run()), flat(public(call)(*call.args, **call.kwargs)), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    given = call.args, call.kwargs
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), given)
    for operator in (call.overload(), public(call)):
        for one, other in zip(flat(call.run()), flat(operator(*args, **kwargs)), strict=True):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())


# ---- gradients

DIFFERENTIABLE = {
    "npu_grouped_matmul float", "npu_grouped_matmul lists", "npu_grouped_matmul.List list", "npu_swiglu 2-D",
    "npu_moe_gating_top_k softmax", "npu_moe_gating_top_k_softmax 2-D",
    "npu_moe_gating_top_k_softmax_v2 softmax out", "npu_moe_gating_top_k_softmax_v2 renorm",
    "npu_moe_token_permute all", "npu_moe_token_permute cut", "npu_moe_token_unpermute weighted",
}  # fmt: skip


def wide(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Float tensors as fresh float32 leaves that want a gradient."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float().clone().requires_grad_() if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(torch.Tensor, leaf, args)  # type: ignore[no-any-return]


@pytest.mark.parametrize("call", [c for c in CALLS if f"{c.op} {c.label}" in DIFFERENTIABLE], ids=str)
def test_gradients_are_those_of_the_public_function(call: OperatorCall) -> None:
    found = []
    for function in (call.overload(), public(call)):
        args = wide(call.args)
        outputs = [out for out in flat(function(*args, **call.kwargs)) if out.is_floating_point()]
        sum((out * torch.arange(out.numel()).reshape(out.shape)).sum() for out in outputs).backward()
        found.append(
            [tree_leave.grad for tree_leave in pytree.tree_leaves(args) if getattr(tree_leave, "requires_grad", False)]
        )
    assert len(found[0]) > 0
    for one, other in zip(*found, strict=True):
        assert one is not None and torch.equal(one, other) and bool((one != 0).any())


def test_numeric_gradients_of_a_round_trip() -> None:
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1]])

    def there_and_back(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        rows, places = torch.ops.ascend_moe.npu_moe_token_permute(x, chosen)
        return torch.ops.ascend_moe.npu_moe_token_unpermute(rows * rows, places, probs)

    x, probs = (torch.randn(3, n, dtype=torch.float64, requires_grad=True) for n in (4, 2))
    with torch.no_grad():
        probs[1, 0] = 0  # a weight of zero still has a gradient
    assert torch.autograd.gradcheck(there_and_back, (x, probs))


@pytest.mark.parametrize("op", ["npu_dynamic_quant", "npu_moe_finalize_routing", "npu_moe_init_routing_v2"])
def test_the_others_say_that_they_have_none(op: str) -> None:
    call = next(call for call in CALLS if call.op == op)
    for operator in (call.overload(), public(call)):
        outputs = operator(*wide(call.args), **call.kwargs)
        graded = [out for out in flat(outputs) if out.requires_grad]
        assert graded
        with pytest.raises(AscendMoeError, match=f"{op} is not differentiable"):
            graded[0].sum().backward()
    with torch.no_grad():
        outputs = call.overload()(*wide(call.args), **call.kwargs)
    assert not flat(outputs)[0].requires_grad


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("ops", [torch.ops.ascend_moe, npu], ids=["torch.ops", "public functions"])
def test_a_chain_compiles_whole(dynamic: bool, ops: Any) -> None:
    matrices = values(4, 8, 6, seed=3).requires_grad_()

    def chain(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        weights, chosen, _ = ops.npu_moe_gating_top_k_softmax_v2(logits, k=2, renorm=1)
        rows, places = ops.npu_moe_token_permute(x, chosen)
        counts = (chosen.flatten()[:, None] == torch.arange(4)).sum(0)
        grouped: dict[str, Any] = {"group_list": counts, "group_type": 0, "group_list_type": 1, "split_item": 2}
        rows = ops.npu_grouped_matmul([rows], [matrices], **grouped)[0]
        return ops.npu_moe_token_unpermute(ops.npu_swiglu(rows), places, weights)

    compiled = torch.compile(chain, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 3):
        x = values(tokens, 8).requires_grad_()
        y = compiled(x, values(tokens, 4, seed=9))
        assert torch.equal(y, chain(x, values(tokens, 4, seed=9)))
        y.sum().backward()
        for leaf in (x, matrices):
            assert leaf.grad is not None and bool((leaf.grad != 0).any())


# ---- the way to an NPU


class OnNpu(torch.Tensor):
    """A host tensor that says it lives on an NPU."""

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="npu")


def test_a_missing_or_old_torch_npu_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 4).as_subclass(OnNpu)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(LibraryError, match="npu_swiglu: a tensor on an NPU needs torch_npu"):
        experts.npu_swiglu(x)
    old = ModuleType("torch_npu")
    old.__version__ = "2.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", old)
    with pytest.raises(LibraryError, match=r"torch_npu 2\.1 has no npu_swiglu"):
        experts.npu_swiglu(x)
    monkeypatch.setattr(torch.ops, "npu", SimpleNamespace(), raising=False)
    with pytest.raises(LibraryError, match="this torch_npu has no npu_swiglu"):
        torch_npu_ops.OPS["npu_swiglu"].npu(torch.ones(2, 4))


def test_tensors_on_two_devices_are_refused() -> None:
    permute, indices = torch_npu_ops.OPS["npu_moe_token_permute"].cpu, torch.empty(3, 2, device="meta")
    refused("indices", permute, values(3, 4), indices, says="indices is on meta")
