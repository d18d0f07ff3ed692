"""The timed engine and `ascend-moe predict`: results, laws that times must keep, costs, what is printed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import commands
import pytest
import torch

import ascend_moe.reference as ref
import ascendc_twin
from ascend_moe import plan as planning
from ascend_moe.errors import ArgumentError, AscendMoeError
from ascend_moe.native import library
from ascend_moe.ops import calls
from ascend_moe.plan import Request
from ascend_moe.predict import ALGORITHMS, Prediction, predict, report, runnable
from ascend_moe.predict import world as timed_world
from ascend_moe.predict.world import TimedWorld, timed_library
from ascendc_twin.soc import KINDS, SOCS, cost_table, hardware_costs
from ascendc_twin.timeline import Event

SMALL = Request(ranks=4, experts=16, topk=4, hidden=2048, batch=9, quant_mode=2, cores=6)
COSTS = {name: one.value for name, one in cost_table("Ascend910_9391").items()}
# Two servers of A2: rows go between them by BatchWrite.
A2 = "Ascend910B1"
SERVERS = replace(SMALL, soc=A2, ranks_per_server=2)
A2_COSTS = {name: one.value for name, one in cost_table(A2).items()}
WITHIN = [name for name in ALGORITHMS if name != "hierarchy"]
CASES = [*((SMALL, name) for name in WITHIN), (SERVERS, "window"), (SERVERS, "hierarchy")]


def times(found: Prediction) -> tuple[float, float]:
    return found.dispatch_us, found.combine_us


def compare_with_reference(request: Request, algorithm: str, costs: dict[str, float]) -> list[Event]:
    """Runs both ops with payload; the events of dispatch."""
    with TimedWorld(request, algorithm, 3, payload=True) as world:
        sent = world.run("dispatch", costs, events=100_000)
        inputs = [
            ref.RankInput(given["x"], world.routing.ids[rank], expert_scales=world.routing.weights[rank])
            for rank, given in enumerate(world.inputs["dispatch"])
        ]
        mode = request.quant_mode
        want = ref.dispatch(inputs, moe_expert_num=request.experts, quant_mode=mode, global_bs=0)
        share = request.ranks_per_server if algorithm == "hierarchy" else 0
        form: dict[str, Any] = {"contract": request.contract, "quantized": mode != 0}
        form["ranks_per_server"] = 0 if share else request.ranks_per_server  # hierarchy has source indices
        for one, found in zip(want, world.outputs["dispatch"], strict=True):
            compared = ref.validate("dispatch", found, one, **form)
            assert compared.ok, compared.text
        world.run("combine", costs)
        given = world.inputs["combine"]
        rows = [given[rank]["expand_x"][: len(one.expand_x)] for rank, one in enumerate(want)]
        sums = ref.combine(inputs, rows, want, moe_expert_num=request.experts, global_bs=0, ranks_per_server=share)
        for total, found in zip(sums, world.outputs["combine"], strict=True):
            assert ref.same_bits(found[0], total)
    return sent.events


@pytest.mark.parametrize("quant_mode", [0, 2])
@pytest.mark.parametrize("contract", ["v1", "v2"])
@pytest.mark.parametrize("algorithm", WITHIN)
def test_results_are_the_references(algorithm: str, contract: str, quant_mode: int) -> None:
    compare_with_reference(replace(SMALL, quant_mode=quant_mode, contract=contract), algorithm, COSTS)


@pytest.mark.parametrize("quant_mode", [0, 2])
@pytest.mark.parametrize("contract", ["v1", "v2"])
@pytest.mark.parametrize("share", [1, 2])
def test_results_between_servers_are_the_references(share: int, contract: str, quant_mode: int) -> None:
    request = replace(SERVERS, ranks_per_server=share, contract=contract, quant_mode=quant_mode)
    ranks = range(request.ranks)
    for algorithm in runnable(request):
        events = compare_with_reference(request, algorithm, A2_COSTS | {"ranks_per_server": share})
        items = sorted((event.rank, event.peer) for event in events if event.name == "BatchWrite")
        rails = [(a, b) for a in ranks for b in ranks if a != b and (a - b) % share == 0]
        every = [(a, b) for a in ranks for b in ranks if a != b]
        assert items == (rails if algorithm == "hierarchy" else every)  # one item a server, or a rank
    assert runnable(request) == ["window", *(["hierarchy"] if share > 1 and contract == "v2" else [])]
    with pytest.raises(ArgumentError, match="ranks_per_server is 3, it must divide the 4 ranks"):
        predict(replace(SERVERS, ranks_per_server=3), algorithm="window")


@pytest.mark.parametrize(("request_", "algorithm"), CASES)
def test_times_add_up_and_are_the_same_every_time(request_: Request, algorithm: str) -> None:
    first, second = (predict(request_, algorithm=algorithm) for _ in range(2))
    assert (first.dispatch, first.combine) == (second.dispatch, second.combine)
    assert times(predict(request_, algorithm=algorithm, payload=True)) == times(first), "rows cost no time"
    for op in (first.dispatch, first.combine):
        assert sum(op.spent.values()) == pytest.approx(op.us, rel=1e-4)
        assert sum(op.phases.values()) == pytest.approx(sum(op.pipes.values()))
        assert all(0 < share <= 1 for share in op.link_use.values())
        assert 0 < op.vector_us < op.us and max(op.link_us.values()) <= op.us
        waited = sum(us for cause, us in op.pipes.items() if cause not in ("S", "V", "MTE2", "MTE3")) / op.us
        shares = report.shares(op)
        assert [*shares] == ["link", "V", "S", "wait"] and shares["wait"] == pytest.approx(waited)


@pytest.mark.parametrize(("request_", "algorithm"), CASES)
def test_more_tokens_and_more_ranks_take_no_less(request_: Request, algorithm: str) -> None:
    base = replace(request_, cores=8, experts=32)
    four, some, many = (times(predict(replace(base, batch=n), algorithm=algorithm)) for n in (4, 32, 128))
    assert all(a < b < c for a, b, c in zip(four, some, many, strict=True))
    few, sixteen = (times(predict(base, world=world, algorithm=algorithm)) for world in (4, 16))
    assert all(a < b for a, b in zip(few, sixteen, strict=True))


SLOWER = ("link_gbps", "memory_gbps", "read_gbps", "write_gbps", "clock_ghz")
LONGER = ("server_latency_ns", "visible_ns", "scalar_ns", "copy_issue_ns", "vector_cast_head")


@pytest.mark.parametrize("name", [*SLOWER, *LONGER, "sync_ns"])
def test_slower_hardware_is_not_faster(name: str) -> None:
    request = SERVERS if name == "sync_ns" else SMALL  # within a server no op calls SyncAll
    usual = times(predict(request))
    changed = COSTS[name] / 16 if name in SLOWER else COSTS[name] * 16
    slow = times(predict(request, costs={name: changed}))
    assert usual < slow and all(a < b or (name in SLOWER and a == b) for a, b in zip(usual, slow, strict=True))


def test_the_nic_is_what_links_servers() -> None:
    usual = predict(SERVERS)
    assert usual.dispatch.link_use["nic out"] > 0
    assert "nic out" not in predict(replace(SERVERS, ranks_per_server=4)).dispatch.link_use
    rows = SERVERS.batch * SERVERS.topk * (SERVERS.hidden + 32) * 3 / 4  # of a rank, a quarter of them to itself
    with TimedWorld(SERVERS, "window", 0, payload=False) as world:
        moved = world.run("dispatch", A2_COSTS | {"ranks_per_server": 2}).link_bytes["nic out"]
    assert moved == pytest.approx(SERVERS.ranks * rows, rel=0.3)
    for name, factor in (("nic_gbps", 1 / 16), ("nic_latency_ns", 4)):
        slow = times(predict(SERVERS, costs={name: A2_COSTS[name] * factor}))
        assert all(a < b for a, b in zip(times(usual), slow, strict=True))


def test_a_rank_posts_its_items_one_after_another() -> None:
    post = 50_000.0
    op = predict(SERVERS, costs={"post_ns": post}, events=1_000_000).dispatch
    for rank in range(SERVERS.ranks):
        items = sorted((e for e in op.events if e.rank == rank and e.name == "BatchWrite"), key=lambda e: e.start_ns)
        assert [item.start_ns - items[0].start_ns for item in items] == pytest.approx([0.0, post, 2 * post])
        for item in items:  # its bytes leave when it is posted
            carried = item.bytes / A2_COSTS["nic_gbps"] + A2_COSTS["nic_latency_ns"] + A2_COSTS["visible_ns"]
            assert item.ns == pytest.approx(post + carried, abs=3 * carried)
            assert item.ns >= post + carried - 1
    assert op.pipes["post"] == pytest.approx(3 * post / 1e3)
    line = report.posting(SERVERS)
    assert line == "a rank posts its BatchWrite items one after another, 1.5 us each (published)"


# ---- events


def events_of(request: Request, costs: dict[str, float]) -> list[Event]:
    return predict(request, costs=costs, events=1_000_000).dispatch.events


def test_no_status_is_seen_before_it_is_visible() -> None:
    late = 25_000.0
    events = events_of(SMALL, {"visible_ns": late})
    stores = {event.flow: event for event in events if event.flow and event.pipe == "MTE3"}
    waits = [event for event in events if event.name == "wait" and event.flow]
    assert waits
    for wait in waits:
        store = stores[wait.flow]
        assert wait.end_ns >= store.start_ns + late and store.peer == (-1 if store.rank == wait.rank else wait.rank)
    quick, slow = (predict(SMALL, algorithm="window", costs={"visible_ns": ns}) for ns in (0.0, late))
    trips = 1 + 3  # the status message, and one at each core barrier
    assert slow.dispatch_us - quick.dispatch_us == pytest.approx(trips * late / 1e3, abs=3)


def test_sync_all_waits_for_the_last_core() -> None:
    events = events_of(SERVERS, {"stagger_ns": 2_000.0})
    for rank in range(SERVERS.ranks):
        first: dict[int, Event] = {}
        for event in events:
            if event.rank == rank and event.name == "SyncAll":
                first.setdefault(event.core, event)
        assert len(first) == SERVERS.cores
        last = max(event.start_ns for event in first.values())
        assert all(event.end_ns == pytest.approx(last + A2_COSTS["sync_ns"]) for event in first.values())


def test_core_barriers_are_counted() -> None:
    """By SyncAll, and by the blocks that cores post and poll."""

    def counts(found: Prediction) -> tuple[tuple[int, int], ...]:
        return tuple((op.sync_alls, op.polled_barriers) for op in (found.dispatch, found.combine))

    for algorithm, contract, dispatch, combine in (
        ("window", "v2", (0, 3), (0, 1)),
        ("window", "v1", (0, 3), (0, 3)),
        ("direct", "v2", (0, 2), (0, 1)),
    ):
        found = predict(replace(SMALL, contract=contract), algorithm=algorithm)
        assert counts(found) == (dispatch, combine), (algorithm, contract)
        line = report.row(found)
        assert re.search(rf" {dispatch[0]} \+ {combine[0]} +{dispatch[1]} \+ {combine[1]} ", line), line
    assert counts(predict(SERVERS, algorithm="window")) == ((1, 3), (1, 3))
    assert counts(predict(SERVERS, algorithm="hierarchy")) == ((1, 5), (1, 7))


@pytest.mark.parametrize("hidden", [1024, 1040])
def test_copies_that_do_not_begin_at_512_bytes_get_a_share_of_the_rate(hidden: int) -> None:
    """Rows of 2048 bytes always do. Of 2080 bytes they do in the window, and the first one of x, none of expand_x."""
    one, row = Request(ranks=1, experts=1, topk=1, hidden=hidden, batch=4, cores=1, contract="v1"), 2 * hidden
    with TimedWorld(one, "window", 0, payload=False) as world:
        usual, slow = (
            [event for event in world.run("dispatch", costs, events=10_000).events if event.bytes >= row]
            for costs in (COSTS | {"unaligned_share": 1.0}, COSTS | {"unaligned_share": 0.001})
        )
    found = [(a.pipe, a.bytes // row, b.ns > 10 * a.ns) for a, b in zip(usual, slow, strict=True)]
    off = hidden == 1040
    sent = [("MTE2", 1, False), ("MTE3", 1, False), *[("MTE2", 1, off), ("MTE3", 1, False)] * 3]
    assert found == [*sent, ("MTE2", 4, False), ("MTE3", 4, off)]


def test_a_message_is_seen_after_half_of_the_trip_of_its_store() -> None:
    """Its sender has the acknowledgement, which takes the other half, later than its reader the message."""
    one = Request(ranks=2, experts=2, topk=1, hidden=1024, batch=1, cores=1, contract="v1")
    slow_links = dict.fromkeys(("package_latency_ns", "server_latency_ns", "far_latency_ns"), 40_000.0)
    with TimedWorld(one, "window", 0, payload=False) as world:
        events = world.run("dispatch", COSTS | slow_links, events=10_000).events
    (waited,) = (event for event in events if event.name == "wait" and event.flow)
    (store,) = (event for event in events if event.pipe == "MTE3" and event.flow == waited.flow)
    assert 40_000 < store.ns < 45_000 and 20_000 < waited.end_ns - store.start_ns < 25_000


# ---- what cannot be predicted


@pytest.mark.parametrize(("request_", "algorithm"), CASES)
def test_a_wait_that_never_ends_is_named(request_: Request, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_world, "_LIMIT_NS", 1e6)
    with pytest.raises(AscendMoeError, match=r"hang: still polling .*: rank \d+ core \d+ "):
        predict(request_, algorithm=algorithm, costs={"visible_ns": 1e12})
    assert times(predict(request_, algorithm=algorithm)) == times(predict(request_, algorithm=algorithm))


@pytest.mark.parametrize(
    ("request_", "algorithm", "argument"),
    [
        (replace(SMALL, soc="Ascend310"), "window", "soc"),
        (replace(SMALL, topk=33, experts=64), "window", "expert_ids"),
        (SMALL, "ring", r"algorithm is 'ring'; need one of window, direct, zero-copy, hierarchy"),
        *((SERVERS, name, r"RDMA.*'window'") for name in ("direct", "zero-copy")),
        (SMALL, "hierarchy", r"works between servers of A2; 4 ranks of Ascend910_9391 share one: use window"),
    ],
)
def test_wrong_arguments_are_named(request_: Request, algorithm: str, argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        predict(request_, algorithm=algorithm)
    assert caught.value.argument == argument or caught.match(argument)


def test_another_soc_brings_its_own_number_of_cores() -> None:
    found = predict(replace(SMALL, cores=0), soc="Ascend910B3", world=2).request
    assert (found.soc, found.cores, found.ranks) == ("Ascend910B3", 40, 2)


def planned(world: TimedWorld, rank: int, window_mib: int) -> tuple[int, int, bytes]:
    """Tiling key, workspace bytes and tiling of a rank's dispatch, with CANN's context of an A3."""
    given = world.inputs["dispatch"][rank].items()
    shapes = tuple((name, calls.name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in given)
    spec = planning.call_spec(calls.OP_DISPATCH, world.request, shapes, world.request.cores, window_mib, rank)
    spec.deadline_micros = 10_000_000
    return calls.Plan("dispatch", spec).tiled()


@pytest.mark.nightly
@pytest.mark.timeout(1200)  # it compiles the kernel for another engine
@pytest.mark.parametrize("algorithm", ["window", "direct"])
def test_dispatch_takes_as_long_as_a_third_party_kernel(algorithm: str) -> None:
    """Its source, unmodified, through the emulator's package: nothing is known of its flags there."""
    kernels = library.native_source_root() / "op_kernel"
    defines = ("DTYPE_X=bfloat16_t", "DTYPE_EXPAND_X=bfloat16_t", "TWIN_UB_BYTES=196352", "TWIN_QUEUE_EVENTS=6")
    source = kernels / "ascend_moe_distribute_dispatch.cpp"
    opened = ascendc_twin.load(source, defines=defines, includes=[kernels], engine="timed")
    request = Request(ranks=8, experts=64, topk=8, hidden=7168, batch=32, cores=24, soc="Ascend910_9391")
    with TimedWorld(request, algorithm, 0, payload=True) as world:
        predicted = world.run("dispatch", COSTS)
        windows = ascendc_twin.Windows(request.ranks, data_bytes=256 << 20)
        args, tilings, key = [], [], 0
        for rank, given in enumerate(world.inputs["dispatch"]):
            key, workspace, tiling = planned(world, rank, 256)
            outputs = [torch.zeros_like(one) if one.numel() else None for one in world.outputs["dispatch"][rank]]
            record = torch.zeros(calls.error_record_words(), dtype=torch.int32)
            own = [*outputs, record, torch.zeros(workspace + 64, dtype=torch.uint8)]
            args.append([given["x"], given["expert_ids"], None, None, None, None, *own])
            tilings.append(tiling)
        call = (source.stem, args, tilings, request.cores, key, windows)
        found = opened.launch(*call, soc=request.soc, warn=True).time
        for own, want in zip(args, world.outputs["dispatch"], strict=True):
            rows = int(want[4][-1])
            assert torch.equal(own[6][:rows], want[0][:rows]) and torch.equal(own[10], want[4])
    assert found is not None and found.us == pytest.approx(predicted.us, rel=0.05)


OPTIONS = ["--ranks", "2,4", "--batch", "4", "--hidden", "512", "-k", "2", "-e", "8", "--cores", "4"]


def test_every_figure_has_a_value_and_a_source() -> None:
    names = set(timed_library().am_timed_cost_names().decode().split())
    assert set(SOCS) == set(hardware_costs()["socs"])
    for soc in SOCS:
        table = cost_table(soc)
        assert set(table) == names
        for value in table.values():
            assert value.kind in KINDS, value
            assert len(value.source) > 10, value
            assert value.value >= 0, value
        counts = [sum(cost.kind == kind for cost in table.values()) for kind in KINDS]
        assert f"{counts[1]} of {sum(counts)} hardware costs" in report.banner(soc)


def test_text_and_json_say_the_same() -> None:
    lines = commands.said("predict", "--soc", A2, *OPTIONS, "--ranks", "2,16", "-e", "16").out.splitlines()
    assert lines[0].startswith("Ascend910B1, 4 cores, BS 4, H 512, K 2, E 16")
    assert report.banner(A2) in " ".join(lines) and all(len(line) <= 80 for line in lines)
    assert any("AlltoAllDispatch" in line for line in lines)
    rows = [line.split()[:2] for line in lines]
    wanted = [*(["2", name] for name in WITHIN), ["16", "window"], ["16", "hierarchy"]]  # what can run
    assert [row for row in rows if row[1:] and row[1] in ALGORITHMS] == wanted
    options = [*OPTIONS, "--comm-alg", "window", "--json"]
    found = json.loads(commands.said("predict", *options).out)
    assert found["note"] == report.banner("Ascend910_9391")
    assert [prediction["ep"] for prediction in found["predictions"]] == [2, 4]
    for prediction in found["predictions"]:
        for op in (prediction["dispatch"], prediction["combine"]):
            assert sum(op["phases_us"].values()) == pytest.approx(op["us"], rel=1e-3)
