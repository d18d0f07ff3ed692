"""How rows of low latency travel: as they are, or as e4m3 codes with scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ascend_moe.dispatchers.rows import unpack
from ascend_moe.errors import need
from ascend_moe.interop.deep_ep.rows import GROUP, PACKED, cast_fp8, pack, ue8m0


@dataclass(frozen=True)
class Format:
    """How rows travel: as they are, or as e4m3 codes with a scale for 128 values.

    round_scale: scales are powers of two; use_ue8m0: and their exponents travel, four in an int32 of the result.
    """

    fp8: bool
    round_scale: bool
    use_ue8m0: bool

    def check(self, hidden: int) -> None:
        """Raises ArgumentError where one asks for another, or for rows of another width."""
        need(not self.round_scale or self.fp8, "round_scale", "is True without use_fp8: pass False, or use_fp8=True")
        rule = "is True without round_scale: its scales are powers of two, pass round_scale=True"
        need(not self.use_ue8m0 or self.round_scale, "use_ue8m0", rule)
        rule = "has rows of {}; with use_ue8m0 they must be a multiple of {}, for four scales fill an int32"
        need(not self.use_ue8m0 or hidden % (PACKED * GROUP) == 0, "x", rule, hidden, PACKED * GROUP)

    def pack(self, x: Tensor) -> Tensor:
        """Rows of the op."""
        if not self.fp8:
            return x.contiguous()
        codes, scales = cast_fp8(x, self.round_scale)
        return pack(codes, ue8m0(scales) if self.use_ue8m0 else scales)

    def unpack(self, rows: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
        """Codes as uint8, and scales as the result has them, of rows in fp8."""
        codes, scales = unpack(rows, (hidden, torch.uint8), (hidden // GROUP, self._travelling))
        return codes, scales.view(self.scales)

    @property
    def _travelling(self) -> torch.dtype:
        return torch.uint8 if self.use_ue8m0 else torch.float32

    @property
    def scales(self) -> torch.dtype:
        """Returns the dtype of the result's scales: ``(.., H / 128)`` float32 or ``(.., H / 512)`` int32."""
        return torch.int32 if self.use_ue8m0 else torch.float32

    def columns(self, hidden: int) -> int:
        """Scales of a row in the result."""
        return hidden // GROUP // (PACKED if self.use_ue8m0 else 1)
