"""Rows of several columns as the ops' bf16 rows: bf16 values, or fp8 values with their scales, ids and weights.

The ops copy rows without interpreting them, so that a bf16 row can contain the bytes of any columns.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_moe.dispatchers.rows import pack as pack_rows
from ascend_moe.dispatchers.rows import unpack
from ascend_moe.errors import RoutingOverflow, need, need_dims, need_dtype, need_shape
from ascend_moe.experts.quant import FP8, FP8_GROUP, cast_fp8, ue8m0
from ascend_moe.permute import padded_places

FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # dtypes of normal mode; DeepEP has bf16 only
PACKED = 4  # ue8m0 scales in an int32
QUANT_MODES = {"none": 0, "bf16": 0, "int8": 2}  # of the ops
FP8_ROWS = "pertoken_fp8_e4m3"  # cast before the op


def pack(*columns: Tensor) -> Tensor:
    """Pack the bytes of ``(n, *)`` tensors of any dtype side by side into ``(n, m)`` bf16, padded to 32 bytes a row."""
    return pack_rows(*columns, dtype=torch.bfloat16, unit=32)


def numbers_of(counts: Tensor) -> Tensor:
    """Return rows per local expert, or with MOE_EXPERT_TOKEN_NUMS_TYPE=0 their running sums, as sgl-kernel-npu does."""
    return counts.cumsum(0) if os.environ.get("MOE_EXPERT_TOKEN_NUMS_TYPE", "").strip() == "0" else counts


def places_of(ends: Tensor, rows: int, width: int, block: str, rule: str) -> Tensor:
    """Return each row's position where every block of rows is padded to ``width`` rows, as `padded_places` does.

    ``ends``: running sums of the blocks' rows. ``block``, ``rule``: what a block is, and why it has this width, for the
    error. On the CPU RoutingOverflow is raised if a block has more rows; on an NPU they overlap the next block.
    """
    longest = int(ends.diff(prepend=ends.new_zeros(1)).max()) if ends.device.type == "cpu" and rows else 0
    if longest > width:
        raise RoutingOverflow(
            f"low_latency_dispatch: {block} has {longest} rows, but the result has room for {width}, {rule}. A token "
            "has the same expert more than once: make the ids of a token differ"
        )
    return padded_places(ends, rows, width)


def check_x(x: Tensor | tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return [float rows], or [fp8 rows, their scales] of a tuple x. Raises ArgumentError if a tensor does not fit."""
    if isinstance(x, Tensor):
        need_dims("x", x, 2, dtypes=FLOATS)
        return [x]
    need(len(x) == 2, "x", "has {} tensors; need two: rows and their scales", len(x))
    codes, scales = x
    need_dims("x", codes, 2, dtypes=(FP8,))
    need_dtype("x", scales, torch.float32)
    need(codes.shape[1] % FP8_GROUP == 0, "x", "has {} columns; need a multiple of {}", codes.shape[1], FP8_GROUP)
    need_shape("x", scales, (codes.shape[0], codes.shape[1] // FP8_GROUP))
    return [codes, scales]


@dataclass(frozen=True)
class Format:
    """Format of rows in low-latency mode: unquantized, or with fp8 e4m3 codes and a scale per 128 values.

    round_scale: scales are powers of two; use_ue8m0: only their exponents are sent, four per int32 of the result.
    """

    fp8: bool
    round_scale: bool
    use_ue8m0: bool

    def check(self, hidden: int) -> None:
        """Raise ArgumentError unless the options fit each other and ``hidden``."""
        need(not self.round_scale or self.fp8, "round_scale", "is True without use_fp8: pass False, or use_fp8=True")
        rule = "is True without round_scale, but its scales are powers of two: pass round_scale=True"
        need(not self.use_ue8m0 or self.round_scale, "use_ue8m0", rule)
        rule = "has {} columns; with use_ue8m0 they must be a multiple of {}"
        need(not self.use_ue8m0 or hidden % (PACKED * FP8_GROUP) == 0, "x", rule, hidden, PACKED * FP8_GROUP)

    def pack(self, x: Tensor) -> Tensor:
        """Return the rows of x ``(T, H)`` as dispatch sends them: x itself, or codes and scales packed into bf16."""
        if not self.fp8:
            return x.contiguous()
        codes, scales = cast_fp8(x, self.round_scale)
        return pack(codes, ue8m0(scales) if self.use_ue8m0 else scales)

    def unpack(self, rows: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
        """Undo `pack` of fp8 rows: return the codes ``(n, hidden)`` as uint8, and the scales in the result's dtype."""
        sent = torch.uint8 if self.use_ue8m0 else torch.float32
        codes, scales = unpack(rows, (hidden, torch.uint8), (hidden // FP8_GROUP, sent))
        return codes, scales.view(self.scales)

    @property
    def scales(self) -> torch.dtype:
        """Dtype of the result's scales: ``(.., H / 128)`` float32 or ``(.., H / 512)`` int32."""
        return torch.int32 if self.use_ue8m0 else torch.float32

    def columns(self, hidden: int) -> int:
        """Return the number of elements that the scales of a row of ``hidden`` values have in the result."""
        return hidden // FP8_GROUP // (PACKED if self.use_ue8m0 else 1)
