"""A rank on HCCL of the virtual NPU: ``hccl_ranks.py`` runs all checks, ``hccl_ranks.py CASE`` a failure."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from npu_runs import run_checks
from torch import Tensor

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NPU = torch.device("npu")

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
# In HCCL's order: torch.distributed's names, and what they do with two tensors.
REDUCTIONS = {"SUM": torch.add, "PRODUCT": torch.mul, "MAX": torch.maximum, "MIN": torch.minimum}
OPS = {name: getattr(dist.ReduceOp, name) for name in REDUCTIONS}


class Windows(ctypes.Structure):
    """VnpuWindows of vnpu/hccl/abi.h."""

    _fields_ = (
        ("rank", ctypes.c_int32),
        ("world", ctypes.c_int32),
        ("data_bytes", ctypes.c_uint64),
        ("bases", ctypes.POINTER(ctypes.c_void_p)),
        ("live_fds", ctypes.POINTER(ctypes.c_int32)),
    )


def name_of(group: dist.ProcessGroup) -> str:
    return str(group._get_backend(NPU).get_hccl_comm_name(dist.get_rank(group)))


def windows_of(group: dist.ProcessGroup) -> Windows:
    windows = Windows()
    assert ctypes.CDLL("libhccl.so").vnpu_comm_windows(name_of(group).encode(), ctypes.byref(windows)) == 0
    return windows


def data_of(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns what this rank contributes: every rank can compute everybody's."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point:
        return (torch.rand(*shape, generator=generator, dtype=torch.float64) * 4 - 2).to(dtype)
    low = 0 if dtype == torch.uint8 else -50
    return torch.randint(low, 50, shape, generator=generator).to(dtype)


def reduced(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """In rank order; 16-bit floats in fp32 with one rounding."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = REDUCTIONS[op](total, part.to(wide))
    return total.to(dtype)


def same(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    got = got.cpu()
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, what
    assert got.contiguous().view(torch.uint8).equal(wanted.contiguous().view(torch.uint8)), f"{what}\n{got}\n{wanted}"


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=NPU)


def everyone(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    return [data_of(rank, dtype, *shape) for rank in range(WORLD)]


def check_reductions() -> None:
    for dtype in (*FLOATS, *INTEGERS):
        parts = everyone(dtype, 1001)
        for op, code in OPS.items():
            tensor = parts[RANK].npu()
            try:
                dist.all_reduce(tensor, op=code)
            except (RuntimeError, TypeError) as error:
                # torch_npu's own list has no fp64, which libhccl.so here reduces (`check_direct`).
                assert dtype == torch.float64 and "Unsupported data type at::kDouble" in str(error)
                continue
            assert dtype != torch.float64
            same(tensor, reduced(op, parts), f"all_reduce {dtype} {op}")
    for op, code in OPS.items():
        tensor = data_of(RANK, torch.float32, 77).npu()
        dist.reduce(tensor, dst=WORLD - 1, op=code)
        if RANK == WORLD - 1:
            same(tensor, reduced(op, everyone(torch.float32, 77)), f"reduce {op}")
    tensors = [data_of(RANK, torch.int32, count).npu() for count in (3, 5)]
    with dist._coalescing_manager(async_ops=True, device=NPU) as group:
        for tensor in tensors:
            dist.all_reduce(tensor)
    group.wait()
    for tensor in tensors:
        same(tensor, reduced("SUM", everyone(torch.int32, len(tensor))), "a group of calls")


def check_every_value() -> None:
    """All 65 536 values of the 16-bit floats: infinities, NaN, numbers without a leading one."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        parts = [bits.roll(7919 * r).view(dtype) for r in range(WORLD)]
        for op, code in OPS.items():
            tensor = parts[RANK].npu()
            dist.all_reduce(tensor, op=code)
            got, wanted = tensor.cpu(), reduced(op, parts)
            assert got.isnan().equal(wanted.isnan()), (dtype, op)
            assert bool(((got == wanted) | got.isnan()).all()), (dtype, op)


def check_movements() -> None:
    """Also more than a window, 1 MiB, holds: in pieces."""
    calls = [(dtype, 12) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool)]
    for dtype, count in [*calls, (torch.float32, 700_000)]:
        numbers = torch.int8 if dtype == torch.bool else dtype
        parts = [part.to(dtype) for part in everyone(numbers, WORLD * count)]
        what = f"{dtype} {count}"
        tensor = parts[RANK].npu()
        dist.broadcast(tensor, src=1)
        same(tensor, parts[1], f"broadcast {what}")
        gathered = empty(WORLD * WORLD * count, dtype=dtype)
        dist.all_gather_into_tensor(gathered, parts[RANK].npu())
        same(gathered, torch.cat(parts), f"all_gather_into_tensor {what}")
        swapped, own = empty(WORLD * count, dtype=dtype), slice(RANK * count, RANK * count + count)
        dist.all_to_all_single(swapped, parts[RANK].npu())
        same(swapped, torch.cat([part[own] for part in parts]), f"all_to_all_single {what}")
        if dtype == torch.float32:
            for op, code in OPS.items():
                scattered = empty(count)
                dist.reduce_scatter_tensor(scattered, parts[RANK].npu(), op=code)
                same(scattered, reduced(op, parts)[own], f"reduce_scatter_tensor {op} {what}")


def check_windows() -> None:
    """After `check_movements`, whose data overwrote them."""
    group = dist.group.WORLD
    assert group is not None
    seen = windows_of(group)
    assert (seen.rank, seen.world, seen.data_bytes) == (RANK, WORLD, 1 << 20)
    for rank in range(WORLD):
        memory = ctypes.string_at(seen.bases[rank], 4096 + (1 << 20) + (1 << 20))
        assert memory[: 4096 + (1 << 20)] == bytes(4096 + (1 << 20)), "header and state stay untouched"
        area = memory[4096 + (1 << 20) :]
        assert len(area) - area.count(0) > len(area) // 2, "the data area was overwritten"


def check_unequal() -> None:
    """Rank s sends s + d + 1 elements to rank d; and the forms with lists of tensors."""
    counts = [[s + d + 1 for d in range(WORLD)] for s in range(WORLD)]
    rows = [data_of(s, torch.float32, sum(counts[s])) for s in range(WORLD)]
    received = [counts[s][RANK] for s in range(WORLD)]
    out = empty(sum(received))
    dist.all_to_all_single(out, rows[RANK].npu(), received, counts[RANK])
    wanted = torch.cat([rows[s].split(counts[s])[RANK] for s in range(WORLD)])
    same(out, wanted, "all_to_all_single unequal")
    outputs = [empty(count) for count in received]
    dist.all_to_all(outputs, [part.npu() for part in rows[RANK].split(counts[RANK])])
    same(torch.cat(outputs), wanted, "all_to_all")
    gathered = [empty(len(row)) for row in rows]
    dist.all_gather(gathered, rows[RANK].npu())
    same(torch.cat(gathered), torch.cat(rows), "all_gather")
    own, even = empty(7), everyone(torch.float32, 7)
    dist.scatter(own, [row.npu() for row in even] if RANK == 1 else None, src=1)
    same(own, even[RANK], "scatter")
    dist.barrier()


def check_points() -> None:
    if RANK == 0:
        for peer in range(1, WORLD):
            for count in (0, 10 * peer):
                dist.send(data_of(0, torch.float32, count).npu(), peer)
    else:
        for count in (0, 10 * RANK):
            tensor = empty(count)
            dist.recv(tensor, 0)
            same(tensor, data_of(0, torch.float32, count), "send recv")
    # A ring of messages larger than a piece of the channel; without a batch all send before any receives.
    count, after, before = 400_000, (RANK + 1) % WORLD, (RANK - 1) % WORLD
    for batch in (True, False):
        mine, inbox = data_of(RANK, torch.float32, count).npu(), empty(count)
        if batch:
            operations = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, inbox, before)]
            work = dist.batch_isend_irecv(operations)
        else:
            work = [dist.isend(mine, after), dist.irecv(inbox, before)]
        for item in work:
            item.wait()
        same(inbox, data_of(before, torch.float32, count), f"ring, batch {batch}")


def check_direct() -> None:
    """Calls what torch_npu does not reach by itself: functions of libhccl.so, called with device pointers."""
    hccl, comm, group = ctypes.CDLL("libhccl.so"), ctypes.c_void_p(), dist.group.WORLD
    assert group is not None
    assert hccl.HcomGetCommHandleByGroup(name_of(group).encode(), ctypes.byref(comm)) == 0
    no_stream = ctypes.c_void_p()

    def words(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return ctypes.c_void_p(argument.data_ptr())
        return (ctypes.c_uint64 * len(argument))(*argument) if isinstance(argument, list) else argument

    def call(name: str, *arguments: Any) -> None:
        assert getattr(hccl, name)(*map(words, arguments), comm, no_stream) == 0

    fp64, fp32, bf16, number = 10, 4, 11, ctypes.c_uint64
    parts = everyone(torch.float64, 33)
    for code, op in enumerate(OPS):
        source, target = parts[RANK].npu(), empty(33, dtype=torch.float64)
        call("HcclAllReduce", source, target, number(33), fp64, code)
        same(target, reduced(op, parts), f"HcclAllReduce fp64 {op}")
    counts = [3 + rank for rank in range(WORLD)]
    offsets = [sum(counts[:rank]) for rank in range(WORLD)]
    rows = [data_of(rank, torch.float32, counts[rank]) for rank in range(WORLD)]
    source, target = rows[RANK].npu(), empty(sum(counts))
    call("HcclAllGatherV", source, number(counts[RANK]), target, counts, offsets, fp32)
    same(target, torch.cat(rows), "HcclAllGatherV")
    wide = everyone(torch.bfloat16, sum(counts))
    source, target = wide[RANK].npu(), empty(counts[RANK], dtype=torch.bfloat16)
    call("HcclReduceScatterV", source, counts, offsets, target, number(counts[RANK]), bf16, 0)
    same(target, reduced("SUM", wide)[offsets[RANK] :][: counts[RANK]], "HcclReduceScatterV")
    matrix = [[s + 2 * d for d in range(WORLD)] for s in range(WORLD)]
    inputs = [data_of(s, torch.float32, sum(matrix[s])) for s in range(WORLD)]
    source, target = inputs[RANK].npu(), empty(sum(row[RANK] for row in matrix))
    call("HcclAlltoAllVC", source, list(itertools.chain(*matrix)), fp32, target, fp32)
    same(target, torch.cat([inputs[s].split(matrix[s])[RANK] for s in range(WORLD)]), "HcclAlltoAllVC")


def check_groups() -> None:
    """Groups of different members and window sizes, each with its own communicator."""
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": 5}
    small = dist.new_group([0, 1], pg_options=options)
    large = dist.new_group(list(range(WORLD - 1, 0, -1)))
    names = set()
    for group, mib in ((dist.group.WORLD, 1), (small, 5), (large, 1)):
        if group is None or dist.get_rank(group) < 0:
            continue
        members = dist.get_process_group_ranks(group)
        tensor = data_of(RANK, torch.int32, 9).npu()
        dist.all_reduce(tensor, group=group)
        same(tensor, reduced("SUM", [data_of(r, torch.int32, 9) for r in members]), f"group {members}")
        seen = windows_of(group)
        assert (seen.world, seen.data_bytes) == (len(members), mib << 20), (seen.world, seen.data_bytes)
        names.add(name_of(group))
    assert len(names) == (3 if RANK == 1 else 2), names


def check_graph() -> None:
    """A collective is recorded like any other work, and runs at every replay."""
    source, target = torch.zeros(16).npu(), torch.zeros(16).npu()
    dist.all_reduce(target)
    captured = torch.npu.NPUGraph()
    with torch.npu.graph(captured):
        target.copy_(source)
        dist.all_reduce(target)
    for step in range(3):
        source.copy_(torch.full((16,), float(10 * step + RANK)))
        captured.replay()
        torch.npu.synchronize()
        same(target, torch.full((16,), float(sum(10 * step + r for r in range(WORLD)))), f"replay {step}")


def fail(case: str) -> None:
    """A collective that fails, as the case says; prints how, and how long it took."""
    collective, count = dist.all_reduce, 8
    if case == "unequal_windows":
        os.environ["HCCL_BUFFSIZE"] = str(2 + RANK)
    elif case != "absent":  # without a call before, the communicator itself cannot be made
        collective(data_of(RANK, torch.float32, count).npu())
        torch.npu.synchronize()
    if RANK == 1 and case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 1 and case in ("late", "absent"):
        time.sleep(8 if case == "late" else 6)
        os._exit(0)
    if RANK == 1 and case == "mismatch":
        collective = partial(dist.broadcast, src=0)
    if RANK == 1 and case == "sizes":
        count += 1
    begin = time.monotonic()
    try:
        collective(data_of(RANK, torch.float32, count).npu())
        torch.npu.synchronize()
    except RuntimeError as error:
        print("failed", round(time.monotonic() - begin, 3), " ".join(str(error).split()), flush=True)
        os._exit(0)  # as a user's process would end: torch_npu's own shutdown is not what is tested
    raise AssertionError("nothing was raised")


if __name__ == "__main__":
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl", init_method=f"file://{os.environ['STORE']}", rank=RANK, world_size=WORLD)
    if sys.argv[1:]:
        fail(sys.argv[1])
    run_checks()
    dist.destroy_process_group()
