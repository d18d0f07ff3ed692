"""vllm-ascend's operators on NPU tensors of the virtual NPU, beside an unmodified torch_npu (`npu_runs`)."""

from __future__ import annotations

from typing import Any

import torch
import torch_npu  # noqa: F401  torch.npu
from npu_runs import raises, run_checks
from torch.utils import _pytree as pytree

from ascend_moe.errors import LibraryError
from ascend_moe.interop import vllm_ascend
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


run_checks()
