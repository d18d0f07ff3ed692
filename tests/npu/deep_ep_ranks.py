"""A rank of DeepEP's Buffer on HCCL of the virtual NPU: what the tests of the CPU's buffers say, bit for bit."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deep_ep_buffers import Case, empty_stack, finish, low, low_sum, send
from npu_rank import RANK, WORLD
from npu_runs import run_checks

from ascend_moe.interop import deep_ep

CASES = [Case(WORLD, local=2, kind=kind) for kind in ("-1", "empty rank")]
THERE = [(case, replace(case, device="npu")) for case in CASES]


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.device.type == "npu" and got.dtype == expected.dtype
    assert torch.equal(got.cpu(), expected), (got.cpu(), expected)


def check_normal_mode() -> None:
    buffer = deep_ep.Buffer(dist.group.WORLD)
    for case, there in THERE:
        x, ids, weights = case.x(RANK), case.ids(RANK), case.weights(RANK)
        rows = empty_stack([case.x(source)[token] for source, token in case.copies(RANK)], x)
        before = deep_ep.Buffer.capture()
        got, local_ids, local_weights, counts, handle, event = send(
            there, RANK, buffer, previous_event=before, async_finish=True
        )
        event.current_stream_wait()
        same(got, rows)
        expert = [len(case.rows_of(RANK * case.local + each)) for each in range(case.local)]
        assert counts == expert and [int((local_ids == each).sum()) for each in range(case.local)] == expert
        same(buffer.dispatch(there.x(RANK), handle)[0], rows)
        home, summed, _ = buffer.combine(got, handle, local_weights, bias=torch.ones(x.shape).bfloat16().npu())
        same(home, (case.sent_rows(RANK) + 1).bfloat16())
        same(summed, torch.where(ids >= 0, weights, 0))
        worst = WORLD * case.most
        padded = send(there, RANK, buffer, num_worst_tokens=worst)
        assert padded[0].shape[0] == worst and padded[3] == [] and int((padded[1] >= 0).sum()) == sum(expert)
        same(padded[0][: len(rows)], rows)
        same(buffer.combine(padded[0], padded[4])[0], case.sent_rows(RANK).bfloat16())


def check_low_latency() -> None:
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    for case, there in THERE:
        stats = torch.zeros(case.local, dtype=torch.int32).npu()
        for fp8 in (False, True):
            given = {"cumulative_local_expert_recv_stats": stats, "use_fp8": fp8, "return_recv_hook": True}
            sent = low(there, RANK, buffer, **given)
            sent[-1]()
            values = sent[0]
            if fp8:
                codes, scales = (each.cpu() for each in values)
                blocks = codes.float().view(case.local, -1, case.hidden // 128, 128) * scales.unsqueeze(3)
                values = blocks.view(case.local, -1, case.hidden).bfloat16().npu()
            home, want = finish(there, RANK, buffer, sent, x=values), low_sum(case, RANK)
            if fp8:
                torch.testing.assert_close(home.cpu().float(), want.float(), rtol=0.1, atol=0.3)
            else:
                same(home, want)
        assert torch.equal(stats, 2 * sent[1])
    costs = torch.zeros(WORLD, WORLD, dtype=torch.int64).npu()
    dist.barrier()
    time.sleep(0.1 * (RANK == 1))
    low(there, RANK, buffer, dispatch_wait_recv_cost_stats=costs)
    waited = costs.cpu()
    assert RANK == 1 or (int(waited[RANK].argmax()) == 1 and int(waited[RANK, 1]) > 5e4), waited
    assert int(waited.sum()) == int(waited[RANK].sum()) and bool((waited >= 0).all()), waited


def check_the_flavour_of_sgl_kernel_npu() -> None:
    buffer: Any = deep_ep.AscendBuffer(dist.group.WORLD)
    for case, there in THERE:
        rows, _, _, _, handle, _ = send(there, RANK, buffer)
        same(buffer.combine(rows, handle)[0], low_sum(case, RANK))
        same(finish(there, RANK, buffer, low(there, RANK, buffer)), low_sum(case, RANK))


if __name__ == "__main__":
    run_checks()
    dist.destroy_process_group()
