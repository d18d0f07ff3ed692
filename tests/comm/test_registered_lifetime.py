"""The life of a window tensor: who may publish it, what spends it, when its memory is registered again."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ascend_moe
from ascend_moe import comm
from ascend_moe.errors import AscendMoeError, InvalidExpertId, RoutingMismatch, WindowTensorError, WindowTooSmall

WORLD, EXPERTS, TOPK, BATCH, HIDDEN = 2, 4, 2, 6, 64
MOST = WORLD * BATCH * TOPK  # rows of expand_x


@pytest.fixture
def cluster() -> Iterator[comm.LocalCluster]:
    with comm.LocalCluster(WORLD, window_mib=1) as opened:
        yield opened


class Rank:
    """One rank's calls, with outputs that tell whether rows were read whole."""

    def __init__(self, rank: int, group: str) -> None:
        self.rank, self.group = rank, group
        self.common = (group, WORLD, rank, EXPERTS)
        # Every token has an expert on each rank.
        self.ids = torch.tensor([[token % 2, 2 + token % 2] for token in range(BATCH)], dtype=torch.int32)
        self.weights = torch.ones(BATCH, TOPK)

    def empty(self, rows: int = MOST, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return ascend_moe.window_empty(
            (rows, HIDDEN), dtype=dtype, group_ep=self.group, ep_world_size=WORLD, ep_rank_id=self.rank
        )

    def filled(self) -> torch.Tensor:
        """Rows of the rank's number and end."""
        return self.empty().fill_(self.rank + 1)

    def dispatch(self, x: torch.Tensor | None = None, ids: torch.Tensor | None = None, comm_alg: str = "direct") -> Any:
        x = torch.ones(BATCH, HIDDEN) if x is None else x
        ids = self.ids if ids is None else ids
        return ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, *self.common, comm_alg=comm_alg)

    def combine(self, rows: torch.Tensor, sent: Any, comm_alg: str = "direct", **more: Any) -> torch.Tensor:
        result: torch.Tensor = ascend_moe.npu_moe_distribute_combine_v2(
            rows, more.pop("ids", self.ids), sent[2], sent[4], self.weights, *self.common,
            comm_alg=comm_alg, **more,
        )  # fmt: skip
        return result


def on_all(cluster: comm.LocalCluster, work: Callable[[Rank], Any]) -> list[Any]:
    return cluster.run(lambda rank, group: work(Rank(rank, group)))


def on_every_rank(test: Callable[[Rank], None]) -> Callable[[comm.LocalCluster], None]:
    """A test of pytest that runs ``test`` on all ranks of a cluster."""

    def run(cluster: comm.LocalCluster) -> None:
        on_all(cluster, test)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def refused(call: Callable[[], Any], says: str) -> WindowTensorError:
    with pytest.raises(WindowTensorError, match=says) as raised:
        call()
    assert raised.value.argument == "expand_x" and "\n" not in str(raised.value)
    return raised.value


# ---- what spends a tensor


@on_every_rank
def test_a_direct_combine_consumes_it(end: Rank) -> None:
    sent, rows = end.dispatch(), end.filled()
    assert (end.combine(rows, sent) == 3).all()  # 1 from rank 0, 2 from rank 1
    sent = end.dispatch()
    error = refused(lambda: end.combine(rows, sent), "was consumed by the combine of epoch 2; take a new one")
    assert (error.generation, error.epoch) == (1, 2) and "(generation 1)" in str(error)
    # Nothing has been run: the same call with a new tensor meets the other rank.
    assert (end.combine(end.filled(), sent) == 3).all()


@on_every_rank
def test_views_share_its_fate(end: Rank) -> None:
    sent = end.dispatch()
    rows = end.empty(2 * MOST)
    end.combine(rows[:MOST].zero_(), sent)
    sent = end.dispatch()
    refused(lambda: end.combine(rows[MOST:], sent), "was consumed")
    end.combine(torch.zeros(MOST, HIDDEN), sent)


@on_every_rank
def test_other_algorithms_copy_and_consume_nothing(end: Rank) -> None:
    wide = end.empty(2 * MOST).view(MOST, 2 * HIDDEN).fill_(end.rank + 1)
    for _ in range(2):  # rows that are not contiguous are copied before the op
        assert (end.combine(wide[:, ::2], end.dispatch()) == 3).all()
    for name in ("fullmesh_v2", "window", "fullmesh"):
        rows = end.filled()
        for algorithm in (name, name, "direct", name):  # at last read once more, by this rank alone
            assert (end.combine(rows, end.dispatch(comm_alg=algorithm), algorithm) == 3).all()


@on_every_rank
def test_no_rows_consume_nothing(end: Rank) -> None:
    """A tensor without elements holds no block."""
    nobody = torch.full((0, TOPK), -1, dtype=torch.int32)
    end.weights = torch.ones(0, TOPK)
    rows = end.empty(0)
    for _ in range(2):
        sent = end.dispatch(torch.ones(0, HIDDEN), nobody)
        assert end.combine(rows, sent, ids=nobody).shape == (0, HIDDEN)


# ---- when its memory is registered again


@on_every_rank
def test_dead_tensors_wait_for_the_next_op(end: Rank) -> None:
    sent = end.dispatch()
    rows = end.empty().zero_()
    place = rows.data_ptr()
    end.combine(rows, sent)
    del rows
    assert end.empty().data_ptr() != place  # peers may still read there
    sent = end.dispatch()
    kept = end.empty()
    assert kept.data_ptr() == place
    end.combine(torch.zeros(MOST, HIDDEN), sent)


@on_every_rank
def test_consumed_tensors_that_live_keep_their_memory(end: Rank) -> None:
    sent = end.dispatch()
    rows = end.empty().fill_(7)
    end.combine(rows, sent)
    for _ in range(4):
        sent = end.dispatch()
        other = end.empty().fill_(8)
        assert other.data_ptr() != rows.data_ptr()
        end.combine(other, sent)
    assert (rows == 7).all()
    place = rows.data_ptr()
    del rows
    assert end.empty().data_ptr() == place  # ops enough have gone by


@on_every_rank
def test_consumed_tensors_count_as_holders(end: Rank) -> None:
    half = 512 * 1024 // (4 * HIDDEN)
    sent, rows = end.dispatch(), end.empty(half)
    end.combine(rows[:MOST].zero_(), sent)
    other = end.empty(half)
    with pytest.raises(WindowTooSmall, match="2 window tensors hold space: drop"):
        end.empty()
    del rows
    with pytest.raises(WindowTooSmall, match="1 window tensor holds space"):
        end.empty()  # dead, but peers may still read it
    sent = end.dispatch()
    end.combine(end.empty().zero_(), sent)
    del other


# ---- ops that fail


@on_every_rank
def test_local_errors_consume_nothing(end: Rank) -> None:
    sent, rows = end.dispatch(), end.filled()
    with pytest.raises(AscendMoeError, match="expert_scales"):
        ascend_moe.npu_moe_distribute_combine_v2(
            rows, end.ids, sent[2], sent[4], torch.ones(1, 1), *end.common, comm_alg="direct"
        )
    assert (end.combine(rows, sent) == 3).all()


@on_every_rank
def test_errors_of_ops_consume_it_on_all_ranks(end: Rank) -> None:
    """The op has taken its epoch, and peers that found nothing wrong may be reading."""
    for wrong, error in ((EXPERTS + end.rank, InvalidExpertId), (-1, RoutingMismatch)):
        sent, rows, ids = end.dispatch(), end.filled(), end.ids.clone()
        ids[0, 0] = wrong  # -1: a row that comes back is not asked for
        if wrong == -1 and end.rank:
            end.combine(rows, sent)
        else:
            with pytest.raises(error):
                end.combine(rows, sent, ids=ids)
        refused(lambda sent=sent, rows=rows: end.combine(rows, sent), "was consumed by the combine of epoch")
        sent = sent if wrong > 0 else end.dispatch()
        assert (end.combine(end.filled(), sent) == 3).all()


# ---- tensors of other windows


def test_tensors_of_closed_windows_are_refused(cluster: comm.LocalCluster) -> None:
    kept = on_all(cluster, lambda end: end.filled())
    cluster.close()

    def work(end: Rank) -> None:
        sent = end.dispatch()
        error = refused(lambda: end.combine(kept[end.rank], sent), "or of a group that has been closed")
        assert f"those of rank {end.rank}" in str(error)
        assert (end.combine(kept[end.rank].clone(), sent) == 3).all()
        # As memory it is as good as ever, and other algorithms copy it.
        sent = end.dispatch(kept[end.rank][:BATCH])
        assert (end.combine(torch.ones(MOST, HIDDEN), sent) == 2).all()
        assert (end.combine(kept[end.rank], end.dispatch(comm_alg="window"), "window") == 3).all()

    on_all(cluster, work)


def test_another_rank_and_another_group(cluster: comm.LocalCluster) -> None:
    with comm.LocalCluster(WORLD, window_mib=1) as second:
        others = on_all(second, lambda end: end.empty().zero_())
        own = on_all(cluster, lambda end: end.empty().zero_())

        def work(end: Rank) -> None:
            sent = end.dispatch()
            for rank, rows in ((end.rank, others[end.rank]), (1 - end.rank, own[1 - end.rank])):
                call = functools.partial(end.combine, rows, sent)
                refused(call, f"other windows: those of rank {rank} of another group")
            end.combine(own[end.rank], sent)

        on_all(cluster, work)


@on_every_rank
def test_rows_that_begin_inside_a_block(end: Rank) -> None:
    sent = end.dispatch()
    flat = end.empty(MOST + 1).view(-1)[: MOST * HIDDEN + 8]
    flat.fill_(end.rank + 1)
    askew = flat[1 : 1 + MOST * HIDDEN].view(MOST, HIDDEN)
    refused(lambda: end.combine(askew, sent), "begins inside a 32-byte block .* multiple of 32 bytes")
    assert (end.combine(flat[8:].view(MOST, HIDDEN), sent) == 3).all()


# ---- forks


@on_every_rank
def test_a_forked_child_gives_nothing_back(end: Rank) -> None:
    rows = end.empty().fill_(1)
    place = rows.data_ptr()
    if end.rank == 0:
        child = os.fork()
        if child == 0:
            good = bool((rows == 1).all())
            del rows
            gc.collect()
            os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
    other = end.empty()
    assert other.data_ptr() != place and (rows == 1).all()
    sent = end.dispatch()
    end.combine(rows, sent)
