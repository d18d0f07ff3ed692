"""What a call of the ops costs beside its kernel, on CPU and virtual NPU, with the figures from before.

    python tools/overhead.py                 both; the virtual NPU where torch_npu is found
    python tools/overhead.py --calls 10000

One rank, tiny shapes. On the CPU the kernel's time is taken off a call: what is left is torch's binding of
arguments, dispatch, the plan's look-up, the outputs, the lock. On the virtual NPU it is the time until the op
has returned, the launch included: an NPU works on by itself. Compare figures of one machine in one state:
everything else that runs counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

TOKENS, TOPK, HIDDEN, EXPERTS = 4, 2, 32, 4
WARM = 100
# Microseconds, 10th percentile, before the one binding (commit f5c6732), 2 cores under load 10. The CPU: by
# Python's kernels, by the compiled kernels that replayed calls (torch.ops), and past torch's dispatcher. The
# NPU: by Python.
BEFORE = {
    "cpu": {
        "dispatch": (102.5, 10.9, 5.3),
        "dispatch_v2": (108.2, 12.3, 5.6),
        "combine": (103.0, 10.5, 3.4),
        "combine_v2": (105.2, 11.0, 3.4),
    },
    "npu": {"dispatch": 499.3, "dispatch_v2": 496.3, "combine": 514.1, "combine_v2": 538.3},
}

Cost = tuple[float, float]


def percentiles(nanos: list[int]) -> Cost:
    nanos.sort()
    return nanos[len(nanos) // 10] / 1000, nanos[len(nanos) // 2] / 1000


def measure(
    device: str, group_ep: str, calls: int, cost: Callable[[Callable[[], Any]], int]
) -> dict[str, Cost]:
    """By op and caller ("public", "torch.ops"), the 10th percentile and the median in microseconds."""
    import ascend_moe

    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16).to(device)
    ids = (torch.arange(TOKENS * TOPK, dtype=torch.int32).reshape(TOKENS, TOPK) % EXPERTS).to(device)
    weights, place = torch.full((TOKENS, TOPK), 0.5).to(device), (group_ep, 1, 0, EXPERTS)
    costs = {}
    for version in ("", "_v2"):
        rows = getattr(ascend_moe, f"npu_moe_distribute_dispatch{version}")(x, ids, *place)
        arguments = {
            f"dispatch{version}": (x, ids, *place),
            f"combine{version}": (rows[0], ids, rows[2], rows[4], weights, *place),
        }
        for name, given in arguments.items():
            public = getattr(ascend_moe, f"npu_moe_distribute_{name}")
            op = getattr(torch.ops.ascend_moe, public.__name__).default
            for caller, function in (("public", public), ("torch.ops", op)):
                nanos = [
                    cost(lambda function=function, given=given: function(*given)) for _ in range(WARM + calls)
                ]
                costs[f"{name} {caller}"] = percentiles(nanos[WARM:])
    return costs


def on_cpu(calls: int) -> dict[str, Cost]:
    import ascend_moe
    from ascend_moe.native import binding

    def cost(call: Callable[[], Any]) -> int:
        start = time.monotonic_ns()
        call()
        end = time.monotonic_ns()
        _, launched, returned, _ = binding.marks()
        return end - start - (returned - launched)

    with ascend_moe.LocalCluster(1) as cluster:
        return cluster.run(lambda _, group_ep: measure("cpu", group_ep, calls, cost))[0]


def of_torch(calls: int) -> Cost:
    """A call of a small op of torch's own, its kernel included: how fast this machine calls anything now."""
    x, nanos = torch.ones(8), []
    for _ in range(WARM + calls):
        start = time.monotonic_ns()
        torch.ops.aten.sum.dim_IntList(x, [0])
        nanos.append(time.monotonic_ns() - start)
    return percentiles(nanos[WARM:])


def on_npu(calls: int) -> dict[str, Cost]:
    """In a process of ``ascend-moe vnpu``."""
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    import ascend_moe

    torch.npu.set_device(0)
    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)

    def cost(call: Callable[[], Any]) -> int:
        torch.npu.synchronize()
        start = time.monotonic_ns()
        call()
        return time.monotonic_ns() - start

    return measure("npu", ascend_moe.comm_name(), calls, cost)


def virtual_npu(calls: int) -> dict[str, Cost] | str:
    """Measured in a process of its own; or why not."""
    if importlib.util.find_spec("torch_npu") is None:
        return "no torch_npu: put the wheel's folder on PYTHONPATH (make test-npu lays it in build/npu)"
    own = [sys.executable, os.path.abspath(__file__), "--npu", "--calls", str(calls)]
    command = [sys.executable, "-m", "ascend_moe", "vnpu", "--no-verify", "--", *own]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return f"the virtual NPU ended with {done.returncode}: {done.stderr.strip()[-400:]}"
    return {name: (values[0], values[1]) for name, values in json.loads(lines[-1]).items()}


def main() -> int:
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--npu", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.npu:
        print(json.dumps(on_npu(max(options.calls // 10, 100))))
        return 0
    print("CPU, microseconds beside the kernel, p10 / p50; before: Python's kernels, replayed, past torch")
    for name, (low, middle) in on_cpu(options.calls).items():
        before = " / ".join(f"{value:.1f}" for value in BEFORE["cpu"][name.split()[0]])
        print(f"  {name:<24}{low:>8.1f} / {middle:<8.1f}before {before}")
    low, middle = of_torch(options.calls)
    print(f"  {'torch.ops.aten.sum':<24}{low:>8.1f} / {middle:<8.1f}for scale, with its kernel")
    costs = virtual_npu(options.calls)
    if isinstance(costs, str):
        print(costs)
        return 2
    print("virtual NPU, microseconds until the op has returned, p10 / p50; before: by Python")
    for name, (low, middle) in costs.items():
        print(f"  {name:<24}{low:>8.1f} / {middle:<8.1f}before {BEFORE['npu'][name.split()[0]]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
