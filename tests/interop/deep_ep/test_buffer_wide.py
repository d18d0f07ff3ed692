"""Numbers that int32 does not hold, and other numbers that are none: a Buffer refuses them, each by its true value."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deep_ep_buffers import Case, H, finish, low, on_all, send
from op_runs import Clusters

from ascend_moe.errors import ArgumentError, InvalidExpertId

WIDE = [2**31, 2**32, 2**32 + 3, -(2**32), -(2**31) - 1, 2**63 - 1, -(2**63)]
Send = Callable[[Case, int, Any, torch.Tensor], Any]


def low_with(case: Case, rank: int, buffer: Any, ids: torch.Tensor, **more: Any) -> Any:
    given = {"use_fp8": False, **more}
    return buffer.low_latency_dispatch(case.x(rank), ids, case.most, case.experts, **given)


def fused(case: Case, rank: int, buffer: Any, ids: torch.Tensor, fuse_mode: int) -> Any:
    w13, w2 = (torch.ones(case.local, *shape).bfloat16() for shape in ((H, 64), (32, H)))
    given = (case.weights(rank), w13, None, w2, None, 64 if fuse_mode == 1 else 0, case.experts, 0, fuse_mode)
    return buffer.fused_deep_moe(case.x(rank), ids, *given)


SENDS: dict[str, tuple[str, Send]] = {
    "normal": ("deepep", lambda case, rank, buffer, ids: send(case, rank, buffer, topk_idx=ids)),
    "low latency": ("deepep", low_with),
    "hook": ("deepep", lambda *given: low_with(*given, return_recv_hook=True)[4]()),
    "fp8": ("deepep", lambda *given: low_with(*given, use_fp8=True)),
    "ascend, normal": ("ascend", lambda case, rank, buffer, ids: send(case, rank, buffer, topk_idx=ids)),
    "ascend, low latency": ("ascend", low_with),
    "ascend, pertoken": ("ascend", lambda *given: low_with(*given, quant_mode="pertoken_fp8_e4m3")),
    "ascend, fused": ("ascend", lambda *given: fused(*given, 1)),
    "ascend, ffn": ("ascend", lambda *given: fused(*given, 2)),
}


@pytest.mark.parametrize("way", SENDS)
def test_an_id_that_int32_does_not_hold_is_reported_as_it_is(clusters: Clusters, way: str) -> None:
    """The rank that gave it names it; the others do in normal mode, else they know that it is beyond int32."""
    case, draw = Case(kind="-1"), random.Random(way)
    flavour, call = SENDS[way]

    def body(rank: int, buffer: Any) -> None:
        for wrong in draws:
            ids = case.ids(rank)
            if rank == 1:
                ids[3, 2] = wrong
            with pytest.raises(InvalidExpertId) as raised:
                call(case, rank, buffer, ids)
            error: Any = raised.value
            assert (error.rank, error.token, error.k) == (1, 3, 2) and "\n" not in str(error)
            exact = way in ("normal", "ascend, normal") or rank == 1
            assert error.expert_id == (wrong if exact else max(min(wrong, 2**31 - 1), -(2**31)))
            assert str(error.expert_id) in str(error)

    draws = [*draw.sample(WIDE, 2), draw.choice((1, -1)) * draw.randrange(1, 2**30) * 2**32 + draw.randrange(6)]
    draws.append(draw.choice((-2, 6)))  # no expert, and no wide number
    on_all(clusters, case, body, flavour)


@pytest.mark.parametrize("flavour", ["deepep", "ascend"])
def test_combine_takes_the_ids_of_its_dispatch(clusters: Clusters, flavour: str) -> None:
    """Ids permuted within equal counts would be sums of other rows."""
    case = Case()

    def body(rank: int, buffer: Any) -> None:
        sent = low(case, rank, buffer)
        ids = case.ids(rank)
        swapped = ids.clone()
        swapped[:2] = ids[:2].flip(0)
        assert not torch.equal(ids, swapped)
        for other in (swapped, torch.where(ids == ids[1, 1], 2**32 + ids, ids)):
            with pytest.raises(ArgumentError, match=r"topk_idx of token [01], k.* pass dispatch's ids"):
                buffer.low_latency_combine(sent[0], other, case.weights(rank), sent[2])
        assert torch.isfinite(finish(case, rank, buffer, sent)).all()

    on_all(clusters, case, body, flavour)


def layout_of(case: Case, buffer: Any) -> dict[str, torch.Tensor]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.ids(0), case.experts)
    return {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}


def one_wrong(given: torch.Tensor, number: int) -> torch.Tensor:
    wide = given.long().clone()
    wide.view(-1)[-1] = number
    return wide


@pytest.mark.parametrize("flavour", ["deepep", "ascend"])
def test_numbers_that_are_none_are_refused_before_anything_is_sent(clusters: Clusters, flavour: str) -> None:
    case, draw = Case(world=1), random.Random(7)
    wide = [draw.choice((1, -1)) * draw.randrange(1, 2**30) * 2**32 + draw.randrange(1, 6) for _ in range(4)]

    def body(rank: int, buffer: Any) -> None:
        tables = layout_of(case, buffer)
        first, hint = (case.x(0), case.ids(0)), (8, 512, 4, 16)
        calls: list[tuple[str, Callable[[Any], Any]]] = [
            ("num_max_dispatch_tokens_per_rank is", lambda n: buffer.low_latency_dispatch(*first, n, case.experts)),
            ("num_experts is", lambda n: buffer.low_latency_dispatch(*first, case.most, n)),
            ("num_experts is", lambda n: buffer.get_dispatch_layout(case.ids(0), n)),
            ("expert_alignment is", lambda n: send(case, 0, buffer, expert_alignment=n)),
            ("num_worst_tokens is", lambda n: send(case, 0, buffer, num_worst_tokens=n)),
            *((" is |hint", lambda n, i=i: buffer.get_low_latency_rdma_size_hint(*hint[:i], n, *hint[i + 1 :]))
              for i in range(4)),
        ]  # fmt: skip
        for number, (text, call) in itertools.product((*wide, -1, 0.5, True, None), calls):
            with pytest.raises(ArgumentError, match=text):
                call(number)
        if flavour == "deepep":
            for name in ("num_tokens_per_rank", "num_tokens_per_expert"):
                for number in (*wide, -1, 1000):
                    with pytest.raises(ArgumentError, match=f"{name} at .* is {number}; it must be one of 0"):
                        send(case, 0, buffer, **{name: one_wrong(tables[name], number)})
                with pytest.raises(ArgumentError, match=rf"{name} is torch\.float32"):
                    send(case, 0, buffer, **{name: tables[name].float()})
            with pytest.raises(ArgumentError, match=r"is_token_in_rank is torch\.float32"):
                send(case, 0, buffer, is_token_in_rank=tables["is_token_in_rank"].float())
            mask = tables["is_token_in_rank"].long() * 2**32  # a number that is not 0 is True
            assert torch.equal(send(case, 0, buffer, is_token_in_rank=mask)[0], send(case, 0, buffer)[0])
        for ids in (case.ids(0).float(), case.ids(0).short(), case.ids(0).bool()):
            with pytest.raises(ArgumentError, match="topk_idx is torch"):
                send(case, 0, buffer, topk_idx=ids)
            with pytest.raises(ArgumentError, match="topk_idx is torch"):
                low_with(case, 0, buffer, ids)

    on_all(clusters, case, body, flavour)
