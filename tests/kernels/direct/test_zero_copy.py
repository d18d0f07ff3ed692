"""Combine that sends from window tensors: every bit that of the reference, on any mix of ranks."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import op_runs
import pytest
import torch
from op_runs import Clusters, Lend, RankRun
from test_direct import drawn, routed

import ascend_moe
from ascend_moe.comm import lookup
from ascend_moe.ops import calls
from ascend_moe.reference.cases import Case, draw

DOC = Path(__file__).resolve().parents[3] / "docs" / "zero_copy.md"
SEQUENCES = ["DC" * 6, "DDCC" * 3, "DDDCCC" * 2, "DDCDCC" * 2, "DCDDCC" * 2]


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "direct")


def lent_copy(case: Case, rank: int, group_ep: str, rows: torch.Tensor, most: int, how: int) -> torch.Tensor:
    """The rows in a window tensor: of their size, of the most that may arrive, or in the midst of one."""
    count, hidden = rows.shape
    size = (count, max(most, count), count + 9)[how]
    made = ascend_moe.window_empty(
        (size, hidden), dtype=case.torch_dtype, group_ep=group_ep, ep_world_size=case.world, ep_rank_id=rank
    )
    begin = 8 if how == 2 else 0
    made[begin : begin + count] = rows
    return made[8 : 8 + count] if how == 2 else made


def lending(lends: Sequence[bool]) -> Lend:
    """Rows of the ranks that lend lie in their windows, each in its own way."""

    def lend(case: Case, rank: int, group_ep: str, rows: torch.Tensor, most: int) -> torch.Tensor:
        if not lends[rank]:
            return rows
        return lent_copy(case, rank, group_ep, rows, most, (case.cores + rank) % 3)

    return lend


def check_traffic(lends: Sequence[bool], case: Case, runs: list[RankRun]) -> None:
    """Lent rows are never written by a kernel, and read where they lie, once a pair."""
    row = case.hidden * case.torch_dtype.itemsize
    for rank, (one, given) in enumerate(zip(runs, case.inputs, strict=True)):
        rows = int(one.dispatched[4][case.experts - 1])
        owners = given.expert_ids[routed(given)] // case.local
        own = int((owners == rank).sum())
        moved = one.traffic[1]
        assert moved["written_window_lent"] == 0
        assert moved["written_window_data"] == (0 if lends[rank] else (rows - own) * row), rank
        lent_pairs = sum(int((owners == owner).sum()) for owner in range(case.world) if lends[owner])
        assert moved["read_window_lent"] == lent_pairs * row, rank


# ---- equal in every bit


@pytest.mark.parametrize(
    ("first", "share"),
    [
        (0, 1.0),
        (5000, 0.5),
        *(pytest.param(first, 1.0, marks=pytest.mark.nightly) for first in range(50, 300, 50)),
        *(pytest.param(first, 0.5, marks=pytest.mark.nightly) for first in range(5050, 5200, 50)),
    ],
)
def test_equals_the_reference(clusters: Clusters, first: int, share: float) -> None:
    sound = 0
    for seed in range(first, first + 50):
        case, rng = drawn(seed), random.Random(seed)
        lends = [rng.random() < share for _ in range(case.world)]
        runs = op_runs.run(clusters[case.world], case, lending(lends))
        sound += op_runs.check(case, runs, functools.partial(check_traffic, lends))
    assert sound > 25


# ---- sequences: batches in flight, and memory that is used again


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
        op_runs.check_sums(case, runs, case.dispatched())


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
@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 12), marks=pytest.mark.nightly)], ids=["3 seeds", "9 seeds"]
)
def test_sequences(clusters: Clusters, sequence: str, seeds: range) -> None:
    for seed in seeds:
        cases = sequence_cases(seed, sequence)
        with op_runs.cores(cases[0].cores):
            by_rank = clusters[cases[0].world].run(
                lambda rank, group, c=cases, s=seed: run_sequence(c, sequence, s, rank, group)
            )
        check_results(cases, by_rank)


# ---- docs/zero_copy.md


def test_the_example_of_the_page_gives_what_the_copying_combine_gives() -> None:
    world, experts, hidden, inner = 2, 4, 64, 32
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(DOC), "exec"), names)

    def work(rank: int, group: str) -> tuple[torch.Tensor, int, int]:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(8, hidden, generator=generator).bfloat16()
        ids = torch.randint(0, experts, (8, 2), generator=generator, dtype=torch.int32)
        weights = torch.rand(8, 2, generator=generator)
        gate_up = torch.randn(2, hidden, 2 * inner, generator=generator).bfloat16()
        down = torch.randn(2, inner, hidden, generator=generator).bfloat16()
        place = {"group_ep": group, "ep_world_size": world, "ep_rank_id": rank}
        result = names["moe"](x, ids, weights, gate_up, down, **place)
        moved = calls.traffic(lookup(group, world, rank))
        return result, moved["written_window_data"], moved["read_window_lent"]

    with ascend_moe.LocalCluster(world, window_mib=1) as cluster:
        lent = cluster.run(work)
        # The package with tensors of torch in the place of window tensors.
        plain = {"window_empty": lambda shape, dtype, **_: torch.empty(shape, dtype=dtype)}
        names["ascend_moe"] = SimpleNamespace(**{**vars(ascend_moe), **plain})
        copied = cluster.run(work)
    for one, two in zip(lent, copied, strict=True):
        assert torch.equal(one[0], two[0]) and one[0].any()
        assert one[1] < 256 and one[2] == 8 * 2 * hidden * 2  # a table; a row a pair
        assert two[1] > 4 * hidden * 2 and two[2] == 0
