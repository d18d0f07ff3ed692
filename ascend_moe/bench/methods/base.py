"""What every method of the benchmark is: a dispatch and a combine with the contract of our own ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_moe.bench.cases import Case
from ascend_moe.bench.data import Inputs

LIMIT, OURS, PEER = "limit", "ours", "peer"


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        group_ep: name of our communicator.
        mpi: mpi4py's communicator of the same ranks in the same order, None without MPI.
        device: of all tensors; timed here: the CPU.
    """

    rank: int
    world: int
    group_ep: str
    mpi: Any = None
    device: str = "cpu"


@dataclass
class Arrived:
    """What dispatch leaves to this rank's experts: ``count`` rows, by (local expert, source, token, k).

    Attributes:
        rows: (>= count, H) of x's dtype, or int8 codes.
        scales: (>= count,) fp32 of int8 codes, else None.
        counts: (L,) rows a local expert.
        experts: (count,) global expert of each row where it is not told by ``counts``.
    """

    rows: Tensor
    scales: Tensor | None
    counts: Tensor
    handle: Any = None
    experts: Tensor | None = None


class Method(ABC):
    """One way to dispatch and combine. Made for a case on every rank, used in turns with the others."""

    name: str
    kind: str = PEER
    tuned_for_table: bool = False  # its ratio to the limit is compared with the published table's

    def __init__(self, case: Case, place: Place, most_rows: int, rows_out: Tensor) -> None:
        """``most_rows`` arrive at most; ``rows_out`` (most_rows, H): where the experts write, by default."""
        self.case, self.place, self.most_rows, self.rows_out = case, place, most_rows, rows_out

    def ready(self, one: Inputs) -> None:  # noqa: B027  most methods have nothing to do
        """Not timed, before the first call with an entry: what is no part of the method's work."""

    @abstractmethod
    def dispatch(self, one: Inputs) -> Arrived:
        """Timed. Collective."""

    def expert_output(self, arrived: Arrived) -> Tensor:
        """Timed with dispatch: where the experts write their (>= count, H) rows."""
        return self.rows_out

    @abstractmethod
    def combine(self, rows: Tensor, one: Inputs, arrived: Arrived) -> Tensor:
        """Timed. Collective. (BS, H): the weighted sums of the experts' rows."""

    def experts_of(self, arrived: Arrived) -> Tensor:
        """(count,) global expert of each row."""
        if arrived.experts is not None:
            return arrived.experts
        first = self.place.rank * self.case.local_experts
        mine = torch.arange(first, first + self.case.local_experts)
        return torch.repeat_interleave(mine, arrived.counts)

    @classmethod
    def missing(cls, place: Place) -> str:
        """Why this method cannot run here, or ''."""
        return ""
