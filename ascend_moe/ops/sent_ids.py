"""Comparison of combine's ids with those of its dispatch.

Combine itself compares only the number of rows per expert: with ids permuted within equal counts it would add wrong
rows.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from ..errors import need


def _routed(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return a copy of the ids with -1 where the mask is False."""
    if mask is None:
        return ids.detach().clone()
    return torch.where(mask if mask.dim() == 2 else mask.unsqueeze(1), ids.detach(), -1)


_StorageWeakRef: Any = reductions.StorageWeakRef  # frees the memory, but its identity is not reused


def _or_nobody(ids: Tensor, given: Tensor, sent: Tensor) -> Tensor:
    """Return the ids, or -1 for all if the two differ, so that combine's own check of counts fails."""
    return torch.where((given == sent).all(), ids, -1)


class SentIds:
    """A copy of a dispatch's expert ids, -1 where its mask is False. The host does not wait for NPU tensors."""

    def __init__(self, ids: Tensor, mask: Tensor | None = None) -> None:
        self._ids = _routed(ids, mask)

    def checked(self, argument: str, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return ``ids`` of a combine; if they differ from the dispatch's, on an NPU all -1, so that combine fails.

        Ids of another shape, dtype or device are returned unchanged, for the op to refuse.

        Raises:
            ArgumentError: on the CPU: an id differs from dispatch's. ``argument``: name of ``ids`` in its text.
        """
        same = (ids.shape, ids.dtype, ids.device) == (self._ids.shape, self._ids.dtype, self._ids.device)
        if not same or not (mask is None or (mask.dtype == torch.bool and mask.shape in (ids.shape, ids.shape[:1]))):
            return ids  # the op raises the error
        given = _routed(ids, mask)
        if ids.device.type != "cpu":
            return _or_nobody(ids, given, self._ids)
        if not torch.equal(given, self._ids):
            token, k = (given != self._ids).nonzero()[0].tolist()
            rule = "of token {}, k {} is {}, which dispatch had as {} (-1: not routed); pass dispatch's ids and mask"
            need(False, argument, rule, token, k, int(given[token, k]), int(self._ids[token, k]))
        return ids


class SentIdStore:
    """The expert ids of dispatches, each by its result assist_info_for_combine (V1: expand_idx) while that exists.

    A combine that receives a copy of that tensor is not compared. ``stored`` is one dictionary for the life of the
    process; it is empty unless ids are compared.
    """

    def __init__(self) -> None:
        self.stored: dict[Any, SentIds] = {}
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self.stored.clear()

    def add(self, index: Tensor, ids: Tensor, mask: Tensor | None = None) -> None:
        """Store a dispatch's ids, -1 where ``mask`` is False, for the lifetime of the ``index`` that it returned."""
        sent = SentIds(ids, mask)
        with self._lock:
            for key in [key for key in self.stored if key.expired()]:
                del self.stored[key]
            self.stored[_StorageWeakRef(index.untyped_storage())] = sent

    def checked(self, argument: str, index: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run `SentIds.checked` for the dispatch that returned ``index``; return ``ids`` if none is stored for it."""
        with self._lock:
            sent = self.stored.get(_StorageWeakRef(index.untyped_storage()))
        return ids if sent is None else sent.checked(argument, ids, mask)
