"""Processes of another user get nothing of a group and give nothing to it: the kernel refuses, and each rank looks.

As root, rank 1 is a process of user 65534. Where tests do not run as root no process can become another user's: there
both processes are told, in the place of the kernel's answer, that the other's window is another user's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist
from comm_cases import op
from rank_processes import CallResult, Ranks, assert_named, values

from ascend_moe import comm
from ascend_moe.comm import rendezvous
from ascend_moe.comm.peers import Peer
from ascend_moe.comm.records import Records, store_of
from ascend_moe.comm.rendezvous import Opening
from ascend_moe.errors import AscendMoeError, ConfigMismatch

NOBODY = 65534
HONEST = os.geteuid()
AS_ROOT = HONEST == 0
PR_SET_DUMPABLE = 4


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def become_another_user() -> None:
    if AS_ROOT and dist.get_rank() == 1:
        become_nobody()
    elif not AS_ROOT:
        rendezvous.file_owner = lambda fd: os.fstat(fd).st_uid + 1


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(2, timeout_s=0.7) as opened:
        yield opened


def started(ranks: Ranks, *calls: tuple[object, ...]) -> list[CallResult]:
    for rank, call in enumerate(calls):
        ranks.start(rank, *call)  # type: ignore[arg-type]
    return [ranks.wait(rank) for rank in range(len(calls))]


def assert_names_the_user(outcome: CallResult, other: int) -> None:
    assert outcome.error == "ConfigMismatch" and outcome.details["field"] == "user", outcome.text
    ours, theirs = outcome.details["ours"], outcome.details["theirs"]
    assert ours != theirs and (theirs == other or not AS_ROOT), outcome.text
    assert f"user {ours}" in outcome.text and f"user {theirs}" in outcome.text and "\n" not in outcome.text


def test_windows_are_of_one_user(ranks: Ranks) -> None:
    values(ranks.call(become_another_user))
    outcomes = started(ranks, (comm.comm_name,), (comm.comm_name,))
    named = [rank for rank, outcome in enumerate(outcomes) if outcome.error == "ConfigMismatch"]
    assert named, [outcome.text for outcome in outcomes]
    for rank in named:
        assert_names_the_user(outcomes[rank], (NOBODY, os.geteuid())[rank])
    for outcome in outcomes:  # who came second finds that the first has left
        assert outcome.error in ("ConfigMismatch", "CommTimeout"), outcome.text


def attack(opens: bool) -> bool:
    """Another user's rank that claims to be the honest one's; ``opens``: it offers no window. Whether it got one."""
    found: list[Peer] = []
    rendezvous.file_owner = lambda fd: os.geteuid()
    assert dist.group.WORLD is not None
    records = functools.partial(Records, *store_of(dist.group.WORLD), "windows", 1)
    end = Opening("0", 1, 2, 2 << 20, 2 << 20, 2, records)
    take, start = end._take, end._start

    def taking(rank: int) -> None:
        record = end.records.found.get(rank)
        if record is not None:
            end.records.found[rank] = replace(record, user=os.geteuid())
        with contextlib.suppress(ConfigMismatch):  # refused: it tries again until the deadline
            take(rank)
        found.extend(end.peers.values())

    def starting() -> None:
        start()
        end.mine = end.records.mine = replace(end.mine, user=HONEST, fd=1 << 20 if opens else end.mine.fd)

    end._take, end._start = taking, starting  # type: ignore[method-assign]
    end._judge = lambda rank: None  # type: ignore[method-assign]
    with contextlib.suppress(AscendMoeError):
        end.run()
    return bool(found)


@pytest.mark.parametrize("opens", [True, False])
def test_no_window_crosses_users_whatever_a_record_claims(ranks: Ranks, opens: bool) -> None:
    """The kernel lets no process but root's open another user's window, and this package none of root's."""
    values(ranks.call(become_another_user))
    honest, attacker = started(ranks, (comm.comm_name,), (attack, opens))
    assert values([attacker]) == [opens and not AS_ROOT], "only the pretended other user can open it"
    if opens:
        assert honest.error == "CommTimeout", honest.text
    else:
        assert_names_the_user(honest, NOBODY)


def set_dumpable(value: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, value, 0, 0, 0)


def test_a_process_that_is_not_dumpable_is_named_with_the_fix(ranks: Ranks) -> None:
    """One that has changed its user without exec is not; root's capabilities would open it."""
    if AS_ROOT:
        values(ranks.call(become_nobody))
    values(ranks.call(set_dumpable, 0, ranks=[1]))
    values(ranks.call(set_dumpable, 1, ranks=[0]))
    refused, other = started(ranks, (comm.comm_name,), (comm.comm_name,))
    assert_named(refused, "AscendMoeError", 1, "Permission denied", "PR_SET_DUMPABLE", "/fd")
    assert_named(other, "CommTimeout", 0, "gave up", "AscendMoeError")
    values(ranks.call(set_dumpable, 1))
    assert values(ranks.call(op)) == [[1, 101]] * 2
