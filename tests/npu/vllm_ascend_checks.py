"""vllm-ascend's operators, captured and replayed routing and int4 experts on the virtual NPU: as on the CPU.

They run beside an unmodified torch_npu (`npu_runs`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu  # noqa: F401  torch.npu
from npu_runs import raises, run_checks
from torch import Tensor
from torch.utils import _pytree as pytree

from ascend_moe.errors import LibraryError
from ascend_moe.experts import grouped_mlp, npu_dynamic_quant, quantize_weight_int4
from ascend_moe.experts.int4 import bits_of
from ascend_moe.interop import vllm_ascend
from ascend_moe.interop.fused_moe import select_experts
from ascend_moe.routers import RouteCapture, RouterReplay
from ascend_moe.shim import torch_npu as shim

vllm_ascend.register("0.23.0")
C: Any = torch.ops._C_ascend
T, E, K, H, F = 6, 8, 2, 64, 32


def codes(*size: int) -> torch.Tensor:
    return torch.randint(-127, 128, size, dtype=torch.int8)


def check_operators() -> None:
    torch.manual_seed(0)
    logits, table = torch.randn(T, E), torch.stack([torch.randperm(E)[:K] for _ in range(4)]).int()
    rows, weight, scale, row_scale = codes(9, H), codes(3, H, 2 * F), torch.rand(3, 2 * F), torch.rand(9)
    sums, counts = torch.tensor([4, 4, 9]), torch.tensor([4, 0, 5])
    ids = table[:1].expand(T, K).contiguous()
    routed = {"expert_num": E, "active_num": T * K, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    routed |= {"quant_mode": -1}  # the default of this release is static quantization
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("moe_gating_top_k", (logits, K, 1, 1, 1, 0, 1, False, 2.5, 1e-20), {}),
        ("moe_gating_top_k", (logits, K, 1, 1, 1, 1, 0, False, 1.0, 1e-20), {}),
        ("moe_gating_top_k_hash", (logits, K, None, torch.tensor([0, 3, 1, 1, 2, 0]), table), {"norm_type": 2}),
        (
            "npu_dequant_swiglu_quant",
            (rows.int(),),
            {"weight_scale": scale[0, :H], "activation_scale": row_scale, "quant_mode": 1, "swiglu_mode": 1},
        ),
        ("grouped_matmul_swiglu_quant_weight_nz", (rows, weight, scale, row_scale, sums), {}),
        ("grouped_matmul_swiglu_quant_weight_nz", (rows, weight, scale, row_scale, sums), {"swiglu_limit": 0.5}),
        ("grouped_matmul_swiglu_quant_weight_nz_tensor_list", (rows, [*weight], [*scale], row_scale, sums), {}),
        ("grouped_matmul_swiglu_quant_v2", (rows, [weight], [scale], row_scale, counts), {"group_list_type": 1}),
        ("npu_moe_init_routing_custom", (torch.randn(T, H), ids), {**routed, "active_expert_range": [0, E]}),
    ]
    for name, args, kwargs in calls:
        expected = getattr(C, name)(*args, **kwargs)
        placed, named = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.npu(), (args, kwargs))
        found = getattr(C, name)(*placed, **named)
        assert {tensor.device.type for tensor in found} == {"npu"}, name
        for one, other in list(zip(found, expected, strict=True))[:2]:
            torch.testing.assert_close(one.cpu(), other, msg=lambda text, name=name: f"{name}: {text}")


def check_the_shim_is_refused() -> None:
    with raises(r"torch_npu is installed.*patch_torch_npu", LibraryError):
        shim.install()


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
    made = [quantize_weight_int4(torch.randn(4, *s, generator=generator) / 6, 8) for s in ((H, F), (F // 2, H))]
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
