"""The public names of ``ascend_moe``. Importing this module registers every operator of torch.ops.ascend_moe."""

from __future__ import annotations

from . import layer_ops as layer_ops
from . import torch_npu_ops as _torch_npu_ops  # noqa: F401  the other operators of torch.ops.ascend_moe
from .comm import LocalCluster as LocalCluster
from .comm import algorithm_of as algorithm_of
from .comm import close as close
from .comm import comm_name as comm_name
from .comm import window_empty as window_empty
from .comm.membership import agree as agree
from .comm.membership import shrink as shrink
from .comparison import compare as compare
from .errors import AscendMoeError as AscendMoeError
from .experts.rank_experts import exclude_experts as exclude_experts
from .layer import MoELayer as MoELayer
from .moe_config import MoEConfig as MoEConfig
from .npu import patch_torch_npu as patch_torch_npu
from .ops import npu_moe_distribute_combine as npu_moe_distribute_combine
from .ops import npu_moe_distribute_combine_v2 as npu_moe_distribute_combine_v2
from .ops import npu_moe_distribute_dispatch as npu_moe_distribute_dispatch
from .ops import npu_moe_distribute_dispatch_v2 as npu_moe_distribute_dispatch_v2
from .ops.autograd import dequantize_rows as dequantize_rows
from .ops.autograd import set_int8_gradient as set_int8_gradient
from .ops.begin import begin_combine as begin_combine
from .ops.begin import begin_dispatch as begin_dispatch
from .ops.npu_communicator import check as check
from .ops.trace import trace as trace
