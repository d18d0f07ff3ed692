"""vLLM's hooks for fault tolerance, called as its runners, its sentinel and its DeepEP manager call them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deep_ep_buffers import shrinkable
from rank_processes import Ranks, fork_server, nothing_left, values
from survivor_cases import results_of

import ascend_moe
from ascend_moe import LocalCluster
from ascend_moe.errors import ArgumentError, CommError, PeerLost
from ascend_moe.interop.deep_ep import Buffer
from ascend_moe.interop.vllm import All2AllManager, rank_mapping
from ascend_moe.interop.vllm_ascend import use_fault_tolerance

__all__ = ["fork_server", "nothing_left"]  # fixtures
W, E, H, T = 3, 6, 512, 2
_communicator = SimpleNamespace(all2all_manager=None)


def layer(manager: All2AllManager) -> None:
    """A step of the model: dispatch and combine of the manager's own handle."""
    handle = manager.get_handle({"num_experts": 2 * manager.world, "max_num_tokens": T})
    x = torch.full((T, H), float(manager.rank)).bfloat16()
    ids = torch.tensor([[0, 2 * manager.world - 1]] * T, dtype=torch.int32)
    arrived = handle.dispatcher.dispatch(x, ids)
    out = handle.dispatcher.combine(arrived.expand_x, arrived, torch.full((T, 2), 0.5))
    assert torch.equal(out, x)


def after_step(manager: Any) -> None:
    """What a runner does with a step's outputs."""
    assert manager.support_fault_tolerance
    has_fault = manager.query_fault().to("cpu", non_blocking=True)
    if has_fault.item():
        raise RuntimeError(f"Mask: {manager.query_active_mask().cpu().tolist()}")


def moved(buffer: Buffer, rank: int, others: int) -> None:
    """One layer, whose experts return their rows; ``others``: how many of a token's two experts are there."""
    x, ids = torch.full((T, H), float(rank)).bfloat16(), torch.tensor([[0, E - 1]] * T)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, T, E, use_fp8=False)
    out, _, _ = buffer.low_latency_combine(rows, ids, torch.full((T, 2), 0.5), handle)
    assert torch.equal(out, x * others / 2)


def cleaned(buffer: Buffer) -> None:
    """What the manager's ``clean_buffers`` does."""
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    buffer.low_latency_clean_mask_buffer()


# ---- in rank processes


def give_a_manager() -> bool:
    """To a communicator as vllm-ascend's; then a step of another manager of the group."""
    group: Any = dist.group.WORLD
    manager = use_fault_tolerance(_communicator, SimpleNamespace(device_group=group))
    after_step(manager)
    layer(All2AllManager(group, group.rank(), group.size()))
    after_step(manager)
    return manager is _communicator.all2all_manager


def mask_with_a_fault(seconds: float = 20) -> list[int]:
    """The mask, once there is a fault."""
    manager: Any = _communicator.all2all_manager
    deadline = time.monotonic() + seconds
    while not manager.query_fault().item() and time.monotonic() < deadline:
        time.sleep(0.01)
    return list(manager.query_active_mask().cpu().tolist())


# ---- the tests


class Dies(BaseException):
    """What the lost rank raises."""


def test_the_manager_sees_a_rank_that_has_ended_and_refuses_to_go_on_with_it() -> None:
    stepped, left = threading.Barrier(W), threading.Barrier(W - 1)

    def work(rank: int, group_ep: str) -> list[int]:
        manager = All2AllManager(group_ep, rank, W)
        after_step(manager)  # before any op
        layer(manager)
        after_step(manager)
        stepped.wait()
        if rank == 1:
            raise Dies
        with pytest.raises(PeerLost):
            layer(manager)
        with pytest.raises(RuntimeError, match=r"Mask: \[0, 1, 0\]"):
            after_step(manager)
        with pytest.raises(ArgumentError, match=r"ranks \[1\] have ended"):
            manager.clean_buffers()
        place = ascend_moe.shrink(group_ep, ascend_moe.agree(group_ep))  # what it says to do
        manager = All2AllManager(place.group_ep, place.rank, place.world)
        layer(manager)
        mask = manager.query_active_mask().tolist()
        left.wait()
        return list(mask)

    with LocalCluster(W, window_mib=2) as cluster, pytest.raises(Dies) as lost:
        cluster.run(work)
    assert results_of(lost.value, [0, 2]) == {0: [0, 0], 2: [0, 0]}


def test_retry_after_a_fault_of_ranks_that_all_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank is late: all fail, all clean, and the next step is right."""
    failed = threading.Barrier(W)

    def work(rank: int, group_ep: str) -> None:
        manager = All2AllManager(group_ep, rank, W)
        layer(manager)
        failed.wait()
        monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "0.3")
        if rank != 2:
            with pytest.raises(CommError):
                layer(manager)
        failed.wait()
        monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "20")
        after_step(manager)  # nobody has ended
        failed.wait()
        manager.clean_buffers()
        layer(manager)
        after_step(manager)
        failed.wait()

    with LocalCluster(W, window_mib=2) as cluster:
        cluster.run(work)


def test_a_rank_that_was_late_comes_back_by_cleaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on without it meanwhile; its own step fails when it comes."""
    together = threading.Barrier(W)

    def masks(buffer: Buffer) -> list[int]:
        mask = torch.full((W,), 9, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(mask)
        return list(mask.tolist())

    def work(rank: int, group_ep: str) -> None:
        buffer = shrinkable(group_ep, W, rank, T, H, E)
        moved(buffer, rank, 2)
        together.wait()
        monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "0.5")
        if rank != 2:
            with pytest.raises(PeerLost, match="masked from now on"):
                moved(buffer, rank, 2)
            moved(buffer, rank, 1)
            assert masks(buffer) == [0, 0, 1]
        together.wait()
        if rank == 2:
            with pytest.raises(CommError):
                moved(buffer, rank, 2)
        together.wait()
        monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "20")
        together.wait()
        cleaned(buffer)
        assert masks(buffer) == [0, 0, 0]
        moved(buffer, rank, 2)
        together.wait()

    with LocalCluster(W, window_mib=4) as cluster:
        cluster.run(work)


def test_ranks_of_the_smaller_group_as_eplb_takes_them() -> None:
    """Where the last ranks leave it is what vLLM's scale-down passes; a loss may be anywhere."""
    assert rank_mapping(world=4, alive=[0, 1]) == {rank: rank if rank < 2 else -1 for rank in range(4)}
    assert rank_mapping(world=4, alive=[0, 2, 3]) == {0: 0, 1: -1, 2: 1, 3: 2}
    assert rank_mapping(world=4, alive=[3, 0, 2]) == {0: 1, 1: -1, 2: 2, 3: 0}
    for world, alive, argument in ((2**32, [0], "world"), (4, [0, 4], "alive"), (4, [1, 1], "alive")):
        with pytest.raises(ArgumentError) as raised:
            rank_mapping(world, alive)
        assert raised.value.argument == argument


def test_vllm_ascends_communicator_gets_a_manager_that_sees_faults() -> None:
    with Ranks(3, timeout_s=20) as ranks:
        assert values(ranks.call(give_a_manager)) == [True] * 3
        ranks.kill(1)
        assert values(ranks.call(mask_with_a_fault, ranks=[0, 2])) == [[0, 1, 0]] * 2
