"""What every method of the benchmark is: a dispatch and a combine with the contract of our own ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_moe.bench.cases import Case, Inputs

LIMIT, OURS, PEER = "limit", "ours", "peer"


@dataclass(frozen=True)
class Place:
    """Where a rank runs: ``group_ep`` names our communicator, ``mpi`` is mpi4py's of the same ranks."""

    rank: int
    world: int
    group_ep: str
    mpi: Any = None


@dataclass
class Arrived:
    """What dispatch leaves to this rank's experts: ``count`` rows, by (local expert, source, token, k).

    Attributes:
        rows: (>= count, H) of x's dtype, or int8 codes.
        scales: (>= count,) fp32 of int8 codes, else None.
        counts: (L,) rows a local expert.
        handle: what the method's combine needs.
        experts: (count,) global expert of each row where ``counts`` does not tell.
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
    needs_mpi: bool = False

    def __init__(self, case: Case, place: Place, most_rows: int, rows_out: Tensor) -> None:
        """``most_rows`` arrive at most; ``rows_out`` (most_rows, H): where the experts write, by default."""
        self.case, self.place, self.most_rows, self.rows_out = case, place, most_rows, rows_out

    def ready(self, inputs: Inputs) -> None:  # noqa: B027  most methods have nothing to do
        """Not timed, before the first call with these inputs: what is no part of the method's work."""

    @abstractmethod
    def dispatch(self, inputs: Inputs) -> Arrived:
        """Timed. Collective."""

    def expert_output(self) -> Tensor:
        """Timed with dispatch: where the experts write their (>= count, H) rows."""
        return self.rows_out

    @abstractmethod
    def combine(self, rows: Tensor, inputs: Inputs, arrived: Arrived) -> Tensor:
        """Timed. Collective. (BS, H): the weighted sums of the experts' rows."""

    def experts_of(self, arrived: Arrived) -> Tensor:
        """(count,) global expert of each row."""
        if arrived.experts is not None:
            return arrived.experts
        first = self.place.rank * self.case.local_experts
        local = torch.arange(first, first + self.case.local_experts)
        return torch.repeat_interleave(local, arrived.counts)
