"""_npu_distribute_barrier: no rank goes on before all have come. A dispatch of no tokens, on both devices.

On an NPU it runs on our kernels too, not on CANN's: CANN's would write its flags over the windows of the
group, in which ours keep theirs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ascend_moe import comm
from ascend_moe._torch_npu import on_npu
from ascend_moe.comm.communicator import timeout_s
from ascend_moe.ops import calls as native
from ascend_moe.ops.schemas import NAMESPACE
from ascend_moe.vendor.checks import need, need_dtype, need_unset

_DISPATCH = "npu_moe_distribute_dispatch_v2"
_HIDDEN, _TOPK = 16, 1  # of a call without tokens: any values that keep the rules, the same on all ranks


def _npu_distribute_barrier(
    x_ref: torch.Tensor,
    group: str,
    world_size: int,
    *,
    time_out: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
) -> torch.Tensor:
    """Wait until every rank of the group has called it; pass x_ref through.

    Args:
        x_ref: any tensor: what must not be used before all ranks have come.
        group: name of the EP group, as group_ep of dispatch; it may be the same group.
        world_size: its number of ranks.
        time_out: int32 ``(1,)``, microseconds to wait for the others, above 0; CPU only. None:
            ASCEND_MOE_TIMEOUT_S, which also bounds the opening of the group's windows on first use.
        elastic_info: must be None.

    Returns:
        a copy of x_ref.

    Collective, and ordered with dispatch and combine of the same group: a rank that calls one of those
    instead is ConfigMismatch, named. On an NPU it is asynchronous, as they are: the device waits, and the
    next op or ``ascend_moe.check`` raises.

    Raises:
        ArgumentError: this rank's arguments.
        CommTimeout, PeerLost: a rank did not come, or is gone; the communicator must be closed.

    Source: torch_npu ``_npu_distribute_barrier``.
    """
    need_unset(elastic_info=elastic_info)
    found = comm.place(group)
    rule = f"of {group!r} names no live communicator: use ascend_moe.comm_name(process_group)"
    if found is None:
        need(False, "group", rule)
        raise AssertionError  # need has raised
    world, rank = found
    need(world_size == world, "world_size", f"is {world_size} but group {group!r} has {world} ranks")
    if rank is None:
        need(False, "group", f"of {group!r} is a LocalCluster's: call it in the thread of a rank")
        raise AssertionError  # need has raised
    if on_npu(x_ref):
        need(time_out is None, "time_out", "is kept on the CPU only: set ASCEND_MOE_TIMEOUT_S instead")
        rows = x_ref.new_empty((0, _HIDDEN), dtype=torch.bfloat16)
        ids = x_ref.new_empty((0, _TOPK), dtype=torch.int32)
        getattr(torch.ops.ascend_moe, _DISPATCH)(rows, ids, group, world, rank, world)
    else:
        _meet(group, world, rank, _microseconds(time_out))
    return x_ref.clone(memory_format=torch.contiguous_format)


def _microseconds(time_out: torch.Tensor | None) -> int:
    if time_out is None:
        return int(timeout_s() * 1e6)
    need(time_out.numel() == 1, "time_out", f"is {tuple(time_out.shape)}; it must be (1,)")
    need_dtype("time_out", time_out, torch.int32)
    value = int(time_out)
    need(value > 0, "time_out", f"is {value}; it must be above 0 microseconds")
    return value


@functools.cache
def _attributes() -> dict[str, int | None]:
    """Integer attributes of dispatch, with their defaults."""
    schema: Any = getattr(getattr(torch.ops, NAMESPACE), _DISPATCH).default._schema
    return {one.name: one.default_value for one in schema.arguments if "int" in str(one.type)}


def _meet(group: str, world: int, rank: int, deadline: int) -> None:
    communicator = comm.lookup(group, world, rank)
    attributes = _attributes() | {"ep_world_size": world, "ep_rank_id": rank, "moe_expert_num": world}
    inputs = {
        "x": torch.empty(0, _HIDDEN, dtype=torch.bfloat16),
        "expert_ids": torch.empty(0, _TOPK, dtype=torch.int32),
    }
    shapes = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in inputs.items())
    spec = native.describe(native.OP_DISPATCH, 2, group, "", shapes, attributes)
    native.place_at(spec, communicator)
    spec.cores, spec.deadline_micros = native.core_count(), deadline
    native.run(native.Plan("_npu_distribute_barrier", spec, shapes), communicator, inputs)
