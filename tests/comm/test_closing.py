"""Closing while another thread uses the group: whatever that does ends by an error with a name, or is waited for."""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import Ranks, values

import ascend_moe
from ascend_moe import comm
from ascend_moe.comm import membership
from ascend_moe.errors import AscendMoeError, CommClosed

WORLD = 2


def dispatch(group: str, op: Callable[..., Any], turns: int) -> None:
    ids = torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    for _ in range(turns):
        sent = op(torch.ones(3, 64), ids, group, WORLD, dist.get_rank(), WORLD)
        if isinstance(sent, ascend_moe.ops.begin.OpenCall):
            time.sleep(0.001)
            sent.finish()


def shrink(group: str) -> None:
    membership.agree(group, timeout=0.3)
    membership.shrink(group, range(WORLD), timeout=0.5)


def repeat(times: int, call: Callable[[], object]) -> None:
    for _ in range(times):
        call()


USES: dict[str, Callable[[str], None]] = {
    "op": lambda group: dispatch(group, ascend_moe.npu_moe_distribute_dispatch_v2, 50),
    "begin": lambda group: dispatch(group, ascend_moe.begin_dispatch, 50),
    "agree": lambda group: repeat(20, lambda: membership.agree(group, timeout=0.3)),
    "shrink": shrink,
    "ended": lambda group: repeat(100, lambda: (membership.ended(group), membership.closed(group))),
    "window": lambda group: repeat(
        100,
        lambda: ascend_moe.window_empty(
            (4, 4), dtype=torch.float32, group_ep=group, ep_world_size=WORLD, ep_rank_id=dist.get_rank()
        ).fill_(1),
    ),
}


def close_meanwhile(seed: int) -> str:
    """One rank's part; what was wrong."""
    dice = random.Random(seed)
    os.environ["ASCEND_MOE_TIMEOUT_S"] = "20"  # to open it beside whatever else this machine does
    group = comm.comm_name(dist.new_group(range(WORLD)))
    os.environ["ASCEND_MOE_TIMEOUT_S"] = "0.3"
    use, delay, both = USES[dice.choice(sorted(USES))], 0.01 * dice.random() ** 2, dice.random() < 0.5
    raised: list[BaseException] = []

    def work() -> None:
        try:
            use(group)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(delay)
    if dist.get_rank() == 0 or both:
        comm.close(group)
    thread.join(30)
    wrong = "it hangs" if thread.is_alive() else "".join(repr(e) for e in raised if not isinstance(e, AscendMoeError))
    comm.close(group)
    dist.barrier()
    return f"seed {seed}: {wrong}" if wrong else ""


def close_each(seeds: range) -> list[str]:
    return list(filter(None, map(close_meanwhile, seeds)))


def finish_without_a_group() -> str:
    group = dist.new_group(range(WORLD))
    name = comm.comm_name(group)
    place = (name, WORLD, dist.get_rank(), WORLD)
    opened = ascend_moe.begin_dispatch(torch.ones(3, 64), torch.zeros(3, 1, dtype=torch.int32), *place)
    dist.destroy_process_group(group)
    try:
        opened.finish()
    except CommClosed as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(WORLD, timeout_s=20) as opened:
        yield opened


def test_a_call_whose_process_group_was_destroyed_says_so(ranks: Ranks) -> None:
    for text in values(ranks.call(finish_without_a_group)):
        assert text.endswith("is closed, or its process group was destroyed: finish ops before that")


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 500), marks=pytest.mark.nightly)])
def test_what_runs_meanwhile_ends_by_a_named_error(ranks: Ranks, seeds: range) -> None:
    for rank in range(WORLD):
        ranks.start(rank, functools.partial(close_each, seeds))
    assert values([ranks.wait(rank, 280) for rank in range(WORLD)]) == [[], []]
