"""The status header that ranks exchange before any row moves, so that all of them raise or none does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist

from ascend_moe.dispatchers.rows import Routing, active_pairs, first_invalid, route
from ascend_moe.errors import ArgumentError, ConfigMismatch, InvalidExpertId, RoutingOverflow

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: int32 words of a header: six fields of the configuration, scales given, error code and three details.
HEADER_WORDS = 16
_FIELDS = ("H", "K", "E", "maxBS", "dtype", "quant_mode")
_SMOOTH = 6
_CODE = 7
_OK, _BAD_ID, _OVERFLOW = 0, 1, 2
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Config:
    """What all ranks must agree on; only ``smooth`` (smoothing scales given) may differ."""

    hidden: int
    topk: int
    experts: int
    max_bs: int
    dtype: torch.dtype
    quant_mode: int
    smooth: bool

    def words(self) -> list[int]:
        numbers = [self.hidden, self.topk, self.experts, self.max_bs]
        return [*numbers, _DTYPES.index(self.dtype), self.quant_mode, int(self.smooth)]


def header(config: Config, problem: tuple[int, ...]) -> Tensor:
    """(HEADER_WORDS,) int32 on the CPU; ``problem`` is what ``plan`` returned."""
    words = [*config.words(), *problem]
    return torch.tensor(words + [0] * (HEADER_WORDS - len(words)), dtype=torch.int32)


def any_smooth(headers: list[list[int]]) -> bool:
    """Whether any rank gave smoothing scales."""
    return any(words[_SMOOTH] for words in headers)


def plan(
    expert_ids: Tensor, mask: Tensor | None, config: Config, world: int
) -> tuple[Routing, tuple[int, ...]]:
    """This rank's routing, and the header words of what is wrong with it (with a bad id, no rows)."""
    active = active_pairs(expert_ids, mask)
    bad = first_invalid(expert_ids, active, config.experts)
    if bad is not None:
        token, k = divmod(bad, config.topk)
        nothing = route(expert_ids, torch.zeros_like(active), config.experts)
        return nothing, (_BAD_ID, token, k, int(expert_ids[token, k]))
    routing = route(expert_ids, active, config.experts)
    local = config.experts // world
    rows = routing.counts.view(world, local).sum(1)
    capacity = config.max_bs * min(config.topk, local)
    over = (rows > capacity).nonzero()
    if over.numel():
        owner = int(over[0])
        return routing, (_OVERFLOW, owner, int(rows[owner]), capacity)
    return routing, (_OK,)


def raise_if_any(headers: list[list[int]], rank: int) -> None:
    """Raises what the headers of all ranks say: a mismatch first, else the lowest rank's error."""
    _raise_mismatch(headers, rank)
    for source, words in enumerate(headers):
        code, *details = words[_CODE:]
        if code == _BAD_ID:
            token, k, expert_id = details[:3]
            experts = words[_FIELDS.index("E")]
            raise InvalidExpertId(
                f"rank {source}: expert_ids[{token}, {k}] is {expert_id}; need -1 or 0..{experts - 1}",
                argument="expert_ids",
                rank=source,
                token=token,
                k=k,
                expert_id=expert_id,
            )
        if code == _OVERFLOW:
            owner, rows, capacity = details[:3]
            raise RoutingOverflow(
                f"rank {source} routes {rows} rows to rank {owner}, more than its capacity of {capacity} "
                "= maxBS * min(K, L); repeat fewer ids in a token or raise global_bs",
                rank=source,
                owner=owner,
                rows=rows,
                capacity=capacity,
            )


def _raise_mismatch(headers: list[list[int]], rank: int) -> None:
    mine = headers[rank]
    for other in range(len(headers)):  # the first rank that differs from this one is named
        for index, name in enumerate(_FIELDS):
            ours, theirs = mine[index], headers[other][index]
            if ours == theirs:
                continue
            shown = [str(_DTYPES[v]).removeprefix("torch.") if name == "dtype" else v for v in (ours, theirs)]
            hint = " (unequal batches need global_bs)" if name == "maxBS" else ""
            raise ConfigMismatch(
                f"{name} is {shown[0]} on rank {rank} but {shown[1]} on rank {other}{hint}; "
                "call with the same value on all ranks",
                field=name,
                rank=other,
                ours=shown[0],
                theirs=shown[1],
            )


def default_group(process_group: ProcessGroup | None) -> ProcessGroup:
    """The given group, or the default one."""
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ArgumentError("no process group; call init_process_group first", argument="process_group")
    return group


def gather(rows: Tensor, group: ProcessGroup) -> Tensor:
    """(W, *rows.shape): every rank's ``rows``, which have the same shape everywhere."""
    out = rows.new_empty(group.size(), *rows.shape)
    if rows.numel() == 0:
        return out
    if group.name() == "mpi":  # has the list form only
        dist.all_gather(list(out.unbind(0)), rows.contiguous(), group=group)
    else:
        single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        single(out.view(-1), rows.contiguous().view(-1), group=group)
    return out


def exchange(words: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """All-to-all of rows: ``send[d]`` rows go to rank d, ``receive[s]`` come from rank s, in rank order."""
    out = words.new_empty(sum(receive), words.size(1))
    dist.all_to_all_single(out, words.contiguous(), receive, send, group=group)
    return out
