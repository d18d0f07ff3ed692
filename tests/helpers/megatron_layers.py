"""Builds one layer of Megatron-LM's on any ranks, and computes the same layer as a loop in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gloo_ranks import threads
from routed_tokens import randn
from torch import Tensor

from ascend_moe.interop.megatron import GroupedMLP, SharedExpertMLP, TokenDispatcher, topk_routing_with_score_function

FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
E, K, H, F = 8, 3, 32, 16
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # ranks, etp
KINDS = ["mc2", "alltoall", "allgather"]
ROUTINGS = ["random", "one expert", "an expert without tokens"]
Body = Callable[[int, Any], Any]


def close(found: Tensor, expected: Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def logits_of(tokens: int, seed: int, routing: str = "random") -> Tensor:
    logits = randn(tokens, E, seed=seed)
    if routing == "one expert":
        logits[:, 1] += 20
    if routing == "an expert without tokens":
        logits[:, 0] -= 50
    return logits


class Case:
    """Tokens and logits of all ranks, and the experts of all of them."""

    def __init__(self, world: int, sizes: list[int] | None = None, routing: str = "random", dtype: Any = FP32) -> None:
        self.sizes = sizes or [5] * world
        self.uneven = len(set(self.sizes)) > 1
        self.topk = 1 if routing == "one expert" else K
        self.x = [randn(size, H, seed=10 + rank).to(dtype) for rank, size in enumerate(self.sizes)]
        self.logits = [logits_of(size, 30 + rank, routing) for rank, size in enumerate(self.sizes)]
        self.w1 = (randn(E, H, 2 * F, seed=1) / math.sqrt(H)).to(dtype)
        self.w2 = (randn(E, F, H, seed=2) / math.sqrt(F)).to(dtype)

    def options(self) -> dict[str, Any]:
        return {"max_tokens": max(self.sizes)} if self.uneven else {}

    def expected(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
        """Results, gradients of x and of logits by rank, gradients of w1 and w2, in float64."""
        x, logits = ([each.double().requires_grad_() for each in every] for every in (self.x, self.logits))
        w1, w2 = self.w1.double().requires_grad_(), self.w2.double().requires_grad_()
        results = []
        for tokens, scores in zip(x, logits, strict=True):
            out = []
            for token, row in zip(tokens, scores, strict=True):
                ids = row.argsort(descending=True)[: self.topk]
                weights = row[ids].softmax(0)
                out.append(sum((mlp(token, w1[e], w2[e]) * w for e, w in zip(ids, weights, strict=True)), 0 * token))
            results.append(torch.stack(out) if out else tokens * 1)
        sum(loss_of(each) for each in results).backward()  # type: ignore[union-attr]
        assert w1.grad is not None and w2.grad is not None
        gx, glogits = ([torch.zeros_like(t) if t.grad is None else t.grad for t in every] for every in (x, logits))
        return [each.detach() for each in results], gx, glogits, w1.grad, w2.grad


def mlp(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    gate, up = (x @ w1).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up @ w2


def loss_of(y: Tensor) -> Tensor:
    return (y * (1 + torch.arange(y.numel()).view(y.shape) % 5)).sum()


def on_ranks(kind: str, world: int, clusters: Any, body: Body) -> list[Any]:
    """body(rank, group) on every rank; the group fits the kind."""
    if kind == "mc2":
        found: list[Any] = clusters[world].run(body)
        return found
    return threads(world).run(body)


def dispatcher(kind: str, case: Case, etp: int, rank: int, group: Any, **options: Any) -> TokenDispatcher:
    place = {"world_size": len(case.sizes), "rank": rank} if isinstance(group, str) else {}
    options = case.options() | options
    return TokenDispatcher(kind, group, E, case.topk, etp_size=etp, **place, **options)


def experts_of(case: Case, transport: TokenDispatcher) -> GroupedMLP:
    first, local = transport.ep_rank * transport.local_experts, transport.local_experts
    shard = {"etp_size": transport.etp_size, "etp_rank": transport.etp_rank, "dtype": case.w1.dtype}
    experts = GroupedMLP(local, H, F, **shard)
    return experts.load_experts(case.w1[first : first + local], case.w2[first : first + local])


def six_phases(
    transport: TokenDispatcher,
    experts: GroupedMLP,
    x: Tensor,
    chosen: Tensor,
    probs: Tensor,
    mask: Tensor | None = None,
) -> Iterator[Any]:
    """Yields the handle behind the dispatch, then the result."""
    tokens, slots, handle = transport.dispatch_preprocess(x, chosen, probs, mask)
    rows, counts, row_probs = transport.dispatch_postprocess(*transport.token_dispatch(tokens, slots, handle), handle)
    yield handle
    out, _ = experts(rows, counts, row_probs)
    home = transport.token_combine(transport.combine_preprocess(out, handle), handle)
    yield transport.combine_postprocess(home, handle)


def trained(kind: str, case: Case, etp: int, rank: int, group: Any, **options: Any) -> list[Tensor]:
    """Result and gradients of x, logits, w1 and w2 on a rank."""
    transport = dispatcher(kind, case, etp, rank, group, **options)
    experts = experts_of(case, transport)
    x, logits = (every[rank].clone().requires_grad_() for every in (case.x, case.logits))
    probs, chosen = topk_routing_with_score_function(logits, case.topk)
    y = list(six_phases(transport, experts, x, chosen, probs))[1]
    loss_of(y.float()).backward()
    return [y.detach(), x.grad, logits.grad, *grads_of(experts)]  # type: ignore[list-item]


def grads_of(experts: GroupedMLP) -> tuple[Tensor, Tensor]:
    """As (L, H, 2F') and (L, F', H)."""
    assert experts.weight1.grad is not None and experts.weight2.grad is not None
    return experts.weight1.grad.view_as(experts.w1), experts.weight2.grad.view_as(experts.w2)


def shared_expert(group: Any, rank: int, world: int, gate: bool, sequence: bool) -> SharedExpertMLP:
    """Rank's shard of one shared expert."""
    module = SharedExpertMLP(H, F, gate, tp_group=group, sequence_parallel=sequence, dtype=FP32)
    w1, w2, columns = (
        randn(2, F, H, seed=21) / 5,
        randn(H, F, seed=22) / 4,
        slice(rank * F // world, (rank + 1) * F // world),
    )
    module.linear_fc1.weight.data = w1[:, columns].reshape(-1, H).clone()
    module.linear_fc2.weight.data = w2[:, columns].clone()
    if module.gate_weight is not None:
        module.gate_weight.data = randn(1, H, seed=23)
    return module


def overlapped(module: SharedExpertMLP, x: Tensor) -> Tensor:
    module.pre_forward_comm(x)
    module.linear_fc1_forward_and_act()
    module.linear_fc2_forward()
    module.post_forward_comm()
    return module.get_output()
