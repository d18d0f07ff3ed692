"""Values that arithmetic treats specially, and uneven loads: the twin against the reference."""

from __future__ import annotations

import random
from dataclasses import replace

import op_runs
import pytest
import soak_rows
import torch
from op_runs import Clusters, RankRun
from soak_rows import Tally

import ascend_moe.reference as ref
from ascend_moe.errors import AscendMoeError
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


# ---- values


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


# ---- loads


LOADS = ("no tokens at all", "one rank without tokens", "all to one expert", "ids given twice")
LOADS = (*LOADS, "fewer tokens than cores", "more tokens than cores")


def loaded(seed: int, clusters: Clusters) -> str:
    rng = random.Random(seed)
    kind = LOADS[seed % len(LOADS)]
    spec = drawn(rng, world=rng.choice([2, 3, 4]))
    if kind == "no tokens at all":
        spec = replace(spec, batch=0, batches=rng.choice(["equal", "global_bs"]))
    elif kind == "one rank without tokens":
        spec = replace(spec, batches="zero rank", batch=rng.choice([1, 4, 9]))
    elif kind == "all to one expert":
        spec = replace(spec, batch=rng.choice([1, 4, 9]), mask="none")
    elif kind == "ids given twice":
        spec = replace(
            spec, batch=rng.choice([1, 4, 9]), local=rng.choice([2, 3]), topk=rng.choice([2, 3, 4])
        )
    elif kind == "fewer tokens than cores":
        spec = replace(spec, batch=rng.choice([1, 2, 3]), cores=rng.choice([24, 48, 64]))
    else:
        spec = replace(spec, batch=rng.choice([24, 33, 70]), cores=rng.choice([1, 2, 3, 7]))
    case = replace(spec)
    if kind == "all to one expert":
        expert = rng.randrange(case.experts)
        for one in case.inputs:  # once a token, as far as ranks take it
            one.expert_ids[:] = -1
            one.expert_ids[:, rng.randrange(one.expert_ids.shape[1])] = expert
    elif kind == "ids given twice":
        repeat(rng, case)
    fault = case.fault()
    assert fault is None, fault
    good(case, op_runs.run(clusters[spec.world], case))
    return kind


def repeat(rng: random.Random, case: Case) -> None:
    """Ids that come several times in a row, each as often as an owner takes rows of a token."""
    local = case.experts // case.world
    for one in case.inputs:
        for ids in one.expert_ids:
            most = min(len(ids), local)
            owners = rng.sample(range(case.world), min(case.world, -(-len(ids) // most)))
            experts = [owner * local + rng.randrange(local) for owner in owners]
            row = [expert for expert in experts for _ in range(most)][: len(ids)]
            row += [-1] * (len(ids) - len(row))
            rng.shuffle(row)
            ids[:] = torch.tensor(row, dtype=torch.int32)


@soak_rows.row("loads", quick=42, full=1000, chunk=250)
def test_uneven_loads(clusters: Clusters, numbers: range, tally: Tally) -> None:
    tally.each(numbers, lambda seed: loaded(seed, clusters))
