"""Where tokens go, how many each rank has, and how many bytes of window that takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_moe import plan, settings
from ascend_moe.errors import InvalidExpertId, need_dims, with_typed_errors
from ascend_moe.interop.deep_ep.place import BufferPlace
from ascend_moe.ops.collectives import gather_rows


def tokens_of_ranks(topk_idx: Tensor, experts: int, world: int) -> Tensor:
    """``(T, W)`` bool: whether a token has an expert of a rank."""
    ranks = torch.where(topk_idx >= 0, topk_idx // (experts // world), world).long()
    hit = torch.zeros(topk_idx.shape[0], world + 1, dtype=torch.bool, device=topk_idx.device)
    return hit.scatter_(1, ranks.clamp(max=world), True)[:, :world].contiguous()


def tokens_of_experts(topk_idx: Tensor, experts: int) -> Tensor:
    """``(E,)`` int32: (token, k) pairs of each expert."""
    ids = torch.where((topk_idx >= 0) & (topk_idx < experts), topk_idx, experts).reshape(-1).long()
    counts = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))[:experts].contiguous()


def dispatch_layout(place: BufferPlace, topk_idx: Tensor, experts: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The first four results of ``get_dispatch_layout``; the second is None on one server."""
    need_dims("topk_idx", topk_idx, 2, dtypes=(torch.int64, torch.int32))
    place.local_experts(experts)
    in_rank = tokens_of_ranks(topk_idx, experts, place.world)
    servers = None
    if place.ranks_per_server:
        servers = in_rank.view(-1, place.world // place.ranks_per_server, place.ranks_per_server).any(2)
        servers = servers.sum(0, dtype=torch.int32)
    return in_rank.sum(0, dtype=torch.int32), servers, tokens_of_experts(topk_idx, experts), in_rank


def agreed_head(own: int, topk_idx: Tensor | None, experts: int, device: torch.device) -> Tensor:
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


def most_tokens_of(place: BufferPlace, own: int, topk_idx: Tensor, experts: int) -> int:
    """The same of what the ranks have told each other. Collective."""
    head = agreed_head(own, topk_idx, experts, topk_idx.device)
    return most_tokens(gather_rows(head, place), topk_idx, experts)


@with_typed_errors
def get_low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Bytes of window a rank that low-latency dispatch and combine need, with as many experts a token as the ops take.

    Whole MiB: windows are as large as HCCL_BUFFSIZE says.

    Raises:
        ArgumentError: a number is so far out that no size follows from it.

    Source: DeepEP ``get_low_latency_rdma_size_hint``.
    """
    topk = min(plan.limits()["topk"], num_experts)
    return _window(num_ranks, num_experts, topk, hidden, num_max_dispatch_tokens_per_rank)


def _window(ranks: int, experts: int, topk: int, hidden: int, tokens: int) -> int:
    """An op takes the algorithm that ASCEND_MOE_COMM_ALG names, else one that the window has room for.

    Between the servers that ASCEND_MOE_RANKS_PER_SERVER tells it is hierarchy, as a Buffer's.
    """
    servers = plan.on_servers(ranks, "hierarchy", weights=True)
    if servers:
        asked = plan.Request(ranks, experts, topk, hidden, tokens, equal_batches=False, **servers)
        return plan.window_need(asked)["buffsize_mib"] << 20
    named = settings.COMM_ALG.text()
    needs = []
    for algorithm in ("window", "direct") if named in ("", "auto") else (named,):
        asked = plan.Request(ranks, experts, topk, hidden, tokens, equal_batches=False, comm_alg=algorithm)
        needs.append(plan.window_need(asked))
    return max(min(need[op] for need in needs) for op in ("dispatch_mib", "combine_mib")) << 20


@dataclass
class Config:
    """How DeepEP's kernels cut their work. Ours take no such numbers: only the hints are used.

    Attributes:
        num_sms, num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens, num_max_rdma_chunked_send_tokens,
            num_max_rdma_chunked_recv_tokens: no effect.

    Source: DeepEP ``Config``.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the bytes of window that normal dispatch and combine need on each of ``num_ranks`` ranks.

        That is for rows of ``hidden_bytes``, and as many tokens as the ops take. Rows carry the ids and weights of as
        many experts as the ops take: 8 bytes each.
        """
        limits = plan.limits()
        row_bytes = hidden_bytes + 8 * limits["topk"]
        return _window(num_ranks, num_ranks, min(limits["topk"], num_ranks), -(-row_bytes // 2), limits["batch"])

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns 0, whatever ``hidden_bytes`` and ``num_ranks`` are: there is one window for both."""
        return 0
