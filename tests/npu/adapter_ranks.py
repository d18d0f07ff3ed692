"""One rank of two on the (virtual) NPU: ``adapter_ranks.py CHECK...``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import bad_arguments
import torch
import torch.distributed as dist
import torch_npu
from bad_arguments import BS, OP, E, H, K
from layer_op_ranks import Rank
from npu_rank import GLOO, NPU, RANK, WORLD, end, new_group
from npu_runs import raises, run_checks

import ascend_moe
from ascend_moe import comm, layer_ops, npu, reference
from ascend_moe.errors import (
    ArgumentError,
    AscendMoeError,
    CommError,
    CommTimeout,
    ConfigMismatch,
    InvalidExpertId,
    RoutingOverflow,
    WindowTensorError,
    WindowTooSmall,
)
from ascend_moe.native import binding
from ascend_moe.ops import npu_communicator

HCCL, OTHER, CPU = new_group(), new_group(), ascend_moe.comm_name(GLOO)


def window_of(mib: int) -> Any:
    """Options of a group whose windows have a size of their own."""
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": mib}
    return options


def on_npu(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return value
    return value.npu() if value.numel() < 1 << 20 else value  # some are views of almost nothing


def on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def moved(call: dict[str, Any], move: Callable[[Any], Any], **changes: Any) -> dict[str, Any]:
    return {name: move(value) for name, value in call.items()} | changes


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def said(error: Exception | None) -> Any:
    """Returns what two backends must agree on."""
    details = {name: str(value) for name, value in getattr(error, "details", {}).items() if name != "calls"}
    return type(error), re.sub(r"; the last calls of rank \d: \S+$", "", str(error)), details


def meet() -> None:
    torch.npu.synchronize()
    dist.barrier(GLOO)


def place(name: str) -> dict[str, Any]:
    return {"group_ep": name, "ep_world_size": WORLD, "ep_rank_id": RANK, "moe_expert_num": E}


def valid(name: str, move: Callable[[Any], Any] = on_npu) -> dict[str, dict[str, Any]]:
    """Legal arguments of the four ops, all of which have run."""
    made = bad_arguments.valid_calls(name, WORLD, RANK, move)
    for op in ("combine", "combine_v2"):
        OP[op](**made[op])
    ascend_moe.check()
    return made


class Trip:
    """A round trip whose experts change nothing: inputs of all ranks, and what came of it on this one."""

    def __init__(self, seed: int = 0, batches: list[int] | None = None, global_bs: int = 0) -> None:
        self.inputs, self.global_bs = [], global_bs
        for rank, batch in enumerate(batches or [BS] * WORLD):
            generator = torch.Generator().manual_seed(100 * seed + rank)
            x = torch.randn(batch, H, generator=generator).bfloat16()
            ids = torch.rand(batch, E, generator=generator).topk(K).indices.int()
            scales = torch.rand(batch, K, generator=generator)
            self.inputs.append(reference.RankInput(x, ids, expert_scales=scales))
        mine = self.inputs[RANK]
        assert mine.expert_scales is not None
        self.x, self.ids, self.weights = mine.x.npu(), mine.expert_ids.npu(), mine.expert_scales.npu()

    def run(self, name: str, v2: bool = False, module: Any = ascend_moe) -> Trip:
        suffix = "_v2" if v2 else ""
        common = {**place(name), "global_bs": self.global_bs}
        dispatch = getattr(module, f"npu_moe_distribute_dispatch{suffix}")
        combine = getattr(module, f"npu_moe_distribute_combine{suffix}")
        self.v2 = v2
        self.sent = dispatch(self.x, self.ids, **common)
        rows, _, index, _, counts = self.sent[:5]
        self.out = combine(rows, self.ids, index, counts, self.weights, **common)
        return self

    def check(self) -> None:
        ascend_moe.check()
        sizes = {"moe_expert_num": E, "global_bs": self.global_bs}
        expected = reference.dispatch(self.inputs, **sizes)
        sums = reference.combine(self.inputs, [rank.expand_x for rank in expected], expected, **sizes)
        facts = {"rank": RANK, "ranks_per_server": comm.ranks_per_server(HCCL, WORLD, RANK)}
        contract = "v2" if self.v2 else "v1"
        sent = reference.validate("dispatch", self.sent, expected[RANK], contract=contract, **facts)
        summed = reference.validate("combine", self.out, sums[RANK], rank=RANK)
        assert sent.ok and summed.ok, sent.text + summed.text
        assert self.out.device == self.x.device and self.out.shape == self.x.shape


def check_ops_in_two_launches_give_the_same() -> None:
    """Both are queued, and an op of another group between them."""
    for seed in range(4):
        trip, other = Trip(seed, [BS - seed] * WORLD), Trip(seed + 10)
        before = launches()
        x, ids, weights = trip.x.clone(), trip.ids.clone(), trip.weights
        started = ascend_moe.begin_dispatch(x, ids, **place(HCCL))
        with raises("has an open begin_dispatch"):
            trip.run(HCCL, v2=True)
        other.run(OTHER, v2=True)
        sent = started.finish()
        started = ascend_moe.begin_combine(sent[0], ids, sent[2], sent[4], weights, **place(HCCL))
        other.check()
        trip.v2, trip.sent, trip.out = True, sent, started.finish()
        trip.check()
        # Each launch is one of the kernel: two of an op that is split, and one of the other group's.
        assert [now - then for now, then in zip(launches(), before, strict=True)] == [3, 3]


def check_what_a_started_op_finds_is_reported() -> None:
    """Its second launch is queued before the host sees what the first has found."""
    trip = Trip()
    bad = trip.ids.clone()
    if RANK == 1:
        bad[0, 0] = E
    for _ in range(2):
        started = ascend_moe.begin_dispatch(trip.x, bad, **place(HCCL))
        with raises("has expert id", InvalidExpertId):
            started.finish()
            ascend_moe.check(HCCL)
        meet()
    trip.run(HCCL, v2=True).check()


def launches() -> list[int]:
    """Returns the launches of the twin's kernels by this process: dispatch, combine."""
    path = os.environ["ASCEND_MOE_VNPU"] + "/opp/op_api/lib/libcust_opapi.so"
    count = ctypes.CDLL(path).vnpu_launches
    count.restype = ctypes.c_uint64
    torch.npu.synchronize()
    return [count(f"AscendMoeDistribute{op}".encode()) for op in ("Dispatch", "Combine")]


# ---- errors


def check_every_local_mistake_has_the_same_error_as_on_the_cpu() -> None:
    """Same type, same line, same details, for hundreds of corrupted calls; a good one still works after."""
    cpu = valid(CPU, lambda value: value)
    valid(HCCL)
    agreed = 0
    for bad in bad_arguments.table(WORLD):
        if bad.raised_by != "each" or issubclass(bad.error, CommError):
            continue
        here = bad.apply(cpu[bad.op], last=False)
        there = moved(here, on_npu)
        tensors = [value for value in there.values() if isinstance(value, torch.Tensor)]
        if any(value.device.type != "npu" for value in tensors) or here["group_ep"] != CPU:
            continue  # about devices and names, which differ
        there["group_ep"] = HCCL
        wanted, found = said(outcome(OP[bad.op], **here)), said(outcome(OP[bad.op], **there))
        text = found[1].replace(HCCL, CPU).replace(f"npu:{RANK}", "cpu")
        assert wanted == (found[0], text, found[2]) != said(None), f"{bad.op}, {bad.label}"
        agreed += 1
    assert agreed > 900, agreed
    valid(HCCL)
    meet()


def check_an_expert_id_out_of_range_is_reported_later_and_once() -> None:
    good = valid(HCCL)["dispatch"]
    corrupted = {**good, "expert_ids": good["expert_ids"].clone()}
    if RANK == WORLD - 1:
        corrupted["expert_ids"][1, 1] = E + 3
    wanted = outcome(OP["dispatch"], **moved(corrupted, on_cpu, group_ep=CPU))
    assert type(wanted) is InvalidExpertId and "rank 1, token 1, k 1 has expert id 15" in str(wanted)
    OP["dispatch"](**corrupted)  # the kernel's finding is not known yet
    assert said(outcome(ascend_moe.check, group_ep=HCCL)) == said(wanted)
    ascend_moe.check()
    valid(HCCL)
    meet()


def check_names_and_tensors_that_do_not_belong_together_are_refused() -> None:
    good = valid(HCCL)["dispatch"]
    world = dist.group.WORLD
    assert world is not None
    ids, x = good["expert_ids"].cpu(), good["x"].cpu()
    wider = {"ep_world_size": WORLD + 1, "moe_expert_num": 3 * (WORLD + 1)}
    calls: list[tuple[dict[str, Any], str]] = [
        ({"x": x, "expert_ids": ids}, "is an HCCL communicator, whose windows are on NPUs"),
        ({"group_ep": CPU}, "has its windows in CPU memory, but the tensors are on an NPU"),
        ({"group_ep": "nobody"}, "npu_moe_distribute_dispatch: group_ep='nobody' names no live "),
        ({"group_ep": world.group_name}, "use ascend_moe.comm_name(process_group)"),
        ({"expert_ids": ids}, f"expert_ids is on cpu, x on {NPU}: they must be on one device, pass expert_"),
        ({"x": x}, f"x is on cpu, expert_ids on {NPU}: they must be on one device, pass x.to('{NPU}')"),
        (wider, "ep_world_size is 3, but the group of group_ep has 2 ranks"),
        ({"ep_rank_id": (RANK + 1) % WORLD}, "but this is rank"),
    ]
    for changes, text in calls:
        kind, line, _ = said(outcome(OP["dispatch"], **{**good, **changes}))
        assert kind.__name__ == "ArgumentError" and text in line and "\n" not in line, (text, line)
    meet()


def check_a_group_on_several_super_pods_is_refused() -> None:
    """Of an A3: HCCL's variable says where a rank is. The group's first call finds it, on every rank."""
    os.environ["HCCL_LOGIC_SUPERPOD_ID"] = str(RANK)
    here = place(new_group())
    for _ in range(2):
        with raises("SUPERPOD_ID is 0 on rank 0 and 1 on rank 1: nothing here carries rows from one A3", ArgumentError):
            OP["dispatch_v2"](**{**valid(HCCL)["dispatch_v2"], **here})
    del os.environ["HCCL_LOGIC_SUPERPOD_ID"]
    meet()


def check_a_window_too_small_is_refused_as_on_the_cpu() -> None:
    """Before anything is launched. A group with a size of its own is told how to give it another."""
    x, ids = torch.zeros(4096, 7168, dtype=torch.bfloat16), torch.zeros(4096, K, dtype=torch.int32)
    call = {"x": x.npu(), "expert_ids": ids.npu()}
    wanted = said(outcome(OP["dispatch"], x, ids, **place(CPU)))
    assert wanted[0] is WindowTooSmall and "HCCL_BUFFSIZE=448" in wanted[1]
    assert said(outcome(OP["dispatch"], **call, **place(HCCL))) == wanted
    own = new_group(pg_options=window_of(64))
    kind, text, _ = said(outcome(OP["dispatch"], **call, **place(own)))
    fix = 'create the group with pg_options.hccl_config["hccl_buffer_size"] = 448 on all ranks'
    assert kind is WindowTooSmall and text.endswith(fix) and "export" not in text
    meet()


def check_a_groups_own_window_size_counts_and_an_a2_keeps_its_state_area_in_it() -> None:
    name = new_group(pg_options=window_of(64))
    Trip(6).run(name, True).check()
    end, soc_of = npu_communicator._open[name], torch.npu.get_device_name
    a2 = "910B" in soc_of()
    assert (end.buffer_mib, end.data_bytes) == (64, (64 - a2) << 20)
    assert (end.context_kind, end.ranks_per_server) == ((2, WORLD) if a2 else (1, 0))
    own = 'pg_options.hccl_config["hccl_buffer_size"]=1 must be more than 1 MiB on an A2'
    refused = [("Ascend310P3", 64, "tensors are on a Ascend310P3: "), ("Ascend910B3", 1, own)]
    for soc, mib, text in refused:
        torch.npu.get_device_name = lambda _, soc=soc: soc
        error = outcome(valid, name=new_group(pg_options=window_of(mib)))
        torch.npu.get_device_name = soc_of
        assert type(error).__name__ == "ArgumentError" and text in str(error), error
    meet()


def check_what_only_tiling_refuses_is_reported_at_once_with_its_status() -> None:
    valid(HCCL)
    ascend_moe.close(HCCL)
    before, made = os.environ.get("HCCL_BUFFSIZE"), binding.CommHandle
    # Without a size of its own the launch has op_host read the variable itself.
    binding.CommHandle = lambda **facts: made(**{**facts, "buffer_mib": 0})  # type: ignore[assignment,misc]
    npu_communicator.find(HCCL, WORLD, RANK, NPU)
    binding.CommHandle = made  # type: ignore[misc]
    os.environ["HCCL_BUFFSIZE"] = "many"
    live = ctypes.CDLL("libopapi.so").vnpu_live_tensors
    live.restype = ctypes.c_int64
    torch.npu.synchronize()
    tensors = live()
    kind, text, _ = said(outcome(valid, name=HCCL))
    assert live() == tensors  # a refused call leaves no aclTensor
    os.environ.pop("HCCL_BUFFSIZE") if before is None else os.environ.update(HCCL_BUFFSIZE=before)
    ascend_moe.close(HCCL)
    meet()
    assert kind is AscendMoeError and "\n" not in text, text
    assert f"rank {RANK}: " in text and "failed with aclnn status 561002: " in text
    assert "HCCL_BUFFSIZE is no whole number of MiB" in text


def check_a_rank_that_does_not_call_is_named_and_the_group_stays_failed() -> None:
    name = new_group()
    good = valid(name)["dispatch"]
    meet()
    os.environ["ASCEND_MOE_TIMEOUT_S"] = "1"
    if RANK == 0:
        OP["dispatch"](**good)
        error = outcome(ascend_moe.check, group_ep=name)
        assert isinstance(error, CommTimeout) and "missing: rank 1" in str(error) and error.rank == 1
        assert said(outcome(OP["dispatch"], **good)) == said(outcome(ascend_moe.check)) == said(error)
    dist.barrier(GLOO)
    if RANK != 0:
        OP["dispatch"](**good)  # finds rank 0's abort, and nobody asks here before the close
        torch.npu.synchronize()
    del os.environ["ASCEND_MOE_TIMEOUT_S"]
    ascend_moe.close(name)
    assert name not in npu_communicator._open
    ascend_moe.check()
    error = outcome(OP["dispatch"], **good)
    assert (type(error) is CommTimeout and "found by rank 0" in str(error)) or RANK == 0
    assert str(error).count("has failed: destroy its process group") == 1, error
    valid(new_group())
    meet()


def check_errors_come_to_the_host_behind_every_sixteenth_launch() -> None:
    name = new_group()
    good = valid(name)["dispatch"]
    bad = good | {"expert_ids": torch.full_like(good["expert_ids"], E)}
    launched = []
    for _ in range(2):
        OP["dispatch"](**bad)
        launched.append(1)
        while (error := outcome(OP["dispatch"], **good)) is None:
            launched[-1] += 1
            torch.npu.synchronize()
        assert isinstance(error, InvalidExpertId), error  # raised before it launches
    assert 1 <= launched[0] <= launched[1] == 16, launched
    ascend_moe.check()


def check_the_finish_of_a_send_that_failed_gives_no_rows() -> None:
    """It is queued before the host knows, and must not take the messages of the dispatch before."""
    name, trip = new_group(), Trip()
    arguments = (trip.x, trip.ids)
    for _ in range(2):
        sent = ascend_moe.npu_moe_distribute_dispatch_v2(*arguments, **place(name))
    ascend_moe.check(name)
    assert int(sent.ep_recv_counts[-1]) > 0
    meet()
    os.environ["ASCEND_MOE_TIMEOUT_S"] = "1"
    if RANK == 0:
        ascend_moe.begin_dispatch(*arguments, **place(name)).finish()
        assert isinstance(outcome(ascend_moe.check, group_ep=name), CommTimeout)
    dist.barrier(GLOO)
    if RANK != 0:
        started = ascend_moe.begin_dispatch(*arguments, **place(name))  # its launch finds rank 0's abort
        outcome(started.finish)
        torch.npu.synchronize()
        assert not started._outputs.ep_recv_counts.cpu().any()
    del os.environ["ASCEND_MOE_TIMEOUT_S"]
    ascend_moe.close(name)
    meet()


# ---- launches


def gradients(group: str, device: str, v2: bool) -> list[torch.Tensor]:
    """A rank's gradients of x and weights, experts being a grouped matmul, and those of the matmul's weights."""
    trip, suffix = Trip(6), "_v2" if v2 else ""
    mine, factors = trip.inputs[RANK], torch.linspace(-1, 1, E // WORLD * H * H).view(-1, H, H).bfloat16()
    leaves = [each.detach().clone().to(device).requires_grad_() for each in (mine.x, mine.expert_scales, factors)]
    ids, at = mine.expert_ids.to(device), place(group)
    with torch.enable_grad():
        sent = getattr(ascend_moe, f"npu_moe_distribute_dispatch{suffix}")(leaves[0], ids, **at)
        grouped = {"group_list": sent[3], "group_type": 0, "group_list_type": 1, "split_item": 2}
        (rows,) = npu.npu_grouped_matmul([sent[0]], [leaves[2]], **grouped)
        combine = getattr(ascend_moe, f"npu_moe_distribute_combine{suffix}")
        y = combine(rows, ids, sent[2], sent[4], leaves[1], **at)
        torch.autograd.backward(y, torch.ones_like(y))
    return [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]


def check_gradients_are_those_of_the_cpu() -> None:
    for v2 in (False, True):
        expected, found = gradients(CPU, "cpu", v2), gradients(HCCL, f"npu:{RANK}", v2)
        ascend_moe.check()
        assert len(found) == 3 and all(bool((tensor != 0).any()) for tensor in found)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def check_direct_combine_publishes_window_tensors_where_they_lie() -> None:
    os.environ["ASCEND_MOE_REGISTERED_MIB"] = "3"
    name, trip, shape = new_group(), Trip(4), {"dtype": torch.bfloat16}
    shape |= {"group_ep": name, "ep_world_size": WORLD, "ep_rank_id": RANK}
    trip.run(name, True).check()
    rows, _, index, _, counts = trip.sent[:5]
    end = npu_communicator.known(name)

    def written() -> bytes:
        """Returns what was written of the data area, up to the registered one."""
        torch.npu.synchronize()
        return ctypes.string_at(end._data_address(), end.data_bytes)

    def combine(expand_x: torch.Tensor) -> torch.Tensor:
        return OP["combine_v2"](expand_x, trip.ids, index, counts, trip.weights, **place(name), comm_alg="direct")

    registered = [ascend_moe.window_empty((len(rows) + more, H), **shape) for more in (0, 5)]
    assert all(tensor.device == rows.device and tensor.is_contiguous() for tensor in registered)
    assert 0 <= registered[0].data_ptr() - end._data_address() - end.data_bytes < 3 << 20
    for tensor in registered:
        tensor[: len(rows)].copy_(rows)
        before = written()
        assert torch.equal(combine(tensor[: len(rows)]), trip.out)
        assert written() == before
    assert torch.equal(combine(rows), trip.out) and written() != before  # of a plain tensor
    error = outcome(combine, registered[0])
    assert type(error) is WindowTensorError and "was consumed by the combine" in str(error), error
    assert type(outcome(combine, registered[0].view(-1)[8 : 8 + rows.numel() - H].view(-1, H))) is WindowTensorError
    error = outcome(ascend_moe.window_empty, (1 << 21,), **shape)
    assert type(error) is WindowTooSmall and "of which 2 window tensors hold space" in str(error), error
    first = registered[0].data_ptr()
    del registered[0], tensor
    trip.run(name, True).check()
    until = time.monotonic() + 20
    while ascend_moe.window_empty(rows.shape, **shape).data_ptr() != first:  # torch_npu's queue lets go of it last
        assert time.monotonic() < until, "its place is not free again"
    assert ascend_moe.window_empty((0, H), **shape).shape == (0, H)
    del os.environ["ASCEND_MOE_REGISTERED_MIB"]
    ascend_moe.close(name)
    registered[0].fill_(1)  # as memory it stays good while HCCL's window lives
    error = outcome(ascend_moe.window_empty, (1,), **shape)
    assert type(error) is WindowTooSmall and error.details["variable"] == "ASCEND_MOE_REGISTERED_MIB", error


def check_ranks_without_tokens_launch_too() -> None:
    """One of them, then all."""
    before = launches()
    for batches in ([BS] + [0] * (WORLD - 1), [0] * WORLD):
        for v2 in (False, True):
            Trip(0, batches, BS * WORLD).run(HCCL, v2).check()
    assert [now - then for now, then in zip(launches(), before, strict=True)] == [4, 4]


def check_a_captured_round_trip_computes_anew_and_tells_of_bad_ids() -> None:
    name, trip = new_group(), Trip()

    def layer() -> None:
        trip.run(name, True)

    with torch.npu.graph(torch.npu.NPUGraph()):
        assert "run every op once before the capture" in str(outcome(layer))
    layer()
    trip.check()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):  # sixteen launches: one of them is followed by a copy of the record
        for _ in range(8):
            layer()

    def replay(other: Trip) -> None:
        for target, value in ((trip.x, other.x), (trip.ids, other.ids), (trip.weights, other.weights)):
            target.copy_(value)
        trip.inputs = other.inputs
        graph.replay()
        trip.check()

    for seed in range(1, 4):
        replay(Trip(seed))
    before = launches()
    graph.replay()
    assert [now - then for now, then in zip(launches(), before, strict=True)] == [8, 8]
    if RANK == 0:
        trip.ids[0, 0] = E
    graph.replay()
    torch.npu.synchronize()
    with torch.npu.graph(torch.npu.NPUGraph()):  # whose stream cannot be waited for: the finding stays
        assert type(outcome(layer)) is InvalidExpertId
    error = outcome(layer)
    # Combine fails too, later in the same replay; the first cause is what is told.
    assert type(error) is InvalidExpertId
    assert str(error).startswith("dispatch: rank 0, token 0, k 0 has expert id 12")
    replay(Trip(3))
    meet()


def check_strided_inputs_work_and_memory_is_used_again() -> None:
    trip = Trip(5)
    with torch.npu.device((RANK + 2) % torch.npu.device_count()):  # the tensors' device counts, not this one
        trip.run(HCCL).check()
    wide = torch.zeros(BS, 2 * H, dtype=torch.bfloat16)
    wide[:, ::2] = trip.inputs[RANK].x
    trip.x, trip.ids = wide.npu()[:, ::2], trip.inputs[RANK].expert_ids.t().contiguous().npu().t()
    trip.run(HCCL).check()
    for _ in range(2):  # after warm-up memory is reused
        trip.run(HCCL)
    ascend_moe.check()
    before = torch.npu.memory_reserved()
    for _ in range(5):
        trip.run(HCCL)
    ascend_moe.check()
    assert torch.npu.memory_reserved() == before


# ---- torch_npu's names


def same_round_trip(group: str, device: str) -> list[torch.Tensor]:
    """Combine with residual and RMS norm, and its sum made of combine's fp32 rows, on any device."""
    trip, eps = Trip(8), 1e-5
    mine = trip.inputs[RANK]
    x, ids, weights = (tensor.to(device) for tensor in (mine.x, mine.expert_ids, mine.expert_scales))
    residual, gamma = (mine.x + 1).unsqueeze(1).to(device), mine.x[0].to(device)
    sent = npu.npu_moe_distribute_dispatch_v2(x, ids, **place(group))
    rows = sent[0], ids, sent[2], sent[4], weights
    outputs = npu.npu_moe_distribute_combine_add_rms_norm(*rows, residual, gamma, **place(group), norm_eps=eps)
    sums = npu.npu_moe_distribute_combine_v2(rows[0].float(), *rows[1:], **place(group))
    return [*outputs, (sums.unsqueeze(1) + residual.float()).bfloat16()]


def check_the_fused_norm_and_the_barrier_are_ours_and_equal_the_cpus_bits() -> None:
    found = same_round_trip(HCCL, str(NPU))
    wanted = same_round_trip(CPU, "cpu")
    assert {tensor.device for tensor in found} == {NPU}
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, wanted, strict=True))
    assert torch.equal(found[2], found[3]) and float(found[0].float().abs().sum()) > 0
    npu._npu_distribute_barrier(torch.ones(1), CPU, WORLD)
    npu._npu_distribute_barrier(torch.ones(1).npu(), HCCL, WORLD)
    if RANK == 1:
        time.sleep(0.5)
    arrived = torch.tensor([time.monotonic()], dtype=torch.float64)
    passed = npu._npu_distribute_barrier(torch.full((2,), float(RANK)).npu(), HCCL, WORLD)
    torch.npu.synchronize()
    left = time.monotonic()
    dist.broadcast(arrived, 1, group=GLOO)
    assert left >= float(arrived) and passed.device == NPU and passed.tolist() == [RANK, RANK]
    ascend_moe.check()


def halved(scale: torch.Tensor) -> torch.Tensor:
    """Scales that bf16 holds: an NPU's second product takes them so."""
    return scale.bfloat16().float()


def check_the_one_call_for_a_layer_gives_the_cpus_bits() -> None:
    """bf16 and W8A8, lists and stacked weights, a limit, shared experts; too many rows raise on both devices."""
    shared = Rank(7, WORLD)  # its experts, unquantized, are the shared ones
    for int8, form in ((False, "stacked"), (True, "int64"), (True, "list")):
        found: list[list[Any]] = []
        for group, device in ((CPU, "cpu"), (HCCL, "npu")):
            equal, unequal = (Rank(RANK, WORLD, tokens, int8=int8) for tokens in (5, 5 - 2 * RANK))
            for each in (equal, unequal):
                each.mask, each.s2 = torch.arange(len(each.x)) != 2, each.s2 if each.s2 is None else halved(each.s2)
            own, buffer = shared.to(device), unequal.buffer(group, max_recv_token_num=99)
            weights = {"shared_l1_weights": [own.w1], "shared_l2_weights": [own.w2]}
            made = equal.to(device).one_call(group, form, swiglu_limit=0.5)
            made += unequal.to(device).mega(buffer, form, activation_clamp=0.5, **weights)
            found.append([on_cpu(value) for value in made])
            with raises("max_output_size is 1, but", RoutingOverflow):
                equal.to(device).one_call(group, form, limit=1)
        assert all(map(torch.equal, *found)), found
        assert bool((found[1][0][torch.arange(5) != 2] != 0).any()) and bool((found[1][2] != 0).any())
    for group in (CPU, HCCL):
        with raises("num_topk is", ConfigMismatch):
            layer_ops.get_symm_buffer_for_mega_moe(group, E, 5, 1 + RANK, H, 32)


def check_patch_torch_npu_swaps_its_functions_and_puts_them_back() -> None:
    names = npu.WINDOW_OPERATORS

    def functions(module: Any) -> list[Any]:
        return [getattr(module, name) for name in names]

    before, packets = functions(torch_npu), functions(torch.ops.npu)
    # vllm-ascend asks HCCL itself for the name.
    world = dist.new_group(list(range(WORLD)))
    name = world._get_backend(torch.device("npu")).get_hccl_comm_name(RANK)
    comm._handed_out.clear()
    with ascend_moe.patch_torch_npu() as patch:
        ascend_moe.patch_torch_npu().undo()
        assert functions(torch_npu) == functions(npu)
        Trip(9).run(name, True, module=torch_npu).check()
    patch.undo()
    assert all(one is old for one, old in zip(functions(torch_npu), before, strict=True))
    with contextlib.suppress(KeyError), ascend_moe.patch_torch_npu():
        setattr(torch_npu, names[0], "another's")
        raise KeyError
    assert getattr(torch_npu, names[0]) == "another's" and functions(torch_npu)[1:] == before[1:]
    setattr(torch_npu, names[0], before[0])
    assert all(one is old for one, old in zip(functions(torch.ops.npu), packets, strict=True))


if __name__ == "__main__":
    run_checks(sys.argv[1:])
    meet()
    ascend_moe.close(CPU)
    end()
