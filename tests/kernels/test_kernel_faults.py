"""What a rank leaves for the others when its kernel stops: once for each op, in the windows of all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bare_ends import FINISH, SEND, WHOLE, Bare, plan_of
from failure_windows import ABORT_MAGIC, ABORTS_AT, BLOCK, TIMEOUT, WORDS

from ascend_moe.native.library import lib

WORLD, RANK, EPOCH = 3, 1, 7
FAULT = 20


@pytest.fixture
def end() -> Iterator[Bare]:
    """Rank 1 of 3, whose next op is that of epoch 8; the other ranks do not come."""
    made = Bare(WORLD, RANK, kind=0, fill=0)
    lib().am_comm_set_epoch(made.handle, EPOCH)
    yield made
    made.close()


def posted(end: Bare) -> list[tuple[int, int, int, int]]:
    """Epoch, code, culprit and reporter of the rank's abort block in each window."""
    blocks = [end.state(rank, ABORTS_AT + BLOCK * RANK, WORDS) for rank in range(WORLD)]
    assert all(block[0] == block[-1] == ABORT_MAGIC for block in blocks), blocks
    return [(block[1], block[2], block[3], block[4]) for block in blocks]


def run(end: Bare, part: int = WHOLE, without: str = "", op: str = "dispatch") -> int:
    code, fault = end.run(plan_of(op, 0, WORLD, RANK, 1, part), without=without)
    assert bool(fault) == bool(without), fault
    return code


def test_all_ranks_name_the_op_in_which_a_kernel_stopped(end: Bare) -> None:
    """Although it had not taken the op's epoch: a rank that is still in the last op ignores the block."""
    assert run(end, without="expert_ids") == FAULT
    assert lib().am_comm_epoch(end.handle) == EPOCH
    assert posted(end) == [(EPOCH + 1, FAULT, RANK, RANK)] * WORLD
    assert lib().am_comm_in_op(end.handle, RANK) == 0, "it has left the op"


def test_a_second_launch_that_stops_is_of_the_op_of_the_first(end: Bare) -> None:
    assert run(end, SEND, op="combine") == 0
    assert run(end, FINISH, "expert_ids", op="combine") == FAULT
    assert posted(end) == [(EPOCH + 1, FAULT, RANK, RANK)] * WORLD


def test_a_kernel_that_stops_after_a_failure_leaves_the_first_cause(end: Bare) -> None:
    assert run(end) == TIMEOUT
    first = posted(end)
    assert first == [(EPOCH + 1, TIMEOUT, 0, RANK)] * WORLD
    assert run(end, without="expert_ids") == FAULT
    assert posted(end) == first
