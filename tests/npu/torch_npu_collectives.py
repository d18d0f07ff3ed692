"""One rank of two on NPUs, virtual or not: the barrier, and combine with residual and RMS norm; writes JSON.

torchrun --nproc-per-node 2 torch_npu_collectives.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu

import ascend_moe
from ascend_moe.npu import (
    _npu_distribute_barrier,
    npu_moe_distribute_combine_add_rms_norm,
    npu_moe_distribute_combine_v2,
    npu_moe_distribute_dispatch_v2,
)

EXPERTS, TOPK, HIDDEN, BATCH, EPS = 4, 2, 64, 5, 1e-5


def layer(rank: int, world: int, group: str, device: str) -> list[torch.Tensor]:
    """The operator's outputs, and x computed from combine's fp32 rows, for the same inputs on any device."""
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device)

    chosen = torch.randint(0, EXPERTS, (BATCH, TOPK), generator=generator, dtype=torch.int32).to(device)
    weights = torch.rand((BATCH, TOPK), generator=generator).to(device)
    x, residual, gamma = random(BATCH, HIDDEN), random(BATCH, 1, HIDDEN), random(HIDDEN)
    place = (group, world, rank, EXPERTS)
    sent = npu_moe_distribute_dispatch_v2(x, chosen, *place)
    rows = sent[0], chosen, sent[2], sent[4], weights
    outputs = npu_moe_distribute_combine_add_rms_norm(*rows, residual, gamma, *place, norm_eps=EPS)
    acc = npu_moe_distribute_combine_v2(rows[0].float(), *rows[1:], *place)
    return [*outputs, (acc.unsqueeze(1) + residual.float()).bfloat16()]


def late(group: str, rank: int, world: int) -> tuple[float, float]:
    """When rank 1, held up, came to a barrier, and when this rank had left it; one clock for both."""
    _npu_distribute_barrier(torch.ones(1).npu(), group, world)
    if rank == 1:
        time.sleep(0.5)
    arrived = time.monotonic()
    passed = _npu_distribute_barrier(torch.full((2,), float(rank)).npu(), group, world)
    torch_npu.npu.synchronize()
    assert passed.device.type == "npu" and passed.cpu().tolist() == [rank, rank]
    return arrived, time.monotonic()


def main(folder: str) -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch_npu.npu.set_device(rank)
    dist.init_process_group("hccl")
    group = ascend_moe.comm_name()
    found = layer(rank, world, group, f"npu:{rank}")
    gloo = dist.new_group(backend="gloo")
    expected = layer(rank, world, ascend_moe.comm_name(gloo), "cpu")
    arrived, left = late(group, rank, world)
    ascend_moe.check()
    report: dict[str, Any] = {
        "devices": sorted({str(one.device) for one in found}),
        "equal": [torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True)],
        "sum": torch.equal(found[2], found[3]),
        "rows": float(found[0].float().abs().sum()),
        "arrived": arrived,
        "left": left,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(report), "utf-8")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
