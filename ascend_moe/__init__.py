"""MoE expert parallelism for Ascend: dispatch and combine as AscendC kernels, on NPUs and on a CPU twin."""

from __future__ import annotations

from .comm import LocalCluster, close, comm_name
from .errors import AscendMoeError
from .layer import MoEConfig, MoELayer
from .ops import (
    npu_moe_distribute_combine,
    npu_moe_distribute_combine_v2,
    npu_moe_distribute_dispatch,
    npu_moe_distribute_dispatch_v2,
)

__all__ = [
    "AscendMoeError",
    "LocalCluster",
    "MoEConfig",
    "MoELayer",
    "close",
    "comm_name",
    "npu_moe_distribute_combine",
    "npu_moe_distribute_combine_v2",
    "npu_moe_distribute_dispatch",
    "npu_moe_distribute_dispatch_v2",
]
