"""Routing that is captured and replayed, and int4 experts, on the virtual NPU: as on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch_npu  # type: ignore[import-not-found, unused-ignore] # noqa: F401
from npu_runs import run_checks

from ascend_moe.experts import grouped_mlp, npu_dynamic_quant, quantize_weight_int4
from ascend_moe.experts.int4 import bits_of
from ascend_moe.interop.fused_moe import select_experts
from ascend_moe.routers import RouteCapture, RouterReplay

Tensor = torch.Tensor
NPU = torch.device("npu")
T, H, E, K = 6, 32, 8, 2


def check_each_replay_of_a_graph_is_a_step_of_the_capture() -> None:
    """The host reads nothing: the ring's place is counted on the device."""
    graph, logits = torch.npu.NPUGraph(), torch.zeros(T, E).npu()
    capture = RouteCapture(T, K, steps=3).npu()
    replay = RouterReplay(register=False)
    replay.set_static_buffer(torch.zeros(T, K, dtype=torch.int64).npu())

    def route() -> tuple[Tensor, Tensor]:
        weights, ids = select_experts(logits, logits, K, False, True, capture_fn=capture)
        replay.record_indices(ids)
        return weights, ids

    route()
    capture.clear()
    with torch.npu.graph(graph):
        weights, ids = route()
    assert int(capture.seen) == 0
    wanted = []
    for seed in range(4):
        values = torch.randn(T, E, generator=torch.Generator().manual_seed(seed))
        logits.copy_(values)
        graph.replay()
        chosen = torch.topk(values, K).indices
        wanted.append(chosen.short())
        assert torch.equal(ids.cpu().long(), chosen) and torch.equal(replay.static_buffer.cpu(), chosen)
        torch.testing.assert_close(weights.cpu(), torch.softmax(values.gather(1, chosen), -1))
    assert int(capture.seen) == 4
    assert all(torch.equal(kept.cpu(), step) for kept, step in zip(capture.last(), wanted[1:], strict=True))


def check_ids_that_are_replayed_in_a_graph_are_those_of_now() -> None:
    graph, logits = torch.npu.NPUGraph(), torch.randn(T, E, generator=torch.Generator().manual_seed(2))
    given = torch.zeros(T, K, dtype=torch.int64).npu()
    moved = logits.npu()
    select_experts(moved, moved, K, False, True, ids=given)
    with torch.npu.graph(graph):
        weights, ids = select_experts(moved, moved, K, False, True, ids=given)
    for seed in range(3):
        chosen = torch.rand(T, E, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :K]
        given.copy_(chosen)
        graph.replay()
        assert torch.equal(ids.cpu().long(), chosen)
        torch.testing.assert_close(weights.cpu(), torch.softmax(logits.gather(1, chosen), -1))


def check_int4_experts_run_as_on_the_cpu_with_the_intermediate_in_bf16() -> None:
    generator = torch.Generator().manual_seed(5)
    x, counts = torch.randn(7, H, generator=generator), torch.tensor([3, 0, 2, 1])
    made = [quantize_weight_int4(torch.randn(4, *s, generator=generator) / 6, 8) for s in ((H, 32), (16, H))]
    codes, scales = npu_dynamic_quant(x)

    def run(device: str) -> Tensor:
        on_npu = device == "npu"
        call: dict[str, Any] = {"dynamic_scales": scales.to(device), "output_dtype": torch.bfloat16}
        for name, (_, scale, correction) in zip(("gate_up", "down"), made, strict=True):
            call[f"w_{name}_scale"] = (bits_of(scale) if on_npu else scale).to(device)
            call[f"{name}_bias"] = correction.to(device)
        return grouped_mlp(codes.to(device), *(words.to(device) for words, _, _ in made), counts.to(device), **call)

    wanted = run("cpu")[:6]
    gap = run("npu").cpu()[:6].float() - wanted.float()
    assert float(gap.norm()) < 0.02 * float(wanted.float().norm()) and bool((wanted != 0).all())


if __name__ == "__main__":
    run_checks()
