"""Who sends what to whom in a predicted call: random routes, and what combine has to be told of them."""

from __future__ import annotations

import torch

from ..errors import ArgumentError
from ..plan import Request


class Routing:
    """Every token of every rank picks ``topk`` different experts, all equally likely.

    Raises:
        ArgumentError: there are fewer experts than ``topk``.

    Attributes:
        ids: (BS, K) int32 a rank; weights: (BS, K) float32 a rank.
    """

    def __init__(self, request: Request, seed: int = 0) -> None:
        if not 1 <= request.topk <= request.experts:
            text = f"topk is {request.topk}; need 1..{request.experts}: a token picks different experts"
            raise ArgumentError(text, argument="topk")
        self._world, self._local = request.ranks, request.experts // max(1, request.ranks)
        rng = torch.Generator().manual_seed(seed)
        keys = torch.rand((request.ranks, request.batch, request.experts), generator=rng)
        ids = keys.argsort(2)[:, :, : request.topk].to(torch.int32).contiguous()
        self.ids = list(ids)
        self.weights = [torch.rand((request.batch, request.topk), generator=rng) for _ in self.ids]
        pairs = request.batch * request.topk
        flat = ids.reshape(-1).to(torch.int64)
        # Pairs of all ranks by (expert, source rank, flat pair): the order of every expand_x.
        order = flat.argsort(stable=True)
        self._experts, self._source, self._pair = flat[order], order // pairs, order % pairs
        self._topk = request.topk

    def _mine(self, rank: int) -> torch.Tensor:
        return self._experts // self._local == rank

    def counts(self, rank: int) -> torch.Tensor:
        """ep_recv_counts of a rank: prefix sums over (local expert, source)."""
        mine = self._mine(rank)
        slot = (self._experts[mine] % self._local) * self._world + self._source[mine]
        counts = torch.bincount(slot, minlength=self._local * self._world)
        return counts.cumsum(0).to(torch.int32)

    def triples(self, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
        """assist_info_for_combine of a rank: (source, token, k) of every row."""
        mine = self._mine(rank)
        pair = self._pair[mine]
        rows = torch.stack((self._source[mine], pair // self._topk, pair % self._topk), 1)
        out = torch.zeros(shape, dtype=torch.int32)
        out.view(-1)[: rows.numel()] = rows.flatten().to(torch.int32)
        return out

    def expand_idx(self, rank: int) -> torch.Tensor:
        """Position of each pair of a source rank among its pairs of the same expert."""
        flat = self.ids[rank].flatten().to(torch.int64)
        order = flat.argsort(stable=True)
        ordered = flat[order]
        first = torch.searchsorted(ordered, ordered)
        out = torch.empty(flat.numel(), dtype=torch.int32)
        out[order] = (torch.arange(flat.numel()) - first).to(torch.int32)
        return out
