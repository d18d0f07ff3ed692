"""A rank of DeepEP's Buffer on HCCL of the virtual NPU: the same as on the CPU, bit for bit."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  the device
from npu_runs import run_checks

from ascend_moe.interop import deep_ep

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOCAL, K, H = 2, 3, 256
E = WORLD * LOCAL


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and weights of a rank, on the CPU; no tokens on rank 1."""
    generator = torch.Generator().manual_seed(rank)
    tokens = 0 if rank == 1 else 4 + rank
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K]
    ids[:1, 0] = -1
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    return x, ids, torch.rand(tokens, K, generator=generator)


def on_npu(*tensors: torch.Tensor) -> Any:
    return tuple(tensor.npu() for tensor in tensors)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.device.type == "npu" and got.dtype == expected.dtype
    assert torch.equal(got.cpu(), expected), (got.cpu(), expected)


def weighted(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over k of weight * x, in combine's order."""
    total = torch.zeros(x.shape)
    for k in range(K):
        total = total + torch.where(ids[:, k : k + 1] >= 0, x.float() * weights[:, k : k + 1], 0)
    return total.bfloat16()


def send(buffer: deep_ep.Buffer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **more: Any) -> Any:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, E)
    return buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, ids, weights, **more)


def check_normal_mode() -> None:
    buffer = deep_ep.Buffer(dist.group.WORLD)
    x, ids, weights = inputs(RANK)
    hits = [{int(id) // LOCAL for id in row if id >= 0} for row in ids]
    sources = [(source, *inputs(source)) for source in range(WORLD)]
    rows = [
        x[token]
        for _, x, ids, _ in sources
        for token, row in enumerate(ids.tolist())
        if any(id // LOCAL == RANK for id in row if id >= 0)
    ]
    before = deep_ep.Buffer.capture()
    got, local_ids, local_weights, counts, handle, event = send(
        buffer, *on_npu(x, ids, weights), previous_event=before, async_finish=True
    )
    event.current_stream_wait()
    same(got, torch.stack(rows))
    expert = [sum(int((ids == RANK * LOCAL + each).sum()) for _, _, ids, _ in sources) for each in range(LOCAL)]
    assert counts == expert and [int((local_ids == each).sum()) for each in range(LOCAL)] == expert
    same(buffer.dispatch(x.npu(), handle)[0], torch.stack(rows))
    bias = torch.ones(x.shape).bfloat16()
    home, summed, _ = buffer.combine(got, handle, local_weights, bias=bias.npu())
    number = torch.tensor([len(hit) for hit in hits]).view(-1, 1)
    same(home, (x.float() * number + 1).bfloat16())
    same(summed, torch.where(ids >= 0, weights, 0))
    worst = WORLD * (4 + WORLD)
    padded = send(buffer, *on_npu(x, ids, weights), num_worst_tokens=worst)
    assert padded[0].shape[0] == worst and padded[3] == [] and int((padded[1] >= 0).sum()) == sum(expert)
    same(padded[0][: len(rows)], torch.stack(rows))
    same(buffer.combine(padded[0], padded[4])[0], (x.float() * number).bfloat16())


def check_low_latency() -> None:
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    x, ids, weights = inputs(RANK)
    on = on_npu(x, ids, weights)
    stats = torch.zeros(LOCAL, dtype=torch.int32).npu()
    for fp8 in (False, True):
        rows, count, handle, _, hook = buffer.low_latency_dispatch(
            *on[:2], 8, E, stats, use_fp8=fp8, return_recv_hook=True
        )
        ones = torch.ones(4, 4).npu()
        assert int((ones @ ones).sum()) == 64
        hook()
        values = rows
        if fp8:
            codes, scales = (each.cpu() for each in rows)
            values = (codes.float().view(LOCAL, -1, H // 128, 128) * scales.unsqueeze(3)).view(LOCAL, -1, H)
            values = values.bfloat16().npu()
        home, _, hook = buffer.low_latency_combine(values, *on[1:], handle, return_recv_hook=True)
        hook()
        if fp8:
            torch.testing.assert_close(home.cpu().float(), weighted(x, ids, weights).float(), rtol=0.1, atol=0.3)
        else:
            same(home, weighted(x, ids, weights))
    assert torch.equal(stats, 2 * count)
    costs = torch.zeros(WORLD, WORLD, dtype=torch.int64).npu()
    dist.barrier()
    time.sleep(0.1 * (RANK == 1))
    buffer.low_latency_dispatch(*on[:2], 8, E, dispatch_wait_recv_cost_stats=costs)
    waited = costs.cpu()
    assert RANK == 1 or (int(waited[RANK].argmax()) == 1 and int(waited[RANK, 1]) > 5e4), waited
    assert int(waited.sum()) == int(waited[RANK].sum()) and bool((waited >= 0).all()), waited


def check_the_flavour_of_sgl_kernel_npu() -> None:
    x, ids, weights = inputs(RANK)
    on = on_npu(x, ids, weights)
    buffer: Any = deep_ep.AscendBuffer(dist.group.WORLD)
    rows, _, _, _, handle, _ = send(buffer, *on)
    same(buffer.combine(rows, handle)[0], weighted(x, ids, weights))
    rows, _, handle, _, _ = buffer.low_latency_dispatch(*on[:2], 8, E, use_fp8=False)
    same(buffer.low_latency_combine(rows, *on[1:], handle)[0], weighted(x, ids, weights))


if __name__ == "__main__":
    torch.npu.set_device(RANK)
    dist.init_process_group("hccl", init_method=f"file://{os.environ['STORE']}", rank=RANK, world_size=WORLD)
    run_checks()
    dist.destroy_process_group()
