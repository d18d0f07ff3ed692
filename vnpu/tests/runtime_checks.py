"""Checks of devices, memory, streams and graphs, in a process on 4 virtual devices (`npu_runs`)."""

from __future__ import annotations

import ctypes
import os
import sys

import torch  # torch_npu is loaded by torch itself: nothing here imports it
from npu_runs import raises, run_checks

import ascend_vnpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.bool)
DTYPES += (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def sample(dtype: torch.dtype, count: int = 100) -> torch.Tensor:
    return (torch.arange(count) % 61 - 30).to(torch.int64).to(dtype)


def check_autoload() -> None:
    assert "torch_npu" in sys.modules
    with open("/proc/self/environ") as file:  # as the launcher left it; torch_npu itself sets it afterwards
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in file.read()
    assert torch.npu.is_available()


def check_devices() -> None:
    assert torch.npu.device_count() == 4
    assert torch.npu.current_device() == 0
    torch.npu.set_device(3)
    assert torch.npu.current_device() == 3 and torch.empty(1, device="npu").device.index == 3
    torch.npu.set_device(0)
    with torch.npu.device(2):
        assert torch.empty(1, device="npu").device.index == 2
    with raises(""):
        torch.empty(1, device="npu:4")


def check_properties() -> None:
    properties = torch.npu.get_device_properties(0)
    assert properties.name == torch.npu.get_device_name(1) == "Ascend910B3"
    assert (properties.cube_core_num, properties.vector_core_num) == (20, 40)
    free, total = torch.npu.mem_get_info()
    assert 0 < free <= total <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_round_trips() -> None:
    for dtype in DTYPES:
        data = sample(dtype)
        for moved in (data.npu(), data.to("npu:1"), data.to(torch.device("npu", 2), non_blocking=True)):
            assert moved.device.type == "npu" and moved.dtype == dtype
            assert moved.cpu().equal(data) and moved.to("npu:3").cpu().equal(data), dtype
    assert torch.empty(0, device="npu").cpu().shape == (0,)


def check_views_are_copied_between_devices() -> None:
    x = torch.arange(24.0).reshape(4, 6)
    large = torch.ones(512, 512, device="npu")
    for view in (lambda x: x.t(), lambda x: x[1:, 1::2], lambda x: x[2:].t()) * 4:
        here, want = view(x.npu()), view(x)
        large @ large  # the copy waits for its device's work
        assert here.to("npu:1").cpu().equal(want)
        target = torch.zeros(4, 6).to("npu:2")
        view(target).copy_(here)
        assert view(target).cpu().equal(want) and target.sum().item() == want.sum()
        with raises(r"507035"):
            here.to("npu:1", torch.float16).cpu()


def check_pinned() -> None:
    data = sample(torch.float32).pin_memory()
    assert data.is_pinned() and not torch.zeros(4).is_pinned()
    back = torch.empty(100).pin_memory()
    moved = data.to("npu", non_blocking=True)
    back.copy_(moved, non_blocking=True)
    torch.npu.synchronize()
    assert back.equal(data)


def check_streams() -> None:
    source, target = sample(torch.float32).npu(), torch.empty(100, device="npu")
    stream, other = torch.npu.Stream(), torch.npu.Stream(priority=-1)
    assert stream != other and torch.npu.current_stream() == torch.npu.default_stream()
    begin, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with torch.npu.stream(stream):
        assert torch.npu.current_stream() == stream
        begin.record()
        target.copy_(source)
        end.record()
    other.wait_event(end)
    other.wait_stream(stream)
    stream.synchronize()
    end.synchronize()
    assert begin.query() and end.query() and stream.query()
    assert begin.elapsed_time(end) >= 0 and target.cpu().equal(source.cpu())
    untimed = torch.npu.Event()
    untimed.record()
    with raises("107006"):  # ACL_EVENT_TIME_LINE is not set
        untimed.elapsed_time(end)
    large = torch.ones(1 << 22, device="npu")
    with torch.npu.stream(stream):
        for _ in range(50):
            large.add_(1)
        end.record()
    end.synchronize()  # recorded again, it stands for its later place
    assert stream.query() and large.cpu()[0] == 51


def check_memory() -> None:
    torch.npu.empty_cache()
    before = torch.npu.memory_allocated()
    free_before, _ = torch.npu.mem_get_info()
    block = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() - before >= 64 << 20
    assert free_before - torch.npu.mem_get_info()[0] >= 64 << 20
    del block
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] == free_before
    _, total = torch.npu.mem_get_info()
    with raises("out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device="npu")


def check_graph() -> None:
    source, target, last = sample(torch.float32).npu(), torch.zeros(100).npu(), torch.zeros(100).npu()
    side, fork, join = torch.npu.Stream(), torch.npu.Event(), torch.npu.Event()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        target.copy_(source)
        current = torch.npu.current_stream()
        fork.record(current)
        side.wait_event(fork)
        with torch.npu.stream(side):
            last.copy_(target)
        join.record(side)
        current.wait_event(join)
    assert target.cpu().equal(torch.zeros(100)), "nothing runs while it is captured"
    for value in (1.0, 2.0):
        source.copy_(torch.full((100,), value))
        graph.replay()
        torch.npu.synchronize()
        assert last.cpu().equal(torch.full((100,), value)), "every replay reads what is there then"
    side.wait_event(join)  # of a capture that has ended
    with torch.npu.stream(side):
        last.copy_(sample(torch.float32))
    side.synchronize()
    assert last.cpu().equal(sample(torch.float32)), "after the capture the side stream runs work again"
    graph.reset()
    with raises("is being captured"), torch.npu.graph(torch.npu.NPUGraph()):
        torch.npu.synchronize()
    torch.npu.synchronize()


def check_task_groups() -> None:
    """A replay waits where an external event was captured, and runs the tasks that a group has got meanwhile."""
    source, between, target = torch.ones(4).npu(), torch.zeros(4).npu(), torch.zeros(4).npu()
    graph, event = torch.npu.NPUGraph(), torch.npu.ExternalEvent()
    update, other = torch.npu.Stream(), torch.npu.Stream()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        torch.add(source, 1, out=between)
        event.wait(stream)
        event.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        torch.mul(between, 2, out=target)
        handle = torch.npu.graph_task_group_end(stream)
        target.add_(source)
    for factor in (3, 5):
        graph.replay()
        done = torch.npu.Event()
        done.record()
        other.wait_event(done)
        with torch.npu.stream(other):
            copy = target.clone()
        assert not (torch.npu.current_stream().query() or other.query()), "both wait for the event"
        with torch.npu.stream(update):
            torch.npu.graph_task_update_begin(update, handle)
            torch.mul(between, factor, out=target)
            torch.npu.graph_task_update_end(update)
            event.record(update)
        other.synchronize()
        assert copy.cpu().equal(torch.full((4,), 2.0 * factor + 1)), factor
    event.record(update)  # before the replay that waits for it
    graph.replay()
    assert target.cpu().equal(torch.full((4,), 11.0)), "a group keeps its tasks until the next update"
    with raises("captured with 1 tasks, its update has 0"), torch.npu.stream(update):
        torch.npu.graph_task_update_begin(update, handle)
        torch.npu.graph_task_update_end(update)
    with raises("is not being captured"):
        torch.npu.graph_task_group_begin(update)


def check_fork() -> None:
    """A child forked after initialisation computes on the CPU and ends, as a data loader's does."""
    torch.ones(4).npu()
    child = os.fork()
    if child == 0:
        os._exit(int(float(torch.ones(4).sum())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert torch.ones(4).npu().cpu().sum() == 4


def check_refused() -> None:
    """Checks that what only a device can do is refused by name, not done in a wrong way."""
    runtime = ctypes.CDLL("libascendcl.so")
    runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
    for name in ("rtKernelLaunch", "aclrtBinaryLoadFromData", "aclmdlSetDump"):
        assert getattr(runtime, name)() == 207000
        assert name in runtime.aclGetRecentErrMsg().decode()
    assert runtime.aclGetRecentErrMsg() is None
    assert runtime.aclrtMemcpy(None, 0, None, 8, 0) == 107000
    assert "8 bytes do not fit" in runtime.aclGetRecentErrMsg().decode()


def check_info() -> None:
    assert ascend_vnpu.is_active()
    info = ascend_vnpu.info()
    assert info["virtual"] is True and info["soc"] == "Ascend910B3" and info["devices"] == 4
    assert info["torch_npu"] in {pair.torch_npu for pair in ascend_vnpu.PAIRS} and "virtual" in info["about"]
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "libascendcl" in line}
    assert files == {os.path.realpath(os.path.join(info["libraries"], "libascendcl.so"))}


if __name__ == "__main__":
    run_checks()
