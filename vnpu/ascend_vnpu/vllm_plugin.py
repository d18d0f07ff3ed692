"""vLLM plug-in: what vllm-ascend needs in addition to CANN's libraries, in every process on the virtual NPU.

vLLM calls each entry point of the group ``vllm.general_plugins`` at the start of every process.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch import Tensor

from . import triton
from .package import define_vllm_ascend_operators, settings

# Modules with kernels that vLLM calls without Triton, and that may have been imported before the plug-in.
_KERNELS = {"vllm.v1.worker.block_table": ("_compute_slot_mapping_kernel",)}

_LIBRARY: Any = torch.library.Library("vllm", "IMPL")  # type: ignore[no-untyped-call]


def _rotary(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    rotary_dim: int,
    is_neox_style: bool,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``vllm::npu_rotary_embedding``.

    vllm-ascend calls torch_npu's operator of ATB, which uses the table of its first call in all others, and makes the
    first call with a table of no values when it registers the patterns of its graph passes.
    """
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).float().unsqueeze(1).chunk(2, -1)

    def turn(x: Tensor) -> Tensor:
        heads = x.reshape(positions.numel(), -1, head_size)
        rotated, rest = heads.split_with_sizes([rotary_dim, head_size - rotary_dim], -1)
        rotated = rotated.float()
        first, second = rotated.chunk(2, -1) if is_neox_style else (rotated[..., ::2], rotated[..., 1::2])
        parts = first * cos - second * sin, second * cos + first * sin
        turned = torch.cat(parts, -1) if is_neox_style else torch.stack(parts, -1).flatten(-2)
        return torch.cat((turned.to(x.dtype), rest), -1).view(x.shape)

    return turn(query), turn(key)


def _split(qkv: Tensor, q_size: int, kv_size: int) -> tuple[Tensor, Tensor, Tensor]:
    parts = qkv.split_with_sizes([q_size, kv_size, kv_size], -1)
    q, k, v = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return q, k, v


def _qkv_rmsnorm_rope(
    input: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what vllm-ascend's graph passes put in the place of these operators, and vllm-ascend in Triton."""

    def norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        heads = x.view(x.shape[0], -1, head_dim)
        normed: Tensor = torch.ops.npu.npu_rms_norm(heads, weight, eps)[0]
        return (normed if bias is None else normed + bias).view(x.shape)

    q, k, v = _split(input, q_hidden_size, kv_hidden_size)
    q, k = norm(q, q_weight, q_bias), norm(k, k_weight, k_bias)
    return *_rotary(positions, q, k, cos_sin_cache, head_dim, cos_sin_cache.shape[-1], True), v


def _define_operators() -> None:
    """Define the operators of vllm-ascend that are right only where Triton is."""
    importlib.import_module("vllm_ascend.ops.register_custom_ops")
    operator = torch.library.custom_op("vllm::qkv_rmsnorm_rope", _qkv_rmsnorm_rope, mutates_args=())

    @operator.register_fake
    def _(input, cos, positions, q_weight, k_weight, q_size, kv_size, *_):  # type: ignore[no-untyped-def]
        return _split(input, q_size, kv_size)

    _LIBRARY.impl("npu_rotary_embedding", _rotary, "PrivateUse1", allow_override=True)


def load() -> None:
    """On the virtual NPU define vllm-ascend's compiled operators and, without Triton, make its kernels runnable."""
    if not settings.VNPU.is_set():
        return
    # Releases for torch 2.10: torch 2.13's serialization of compiled programs does not know torch_npu's results.
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    define_vllm_ascend_operators()
    importlib.import_module("vllm_ascend.utils").enable_custom_op()  # finds no compiled part; not while torch compiles
    placeholders = importlib.import_module("vllm.triton_utils")
    if placeholders.HAS_TRITON:
        return
    _define_operators()
    triton.install(placeholders.triton, placeholders.tl)
    for name, kernels in _KERNELS.items():
        module = importlib.import_module(name)
        for kernel in kernels:
            function = getattr(module, kernel)
            if not isinstance(function, triton.Kernel):
                setattr(module, kernel, triton.Kernel(function))
