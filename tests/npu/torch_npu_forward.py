"""Runs where torch_npu has a device, virtual or not: vendor operators on NPU tensors, beside the CPU's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch_npu
from vendor_calls import CALLS, Call

from ascend_moe.errors import AscendMoeError


def moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [moved(one, device) for one in value] if isinstance(value, list) else value


def flat(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def same(call: Call, index: int, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Integers exactly, floats but for rounding, and only what an NPU defines."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    rows = call.undefined.get(index)
    if rows == 0:
        return True
    if rows is not None:
        found, expected = found[:rows], expected[:rows]
    if expected.is_floating_point():
        return torch.allclose(found.float(), expected.float(), rtol=1e-3 if expected.itemsize == 2 else 1e-5)
    return torch.equal(found, expected)


def forward(call: Call) -> dict[str, Any]:
    found: dict[str, Any] = {"op": call.op, "label": call.label}
    kwargs = {name: moved(value, "npu:0") for name, value in call.kwargs.items()}
    try:
        outputs = flat(call.overload()(*[moved(value, "npu:0") for value in call.args], **kwargs))
        torch_npu.npu.synchronize()
    except Exception as error:  # what torch_npu says of the operator is the answer
        return found | {"raised": f"{type(error).__name__}: {error}".splitlines()[0]}
    pairs = zip(outputs, flat(call.run()), strict=True)
    equal = [same(call, index, one.cpu(), other) for index, (one, other) in enumerate(pairs)]
    return found | {"devices": sorted({str(one.device) for one in outputs}), "equal": equal}


def leaf(value: Any) -> Any:
    """Float tensors as fresh leaves that want a gradient."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return [leaf(one) for one in value] if isinstance(value, list) else value


def gradient(call: Call, device: str) -> Any:
    """Sums of the gradients of the float arguments, or what the backward pass raised."""
    args = [leaf(moved(value, device)) for value in call.args]
    kwargs = {name: moved(value, device) for name, value in call.kwargs.items()}
    try:
        graded = [out for out in flat(call.overload()(*args, **kwargs)) if out.requires_grad]
        graded[0].float().square().sum().backward()
    except AscendMoeError as error:
        return f"{type(error).__name__}: {error}"
    leaves = [one for value in args for one in (value if isinstance(value, list) else [value])]
    grads = [one.grad for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
    return [None if grad is None else float(grad.float().abs().sum().cpu()) for grad in grads]


GRADIENTS = ("npu_grouped_matmul", "npu_swiglu", "npu_dynamic_quant", "npu_moe_token_permute")


def main(target: str) -> int:
    first = [next(call for call in CALLS if call.op == op) for op in GRADIENTS]
    gradients = {call.op: [gradient(call, device) for device in ("npu:0", "cpu")] for call in first}
    report = {"calls": [forward(call) for call in CALLS], "gradients": gradients}
    Path(target).write_text(json.dumps(report), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
