"""Wrong calls at random: bad arguments two at a time, and ranks that differ in any field."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import bad_arguments
import comm_cases
import failure_cases as cases
import pytest
import soak_rows
import soak_streams as streams
import torch
from bad_call import OPS, Bad
from failure_cases import HIDDEN, LOCAL, TOPK, Caught
from soak_rows import Tally
from test_bad_arguments import OP, Calls, epoch
from test_failures import OpRanks, fork_server, values
from test_failures_collective import Odd, assert_mismatch, assert_usable, call, outcomes

import ascend_moe
from ascend_moe.errors import AscendMoeError, CommError

__all__ = ["fork_server"]  # a fixture


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "5")
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "2")


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


@pytest.mark.asan
@soak_rows.row("invalid arguments", quick=200, full=4000, chunk=1000)
def test_two_wrong_arguments(numbers: range, tally: Tally) -> None:
    pairs = Pairs(1)

    def body(rank: int, group_ep: str) -> None:
        calls = Calls(1, rank, group_ep)
        tally.each(numbers, lambda number: wrong_twice(pairs, calls, (group_ep, 1, 0), number))

    with ascend_moe.LocalCluster(1) as cluster:
        cluster.run(body)


# ---- ranks that differ


def odd_call(rng: random.Random, world: int, seed: int) -> tuple[Odd, dict[str, Any]]:
    """What one rank calls with, and what all have in common."""
    op = rng.choice(OPS)
    experts = world * LOCAL
    other = f"{op}_v2" if not op.endswith("_v2") else op.removesuffix("_v2")
    versions = ("v1", "v2") if not op.endswith("_v2") else ("v2", "v1")
    hidden = 16 * rng.choice([n for n in range(1, 40) if 16 * n != HIDDEN])
    topk = rng.choice([k for k in range(1, 7) if k != TOPK])
    factor, batch, each = rng.randrange(2, 20), rng.choice([0, 1, 3, 5, 8]), rng.sample(range(4, 20), 2)
    dtype = rng.choice([torch.float16, torch.float32])
    odd = [
        Odd(op, "H", {"hidden": hidden}, "H", HIDDEN, hidden),
        Odd(op, "K", {"topk": topk}, "K", TOPK, topk),
        Odd(op, "E", {"moe_expert_num": factor * experts}, "E", experts, factor * experts),
        Odd(op, "BS", {"batch": batch}, "maxBS", 2, batch),
        Odd(op, "given", {"global_bs": each[0] * world}, "global_bs", 0, each[0] * world),
        Odd(op, "both", {"global_bs": each[0] * world}, "global_bs", each[1] * world, each[0] * world),
        Odd(op, "dtype", {"dtype": dtype}, "dtype", "bfloat16", str(dtype).removeprefix("torch.")),
        Odd(op, "contract", {"op": other}, "contract", *versions),
    ]
    if op.startswith("dispatch"):
        scales = torch.ones(experts, HIDDEN)
        odd += [
            Odd(op, "quantised", {"quant_mode": 2}, "quant_mode", 0, 2),
            Odd(op, "scales", {"quant_mode": 2, "scales": scales}, "scales", "None", "given"),
            Odd(op, "op", {"op": op.replace("dispatch", "combine")}, "op", "dispatch", "combine"),
        ]
    one = odd[seed % len(odd)]
    return one, {"both": {"global_bs": each[1] * world}, "scales": {"quant_mode": 2}}.get(one.label, {})


def differing(place: cases.Place, seed: int) -> Caught:
    """This rank's call in the case of a seed."""
    odd, common, guilty = drawn(seed, place.world)
    arguments = {"op": odd.op, **common, **(odd.changes if place.rank == guilty else {})}
    return cases.caught(call, place, **arguments)


def drawn(seed: int, world: int) -> tuple[Odd, dict[str, Any], int]:
    rng = random.Random(seed)
    guilty = rng.randrange(world)
    return *odd_call(rng, world, seed), guilty


def judged(found: list[Caught], seed: int) -> tuple[str, float]:
    """Every rank has named the field and both values, within a second of the last call."""
    odd, _, guilty = drawn(seed, len(found))
    assert_mismatch(found, guilty, odd.field, odd.usual, odd.odd)
    last = max(one.began for one in found)
    return odd.field, max(one.ended for one in found) - last


@pytest.fixture
def clusters() -> Iterator[dict[int, ascend_moe.LocalCluster]]:
    opened = {world: ascend_moe.LocalCluster(world).__enter__() for world in (2, 3, 4)}
    yield opened
    for cluster in opened.values():
        cluster.__exit__(None, None, None)


@pytest.mark.asan
@soak_rows.row("configuration mismatch", quick=10, full=200)
def test_ranks_that_differ(
    clusters: dict[int, ascend_moe.LocalCluster], numbers: range, tally: Tally
) -> None:
    def case(seed: int) -> tuple[str, float]:
        cluster = clusters[2 + seed % 3]
        found = outcomes(cluster, lambda place: differing(place, seed))
        result = judged([one.value for one in found], seed)
        assert_usable(cluster)
        return result

    tally.each(numbers, case)


def differing_here(seed: int) -> Caught:
    """In a rank process."""
    return differing(cases.here(), seed)


def windows_differ(ranks: OpRanks, seed: int) -> tuple[str, float]:
    """Found when fresh windows are opened; one value on all ranks, and they open."""
    guilty, odd, usual = seed // 10 % 3, random.Random(seed).choice([1, 3, 4, 200]), 2
    values(ranks.call(comm_cases.close))
    values(ranks.call(comm_cases.set_on, guilty, "HCCL_BUFFSIZE", str(odd)))
    found = ranks.call(streams.stream, 1)
    for rank, outcome in enumerate(found):
        assert outcome.error == "ConfigMismatch", f"{outcome.error}: {outcome.text}"
        mib = (odd, usual) if rank == guilty else (usual, odd)
        details = outcome.details
        assert (details["field"], details["ours"], details["theirs"]) == ("HCCL_BUFFSIZE", *mib)
        assert outcome.seconds < 1
    values(ranks.call(comm_cases.set_env, "HCCL_BUFFSIZE", str(usual)))
    values(ranks.call(streams.stream, 1, seed))
    return "HCCL_BUFFSIZE", max(outcome.seconds for outcome in found)


@soak_rows.row("configuration mismatch", quick=10, full=200)
def test_rank_processes_that_differ(numbers: range, tally: Tally) -> None:
    with OpRanks(3, timeout_s=5) as ranks:
        values(ranks.call(streams.prepare, 3))

        def case(seed: int) -> tuple[str, float]:
            if seed % 10 == 9:
                return windows_differ(ranks, seed)
            result = judged(values(ranks.call(differing_here, seed)), seed)
            values(ranks.call(streams.stream, 1, seed))
            return result

        tally.each(numbers, case)
