"""Runs on the virtual NPU: every case on CPU and npu:0, and which operators that called; prints JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch_npu
from vendor_calls import CALLS, Call
from vnpu_operator_cases import Case, calls, cases, difference

from ascend_moe.errors import AscendMoeError
from ascend_moe.vnpu import operators


def to_npu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # .npu() makes a dense copy: strides are laid out anew, so that the operator sees them.
        moved = value.contiguous().npu()
        if value.is_contiguous():
            return moved
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="npu").copy_(moved)
    return [to_npu(one) for one in value] if isinstance(value, list) else value


def tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def run(case: Case) -> str:
    expected = tensors(case.run(*case.inputs))
    found = tensors(case.run(*(to_npu(value) for value in case.inputs)))
    # equal and allclose answer on the host; everything else must have stayed on the device
    if found[0].device.type != "npu" and case.name not in ("equal", "allclose"):
        return f"the result is on {found[0].device}"
    return difference(expected, [tensor.cpu() for tensor in found], case.exact)


def run_call(call: Call) -> str:
    """Our op on NPU tensors, which is torch_npu's own; only what an NPU defines is compared."""
    kwargs = {name: to_npu(value) for name, value in call.kwargs.items()}
    found = tensors(call.overload()(*[to_npu(value) for value in call.args], **kwargs))
    if {tensor.device.type for tensor in found} != {"npu"}:
        return "a result is not on the NPU"
    expected = tensors(call.run())
    for number, row in call.undefined.items():
        for side in (expected, found):
            side[number] = side[number][:row] if row else torch.empty(0)
    return difference(expected, [tensor.cpu() for tensor in found], False)


def verdict(function: Any, case: Any) -> str:
    try:
        return str(function(case))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def leaf(value: Any) -> Any:
    """Float tensors as fresh leaves that want a gradient."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return [leaf(one) for one in value] if isinstance(value, list) else value


def gradient(op: str, device: str) -> Any:
    """Sums of the gradients of the float arguments, or what the backward pass raised."""
    call = next(call for call in CALLS if call.op == op)
    args = [leaf(to_npu(value) if device == "npu" else value) for value in call.args]
    kwargs = {name: to_npu(value) if device == "npu" else value for name, value in call.kwargs.items()}
    try:
        graded = [out for out in tensors(call.overload()(*args, **kwargs)) if out.requires_grad]
        graded[0].float().square().sum().backward()
    except AscendMoeError as error:
        return f"{type(error).__name__}: {error}"
    leaves = [one for value in args for one in (value if isinstance(value, list) else [value])]
    grads = [one.grad for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
    return [None if grad is None else float(grad.float().abs().sum().cpu()) for grad in grads]


def record_operators() -> set[str]:
    """The names of the aclnn functions that are called from now on."""
    called: set[str] = set()
    run_one = operators.run

    def recorded(name: str, address: int, count: int) -> str:
        called.add(name)
        return run_one(name, address, count)

    operators.run = recorded
    return called


if __name__ == "__main__":
    called = record_operators()
    found = {case.name: verdict(run, case) for case in cases()}
    answers = {f"{call.op}, {call.label}": verdict(run_call, call) for call in calls()}
    torch_npu.npu.synchronize()
    graded = ("npu_grouped_matmul", "npu_swiglu", "npu_dynamic_quant", "npu_moe_token_permute")
    gradients = {op: [gradient(op, device) for device in ("npu", "cpu")] for op in graded}
    print(json.dumps({"found": found, "calls": answers, "gradients": gradients, "called": sorted(called)}))
