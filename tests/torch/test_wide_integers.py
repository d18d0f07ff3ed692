"""Numbers that a caller's integers stand for: one that does not fit is refused, or counts for nobody; never another.

A cast to int32 keeps the low bits, so 2**32 + 3 would be expert 3. Every entry point that takes ids, counts, places or
sizes is called with drawn ones whose low bits would be right.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_moe import npu, ops, permute, placement, plan
from ascend_moe.errors import AscendMoeError, InvalidExpertId
from ascend_moe.interop import sglang, vllm, vllm_ascend
from ascend_moe.interop.vllm import bases
from ascend_moe.layer_ops import dispatch_ffn_combine

EXPERTS, HIDDEN, TOPK = 4, 32, 2
OTHERS = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.float32)
OTHERS += (torch.bfloat16, torch.float64, torch.complex64)


def wide(draw: random.Random) -> int:
    """A number beyond int32 whose low 32 bits are an expert, a count or a place."""
    return draw.choice((1, -1)) * draw.randrange(1, 2**30) * 2**32 + draw.randrange(EXPERTS)


def eye() -> tuple[Tensor, Tensor]:
    """Weights of experts whose results are not zero."""
    return torch.ones(EXPERTS, 2 * HIDDEN, HIDDEN), torch.ones(EXPERTS, HIDDEN, HIDDEN)


def experts(local: int, batched: bool = False) -> Any:
    return vllm.make_experts(None, None, None, None, local, "batched" if batched else "standard")


# ---- ids on one rank: a call gives what it computed for the pairs of each token, 0 for what counted for nobody


def segments(ids: Tensor) -> list[float]:
    _, places, bounds = sglang.run_moe_ep_preproess(ids, EXPERTS)
    inside = (places >= bounds[0]) & (places < bounds[-1])
    return inside.float().tolist()


def reordered(ids: Tensor) -> list[float]:
    rows, flat = torch.zeros(ids.numel(), HIDDEN), torch.arange(ids.numel(), dtype=torch.int32)
    at = (0, EXPERTS - 1, ids.shape[1], HIDDEN)
    sglang.pre_reorder(torch.ones(len(ids), HIDDEN), rows, flat, ids, None, *at)
    return rows[:, 0].tolist()


def init_routing_v2(ids: Tensor) -> list[float]:
    index = npu.npu_moe_init_routing_v2(torch.ones(len(ids), HIDDEN), ids, expert_num=EXPERTS)[1]
    return (index >= 0).float().tolist()


def expert_tokens(ids: Tensor) -> list[float]:
    rows = ids.reshape(-1) if ids.is_complex() else ids.reshape(-1).sort().values
    ends = npu.npu_moe_compute_expert_tokens(rows, EXPERTS)
    return [float(ends[-1])]


def updated(ids: Tensor) -> list[float]:
    table = torch.tensor([[1, e] for e in range(EXPERTS)], dtype=torch.int32)
    made, _ = npu.npu_moe_update_expert(ids, table, local_rank_id=0, world_size=2)
    return ((made >= 0) & (made < EXPERTS)).float().reshape(-1).tolist()


def remapped(ids: Tensor) -> list[float]:
    made = placement.remap(ids, torch.arange(EXPERTS)[:, None], torch.arange(len(ids)))
    return ((made >= 0) & (made < EXPERTS)).float().reshape(-1).tolist()


def copies(ids: Tensor) -> list[float]:
    """Ids of a table of copies, to int32 logical experts."""
    logical = torch.zeros(ids.numel(), 1, dtype=torch.int32)
    logical[:, 0] = torch.arange(ids.numel())
    made = placement.remap(logical, ids.reshape(-1, 1), torch.arange(ids.numel()))
    return ((made >= 0) & (made < EXPERTS)).float().reshape(-1).tolist()


def copies_for_update(ids: Tensor) -> list[float]:
    made = placement.eplb_table(ids.reshape(-1, 1))[:, 0:2]
    return ((made[:, 0] == 1) & (made[:, 1] >= 0) & (made[:, 1] < EXPERTS)).float().tolist()


def chosen_by_caller(ids: Tensor) -> list[float]:
    def choose(**given: Any) -> tuple[Tensor, Tensor]:
        return torch.ones(ids.shape), ids

    made = sglang.select_experts(torch.ones(len(ids), 1), torch.ones(len(ids), EXPERTS), TOPK,
                                 custom_routing_function=choose)[1]  # fmt: skip
    return ((made >= 0) & (made < EXPERTS)).float().reshape(-1).tolist()


def hashed(ids: Tensor) -> list[float]:
    x, table = torch.zeros(ids.numel(), EXPERTS), torch.arange(EXPERTS)[:, None]
    made = vllm_ascend.moe_gating_top_k_hash(x, 1, input_ids=ids.reshape(-1), tid2eid=table)
    return torch.ones_like(made[1]).float().reshape(-1).tolist()


def hashed_experts(ids: Tensor) -> list[float]:
    tokens = torch.arange(ids.numel())
    made = vllm_ascend.moe_gating_top_k_hash(
        torch.zeros(ids.numel(), EXPERTS), 1, input_ids=tokens, tid2eid=ids.reshape(-1, 1)
    )
    return torch.ones_like(made[1]).float().reshape(-1).tolist()


LOCAL: tuple[Callable[[Tensor], list[float]], ...] = (
    segments, reordered, init_routing_v2, expert_tokens, updated, remapped, copies, copies_for_update,
    chosen_by_caller, hashed, hashed_experts,
)  # fmt: skip


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    """Returns what the call gives, or its error of ours."""
    try:
        return call(*args)
    except AscendMoeError as error:
        assert "\n" not in str(error)
        return error


@pytest.mark.parametrize("entry", LOCAL, ids=lambda entry: entry.__name__)
def test_a_wide_id_is_refused_or_counts_for_nobody(entry: Callable[[Tensor], list[float]]) -> None:
    draw = random.Random(entry.__name__)
    for _ in range(5):
        shape = (draw.randrange(1, 4), TOPK)
        flat = [draw.randrange(EXPERTS) for _ in range(shape[0] * TOPK)]
        at = draw.randrange(len(flat))
        kept = torch.tensor(flat, dtype=torch.int64).reshape(shape)
        fits = [outcome(entry, kept.to(dtype)) for dtype in (torch.int32, torch.int64)]
        good = [each for each in fits if isinstance(each, list)]
        assert good and all(each == good[0] and sum(each) > 0 for each in good), fits
        for value in (2**32 + flat[at], -(2**32) + flat[at], wide(draw), 2**31, -(2**31) - 1, 2**63 - 1, -(2**63)):
            given = kept.clone()
            given.reshape(-1)[at] = value
            got = outcome(entry, given)
            if isinstance(got, list):
                without = kept.clone()
                without.reshape(-1)[at] = -1
                assert sum(got) < sum(good[0]), (value, got, good[0])
    for dtype in OTHERS:
        assert isinstance(outcome(entry, kept.to(dtype)), AscendMoeError), dtype


# ---- ids that go to other ranks


def kernel_of(kind: str) -> Callable[[int, str, Tensor], Any]:
    def run(rank: int, group: str, ids: Tensor) -> Any:
        way = vllm.make_prepare_finalize(None, None, group, rank, 2, EXPERTS, kind, max_num_tokens=8)
        own = [weight[:2] for weight in eye()]
        kernel = vllm.FusedMoEModularKernel(way, experts(2, kind == "batched"))
        return kernel(torch.ones(len(ids), HIDDEN), *own, torch.ones(ids.shape), ids, global_num_experts=EXPERTS)

    run.__name__ = f"kernel_{kind}"
    return run


def op_v2(rank: int, group: str, ids: Tensor) -> Any:
    return ops.npu_moe_distribute_dispatch_v2(torch.ones(len(ids), HIDDEN), ids, group, 2, rank, EXPERTS)


def fused(rank: int, group: str, ids: Tensor) -> Any:
    first, second = (weight[:2].transpose(1, 2) for weight in eye())
    x, nums = torch.ones(len(ids), HIDDEN), torch.zeros(2, dtype=torch.int32)
    return dispatch_ffn_combine(x, [first], [second], ids, None, None, None, None, torch.ones(ids.shape), group, 0,
                                torch.empty_like(x), nums)  # fmt: skip


REMOTE: tuple[Callable[[int, str, Tensor], Any], ...] = (
    op_v2, fused,
    *(kernel_of(kind) for kind in ("mc2", "batched", "alltoall", "allgather")),
)  # fmt: skip
TAKE_INT64 = {"kernel_mc2", "kernel_batched", "kernel_alltoall", "kernel_allgather"}


@pytest.mark.parametrize("entry", REMOTE, ids=lambda entry: entry.__name__)
def test_no_rank_gets_a_row_for_a_wide_id(entry: Callable[[int, str, Tensor], Any], clusters: Any) -> None:
    draw = random.Random(entry.__name__)
    for value in (2**32, -(2**32), 2**31, wide(draw), -(2**63)):
        guilty, at = draw.randrange(2), (draw.randrange(3), draw.randrange(TOPK))

        given = [torch.tensor([[0, 1], [1, 2], [3, 2]]) for _ in range(2)]
        given[guilty][at] = value
        if entry.__name__ not in TAKE_INT64:  # each rank says so alone
            given = given[:1] * 2
        errors = clusters[2].run(lambda rank, group, given=given: outcome(entry, rank, group, given[rank]))
        if entry.__name__ not in TAKE_INT64:
            assert all(isinstance(error, AscendMoeError) and "int32" in str(error) for error in errors), errors
            break
        assert all(isinstance(error, InvalidExpertId) for error in errors), errors
        assert all((e.rank, e.token, e.k) == (guilty, *at) for e in errors), errors
        assert errors[guilty].expert_id == value and f" {value};" in str(errors[guilty]), errors
        end = min(max(value, -(2**31)), 2**31 - 1)
        assert errors[1 - guilty].expert_id == end
        assert f"{end} or {'more' if value > 0 else 'less'};" in str(errors[1 - guilty])
    for dtype in OTHERS:
        ids = torch.tensor([[0, 1]]).to(dtype)
        errors = clusters[2].run(lambda rank, group, ids=ids: outcome(entry, rank, group, ids))
        assert all(isinstance(error, AscendMoeError) for error in errors), (dtype, errors)


# ---- counts and group lists


def grouped(counts: Any) -> Any:
    x, w = torch.ones(EXPERTS, HIDDEN), torch.ones(EXPERTS, HIDDEN, HIDDEN)
    given = {"group_type": 0, "group_list_type": 1, "split_item": 2}
    return npu.npu_grouped_matmul([x], [w], group_list=counts, **given)


def re_routed(counts: Tensor) -> Any:
    return npu.npu_moe_re_routing(torch.ones(EXPERTS, HIDDEN), counts.reshape(1, -1))


def batched_experts(counts: Tensor) -> Any:
    made = experts(EXPERTS, batched=True)
    meta, x = bases.ExpertTokensMetadata(counts, None), torch.ones(EXPERTS, 1, HIDDEN)
    weights, ids = torch.ones(1, TOPK), torch.zeros(1, TOPK, dtype=torch.int32)
    made.apply(torch.zeros_like(x), x, *eye(), weights, ids, "silu", EXPERTS, None, None, None, None, None, meta, False)
    return counts


COUNTED: tuple[Callable[[Tensor], Any], ...] = (grouped, re_routed, batched_experts)


@pytest.mark.parametrize("entry", COUNTED, ids=lambda entry: entry.__name__)
def test_a_wide_count_is_refused(entry: Callable[[Tensor], Any]) -> None:
    draw = random.Random(entry.__name__)
    counts = torch.ones(EXPERTS, dtype=torch.int64)
    assert not isinstance(outcome(entry, counts), AscendMoeError)
    for value in (2**32 + 1, -(2**32) + 1, 2**31, wide(draw), 2**63 - 1, -(2**63)):
        given = counts.clone()
        given[draw.randrange(EXPERTS)] = value
        assert isinstance(outcome(entry, given), AscendMoeError), value
    twice = torch.tensor([2**63 - 1, 2**63 - 1, 3, 1])  # together 2**64 + 2
    assert isinstance(outcome(entry, twice), AscendMoeError)
    for dtype in OTHERS:
        assert isinstance(outcome(entry, counts.to(dtype)), AscendMoeError), dtype


def test_lists_of_numbers_that_are_no_ints_are_refused() -> None:
    for bad in ([1.5, 1, 1, 0.5], [True, 1, 1, 1], [2**32 + 1, 1, 1, 1], [float("nan")] * 4, ["1"] * 4):
        assert isinstance(outcome(grouped, bad), AscendMoeError), bad


def test_maps_of_integers_are_true_where_they_are_not_zero_and_floats_are_refused() -> None:
    x, given = torch.arange(6.0).view(3, 2), torch.tensor([[2**32, 0], [0, 256], [-1, 0]])
    rows, _, tokens, _, _ = permute.permute(x, given)
    assert tokens.tolist() == [0, 2, 1] and torch.equal(rows, x[[0, 2, 1]])
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        assert isinstance(outcome(permute.permute, x, given.to(dtype)), AscendMoeError)
    from ascend_moe.routers import apply_router_token_dropping

    probs = torch.ones(3, 2)
    kept = [apply_router_token_dropping(probs, chosen, 1, 0.5, "position")[1] for chosen in (given, given != 0)]
    assert torch.equal(*kept) and kept[0].any()


# ---- sizes


def test_wide_numbers_of_a_plan_are_refused() -> None:
    shape = {"ranks": 8, "experts": 64, "topk": 8, "hidden": 7168, "batch": 64}
    for name in shape:
        for value in (2**32 + shape[name], 2**64 + shape[name], -(2**64) + shape[name], float(shape[name]), True):
            request = plan.Request(**shape | {name: value})  # type: ignore[arg-type]
            for call in (plan.plan, plan.window_need, plan.cann_need):
                error = outcome(call, request)
                assert isinstance(error, AscendMoeError) and error.argument == name, (name, value)
