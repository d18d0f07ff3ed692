"""Bad arguments two at a time, and values that arithmetic treats specially."""

from __future__ import annotations

import random
from dataclasses import replace

import bad_arguments
import op_runs
import pytest
import soak_rows
import torch
from bad_arguments import OPS, Bad
from op_runs import Clusters, RankRun
from soak_rows import Tally
from test_bad_arguments import OP, Calls, epoch

import ascend_moe
import ascend_moe.reference as ref
from ascend_moe.errors import AscendMoeError, CommError
from ascend_moe.reference.cases import DTYPES, Case, draw, legal

pytestmark = pytest.mark.asan

SPECIALS = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, 1e-40, -1e-38, 3.0e38, 6.0e4)


def drawn(rng: random.Random, **fixed: object) -> Case:
    """A legal case, small, with ids that do not collide with a capacity."""
    case = draw(
        rng.randrange(2**32),
        world=(1, 2, 3),
        topk=(1, 2, 3),
        units=(1, 2, 3, 33),
        batches=("equal", "unequal"),
        mask=("none", "none", "token", "pair"),
        ids=("distinct",),
        cores=(1, 2, 8, 48),
        odd=(False,),
    )
    return legal(replace(case, **fixed))


def good(case: Case, runs: list[RankRun | AscendMoeError]) -> list[RankRun]:
    """Equal to the reference, and no error."""
    op_runs.check(case, runs)
    assert all(isinstance(one, RankRun) for one in runs), runs
    return [one for one in runs if isinstance(one, RankRun)]


def spoil(rng: random.Random, case: Case) -> list[set[int]]:
    """Puts special values into some tokens and weights of every rank; returns those tokens."""
    spoilt: list[set[int]] = []
    for one in case.inputs:
        batch, hidden = one.x.shape
        tokens = set(rng.sample(range(batch), rng.randrange(batch + 1)))
        assert one.expert_scales is not None
        for token in tokens:
            value = rng.choice(SPECIALS)
            if rng.random() < 0.3:
                one.x[token] = value
            else:
                one.x[token, rng.randrange(hidden)] = value
            if rng.random() < 0.5:
                at = rng.randrange(one.expert_scales.shape[1])
                one.expert_scales[token, at] = rng.choice([0.0, *SPECIALS])
        spoilt.append(tokens)
    return spoilt


def unharmed(seed: int, clusters: Clusters) -> str:
    """Equal to the reference, NaN where it has NaN; other tokens come back as without the neighbours."""
    rng = random.Random(seed)
    spec = drawn(rng, batch=rng.choice([2, 4, 7]))
    plain = replace(spec)
    before = good(plain, op_runs.run(clusters[spec.world], plain))
    case = replace(spec)
    spoilt = spoil(rng, case)
    after = good(case, op_runs.run(clusters[spec.world], case))
    for rank, tokens in enumerate(spoilt):
        clean = [token for token in range(case.inputs[rank].x.shape[0]) if token not in tokens]
        same = ref.same_bits(after[rank].result[clean], before[rank].result[clean])
        assert same, f"rank {rank}: tokens beside {sorted(tokens)} have changed"
    if seed % 5 == 0:
        zero_times_nan(rng, clusters)
    return "with NaN in the result" if any(one.result.isnan().any() for one in after) else "without"


def zero_times_nan(rng: random.Random, clusters: Clusters) -> None:
    """A weight of zero does not hide a NaN token, and hides it from nobody else."""
    dtype = DTYPES[rng.choice(list(DTYPES))]
    x = torch.randn(4, 32).to(dtype)
    x[1] = float("nan")
    weights = torch.rand(4, 2)
    weights[1] = 0
    ids = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]], dtype=torch.int32)
    case = Case.of([ref.RankInput(x, ids, expert_scales=weights) for _ in range(2)], 2)
    for one in good(case, op_runs.run(clusters[2], case)):
        assert one.result[1].isnan().all() and not one.result[[0, 2, 3]].isnan().any()


@soak_rows.row("special values", quick=20, full=500, chunk=125)
def test_special_values_stay_where_they_are(clusters: Clusters, numbers: range, tally: Tally) -> None:
    tally.each(numbers, lambda seed: unharmed(seed, clusters))


# ---- bad arguments


class Pairs:
    """Two sets of bad arguments of one op in one call, chosen by a number."""

    def __init__(self, world: int) -> None:
        self.by_op: dict[str, list[Bad]] = {op: [] for op in OPS}
        for bad in bad_arguments.table(world):
            if bad.raised_by == "each":
                self.by_op[bad.op].append(bad)

    def __getitem__(self, number: int) -> tuple[Bad, Bad]:
        rng = random.Random(number)
        op = rng.choice(OPS)
        while True:
            one, other = rng.sample(self.by_op[op], 2)
            if not set(one.changes) & set(other.changes):
                return one, other


def wrong_twice(pairs: Pairs, calls: Calls, place: tuple[str, int, int], number: int) -> str:
    """The error is typed, in one line, names an argument that is wrong, and has touched nothing."""
    one, other = pairs[number]
    valid, before = calls.valid[one.op], epoch(*place)
    arguments = {**one.apply(valid, True)}
    arguments.update(
        {name: value(valid) if callable(value) else value for name, value in other.changes.items()}
    )
    wrong = {*one.changes, *other.changes}
    label = f"{one.op}, {one.label} and {other.label}"
    try:
        OP[one.op](**arguments)
    except AscendMoeError as error:
        text, named = str(error), getattr(error, "argument", None)
        assert not isinstance(error, CommError), f"{label}: {error!r}"
        assert "\n" not in text and len(text) < 400, f"{label}: not one line: {text!r}"
        assert named is not None and named in text, f"{label}: {text}"
        assert named in wrong or any(word in text for word in wrong), f"{label}: names {named}: {text}"
    else:
        raise AssertionError(f"{label}: accepted")
    assert epoch(*place) == before, f"{label}: the window was touched"
    assert calls.still_right(one.op), f"{label}: the valid call after it went wrong"
    return f"two wrong arguments in {one.op}"


@soak_rows.row("invalid arguments", quick=200, full=4000, chunk=1000)
def test_two_wrong_arguments(numbers: range, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "2")
    pairs = Pairs(1)

    def body(rank: int, group_ep: str) -> None:
        calls = Calls(1, rank, group_ep)
        tally.each(numbers, lambda number: wrong_twice(pairs, calls, (group_ep, 1, 0), number))

    with ascend_moe.LocalCluster(1) as cluster:
        cluster.run(body)
