"""Batched rows, as vLLM names them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ascend_moe._torch_npu import on_npu
from ascend_moe.errors import RoutingOverflow
from ascend_moe.permute import padded_places


@dataclass(frozen=True)
class BatchedRows:
    """Rows by expert with free places between them, as vLLM's BatchedExperts has them, and as dispatch brings them.

    Where each row that a dispatch brought lies among ``local * most`` places: ``places`` (A,), the last for none.
    """

    local: int  # L
    most: int  # places of an expert
    places: Tensor

    @classmethod
    def of(cls, counts: Tensor, rows: int, most: int, rank: int) -> BatchedRows:
        """Gives every row a place.

        Args:
            counts: (L,) int64, rows of each local expert. rows: A, those behind the last count have no place.
            most: places of an expert. rank: this one.

        Raises:
            RoutingOverflow: an expert has more rows than places.
        """
        longest = int(counts.max())
        if longest > most:
            text = f"{longest} rows came for one expert, batched rows have places for {most} = max_num_tokens * "
            raise RoutingOverflow(text + "ranks: name an expert once a token", rank=rank, rows=longest)
        return cls(len(counts), most, padded_places(counts.cumsum(0), rows, most))

    def spread(self, values: Tensor) -> Tensor:
        """``(A, n)`` values as ``(L, most, n)``; zeros where no row is."""
        spread, places = values.new_zeros(self.local * self.most + 1, values.shape[1]), self.places
        if not on_npu(values):
            places = places[places < self.local * self.most]
            values = values[: len(places)]
        spread[places] = values
        return spread[:-1].view(self.local, self.most, values.shape[1])

    def packed(self, values: Tensor) -> Tensor:
        """Undoes ``spread``: ``(A, n)``, undefined behind the last row."""
        rows = values.reshape(self.local * self.most, values.shape[-1])
        if on_npu(values):
            return rows[self.places.clamp(max=len(rows) - 1)]
        packed = values.new_empty(len(self.places), values.shape[-1])  # work follows the rows that arrived
        used = self.places[self.places < len(rows)]
        packed[: len(used)] = rows[used]
        return packed
