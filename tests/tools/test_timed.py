"""The timed engine: right results beside its times, equal times every time, and laws that times must keep."""

from __future__ import annotations

import pytest
import torch
from timed_inputs import reference_inputs

import ascend_moe.reference as ref
from ascend_moe.errors import ArgumentError, AscendMoeError
from ascend_moe.plan import Request
from ascend_moe.timed import ALGORITHMS, Prediction, predict
from ascend_moe.timed import world as timed_world
from ascend_moe.timed.costs import cost_table
from ascend_moe.timed.world import TimedWorld
from ascend_moe.timeline import Event

SOC = "Ascend910_9391"
SMALL = Request(ranks=4, experts=16, topk=4, hidden=2048, batch=9, quant=True, cores=6)
COSTS = {name: one.value for name, one in cost_table(SOC).items()}


def times(found: Prediction) -> tuple[float, float]:
    return found.dispatch_us, found.combine_us


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("quant", [False, True])
@pytest.mark.parametrize("contract", ["v1", "v2"])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_results_are_the_references(algorithm: str, contract: str, quant: bool) -> None:
    if (algorithm, contract) == ("cann-style", "v1"):
        pytest.skip("the model has one contract")
    request = Request(**(vars(SMALL) | {"quant": quant, "contract": contract}))
    ranks = range(request.ranks)
    with TimedWorld(request, algorithm, 3, payload=True) as world:
        world.run("dispatch", COSTS)
        inputs = reference_inputs(world)
        want = ref.dispatch(inputs, moe_expert_num=16, quant_mode=2 if quant else 0, global_bs=0)
        for rank, found in enumerate(world.outputs["dispatch"]):
            rows, index = want[rank].expand_x, found[2]
            assert equal(found[0][: len(rows)], rows)
            if quant:
                scales = want[rank].dynamic_scales
                assert scales is not None and equal(found[1][: len(rows)], scales)
            assert equal(found[4], want[rank].ep_recv_counts)
            assert equal(world.routing.counts(rank), want[rank].ep_recv_counts)
            if contract == "v2":
                triples = want[rank].assist_info.flatten()
                assert equal(index[: len(triples)], triples)
                assert equal(world.routing.triples(rank, tuple(triples.shape)), triples)
            else:
                assert equal(index, want[rank].expand_idx)
                assert equal(world.routing.expand_idx(rank), want[rank].expand_idx)
        world.run("combine", COSTS)
        rows = [world.inputs["combine"][rank]["expand_x"][: len(want[rank].expand_x)] for rank in ranks]
        summed = ref.combine(inputs, rows, want, moe_expert_num=16, global_bs=0)
        for rank in ranks:
            assert equal(world.outputs["combine"][rank][0], summed[rank])


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_the_same_call_takes_the_same_nanoseconds(algorithm: str) -> None:
    first, second = (predict(SMALL, algorithm=algorithm) for _ in range(2))
    assert first.dispatch == second.dispatch
    assert first.combine == second.combine


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_leaving_rows_where_they_are_changes_no_time(algorithm: str) -> None:
    without, moved = (predict(SMALL, algorithm=algorithm, payload=payload) for payload in (False, True))
    assert times(without) == times(moved)


def test_the_critical_path_adds_up() -> None:
    for algorithm in ALGORITHMS:
        found = predict(SMALL, algorithm=algorithm)
        for op in (found.dispatch, found.combine):
            assert sum(op.spent.values()) == pytest.approx(op.us, rel=1e-4)
            assert sum(op.phases.values()) == pytest.approx(sum(op.pipes.values()))
            assert all(0 < share <= 1 for share in op.link_use.values())


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_more_tokens_and_more_ranks_take_no_less(algorithm: str) -> None:
    base = Request(**(vars(SMALL) | {"cores": 8, "experts": 32}))
    by_batch = [
        times(predict(Request(**(vars(base) | {"batch": n})), algorithm=algorithm)) for n in (4, 32, 128)
    ]
    for op in (0, 1):
        assert by_batch[0][op] < by_batch[1][op] < by_batch[2][op]
    few, many = (times(predict(base, world=world, algorithm=algorithm)) for world in (2, 16))
    assert few[0] < many[0]
    assert few[1] < many[1]


@pytest.mark.parametrize("name", ["link_gbps", "memory_gbps", "read_gbps", "write_gbps", "clock_ghz"])
def test_slower_hardware_is_not_faster(name: str) -> None:
    usual = times(predict(SMALL, algorithm="window"))
    slow = times(predict(SMALL, algorithm="window", costs={name: COSTS[name] / 16}))
    assert slow[0] >= usual[0]
    assert slow[1] >= usual[1]


@pytest.mark.parametrize("name", ["server_latency_ns", "sync_ns", "visible_ns", "scalar_ns", "copy_issue_ns"])
def test_longer_latencies_are_not_faster(name: str) -> None:
    usual = times(predict(SMALL, algorithm="window"))
    slow = times(predict(SMALL, algorithm="window", costs={name: COSTS[name] * 16}))
    assert slow[0] > usual[0]
    assert slow[1] > usual[1]


def test_cores_share_a_link() -> None:
    """A slow link decides: its bytes take their time, however many cores send them."""
    slow = {"link_gbps": 0.5, "ranks_per_package": 1}
    request = Request(ranks=2, experts=16, topk=4, hidden=4096, batch=32, cores=4)
    four = predict(request, algorithm="window", costs=slow)
    eight = predict(request, cores=8, algorithm="window", costs=slow)
    assert eight.combine_us == pytest.approx(four.combine_us, rel=0.1)
    assert four.combine.link_use["link out"] > 0.85
    twice = predict(request, algorithm="window", costs=slow | {"link_gbps": 1.0})
    fixed = COSTS["launch_ns"] / 1e3
    assert (four.combine_us - fixed) / (twice.combine_us - fixed) == pytest.approx(2, rel=0.15)


def test_a_mesh_gives_every_pair_a_link_of_its_own() -> None:
    slow = {"link_gbps": 1.0, "ranks_per_package": 1}
    request = Request(ranks=8, experts=16, topk=4, hidden=4096, batch=32, cores=8)
    plane = predict(request, algorithm="window", costs=slow | {"mesh": 0})
    mesh = predict(request, algorithm="window", costs=slow | {"mesh": 1})
    assert mesh.combine_us < 0.5 * plane.combine_us


def test_lent_rows_are_read_where_they_are() -> None:
    """Zero-copy leaves out direct's copy of others' rows into the half: fewer bytes pass the memory."""
    request = Request(**(vars(SMALL) | {"batch": 64}))

    def moved(algorithm: str) -> float:
        with TimedWorld(request, algorithm, 0, payload=False) as world:
            world.run("dispatch", COSTS)
            links = world.run("combine", COSTS).links
        return sum(size for name, _, size, _ in links if name == "memory")

    rows = (request.ranks - 1) * request.batch * request.topk * request.hidden * 2
    copied, lent = moved("direct"), moved("zero-copy")
    assert copied - lent == pytest.approx(2 * rows, rel=0.02)  # in and out
    assert (
        predict(request, algorithm="zero-copy").combine_us < predict(request, algorithm="direct").combine_us
    )


def events_of(algorithm: str, costs: dict[str, float]) -> list[Event]:
    found = predict(SMALL, algorithm=algorithm, costs=costs, events=1_000_000)
    return found.dispatch.events


def test_no_status_is_seen_before_it_is_visible() -> None:
    late = 25_000.0
    events = events_of("window", {"visible_ns": late})
    stores = {event.flow: event for event in events if event.flow and event.pipe == "MTE3"}
    waits = [event for event in events if event.name == "wait"]
    assert waits
    assert any(wait.flow for wait in waits)
    for wait in waits:
        if wait.flow:
            assert wait.end_ns >= stores[wait.flow].start_ns + late
            assert stores[wait.flow].peer == wait.rank
    quick = predict(SMALL, algorithm="window", costs={"visible_ns": 0.0})
    slow = predict(SMALL, algorithm="window", costs={"visible_ns": late})
    assert slow.dispatch_us - quick.dispatch_us == pytest.approx(late / 1e3, abs=3)


def test_sync_all_waits_for_the_last_core() -> None:
    events = events_of("window", {"stagger_ns": 2_000.0})
    for rank in range(SMALL.ranks):
        first: dict[int, Event] = {}
        for event in events:
            if event.rank == rank and event.name == "SyncAll":
                first.setdefault(event.core, event)
        assert len(first) == SMALL.cores
        last = max(event.start_ns for event in first.values())
        for event in first.values():
            assert event.end_ns == pytest.approx(last + COSTS["sync_ns"])


def test_events_are_within_their_launch() -> None:
    events = events_of("direct", {})
    launches = {event.rank: event for event in events if event.name == "launch"}
    assert set(launches) == set(range(SMALL.ranks))
    assert {event.pipe for event in events} == {"S", "V", "MTE2", "MTE3"}
    for event in events:
        assert 0 <= event.start_ns <= event.end_ns
        assert event.end_ns <= launches[event.rank].end_ns + 1e-6 or event.pipe == "MTE3"


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_wait_that_never_ends_is_named(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    never = {"visible_ns": 1e12}
    monkeypatch.setattr(timed_world, "_LIMIT_NS", 1e6)
    with pytest.raises(AscendMoeError, match=r"hang: still polling .*: rank \d+ core \d+ "):
        predict(SMALL, algorithm=algorithm, costs=never)
    assert times(predict(SMALL, algorithm=algorithm)) == times(predict(SMALL, algorithm=algorithm))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"soc": "Ascend310"}, "soc"),
        ({"topk": 17}, "topk"),
        ({"topk": 17, "experts": 64}, "expert_ids"),
        ({"ranks": 3}, "moe_expert_num"),
    ],
)
def test_refused(change: dict[str, object], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        predict(Request(**(vars(SMALL) | change)))
    assert caught.value.argument == argument


def test_no_such_algorithm() -> None:
    with pytest.raises(ArgumentError, match=r"algorithm is 'ring'; need one of cann-style, window, direct"):
        predict(SMALL, algorithm="ring")


def test_short_rows_take_the_same_time_every_time() -> None:
    """Their bytes are moved, so they are no leftovers: rows of zeros would be quantised in another way."""
    short = Request(**(vars(SMALL) | {"hidden": 512}))
    dirty = torch.randn(1 << 20)
    first = times(predict(short, algorithm="window"))
    del dirty
    assert times(predict(short, algorithm="window")) == first
    assert times(predict(short, algorithm="window", payload=True)) == first
