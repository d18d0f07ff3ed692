"""Runs under ``ascend-moe vnpu``: all cases on CPU and npu:0; prints ``{name: "" or what differs}``."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch_npu
from vnpu_operator_all_cases import cases
from vnpu_operator_cases import Case, difference
from vnpu_operator_moe_cases import MoeCase, moe_cases

from ascend_moe import npu
from ascend_moe.vendor import permute, routing
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
    found = [result] if isinstance(result, torch.Tensor) else list(result)
    return [one.cpu() for one in found]


def run(case: Case) -> str:
    expected = tensors(case.run(*case.inputs))
    on_device = case.run(*(to_npu(value) for value in case.inputs))
    first = on_device if isinstance(on_device, torch.Tensor) else on_device[0]
    # equal and allclose answer on the host; everything else must have stayed on the device
    if first.device.type != "npu" and case.name not in ("equal", "allclose"):
        return f"the result is on {first.device}"
    return difference(expected, tensors(on_device), case.exact)


def ours(name: str) -> Any:
    return next(getattr(module, name) for module in (npu, routing, permute) if hasattr(module, name))


def run_moe(case: MoeCase) -> str:
    expected = tensors(ours(case.operator)(*case.args, **case.kwargs))
    arguments = {name: to_npu(value) for name, value in case.kwargs.items()}
    found = tensors(getattr(torch_npu, case.operator)(*(to_npu(one) for one in case.args), **arguments))
    looked_at = range(len(expected)) if case.looked_at is None else case.looked_at
    pairs = [(expected[number], found[number]) for number in looked_at]
    if case.used is not None:
        pairs = [(want[: case.used], have[: case.used]) for want, have in pairs]
    return difference([want for want, _ in pairs], [have for _, have in pairs])


def verdict(case: Case | MoeCase) -> str:
    try:
        return run(case) if isinstance(case, Case) else run_moe(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


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
    chosen: list[Case] | list[MoeCase] = moe_cases() if sys.argv[1] == "moe" else cases()
    print(json.dumps({"found": {case.name: verdict(case) for case in chosen}, "called": sorted(called)}))
