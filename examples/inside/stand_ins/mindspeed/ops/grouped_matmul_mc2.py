"""Makes the calls of torch_npu that MindSpeed's file of this name makes, keyword for keyword.

In one thing it differs from MindSpeed of July 2026: the gradient of the weights is by the rows that arrived here, whose
numbers are recv_counts. MindSpeed's AllToAllGroupedMatmul takes send_counts, which are others where tokens are not
spread evenly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from torch import Tensor


def _by_expert(counts: list[int], world: int) -> Tensor:
    return torch.tensor(counts).reshape(world, -1).sum(dim=0)


def _weight_gradient(rows: Tensor, grads: Tensor, groups: Tensor) -> Tensor:
    return torch_npu.npu_grouped_matmul(
        [rows.T], [grads], bias=None, group_list=groups, split_item=3, group_type=2, group_list_type=1
    )[0]


class Pair(torch.autograd.Function):
    """There: rows travel, then are multiplied. Back: rows are multiplied, then travel."""

    @staticmethod
    def forward(ctx: Any, there: bool, x: Tensor, weights: Tensor, group: Any, send: Tensor, receive: Tensor) -> Tensor:
        rank = dist.get_global_rank(group, dist.get_rank(group))
        hcomm = group._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
        ctx.there, ctx.place = there, (hcomm, dist.get_world_size(group))
        ctx.counts = send.tolist(), receive.tolist()
        more = {"mm_x": None, "mm_weight": None}
        if there:
            y, _, rows = torch_npu.npu_alltoallv_gmm(x, weights, *ctx.place, *ctx.counts, permute_out_flag=True, **more)
        else:
            rows, (y, _) = x, torch_npu.npu_gmm_alltoallv(x, weights, *ctx.place, *ctx.counts, **more)
        ctx.save_for_backward(rows, weights)
        return y

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> Any:
        rows, weights = ctx.saved_tensors
        send, receive = ctx.counts
        back = {"mm_x": None, "mm_weight": None, "trans_gmm_weight": True}
        if ctx.there:
            gx, _ = torch_npu.npu_gmm_alltoallv(gy, weights, *ctx.place, receive, send, **back)
            gw = _weight_gradient(rows, gy, _by_expert(receive, ctx.place[1]))
        else:
            gx, _, came = torch_npu.npu_alltoallv_gmm(
                gy, weights, *ctx.place, receive, send, permute_out_flag=True, **back
            )
            gw = _weight_gradient(rows, came, _by_expert(send, ctx.place[1]))
        return None, gx, gw, None, None, None


def all2all_grouped_matmul(
    inputs: Tensor, weights: Tensor, group: Any, send_counts: Tensor, recv_counts: Tensor
) -> Tensor:
    return Pair.apply(True, inputs, weights, group, send_counts, recv_counts)


def grouped_matmul_all2all(
    inputs: Tensor, weights: Tensor, group: Any, send_counts: Tensor, recv_counts: Tensor
) -> Tensor:
    return Pair.apply(False, inputs, weights, group, send_counts, recv_counts)
