"""Dispatch and combine on NPU tensors: checks and plans as on CPU, allocates outputs, queues the launch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ..comm import place
from ..errors import ArgumentError, AscendMoeError, LibraryError, WindowTooSmall
from . import calls, npu_adapter, npu_communicator

# Attributes that one contract has and the other has not, as the operators' definition has them.
_ABSENT: dict[str, Any] = {
    "comm_alg": "",
    "zero_expert_num": 0,
    "copy_expert_num": 0,
    "const_expert_num": 0,
    "out_dtype": 0,
    "group_list_type": 0,
}


def call(
    op_name: str,
    op: int,
    contract: int,
    values: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    attributes: Mapping[str, int | None],
) -> list[torch.Tensor]:
    """Queues one op on the current stream; returns its outputs, which the kernel will write.

    Raises:
        ArgumentError, WindowTooSmall: the call breaks a rule; nothing was queued.
        AscendMoeError: what an earlier op on this communicator found (see ``ascend_moe.check``).
        LibraryError: torch_npu, the adapter, or the operators' CANN package is missing.
    """
    device = _one_device(op_name, tensors)
    npu_adapter.load()
    shapes = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    group_ep = values["group_ep"]
    world, rank = attributes["ep_world_size"] or 0, attributes["ep_rank_id"] or 0
    try:
        plan, end = calls.plan_for(
            op_name,
            op,
            contract,
            group_ep,
            values.get("comm_alg", ""),
            shapes,
            attributes,
            functools.partial(npu_communicator.find, group_ep, world, rank, device, op_name),
            place,
        )
    except WindowTooSmall as error:
        raise _of_own_window(error, group_ep) from None
    assert isinstance(end, npu_communicator.NpuCommunicator)
    with end.lock:
        end.look()
        outputs = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape in plan.outputs]
        _launch(op, contract, values, tensors, outputs, end)
        end.algorithm = plan.algorithm
        end.after_launch()
    return outputs


def _of_own_window(error: WindowTooSmall, group_ep: str) -> WindowTooSmall:
    """The variable does not count for a group that was made with a size of its own: names that option."""
    end = npu_communicator.known(group_ep)
    if end is None or not end.own_buffer:
        return error
    text = str(error).partition(": export HCCL_BUFFSIZE")[0]
    fix = f"make the group with {npu_communicator.OWN_OPTION} = {error.needed_mib} on all ranks"
    return WindowTooSmall(f"{text}: {fix}", **error.details)


def _one_device(op_name: str, tensors: Mapping[str, torch.Tensor]) -> torch.device:
    npu = torch._C._get_privateuse1_backend_name()
    first = next((name for name, tensor in tensors.items() if tensor.device.type == npu), None)
    if first is None:
        name = next(iter(tensors))
        raise ArgumentError(f"{op_name}: {name} is on {tensors[name].device}, not on {npu}", argument=name)
    device = tensors[first].device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ArgumentError(
                f"{op_name}: {name} is on {tensor.device}, {first} on {device}: they must be on one device, "
                f"pass {name}.to('{device}')",
                argument=name,
            )
        if tensor.layout != torch.strided:
            raise ArgumentError(
                f"{op_name}: {name} is a {tensor.layout} tensor, it must be dense: pass {name}.to_dense()",
                argument=name,
            )
    return device


def _launch(
    op: int,
    contract: int,
    values: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    outputs: list[torch.Tensor],
    end: npu_communicator.NpuCommunicator,
) -> None:
    launch = (
        torch.ops.ascend_moe_npu.dispatch if op == calls.OP_DISPATCH else torch.ops.ascend_moe_npu.combine
    )
    named = {**_ABSENT, **values, **{name: tensor.contiguous() for name, tensor in tensors.items()}}
    if "assist_info_for_combine" in named:
        named["expand_idx"] = named["assist_info_for_combine"]
    if named.get("expand_scales") is not None and named["expand_scales"].numel() == 0:
        named["expand_scales"] = None  # how callers say that there are none
    named["comm_alg"] = calls.comm_algorithm(named["comm_alg"])
    named |= {"contract": contract, "window_mib": end.buffer_mib, "timeout_us": end.timeout_us()}
    given = [named[name] for name in _arguments(launch)]
    try:
        launch(*given, *outputs, end.record)
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        if "is not among the operators of this CANN" in text:
            raise LibraryError(text) from error
        if "failed with aclnn status" in text:
            raise AscendMoeError(f"group {end.name!r}, rank {end.rank}: {text}") from error
        raise


@functools.cache
def _arguments(launch: Any) -> tuple[str, ...]:
    """Inputs and attributes of the adapter's op in its order, which is that of the operators' definition."""
    arguments = launch.default._schema.arguments
    return tuple(argument.name for argument in arguments if argument.alias_info is None)
