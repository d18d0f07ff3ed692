"""`ascend-moe hang`: the rank that the others wait for, from their windows, copies of state areas and the watchdog."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import Ranks

import ascend_moe
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.dispatchers.base import Dispatched
from ascend_moe.errors import ArgumentError
from ascend_moe.native import hang, hang_cann, library
from ascend_moe.native.hang import GroupState, RankState

WORLD = 4
CAUSES = ("stopped", "sleeps", "never", "other", "killed")
ALGORITHMS = ("window", "direct", "hierarchy")


def group(key: str, *ranks: RankState) -> GroupState:
    return GroupState(key, key, ranks)


def state(rank: int, *awaits: int, pid: int = 0, **more: object) -> RankState:
    return RankState(rank, pid or 100 + rank, "combine", "window", 3, "WaitStatus", awaits=awaits, **more)  # type: ignore[arg-type]


def found(*groups: GroupState) -> list[tuple[str, int]]:
    return [(each.group, each.rank) for each in hang.behind(groups)]


def test_the_rank_that_waits_for_nobody_is_behind() -> None:
    assert found(group("a", state(0, 1), state(1, 2), state(2), state(3))) == [("a", 2)]
    assert found(group("a", state(0), state(1))) == []


def test_a_failed_rank_stands_for_the_rank_that_its_error_names() -> None:
    lost = {"error": "PeerLost", "culprit": 2}
    assert found(group("a", state(0, **lost), state(1, 0), RankState(2))) == [("a", 2)]


def test_among_ranks_that_wait_in_two_groups_for_each_other_the_most_awaited_is_behind() -> None:
    first = group("a", state(0, 1), state(1), state(2, 1))
    assert found(first, group("b", state(0), state(1, 0, 2), state(2))) == [("a", 1)]
    relayed = group("a", state(0, 1, 2), state(1), state(2, 1, 0))  # hierarchy: 0 and 2 wait for each other's relays
    assert found(relayed, group("b", state(0), state(1, 0, 2), state(2))) == [("a", 1)]


def test_a_job_whose_ranks_all_wait_is_judged_beside_a_job_with_a_culprit() -> None:
    crossed = (group("a", state(0, 1), state(1), state(2, 1)), group("b", state(0), state(1, 0, 2), state(2)))
    assert found(*crossed, group("c", state(0, 1, pid=200), state(1, pid=201))) == [("a", 1), ("c", 1)]


def test_waits_that_began_meanwhile_are_left_out() -> None:
    before, now = group("a", state(0), state(1)), group("a", state(0, 1), state(1))
    assert found(*hang.steady([before], [now])) == [] and found(*hang.steady([now], [now])) == [("a", 1)]
    earlier = group("a", replace(now.ranks[0], epoch=2), state(1))
    assert found(*hang.steady([earlier], [now])) == [], "the rank has waited in another op"


# ---- what rank processes do: ops that a test starts, one after the other

TOKENS, HIDDEN = 4, 64
_dispatchers: list[MC2Dispatcher] = []  # of two groups of all ranks
_sent: list[Dispatched] = []


def configure(variables: dict[str, str]) -> None:
    os.environ |= variables
    world = dist.get_world_size()
    _dispatchers.append(MC2Dispatcher.from_group(dist.group.WORLD, world))
    _dispatchers.append(MC2Dispatcher.from_group(dist.new_group(), world))


def _weights() -> torch.Tensor:
    return torch.full((TOKENS, dist.get_world_size()), 1 / dist.get_world_size())


def dispatch(group: int = 0) -> None:
    x = torch.full((TOKENS, HIDDEN), float(dist.get_rank()))
    ids = torch.arange(dist.get_world_size(), dtype=torch.int32).repeat(TOKENS, 1)
    _sent[:] = [_dispatchers[group].dispatch(x, ids, expert_scales=_weights())]


def combine() -> bool:
    """Return whether the sums are this rank's own rows again."""
    out = _dispatchers[0].combine(_sent[0].expand_x, _sent[0], _weights())
    return bool((out == dist.get_rank()).all())


def sleep_then(seconds: float, op: Any, *args: Any) -> Any:
    time.sleep(seconds)
    return op(*args)


# ---- windows of this machine


def snapshot(ranks: Ranks) -> list[GroupState]:
    mine = {ranks.pid(rank) for rank in range(ranks.world)}
    return [each for each in hang.live() if mine & {one.pid for one in each.ranks}]


def until_behind(ranks: Ranks, rank: int) -> list[hang.Behind]:
    end = time.monotonic() + 5
    while True:
        seen = hang.behind(snapshot(ranks))
        if [each.rank for each in seen] == [rank] or time.monotonic() > end:
            return seen


def test_a_stopped_process_is_named_and_then_continues(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        ranks.call(configure, {"HCCL_BUFFSIZE": "2", "ASCEND_MOE_TIMEOUT_S": "20", "ASCEND_MOE_WATCHDOG_S": "0.1",
                                     "ASCEND_MOE_CALLS": str(tmp_path)})  # fmt: skip
        ranks.stop(1)
        ranks.start(0, dispatch)
        (seen,) = until_behind(ranks, 1)
        assert seen.waiters == (0,) and seen.pid == ranks.pid(1) and "is stopped (state T)" in seen.why
        ranks.resume(1)
        end, text = time.monotonic() + 5, ""
        while "behind:" not in text and time.monotonic() < end:
            text = "".join(file.read_text() for file in tmp_path.iterdir())
        assert "group 0: rank 1 has called no op of it; rank 0 waits for it in dispatch, epoch 1" in text
        ranks.start(1, dispatch)
        assert not ranks.wait(0).error and not ranks.wait(1).error
        assert all(each.value for each in ranks.call(combine))


def test_a_group_that_opens_waits_for_the_rank_that_has_not_called() -> None:
    with Ranks(2) as ranks:
        ranks.start(0, configure, {"HCCL_BUFFSIZE": "2"})
        (seen,) = until_behind(ranks, 1)
        assert "rank 1 has called no op of it; rank 0 waits for it in open" in seen.why


def test_the_watchdog_sees_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_WATCHDOG_S", "0.06")
    monkeypatch.setenv("ASCEND_MOE_CALLS", str(tmp_path))

    def written() -> str:
        return "".join(file.read_text() for file in tmp_path.iterdir())

    def rank_main(rank: int, name: str) -> None:
        while rank == 1 and "behind:" not in written():
            time.sleep(0.01)
        x, ids = torch.ones(2, 16), torch.tensor([[0], [1]], dtype=torch.int32)
        ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, name, 2, rank, 2)

    with ascend_moe.LocalCluster(2, window_mib=1) as cluster:
        cluster.run(rank_main)
    assert "rank 1 has called no op of it; rank 0 waits for it in dispatch, epoch 1" in written()


def test_the_watchdog_writes_once_for_each_op_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ASCEND_MOE_CALLS", str(tmp_path))
    groups, watchdog, here = dict[str, GroupState](), hang._Watchdog(), threading.get_ident()
    # The watchdog of groups that other tests have left open sees none.
    monkeypatch.setattr(hang, "live", lambda pids=None: [*groups.values()] if threading.get_ident() == here else [])
    for number, (key, epoch) in enumerate((("a", 3), ("b", 3), ("b", 4)), 1):
        late = replace(state(0, 1, pid=os.getpid(), seconds=5.0), epoch=epoch)
        groups[key] = group(key, late, state(1))
        for limit in (3600.0, 1.0, 1.0):
            watchdog._look(limit)
            assert len([*tmp_path.iterdir()]) == number - (limit == 3600.0)
    monkeypatch.setenv("ASCEND_MOE_CALLS", "/nothing")
    groups["c"] = group("c", replace(state(0, 1, pid=os.getpid(), seconds=5.0), epoch=1), state(1))
    watchdog._look(1.0)
    assert "all ranks: not written: /nothing/" in caplog.text


def watchdogs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ascend_moe-watchdog"]


def test_the_watchdog_ends_with_the_last_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on mapping windows and opening descriptors in a process that has none of its own."""
    monkeypatch.setenv("ASCEND_MOE_WATCHDOG_S", "0.06")
    for _ in range(2):  # it starts again with the next group
        with ascend_moe.LocalCluster(2, window_mib=1) as cluster:
            cluster.run(lambda rank, name: ascend_moe.comm.lookup(name, 2, rank))
            (thread,) = watchdogs()
            thread.join(0.2)
            assert thread.is_alive(), "the group is open"
        thread.join(5)
        assert not watchdogs()


# ---- copies of state areas


def test_copies_of_state_areas_name_the_rank(tmp_path: Path) -> None:
    files = [tmp_path / f"{rank}.bin" for rank in range(2)]
    layout = (ctypes.c_uint64 * 3)()
    library.lib().am_window_layout(2, layout)

    def rank_main(rank: int, name: str) -> None:
        x, ids = torch.ones(2, 16), torch.tensor([[0], [1]], dtype=torch.int32)
        ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, name, 2, rank, 2)
        windows = cluster._windows
        assert windows is not None
        while rank == 1 and not windows.state().ranks[0].awaits:  # type: ignore[union-attr]
            time.sleep(0.001)
        for file, base in zip(files, windows._bases if rank == 1 else (), strict=False):
            file.write_bytes(ctypes.string_at(base + layout[1], layout[2]))
        ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, name, 2, rank, 2)

    with ascend_moe.LocalCluster(2, window_mib=1) as cluster:
        cluster.run(rank_main)
    (seen,) = hang.behind([hang.of_files(files)])
    assert (seen.rank, seen.waiters) == (1, (0,)) and "waits for it in dispatch, epoch 2" in seen.why
    files[1].write_bytes(bytes(layout[2]))
    with pytest.raises(ArgumentError, match=r"1\.bin does not begin with a control block"):
        hang.of_files(files)


def area(fields: dict[int, bytes]) -> bytes:
    made = bytearray(976 << 10)
    for at, raw in fields.items():
        made[at : at + len(raw)] = raw
    return bytes(made)


def test_copies_of_cann_v1_areas_name_the_rank_whose_flags_are_old(tmp_path: Path) -> None:
    one = struct.pack("<f", 1.0)
    late = area({(900 << 10): struct.pack("<I", 1)})  # in half 0, where all has arrived
    waits = area({(512 << 10): one, (512 << 10) + 2 * 512: one})  # in half 1: ranks 0 and 2
    files = [tmp_path / str(rank) for rank in range(3)]
    for file, raw in zip(files, (waits, late, waits), strict=True):
        file.write_bytes(raw)
    (seen,) = hang.behind([hang_cann.of_files(files, "cann-v1", 6)])
    assert (seen.rank, seen.waiters) == (1, (0, 2))
    with pytest.raises(ArgumentError, match="is 7; cann-v1 needs the number of experts, a multiple of 3 ranks"):
        hang_cann.of_files(files, "cann-v1", 7)


def test_copies_of_cann_v2_areas_name_the_rank_whose_flags_are_missing(tmp_path: Path) -> None:
    def control(rank: int, stage: int, count: int) -> bytes:
        return struct.pack("<6IQ", 0, stage, rank, 4, 2, 0, count)

    one, half, blocks = struct.pack("<f", 1.0), 500 << 10, 950 << 10
    waits = area({half: one, half + 64: one, blocks: control(0, 1, 9)})  # both experts' blocks of rank 0
    files = [tmp_path / str(rank) for rank in range(2)]
    files[0].write_bytes(waits)
    files[1].write_bytes(area({blocks: control(1, 2, 8)}))
    (seen,) = hang.behind([hang_cann.of_files(files, "cann-v2")])
    assert (seen.rank, seen.waiters) == (1, (0,)) and "in no op of it since epoch 8 (dispatch)" in seen.why
    with pytest.raises(ArgumentError, match="rank 0 says that it is rank 1 of 2 with 4 experts; pass all 2 ranks"):
        hang_cann.of_files(files[::-1], "cann-v2")


# ---- staged hangs


def stage(ranks: Ranks, cause: str, culprit: int, op: str) -> list[int]:
    """Stage a hang; return the ranks that a later op of the culprit releases."""
    others = [rank for rank in range(WORLD) if rank != culprit]
    step = {"dispatch": dispatch, "combine": combine}[op]
    if cause in ("stopped", "killed"):
        ranks.stop(culprit)
    for rank in others:
        ranks.start(rank, step)
    if cause == "killed":
        assert [each.rank for each in until_behind(ranks, culprit)] == [culprit]
        ranks.kill(culprit)
        return []
    if cause == "sleeps":
        ranks.start(culprit, sleep_then, 5.0, step)
    if cause == "other":
        ranks.start(culprit, dispatch, 1)
        return []
    return others


def release(ranks: Ranks, cause: str, culprit: int, op: str, others: list[int]) -> bool:
    """Let the culprit continue; return whether every rank has the right result."""
    step = {"dispatch": dispatch, "combine": combine}[op]
    if cause == "stopped":
        ranks.resume(culprit)
    if cause in ("stopped", "never"):
        ranks.start(culprit, step)
    results = [ranks.wait(rank, 20) for rank in [*others, culprit]]
    if op == "dispatch":
        results = [*results, *ranks.call(combine)]
    return all(not one.error and one.value in (None, True) for one in results)


@pytest.mark.nightly
def test_fifty_staged_hangs_name_the_right_rank_within_two_seconds() -> None:
    """With a rank that is stopped, sleeps, never calls, is in another op or was killed, in each algorithm."""
    right, seconds = 0, []
    for number in range(50):
        cause, algorithm = CAUSES[number % 5], ALGORITHMS[number // 5 % 3]
        op, culprit = ("dispatch", "combine")[number // 15 % 2], number * 7 % WORLD
        variables = {"HCCL_BUFFSIZE": "4", "ASCEND_MOE_COMM_ALG": algorithm, "ASCEND_MOE_TIMEOUT_S": "12"}
        if algorithm == "hierarchy":
            variables["ASCEND_MOE_RANKS_PER_SERVER"] = "2"
        with Ranks(WORLD) as ranks:
            assert not [each.text for each in ranks.call(configure, variables) if each.error]
            for step in (dispatch, combine)[: 2 if op == "dispatch" else 1]:
                assert not [each.text for each in ranks.call(step) if each.error]
            others = stage(ranks, cause, culprit, op)
            time.sleep(0.3)
            start = time.monotonic()
            command = [sys.executable, "-m", "ascend_moe", "hang", "--json", "-"]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            seconds.append(time.monotonic() - start)
            mine, said = {ranks.pid(rank) for rank in range(WORLD)}, json.loads(ran.stdout)
            keys = {each["key"] for each in said["groups"] if mine & {one["pid"] for one in each["ranks"]}}
            named = {each["rank"] for each in said["behind"] if each["key"] in keys}
            right += named == {culprit} and ran.returncode == 1
            if named != {culprit}:
                print(f"{number}: {cause} {algorithm} {op} rank {culprit}: named {named}\n{ran.stdout}")
            if others:
                assert release(ranks, cause, culprit, op, others), f"{number}: {cause} disturbed the ranks"
    print(f"{right} of 50 staged hangs named right, at most {max(seconds):.2f} s, median {sorted(seconds)[25]:.2f} s")
    assert right == 50 and sorted(seconds)[25] < 2.0
