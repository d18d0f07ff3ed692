"""Agreement of the ranks before the one call for a layer sends rows: equal arguments, batches, rows to receive."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_moe._tensors import narrow
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers.mc2 import MC2Dispatcher
from ascend_moe.dispatchers.rows import active_pairs
from ascend_moe.errors import RoutingOverflow, need, need_equal
from ascend_moe.layer_ops.arguments import Experts, Tokens
from ascend_moe.native.torch_npu import on_npu
from ascend_moe.ops.collectives import gather_words
from ascend_moe.ops.npu_communicator import capturing

_TEXT_BYTES = 1024


def agree(values: dict[str, Any], place: Place, device: torch.device) -> None:
    """Raise ConfigMismatch on every rank if a value's repr (64 characters) differs between ranks. Collective."""
    text = json.dumps({field: repr(value)[:64] for field, value in values.items()})
    words = torch.frombuffer(bytearray(text.encode().ljust(_TEXT_BYTES)), dtype=torch.int32)
    everyone = gather_words(words, place, device).contiguous()
    need_equal([json.loads(bytes(row.view(torch.uint8).tolist())) for row in everyone], place.rank)


@dataclass(frozen=True)
class Limit:
    """The most rows that a rank may receive, 0: no limit; and the argument's name."""

    name: str
    rows: int

    def may_be_reached(self, all_tokens: int, tokens: Tokens, experts: Experts) -> bool:
        """Return whether ``all_tokens`` tokens of all ranks together could send one rank more than ``rows`` rows."""
        return 0 < self.rows < all_tokens * min(tokens.ids.shape[1], experts.count)


_HEAD = ("tokens", "limit", "K", "experts a rank")


def gather_loads(dispatcher: MC2Dispatcher, tokens: Tokens, experts: Experts, limit: Limit) -> Tensor:
    """Return (W, 4 + W): each rank's tokens, limit, K and L, and the rows that it sends to each rank. Collective."""
    rule = "of {} can be exceeded, so the host must compare counts, which a graph cannot record: pass a larger one"
    need(not (on_npu(tokens.x) and capturing()), limit.name, rule, limit.rows)
    ids = tokens.ids.cpu()
    active = active_pairs(ids, None if tokens.mask is None else tokens.mask.cpu())
    routed = active & (ids >= 0) & (ids < dispatcher.num_experts)  # dispatch reports other ids
    loads = torch.bincount(ids[routed] // experts.count, minlength=dispatcher.world_size)
    head = torch.tensor([len(ids), limit.rows, ids.shape[1], experts.count], device="cpu")
    words = narrow(limit.name, torch.cat([head, loads]))
    return gather_words(words, dispatcher.place, tokens.x.device)


def judge(table: Tensor, limit: Limit, rank: int) -> int:
    """Return global_bs for the batches in ``table``, from `gather_loads`; 0 if all batches are equal.

    Raises ConfigMismatch if limit, K or L differ, RoutingOverflow if a rank would receive more rows than the limit:
    on every rank, since all have the same table.
    """
    head = table[:, : len(_HEAD)].tolist()
    names = {"limit": limit.name, "K": "K", "experts a rank": "experts a rank"}
    rows = [dict(zip(_HEAD, values, strict=True)) for values in head]
    need_equal([{shown: row[name] for name, shown in names.items()} for row in rows], rank)
    arriving = table[:, len(_HEAD) :].sum(0)
    most = int(arriving.max())
    if 0 < limit.rows < most:
        owner = int(arriving.argmax())
        text = f"{limit.name} is {limit.rows}, but {most} rows go to rank {owner}: pass at least {most} on all ranks, "
        raise RoutingOverflow(text + "or 0 for no limit", rank=owner, owner=owner, rows=most, capacity=limit.rows)
    batches = [row["tokens"] for row in rows]
    return 0 if len(set(batches)) == 1 else len(batches) * max(batches)
