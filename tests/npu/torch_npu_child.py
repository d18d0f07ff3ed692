"""Runs on the virtual NPU with a libopapi that does nothing: asks torch_npu and us the same; prints JSON.

torch_npu's C++ checks the arguments, allocates the outputs and calls aclnn, which does nothing there; the
outputs' sizes and dtypes are what is asked for. Its Meta kernels are asked beside it.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from typing import Any
from unittest import mock

import torch
import torch_npu
import torch_npu.op_plugin.meta._meta_registrations as registrations
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_npu_cases import PROBES, Case, T, expert_tokens, matrix

from ascend_moe.ops.schemas import ABSENT, SCHEMAS, VENDOR_SCHEMAS

SPACES = {"theirs": "npu", "ours": "ascend_moe"}


def made(value: Any, device: str) -> Any:
    if isinstance(value, T):
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device=device)
    if isinstance(value, (list, tuple)):
        return type(value)(made(one, device) for one in value)
    return value


def overload(namespace: str, op: str) -> Any:
    name, _, variant = op.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), variant or "default")


def answer(namespace: str, case: Case, device: str) -> Any:
    """Dtype, shape and device of every output, or what was raised."""
    kwargs = {name: made(value, device) for name, value in case.kwargs.items()}
    for name in ("output_dtype", "dtype"):
        if isinstance(kwargs.get(name), str):
            kwargs[name] = getattr(torch, kwargs[name])
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            outputs = overload(namespace, case.op)(*made(case.args, device), **kwargs)
    except Exception as error:  # what a Meta kernel raises is its answer
        return {"raised": f"{type(error).__name__}: {error}".splitlines()[0]}
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    found = [[str(one.dtype).removeprefix("torch."), *one.shape] for one in outputs]
    devices = sorted({str(one.device) for one in outputs})
    return {"outputs": found, "devices": devices, "printed": printed.getvalue()}


def ask(case: Case, soc_raises: bool = False) -> dict[str, Any]:
    """What C++, and both sides on Meta and as fake tensors of an NPU, say."""
    # Which SoC it is only one Meta kernel asks, and it needs a device for that: it is told, or told off.
    soc = mock.Mock(side_effect=RuntimeError("a device was asked") if soc_raises else lambda: 220)
    found: dict[str, Any] = {"op": case.op, "call": repr((case.args, case.kwargs)), "known": case.known}
    found |= {"refuses": case.cpp, "cpp": answer("npu", case, "npu:0")}
    with mock.patch.object(registrations, "get_soc_version", soc):
        found["meta"] = {name: answer(space, case, "meta") for name, space in SPACES.items()}
        with FakeTensorMode():
            found["fake"] = {name: answer(space, case, "npu") for name, space in SPACES.items()}
    return found


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # torch logs every error of a Meta kernel, and errors are answers here
    names = {**SCHEMAS, **VENDOR_SCHEMAS}
    everything = {schema.name for schema in torch._C._jit_get_all_schemas()}
    report = {
        "versions": [torch_npu.__version__, torch.__version__],
        "schemas": {
            name: [str(overload(space, name)._schema) for space in SPACES.values()] for name in names
        },
        "overloads": {
            name: [sorted(getattr(getattr(torch.ops, space), name).overloads()) for space in SPACES.values()]
            for name in {name.partition(".")[0] for name in names}
        },
        "present": [name for name in ABSENT if f"npu::{name}" in everything or hasattr(torch_npu, name)],
        "all": sorted(name for name in everything if name.startswith(("npu::", "ascend_moe::"))),
        "cases": [ask(case) for case in matrix()],
        "probes": {name: ask(probe.case, name == "f") for name, probe in PROBES.items()},
        # In a process that made other calls before.
        "expert tokens": [ask(expert_tokens(experts)) for experts in (9, 5, 12)],
    }
    print(json.dumps(report))
