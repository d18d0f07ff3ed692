"""Window tensors by the compiled kernels: made without Python, they live, fail and end as Python's do."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_lent import WORLD, mapped, on_rank_0, take

import ascend_moe
from ascend_moe import comm
from ascend_moe.comm import lent, lent_compiled
from ascend_moe.errors import ArgumentError, AscendMoeError, WindowTooSmall
from ascend_moe.ops import compiled

pytestmark = pytest.mark.skipif(
    not compiled.active(), reason=f"the compiled kernels do not run: {compiled.why_not()}"
)


@pytest.fixture
def cluster() -> Iterator[comm.LocalCluster]:
    with comm.LocalCluster(WORLD, window_mib=1) as one:
        yield one


def known(rank: int, group: str) -> bool:
    """Whether the next tensor is made without Python; makes one and drops it."""
    return lent_compiled.lend((1, 32), torch.float32, group, WORLD, rank) is not None


def test_from_the_second_tensor_on(cluster: comm.LocalCluster) -> None:
    def work(rank: int, group: str) -> Any:
        before = known(rank, group)
        one, two = take(rank, group, 8), take(rank, group, 8)
        assert one.data_ptr() == two.data_ptr() - 8 * 512 * 4
        return before, known(rank, group), known(1 - rank, group)

    assert cluster.run(work) == [(False, True, False)] * WORLD
    assert not known(0, cluster.name)  # outside of a rank's thread the name means no rank


def test_memory_comes_back(cluster: comm.LocalCluster) -> None:
    def work(group: str) -> set[int]:
        take(0, group, 1)
        return {take(0, group, 200).data_ptr() for _ in range(50)}

    assert len(on_rank_0(cluster, work)) == 1


def test_what_is_refused_is_refused_still(cluster: comm.LocalCluster) -> None:
    def work(group: str) -> None:
        held = take(0, group, 1)
        at: dict[str, Any] = {
            "dtype": torch.float32,
            "group_ep": group,
            "ep_world_size": WORLD,
            "ep_rank_id": 0,
        }
        for shape, dtype in (((-1,), torch.float32), ((True, 4), torch.float32), ((4.0,), torch.float32)):
            with pytest.raises(ArgumentError, match="shape"):
                ascend_moe.window_empty(shape, **{**at, "dtype": dtype})
        for wrong in (torch.int8, torch.float64, "float32"):
            with pytest.raises(ArgumentError, match="dtype"):
                ascend_moe.window_empty((4,), **{**at, "dtype": wrong})
        for argument, value in (
            ("ep_world_size", 3),
            ("ep_rank_id", 1),
            ("group_ep", "nobody"),
            ("group_ep", 3),
        ):
            with pytest.raises(ArgumentError, match=argument):
                ascend_moe.window_empty((4,), **{**at, argument: value})
        with pytest.raises(WindowTooSmall) as raised:
            take(0, group, 1 << 20)
        assert raised.value.held == 1
        with pytest.raises(WindowTooSmall):
            ascend_moe.window_empty((1 << 40, 1 << 40), **at)
        del held

    on_rank_0(cluster, work)


def test_a_closed_or_failed_end_lends_nothing(cluster: comm.LocalCluster) -> None:
    def work(group: str) -> None:
        held = take(0, group, 1), take(0, group, 1)
        comm.lookup(group, WORLD, 0).failed = AscendMoeError("it failed")
        with pytest.raises(AscendMoeError, match="it failed"):
            take(0, group, 1)
        comm.close(group)
        assert not known(0, group)
        held[1].fill_(3)

    on_rank_0(cluster, work)


def test_the_window_goes_with_the_last_tensor() -> None:
    before = lent.lending()
    with comm.LocalCluster(WORLD, window_mib=1) as cluster:
        pairs = cluster.run(lambda rank, group: [take(rank, group, 8).fill_(rank + 1) for _ in range(2)])
    gc.collect()
    places = [pair[1].data_ptr() for pair in pairs]
    for rank, pair in enumerate(pairs):
        pair[0] = None  # of Python's making
        assert mapped(places[rank]) and (pair[1] == rank + 1).all()
        view = pair[1][2:3].t()
        pair[1] = None
        assert mapped(places[rank]) and (view == rank + 1).all()
        del view
        assert not mapped(places[rank])
    assert lent.lending() == before


def test_a_forked_child_gives_nothing_back(cluster: comm.LocalCluster) -> None:
    def work(group: str) -> tuple[int, int]:
        take(0, group, 1)
        held = take(0, group, 8)
        place = held.data_ptr()
        child = os.fork()
        if child == 0:
            del held
            os._exit(0)
        os.waitpid(child, 0)
        return place, take(0, group, 8).data_ptr()

    place, after = on_rank_0(cluster, work)
    assert place != after


def test_python_answers_while_calls_are_paused_or_traced(cluster: comm.LocalCluster) -> None:
    def work(group: str) -> None:
        take(0, group, 1)
        assert known(0, group)
        with compiled.paused():
            assert not known(0, group)
            assert take(0, group, 2).shape == (2, 512)
        with torch.utils._python_dispatch.TorchDispatchMode():
            assert not known(0, group)

    on_rank_0(cluster, work)
