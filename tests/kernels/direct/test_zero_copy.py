"""Combine that sends from window tensors: every bit that of the copying combine, on any mix of ranks."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import op_runs
import pytest
import torch
from gloo_ranks import run_processes
from op_runs import Clusters, RankRun
from test_direct import drawn

import ascend_moe
import ascend_moe.reference as ref
from ascend_moe import comm
from ascend_moe.errors import AscendMoeError
from ascend_moe.ops import calls
from ascend_moe.reference.cases import Case, draw

PART = 50  # cases a test


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")


def window_rows(case: Case, rank: int, group_ep: str, shape: Sequence[int]) -> torch.Tensor:
    return ascend_moe.window_empty(
        shape, dtype=case.torch_dtype, group_ep=group_ep, ep_world_size=case.world, ep_rank_id=rank
    )


def lent_copy(case: Case, rank: int, group_ep: str, rows: torch.Tensor, most: int, how: int) -> torch.Tensor:
    """The rows in a window tensor: of their size, of the most that may arrive, or in the midst of one."""
    hidden = rows.shape[1]
    if how == 0:
        return window_rows(case, rank, group_ep, rows.shape).copy_(rows)
    if how == 1:
        made = window_rows(case, rank, group_ep, (max(most, rows.shape[0]), hidden))
        made[: rows.shape[0]] = rows
        return made
    made = window_rows(case, rank, group_ep, (rows.shape[0] + 9, hidden))
    return made[8 : 8 + rows.shape[0]].copy_(rows)


def run_rank(case: Case, rank: int, group_ep: str, lends: Sequence[bool]) -> RankRun | AscendMoeError:
    """As op_runs.run_rank, with rows in the window where ``lends[rank]``."""
    try:
        sent = op_runs.dispatch(case, rank, group_ep)
        end = comm.lookup(group_ep, case.world, rank)
        moved = [calls.traffic(end)]
        rows = op_runs.expert_rows(case, rank, sent)
        given = rows
        if lends[rank]:
            given = lent_copy(case, rank, group_ep, rows, sent[0].shape[0], (case.cores + rank) % 3)
        result = op_runs.combine(case, rank, group_ep, given, sent)
        return RankRun(sent, rows, result, [*moved, calls.traffic(end)])
    except AscendMoeError as error:
        return error


def run(clusters: Clusters, case: Case, lends: Sequence[bool]) -> list[RankRun | AscendMoeError]:
    with op_runs.cores(case.cores):
        return clusters[case.world].run(lambda rank, group: run_rank(case, rank, group, lends))


def check_traffic(case: Case, runs: list[RankRun], lends: Sequence[bool]) -> None:
    """Lent rows are never written by a kernel, and read where they lie, once a pair."""
    row = case.inputs[0].x.shape[1] * case.inputs[0].x.element_size()
    local = case.experts // case.world
    for rank, (one, given) in enumerate(zip(runs, case.inputs, strict=True)):
        rows = int(one.dispatched[4][case.experts - 1])
        moved = one.traffic[1]
        assert moved["written_window_lent"] == 0
        live = given.expert_ids >= 0
        mask = given.x_active_mask
        if mask is not None:
            live &= mask if mask.dim() == 2 else mask[:, None]
        owners = given.expert_ids[live] // local
        own = int((owners == rank).sum())
        assert moved["written_window_data"] == (0 if lends[rank] else (rows - own) * row), rank
        lent_pairs = sum(int((owners == owner).sum()) for owner in range(case.world) if lends[owner])
        assert moved["read_window_lent"] == lent_pairs * row, rank


def check(case: Case, runs: Sequence[RankRun | AscendMoeError], lends: Sequence[bool]) -> bool:
    """Against the reference; whether the call was a sound one."""

    def traffic(case: Case, good: list[RankRun]) -> None:
        check_traffic(case, good, lends)

    before, op_runs.check_traffic = op_runs.check_traffic, traffic
    try:
        op_runs.check(case, runs)
    finally:
        op_runs.check_traffic = before
    return not any(isinstance(one, BaseException) for one in runs)


# ---- equal in every bit


@pytest.mark.parametrize("first", range(0, 6 * PART, PART))
def test_equals_the_reference(clusters: Clusters, first: int) -> None:
    sound = 0
    for seed in range(first, first + PART):
        case = drawn(seed)
        sound += check(case, run(clusters, case, [True] * case.world), [True] * case.world)
    assert sound > PART // 2


@pytest.mark.parametrize("first", range(5000, 5000 + 4 * PART, PART))
def test_some_ranks_lend_and_others_copy(clusters: Clusters, first: int) -> None:
    for seed in range(first, first + PART):
        case, rng = drawn(seed), random.Random(seed)
        lends = [rng.random() < 0.5 for _ in range(case.world)]
        check(case, run(clusters, case, lends), lends)


@pytest.mark.parametrize("first", range(9000, 9000 + 2 * PART, PART))
def test_equals_window_and_copying_direct(
    clusters: Clusters, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first, first + PART):
        case = drawn(seed)
        lent = run(clusters, case, [True] * case.world)
        copied = run(clusters, case, [False] * case.world)
        monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "window")
        window = run(clusters, case, [True] * case.world)
        monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")
        for one, two, three in zip(lent, copied, window, strict=True):
            if isinstance(one, RankRun) and isinstance(two, RankRun) and isinstance(three, RankRun):
                assert ref.same_bits(one.result, two.result), seed
                assert ref.same_bits(one.result, three.result), seed
            else:
                assert type(one) is type(two) is type(three) and str(one) == str(two) == str(three)


# ---- sequences: batches in flight, and memory that is used again


SEQUENCES = ["DC" * 6, "DDCC" * 3, "DDDCCC" * 2, "DDCDCC" * 2, "DCDDCC" * 2]


def run_sequence(cases: list[Case], sequence: str, seed: int, rank: int, group_ep: str) -> list[RankRun]:
    """Each D opens the next case, each C combines the oldest that is open. Tensors die at odd times."""
    rng = random.Random(seed)  # the same on all ranks; who lends is drawn for every op
    done: list[RankRun] = []
    flying: list[tuple[Case, Any, torch.Tensor, torch.Tensor]] = []
    kept: list[torch.Tensor] = []
    following = iter(cases)
    for op in sequence:
        if op == "D":
            case = next(following)
            sent = op_runs.dispatch(case, rank, group_ep)
            rows = op_runs.expert_rows(case, rank, sent)
            lends, how = [rng.random() < 0.8 for _ in range(case.world)][rank], rng.randrange(3)
            given = lent_copy(case, rank, group_ep, rows, sent[0].shape[0], how) if lends else rows
            flying.append((case, sent, rows, given))
        else:
            case, sent, rows, given = flying.pop(0)
            result = op_runs.combine(case, rank, group_ep, given, sent)
            done.append(RankRun(sent, rows, result, []))
            kept.append(given)
            del given
            while kept and rng.random() < 0.7:
                kept.pop(rng.randrange(len(kept)))
    return done


def check_results(cases: list[Case], by_rank: Sequence[Sequence[RankRun]]) -> None:
    for case, runs in zip(cases, zip(*by_rank, strict=True), strict=True):
        expected = case.dispatched()
        sums = case.combined([one.rows for one in runs], expected)
        for rank, one in enumerate(runs):
            report = ref.validate("combine", one.result, sums[rank], rank=rank)
            assert report.ok, report.text


def sequence_cases(seed: int, sequence: str, world: int = 0) -> list[Case]:
    """Cases of one shape, of other values and routes each."""
    first = draw(
        seed,
        world=(world,) if world else (2, 3, 4),
        local=(1, 3),
        topk=(1, 3),
        units=(1, 5, 20),
        batch=(3, 9),
        ids=("distinct",),
        quant=("none",),
        cores=(1, 3, 8),
    )
    return [replace(first, seed=seed * 1000 + number) for number in range(sequence.count("D"))]


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("seed", range(12))
def test_sequences(clusters: Clusters, sequence: str, seed: int) -> None:
    cases = sequence_cases(seed, sequence)
    with op_runs.cores(cases[0].cores):
        by_rank = clusters[cases[0].world].run(
            lambda rank, group: run_sequence(cases, sequence, seed, rank, group)
        )
    check_results(cases, by_rank)


# ---- processes

PROCESS_SEEDS = range(100, 108)


def in_process(rank: int, world: int) -> list[list[dict[str, Any]]]:
    group_ep = ascend_moe.comm_name()
    found = []
    for seed in PROCESS_SEEDS:
        for sequence in SEQUENCES[:3]:
            cases = sequence_cases(seed, sequence, world)
            with op_runs.cores(cases[0].cores):
                runs = run_sequence(cases, sequence, seed, rank, group_ep)
            found.append([dict(vars(one)) for one in runs])
    ascend_moe.close(group_ep)
    return found


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_processes(world: int, tmp_path: Path) -> None:
    results = run_processes(world, functools.partial(in_process, world=world), tmp_path)
    number = 0
    for seed in PROCESS_SEEDS:
        for sequence in SEQUENCES[:3]:
            cases = sequence_cases(seed, sequence, world)
            check_results(cases, [[RankRun(**one) for one in results[rank][number]] for rank in range(world)])
            number += 1
