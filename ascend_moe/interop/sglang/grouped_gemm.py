"""SGLang's grouped matrix product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ascend_moe.errors import need, need_shape, with_typed_errors
from ascend_moe.experts import npu_grouped_matmul
from ascend_moe.interop.sglang.steps import INDEX_DTYPES


class GroupedGemmRunner(nn.Module):
    """Grouped matrix product: every segment of rows times its expert's weight.

    Args:
        device, use_flashinfer: have no effect.

    Source: SGLang ``GroupedGemmRunner``.
    """

    def __init__(self, device: torch.device | str | None = None, use_flashinfer: bool = False) -> None:
        super().__init__()

    @with_typed_errors
    def forward(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        batch_size: int,
        weight_column_major: bool = True,
        seg_indptr: Tensor | None = None,
        weight_indices: Tensor | None = None,
        use_fp8_w8a8: bool = False,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
        block_shape: list[int] | None = None,
    ) -> Tensor:
        """Return ``c[seg] = a[seg] @ b[i].T``, summed in float32, for each segment; other rows of c are not changed.

        Args:
            a: ``(M, K)`` bf16, fp16 or fp32; with use_fp8_w8a8 float8_e4m3fn.
            b: ``(E, N, K)`` of a's type.
            c: ``(M, N)`` float, to write to; without use_fp8_w8a8 of a's type.
            batch_size: S, segments.
            weight_column_major: must be True.
            seg_indptr: ``(S + 1,)`` int64: segment s has the rows ``seg_indptr[s]`` to ``seg_indptr[s + 1] - 1``
                of a. Read on the host.
            weight_indices: ``(S,)`` int, the weight of each segment; None: segment s has weight s.
            use_fp8_w8a8: multiply by ``scale_a[i] * scale_b[i]``.
            scale_a, scale_b: ``(E,)`` float32, with use_fp8_w8a8 only.
            block_shape: must be None: weights have one scale each.

        Returns:
            c.

        Raises:
            ArgumentError: an argument breaks one of these rules.
        """
        need(weight_column_major, "weight_column_major", "is False; weights are (E, N, K)")
        need(block_shape is None, "block_shape", "is {}; weights have one scale per expert: pass None", block_shape)
        need(seg_indptr is not None, "seg_indptr", "is missing")
        assert seg_indptr is not None
        need_shape("seg_indptr", seg_indptr, (batch_size + 1,), dtypes=INDEX_DTYPES)
        if weight_indices is not None:
            need_shape("weight_indices", weight_indices, (batch_size,), dtypes=INDEX_DTYPES)
        need_shape("c", c, (a.shape[0], b.shape[1]))
        first, last = int(seg_indptr[0]), int(seg_indptr[-1])
        rule = "covers rows {} to {} of {}"
        need(0 <= first <= last <= a.shape[0], "seg_indptr", rule, first, last, a.shape[0])
        scales = _gemm_scales(use_fp8_w8a8, scale_a, scale_b, b.shape[0])
        indices = torch.arange(batch_size, device=b.device) if weight_indices is None else weight_indices.long()
        rows, counts = a[first:last], seg_indptr.diff().long()
        if scales is None:
            weights = b if weight_indices is None and batch_size == b.shape[0] else b[indices]
            c[first:last] = _matmul(rows, [weights.transpose(1, 2)], counts)
            return c
        chosen = [b[index].float().t() for index in indices.tolist()]
        each = scales[indices].repeat_interleave(counts)
        c[first:last] = (_matmul(rows.float(), chosen, counts) * each[:, None]).to(c.dtype)
        return c


def _matmul(rows: Tensor, weights: list[Tensor], counts: Tensor) -> Tensor:
    return npu_grouped_matmul([rows], weights, group_list=counts, group_type=0, group_list_type=1, split_item=2)[0]


def _gemm_scales(fp8: bool, scale_a: Tensor | None, scale_b: Tensor | None, experts: int) -> Tensor | None:
    """Return the product of both scales of each expert."""
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        need((scale is not None) == fp8, name, "is {}; it belongs to fp8", "given" if scale is not None else "missing")
        if scale is not None:
            need_shape(name, scale, (experts,))
    return scale_a * scale_b if scale_a is not None and scale_b is not None else None
