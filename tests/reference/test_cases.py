"""The generator of collective calls: cases are what they say, the same everywhere, and cover all kinds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import ascend_moe.reference as ref
from ascend_moe.reference.cases import BATCHES, DTYPES, FAULTS, IDS, MASKS, QUANTS, Case, draw, legal


def test_batches_are_what_their_names_say() -> None:
    wanted: dict[str, Callable[[list[int]], bool]] = {
        "equal": lambda sizes: sizes == [5] * 4,
        "global_bs": lambda sizes: sizes == [5] * 4,
        "unequal": lambda sizes: len(set(sizes)) > 1 and max(sizes) == 5,
        "zero rank": lambda sizes: 0 in sizes,
        "one rank only": lambda sizes: sorted(sizes) == [0, 0, 0, 5],
        "no tokens": lambda sizes: sizes == [0] * 4,
    }
    for batches, seed in itertools.product(BATCHES, range(20)):
        case = Case(world=4, batch=5, batches=batches, seed=seed)
        sizes = [len(given.x) for given in case.inputs]
        assert sizes == case.batch_sizes and case.global_bs == (0 if batches == "equal" else 20)
        assert wanted[batches](sizes), (batches, sizes)
    assert Case(world=3, batches=(2, 0, 4)).batch_sizes == [2, 0, 4]


@pytest.mark.parametrize("ids", IDS)
def test_ids_are_what_their_names_say(ids: str) -> None:
    case = Case(world=3, local=3, topk=4, batch=40, ids=ids, seed=5)
    tokens = [token for given in case.inputs for token in given.expert_ids.tolist()]
    seen = Counter(expert for token in tokens for expert in token)
    minus, different = seen[-1] / seen.total(), [len({*token} - {-1}) + token.count(-1) for token in tokens]
    assert case.fault() is None and set(seen) <= set(range(-1, 9))
    assert {
        "distinct": set(different) == {4} and not minus,
        "any": min(different) < 4,
        "minus": 0 < minus < 0.5,
        "hot": seen.most_common(1)[0][0] == 5,
        "duplicates": min(different) < 4,
        "mixed": min(different) < 4 and 0 < minus < 0.5 and seen.most_common(1)[0][0] == 5,
        "zipf": set(different) == {4} and not minus and seen[0] > seen[2] > seen[8],
        "popular": set(different) == {4} and not minus and seen[5] == len(tokens),
        "none": minus == 1,
    }[ids]


@pytest.mark.parametrize("ids", FAULTS)
def test_one_rank_is_guilty_of_a_fault(ids: str) -> None:
    kinds = {"overflow": "RoutingOverflow", "bad": "InvalidExpertId"}
    for seed in range(40):
        case = legal(Case(ids=ids, mask=MASKS[seed % len(MASKS)], batches=BATCHES[seed % 6], seed=seed))
        fault = case.fault()
        assert fault is not None and fault.kind == kinds[ids], case


def test_masks_are_what_their_names_say() -> None:
    for mask in MASKS:
        given = [inputs.x_active_mask for inputs in Case(world=8, batch=6, mask=mask, seed=1).inputs]
        live = [row_mask for row_mask in given if row_mask is not None]
        assert len(live) == (0 if mask == "none" else 8)
        assert all(row_mask.dim() == (2 if mask == "pair" else 1) for row_mask in live)
        assert mask != "nobody" or not torch.cat(live).any()
        assert mask != "prefix" or all(bool((row_mask[:-1] >= row_mask[1:]).all()) for row_mask in live)
        assert mask not in ("token", "pair") or any(row_mask.any() and not row_mask.all() for row_mask in live)


def test_rank_alone_is_the_rank_of_all() -> None:
    """Any process makes any rank's tensors; another seed makes others."""
    for seed in range(20):
        case = draw(seed, odd=(True,))
        for rank, one in enumerate(replace(case).inputs):
            for name, value in vars(case.rank_input(rank)).items():
                other = getattr(one, name)
                assert (value is None and other is None) or ref.same_bits(value, other), name
    assert not torch.equal(Case(seed=1).inputs[0].x, Case(seed=2).inputs[0].x)


def test_consecutive_seeds_cover_every_kind() -> None:
    cases = [draw(seed) for seed in range(60, 120)]
    assert all(case.fault() is None for case in cases)
    for name, values in {
        "batches": BATCHES,
        "ids": IDS,
        "mask": MASKS,
        "dtype": DTYPES,
        "quant": tuple(QUANTS),
        "contract": (1, 2),
        "shared": (0, 2, 3),
    }.items():
        assert {getattr(case, name) for case in cases} == set(values), name
    few = [draw(seed, world=(3,), ids=("mixed", "any")) for seed in range(12)]
    assert {case.world for case in few} == {3} and {case.ids for case in few} == {"mixed", "any"}
    assert draw(7) == draw(7) != draw(8)


# ---- hierarchy


def _combined(case: Case, share: int, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return replace(case, share=share).combined(rows, case.dispatched())


def _hand(values: list[float], weights: list[float], dtype: torch.dtype, shared: float | None = None) -> torch.Tensor:
    """The sum of rank 0's only token, whose pair k goes to rank k of four; two ranks a server."""
    world, hidden = 4, 16
    x, ids = torch.zeros(1, hidden, dtype=dtype), torch.arange(world, dtype=torch.int32)[None]
    beside = None if shared is None else torch.full_like(x, shared)
    inputs = [
        ref.RankInput(x, ids if rank == 0 else -torch.ones_like(ids), None, None, torch.tensor([weights]), beside)
        for rank in range(world)
    ]
    sent = ref.dispatch(inputs, moe_expert_num=world)
    rows = [torch.full((1, hidden), value, dtype=dtype) for value in values]
    return ref.combine(inputs, rows, sent, moe_expert_num=world, ranks_per_server=2)[0][0, 0]


def test_each_server_rounds_its_sum() -> None:
    """bf16 has 8 bits: 256 + 1 becomes 256 on its server, where one sum of all four would be 260."""
    assert _hand([256, 1, 2, 1], [1, 1, 1, 1], torch.bfloat16) == 256 + 4  # 256 + 3 = 259 -> 260
    assert _hand([256, 1, 0.5, 0.25], [1, 1, 1, 1], torch.bfloat16) == 256  # one sum: 257.75 -> 258
    assert _hand([256, 1, 256, 1], [1, 1, 1, 1], torch.float32) == 514
    assert _hand([256, 1, 1, 1], [1, -1, 1, 1], torch.bfloat16) == 256  # 255, and 2: 257 -> 256, to even


def test_the_shared_experts_row_comes_after_the_servers() -> None:
    assert _hand([256, 1, 0.5, 0.25], [1, 1, 1, 1], torch.bfloat16, shared=-256.0) == 0.75
    # 2^24 + 1 is no fp32 number: from the shared row on, the sum would be 1.
    assert _hand([2.0**24, 0, 1, 0], [1, 1, 1, 1], torch.float32, shared=-(2.0**24)) == 0


@pytest.mark.parametrize("coded", [False, True])
def test_one_server_for_all_rounds_twice_the_same(coded: bool) -> None:
    """With all ranks on one server the second rounding changes nothing; codes are made of sums, not of rows."""
    case = Case(world=4, local=2, topk=3, contract=2, batches="unequal", batch=6, seed=3, comm_quant_mode=2 * coded)
    rows = case.rows_of(case.dispatched())
    plain = replace(case, comm_quant_mode=0)
    for one, all_ranks in zip(_combined(case, 4, rows), _combined(plain, 0, rows), strict=True):
        want = ref.restore_blocks(*ref.quantize_blocks(all_ranks)) if coded else all_ranks
        assert ref.same_bits(one, want)


def test_a_row_crosses_once_a_token_and_server() -> None:
    """Rank 0's token has two experts on the other server, and one on its own: one row goes, one sum returns."""
    ids = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    none = -torch.ones_like(ids)
    inputs = [ref.RankInput(torch.zeros(1, 16, dtype=torch.bfloat16), ids if r == 0 else none) for r in range(4)]
    numbers = {"moe_expert_num": 4, "ranks_per_server": 2, "hidden": 16, "dtype": torch.bfloat16}
    assert ref.predict_crossings(inputs, **numbers) == [(32 + 32 + 96, 0), (0, 0), (0, 32), (0, 0)]
    coded = ref.predict_crossings(inputs, quant_mode=2, comm_quant_mode=2, **numbers)
    assert coded == [(32 + 32 + 32 + 96, 0), (0, 0), (0, 64), (0, 0)]
