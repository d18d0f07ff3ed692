"""Direct combine refuses rows that are not where dispatch put them."""

from __future__ import annotations

import itertools

import failure_cases as cases
import pytest
import torch
from failure_cases import caught

import ascend_moe
from ascend_moe import errors
from ascend_moe.validate.run import DevicePlace

SETTINGS = {"ASCEND_MOE_TIMEOUT_S": "5", "HCCL_BUFFSIZE": "1", "ASCEND_MOE_COMM_ALG": "direct"}


def swapped(source_indices: torch.Tensor, first: int, second: int) -> None:
    rows = source_indices[: 3 * (max(first, second) + 1)].view(-1, 3)
    rows[[first, second]] = rows[[second, first]].clone()


def in_a_segment(counts: torch.Tensor) -> int:
    """The first of two such rows."""
    ends = [0, *counts.tolist()]
    return int(next(start for start, end in itertools.pairwise(ends) if end - start > 1))


@pytest.mark.parametrize("cores", [1, 3, 13])
@pytest.mark.parametrize("change", ["swapped", "twice", "another source"])
def test_rows_that_were_moved_are_refused(change: str) -> None:
    """On every rank, by the number of the row; the group stays usable, and window takes them."""
    world, seed = 3, 3  # inputs that give rank 1 two rows of one expert from one source

    def body(rank: int, group_ep: str) -> tuple[list[cases.Caught], int]:
        place = DevicePlace(group_ep, world, rank)
        sent = list(cases.dispatch(place, seed, 2))
        wrong = sent[2].clone()
        row = in_a_segment(sent[4][: world * cases.LOCAL]) if rank == 1 else 0
        if rank == 1 and change == "swapped":
            swapped(wrong, row, row + 1)
        elif rank == 1 and change == "twice":
            wrong[3 * (row + 1) : 3 * (row + 2)] = wrong[3 * row : 3 * (row + 1)]
        elif rank == 1:
            wrong[3 * row + 3] = (int(wrong[3 * row + 3]) + 1) % world
        moved = (*sent[:2], wrong, *sent[3:])
        found = [caught(cases.combine, place, moved, seed, 2)]
        cases.check_combine(place, cases.combine(place, tuple(sent), seed, 2), seed)
        return found, row + 1

    with ascend_moe.LocalCluster(world) as cluster:
        results = cluster.run(body)
        named = results[1][1]
        for found, _ in results:
            error = found[0].error
            assert isinstance(error, errors.ArgumentError), error
            assert error.argument == "assist_info_for_combine"
            text = str(error)
            assert "rank 1 is not in dispatch's order" in text and '"window"' in text and "\n" not in text
            assert f"at row {named} " in text, (named, text)
