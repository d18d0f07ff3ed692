"""Processes of another user get nothing of a group and give nothing to it: each end of each local socket looks.

As root, rank 1 is a process of user 65534. Where tests do not run as root no process can become another user's: there
both processes are told, in the place of the kernel's answer, that the far end is of another user.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist
from rank_processes import Outcome, Ranks, values

from ascend_moe import comm
from ascend_moe.comm import liveness, processes
from ascend_moe.comm.processes import Opening, Peer
from ascend_moe.errors import AscendMoeError

NOBODY = 65534
AS_ROOT = os.geteuid() == 0


def become_another_user() -> None:
    if AS_ROOT and dist.get_rank() == 1:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    elif not AS_ROOT:
        truth = liveness.peer_credentials
        liveness.peer_credentials = lambda sock: (truth(sock)[0], truth(sock)[1] + 1)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with Ranks(2, timeout_s=0.7) as opened:
        values(opened.call(become_another_user))
        yield opened


def started(ranks: Ranks, *calls: tuple[object, ...]) -> list[Outcome]:
    for rank, call in enumerate(calls):
        ranks.start(rank, *call)  # type: ignore[arg-type]
    return [ranks.wait(rank) for rank in range(len(calls))]


def assert_names_the_user(outcome: Outcome, other: int) -> None:
    assert outcome.error == "ConfigMismatch" and outcome.details["field"] == "user", outcome.text
    ours, theirs = outcome.details["ours"], outcome.details["theirs"]
    assert ours != theirs and (theirs == other or not AS_ROOT), outcome.text
    assert f"user {ours}" in outcome.text and f"user {theirs}" in outcome.text and "\n" not in outcome.text


def test_windows_are_of_one_user(ranks: Ranks) -> None:
    outcomes = started(ranks, (comm.comm_name,), (comm.comm_name,))
    named = [rank for rank, outcome in enumerate(outcomes) if outcome.error == "ConfigMismatch"]
    assert named, [outcome.text for outcome in outcomes]
    for rank in named:
        assert_names_the_user(outcomes[rank], (NOBODY, os.geteuid())[rank])
    for outcome in outcomes:  # who came second finds that the first has left
        assert outcome.error in ("ConfigMismatch", "CommTimeout"), outcome.text


def attack(asks: bool) -> list[list[bytes]]:
    """Another user's rank that takes whom it meets: it ``asks`` for windows, or is asked. What it has heard."""
    processes.foreign_user = lambda sock: None
    store = dist.distributed_c10d._world.pg_map[dist.group.WORLD][1]
    end = Opening("0", store, 1, 2, 2 << 20, 2 << 20, 0.6)
    met: dict[int, Peer] = {}
    connect = end._connect

    def connect_and_note(rank: int) -> None:
        if asks:
            connect(rank)
            met.update((id(peer), peer) for peer in end.peers.values())

    if asks:
        end.board.mine = replace(end.mine, socket="ascend_moe-nobody-listens")
    end._connect = connect_and_note  # type: ignore[method-assign]
    with contextlib.suppress(AscendMoeError):
        end.run()
    return [list(peer.heard) for peer in met.values()]


@pytest.mark.parametrize("asks", [True, False])
def test_each_end_looks_by_itself(ranks: Ranks, asks: bool) -> None:
    honest, attacker = started(ranks, (comm.comm_name,), (attack, asks))
    heard = values([attacker])[0]
    assert not any(heard) and bool(heard) == asks, heard
    if asks:
        assert honest.error == "CommTimeout", honest.text
    else:
        assert_names_the_user(honest, NOBODY)
