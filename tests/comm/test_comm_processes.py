"""Communicators between processes: opening together, closing, and every way in which a rank does not come."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import comm_cases as cases
import pytest
from rank_processes import Ranks, assert_named, fork_server, nothing_left, values

from ascend_moe import comm

__all__ = ["fork_server", "nothing_left"]  # fixtures
TIMEOUT_S = 1.0


def exchanged(world: int) -> list[list[int]]:
    return [[100 * rank + 1 for rank in range(world)]] * world


# ---- working together


def test_name_ops_generations_and_subgroups() -> None:
    with Ranks(3) as ranks:
        inheritable = values(ranks.call(cases.inheritable_files))
        for rank in (2, 0, 1):  # the first use may be an op, and ranks may come late
            ranks.start(rank, cases.op)
            time.sleep(0.1)
        assert values([ranks.wait(rank) for rank in range(3)]) == exchanged(3)
        assert values(ranks.call(comm.comm_name)) == ["0"] * 3
        files = values(ranks.call(cases.open_files))
        for _ in range(3):
            assert values(ranks.call(cases.op)) == exchanged(3)
            assert values(ranks.call(cases.close_twice_and_count)) == [(0, 0, 0)] * 3
        assert values(ranks.call(cases.op)) == exchanged(3)
        assert values(ranks.call(cases.open_files)) == files, "fresh windows leave no descriptor of old ones"
        assert values(ranks.call(cases.inheritable_files)) == inheritable, "ours are close-on-exec"
        assert ranks._store is not None
        values(ranks.call(cases.destroy_and_init_again, ranks._store.port))
        assert values(ranks.call(cases.op)) == exchanged(3), "a group of the same name has new windows"
        # A group of some of the ranks has windows of its own.
        (name,) = set(values(ranks.call(cases.new_group, [2, 0], ranks=[0, 2])))
        assert name != "0"
        for _ in range(2):
            assert values(ranks.call(cases.op, name, ranks=[0, 2])) == [[len(name), 100 + len(name)]] * 2
            assert values(ranks.call(cases.op)) == exchanged(3)


def test_the_checked_engine_refuses_ranks_that_are_processes() -> None:
    """At the first opening, on every rank, with no wait; alone in its group a process may use it."""
    with Ranks(3, timeout_s=20) as ranks:
        for outcome in ranks.call(cases.open_with_the_checked_engine):
            assert outcome.error == "ArgumentError" and outcome.details["argument"] == "ASCEND_MOE_ENGINE", outcome
            assert "ascend_moe.LocalCluster" in outcome.text and outcome.seconds < 10, outcome
        (name,) = values(ranks.call(cases.new_group, [1], ranks=[1]))
        assert values(ranks.call(cases.open_with_the_checked_engine, name, ranks=[1])) == [1]


def test_forked_children_neither_close_nor_hide_a_communicator() -> None:
    with Ranks(2, timeout_s=20) as ranks:
        assert values(ranks.call(cases.fork_and_exit_child)) == [0, 0]
        assert values(ranks.call(cases.op)) == exchanged(2)
        child = ranks.call(cases.fork_child_that_stays, ranks=[1])[0].value
        ranks.kill(1)
        began = time.monotonic()
        lost, again = (ranks.call(cases.op, ranks=[0])[0] for _ in range(2))
        assert_named(lost, "PeerLost", 1, "has ended")
        assert again.text == lost.text and time.monotonic() - began < 10, "a failed communicator fails at once"
        os.kill(child, 9)


def test_ranks_of_other_hosts_agree_for_every_group() -> None:
    """Gloo ranks that take themselves to be on other hosts; groups of some of them, and the setting."""
    with Ranks(4) as ranks:
        values(ranks.call(cases.hosts_are, ["a", "a", "b", "b"]))
        for some, shares in (
            ([0, 1, 2, 3], [2] * 4),
            ([0, 1], [2, 2, 0, 0]),
            ([3, 1], [0, 1, 0, 1]),
            ([2], [0, 0, 1, 0]),
        ):
            assert values(ranks.call(cases.ranks_sharing, some)) == shares
        outcomes = ranks.call(cases.ranks_sharing, [0, 1, 3])
        assert outcomes.pop(2).value == 0
        for outcome in outcomes:
            assert outcome.error == "ArgumentError" and "2 of its 3 ranks are on 'a'" in outcome.text
        values(ranks.call(cases.set_on, 3, "ASCEND_MOE_RANKS_PER_SERVER", "4"))
        for outcome in ranks.call(cases.ranks_sharing, [0, 1, 2, 3]):
            assert outcome.error == "ConfigMismatch" and outcome.details["field"] == "ASCEND_MOE_RANKS_PER_SERVER", (
                outcome.text
            )
        values(ranks.call(cases.set_env, "ASCEND_MOE_RANKS_PER_SERVER", "4"))
        assert values(ranks.call(cases.ranks_sharing, [0, 1, 2, 3])) == [4] * 4


# ---- a rank that does not come


def test_rank_that_never_calls_then_retry() -> None:
    missing, there = 0, [1, 2]
    with Ranks(3, timeout_s=0.4) as ranks:
        before = values(ranks.call(cases.open_files))
        for attempt in range(2):
            for outcome in ranks.call(comm.comm_name, ranks=there):
                assert_named(outcome, "CommTimeout", missing, f"rank {missing} has not called", "0.4 s")
                assert outcome.details["ranks"] == [missing]
                assert 0.4 <= outcome.seconds < 15
            if attempt == 0:  # the ranks have made different numbers of attempts when they meet at last
                assert ranks.call(comm.comm_name, ranks=there[:1])[0].error == "CommTimeout"
        assert values(ranks.call(cases.open_files)) == before
        values(ranks.call(cases.set_env, "ASCEND_MOE_TIMEOUT_S", "20"))
        assert values(ranks.call(cases.op)) == exchanged(3)


@pytest.mark.parametrize(("victim", "point"), [(0, "record"), (1, "peer"), (0, "map"), (1, "ready")])
def test_a_rank_killed_while_opening_is_named(victim: int, point: str) -> None:
    there = [rank for rank in range(3) if rank != victim]
    with Ranks(3, timeout_s=15) as ranks:
        before = values(ranks.call(cases.open_files, ranks=there))
        values(ranks.call(cases.signal_self_at, point, signal.SIGKILL, ranks=[victim]))
        for rank in [victim, *there]:
            ranks.start(rank, cases.op)
        for rank in there:
            outcome = ranks.wait(rank)
            assert_named(outcome, "PeerLost", victim)
            assert outcome.seconds < 10
        values(ranks.call(comm.close, "0", ranks=there))
        for old, new in zip(before, values(ranks.call(cases.open_files, ranks=there)), strict=True):
            assert not Counter(new) - Counter(old)  # gloo has closed its socket to the dead rank
        (name,) = set(values(ranks.call(cases.new_group, there, ranks=there)))
        fresh = [100 * rank + len(name) for rank in range(2)]
        assert values(ranks.call(cases.op, name, ranks=there)) == [fresh] * 2


@pytest.mark.parametrize("room", range(1, 4))
def test_a_rank_without_descriptors_says_so_and_the_others_name_it(room: int) -> None:
    with Ranks(3, timeout_s=TIMEOUT_S) as ranks:
        values(ranks.call(cases.leave_room_for_files, room, ranks=[1]))
        first, victim, last = ranks.call(cases.op)
        assert victim.error == "AscendMoeError" and "open files (ulimit -n)" in victim.text, victim
        for outcome in (first, last):
            assert_named(outcome, "CommTimeout", 1)
            # Before the others have started, or after.
            assert re.search("gave up (before )?with OSError", outcome.text), outcome.text


@pytest.mark.parametrize(("victim", "point"), [(0, "record"), (1, "map")])
def test_a_rank_stopped_while_opening_is_named(victim: int, point: str) -> None:
    there = [rank for rank in range(3) if rank != victim]
    with Ranks(3, timeout_s=TIMEOUT_S) as ranks:
        values(ranks.call(cases.signal_self_at, point, signal.SIGSTOP, ranks=[victim]))
        for rank in [victim, *there]:
            ranks.start(rank, cases.op)
        for rank in there:
            outcome = ranks.wait(rank)
            assert_named(outcome, "CommTimeout", victim, f"process {ranks.pid(victim)} is stopped (state T)")
            assert TIMEOUT_S <= outcome.seconds < TIMEOUT_S + 15
        ranks.resume(victim)
        late = ranks.wait(victim)
        # Stopped after its last word it opens the windows yet, and sees there that the others have left.
        cause = f"gave up before with CommTimeout about rank {victim}"
        assert late.error != "CommTimeout" or cause in late.text, late.text
        values(ranks.call(comm.close, "0"))
        assert values(ranks.call(cases.op)) == exchanged(3)


def test_store_host_stopped_or_killed_before_it_calls() -> None:
    timeout_s = 4  # the opening after it must keep it on a loaded machine too
    with Ranks(3, rank0_hosts=True, timeout_s=timeout_s) as ranks:
        ranks.stop(0)
        for outcome in ranks.call(comm.comm_name, ranks=[1, 2]):
            assert_named(outcome, "CommTimeout", 0, "store of the process group has not responded", "rank 0")
            assert outcome.seconds < timeout_s + 2
        ranks.resume(0)
        assert values(ranks.call(cases.op)) == exchanged(3)
    with Ranks(3, rank0_hosts=True, timeout_s=15) as ranks:
        for rank in (1, 2):
            ranks.start(rank, comm.comm_name)
        time.sleep(0.2)
        ranks.kill(0)
        for rank in (1, 2):
            assert_named(ranks.wait(rank, 2), "PeerLost", 0, "store")


def test_a_rank_that_gave_up_is_distinguished_from_the_one_it_waited_for() -> None:
    with Ranks(3, timeout_s=1.0) as ranks:
        values(ranks.call(cases.set_on, 1, "ASCEND_MOE_TIMEOUT_S", "2"))
        ranks.start(1, comm.comm_name)
        assert_named(ranks.call(comm.comm_name, ranks=[0])[0], "CommTimeout", 2)
        ranks.start(0, os._exit, 0)  # it will make no second attempt
        late = ranks.wait(1, 4)
        assert_named(late, "CommTimeout", 2, "rank 0 gave up before with CommTimeout about rank 2")
        assert late.details["ranks"] == [2]


# ---- ranks that fail


def test_ranks_that_fail_to_open_then_retry() -> None:
    with Ranks(2, timeout_s=0.7) as ranks:
        before = values(ranks.call(cases.open_files))
        values(ranks.call(cases.fail_mapping_once, ranks=[1]))
        ours, theirs = ranks.call(comm.comm_name)
        assert theirs.error == "AscendMoeError" and "HCCL_BUFFSIZE" in theirs.text
        assert_named(ours, "CommTimeout", 1, "gave up", "AscendMoeError")
        assert values(ranks.call(cases.open_files)) == before
        values(ranks.call(cases.set_on, 1, "HCCL_BUFFSIZE", "2.5"))
        outcome = ranks.call(cases.op, ranks=[1])[0]
        assert outcome.error == "ArgumentError" and outcome.details["argument"] == "HCCL_BUFFSIZE"
        values(ranks.call(cases.set_on, 1, "HCCL_BUFFSIZE", "2"))
        assert values(ranks.call(cases.op)) == exchanged(2)


# ---- open communicators


def test_windows_are_touched_and_have_no_names_and_one_descriptor_each() -> None:
    """The kernel frees them with the last process that maps them; the descriptor is for `ascend-moe hang`."""
    with Ranks(2) as ranks:
        values(ranks.call(comm.comm_name))
        blocks = Path(f"/proc/{ranks.pid(0)}/smaps").read_text().split("\nVmFlags:")
        windows = [block for block in blocks if "ascend_moe-window" in block]
        resident = [int(block.split("\nRss:")[1].split()[0]) for block in windows]
        assert len(resident) == 2 and min(resident) >= 1024, f"{resident} KiB before the first op"
        assert all("/memfd:ascend_moe-window" in block and "(deleted)" in block for block in windows)
        links = [os.readlink(link) for rank in range(2) for link in Path(f"/proc/{ranks.pid(rank)}/fd").iterdir()]
        assert len([link for link in links if "memfd" in link]) == 2
