"""The ids of a dispatch, compared with those that the combine of the pair is given.

Combine itself compares only how many rows each expert had: with ids permuted within equal counts it adds other rows.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from ..errors import need


def _routed(ids: Tensor, mask: Tensor | None) -> Tensor:
    """A copy of the ids, -1 where the mask is False."""
    if mask is None:
        return ids.detach().clone()
    return torch.where(mask if mask.dim() == 2 else mask.unsqueeze(1), ids.detach(), -1)


_StorageWeakRef: Any = reductions.StorageWeakRef  # lets the memory go, and no other storage gets its identity


def _or_nobody(ids: Tensor, given: Tensor, sent: Tensor) -> Tensor:
    """The ids, or -1 for all where the two differ: then combine's counts differ too, and it says so."""
    return torch.where((given == sent).all(), ids, -1)


class SentIds:
    """Keeps a copy of a dispatch's ids, 4 bytes a pair. Nothing is read on the host for NPU tensors."""

    def __init__(self, ids: Tensor, mask: Tensor | None = None) -> None:
        self._ids = _routed(ids, mask)

    def checked(self, argument: str, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """The ids for the combine. On an NPU, where they are not the dispatch's, -1: combine raises RoutingMismatch.

        Raises:
            ArgumentError: on the CPU: a pair has another expert than it had in dispatch.
        """
        same = (ids.shape, ids.dtype, ids.device) == (self._ids.shape, self._ids.dtype, self._ids.device)
        if not same or not (mask is None or (mask.dtype == torch.bool and mask.shape in (ids.shape, ids.shape[:1]))):
            return ids  # the op refuses them
        given = _routed(ids, mask)
        if ids.device.type != "cpu":
            return _or_nobody(ids, given, self._ids)
        if not torch.equal(given, self._ids):
            token, k = (given != self._ids).nonzero()[0].tolist()
            rule = (
                "of token {}, k {} is {}, which dispatch had as {} (-1: not routed); pass the dispatch's own ids and "
            )
            rule += "mask, unchanged"
            need(False, argument, rule, token, k, int(given[token, k]), int(self._ids[token, k]))
        return ids


class Pairs:
    """The ids of the dispatches whose results live, by the tensor that combine is given back.

    That is assist_info_for_combine, or V1's expand_idx. A copy of it is unknown, and its combine is not compared.
    ``kept`` is the same dictionary for good, which every call looks at: it is empty unless ids are compared.
    """

    def __init__(self) -> None:
        self.kept: dict[Any, SentIds] = {}
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self.kept.clear()

    def sent(self, index: Tensor, ids: Tensor, mask: Tensor | None = None) -> None:
        """Keep the ids of a dispatch until ``index``, which it has returned, is gone."""
        sent = SentIds(ids, mask)
        with self._lock:
            for key in [key for key in self.kept if key.expired()]:
                del self.kept[key]
            self.kept[_StorageWeakRef(index.untyped_storage())] = sent

    def checked(self, argument: str, index: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """`SentIds.checked` of the dispatch that has returned ``index``; the ids where that is not known."""
        with self._lock:
            kept = self.kept.get(_StorageWeakRef(index.untyped_storage()))
        return ids if kept is None else kept.checked(argument, ids, mask)
