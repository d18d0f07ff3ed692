"""quant_mode 2: one int8 row and one scale for each (token, k)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def quantise_row(
    row: npt.NDArray[np.float32], smooth: npt.NDArray[np.float32] | None = None
) -> tuple[npt.NDArray[np.int8], np.float32]:
    """Codes (H,) int8 and the dynamic scale of one row (H,) fp32, optionally times smooth (H,) fp32.

    Every step is rounded to fp32: m = max|v|, s = 127 / m, q = rint(v * s), scale = 1 / s (which is not
    m / 127). NaN is ignored in m unless nothing else is there; a NaN product gives code 0; codes saturate.
    A row whose m is 0 has codes 0 and scale 1.
    """
    with np.errstate(all="ignore"):
        v = row if smooth is None else row * smooth
        m = np.float32(np.fmax.reduce(np.abs(v)))
        if m == 0:
            return np.zeros(row.shape, np.int8), np.float32(1)
        s = np.float32(127) / m
        q = np.rint(v * s)
        q = np.clip(np.where(np.isnan(q), np.float32(0), q), -128, 127)
        return q.astype(np.int8), np.float32(1) / s
