"""How many bytes of rows each rank must move: what the counters of a run are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .dispatch import require_sound
from .records import RankInput, Traffic, routed_pairs


def predict_traffic(
    inputs: Sequence[RankInput],
    *,
    moe_expert_num: int,
    H: int,
    dtype: torch.dtype,
    quant_mode: int,
    contract: str,
    global_bs: int = 0,
) -> list[Traffic]:
    """Bytes a rank for one dispatch and one combine of x (BS, H) in ``dtype``; contract "v1" or "v2".

    A row of dispatch takes its elements rounded up to 32 bytes, 32 bytes more for its scale when quantised
    and 32 more for its triple in V2. Rows that stay on their rank go through its window like all others.
    """
    if contract not in ("v1", "v2") or quant_mode not in (0, 2):
        raise ValueError('contract is "v1" or "v2", quant_mode 0 or 2')
    group = require_sound(inputs, moe_expert_num, global_bs)
    sent = [0] * group.world
    received = [0] * group.world
    for source, one in enumerate(inputs):
        for _, _, expert in routed_pairs(one):
            sent[source] += 1
            received[expert // group.local_experts] += 1
    out_bytes = H * (1 if quant_mode else dtype.itemsize)
    stride = _align32(out_bytes) + (32 if quant_mode else 0) + (32 if contract == "v2" else 0)
    return [
        Traffic(
            dispatch_window_write=sent[rank] * stride,
            dispatch_window_read=received[rank] * stride,
            expand_x_write=received[rank] * out_bytes,
            combine_window_write=received[rank] * _align32(H * dtype.itemsize),
            combine_window_read=sent[rank] * H * dtype.itemsize,
        )
        for rank in range(group.world)
    ]


def _align32(count: int) -> int:
    return (count + 31) // 32 * 32
