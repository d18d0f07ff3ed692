"""MoE expert parallelism for Ascend: dispatch and combine as AscendC kernels, on NPUs and on a CPU twin."""

from __future__ import annotations

from . import (
    _autoload,  # noqa: F401  first: it settles how torch is imported
    _text,
)
from . import fused as fused
from . import vendor as _ops_vendor  # noqa: F401  the other operators of torch.ops.ascend_moe
from .autograd import dequantize_rows, set_int8_gradient
from .comm import LocalCluster, algorithm_of, close, comm_name, window_empty
from .errors import AscendMoeError
from .layer import MoEConfig, MoELayer
from .npu import patch_torch_npu
from .ops import (
    npu_moe_distribute_combine,
    npu_moe_distribute_combine_v2,
    npu_moe_distribute_dispatch,
    npu_moe_distribute_dispatch_v2,
)
from .ops.begin import begin_combine, begin_dispatch
from .ops.npu_communicator import check
from .timeline.record import trace

__version__ = _text.installed_version("ascend_moe") or "0+source"

__all__ = [
    "AscendMoeError",
    "LocalCluster",
    "MoEConfig",
    "MoELayer",
    "algorithm_of",
    "begin_combine",
    "begin_dispatch",
    "check",
    "close",
    "comm_name",
    "dequantize_rows",
    "npu_moe_distribute_combine",
    "npu_moe_distribute_combine_v2",
    "npu_moe_distribute_dispatch",
    "npu_moe_distribute_dispatch_v2",
    "patch_torch_npu",
    "set_int8_gradient",
    "trace",
    "window_empty",
]
