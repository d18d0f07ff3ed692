"""Makes what all ranks of a test of DeepEP's Buffer have, and what they must get by DeepEP's definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from op_runs import Clusters
from routed_tokens import randn, routed

from ascend_moe.interop.deep_ep import AscendBuffer, Buffer

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
H = 256
KINDS = ["random", "one expert", "an expert without tokens", "-1", "empty rank"]

BUFFERS: dict[str, Any] = {"deepep": Buffer, "ascend": AscendBuffer}


@dataclass(frozen=True)
class Case:
    """Holds what all ranks have, by a rank's number; every rank can tell what the others hold."""

    world: int = 2
    local: int = 3
    topk: int = 3
    kind: str = "random"
    hidden: int = H
    device: str = "cpu"  # of x, ids and weights

    @property
    def experts(self) -> int:
        return self.world * self.local

    def tokens(self, rank: int) -> int:
        return 0 if self.kind == "empty rank" and rank == 1 % self.world else 5 + 2 * (rank % 4)

    @property
    def most(self) -> int:
        return max(map(self.tokens, range(self.world)))

    def ids(self, rank: int) -> torch.Tensor:
        ids = routed(self.tokens(rank), self.experts, self.topk, self.kind).long()
        shifted = torch.where(ids >= 0, (ids + rank) % self.experts, -1)
        if self.kind == "one expert":
            shifted = torch.full_like(ids, -1)
            shifted[:, 1] = 1
        return (ids if self.kind == "an expert without tokens" else shifted).to(self.device)

    def x(self, rank: int) -> torch.Tensor:
        return randn(self.tokens(rank), self.hidden, seed=rank).bfloat16().to(self.device)

    def weights(self, rank: int) -> torch.Tensor:
        return randn(self.tokens(rank), self.topk, seed=100 + rank).abs().to(self.device)

    def owner(self, expert: int) -> int:
        return expert // self.local if expert >= 0 else -1

    def hit(self, rank: int, token: int) -> list[int]:
        """Ranks of a token's experts, ascending."""
        return sorted({self.owner(expert) for expert in self.ids(rank)[token].tolist()} - {-1})

    def sent_rows(self, rank: int) -> torch.Tensor:
        """A rank's tokens, each times the number of ranks it is sent to: their sum if experts return their rows."""
        hits = torch.tensor([len(self.hit(rank, token)) for token in range(self.tokens(rank))])
        return self.x(rank).float() * hits[:, None]

    def copies(self, rank: int) -> list[tuple[int, int]]:
        """(source rank, token) of each row that a rank receives in normal mode."""
        sources = [(source, token) for source in range(self.world) for token in range(self.tokens(source))]
        return [(source, token) for source, token in sources if rank in self.hit(source, token)]

    def rows_of(self, expert: int) -> list[tuple[int, int, int]]:
        """(source rank, token, k) of each row of an expert."""
        return [
            (source, token, k)
            for source in range(self.world)
            for token, ids in enumerate(self.ids(source).tolist())
            for k, id in enumerate(ids)
            if id == expert
        ]


CASES = [Case(kind=kind) for kind in KINDS] + [Case(world=world, kind="-1") for world in (1, 4, 8)]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.world}")


def on_all(clusters: Clusters, case: Case, body: Callable[[int, Buffer], Any], flavour: str = "deepep") -> list[Any]:
    def run(rank: int, group_ep: str) -> Any:
        return body(rank, BUFFERS[flavour]((group_ep, case.world, rank)))

    return clusters[case.world].run(run)


def send(case: Case, rank: int, buffer: Buffer, **changes: Any) -> tuple[Any, ...]:
    """Normal dispatch of a rank's tokens."""
    ids = case.ids(rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, case.experts)
    given = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    given |= {"x": case.x(rank), "topk_idx": ids, "topk_weights": case.weights(rank)}
    return buffer.dispatch(**{**given, **changes})  # type: ignore[arg-type]


def shrinkable(group: Any, world: int, rank: int, tokens: int, hidden: int, experts: int) -> Buffer:
    """As DeepEP's own test of low latency and vLLM's ``DeepEPLLAll2AllManager`` make it."""
    size = Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=tokens, hidden=hidden, num_ranks=world, num_experts=experts
    )
    return Buffer(
        group=(group, world, rank), num_nvl_bytes=1 << 30, num_rdma_bytes=size, low_latency_mode=True,
        num_qps_per_rank=experts // world, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False,
        explicitly_destroy=True, enable_shrink=True,
    )  # fmt: skip


def empty_stack(rows: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.stack(rows) if rows else like[:0]


def low(case: Case, rank: int, buffer: Any, **changes: Any) -> Any:
    """Low-latency dispatch of a rank's tokens, bf16 where nothing else is asked for."""
    given = {"use_fp8": False, **changes}
    return buffer.low_latency_dispatch(case.x(rank), case.ids(rank), case.most + 1, case.experts, **given)


def low_rows(case: Case, rank: int, expert: int) -> torch.Tensor:
    """The rows of a local expert."""
    rows = [case.x(source)[token] for source, token, _ in case.rows_of(rank * case.local + expert)]
    return empty_stack(rows, torch.empty(0, case.hidden, dtype=BF16))


def low_sum(case: Case, rank: int, factor: Callable[[int], float] = lambda _: 1.0) -> torch.Tensor:
    """Returns what combine gives when every expert has multiplied its rows by a factor that bf16 holds."""
    total = torch.zeros(case.tokens(rank), case.hidden)
    for k in range(case.topk):
        for token, expert in enumerate(case.ids(rank)[:, k].tolist()):
            if expert >= 0:
                row = (case.x(rank)[token].float() * factor(expert)).bfloat16().float()
                total[token] += row * case.weights(rank)[token, k]
    return total.bfloat16()


def finish(case: Case, rank: int, buffer: Any, sent: Any, **changes: Any) -> torch.Tensor:
    given = {"x": sent[0], **changes}
    return buffer.low_latency_combine(given.pop("x"), case.ids(rank), case.weights(rank), sent[2], **given)[0]  # type: ignore[no-any-return]
