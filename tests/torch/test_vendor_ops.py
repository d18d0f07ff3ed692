"""On NPU tensors the expert and routing operators are torch_npu's, and nothing reads them on the host."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vendor_calls import CALLS, Call

from ascend_moe import experts, routing
from ascend_moe import npu as operators
from ascend_moe.errors import LibraryError


class OnNpu(torch.Tensor):
    """A host tensor that says it lives on an NPU and refuses to be read."""

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="npu")

    def tolist(self) -> Any:
        raise AssertionError("host sync")

    item = __bool__ = __int__ = __index__ = cpu = numpy = tolist


def npu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnNpu)


def host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.as_subclass(torch.Tensor)
    return [host(entry) for entry in value] if isinstance(value, (list, tuple)) else value


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """A torch_npu whose operators are ours on host copies, and the list of calls that reached it."""
    log: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    module = ModuleType("torch_npu")

    def operator(name: str, ours: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            log.append((name, args, kwargs))
            result = ours(*host(args), **{key: host(value) for key, value in kwargs.items()})
            return npu(result) if isinstance(result, torch.Tensor) else type(result)(map(npu, result))

        return run

    for owner in (experts, routing):
        for name in dir(owner):
            if name.startswith("npu_"):
                setattr(module, name, operator(name, getattr(owner, name)))
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return log


def test_the_mlp_is_torch_npus_chain(calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
    x, gate_up, down = torch.randn(6, 8), torch.randn(2, 8, 12), torch.randn(2, 6, 8)
    sums = torch.tensor([2, 5])
    expected = experts.grouped_mlp(x, gate_up, down, sums, group_list_type=0)
    on_device = npu(sums)
    y = experts.grouped_mlp(npu(x), npu(gate_up), npu(down), on_device, group_list_type=0)
    assert torch.equal(host(y), expected)
    assert [name for name, _, _ in calls] == ["npu_grouped_matmul", "npu_swiglu", "npu_grouped_matmul"]
    first = calls[0][2]
    assert first["group_list"] is on_device and first["group_list_type"] == 0
    assert first["split_item"] == 2 and first["group_type"] == 0
    assert not {"scale", "x_dtype", "output_dtype"} & set(first)  # None is left out


def test_the_w8a8_mlp_is_torch_npus_chain(calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
    codes, dynamic_scales = experts.npu_dynamic_quant(torch.randn(6, 8))
    gate_up, gate_up_scale = experts.quantize_weight(torch.randn(2, 8, 12))
    down, down_scale = experts.quantize_weight(torch.randn(2, 6, 8))
    for list_type, numbers in ((1, [2, 3]), (0, [2, 5])):
        tensors = (codes, gate_up, down, torch.tensor(numbers))
        scales = {
            "dynamic_scales": dynamic_scales,
            "w_gate_up_scale": gate_up_scale,
            "w_down_scale": down_scale,
        }
        expected = experts.grouped_mlp(*tensors, group_list_type=list_type, **scales)
        calls.clear()
        y = experts.grouped_mlp(
            *map(npu, tensors), group_list_type=list_type, **{name: npu(s) for name, s in scales.items()}
        )
        assert torch.equal(host(y), expected)
        assert [name for name, _, _ in calls] == [
            "npu_grouped_matmul", "npu_dequant_swiglu_quant", "npu_grouped_matmul"
        ]  # fmt: skip
        first, middle, last = (kwargs for _, _, kwargs in calls)
        assert first["split_item"] == 3 and first["output_dtype"] == torch.int32 and "scale" not in first
        assert host(middle["group_index"]).tolist() == [2, 3]
        assert middle["activate_left"] is True and middle["quant_mode"] == 1
        assert not {"swiglu_mode", "clamp_limit", "glu_alpha", "glu_bias", "dst_type"} & set(middle)
        assert last["output_dtype"] == torch.bfloat16 and len(last["per_token_scale"]) == 1


def test_every_operator_goes_to_torch_npu(calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
    x = torch.randn(5, 16)
    for call in (
        lambda t: experts.npu_swiglu(t, 0 if t.shape[0] % 2 == 0 else -1),
        lambda t: experts.npu_dynamic_quant(t, quant_mode="pertensor")[0],
        lambda t: experts.npu_dequant_swiglu_quant(t, quant_mode=1, swiglu_mode=2, clamp_limit=2.0)[0],
        lambda t: routing.npu_moe_gating_top_k(t, 3, norm_type=1)[0],
        lambda t: routing.npu_moe_gating_top_k_softmax(t, k=3)[0],
        lambda t: routing.softmax_topk(t, 3, True)[0],
        lambda t: routing.deepseek_v2(t, 3, 4, 2)[0],
        lambda t: routing.deepseek_v3(t, None, 3, 4, 2, False, 2.0)[0],
    ):
        expected = call(x)
        calls.clear()
        assert torch.equal(host(call(npu(x))), expected)
        assert len(calls) == 1


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.op} {call.label}")
def test_every_vendor_operator_passes_what_torch_npus_schema_takes(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_npu's functions are stood in for by ops of its own schemas, which check every argument's type."""
    seen: list[str] = []

    def of_schema(name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            op = getattr(torch.ops.ascend_moe, name)
            return moved(op(*host(args), **{key: host(value) for key, value in kwargs.items()}), npu)

        return run

    def on(tensor: torch.Tensor) -> bool:
        return isinstance(tensor, OnNpu)

    def moved(value: Any, where: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return where(value)
        return [moved(one, where) for one in value] if isinstance(value, (list, tuple)) else value

    name = call.op.partition(".")[0]
    module = ModuleType("torch_npu")
    setattr(module, name, of_schema(name))
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    public = getattr(operators, name)
    expected = public(*call.args, **call.kwargs)
    kwargs = {key: moved(value, npu) for key, value in call.kwargs.items()}
    found = public(*[moved(value, npu) for value in call.args], **kwargs)
    assert seen == [name]
    found = found if isinstance(expected, (list, tuple)) else [found]
    expected = expected if isinstance(expected, (list, tuple)) else [expected]
    for one, other in zip(found, expected, strict=True):
        assert on(one) and torch.equal(host(one), other)


def test_a_missing_torch_npu_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(LibraryError, match="npu_swiglu: a tensor on an NPU needs torch_npu"):
        experts.npu_swiglu(npu(torch.ones(2, 4)))
    old = ModuleType("torch_npu")
    old.__version__ = "2.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", old)
    with pytest.raises(LibraryError, match=r"torch_npu 2\.1 has no npu_swiglu"):
        experts.npu_swiglu(npu(torch.ones(2, 4)))
