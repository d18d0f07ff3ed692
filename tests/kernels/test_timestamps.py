"""Stamps of phases: their clock, their order, what they cost, and that an op with them gives the same."""

from __future__ import annotations

import random
import re
from statistics import fmean, median

import pytest

from ascend_moe import explore
from ascend_moe.native import library
from ascend_moe.native.timestamps import END, LAUNCH, OPS, Timestamp, of_words, spent, words_of_core
from ascend_moe.plan import Request
from ascend_moe.predict.world import TimedWorld
from ascend_moe.settings import CORE_BARRIER, TIMESTAMPS
from ascend_moe.validate import times
from ascend_moe.validate.probes_kernel import CYCLES_PER_MICRO
from ascendc_twin.soc import cost_table
from ascendc_twin.timeline import PHASE, Event

ORDER = {
    ("window", "dispatch"): ["SendBuffInit", "AlltoAllDispatch", "SetStatus", "WaitStatus", "LocalWindowCopy"],
    ("window", "combine"): ["BuffInit", "SetWaitTpStatusAndDisPatch", "SetStatus", "WaitStatus", "LocalWindowCopy"],
    ("direct", "dispatch"): ["BuffInit", "PublishRows", "PublishLists", "SetStatus", "WaitStatus", "GatherRows"],
    ("direct", "combine"): ["BuffInit", "ReturnRows", "SetStatus", "WaitStatus", "SumRows"],
    ("hierarchy", "dispatch"): [
        *("SendBuffInit", "AlltoAllDispatch", "SetStatus", "WaitStatus", "ForwardRows", "WaitStatus", "LocalWindowCopy")
    ],
    ("hierarchy", "combine"): [
        "BuffInit",
        *(["SetWaitTpStatusAndDisPatch", "SetStatus", "WaitStatus", "SumServer"] * 2),
        *("WaitStatus", "SumRows"),
    ],
}


@pytest.mark.parametrize("algorithm", ["window", "direct"])
def test_timestamps_are_the_engines_times_and_cost_nothing_where_they_are_off(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(ranks=4, experts=32, topk=4, hidden=2048, batch=4, quant_mode=2, soc="Ascend910_9391", cores=12)
    costs = {name: cost.value for name, cost in cost_table(request.soc).items()}
    counted, times = {}, {}
    for given in ("1", "0"):
        monkeypatch.setenv(TIMESTAMPS.name, given)
        with TimedWorld(request, algorithm, 0, False) as world:
            for op in ("dispatch", "combine"):
                found = world.run(op, costs, events=100_000)
                counted[op, given], times[op, given] = found.instructions, found.us
                timestamps = world.timestamps(op, 1)
                if given == "1":
                    assert_same(timestamps, [event for event in found.events if event.rank == 1], ORDER[algorithm, op])
                else:
                    assert not timestamps
    for op in ("dispatch", "combine"):  # a store a core, when all else is done
        assert counted[op, "1"] == counted[op, "0"] + request.ranks * request.cores
        assert times[op, "0"] < times[op, "1"] < times[op, "0"] + 2


def assert_same(timestamps: list[Timestamp], events: list[Event], order: list[str]) -> None:
    """A phase with instructions begins in the timeline with the first of them, at most 2 us after its timestamp."""
    inner = {
        (timestamp.core, timestamp.phase): timestamp.cycles
        for timestamp in timestamps
        if timestamp.phase not in (LAUNCH, END)
    }
    marks = {(e.core, e.phase): e.start_ns / 20 for e in events if e.name == PHASE and e.phase != LAUNCH}
    assert inner.keys() >= marks.keys()
    late = [cycles - inner[place] for place, cycles in marks.items()]
    assert max(late) - min(late) <= 100
    assert [name for name in order if name in {phase for _, phase in inner}] == order
    ends = [one for one in timestamps if one.phase in (LAUNCH, END)]
    assert [timestamp.phase for timestamp in ends] == [LAUNCH, END] * 12 and min(
        timestamp.cycles for timestamp in ends
    ) == 0


@pytest.mark.parametrize("text", ["v1,DC,window", "v2,DC,window", "v2,DC,direct"])
@pytest.mark.parametrize(("name", "value"), [(TIMESTAMPS.name, "1"), (CORE_BARRIER.name, "syncall")])
def test_no_schedule_finds_a_race_in_timestamps_and_in_barriers_by_syncall(
    text: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    found = explore.campaign([explore.parse(f"w2,c3,l2,k2,b3,{text}")], 30, 1, a_case=30)
    assert found.finding is None, found.finding


def test_timestamps_of_cycles_that_wrap_around_and_of_an_older_op_differ() -> None:
    words = [0] * (64 * words_of_core())

    def put(core: int, mark: int, *cycles: int) -> None:
        at = core * words_of_core()
        words[at : at + 2] = mark, len(cycles)
        words[at + 2] = sum(phase << 8 * i for i, phase in enumerate((0, 1, 15)))
        words[at + 7 : at + 7 + len(cycles)] = [cycle & 0xFFFFFFFF for cycle in cycles]

    put(0, 7, 3, 14, 34)
    put(1, 7, -1, 6, 29)
    put(2, 6, 1, 2, 3)
    found = of_words(words)
    assert found == [
        *(Timestamp(0, name, cycles) for name, cycles in ((LAUNCH, 4), ("BuffInit", 15), (END, 35))),
        *(Timestamp(1, name, cycles) for name, cycles in ((LAUNCH, 0), ("BuffInit", 7), (END, 30))),
    ]
    assert spent(found) == [{LAUNCH: 11, "BuffInit": 20}, {LAUNCH: 7, "BuffInit": 23}]


@pytest.mark.parametrize("seed", range(8))
def test_times_of_phases_are_those_of_all_cores_of_all_ranks(seed: int) -> None:
    """Of the slowest core, and the mean; medians of the rounds. A core may lack phases, but not the first of a rank."""
    draw = random.Random(seed)
    ranks, names = draw.randint(1, 4), ["launch", "one", "two", "end"]

    def core(number: int) -> dict[str, int]:
        return {name: draw.randrange(9999) for name in names if number == 0 or draw.random() < 0.6}

    cores = [[{op: [core(n) for n in range(5)] for op in OPS} for _ in range(3)] for _ in range(ranks)]
    found = times.phases([[{op: times._summed(each[op]) for op in OPS} for each in own] for own in cores], "direct")
    assert [(phase.op, phase.name) for phase in found] == [(op, name) for op in OPS for name in names]
    for phase in found:
        each = [[c[phase.name] for own in cores for c in own[n][phase.op] if phase.name in c] for n in range(3)]
        slowest, mean = (median(map(of, each)) / CYCLES_PER_MICRO for of in (max, fmean))
        assert (phase.slowest, phase.cores) == (slowest, len(each[0]) // ranks) and phase.mean == pytest.approx(mean)


def test_every_phase_begins_somewhere_and_has_a_home_alone() -> None:
    root = library.native_source_root()
    text = (root / "op_kernel/protocol/window.h").read_text()
    block = re.search(r"define ASCEND_MOE_PHASES\(X\)(.*?)\n#", text, re.DOTALL)
    assert block is not None
    names = re.findall(r"X\((\w+)\)", block[1])
    code = "".join(path.read_text() for path in sorted((root / "op_kernel").rglob("*.h")))
    started = re.findall(r"MOE_PHASE\([\w.\->()]+, (\w+)\)", code)
    assert len(set(names)) == len(names) and set(started) - {"name"} == set(names)
    assert {name for order in ORDER.values() for name in order} == set(names)
