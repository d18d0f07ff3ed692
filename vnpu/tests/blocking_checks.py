"""Blocking calls of torch.npu behind queued operators: none may wait for what waits for it (`npu_runs`).

torch_npu hands operators to a thread of its own, and some of its calls wait for that thread with Python's lock held,
which the virtual NPU's operators need.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
from npu_runs import run_checks

QUEUED = 100


def _many(step: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(QUEUED):
            x = step(x)
        return x

    return run


# Every kind of work: computed in Python, copied in C++, drawn, a whole graph of them. All keep x at its values, 1.
GRAPH = torch.npu.NPUGraph()
STATIC = torch.ones(64, 8, device="npu")
with torch.npu.graph(GRAPH):
    STATIC.mul_(1)
    STATIC.copy_(STATIC * 1)
    STATIC.clamp_(1, 1)
SIDE = torch.npu.Stream()


def _replay(x: torch.Tensor) -> torch.Tensor:
    GRAPH.replay()
    return x * STATIC


def _on_the_side(x: torch.Tensor) -> torch.Tensor:
    SIDE.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(SIDE):
        y = x * 1
    y.record_stream(torch.npu.current_stream())
    torch.npu.current_stream().wait_stream(SIDE)
    return y


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "computed": _many(lambda x: x + 1 - 1),
    "in place": _many(lambda x: x.mul_(1)),
    "copied": _many(lambda x: x.clone()),
    "from pinned memory": _many(lambda x: x * torch.ones(8).pin_memory().to("npu", non_blocking=True)),
    "reduced": _many(lambda x: x * x.mean()),
    "matrix product": _many(lambda x: x @ torch.eye(8, device="npu")),
    "drawn": _many(lambda x: x + 0 * torch.rand_like(x)),
    "freed": _many(lambda x: (x * 1, torch.empty(1 << 16, device="npu").fill_(1))[0]),
    "replayed": _many(_replay),
    "on another stream": _many(_on_the_side),
}


def _event(use: Callable[[torch.npu.Event], object]) -> Callable[[], object]:
    def run() -> object:
        event = torch.npu.Event(enable_timing=True)
        event.record()
        return use(event)

    return run


def _elapsed() -> None:
    first, last = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    first.record()
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) >= 0


def _until_done(event: torch.npu.Event) -> None:
    while not event.query():
        time.sleep(0)


def _of_another_device() -> None:
    torch.npu.set_device(1)
    torch.ones(3, device="npu").sum().item()
    torch.npu.set_device(0)


def _out_of_memory() -> None:
    try:
        torch.empty(torch.npu.mem_get_info()[1] + 1, dtype=torch.uint8, device="npu")
    except RuntimeError as error:
        assert "out of memory" in str(error)


CALLS: dict[str, Callable[[], object]] = {
    "empty_cache": torch.npu.empty_cache,
    "synchronize": torch.npu.synchronize,
    "Stream.synchronize": lambda: torch.npu.current_stream().synchronize(),
    "Stream.query": lambda: torch.npu.current_stream().query(),
    "Stream.wait_stream": lambda: SIDE.wait_stream(torch.npu.current_stream()),
    "Event.synchronize": _event(lambda event: event.synchronize()),
    "Event.query until it is done": _event(_until_done),
    "Event.elapsed_time": _elapsed,
    "Event.wait": _event(lambda event: event.wait(SIDE)),
    "memory_stats": torch.npu.memory_stats,
    "memory_snapshot": torch.npu.memory_snapshot,
    "mem_get_info": torch.npu.mem_get_info,
    "reset_peak_memory_stats": torch.npu.reset_peak_memory_stats,
    "set_device": _of_another_device,
    "out of memory": _out_of_memory,
    "manual_seed": lambda: torch.npu.manual_seed(3),
    "get_rng_state": torch.npu.get_rng_state,
    "new stream": torch.npu.Stream,
    "new graph": lambda: torch.npu.NPUGraph().reset(),
    "item": lambda: torch.ones(2, device="npu").sum().item(),
    "nonzero": lambda: torch.ones(2, device="npu").nonzero(),
    "pin_memory": lambda: torch.ones(1 << 16).pin_memory(),
    "gc": gc.collect,
}


def _one(kind: str, call: str) -> None:
    x = KINDS[kind](torch.ones(64, 8, device="npu"))
    CALLS[call]()
    assert x.cpu().equal(torch.ones(64, 8)), (kind, call)
    del x


def check_every_call_behind_every_kind() -> None:
    for kind in KINDS:
        for call in CALLS:
            start = time.monotonic()
            _one(kind, call)
            assert time.monotonic() - start < 60, (kind, call)


if __name__ == "__main__":
    run_checks()
