"""What every method of the benchmark is: a dispatch and a combine with the contract of our own ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascend_moe.bench.cases import Case, Inputs
from ascend_moe.reference import cases

LIMIT, OURS, PEER = "limit", "ours", "peer"


@dataclass(frozen=True)
class Place(cases.Place):
    """Where a rank runs. ``mpi``: mpi4py's communicator of the same ranks."""

    mpi: Any = None


@dataclass
class Arrived:
    """What dispatch leaves to this rank's experts: ``count`` rows, by (local expert, source, token, k).

    ``rows`` (>= count, H), ``scales`` (>= count,) of int8 codes, ``counts`` (L,) rows a local expert;
    ``experts``: (count,) global expert of each row where ``counts`` does not tell.
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

    def __init__(self, case: Case, place: Place, rows_out: Tensor) -> None:
        """``rows_out`` (case.most_rows, H): where the experts write, by default."""
        self.case, self.place, self.rows_out = case, place, rows_out

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
        local = torch.arange(self.case.local_experts).repeat_interleave(arrived.counts)
        return local + self.place.rank * self.case.local_experts
