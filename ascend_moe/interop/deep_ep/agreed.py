"""Tells the ranks of normal mode, before rows move, how many tokens each has, and of an id that is none."""

from __future__ import annotations

import torch
from torch import Tensor

from ascend_moe.comm.place import Place
from ascend_moe.errors import InvalidExpertId
from ascend_moe.ops.collectives import gather_rows


def head(own: int, topk_idx: Tensor | None, experts: int, device: torch.device) -> Tensor:
    """A rank's tokens; 1 + the flat place of its first id that is none, or 0; and that id, its 32 low bits first."""
    tokens = torch.full((1,), own, dtype=torch.int32, device=device)
    if topk_idx is None:
        return torch.cat([tokens, tokens.new_zeros(3)])
    ids = torch.nn.functional.pad(topk_idx.reshape(-1).long(), (1, 0), value=-1)
    wrong = (ids < -1) | (ids >= experts)
    place = torch.where(wrong.any(), wrong.to(torch.uint8).argmax(), 0).reshape(1)
    return torch.cat([tokens, place.to(torch.int32), ids[place].view(torch.int32)])


def most_tokens(heads: Tensor, topk_idx: Tensor | None, experts: int) -> int:
    """The largest number of tokens of a rank, of every rank's head. Read on the host.

    Raises:
        InvalidExpertId: on every rank, of the first rank's id that is none, as it was given.
    """
    table = heads.tolist()
    for rank, (_, place, low, high) in enumerate(table):
        if place and topk_idx is not None:
            token, k = divmod(place - 1, topk_idx.shape[1])
            expert_id = high * 2**32 + low % 2**32
            text = f"dispatch: rank {rank}, token {token}, k {k} has expert id {expert_id}; need -1 or 0..{experts - 1}"
            found = {"rank": rank, "token": token, "k": k, "expert_id": expert_id}
            raise InvalidExpertId(text, argument="topk_idx", **found)
    return max(int(words[0]) for words in table)


def most_tokens_of(place: Place, own: int, topk_idx: Tensor, experts: int) -> int:
    """The same of what the ranks have told each other. Collective."""
    return most_tokens(gather_rows(head(own, topk_idx, experts, topk_idx.device), place), topk_idx, experts)
