"""Plans of drawn calls: each fits into UB and into the event ids, or is refused by name; the tightest run.

A plan is what PlanCall makes; UB is summed by item (op_host/rules/ub.h), which test_plan.py compares with what the
kernels carve.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

import pytest
from op_host_calls import probe

from ascend_moe import explore
from ascend_moe.call import SpecialExperts
from ascend_moe.explore import program
from ascend_moe.reference.cases import DTYPES

ALL, TINY, SMALL, SHORT, FULL = range(5)  # scopes of plan_sweep.cpp
TYPES = {1: "fp32", 2: "fp16", 3: "bf16"}  # of rows, as op_host numbers them
LEAST_GRANTED = 180_000  # UB of a core
EVENT_IDS, MOST_RING = 8, 6  # of a pair of pipes; what rings may hold of them
REFUSAL = re.compile(
    r"(x|expand_x) has H = (?P<row>\d+ \w+), which with E \d+, W \d+, K \d+ on \d+ cores needs (?P<needs>\d+) bytes of "
    r"UB a core in the step \w+ of '(direct|window|hierarchy)', a core has (?P<has>\d+): use (bfloat16 or float16, )?"
    r"(?P<less>a smaller H, or )?fewer experts"
)


@dataclass(frozen=True)
class Sweep:
    """Holds what one sweep found. ``by_ids``: plans by the ids that their queues hold of the fullest pair."""

    planned: int
    refused: int
    above_ub: int
    above_ids: int
    by_ids: list[int]
    lines: list[str]


def sweep(scope: int, first: int, count: int) -> Sweep:
    totals, text = (ctypes.c_uint64 * 64)(), ctypes.create_string_buffer(1 << 16)
    seeds = ctypes.c_uint64(first), ctypes.c_uint64(count)
    probe().probe_sweep(*seeds, scope, totals, text, ctypes.c_uint64(len(text)))
    numbers = list(totals)
    return Sweep(*numbers[:4], numbers[4 : 4 + 16], text.value.decode().splitlines())


def assert_all_fit(scope: int, first: int, count: int) -> None:
    found = sweep(scope, first, count)
    assert (found.above_ub, found.above_ids, found.lines) == (0, 0, [])
    assert (found.planned, found.refused) == (count, 0)
    assert sum(found.by_ids[: MOST_RING + 1]) == count and MOST_RING <= EVENT_IDS - 2
    assert found.by_ids[MOST_RING] > count // 100  # the limit is reached, else it would not be tried


@pytest.mark.parametrize(("scope", "count"), [(ALL, 40_000), (FULL, 80_000)])
def test_every_plan_fits(scope: int, count: int) -> None:
    """With the UB that platforms grant no legal call is refused for want of it."""
    assert_all_fit(scope, 0, count)


@pytest.mark.nightly
@pytest.mark.parametrize("scope", [ALL, FULL])
def test_every_plan_fits_nightly(scope: int) -> None:
    assert_all_fit(scope, 80_000, 2_000_000)


def test_with_less_ub_a_plan_fits_or_is_refused_by_name() -> None:
    """Neither above UB nor without end, whatever a platform says."""
    found = sweep(TINY, 0, 10_000)
    assert (found.above_ub, found.above_ids, found.planned + found.refused) == (0, 0, 10_000)
    assert min(found.planned, found.refused) > 1_000
    assert {line.split(" ")[0] for line in found.lines} == {"x", "expand_x"}
    for line in found.lines:
        match = REFUSAL.fullmatch(line)
        assert match and int(match["needs"]) > int(match["has"]), line
        assert (match["less"] is None) == (match["row"] in ("8 float32", "16 float16", "16 bfloat16")), line


# ---- the tightest, run

LEAST = {"batches": "equal", "ids": "distinct", "sequence": "DC", "ub_bytes": LEAST_GRANTED}


@pytest.mark.parametrize(
    "case",
    [
        program.Program(
            world=1,
            cores=3,
            local=1024,
            topk=8,
            batch=9,
            units=1,
            dtype="bf16",
            comm_quant_mode=2,
            algorithm="direct",
            **LEAST,
        ),
        program.Program(world=2, cores=3, local=512, topk=3, batch=2, units=2048, dtype="fp32", contract=2, **LEAST),
    ],
    ids=["shortest coded rows", "longest rows"],
)
def test_rows_at_the_ends_with_the_most_experts_run(case: program.Program) -> None:
    """With fewer rows in a chunk, and with one histogram at a time."""
    assert explore.campaign([program.checked(case)], schedules=1, seed=1).finding is None


def tightest(scope: int, most: int) -> list[dict[str, str]]:
    """Returns of drawn calls those with the least free UB, as many of each step as there are."""
    text = ctypes.create_string_buffer(1 << 16)
    probe().probe_tightest(scope, ctypes.c_uint64(60_000), most, text, ctypes.c_uint64(len(text)))
    return [dict(word.split("=") for word in line.split(";")) for line in text.value.decode().splitlines()]


def program_of(plan: dict[str, str]) -> program.Program:
    number = {name: int(value) for name, value in plan.items() if name not in ("step", "pair")}
    dtype, dispatch = TYPES[number["type"]], number["op"] == 1
    same = ("world", "cores", "local", "topk", "batch", "contract", "list_cores", "ub_bytes")
    return program.checked(
        program.Program(
            **{name: number[name] for name in same},
            units=number["hidden"] * DTYPES[dtype].itemsize // 32,
            dtype=dtype,
            quant_mode=2 if dispatch and number["quant"] else 0,
            smooth=bool(dispatch and number["quant"] and number["scales"]),
            comm_quant_mode=2 if number["quant"] and not dispatch else 0,
            **SpecialExperts(number["zero"], number["copy"], number["const"]).given,
            alphas=number["alphas"] or 1,
            weights=bool(number["weights"] and dispatch),
            plain=not number["weights"] and not dispatch,
            shared=2 * number["shared"],
            mask=("none", "token", "pair")[number["mask"]],
            algorithm=("", "window", "direct")[number["algorithm"]],
            batches="equal",
            ids="distinct",
            sequence="DC" if not dispatch or number["ub_bytes"] >= LEAST_GRANTED else "D",
            seed=number["seed"],
        )
    )


TIGHT = {SMALL: 120, SHORT: 80}
STEPS = {
    SMALL: {"send", "copy", "sum", "publish", "gather", "return"},
    SHORT: {"send", "copy", "sum", "publish", "lists", "gather", "return"},
}


def cost_of(case: program.Program) -> int:
    """About how long the checked engine takes: bytes of rows, and polls for messages."""
    rows = case.world * case.batch * case.topk * case.units * 32 * (4 if case.quant_mode else 1)
    return rows + case.world**2 * case.cores * (case.local + 8) * 8


# The cheap ones with every change.
SOON = {SMALL: 12, SHORT: 15}


@pytest.mark.parametrize("soon", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("scope", [SMALL, SHORT])
def test_the_tightest_plans_run(scope: int, soon: bool) -> None:
    """On the checked engine, against the reference, with no finding: no buffer too many and no event id too many."""
    plans = tightest(scope, TIGHT[scope])
    assert len(plans) == TIGHT[scope] and all(0 <= int(plan["free"]) < 16_384 for plan in plans)
    assert {plan["step"] for plan in plans} >= STEPS[scope] and {plan["split"] for plan in plans} == {"0", "1"}
    cases = sorted(map(program_of, plans), key=cost_of)
    for case in cases[: SOON[scope]] if soon else cases[SOON[scope] :]:
        result = explore.campaign([case], schedules=1, seed=1)
        assert result.finding is None, result.finding.line()
        assert result.schedules == 1
