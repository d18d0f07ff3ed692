"""Third-party kernels on the timed engine: times, results, timelines, and what is refused."""

from __future__ import annotations

import json
import runpy
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
from third_party_runs import KERNELS, kernels, tiling
from typer.testing import CliRunner

import ascendc_twin
from ascendc_twin.cli import app
from ascendc_twin.errors import ArgumentError, TwinFault
from ascendc_twin.soc import DEFAULT_SOC, SOCS, costs_of

SOURCE = KERNELS / "timed_samples.cpp"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "time_a_collective"


def timed(name: str, args: object, *call: object, **options: object) -> ascendc_twin.Timing:
    found = kernels("timed_samples").launch(name, args, *call, mode="timed", **options).time
    assert found is not None
    assert sum(found.pipes.values()) == pytest.approx(found.us) == sum(found.phases.values())
    return found


def add_once(**options: object) -> ascendc_twin.Timing:
    x, y, z = (np.full(256, value, np.float32) for value in (1, 2, 0))
    found = timed("add_once", [x, y, z], **options)
    assert (z == 3).all()
    return found


@pytest.mark.parametrize("soc", ["Ascend910B4", DEFAULT_SOC])
def test_a_kernels_time_is_the_sum_of_its_costs(soc: str) -> None:
    """Two copies in, one after the other, an Add of four repeats, a copy out; each waits for the one before."""
    c, size = costs_of(soc), 1024
    issue = c["issue_ns"] * c["scalar_scale"]
    read, write = (c[name] * c["latency_scale"] for name in ("read_latency_ns", "write_latency_ns"))
    load, store = (max(c["copy_issue_ns"], size / c[name]) for name in ("read_gbps", "write_gbps"))
    second = max(issue, load)  # when the pipe begins it, after the first
    add = (4 * c["vector_add_cycles"] + c["vector_add_head"] + c["vector_count_head"]) / c["clock_ghz"]
    ns = c["launch_ns"] + issue + second + read + load + c["flag_latency_ns"] + add + c["flag_latency_ns"]
    assert add_once(soc=soc).us == pytest.approx((ns + store + write) / 1000, rel=1e-12)


def test_costs_may_be_replaced() -> None:
    first, second = add_once(), add_once(costs={"launch_ns": 0})
    assert first.us - second.us == pytest.approx(costs_of(DEFAULT_SOC)["launch_ns"] / 1000)
    assert (first.link_bytes, first.sync_alls) == ({"memory": 3 * 1024.0}, 0)


def test_double_buffering_hides_a_part_of_the_copies() -> None:
    found = []
    for buffers in (1, 2):
        x = np.zeros(16 * 2048, np.float32)
        found.append(timed("add_tiles", [x], tiling(16, buffers), events=1000))
        assert (x == 1).all()
    assert found[1].us < 0.75 * found[0].us


def swap(late: int, atomic: int = 0, **options: object) -> ascendc_twin.LaunchResult:
    """Rank 0 sends after so many Adds."""
    windows = ascendc_twin.Windows(2, data_bytes=1 << 16)
    args = [[np.arange(1024, dtype=np.float32) + rank, np.zeros(1024, np.float32)] for rank in range(2)]
    call = ("swap_rows", args, [tiling(late, atomic), tiling(0, atomic)], 1, 0, windows)
    found = kernels("timed_samples").launch(*call, mode="timed", **options)
    assert (args[0][1] == args[1][0]).all() and (args[1][1] == args[0][0]).all()
    return found


@pytest.mark.parametrize("atomic", [0, 1], ids=["stored", "added"])
def test_a_rank_waits_for_the_flag_of_another(atomic: int) -> None:
    soon, late = (swap(adds, atomic, events=5000).time for adds in (200, 1200))
    assert soon is not None and late is not None
    costs = costs_of(DEFAULT_SOC)
    repeats = 1024 * 4 / 256
    cycles = repeats * costs["vector_muls_cycles"] + costs["vector_muls_head"] + costs["vector_count_head"]
    more = 1000 * cycles / costs["clock_ghz"] / 1000
    assert late.us - soon.us == pytest.approx(more, abs=1.1)  # a look of the waiting rank
    wait = next(event for event in late.events if event.name == "wait" and event.rank == 1)
    flag = next(event for event in late.events if event.bytes == 32 and event.pipe == "MTE3" and event.rank == 0)
    assert wait.flow == flag.flow and wait.end_ns > flag.start_ns and wait.ns > more * 1000
    assert set(late.link_use) == {"memory", "package in", "package out"}


def test_a_wait_for_nobody_is_a_hang() -> None:
    windows = ascendc_twin.Windows(2, data_bytes=1 << 16)
    args = [[np.zeros(1024, np.float32), np.zeros(1024, np.float32)] for _ in range(2)]
    windows.data(0)[8192] = 2  # its flag never becomes 1
    with pytest.raises(TwinFault, match=r"hang: .*rank 0 core 0 stands at timed_samples.cpp"):
        timed("swap_rows", args, tiling(0, 1), 1, 0, windows, timeout_s=0.5)


def test_a_timeline_is_written(tmp_path: Path) -> None:
    found = swap(1, events=1000).time
    assert found is not None
    found.save(tmp_path / "a.json", "two ranks")
    found.save(tmp_path / "a.svg", "two ranks")
    document = json.loads((tmp_path / "a.json").read_text())
    slices = [record for record in document["traceEvents"] if record["ph"] == "X"]
    assert {record["pid"] for record in slices} == {0, 1}
    assert {"swap_rows", "wait", "Adds", "DataCopy UB->GM"} <= {record["name"] for record in slices}
    assert all(record["ts"] >= 0 and record["dur"] >= 0 for record in slices)
    assert max(record["ts"] + record["dur"] for record in slices) == pytest.approx(found.us, abs=0.002)
    assert {"s", "f", "M"} <= {record["ph"] for record in document["traceEvents"]}
    assert document["otherData"]["source"] == "predicted (model)"
    text = "".join(xml.etree.ElementTree.parse(tmp_path / "a.svg").getroot().itertext())
    assert "two ranks" in text and "swap_rows" in text
    few = swap(1, events=5).time
    assert few is not None and len(few.events) == 5 and few.timeline().dropped == few.dropped == len(found.events) - 5
    with pytest.raises(ArgumentError, match=r"it must end with .json or .svg"):
        found.save(tmp_path / "a.txt")
    with pytest.raises(ArgumentError, match="recorded no events"):
        add_once().save(tmp_path / "a.json")


def test_what_cannot_be_timed_is_refused_by_name(tmp_path: Path) -> None:
    x = np.zeros(256, np.float32)
    pair = (ascendc_twin.Windows(2, data_bytes=4096), ascendc_twin.Windows(2, data_bytes=4096))
    crossed = [(pair[0].member(rank), pair[1].member(1 - rank)) for rank in range(2)]
    two = [[x, x, x], [x, x, x]]
    nine = ascendc_twin.Windows(9, data_bytes=4096)
    for said, args, options in (
        (f"soc is one of {', '.join(SOCS)}, not 'Ascend310P'", [x, x, x], {"soc": "Ascend310P"}),
        ("block_dim is 41; Ascend910B3 has 40 AIV cores", [x, x, x], {"soc": "Ascend910B3", "block_dim": 41}),
        ("9 ranks in a server of Ascend910B3, which has 8", [[x] * 3] * 9, {"soc": "Ascend910B3", "windows": nine}),
        ("costs has 'launch_us'; the costs are scalar_ns, scalar_scale", [x, x, x], {"costs": {"launch_us": 1}}),
        ("costs: launch_ns is -1; it must be", [x, x, x], {"costs": {"launch_ns": -1}}),
        ("add_once: rank=: the timed engine runs all ranks", [x, x, x], {"windows": pair[0], "rank": 1}),
        ("windows: rank 0 is rank 1 of a group; the timed engine needs one number", two, {"windows": crossed}),
    ):
        with pytest.raises(ArgumentError, match=said.replace("(", r"\(")):
            timed("add_once", args, **options)
    ascendc_twin.build(SOURCE, output=tmp_path / "a.so")
    with pytest.raises(ArgumentError, match="no library of the timed engine next to it: build it with engine='timed'"):
        ascendc_twin.load(tmp_path / "a.so", engine="timed")


def test_the_command_predicts_times(tmp_path: Path) -> None:
    def said(*options: str) -> list[str]:
        done = CliRunner().invoke(app, ["run", str(SOURCE), *options])
        assert done.exit_code == 0, done.output
        return done.output.splitlines()

    add = ["add_once", *["--arg", "f32:256"] * 3]
    assert said(*add) == ["ran"]
    lines = said(*add, "--time", "--soc", "Ascend910B3", "--timeline", str(tmp_path / "a.json"))
    assert lines[0] == str(add_once(soc="Ascend910B3")) and lines[1].startswith("busy, us, mean of the cores: MTE2 ")
    assert json.loads((tmp_path / "a.json").read_text())["otherData"]["title"] == "add_once, Ascend910B3"
    tiling = "u32:{rank}" + ",0" * 200  # longer than a file name may be
    lines = said("swap_rows", "-a", "f32:1024", "-a", "f32:1024", "--tiling", tiling, "--ranks", "2", "--time")
    assert any(line.startswith("package out: ") for line in lines)
    for wrong in (["-a", "f33:1"], ["--tiling", "u32:x"], ["--soc", "A5", "--time"]):
        assert CliRunner().invoke(app, ["run", str(SOURCE), *add, *wrong]).exit_code == 2


@pytest.mark.nightly
def test_the_example_times_an_exchange_of_many_ranks() -> None:
    """Its own check compares the results; more rows, and more bytes a row, take longer."""
    predict = runpy.run_path(str(EXAMPLE / "time_a_collective.py"))["predict"]
    times = {
        (ranks, batch, size): predict(DEFAULT_SOC, ranks, batch, size).us
        for ranks in (8, 32)
        for batch in (8, 32)
        for size in (1, 2)
    }
    for ranks in (8, 32):
        assert times[ranks, 8, 1] < times[ranks, 8, 2] < times[ranks, 32, 2]
    assert times[32, 32, 2] > times[8, 32, 2]
