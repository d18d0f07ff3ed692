"""All-gather, all-to-all and reduce-scatter of rows: over a process group, or by dispatches over a group's windows.

A dispatch copies bytes unchanged, so any data can be viewed as fp32.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist

from .. import comm
from ..comm.place import Place
from ..errors import need
from . import npu_moe_distribute_dispatch_v2
from .calls import is_two_level
from .npu_communicator import check

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    #: A process group, or a Place: the windows of its group, the only connection in a LocalCluster.
    Group = ProcessGroup | Place

_WORDS = 8  # fp32 columns of the narrowest row: rows are a multiple of 32 bytes
MAX_BATCH = 4096  # of a dispatch: op_host's limit (checked by a test)


def size_of(group: Group) -> int:
    """Return the number of ranks of a process group or of a Place's group."""
    return group.world if isinstance(group, Place) else group.size()


def by_expert(table: Tensor) -> Tensor:
    """Return the index that reorders rows from (rank, expert) to (expert, rank); ``table`` (W, L): numbers of rows."""
    counts, sizes = table.reshape(-1), table.t().reshape(-1)
    starts = (counts.cumsum(0) - counts).view_as(table).t().reshape(-1)
    shift = torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes)
    return shift + torch.arange(shift.numel(), device=table.device)


def gather(rows: Tensor, group: Group) -> Tensor:
    """All-gather: return (W, *rows.shape), every rank's ``rows``, which have the same shape on all ranks."""
    world = size_of(group)
    out = rows.new_empty(world, *rows.shape)
    if rows.numel() == 0:
        return out
    if isinstance(group, Place):
        each = [1] * world
        return exchange(rows.reshape(1, -1).expand(world, -1), each, each, group).view(out.shape)
    if group.name() == "mpi":  # supports the list form only
        dist.all_gather(list(out.unbind(0)), rows.contiguous(), group=group)
    else:
        single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        single(out.view(-1), rows.contiguous().view(-1), group=group)
    return out


def reduce_scatter(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Return (N / W, ...): this rank's part of the sum over all ranks of ``rows`` (N, ...), N a multiple of W."""
    out = rows.new_empty(rows.shape[0] // group.size(), *rows.shape[1:])
    if rows.numel() > 0:
        single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        single(out.view(-1), rows.contiguous().view(-1), group=group)
    return out


def exchange(rows: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """All-to-all of 2-D ``rows``, in rank order: ``send[d]`` rows go to rank d, ``receive[s]`` come from rank s."""
    width = rows.shape[1] * rows.element_size()
    raw = rows.contiguous().view(torch.uint8) if len(rows) else rows.new_empty(0, width, dtype=torch.uint8)
    if isinstance(group, Place):
        arrived = _through_windows(raw, send, receive, group)
    else:
        arrived = raw.new_empty(sum(receive), width)
        dist.all_to_all_single(arrived, raw, receive, send, group=group)
    return arrived.view(rows.dtype) if len(arrived) else rows.new_empty(0, rows.shape[1])


def _through_windows(raw: Tensor, send: list[int], receive: list[int], place: Place) -> Tensor:
    """`exchange` of byte rows on the CPU by dispatches to one expert per rank, in parts that fit into the windows."""
    world = place.world
    window = comm.lookup(place.group_ep, world, place.rank).data_bytes // 4  # leaves room for metadata
    wide = torch.nn.functional.pad(raw, (0, -raw.shape[1] % (4 * _WORDS)))
    words = wide.view(torch.float32)

    def dispatch(rows: Tensor, targets: Tensor, most: int) -> list[Tensor]:
        """Return the rows from each rank; ``most``: limit per rank."""
        given = place.arguments(moe_expert_num=world, global_bs=world * most)
        # The operator itself, so that it stays one in a traced graph.
        sent = torch.ops.ascend_moe.npu_moe_distribute_dispatch_v2(rows, targets[:, None], **given)
        ends = [0, *sent[4][:world].tolist()]
        return [sent[0][first:last] for first, last in itertools.pairwise(ends)]

    everybody = torch.arange(world, dtype=torch.int32, device="cpu")
    sizes_row = torch.full((world, _WORDS), float(max(send)), dtype=torch.float32, device="cpu")
    longest = max(int(each[0, 0]) for each in dispatch(sizes_row, everybody, world))
    share = max(1, min(MAX_BATCH // world, window // (world * world * wide.shape[1])))
    parts: list[list[Tensor]] = [[words[:0]] for _ in range(world)]
    starts = [sum(send[:target]) for target in range(world)]
    for first in range(0, longest, share):
        sizes = [max(0, min(share, count - first)) for count in send]
        rows = [words[start + first :][:size] for start, size in zip(starts, sizes, strict=True)]
        targets = everybody.repeat_interleave(torch.tensor(sizes, device="cpu"))
        for source, came in enumerate(dispatch(torch.cat(rows), targets, world * share)):
            parts[source].append(came.clone())
    arrived = torch.cat([torch.cat(part) for part in parts])
    rule = "are {} rows, but {} arrived; the counts of all ranks must match"
    need(len(arrived) == sum(receive), "recv_counts", rule, sum(receive), len(arrived))
    return arrived.view(torch.uint8)[:, : raw.shape[1]].contiguous()


# ---- a few numbers, on any device


@torch.no_grad()
def gather_rows(words: Tensor, place: Place) -> Tensor:
    """All-gather integers by one dispatch, which needs only the group's windows.

    Args:
        words: ``(n,)`` int32 on the device of the group's windows, the same n on all ranks.

    Returns:
        ``(W, n)`` int32 on that device, by rank; the host does not wait for it.

    Collective, as a dispatch is. Raises as `npu_moe_distribute_dispatch_v2`.
    """
    row = torch.nn.functional.pad(words, (0, -words.numel() % _WORDS))
    rows = row.view(torch.float32).expand(place.world, -1).contiguous()
    # One row for the only expert of each rank.
    ids = torch.arange(place.world, dtype=torch.int32, device=words.device).unsqueeze(1)
    given = place.arguments(moe_expert_num=place.world)
    if is_two_level(""):
        given["expert_scales"] = torch.ones(ids.shape, dtype=torch.float32, device=words.device)
    sent = npu_moe_distribute_dispatch_v2(rows, ids, **given)
    return sent.expand_x[: place.world].view(torch.int32)[:, : words.numel()]


@torch.no_grad()
def gather_words(words: Tensor, place: Place, device: torch.device) -> Tensor:
    """All-gather integers on the CPU, as `gather_rows`.

    Args:
        words: ``(n,)`` int32 on the CPU, the same n on all ranks.
        device: device of the group's windows.

    Returns:
        ``(W, n)`` int32 on the CPU; on an NPU the host waits for it.

    Collective, as a dispatch is. Raises as `npu_moe_distribute_dispatch_v2`, also the errors of an NPU's kernel.
    """
    arrived = gather_rows(words.to(device), place)
    if arrived.device.type != "cpu":
        check(place.group_ep)
    return arrived.cpu()
