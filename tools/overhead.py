"""Measure the overhead of an op call without its kernel, on the CPU and the virtual NPU.

    python tools/overhead.py [--calls 10000]      the virtual NPU where torch_npu is found

One rank, tiny shapes. On the CPU the kernel's time is taken off a call, and the rest is split: torch before
the op, the op's own part, torch after it. On the virtual NPU it is the time until the op has returned, the
launch included: an NPU works on by itself. Compare figures of one machine in one state.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

TOKENS, TOPK, HIDDEN, EXPERTS = 4, 2, 32, 4
WARM = 100


def measure(device: str, group_ep: str, calls: int) -> None:
    """Print a line an op and caller: p10 and p50 of all, and on the CPU p50 of its parts."""
    import ascend_moe
    from ascend_moe.native import binding

    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16).to(device)
    ids = (torch.arange(TOKENS * TOPK, dtype=torch.int32).reshape(TOKENS, TOPK) % EXPERTS).to(device)
    weights, place = torch.full((TOKENS, TOPK), 0.5).to(device), (group_ep, 1, 0, EXPERTS)
    for version in ("", "_v2"):
        rows = getattr(ascend_moe, f"npu_moe_distribute_dispatch{version}")(x, ids, *place)
        arguments: dict[str, tuple[Any, ...]] = {
            f"dispatch{version}": (x, ids, *place),
            f"combine{version}": (rows[0], ids, rows[2], rows[4], weights, *place),
        }
        for name, given in arguments.items():
            public = getattr(ascend_moe, f"npu_moe_distribute_{name}")
            op = getattr(torch.ops.ascend_moe, public.__name__).default
            for caller, function in (("public", public), ("torch.ops", op)):
                costs = []
                for _ in range(WARM + calls):
                    if device == "npu":
                        torch.npu.synchronize()
                    start = time.monotonic_ns()
                    function(*given)
                    end = time.monotonic_ns()
                    entered, launched, returned, left = binding.marks()
                    kernel = returned - launched if device == "cpu" else 0
                    costs.append((end - start - kernel, entered - start, left - entered - kernel, end - left))
                low, middle = np.percentile(np.array(costs[WARM:]) / 1000, [10, 50], axis=0)
                line = f"  {name + ' ' + caller:<24}{low[0]:>8.1f} / {middle[0]:<8.1f}"
                if device == "cpu":
                    line += " + ".join(f"{part:.1f}" for part in middle[1:])
                print(line)


def on_npu(calls: int) -> None:
    """In a process of ``ascend-moe vnpu``."""
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    import ascend_moe

    torch.npu.set_device(0)
    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    measure("npu", ascend_moe.comm_name(), calls)


def main() -> int:
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--npu", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.npu:
        on_npu(max(options.calls // 10, 100))
        return 0
    import ascend_moe

    print("CPU, us beside the kernel: p10 / p50; p50 of torch before the op + the op + torch after", flush=True)
    with ascend_moe.LocalCluster(1) as cluster:
        cluster.run(lambda _, group_ep: measure("cpu", group_ep, options.calls))
    if importlib.util.find_spec("torch_npu") is None:
        print("no torch_npu: put the wheel's folder on PYTHONPATH (make test-npu lays it in build/npu)")
        return 2
    print("virtual NPU, us until the op has returned: p10 / p50", flush=True)
    own = [sys.executable, os.path.abspath(__file__), "--npu", "--calls", str(options.calls)]
    vnpu = [sys.executable, "-m", "ascend_moe", "vnpu", "--no-verify", "--", *own]
    return subprocess.run(vnpu, env={**os.environ, "PYTHONSAFEPATH": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
