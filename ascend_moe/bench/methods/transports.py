"""The two libraries under the all-to-all peers: gloo through torch.distributed, MPI through mpi4py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ascend_moe.bench.methods.base import Place

Counts = Sequence[int]


class Gloo:
    """all_to_all_single of the default group."""

    def __init__(self, place: Place) -> None:
        self.world = place.world

    def counts(self, out: Tensor, given: Tensor) -> None:
        """(W * L,) int32 in, the same number out: L for each rank."""
        dist.all_to_all_single(out, given)

    def rows(self, out: Tensor, given: Tensor, received: Counts, sent: Counts) -> None:
        """(n, words) int32 rows: ``sent[d]`` of them to rank d, ``received[s]`` from rank s."""
        dist.all_to_all_single(out, given, list(received), list(sent))


class Mpi:
    """Alltoall and Alltoallv, straight from and into the tensors' memory."""

    def __init__(self, place: Place) -> None:
        from mpi4py import MPI

        self.world, self._comm, self._int = place.world, place.mpi, MPI.INT32_T

    def counts(self, out: Tensor, given: Tensor) -> None:
        part = given.numel() // self.world
        self._comm.Alltoall([given.numpy(), part, self._int], [out.numpy(), part, self._int])

    def rows(self, out: Tensor, given: Tensor, received: Counts, sent: Counts) -> None:
        words = given.size(1)
        self._comm.Alltoallv(self._part(given, sent, words), self._part(out, received, words))

    def _part(self, rows: Tensor, counts: Counts, words: int) -> list[Any]:
        sizes = [count * words for count in counts]
        starts = [sum(sizes[:rank]) for rank in range(self.world)]
        return [rows.numpy(), (sizes, starts), self._int]
