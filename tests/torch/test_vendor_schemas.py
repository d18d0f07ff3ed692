"""The vendor operators as torch sees them: schemas, signatures, opcheck, Meta, autograd, the way to NPUs."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from vendor_calls import CALLS, Call, values

from ascend_moe import npu
from ascend_moe import vendor as ops_vendor
from ascend_moe.errors import ArgumentError, AscendMoeError, LibraryError
from ascend_moe.experts.grouped_matmul import NPU_ONLY
from ascend_moe.ops.schemas import NAMESPACE, SCHEMAS
from ascend_moe.vendor.schemas import ABSENT, VENDOR_SCHEMAS

NAMES = sorted({name.partition(".")[0] for name in VENDOR_SCHEMAS})
COLLECTIVE = {"npu_moe_distribute_combine_add_rms_norm", "_npu_distribute_barrier"}
MANY = [pytest.param(call, id=f"{call.op} {call.label}") for call in CALLS]


def overload(qualified: str) -> Any:
    name, _, variant = qualified.partition(".")
    return getattr(getattr(torch.ops.ascend_moe, name), variant or "default")


# ---- names


@pytest.mark.parametrize("name", VENDOR_SCHEMAS)
def test_schema_is_registered_as_written(name: str) -> None:
    assert overload(name)._schema == torch._C.parse_schema(f"{NAMESPACE}::{name}{VENDOR_SCHEMAS[name]}")


def test_every_operator_is_called_and_the_absent_ones_are_absent() -> None:
    assert {call.op for call in CALLS} == set(VENDOR_SCHEMAS) - COLLECTIVE
    assert not [name for name in ABSENT if hasattr(torch.ops.ascend_moe, name) or name in SCHEMAS]


@pytest.mark.parametrize("name", NAMES)
def test_public_function_has_the_schemas_arguments(name: str) -> None:
    """Names, order, kinds and defaults; so that a call with any of them means the same."""
    parameters = list(inspect.signature(getattr(npu, name)).parameters.values())
    arguments = overload(name)._schema.arguments
    assert [p.name for p in parameters] == [a.name for a in arguments]
    for parameter, argument in zip(parameters, arguments, strict=True):
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only
        assert (parameter.default is not inspect.Parameter.empty) == argument.has_default_value()
        if argument.has_default_value():
            default = list(parameter.default) if parameter.default == () else parameter.default
            assert default == argument.default_value, parameter.name


@pytest.mark.parametrize("name", NAMES)
def test_docstring_names_every_argument_and_its_source(name: str) -> None:
    function = getattr(npu, name)
    assert function.__name__ == name and name in npu.__all__
    words = set(re.findall(r"\w+", function.__doc__))
    words |= set(NPU_ONLY) if "NPU_ONLY" in words else set()
    assert not set(inspect.signature(function).parameters) - words
    assert "Source: torch_npu" in function.__doc__ and "Returns:" in function.__doc__
    assert "Error" in function.__doc__ or "errors" in function.__doc__
    assert all(len(line) <= 110 for line in function.__doc__.splitlines())


# ---- torch's own checks


@pytest.mark.parametrize("call", MANY)
def test_opcheck(call: Call) -> None:
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(call.overload(), call.args, call.kwargs, test_utils=tests)


def flat(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def described(outputs: Any) -> list[Any]:
    return [(out.dtype, tuple(out.shape), out.stride()) for out in flat(outputs)]


def moved(value: Any, where: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return where(value)
    return [moved(one, where) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("call", MANY)
def test_cpu_outputs_are_what_meta_says(call: Call) -> None:
    real = described(call.run())
    for where in (lambda tensor: tensor.to("meta"), FakeTensorMode().from_tensor):
        args = [moved(value, where) for value in call.args]
        kwargs = {name: moved(value, where) for name, value in call.kwargs.items()}
        assert described(call.overload()(*args, **kwargs)) == real


@pytest.mark.parametrize("call", MANY)
def test_the_op_and_the_public_function_are_one(call: Call) -> None:
    public = getattr(npu, call.op.partition(".")[0])(*call.args, **call.kwargs)
    for one, other in zip(flat(call.run()), flat(public), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("call", MANY)
def test_traced_with_symbols_the_op_stays_one_node(call: Call) -> None:
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.Tensor)]

    def again(*given: torch.Tensor) -> Any:
        left = list(given)
        take = lambda value: left.pop(0) if isinstance(value, torch.Tensor) else value  # noqa: E731
        args = [take(value) for value in call.args]
        kwargs = {name: take(value) for name, value in call.kwargs.items()}
        return call.overload()(*args, **kwargs)

    graph = make_fx(again, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*tensors)
    nodes = [node for node in graph.graph.nodes if node.target is call.overload()]
    assert len(nodes) == 1
    for one, other in zip(flat(graph(*tensors)), flat(call.run()), strict=True):
        assert torch.equal(one, other)


# ---- gradients

DIFFERENTIABLE = {
    "npu_grouped_matmul float", "npu_grouped_matmul lists", "npu_grouped_matmul.List list", "npu_swiglu 2-D",
    "npu_moe_gating_top_k softmax", "npu_moe_gating_top_k_softmax 2-D",
    "npu_moe_gating_top_k_softmax_v2 softmax out", "npu_moe_gating_top_k_softmax_v2 renorm",
    "npu_moe_token_permute all", "npu_moe_token_permute cut", "npu_moe_token_unpermute weighted",
}  # fmt: skip


def wide(value: Any) -> Any:
    """Float tensors as fresh float32 leaves that want a gradient."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().float().clone().requires_grad_()
    return [wide(one) for one in value] if isinstance(value, list) else value


def leaves(args: list[Any]) -> list[torch.Tensor]:
    lists = (value if isinstance(value, list) else [value] for value in args)
    return [one for values in lists for one in values if isinstance(one, torch.Tensor) and one.requires_grad]


@pytest.mark.parametrize("call", [c for c in CALLS if f"{c.op} {c.label}" in DIFFERENTIABLE], ids=str)
def test_gradients_are_those_of_the_public_function(call: Call) -> None:
    found = []
    for function in (call.overload(), getattr(npu, call.op.partition(".")[0])):
        args = [wide(value) for value in call.args]
        outputs = [out for out in flat(function(*args, **call.kwargs)) if out.is_floating_point()]
        sum((out * torch.arange(out.numel()).reshape(out.shape)).sum() for out in outputs).backward()
        found.append([leaf.grad for leaf in leaves(args)])
    assert len(found[0]) > 0
    for one, other in zip(*found, strict=True):
        assert one is not None and torch.equal(one, other) and bool((one != 0).any())


def test_numeric_gradients_of_the_way_there_and_back() -> None:
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
    outputs = call.overload()(*[wide(value) for value in call.args], **call.kwargs)
    graded = [out for out in flat(outputs) if out.requires_grad]
    assert graded
    with pytest.raises(AscendMoeError, match=f"{op} is not differentiable"):
        graded[0].sum().backward()
    with torch.no_grad():
        assert not flat(call.overload()(*[wide(value) for value in call.args], **call.kwargs))[
            0
        ].requires_grad


def test_a_list_of_outputs_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an NPU, where torch_npu's grouped matmul has no gradient."""
    op = ops_vendor.OPS["npu_grouped_matmul"]
    monkeypatch.setattr(op, "kind", replace(op.kind, differentiable=False))
    call = next(call for call in CALLS if call.op == "npu_grouped_matmul")
    outputs = call.overload()(*[wide(value) for value in call.args], **call.kwargs)
    assert isinstance(outputs, list) and torch.equal(outputs[0].detach(), call.run()[0])
    with pytest.raises(AscendMoeError, match="npu_grouped_matmul is not differentiable"):
        outputs[0].sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_chain_compiles_whole(dynamic: bool) -> None:
    ops = torch.ops.ascend_moe

    def chain(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        weights, chosen, _ = ops.npu_moe_gating_top_k_softmax_v2(logits, k=2, renorm=1)
        rows, places = ops.npu_moe_token_permute(x, chosen)
        return ops.npu_moe_token_unpermute(ops.npu_swiglu(rows), places, weights)

    compiled = torch.compile(chain, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (5, 3):
        x = values(tokens, 8).requires_grad_()
        y = compiled(x, values(tokens, 4, seed=9))
        assert torch.equal(y, chain(x, values(tokens, 4, seed=9)))
        y.sum().backward()
        assert x.grad is not None and bool((x.grad != 0).any())


# ---- refused


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("npu_grouped_matmul", {"antiquant_scale": [values(3, 12)]}, "antiquant_scale"),
    ("npu_grouped_matmul", {"group_type": 2}, "group_type"),
    ("npu_grouped_matmul", {"act_type": 1}, "act_type"),
    ("npu_dynamic_quant", {"dst_type": 16}, "dst_type"),
    ("npu_dynamic_quant", {"dst_type": 290}, "dst_type"),
    ("npu_dynamic_quant", {"quant_mode": "perchannel"}, "quant_mode"),
    ("npu_dequant_swiglu_quant", {"dst_type": 5}, "dst_type"),
    ("npu_dequant_swiglu_quant", {"round_mode": 1}, "round_mode"),
    ("npu_grouped_matmul_swiglu_quant", {"bias": values(3, 12)}, "bias"),
    ("npu_grouped_matmul_swiglu_quant", {"offset": values(3, 12)}, "offset"),
    ("npu_grouped_matmul_swiglu_quant_v2", {"dequant_mode": 2}, "dequant_mode"),
    ("npu_grouped_matmul_swiglu_quant_v2", {"quant_mode": 1}, "quant_mode"),
    ("npu_grouped_matmul_swiglu_quant_v2", {"quant_dtype": 5}, "quant_dtype"),
    ("npu_grouped_matmul_swiglu_quant_v2", {"quant_dtype": 24}, "quant_dtype"),
    ("npu_grouped_matmul_swiglu_quant_v2", {"dequant_dtype": 15}, "dequant_dtype"),
    ("npu_grouped_matmul_swiglu_quant_v2", {"weight_assist_matrix": [values(3, 12)]}, "weight_assist_matrix"),
    ("npu_grouped_matmul_swiglu_quant_v2", {"x_dtype": 296}, "x_dtype"),
    ("npu_grouped_matmul_finalize_routing", {"offset": values(3, 1, 12)}, "offset"),
    ("npu_grouped_matmul_finalize_routing", {"bias": values(3, 12)}, "bias"),
    ("npu_grouped_matmul_finalize_routing", {"dtype": torch.bfloat16}, "dtype"),
    ("npu_grouped_matmul_finalize_routing", {"scale_dtype": 293}, "scale_dtype"),
    ("npu_grouped_matmul_finalize_routing", {"row_index": None}, "row_index"),
    ("npu_grouped_matmul_finalize_routing", {"output_bs": 3}, "row_index"),
    ("npu_moe_gating_top_k", {"input_ids": torch.zeros(7, dtype=torch.int64)}, "input_ids"),
    ("npu_moe_gating_top_k_softmax_v2", {"renorm": 2}, "renorm"),
    ("npu_moe_init_routing_v2", {"quant_mode": 13}, "quant_mode"),
    ("npu_moe_init_routing_v2", {"quant_mode": 2}, "quant_mode"),
    ("npu_moe_init_routing_v2", {"x_dtype": 290}, "x_dtype"),
    ("npu_moe_init_routing_v2", {"expert_num": -1}, "expert_num"),
    ("npu_moe_init_routing_v2", {"active_expert_range": [3, 9]}, "active_expert_range"),
    ("npu_moe_init_routing_v2", {"drop_pad_mode": 1}, "expert_capacity"),
    ("npu_moe_token_permute", {"padded_mode": True}, "padded_mode"),
    ("npu_moe_token_permute", {"num_out_tokens": -99}, "num_out_tokens"),
    ("npu_moe_token_unpermute", {"padded_mode": True}, "padded_mode"),
    ("npu_moe_token_unpermute", {"restore_shape": [7, 16]}, "restore_shape"),
    ("npu_moe_re_routing", {"expert_token_num_type": 0}, "expert_token_num_type"),
    ("npu_moe_re_routing", {"idx_type": 1}, "idx_type"),
    ("npu_moe_re_routing", {"tokens_dtype": 1}, "tokens_dtype"),
    ("npu_moe_update_expert", {"balance_mode": 2}, "balance_mode"),
    ("npu_moe_update_expert", {"local_rank_id": 4}, "local_rank_id"),
    ("npu_moe_update_expert", {"active_mask": torch.ones(7, dtype=torch.bool)}, "active_mask"),
]


@pytest.mark.parametrize(("op", "changed", "argument"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_there_is_refused_by_name(op: str, changed: dict[str, Any], argument: str) -> None:
    call = next(call for call in CALLS if call.op == op)
    with pytest.raises(ArgumentError) as caught:
        call.overload()(*call.args, **call.kwargs | changed)
    assert caught.value.argument == argument
    assert argument in str(caught.value) and "\n" not in str(caught.value)
    call.run()


# ---- the way to an NPU


@pytest.mark.parametrize("name", sorted(set(VENDOR_SCHEMAS) - COLLECTIVE))
def test_npu_tensors_go_to_torch_npus_own_operator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def theirs(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return "theirs"

    base, _, variant = name.partition(".")
    operators = SimpleNamespace(**{base: SimpleNamespace(**{variant or "default": theirs})})
    monkeypatch.setattr(torch.ops, "npu", operators, raising=False)
    assert ops_vendor.OPS[name].npu(1, two=2) == "theirs"
    assert seen == [((1,), {"two": 2})]
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", "PrivateUse1")


def test_a_torch_npu_without_the_operator_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "npu", SimpleNamespace(), raising=False)
    with pytest.raises(LibraryError, match="this torch_npu has no npu_swiglu"):
        ops_vendor.OPS["npu_swiglu"].npu(torch.ones(2, 4))


def test_tensors_on_two_devices_are_refused() -> None:
    with pytest.raises(ArgumentError, match="indices is on meta") as caught:
        ops_vendor.OPS["npu_moe_token_permute"].cpu(values(3, 4), torch.empty(3, 2, device="meta"))
    assert caught.value.argument == "indices"
