"""All-gather to dispatch, reduce-scatter to combine: no uneven exchange, W times the traffic.

Every rank sees all tokens, takes the rows of its experts, sums its part of every token in fp32, and the
parts are summed on the way back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_moe.bench.data import Inputs
from ascend_moe.bench.methods.base import Arrived, Method
from ascend_moe.dispatchers import rows as row_ops


def _collective(new: str, old: str) -> Any:
    """torch renames its collectives of one tensor: the new name where it is there."""
    return getattr(dist, new, None) or getattr(dist, old)


class GlooAllGather(Method):
    name = "gloo-ag-rs"

    def dispatch(self, one: Inputs) -> Arrived:
        case = self.case
        words = self._gather(row_ops.payload(one.x, one.expert_ids, None, None, case.quant_mode))
        ids = self._gather(one.expert_ids).reshape(-1)
        weights = self._gather(one.expert_scales).reshape(-1)
        first = self.place.rank * case.local_experts
        local = ids - first
        mine = (local >= 0) & (local < case.local_experts)
        key = torch.where(mine, local, case.local_experts)
        counts = torch.bincount(key, minlength=case.local_experts + 1)[: case.local_experts]
        pairs = torch.argsort(key, stable=True)[: int(counts.sum())]
        tokens = pairs // case.topk
        picked = words.index_select(0, tokens)
        rows, scales = row_ops.open_rows(picked, case.hidden, case.torch_dtype, case.quant_mode)
        return Arrived(rows, scales if case.quant_mode else None, counts, (tokens, weights[pairs]))

    def combine(self, rows: Tensor, one: Inputs, arrived: Arrived) -> Tensor:
        tokens, weights = arrived.handle
        case = self.case
        part = torch.zeros(self.place.world * case.batch, case.hidden)
        part.index_add_(0, tokens, rows[: tokens.numel()].float() * weights[:, None])
        total = torch.empty(case.batch, case.hidden)
        _collective("reduce_scatter_single", "reduce_scatter_tensor")(total, part)
        return total.to(rows.dtype)

    def _gather(self, given: Tensor) -> Tensor:
        out = given.new_empty(self.place.world * given.size(0), given.size(1))
        _collective("all_gather_single", "all_gather_into_tensor")(out, given)
        return out
