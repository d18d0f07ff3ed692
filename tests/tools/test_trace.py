"""Timelines of the fast engine: what is recorded, the trace JSON, the picture, the command."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
import torch.distributed as dist
from rank_processes import Ranks, values

import ascend_moe
from ascend_moe._text import write_whole
from ascend_moe.errors import ArgumentError, AscendMoeError, CommTimeout
from ascend_moe.ops import callbacks
from ascend_moe.predict import roundtrip
from ascendc_twin import timeline
from ascendc_twin.timeline import MEASURED, PREDICTED, Event, Timeline, chrome, stats
from ascendc_twin.timeline import picture as trace_picture

WORLD, BATCH, HIDDEN, TOPK, EXPERTS = 2, 8, 2560, 4, 8


def round_trip(rank: int, group_ep: str, world: int = WORLD) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(BATCH, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(BATCH, EXPERTS, generator=generator).topk(TOPK).indices.int()
    weights = torch.rand(BATCH, TOPK, generator=generator)
    place = (group_ep, world, rank, EXPERTS)
    sent = ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, *place, comm_alg="window")
    out: torch.Tensor = ascend_moe.npu_moe_distribute_combine_v2(
        sent[0], ids, sent[2], sent[4], weights, *place, comm_alg="window"
    )
    return out


@pytest.fixture(scope="module")
def measured() -> Timeline:
    with ascend_moe.LocalCluster(WORLD, window_mib=16) as cluster:
        cluster.run(round_trip)
        with ascend_moe.trace(title="a test") as recording:
            cluster.run(round_trip)
    return recording.timeline


def test_every_rank_and_core_is_there(measured: Timeline) -> None:
    assert measured.source == MEASURED and measured.dropped == 0
    assert Counter((e.rank, e.phase) for e in measured.launches()) == {
        (rank, op): 1 for rank in range(WORLD) for op in ("dispatch", "combine")
    }
    runs = stats.op_runs(measured)
    assert [(run.name, run.ranks, run.cores) for run in runs] == [
        ("dispatch", [0, 1], ascend_moe.ops.calls.core_count()),
        ("combine", [0, 1], ascend_moe.ops.calls.core_count()),
    ]
    assert {"AlltoAllDispatch", "SetStatus", "WaitStatus", "LocalWindowCopy"} <= set(runs[0].phases)
    for run in runs:
        for core in range(run.cores):
            own = [e for e in run.events if e.core == core and e.rank == 0 and e.name == timeline.PHASE]
            for before, after in itertools.pairwise(own):
                assert before.end_ns <= after.start_ns, "phases of a core follow each other"
    for event in measured.events:
        launches = [launch for launch in measured.launches() if launch.rank == event.rank]
        assert event.ns >= 0 and event.pipe in timeline.PIPES
        assert any(e.start_ns <= event.start_ns and event.end_ns <= e.end_ns for e in launches), event


def test_copies_of_rows_are_recorded_with_bytes_and_peer(measured: Timeline) -> None:
    dispatch = stats.op_runs(measured)[0]
    sent = [e for e in dispatch.events if e.phase == "AlltoAllDispatch" and e.pipe == "MTE3" and e.rank == 0]
    loads = [e for e in dispatch.events if e.phase == "AlltoAllDispatch" and e.pipe == "MTE2" and e.rank == 0]
    assert sum(e.bytes == 2 * HIDDEN for e in loads) == BATCH, "no copy is deferred"
    rows = [e for e in sent if e.bytes in (HIDDEN * 2, HIDDEN * 2 + 32)]  # without the source index, or with it
    assert len(rows) == BATCH * TOPK
    generator = torch.Generator().manual_seed(0)
    torch.randn(BATCH, HIDDEN, generator=generator)
    ids = torch.rand(BATCH, EXPERTS, generator=generator).topk(TOPK).indices
    assert sum(e.peer == 1 for e in rows) == int((ids >= EXPERTS // WORLD).sum())
    assert {e.peer for e in rows} == {1, -1}


def test_a_wait_is_tied_to_the_store_that_ended_it() -> None:
    """Rank 0 comes late: what rank 1 waits for is rank 0's status."""

    def late(rank: int, group_ep: str) -> None:
        barrier.wait(20)
        if rank == 0:
            time.sleep(0.5)  # longer than the other rank is ever off its core
        round_trip(rank, group_ep)

    barrier = threading.Barrier(WORLD)
    with ascend_moe.LocalCluster(WORLD, window_mib=16) as cluster:
        with ascend_moe.trace() as recording:
            cluster.run(late)
    dispatch = stats.op_runs(recording.timeline)[0]
    longest = stats.longest_waits(dispatch)[0]
    assert (longest.wait.rank, longest.store.rank) == (1, 0)
    assert longest.wait.ns > 25e6
    assert longest.store.peer == 1 and longest.store.phase == "SetStatus"
    assert longest.store.start_ns <= longest.seen_ns <= longest.wait.end_ns


def test_recording_changes_no_results_and_ends_with_its_block() -> None:
    with ascend_moe.LocalCluster(WORLD, window_mib=16) as cluster:
        plain = cluster.run(round_trip)
        with pytest.warns(UserWarning, match="no op ran"), ascend_moe.trace() as empty:
            pass
        with ascend_moe.trace(limit=10) as recording:
            traced = cluster.run(round_trip)
        cluster.run(round_trip)
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    assert empty.timeline.events == []
    assert len(recording.timeline.events) == 10 and recording.timeline.dropped > 100
    assert any("events were dropped" in line for line in roundtrip.text(recording.timeline))


def test_a_wait_that_nobody_ends_is_tied_to_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch has waited for its own cores before, whose stores are not what it waits for now."""
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "2")

    def body(rank: int, group_ep: str) -> None:
        if rank == 0:
            with callbacks.deadline(100_000), pytest.raises(CommTimeout):
                round_trip(rank, group_ep)

    with ascend_moe.LocalCluster(WORLD, window_mib=16) as cluster, ascend_moe.trace() as recording:
        cluster.run(body)
    waits = [event for event in recording.timeline.events if (event.name, event.core) == (timeline.WAIT, 0)]
    assert any(wait.flow for wait in waits)
    assert [wait.flow for wait in waits if wait.ns > 50e6] == [0]


def test_a_failed_body_keeps_its_events_and_ranks_may_enter_it_each(tmp_path: Path) -> None:
    path = tmp_path / "t.json"

    def body(rank: int, group: str) -> None:
        with ascend_moe.trace(path):
            round_trip(rank, group)
            raise KeyError("mine")

    with ascend_moe.LocalCluster(WORLD, window_mib=16) as cluster, pytest.raises(KeyError, match="mine"):
        cluster.run(body)
    assert {event["pid"] for event in json.loads(path.read_text())["traceEvents"]} == {0, 1}


def test_one_recording_at_a_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    with pytest.warns(UserWarning, match="no op ran"):
        with ascend_moe.trace(first), ascend_moe.trace(first), pytest.raises(AscendMoeError, match="is going on"):
            with ascend_moe.trace(second):
                pass
    assert not second.exists()


@pytest.mark.parametrize(
    ("arguments", "named"), [({"limit": 0}, "limit"), ({"path": "/nowhere/x.json"}, "path"), ({"path": "/"}, "path")]
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named) as caught:
        with ascend_moe.trace(**arguments):
            pass
    assert caught.value.details["argument"] == named


# ---- trace JSON


def check_chrome(document: dict[str, Any]) -> Counter[str]:
    """Everything the trace-event format asks of the kinds that are used; returns how many there are."""
    kinds = Counter(event["ph"] for event in document["traceEvents"])
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    named = set()
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            named.add((event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], float) and event["ts"] >= 0 and event["name"]
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
        elif event["ph"] in ("s", "f"):
            flows[event["id"]].append(event)
        else:
            assert event["ph"] == "C" and all(value >= 0 for value in event["args"].values())
    assert tracks.keys() <= named
    for own in tracks.values():  # one after the other, or one in the other
        ends: list[int] = []
        for start, length in sorted((round(e["ts"] * 1000), -round(e["dur"] * 1000)) for e in own):
            ends = [end for end in ends if end > start]
            assert length <= 0 and all(start - length <= end for end in ends)
            ends.append(start - length)
    for pair in flows.values():
        start, finish = sorted(pair, key=lambda e: e["ph"], reverse=True)
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start["ts"] <= finish["ts"] + 1e-3
        for end in (start, finish):  # an arrow ends in a slice
            assert any(e["ts"] <= end["ts"] <= e["ts"] + e["dur"] for e in tracks[end["pid"], end["tid"]])
    return kinds


def test_trace_json_keeps_the_format(measured: Timeline, tmp_path: Path) -> None:
    write_whole(tmp_path / "t.json", chrome.text(measured))
    document = json.loads((tmp_path / "t.json").read_text())
    kinds = check_chrome(document)
    assert kinds["X"] > 100 and kinds["s"] == kinds["f"] and kinds["C"] > 0
    assert document["otherData"]["source"] == MEASURED
    names = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert names == {f"rank {rank} ({MEASURED})" for rank in range(WORLD)}


def crafted() -> Timeline:
    """Two ranks of one core: rank 1 waits 40 ns for rank 0's status, twice under one flow number."""
    return Timeline(
        PREDICTED,
        [
            Event(0, 0, "S", "launch", "dispatch", 0, 100),
            Event(1, 0, "S", "launch", "dispatch", 0, 120),
            Event(0, 0, "S", "GetValue", "Send", 0, 50),
            Event(0, 0, "MTE3", "DataCopy UB->GM", "Send", 40, 60, 64, 1, flow=7),
            Event(0, 0, "S", "GetValue", "Copy", 60, 100),
            Event(1, 0, "S", "GetValue", "Send", 0, 20),
            Event(1, 0, "S", "wait", "Send", 20, 70, flow=7),
            Event(1, 0, "MTE2", "DataCopy GM->UB", "Copy", 70, 120, 1000, 0),
            Event(1, 0, "S", "GetValue", "Copy", 70, 75),
        ],
        "crafted",
    )


def test_numbers_of_a_known_timeline() -> None:
    (run,) = stats.op_runs(crafted())
    assert (run.ns, run.phases) == (120, ["Send", "Copy"])
    send, copy = stats.phase_rows(run)
    assert (send.working, send.worst, send.wait, send.bytes) == ((60 + 20) / 2, 60, 25, 32)
    assert (copy.working, copy.worst, copy.wait) == ((40 + 50) / 2, 50, 0)
    (waited,) = stats.longest_waits(run)
    assert (waited.wait.rank, waited.wait.ns, waited.store.rank) == (1, 50, 0)
    kinds = check_chrome(chrome.document(crafted()))
    assert kinds["s"] == 1
    assert stats.without([(0, 9)], [(1, 6), (2, 3), (6, 7)]) == [(0, 1), (7, 9)]


# ---- pictures


@pytest.mark.parametrize("which", ["measured", "crafted"])
def test_the_picture_stands_alone(measured: Timeline, which: str) -> None:
    shown = measured if which == "measured" else crafted()
    shown.title = "<script>alert(1)</script>&'\""
    svg = trace_picture.svg(shown)
    assert not re.search(r"(src|href)\s*=|https?://(?!www\.w3\.org)|<script|@import|url\((?!#)", svg)
    root = ElementTree.fromstring(svg)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert shown.source in texts and "rank 1" in texts
    assert which == "measured" or any("waited 0.1 µs for rank 0" in text for text in texts)


# ---- the command


def test_command_writes_both(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = {kind: tmp_path / f"t.{kind}" for kind in ("json", "svg")}
    argv = [
        *["-p", "tiny", "--ranks", "4", "--batch", "4", "-n", "3", "--comm-alg", "window", "--out"],
        str(names["json"]),
    ]
    code = commands.run("trace", [*argv, "--plot", str(names["svg"])])
    printed, said = capfd.readouterr()
    assert said == f"ascend-moe trace: {printed.split(' [')[0]}; recording 3 rounds\n"  # before it works
    assert code == 0 and f"[{MEASURED}]" in " ".join(printed.split()) and "LocalWindowCopy" in printed
    paths = (f"wrote {tmp_path}", "open it at")
    wide = [line for line in printed.splitlines() if len(line) > 84 and not line.startswith(paths)]
    assert wide == [], "80, or a few more where the machine is slow"
    assert f"open it at https://ui.perfetto.dev: Open trace file, {names['json']}\n" in printed
    document = json.loads(names["json"].read_text())
    check_chrome(document)
    ops = [e["name"] for e in document["traceEvents"] if e.get("cat") == "phase" and e["tid"] == 0]
    assert Counter(ops) == {"dispatch": 4, "combine": 4}, "one round of those recorded"
    assert names["svg"].read_text().startswith("<svg")
    argv = ["-p", "tiny", "--batch", "4", "--iterations", "1", "--op", "combine"]
    assert commands.run("trace", argv) == 0
    printed = capfd.readouterr().out
    assert "combine:" in printed and "dispatch:" not in printed


@pytest.mark.parametrize("algorithm", ["window", "direct"])
def test_a_predicted_timeline_has_the_pipes(algorithm: str) -> None:
    shape = {"hidden": 2048, "experts": 8, "topk": 4, "batch": 8}
    request = roundtrip.TraceRequest(algorithm=algorithm, **shape)  # type: ignore[arg-type]
    found = roundtrip.predicted(request, "Ascend910_9391")
    assert found.source == PREDICTED and found.title.startswith("Ascend910_9391, ")
    runs = stats.op_runs(found)
    assert [run.name for run in runs] == ["dispatch", "combine"]
    assert all((run.ranks, run.cores) == ([0, 1], 48) for run in runs)
    assert runs[0].end_ns < runs[1].start_ns
    kinds = check_chrome(chrome.document(found))
    assert kinds["X"] > 100 and kinds["C"] > 0
    pipes = {event.pipe for event in found.events}
    assert {"S", "V", "MTE2", "MTE3"} <= pipes


def traced_round_trip(path: str) -> list[int]:
    """Returns what a rank process does: the ranks of its own recording."""
    group = ascend_moe.comm_name()
    with ascend_moe.trace(path) as recording:
        round_trip(dist.get_rank(), group)
    ascend_moe.close(group)
    return list(recording.timeline.ranks)


def test_every_process_writes_its_file(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        assert values(ranks.call(traced_round_trip, str(tmp_path / "t.json"))) == [[0], [1]]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.rank0.json", "t.rank1.json"]
    for rank in range(2):
        document = json.loads((tmp_path / f"t.rank{rank}.json").read_text())
        check_chrome(document)
        assert {event["pid"] for event in document["traceEvents"]} == {rank}
