"""Ranks of other servers, reached by a copy agent instead of stores: the same bits, the same failures."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import op_runs
import pytest
import torch

import ascend_moe.reference as ref
from ascend_moe import LocalCluster, comm
from ascend_moe.errors import (
    AscendMoeError,
    CommTimeout,
    ConfigMismatch,
    PeerLost,
    RoutingMismatch,
    WindowTooSmall,
)
from ascend_moe.reference.cases import Case, draw, legal

WINDOW_MIB = 4
ASSIST_WORDS = 128  # a row, as CANN allocates them


@pytest.fixture(autouse=True)
def _servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_MOE_CONTEXT", raising=False)
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "20")


def servers(monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))


# ---- against the reference


def check(case: Case, runs: list[op_runs.RankRun | AscendMoeError]) -> None:
    """As ``op_runs.check``, but that expand_idx comes in V1's form under both contracts."""
    fault = case.fault()
    if fault is not None:
        op_runs.check_fault(fault, runs)
        return
    expected = case.dispatched()
    rows = []
    for rank, (one, want) in enumerate(zip(runs, expected, strict=True)):
        assert isinstance(one, op_runs.RankRun), f"rank {rank}: {one!r}"
        check_dispatch(case, rank, one.dispatched, want)
        rows.append(one.rows)
    sums = case.combined(rows, expected)
    for rank, one in enumerate(runs):
        assert isinstance(one, op_runs.RankRun)
        report = ref.validate("combine", one.result, sums[rank], rank=rank)
        assert report.ok, report.text


def check_dispatch(case: Case, rank: int, got: tuple[torch.Tensor, ...], want: ref.DispatchResult) -> None:
    rows, pairs = want.expand_x.shape[0], case.inputs[rank].expert_ids.numel()
    named = [
        ("expand_x", got[0][:rows], want.expand_x),
        ("expand_idx", got[2][:pairs], want.expand_idx),
        ("expert_token_nums", got[3], want.expert_token_nums),
        ("ep_recv_counts", got[4][: want.ep_recv_counts.numel()], want.ep_recv_counts),
    ]
    if want.dynamic_scales is not None:
        named.append(("dynamic_scales", got[1][:rows], want.dynamic_scales))
    for name, one, other in named:
        assert ref.same_bits(one, other), f"rank {rank}: {name} differs"
    if case.contract == 2:
        assert got[2].numel() == max(pairs, got[0].shape[0] * ASSIST_WORDS)


def run(case: Case) -> list[op_runs.RankRun | AscendMoeError]:
    with LocalCluster(case.world, window_mib=WINDOW_MIB) as cluster:
        return op_runs.run(cluster, case)


MATRIX = [
    Case(world=2, local=2, topk=2, seed=11),
    Case(world=2, local=4, topk=3, contract=2, quant="int8", dtype="fp16", batches="unequal", seed=12),
    Case(world=3, local=2, topk=3, units=5, batches="zero rank", ids="minus", cores=5, seed=13),
    Case(world=3, local=1, topk=2, contract=2, mask="pair", dtype="fp32", batches="global_bs", seed=14),
    Case(world=4, local=2, topk=4, ids="hot", batch=9, contract=2, shared=2, cores=3, seed=15),
    Case(world=4, local=5, topk=2, quant="smooth", mask="token", batches="unequal", tail=True, seed=16),
    Case(world=5, local=1, topk=3, contract=2, quant="smooth", batches="unequal", cores=1, seed=17),
    Case(world=6, local=3, topk=4, ids="distinct", dtype="fp32", nums_type=0, tp=1, cores=13, seed=18),
    Case(world=7, local=2, topk=5, contract=2, ids="any", batches="zero rank", cores=4, seed=19),
    Case(world=8, local=1, topk=8, units=9, quant="int8", ids="distinct", cores=2, seed=20),
    Case(world=8, local=2, topk=2, contract=2, ids="hot", mask="prefix", odd=True, seed=21),
    Case(world=4, local=2, batch=0, seed=22),
    Case(world=4, local=2, ids="bad", contract=2, seed=23),
    Case(world=3, local=1, ids="overflow", seed=24),
]


@pytest.mark.parametrize("share", [1, 2, 4])
@pytest.mark.parametrize("spec", MATRIX, ids=lambda s: f"W{s.world}V{s.contract}-{s.seed}")
def test_every_case_is_the_reference(monkeypatch: pytest.MonkeyPatch, spec: Case, share: int) -> None:
    servers(monkeypatch, share)
    case = legal(spec)
    # All in one server: stores, and V2's own tensor.
    (check if share < case.world else op_runs.check)(case, run(case))


@pytest.mark.parametrize("share", [2, 3])
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_drawn_cases(monkeypatch: pytest.MonkeyPatch, share: int, first: int) -> None:
    servers(monkeypatch, share)
    with LocalCluster(5, window_mib=WINDOW_MIB) as cluster:
        for seed in range(first, first + 20):
            case = draw(
                seed,
                world=(5,),
                local=(1, 2, 3),
                topk=(1, 2, 3, 4),
                batch=range(7),
                cores=(1, 2, 8),
                ids=("distinct", "any", "minus", "hot", "mixed", "overflow", "bad"),
            )
            if case.world == 5:
                check(case, op_runs.run(cluster, case))


@pytest.mark.parametrize("contract", [1, 2])
def test_repeated_sequences_reuse_the_staging(monkeypatch: pytest.MonkeyPatch, contract: int) -> None:
    """D, D, C, C with another routing each time, ranks running free, epochs across the wrap."""
    servers(monkeypatch, 2)
    base = Case(world=4, local=2, topk=3, batch=6, contract=contract, batches="unequal", ids="minus", cores=3)
    cases = [replace(base, seed=seed) for seed in range(6)]
    expected = [case.dispatched() for case in cases]

    def loop(rank: int, group: str) -> None:
        comm.lookup(group, 4, rank)
        for first, second in itertools.pairwise(range(6)):
            sent = [op_runs.dispatch(cases[i], rank, group) for i in (first, second)]
            for i, one in zip((first, second), sent, strict=True):
                check_dispatch(cases[i], rank, one, expected[i][rank])
            for i, one in zip((first, second), sent, strict=True):
                rows = op_runs.expert_rows(cases[i], rank, one)
                results[i][rank] = (rows, op_runs.combine(cases[i], rank, group, rows, one))

    results: list[list[tuple[torch.Tensor, torch.Tensor] | None]] = [[None] * 4 for _ in cases]
    with op_runs.cores(3), LocalCluster(4, window_mib=WINDOW_MIB) as cluster:
        cluster.run(loop)
    for case, want, got in zip(cases, expected, results, strict=True):
        done = [one for one in got if one is not None]
        sums = case.combined([rows for rows, _ in done], want)
        assert all(ref.same_bits(one, other) for (_, one), other in zip(done, sums, strict=True))


# ---- arguments


def test_a_window_too_small_for_rows_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run takes its place in the region: the number that the message asks for is the least that works."""
    servers(monkeypatch, 1)
    spec = Case(world=2, local=1, topk=1, units=64, batch=256, dtype="fp16", batches="equal", ids="any")
    case = replace(spec)
    with LocalCluster(2, window_mib=2) as cluster:
        errors = op_runs.run(cluster, case)
    assert all(isinstance(one, WindowTooSmall) for one in errors), errors
    needed = errors[0].needed_mib  # type: ignore[union-attr]
    assert f"HCCL_BUFFSIZE={needed}" in str(errors[0])
    with LocalCluster(2, window_mib=needed) as cluster:
        check(case, op_runs.run(cluster, case))
    if needed > 2:
        with LocalCluster(2, window_mib=needed - 1) as cluster:
            assert all(isinstance(one, WindowTooSmall) for one in op_runs.run(cluster, case))


def test_assist_info_must_hold_expand_idx(monkeypatch: pytest.MonkeyPatch) -> None:
    servers(monkeypatch, 1)
    case = Case(world=2, local=2, topk=4, contract=2, batch=8, seed=3, ids="distinct")

    def short(rank: int, group: str) -> str:
        sent = list(op_runs.dispatch(case, rank, group))
        rows = op_runs.expert_rows(case, rank, sent)[:0]
        sent[2] = sent[2][:31]
        with pytest.raises(
            AscendMoeError, match=r"at least BS\*K = 32: pass dispatch's own tensor"
        ) as caught:
            op_runs.combine(case, rank, group, rows, sent)
        return str(caught.value)

    with LocalCluster(2, window_mib=WINDOW_MIB) as cluster:
        assert all("31 elements" in text for text in cluster.run(short))


# ---- failures


def test_a_mask_of_one_op_only_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    servers(monkeypatch, 1)
    case = Case(world=2, local=2, topk=2, batch=4, ids="distinct", seed=5)

    def lie(rank: int, group: str) -> AscendMoeError | None:
        sent = op_runs.dispatch(case, rank, group)
        rows = op_runs.expert_rows(case, rank, sent)
        other = replace(case, given=tuple(replace(one) for one in case.inputs))
        if rank == 0:
            other.inputs[0].x_active_mask = torch.tensor([False, True, True, True])
        try:
            op_runs.combine(other, rank, group, rows, sent)
        except AscendMoeError as error:
            return error
        return None

    with LocalCluster(2, window_mib=WINDOW_MIB) as cluster:
        errors = cluster.run(lie)
        assert isinstance(errors[0], RoutingMismatch) and errors[1] is None
        check(case, op_runs.run(cluster, case))  # the communicator is sound


def test_another_configuration_is_named_and_the_communicator_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    servers(monkeypatch, 2)
    base = Case(world=4, local=2, topk=2, batch=4, ids="distinct", seed=6)
    case = replace(base)
    other = replace(base, units=3)

    def mixed(rank: int, group: str) -> AscendMoeError:
        with pytest.raises(ConfigMismatch) as caught:
            op_runs.dispatch(other if rank == 3 else case, rank, group)
        return caught.value

    with LocalCluster(4, window_mib=WINDOW_MIB) as cluster:
        for _ in range(3):
            errors = cluster.run(mixed)
            assert {error.details["field"] for error in errors} == {"H"}
            check(case, op_runs.run(cluster, case))


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_rank_that_does_not_come_is_named_everywhere(
    monkeypatch: pytest.MonkeyPatch, share: int, op: str
) -> None:
    """Its own server and the others: one deadline, one name, and the failure is sticky."""
    servers(monkeypatch, share)
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "1.5")
    case = Case(world=4, local=2, topk=2, batch=4, ids="distinct", seed=7)
    absent = 2
    together = threading.Barrier(4)

    def one(rank: int, group: str) -> list[AscendMoeError]:
        sent = op_runs.dispatch(case, rank, group)
        found: list[AscendMoeError] = []
        together.wait()
        for attempt in range(2):
            try:
                if rank == absent and attempt == 0:
                    time.sleep(3)
                if op == "dispatch":
                    op_runs.dispatch(case, rank, group)
                else:
                    rows = op_runs.expert_rows(case, rank, sent)
                    op_runs.combine(case, rank, group, rows, sent)
            except AscendMoeError as error:
                found.append(error)
        return found

    start = time.monotonic()
    with LocalCluster(4, window_mib=WINDOW_MIB) as cluster:
        errors = cluster.run(one)
    assert time.monotonic() - start < 10
    for rank, found in enumerate(errors):
        assert len(found) == 2, f"rank {rank}: {found}"
        for error in found:
            assert isinstance(error, CommTimeout) and error.details["rank"] == absent, (
                f"rank {rank}: {error!r}"
            )
    assert f"rank {absent} did not arrive" in str(errors[0][0])
    assert f"rank {absent} (last seen in dispatch, epoch 1)" in str(errors[0][0]), errors[0][0]


def _killed(rank: int, world: int, store: str, pipe: object) -> None:
    import torch.distributed as dist

    import ascend_moe

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    case = Case(world=world, local=2, topk=2, batch=4, ids="distinct", seed=8)
    group = ascend_moe.comm_name(dist.group.WORLD)
    for _ in range(3):
        op_runs.dispatch(case, rank, group)
    pipe.send("ready")  # type: ignore[attr-defined]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        op_runs.dispatch(case, rank, group)
    except AscendMoeError as error:
        pipe.send((type(error).__name__, error.details, time.monotonic() - start))  # type: ignore[attr-defined]
    else:
        pipe.send(("nothing", {}, 0.0))  # type: ignore[attr-defined]
    os._exit(0)


@pytest.fixture
def processes(tmp_path: object) -> Iterator[list[object]]:
    started: list[object] = []
    yield started
    for process in started:
        process.kill()  # type: ignore[attr-defined]
        process.join()  # type: ignore[attr-defined]


@pytest.mark.parametrize("share", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_killed_peer_of_another_server_is_lost_within_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, processes: list[object], share: int
) -> None:
    servers(monkeypatch, share)
    monkeypatch.setenv("HCCL_BUFFSIZE", str(WINDOW_MIB))
    context = torch.multiprocessing.get_context("spawn")
    world, ends = 3, []
    for rank in range(world):
        ours, theirs = context.Pipe()
        process = context.Process(target=_killed, args=(rank, world, f"{tmp_path}/store", theirs))
        process.start()
        processes.append(process)
        ends.append(ours)
    for end in ends:
        assert end.poll(240) and end.recv() == "ready", "a rank did not start"
    for rank in (0, 2):
        assert ends[rank].poll(30), f"rank {rank} says nothing"
        kind, details, seconds = ends[rank].recv()
        assert kind == PeerLost.__name__ and details["rank"] == 1, (rank, kind, details)
        assert seconds < 10
