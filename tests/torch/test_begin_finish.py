"""begin_dispatch and begin_combine: the ops in two launches give the same bits, and let anything else run between."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import begin_ranks
import comm_cases
import op_runs
import pytest
import torch
from begin_ranks import TwoLaunches
from explored_programs import MODES, assert_nothing_found
from op_runs import Clusters
from rank_processes import Ranks, assert_named, fork_server, nothing_left, values

import ascend_moe
from ascend_moe import LocalCluster, explore
from ascend_moe.errors import (
    ArgumentError,
    AscendMoeError,
    CommTimeout,
    InvalidExpertId,
    RoutingMismatch,
    RoutingOverflow,
)
from ascend_moe.experts import grouped_mlp
from ascend_moe.reference.cases import Case, draw
from ascend_moe.validate.run import DevicePlace

__all__ = ["fork_server", "nothing_left"]  # fixtures
SMALL = Case(world=2, contract=2, ids="distinct", cores=2)
DEADLINE_S, FAR_S = 0.5, 30.0
each_algorithm = pytest.mark.parametrize("algorithm", ["window", "direct"])


def ops_of(case: Case, rank: int, group_ep: str, algorithm: str = "window") -> tuple[TwoLaunches, dict[str, str]]:
    return TwoLaunches(DevicePlace(group_ep, case.world, rank), case), {"comm_alg": algorithm}


def must_come(event: threading.Event) -> None:
    assert event.wait(FAR_S), "a rank waits for the other where it must not"


# ---- the same bits


@each_algorithm
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_drawn_cases_equal_the_reference(
    clusters: Clusters, world: int, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized or not, every mask, unequal batches, ranks without tokens, weights, cores from 1 to 48."""

    def call(*given: Any) -> Any:
        return begin_ranks.two_launches(*given).finish()

    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", algorithm)
    for seed in range(30):
        case = draw(1000 * world + seed, world=(world,), contract=(2,))
        runs = op_runs.run(clusters[world], case, call=call)
        assert op_runs.check(case, runs, traffic=lambda *_: None)  # the bytes are those of the second launch alone
        assert {name for one in runs for name in one.algorithms} == {algorithm}  # type: ignore[union-attr]


def test_hierarchy_begins_without_waiting_for_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwarding of hierarchy happens in finish: begin waits for nobody."""
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    with LocalCluster(4) as cluster:
        case = replace(SMALL, world=4, share=2, weights=True)
        started = threading.Barrier(4, timeout=FAR_S)

        def all_begin_first(rank: int, group_ep: str) -> str:
            ops, alg = ops_of(case, rank, group_ep, "hierarchy")
            dispatched = ops.dispatch(**alg)
            started.wait()  # nobody has waited for another yet
            sent = dispatched.finish()
            rows = op_runs.expert_rows(case, rank, sent)
            combined = ops.combine(rows, sent, **alg)
            started.wait()
            combined.finish()
            return ascend_moe.algorithm_of(group_ep)

        assert cluster.run(all_begin_first) == ["hierarchy"] * 4


# ---- begin sends, and waits for nobody


@each_algorithm
def test_begin_sends_and_does_not_wait(clusters: Clusters, algorithm: str) -> None:
    steps = ("dispatch begun", "dispatch there", "combine begun", "combine there")
    done = {name: threading.Event() for name in steps}

    def run(rank: int, group_ep: str) -> None:
        ops, alg = ops_of(SMALL, rank, group_ep, algorithm)
        if rank == 0:
            dispatched = ops.dispatch(**alg)
            done["dispatch begun"].set()
            must_come(done["dispatch there"])  # the other has all its rows
            sent = dispatched.finish()
            combined = ops.combine(sent[0], sent, **alg)
            done["combine begun"].set()
            must_come(done["combine there"])
            combined.finish()
        else:  # the ops themselves: they go together with those in two launches
            must_come(done["dispatch begun"])
            sent = op_runs.validate_run.dispatch(ops.place, SMALL, **alg)
            done["dispatch there"].set()
            must_come(done["combine begun"])
            op_runs.validate_run.combine(ops.place, SMALL, sent[0], sent, **alg)
            done["combine there"].set()

    clusters[2].run(run)


@each_algorithm
def test_the_deadline_counts_from_finish(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Event()
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", str(DEADLINE_S))

    def late(rank: int, group_ep: str) -> None:
        ops, alg = ops_of(SMALL, rank, group_ep, algorithm)
        if rank == 1:
            must_come(started)
            time.sleep(2 * DEADLINE_S)
        opened = ops.dispatch(**alg)
        started.set()
        if rank == 0:
            time.sleep(2.5 * DEADLINE_S)
        opened.finish()

    def alone(rank: int, group_ep: str) -> None:
        if rank == 1:
            time.sleep(2 * DEADLINE_S)
            return
        ops, alg = ops_of(SMALL, rank, group_ep, algorithm)
        opened, ends = ops.dispatch(**alg), [time.monotonic()]
        for _ in range(2):  # the second time at once
            with pytest.raises(CommTimeout, match="rank 1"):
                opened.finish()
            ends.append(time.monotonic())
        assert ends[1] - ends[0] >= DEADLINE_S > ends[2] - ends[1]
        with pytest.raises(CommTimeout):  # of a group that has failed at once
            ops.dispatch(**alg)

    for ranks in (late, alone):
        with LocalCluster(2) as cluster:
            cluster.run(ranks)


# ---- what may stand between


@each_algorithm
def test_no_other_op_of_the_group_between(clusters: Clusters, algorithm: str) -> None:
    def run(rank: int, group_ep: str) -> None:
        ops, alg = ops_of(SMALL, rank, group_ep, algorithm)
        sent = op_runs.validate_run.dispatch(ops.place, SMALL, **alg)
        whole: list[tuple[str, Callable[[], Any]]] = [
            ("npu_moe_distribute_dispatch_v2", lambda: op_runs.validate_run.dispatch(ops.place, SMALL)),
            ("npu_moe_distribute_dispatch", lambda: op_runs.dispatch(replace(SMALL, contract=1), rank, group_ep)),
            ("npu_moe_distribute_combine_v2", lambda: op_runs.validate_run.combine(ops.place, SMALL, sent[0], sent)),
            ("npu_moe_distribute_dispatch_v2", lambda: ops.dispatch(**alg)),
            ("npu_moe_distribute_combine_v2", lambda: ops.combine(sent[0], sent, **alg)),
        ]
        for name, begin in (
            ("begin_dispatch", lambda: ops.dispatch(**alg)),
            ("begin_combine", lambda: ops.combine(sent[0], sent, **alg)),
        ):
            opened = begin()
            for op, call in whole:
                with pytest.raises(ArgumentError) as caught:
                    call()
                assert str(caught.value).startswith(f"{op}: rank {rank} has an open {name} on group '{group_ep}'")
                assert "finish()" in str(caught.value) and "\n" not in str(caught.value)
            outputs = opened.finish()
            assert opened.finish() is outputs  # once is enough
            opened.close()
        ops.dispatch(**alg).close()  # which finishes
        op_runs.check_dispatch(2, rank, ops.dispatch(**alg).finish(), SMALL.dispatched()[rank])

    clusters[2].run(run)


def test_a_dropped_call_stays_open_until_close() -> None:
    with Ranks(2, timeout_s=FAR_S) as ranks:
        values(ranks.call(begin_ranks.begin))
        values(ranks.call(begin_ranks.drop))
        for outcome in ranks.call(begin_ranks.round_trip):
            assert outcome.error == "ArgumentError" and "has an open begin_dispatch on group '0'" in outcome.text
        values(ranks.call(begin_ranks.close))
        values(ranks.call(begin_ranks.round_trip))
        values(ranks.call(begin_ranks.close))


# ---- failures


@each_algorithm
def test_wrong_arguments_are_found_at_begin_or_at_finish_and_leave_nothing_open(
    clusters: Clusters, algorithm: str
) -> None:
    def run(rank: int, group_ep: str) -> None:
        ops, alg = ops_of(SMALL, rank, group_ep, algorithm)
        ids = SMALL.inputs[0].expert_ids
        if rank == 0:  # nothing was sent: the other rank does not notice
            with pytest.raises(ArgumentError, match="expert_ids"):
                ops.dispatch(expert_ids=ids.long(), **alg)
            with pytest.raises(TypeError):
                ascend_moe.begin_dispatch(SMALL.inputs[0].x)
        sent = ops.dispatch(**alg).finish()
        op_runs.check_dispatch(2, rank, sent, SMALL.dispatched()[rank])
        with pytest.raises(ArgumentError, match="ep_rank_id"):
            ops.combine(sent[0], sent, ep_rank_id=7, **alg)
        if rank == 1:  # counts are found where they are given, and by the other rank
            with pytest.raises(ArgumentError, match="ep_send_counts"):
                ops.combine(sent[0], sent, ep_send_counts=torch.full_like(sent[4], -3), **alg)
        else:
            opened = ops.combine(sent[0], sent, **alg)
            with pytest.raises(ArgumentError, match="ep_send_counts"):
                opened.finish()
        others = {} if rank else {"expert_ids": torch.cat([torch.full_like(ids[:1], -1), ids[1:]])}
        opened = ops.combine(sent[0], sent, **others, **alg)
        with pytest.raises(RoutingMismatch) if others else contextlib.nullcontext():
            opened.finish()
        ops.combine(sent[0], sent, **alg).finish()

    clusters[2].run(run)


@each_algorithm
@pytest.mark.parametrize(("ids", "error"), [("bad", InvalidExpertId), ("overflow", RoutingOverflow)])
def test_what_a_ranks_ids_break_it_raises_at_begin(
    clusters: Clusters, algorithm: str, ids: str, error: type[AscendMoeError]
) -> None:
    case = replace(SMALL, world=3, local=1, ids=ids, seed=3)
    guilty = case.fault().rank  # type: ignore[union-attr]

    def run(rank: int, group_ep: str) -> Any:
        ops, alg = ops_of(case, rank, group_ep, algorithm)
        for _ in range(3):  # the guilty rank is never ahead
            try:
                opened = ops.dispatch(**alg)
            except error as raised:
                assert rank == guilty
                found: AscendMoeError = raised
            else:
                assert rank != guilty
                with pytest.raises(error) as caught:
                    opened.finish()
                found = caught.value
            good = replace(case, ids="distinct")
            op_runs.check_dispatch(
                2, rank, TwoLaunches(ops.place, good).dispatch(**alg).finish(), good.dispatched()[rank]
            )
        return found

    with op_runs.cores(case.cores):
        op_runs.check_fault(case.fault(), clusters[3].run(run))  # type: ignore[arg-type]


@each_algorithm
def test_a_rank_that_died_is_named(algorithm: str) -> None:
    """Before it has sent by finish; after that by the next op, because all that finish needs is there."""
    with Ranks(3, timeout_s=FAR_S) as ranks:
        values(ranks.call(comm_cases.set_env, "ASCEND_MOE_COMM_ALG", algorithm))
        values(ranks.call(begin_ranks.round_trip))
        values(ranks.call(begin_ranks.begin))
        ranks.kill(2)
        values(ranks.call(begin_ranks.finish, ranks=[0, 1]))
        values(ranks.call(begin_ranks.begin, 1, ranks=[0, 1]))
        for outcome in ranks.call(begin_ranks.finish, 1, ranks=[0, 1]):
            assert_named(outcome, "PeerLost", 2)


# ---- others


def test_the_example_of_the_page_runs(clusters: Clusters) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "operators.md").read_text()
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    case = replace(SMALL, shared=2)
    gate_up, down = (torch.randn(case.local, *shape).bfloat16() for shape in ((case.hidden, 16), (8, case.hidden)))

    def run(rank: int, group_ep: str) -> None:
        mine, place = case.inputs[rank], DevicePlace(group_ep, 2, rank)
        (shared,) = mine.local_addends.values()
        got = names["moe"](
            mine.x,
            mine.expert_ids,
            mine.expert_scales,
            gate_up,
            down,
            lambda x: shared,
            **place.arguments(moe_expert_num=case.experts),
        )
        sent = op_runs.dispatch(case, rank, group_ep)
        rows = grouped_mlp(sent[0], gate_up, down, sent[3])
        assert torch.equal(got, op_runs.combine(case, rank, group_ep, rows, sent))

    clusters[2].run(run)


def test_a_backward_raises(clusters: Clusters) -> None:
    def run(rank: int, group_ep: str) -> None:
        ops, _ = ops_of(SMALL, rank, group_ep)
        x = SMALL.inputs[rank].x.clone().requires_grad_()
        sent = ops.dispatch(x=x).finish()
        op_runs.check_dispatch(2, rank, [each.detach() for each in sent], SMALL.dispatched()[rank])
        with pytest.raises(AscendMoeError, match="begin_dispatch is not differentiable"):
            sent.expand_x.float().sum().backward()

    clusters[2].run(run)


@pytest.mark.parametrize("mode", MODES)
def test_no_schedule_has_a_finding(mode: str) -> None:
    sequences = ("dc", "dcDC", "DcdC", "dCdc")
    cases = [replace(explore.draw(300 + n), sequence=sequences[n % 4], **MODES[mode]) for n in range(40)]
    small = [replace(case, world=2, sequence="ddcc") if n % 5 == 0 else case for n, case in enumerate(cases)]
    result = explore.campaign(iter(small), 200, seed=1, a_case=5)
    assert_nothing_found(result)
    assert result.schedules == 200


def test_a_killed_rank_in_every_schedule() -> None:
    """After a send that failed for good, its finish, which an NPU has queued already, fails as well."""
    program = explore.Program(world=3, cores=3, sequence="ddcc", contract=2, batches="equal")
    failed_sends = 0
    for algorithm in ("window", "direct"):
        with explore.World(3) as world:
            world.load(replace(program, algorithm=algorithm), accepted=0xFFFFFFFF)
            for step in range(0, 1500, 15):
                faults = explore.Faults(kill_rank=2, kill_step=step)
                run = world.run(step, 1, explore.Options(hang_is_finding=False, faults=faults))
                assert not run.failed, run.message
                # By rank and op: the codes of its two launches. Calls stand op by op: all sends, then all finishes.
                codes = [code for code, _ in world.errors()]
                for op in range(4):
                    for rank in range(2):
                        send, finish = codes[6 * op + rank], codes[6 * op + 3 + rank]
                        if send > 0:
                            failed_sends += 1
                            assert finish > 0, (step, codes)
    assert failed_sends > 20
