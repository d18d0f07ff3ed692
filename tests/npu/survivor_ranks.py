"""One rank of a group on (virtual) NPUs of which some are killed: ``survivor_ranks.py VICTIM LAYERS [HOW]``.

HOW: late or uneven.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from npu_rank import NPU, RANK, WORLD, sound
from npu_runs import LAST_LINE, raises

import ascend_moe
from ascend_moe.comm.place import Place
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError, CommError
from ascend_moe.interop.vllm import FaultTolerance
from ascend_moe.layer import MoEConfig, MoELayer
from ascend_moe.placement import balance
from ascend_moe.reference.cases import Case
from ascend_moe.validate.run import DevicePlace, run_case

VICTIM, LAYERS, HOW = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]


def layers(place: DevicePlace, count: int) -> None:
    sizes = {"world": place.world, "topk": 2, "batches": "unequal", "weights": True}
    sound(place, *(Case(**sizes, contract=1 + seed % 2, seed=seed) for seed in range(count)))


def on_npu(place: Place) -> DevicePlace:
    return DevicePlace(place.group_ep, place.world, place.rank, NPU)


def layer_of(place: DevicePlace) -> MoELayer:
    """Six experts, each on two of the four ranks."""
    transport = MC2Dispatcher(place.group_ep, place.world, place.rank, 12)
    placement = balance(torch.ones(1, 6), 12, WORLD)
    return MoELayer(MoEConfig(64, 32, 6, 3), transport, device=NPU, placement=placement).init_weights(3)


def loses_one(place: DevicePlace, alive: list[int]) -> DevicePlace:
    """The ranks that are left see it in an op, agree, and go on."""
    failed = next(result for result in run_case(place, Case(world=place.world, topk=2)) if not result.ok)
    assert "raised PeerLost" in failed.text or "raised CommTimeout" in failed.text, failed.text
    mask = FaultTolerance(place.group_ep, place.world).query_active_mask()
    assert mask.nonzero().flatten().tolist() == [rank for rank in range(place.world) if rank not in alive]
    start = time.monotonic()
    assert ascend_moe.agree(place.group_ep, 30) == alive
    assert time.monotonic() - start < 25, "a process that has ended is not waited for"
    with raises("must contain this rank", ArgumentError):
        ascend_moe.shrink(place.group_ep, [rank for rank in alive if rank != place.rank])
    fewer = on_npu(ascend_moe.shrink(place.group_ep, alive, 60))
    assert (fewer.world, fewer.rank) == (len(alive), alive.index(place.rank)) and fewer.group_ep != place.group_ep
    assert dist.get_process_group_ranks(ascend_moe.comm.group_of("group", fewer.group_ep)) != list(range(WORLD))
    return fewer


def ends() -> None:
    print(LAST_LINE, flush=True)
    os._exit(0)  # collectives of torch.distributed would wait for the one that is lost


everyone = on_npu(Place(ascend_moe.comm_name(), WORLD, RANK))
with raises("on which no op has run here", ArgumentError):
    ascend_moe.agree(everyone.group_ep)
layers(everyone, 2)
layer, x = layer_of(everyone), torch.randn(5, 64, generator=torch.Generator().manual_seed(RANK)).bfloat16().to(NPU)
before = layer(x)
ascend_moe.check()
if RANK == VICTIM:
    os.kill(os.getpid(), signal.SIGKILL)
left = [rank for rank in range(WORLD) if rank != VICTIM]
place = loses_one(everyone, left)
if HOW != ["uneven"]:
    layer.shrink(place, left)
    after = layer(x)
    ascend_moe.check()
    torch.testing.assert_close(after, before, rtol=2e-2, atol=2e-2)
if HOW == ["uneven"]:  # two ranks of one server and one of the other
    with raises("needs as many on every server", ArgumentError):
        ascend_moe.comm.ranks_per_server(place.group_ep, place.world, place.rank)
    if place.rank != 1:
        place = on_npu(ascend_moe.shrink(place.group_ep, [0, 2], 60))
        assert ascend_moe.comm.ranks_per_server(place.group_ep, place.world, place.rank) == 1
if place.world != 3 or HOW != ["uneven"]:
    layers(place, LAYERS)
if HOW == ["late"]:  # another one, of the smaller group, which does not come to agree in time
    if place.rank == place.world - 1:
        time.sleep(8)
        with raises("without this rank", CommError):
            ascend_moe.agree(place.group_ep, 5)
    else:
        assert ascend_moe.agree(place.group_ep, 3) == list(range(place.world - 1))
        place = on_npu(ascend_moe.shrink(place.group_ep, list(range(place.world - 1)), 60))
        layers(place, LAYERS)
ends()
