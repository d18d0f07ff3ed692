"""The generator of collective calls: cases are what they say, the same everywhere, and cover all kinds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import ascend_moe.reference as ref
from ascend_moe.reference.cases import BATCHES, DTYPES, FAULTS, IDS, MASKS, QUANTS, Case, draw, legal


@pytest.mark.parametrize("batches", BATCHES)
def test_batches(batches: str) -> None:
    for seed in range(20):
        case = Case(world=4, batch=5, batches=batches, seed=seed)
        sizes = [len(one.x) for one in case.inputs]
        assert sizes == case.batch_sizes == [case.batch_of(rank) for rank in range(4)]
        assert case.global_bs == (0 if batches == "equal" else 20)
        wanted = {
            "equal": sizes == [5] * 4,
            "global_bs": sizes == [5] * 4,
            "unequal": len(set(sizes)) > 1 and max(sizes) == 5,
            "zero rank": 0 in sizes,
            "one rank only": sorted(sizes) == [0, 0, 0, 5],
            "no tokens": sizes == [0] * 4,
        }
        assert wanted[batches], sizes
    assert Case(world=3, batches=(2, 0, 4)).batch_sizes == [2, 0, 4]


@pytest.mark.parametrize("ids", IDS)
def test_ids(ids: str) -> None:
    """Each kind is what its name says; all of them stay within what an owner takes."""
    seen: Counter[int] = Counter()
    case = Case(world=3, local=3, topk=4, batch=40, ids=ids, seed=5)
    tokens = [token for one in case.inputs for token in one.expert_ids.tolist()]
    for token in tokens:
        seen.update(token)
        if ids in ("distinct", "zipf", "popular"):
            assert len(set(token)) == 4 and -1 not in token
    assert case.fault() is None and set(seen) <= set(range(-1, 9))
    pairs, hot = sum(seen.values()), case.seed % case.experts
    if ids in ("minus", "mixed", "none"):
        assert seen[-1] == pairs if ids == "none" else 0 < seen[-1] < pairs / 2
    if ids in ("hot", "mixed"):
        assert max(seen, key=lambda expert: seen[expert]) == hot
    if ids == "popular":
        assert seen[hot] == len(tokens)
    if ids == "zipf":
        assert seen[0] > seen[2] > seen[8]
    if ids in ("duplicates", "mixed"):
        assert any(len({expert for expert in token if expert >= 0}) < 4 - token.count(-1) for token in tokens)


@pytest.mark.parametrize("ids", FAULTS)
def test_faults(ids: str) -> None:
    """One rank is guilty, and whatever its mask was, its wrong ids count."""
    kinds = {"overflow": "RoutingOverflow", "bad": "InvalidExpertId"}
    for seed in range(40):
        case = legal(Case(ids=ids, mask=MASKS[seed % len(MASKS)], batches=BATCHES[seed % 6], seed=seed))
        fault = case.fault()
        assert fault is not None and fault.kind == kinds[ids], case


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str) -> None:
    masks = [one.x_active_mask for one in Case(world=8, batch=6, mask=mask, seed=1).inputs]
    if mask == "none":
        assert masks == [None] * 8
        return
    live = [one for one in masks if one is not None]
    assert len(live) == 8 and {one.dim() for one in live} == {2 if mask == "pair" else 1}
    if mask == "nobody":
        assert not torch.cat(live).any()
    if mask == "prefix":
        assert all(bool((one[:-1] >= one[1:]).all()) for one in live)
    if mask in ("token", "pair"):
        assert any(one.any() and not one.all() for one in live)


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
        "quant": QUANTS,
        "contract": (1, 2),
        "shared": (0, 2, 3),
    }.items():
        assert {getattr(case, name) for case in cases} == set(values), name
    few = [draw(seed, world=(3,), ids=("mixed", "any")) for seed in range(12)]
    assert {case.world for case in few} == {3} and {case.ids for case in few} == {"mixed", "any"}
    assert draw(7) == draw(7) != draw(8)
