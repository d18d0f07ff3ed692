"""More ranks than have their status messages in UB together: equal to the reference; failures name the rank."""

from __future__ import annotations

from typing import Any

import op_runs
import pytest
from failure_cases import Caught, caught
from failure_windows import HEADER_BLOCKS, WORDS, State, of_epoch

from ascend_moe import LocalCluster, plan, settings
from ascend_moe.errors import CommTimeout, CorruptStatus
from ascend_moe.reference.cases import QUANTS, Case, legal

# Ranks, local experts. The first two are compared in parts (MessagesAtOnce in op_kernel/protocol/tiling.h): one with a
# world that SegmentScan takes, one without.
SMALL = [(72, 14), (65, 15), (96, 2)]
LARGE = [(128, 2), (256, 1), (256, 4), (384, 2)]
ALGORITHMS = ("window", "direct")
SETTINGS = {"ASCEND_MOE_TIMEOUT_S": op_runs.CROWDED_S}


def assert_equal_to_reference(cluster: LocalCluster, algorithm: str, local: int, **settings_of: Any) -> None:
    """Dispatch and combine, two cores a rank, with a rank without tokens, in both forms of rows."""
    for quant in ("none", "int8"):
        spec = Case(world=cluster.world_size, local=local, **QUANTS[quant], cores=2, units=1, batch=2, **settings_of)
        case = legal(spec)
        runs = op_runs.run(cluster, case)
        assert op_runs.check(case, runs)
        assert {run.algorithms for run in runs if isinstance(run, op_runs.RankRun)} == {(algorithm, algorithm)}


SIZES = [*SMALL, *(pytest.param(*size, marks=pytest.mark.nightly) for size in LARGE)]


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("world", "local"), SIZES)
def test_equal_to_reference(world: int, local: int, algorithm: str, contract: int) -> None:
    with LocalCluster(world, window_mib=1) as cluster:
        kind = {"topk": 4, "ids": "distinct", "batches": "zero rank", "seed": world}
        assert_equal_to_reference(cluster, algorithm, local, contract=contract, **kind)


@pytest.mark.parametrize("algorithm", ["window"])
@pytest.mark.parametrize(
    ("world", "share", "flags", "contract"),
    [(72, 8, "0", 1), (72, 12, "1", 2), pytest.param(264, 8, "0", 1, marks=pytest.mark.nightly)],
)
def test_between_servers_equal_to_reference(
    world: int, share: int, flags: str, contract: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ranks to a server, reached by BatchWrite: 263 items are more than one takes."""
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))
    monkeypatch.setenv("ASCEND_MOE_INTRA_NODE_STORES", flags)
    monkeypatch.setenv("ASCEND_MOE_RDMA_FLAGS", flags)
    with LocalCluster(world, window_mib=2) as cluster:
        kind = {"topk": 4, "ids": "distinct", "batches": "zero rank", "seed": share}
        assert_equal_to_reference(cluster, "window", 2, contract=contract, **kind)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_parts_that_are_not_the_whole(algorithm: str) -> None:
    """The sizes above are what they are said to be: else no test would meet a part."""
    for (world, local), parts in zip(SMALL, (2, 2, 1), strict=True):
        request = plan.Request(world, world * local, 4, 64, 2, comm_alg=algorithm, cores=2, dtype="fp32")
        items = [item for item in plan.plan(request).ops["combine"].ub if item.name == "their comparison"]
        counts = local * (2 if algorithm == "direct" else 1)
        message = 32 * (2 + -(-counts // 4))
        assert [item.bytes < world * message for item in items] == [parts > 1]


@pytest.mark.parametrize(("algorithm", "cores"), [("direct", 2)])
def test_a_rank_that_does_not_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of the second part is waited for until the deadline; the error names it, not its place in the part."""
    world, local = SMALL[0]
    missing = world - 3
    case = legal(Case(world=world, local=local, topk=2, cores=2, units=1, batch=1, seed=4, contract=2))
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "3")
    with LocalCluster(world, window_mib=1) as cluster:

        def body(rank: int, group_ep: str) -> Caught | None:
            return None if rank == missing else caught(op_runs.dispatch, case, rank, group_ep)

        for rank, outcome in enumerate(cluster.run(body)):
            if outcome is None:
                continue
            assert type(outcome.error) is CommTimeout and outcome.error.rank == missing, f"{rank}: {outcome!r}"
            assert f"missing: rank {missing}" in str(outcome.error) and "its function has returned" in str(
                outcome.error
            )


@pytest.mark.parametrize("source", [1, SMALL[0][0] - 2])
@pytest.mark.parametrize(("algorithm", "cores"), [("direct", 2)])
def test_a_wrong_count_is_seen_in_every_part(source: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of a message whose hash does not fit them are refused, though all other words are right."""
    world, local = SMALL[0]
    case = legal(Case(world=world, local=local, topk=2, cores=2, units=1, batch=1, seed=4, contract=2))
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "20")
    with LocalCluster(world, window_mib=1) as cluster:
        for _ in range(2):
            cluster.run(lambda rank, group_ep: op_runs.dispatch(case, rank, group_ep))
        reader = State.of(cluster, 0)
        epoch = reader.epoch + 1
        message = of_epoch(list(reader.run(epoch, source, local)), epoch)
        message[HEADER_BLOCKS * WORDS + 2] ^= 1  # the first count
        reader.run(epoch, source, local)[:] = message

        def body(rank: int, group_ep: str) -> Caught | None:
            return None if rank == source else caught(op_runs.dispatch, case, rank, group_ep)

        outcome = cluster.run(body)[0]
        assert outcome is not None and type(outcome.error) is CorruptStatus, repr(outcome)
        assert outcome.error.rank == source


def test_a_corrupt_abort_block_of_the_second_chunk_names_its_rank() -> None:
    """A core loads 128 of them at a time. The op ends before any other rank has called."""
    case = legal(Case(world=130, local=1, topk=2, cores=2, units=1, batch=1, seed=4, contract=2))
    with LocalCluster(130, window_mib=1) as cluster:

        def body(rank: int, group_ep: str) -> Caught | None:
            if rank != 0:
                return None
            cluster.communicator(rank)
            State.of(cluster, rank).forge_abort(129, 2, 0)
            return caught(op_runs.dispatch, case, rank, group_ep)

        outcome = cluster.run(body)[0]
    assert outcome is not None and type(outcome.error) is CorruptStatus, repr(outcome)
    assert outcome.error.rank == 129


def test_the_limit_has_one_home() -> None:
    """Python's number is that of op_kernel/protocol/window.h; a plan goes further than a run."""
    limits = plan.limits()
    assert settings.MAX_WORLD == limits["ep_world_size"] == 384 and limits["planned_world_size"] == 768
    report = plan.plan(plan.Request(768, 768, 8, 7168, 128))
    assert [violation.argument for violation in report.violations] == ["ep_world_size"] and not report.ok
    assert report.violations[0].message == "ep_world_size is 768, it must be in 1..384"
    assert set(report.ops) == {"dispatch", "combine"} and report.window["state_bytes"] < 2**20
    beyond = plan.plan(plan.Request(1024, 1024, 8, 7168, 128))
    assert beyond.violations[0].message == "ep_world_size is 1024, it must be in 1..768" and not beyond.ops
