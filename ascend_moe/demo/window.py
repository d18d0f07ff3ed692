"""How much window a run may need at most, whatever its routing."""

from __future__ import annotations

import torch

from ascend_moe.demo.layers import RunSpec
from ascend_moe.errors import WindowTooSmall
from ascend_moe.ops import calls

_OPTIONAL = ("y_dtype", "x_dtype", "scales_dtype")


def needed_mib(spec: RunSpec, rank: int) -> int:
    """The smallest HCCL_BUFFSIZE that dispatch and combine accept: their own check's answer to 1 MiB."""
    config, batch = spec.config, spec.batches[rank]
    shapes = (
        ("x", spec.dtype, (batch, config.hidden_size)),
        ("expert_ids", torch.int32, (batch, config.top_k)),
    )
    attributes: dict[str, int | None] = dict.fromkeys(calls.attribute_names(), 0)
    attributes |= dict.fromkeys(_OPTIONAL, None)
    attributes |= {
        "ep_world_size": spec.ranks,
        "ep_rank_id": rank,
        "moe_expert_num": config.num_experts,
        "shared_expert_num": 1,
        "global_bs": spec.global_bs,
        "quant_mode": 2 if spec.quant else 0,
    }
    call = calls.describe(calls.OP_DISPATCH, 2, "group", "", shapes, attributes)
    call.comm_world, call.comm_rank, call.window_mib = spec.ranks, rank, 1
    call.cores, call.deadline_micros = 1, 1
    try:
        calls.Plan("npu_moe_distribute_dispatch_v2", call)
    except WindowTooSmall as error:
        return int(error.needed_mib)
    return 1
