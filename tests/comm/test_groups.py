"""A group or a place as callers have it is taken by every factory, or refused in one line with the fix."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bad_arguments import refused
from torch.distributed.device_mesh import init_device_mesh

import ascend_moe
from ascend_moe import LocalCluster, comm, dispatchers, layer_ops
from ascend_moe.comm.place import Place
from ascend_moe.errors import ArgumentError, AscendMoeError
from ascend_moe.interop import deep_ep, fused_moe, megatron, sglang, vllm

EXPERTS, HIDDEN = 4, 32


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """A default group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    ascend_moe.close("0")
    dist.destroy_process_group()


def test_without_torch_distributed_the_fix_is_named() -> None:
    assert not dist.is_initialized()
    with pytest.raises(AscendMoeError, match=r"call torch\.distributed\.init_process_group first, or run"):
        comm.group_of("group", None)
    for given in (object(), ("0", 1, 0), 3):
        with pytest.raises(AscendMoeError, match=f"group is a {type(given).__name__}, not a live process group; pass"):
            comm.group_of("group", given)
    with pytest.raises(AscendMoeError, match="group '0' names no live process group; pass a ProcessGroup"):
        comm.group_of("group", "0")
    with_place: list[Callable[..., Any]] = [comm.lookup, comm.ranks_per_server]
    for given in (object(), 3, None, ["0"], "", "x" * 128):
        for call in (
            comm.algorithm_of,
            comm.close,
            *(partial(each, ep_world_size=1, ep_rank_id=0) for each in with_place),
        ):
            refused("group_ep", call, given, says=r"group_ep must be a str of 1\.\.127 bytes")


def kernel(group: Any, kind: str) -> Any:
    way = vllm.make_prepare_finalize(None, None, group, 0, 1, EXPERTS, kind)
    rows = "batched" if kind == "batched" else "standard"
    made = vllm.FusedMoEModularKernel(way, vllm.make_experts(None, None, None, None, EXPERTS, rows))
    weights = torch.ones(EXPERTS, 2 * HIDDEN, HIDDEN), torch.ones(EXPERTS, HIDDEN, HIDDEN)
    return made(torch.ones(2, HIDDEN), *weights, torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32))


def trip(made: dispatchers.Dispatcher) -> Any:
    sent = made.dispatch(torch.ones(2, HIDDEN), torch.zeros(2, 1, dtype=torch.int32))
    return made.combine(sent.expand_x, sent, torch.ones(2, 1))


def epmoe(group: Any, reduce: str, **given: Any) -> Any:
    made = sglang.EPMoE(EXPERTS, 1, HIDDEN, HIDDEN, torch.float32, reduce=reduce, group=group, **given)
    for parameter in made.parameters():
        parameter.data.fill_(0.5)
    return made(torch.ones(2, HIDDEN), torch.ones(2, EXPERTS))


def buffer_trip(group: Any, **strategies: str) -> Any:
    made: Any = deep_ep.AscendBuffer(group, **strategies) if strategies else deep_ep.Buffer(group)
    ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    rows, _, handle, *_ = made.low_latency_dispatch(torch.ones(2, 128).bfloat16(), ids, 2, EXPERTS, use_fp8=False)
    return made.low_latency_combine(rows, ids, weights, handle)[0]


def shared_experts(group: Any) -> Any:
    torch.manual_seed(0)
    made = megatron.SharedExpertMLP(HIDDEN, HIDDEN, tp_group=group, dtype=torch.float32)
    return made(torch.ones(2, HIDDEN))


def token_dispatcher(group: Any, kind: str) -> Any:
    named = {"world_size": 1, "rank": 0} if isinstance(group, str) else {}
    return megatron.TokenDispatcher(kind, group, EXPERTS, 1, **named)


# ---- the factories; those that go by a name alone take LocalCluster's too

WINDOWS: dict[str, Callable[[Any], Any]] = {
    "MC2Dispatcher": lambda group: trip(dispatchers.MC2Dispatcher(group, 1, 0, EXPERTS)),
    "from_group": lambda group: trip(dispatchers.MC2Dispatcher.from_group(group, EXPERTS)),
    "AllToAllDispatcher": lambda group: trip(dispatchers.AllToAllDispatcher(group, EXPERTS)),
    "AllGatherDispatcher": lambda group: trip(dispatchers.AllGatherDispatcher(group, EXPERTS)),
    "kernel mc2": lambda group: kernel(group, "mc2"),
    "kernel batched": lambda group: kernel(group, "batched"),
    "kernel alltoall": lambda group: kernel(group, "alltoall"),
    "kernel allgather": lambda group: kernel(group, "allgather"),
    "All2AllManager": lambda group: vllm.All2AllManager(group, 0, 1).get_handle({"num_experts": EXPERTS}),
    "Place": Place.of,
    "select": lambda group: vllm.select({"group_name": group, "rank": 0, "world": 1, "num_experts": EXPERTS}),
    "mega_moe's buffer": lambda group: layer_ops.get_symm_buffer_for_mega_moe(group, EXPERTS, 8, 1, HIDDEN, HIDDEN),
    "dispatch_ffn_combine": lambda group: layer_ops.dispatch_ffn_combine(
        torch.ones(2, HIDDEN), [torch.ones(EXPERTS, HIDDEN, 2 * HIDDEN)], [torch.ones(EXPERTS, HIDDEN, HIDDEN)],
        torch.zeros(2, 1, dtype=torch.int32), None, None, None, None, torch.ones(2, 1), group, 0,
        torch.empty(2, HIDDEN), torch.zeros(EXPERTS, dtype=torch.int32),
    ),
    "TokenDispatcher mc2": lambda group: token_dispatcher(group, "mc2"),
    "TokenDispatcher alltoall": lambda group: token_dispatcher(group, "alltoall"),
    "TokenDispatcher allgather": lambda group: token_dispatcher(group, "allgather"),
    "EPMoE group_ep": lambda group: epmoe(None, "mc2", group_ep=group),
    "Buffer": buffer_trip,
    "AscendBuffer": lambda group: buffer_trip(group, low_latency_strategy="default"),
    "AscendBuffer all to all": lambda group: buffer_trip(group, low_latency_strategy="alltoall"),
}  # fmt: skip
COLLECTIVE: dict[str, Callable[[Any], Any]] = {
    "comm_name": ascend_moe.comm_name,
    "EPMoE mc2": lambda group: epmoe(group, "mc2"),
    "EPMoE all_reduce": lambda group: epmoe(group, "all_reduce"),
    "SharedExpertMLP": shared_experts,
    "naive_multicast": lambda group: fused_moe.naive_multicast(torch.ones(2, 4), torch.tensor([2]), group),
    "all_reduce_dp": lambda group: fused_moe.all_reduce_dp(torch.ones(2, 4), torch.tensor([2]), group),
    "all_reduce_tp": lambda group: fused_moe.all_reduce_tp(torch.ones(2, 4), group),
}
ARGUMENTS = ("group", "group_ep", "group_name", "process_group", "tp_group")
FIX = ("pass a ProcessGroup", "comm_name(process_group)", "LocalCluster")


def groups() -> dict[str, Any]:
    """Kinds of a group that name the default one."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    wide = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep"))
    world = dist.group.WORLD
    assert world is not None
    return {
        "ProcessGroup": world,
        "name": ascend_moe.comm_name(),
        "DeviceMesh": mesh,
        "a dimension of a DeviceMesh": wide["ep"],
        "GroupCoordinator": SimpleNamespace(device_group=world, cpu_group=world, unique_name="ep:0", world_size=1),
        "GroupCoordinator over a DeviceMesh": SimpleNamespace(device_group=mesh),
    }


@pytest.mark.parametrize("factory", [*WINDOWS, *COLLECTIVE])
def test_every_kind_of_group_works(factory: str, world: None) -> None:
    call = (WINDOWS | COLLECTIVE)[factory]
    kinds = groups() | ({} if factory == "EPMoE group_ep" or "Buffer" in factory else {"None": None})
    results = {kind: call(group) for kind, group in kinds.items()}
    tensors = [result for result in results.values() if isinstance(result, torch.Tensor)]
    assert all(torch.equal(each, tensors[0]) for each in tensors)
    assert not tensors or len(tensors) == len(kinds)


def strangers(draw: random.Random) -> dict[str, Any]:
    """Returns what is no group of this rank."""
    destroyed = dist.new_group([0])
    dist.destroy_process_group(destroyed)
    return {
        "a tuple": ("0", 1),
        "a list of ranks": [0],
        "a number": draw.randrange(1000),
        "a rank's non-member": dist.GroupMember.NON_GROUP_MEMBER,
        "a destroyed group": destroyed,
        "an object": object(),
        "bytes": b"0",
        "an unknown name": f"ep_{draw.randrange(1000)}",
        "no name": "",
        "a DeviceMesh of two dimensions": init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep")),
        "a coordinator without a group": SimpleNamespace(device_group=None, cpu_group=None),
        "a store": dist.HashStore(),
        "a device": torch.device("cpu"),
    }


@pytest.mark.parametrize("factory", [*WINDOWS, *COLLECTIVE])
def test_anything_else_is_refused_by_name_and_with_the_fix(factory: str, world: None) -> None:
    call = (WINDOWS | COLLECTIVE)[factory]
    for kind, group in strangers(random.Random(factory)).items():
        if isinstance(group, str) and factory in ("All2AllManager", "MC2Dispatcher", "select"):
            continue  # a name is looked up when it is used
        if isinstance(group, str) and factory.startswith("TokenDispatcher"):
            continue
        with pytest.raises(AscendMoeError) as caught:
            call(group)
        text = str(caught.value)
        assert caught.value.argument in ARGUMENTS and caught.value.argument in text, (kind, text)
        assert any(fix in text for fix in FIX) and "\n" not in text, (kind, text)
        assert len(text) < 350, text


def test_names_of_a_local_cluster(world: None) -> None:
    with LocalCluster(1, window_mib=4) as cluster:

        def run(rank: int, group: str) -> None:
            for factory, call in WINDOWS.items():
                if factory != "EPMoE group_ep":  # its ranks are those of a process group
                    call(group)
            for factory, call in COLLECTIVE.items():
                with pytest.raises(AscendMoeError) as caught:
                    call(group)
                assert caught.value.argument in ARGUMENTS, (factory, caught.value)

        cluster.run(run)


# ---- places


@pytest.mark.parametrize(
    ("given", "argument", "text"),
    [
        (("g", 2, 2), "rank", "rank is 2; it must be 0..1, one of the 2 ranks of group 'g'"),
        (("g", 2, -1), "rank", "rank is -1; it must be 0..1"),
        (("g", 0, 0), "world", "world is 0; it must be a number of ranks, at least 1"),
        (("g", 2.0, 0), "world", "world is 2.0"),
        (("g", 2, "0"), "rank", "rank is '0'"),
        ((2, 0, "g"), "group_ep", "group_ep is a int; it must be a group's name"),
    ],
)
def test_a_place_that_cannot_be_is_refused(given: Any, argument: str, text: str) -> None:
    refused(argument, Place, *given, says=re.escape(text))


@pytest.mark.parametrize(
    "given", [("g", 2, 2), ("g", 0, 2), ("g", "2", 0), ("g", True, 0), ("g", 2), (), ("g", 2, 0, 1)]
)
def test_a_tuple_that_is_no_place_names_the_argument(given: Any) -> None:
    refused("ep_group", Place.of, given, "ep_group", says=r"^ep_group is .*\(name, W, rank\)")


def test_a_place_is_made_of_a_place_a_tuple_and_a_name() -> None:
    @dataclass(frozen=True)
    class Wider(Place):
        device: str = "cpu"

    with LocalCluster(2) as cluster:

        def body(rank: int, name: str) -> None:
            place = Place.of(name)
            assert place == Place(name, 2, rank) == Place.of((name, 2, rank)) == Place.of(place)
            wider = Wider.of(place, device="npu")
            assert isinstance(wider, Wider) and (wider.rank, wider.device) == (rank, "npu")
            assert place.arguments(moe_expert_num=4) == {
                "group_ep": name, "ep_world_size": 2, "ep_rank_id": rank, "moe_expert_num": 4,
            }  # fmt: skip
            with pytest.raises(FrozenInstanceError):
                place.rank = 0  # type: ignore[misc]
            for kind in dispatchers.KINDS:
                assert dispatchers.make_dispatcher(kind, place, 4).place == place

        cluster.run(body)
        with pytest.raises(ArgumentError, match="a LocalCluster's: call it in the thread of a rank"):
            Place.of(cluster.name)


def test_a_place_of_another_size_than_its_group_is_refused() -> None:
    def other_size(rank: int, name: str) -> None:
        with pytest.raises(ArgumentError, match="has 2 ranks, and this is rank"):
            dispatchers.make_dispatcher("alltoall", Place(name, 3, rank), 3)

    with LocalCluster(2) as cluster:
        cluster.run(other_size)
