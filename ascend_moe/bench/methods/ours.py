"""Our ops by algorithm: torch.ops.ascend_moe.npu_moe_distribute_*_v2 with comm_alg."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import ascend_moe
from ascend_moe import ops
from ascend_moe.bench.cases import Case
from ascend_moe.bench.data import Inputs
from ascend_moe.bench.methods.base import OURS, Arrived, Method, Place
from ascend_moe.native import library


class _Op(Method):
    kind = OURS
    comm_alg: str

    @classmethod
    def missing(cls, place: Place) -> str:
        known = library.lib().am_comm_algorithm(cls.comm_alg.encode()) >= 0
        return "" if known else f"the ops have no comm_alg {cls.comm_alg!r}"

    def __init__(self, case: Case, place: Place, most_rows: int, rows_out: Tensor) -> None:
        super().__init__(case, place, most_rows, rows_out)
        self._common: dict[str, Any] = {
            "group_ep": place.group_ep,
            "ep_world_size": place.world,
            "ep_rank_id": place.rank,
            "moe_expert_num": case.experts,
            "comm_alg": self.comm_alg,
        }

    def dispatch(self, one: Inputs) -> Arrived:
        rows, scales, assist, nums, counts, tp_counts, _ = ops.npu_moe_distribute_dispatch_v2(
            one.x, one.expert_ids, quant_mode=self.case.quant_mode, **self._common
        )
        handle = (assist, counts, tp_counts)
        return Arrived(rows, scales if self.case.quant_mode else None, nums, handle)

    def combine(self, rows: Tensor, one: Inputs, arrived: Arrived) -> Tensor:
        assist, counts, tp_counts = arrived.handle
        out: Tensor = ops.npu_moe_distribute_combine_v2(
            rows,
            one.expert_ids,
            assist,
            counts,
            one.expert_scales,
            tp_send_counts=tp_counts,
            **self._common,
        )
        return out


class Window(_Op):
    name = "window"
    comm_alg = "window"


class Direct(_Op):
    name = "direct"
    comm_alg = "direct"


class DirectZeroCopy(Direct):
    """The experts write where combine reads: a tensor of this rank's window, taken afresh every time."""

    name = "direct-zero-copy"

    def expert_output(self, arrived: Arrived) -> Tensor:
        return ascend_moe.window_empty(
            (self.most_rows, self.case.hidden),
            dtype=self.case.torch_dtype,
            group_ep=self.place.group_ep,
            ep_world_size=self.place.world,
            ep_rank_id=self.place.rank,
        )
