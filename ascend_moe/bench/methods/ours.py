"""Our ops by algorithm: npu_moe_distribute_dispatch_v2 and _combine_v2 with comm_alg."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import ascend_moe
from ascend_moe.bench.cases import Inputs
from ascend_moe.bench.methods.base import OURS, Arrived, Method


class Window(Method):
    name, kind, comm_alg = "window", OURS, "window"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._common = {**self.place.arguments(self.case.experts), "comm_alg": self.comm_alg}

    def dispatch(self, inputs: Inputs) -> Arrived:
        rows, scales, assist, nums, counts, tp_counts, _ = ascend_moe.npu_moe_distribute_dispatch_v2(
            inputs.x, inputs.expert_ids, quant_mode=self.case.quant_mode, **self._common
        )
        return Arrived(rows, scales if self.case.quant_mode else None, nums, (assist, counts, tp_counts))

    def combine(self, rows: Tensor, inputs: Inputs, arrived: Arrived) -> Tensor:
        assist, counts, tp_counts = arrived.handle
        out: Tensor = ascend_moe.npu_moe_distribute_combine_v2(
            rows,
            inputs.expert_ids,
            assist,
            counts,
            inputs.expert_scales,
            tp_send_counts=tp_counts,
            **self._common,
        )
        return out


class Direct(Window):
    name = comm_alg = "direct"


class DirectZeroCopy(Direct):
    """The experts write where combine reads: a tensor of this rank's window, taken afresh every time."""

    name = "direct-zero-copy"

    def expert_output(self) -> Tensor:
        place, shape = self.place, (self.case.most_rows, self.case.hidden)
        return ascend_moe.window_empty(
            shape,
            dtype=self.case.torch_dtype,
            group_ep=place.group_ep,
            ep_world_size=place.world,
            ep_rank_id=place.rank,
        )
