"""CANN's newest front end in Python, ``cann_ops_transformer.ops``, over this package's operators.

MegaMoe's pair (`ascend_moe.fused`), and `MoeDistributeBuffer`: dispatch and combine by methods of a buffer object.
``install()`` makes ``import cann_ops_transformer.ops`` find them, where CANN's own package is not installed.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_moe import npu_moe_distribute_combine_v2, npu_moe_distribute_dispatch_v2, plan
from ascend_moe.comm.place import Place
from ascend_moe.errors import AscendMoeError, need, with_right_names, with_typed_errors
from ascend_moe.fused import SymmBuffer, get_symm_buffer_for_mega_moe, mega_moe
from ascend_moe.fused.arguments import need_int
from ascend_moe.ops.pairs import Pairs

__all__ = ["MoeDistributeBuffer", "SymmBuffer", "get_symm_buffer_for_mega_moe", "install", "mega_moe", "uninstall"]

_NAME = "cann_ops_transformer"


class LowLatencyDispatched(NamedTuple):
    """Names the outputs of `MoeDistributeBuffer.low_latency_dispatch`, CANN's tuple."""

    expand_x: Tensor
    dynamic_scales: Tensor
    assist_info_for_combine: Tensor
    expert_token_nums: Tensor
    ep_recv_counts: Tensor
    expand_scales: Tensor


class MoeDistributeBuffer:
    """Dispatch and combine of one group.

    Args:
        group: the EP group, as `comm.group_of`, or its name (a LocalCluster's too, in the thread of a rank).
        ccl_buffer_size: MiB of window to ask for; 0: as it is. The windows are the group's, made by HCCL_BUFFSIZE.
        comm_alg: of CANN's own context; 0.

    Attributes:
        group, group_name, world_size, rank_id: of the group.

    Raises:
        ArgumentError: no such group, or a comm_alg other than 0.
        Other errors: of opening the group's windows, which is collective.

    Source: CANN ``cann_ops_transformer.ops.MoeDistributeBuffer``.
    """

    @with_typed_errors
    def __init__(self, group: dist.ProcessGroup | str, ccl_buffer_size: int = 0, comm_alg: int | str = 0) -> None:
        need(comm_alg in (0, ""), "comm_alg", "is {!r}; it must be 0: the methods take an algorithm's name", comm_alg)
        self.group = group
        place = Place.of(group)
        self.group_name, self.world_size, self.rank_id = place.group_ep, place.world, place.rank
        self.ccl_buffer_size = ccl_buffer_size
        self._pairs = Pairs()

    @staticmethod
    @with_typed_errors
    def get_low_latency_ccl_buffer_size(
        world_size: int,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_moe_expert: int,
        topk: int,
        num_shared_expert: int = 0,
        num_shared_expert_ranks: int = 0,
        comm_alg: str = "",
    ) -> int:
        """MiB that the windows need for these sizes: HCCL_BUFFSIZE. Less than CANN's own need for the same.

        Args:
            world_size, num_max_dispatch_tokens_per_rank, hidden, num_moe_expert, topk: W, the largest batch, H, E, K.
            num_shared_expert, num_shared_expert_ranks: 0; num_shared_expert is 1 at most.
            comm_alg: as of the operators.

        Raises:
            ArgumentError: the operators would refuse these sizes.
        """
        sizes = {
            "world_size": world_size, "num_max_dispatch_tokens_per_rank": num_max_dispatch_tokens_per_rank,
            "hidden": hidden, "num_moe_expert": num_moe_expert, "topk": topk,
        }  # fmt: skip
        for name, value in sizes.items():
            need_int(name, value)
            need(value >= 1, name, "is {}; it must be at least 1", value)
        rule = "is {}; shared experts on ranks of their own are not supported"
        need(num_shared_expert_ranks == 0, "num_shared_expert_ranks", rule, num_shared_expert_ranks)
        need(num_shared_expert in (0, 1), "num_shared_expert", "is {}; it must be 0 or 1", num_shared_expert)
        request = plan.Request(
            world_size, num_moe_expert, topk, hidden, num_max_dispatch_tokens_per_rank, False, comm_alg=comm_alg
        )
        plan.require(request)
        return plan.window_need(request)["buffsize_mib"]

    @with_right_names
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_experts: int,
        *,
        quant_mode: int = 0,
        comm_alg: str = "",
        x_smooth_scale: Tensor | None = None,
        x_active_mask: Tensor | None = None,
        topk_weights: Tensor | None = None,
        zero_expert_num: int = 0,
        copy_expert_num: int = 0,
        const_expert_num: int = 0,
        elastic_info: Tensor | None = None,
        expert_shard_type: int = 0,
        shared_expert_num: int = 1,
        shared_expert_rank_num: int = 0,
        expert_token_nums_type: int = 1,
        num_max_dispatch_tokens_per_rank: int = 0,
        y_dtype: int | None = None,
        x_dtype: int | None = None,
        x_smooth_scales_dtype: int | None = None,
    ) -> LowLatencyDispatched:
        """`ascend_moe.npu_moe_distribute_dispatch_v2` of this group, whose help has shapes, results and errors.

        Args:
            topk_idx, num_experts: its expert_ids and moe_expert_num.
            x_smooth_scale, x_smooth_scales_dtype: its scales and scales_dtype. topk_weights: its expert_scales.
            num_max_dispatch_tokens_per_rank: the largest batch of all ranks, where batches differ; else 0.
            x, quant_mode, comm_alg, x_active_mask, zero_expert_num, copy_expert_num, const_expert_num, elastic_info,
                expert_shard_type, shared_expert_num, shared_expert_rank_num, expert_token_nums_type, y_dtype,
                x_dtype: as there.

        Returns:
            Its outputs but tp_recv_counts.
        """
        made = npu_moe_distribute_dispatch_v2(
            x, topk_idx, self.group_name, self.world_size, self.rank_id, num_experts,
            scales=x_smooth_scale, x_active_mask=x_active_mask, expert_scales=topk_weights, elastic_info=elastic_info,
            expert_shard_type=expert_shard_type, shared_expert_num=shared_expert_num,
            shared_expert_rank_num=shared_expert_rank_num, quant_mode=quant_mode,
            global_bs=num_max_dispatch_tokens_per_rank * self.world_size,
            expert_token_nums_type=expert_token_nums_type, comm_alg=comm_alg, zero_expert_num=zero_expert_num,
            copy_expert_num=copy_expert_num, const_expert_num=const_expert_num, y_dtype=y_dtype, x_dtype=x_dtype,
            scales_dtype=x_smooth_scales_dtype,
        )  # fmt: skip
        if not torch.compiler.is_compiling():
            self._pairs.sent(made.assist_info_for_combine, topk_idx, x_active_mask)
        return LowLatencyDispatched(*made[:5], made.expand_scales)

    @with_right_names
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        assist_info_for_combine: Tensor,
        ep_send_counts: Tensor,
        *,
        num_experts: int = 0,
        comm_alg: str = "",
        comm_quant_mode: int = 0,
        x_active_mask: Tensor | None = None,
        expand_scales: Tensor | None = None,
        shared_expert_x: Tensor | None = None,
        elastic_info: Tensor | None = None,
        ori_x: Tensor | None = None,
        const_expert_alpha_1: Tensor | None = None,
        const_expert_alpha_2: Tensor | None = None,
        const_expert_v: Tensor | None = None,
        zero_expert_num: int = 0,
        copy_expert_num: int = 0,
        const_expert_num: int = 0,
        expert_shared_type: int = 0,
        shared_expert_num: int = 1,
        shared_expert_rank_num: int = 0,
        num_max_dispatch_tokens_per_rank: int = 0,
    ) -> Tensor:
        """`ascend_moe.npu_moe_distribute_combine_v2` of this group, whose help has shapes, results and errors.

        Args:
            x: its expand_x. topk_idx, topk_weights, num_experts: its expert_ids, expert_scales, moe_expert_num.
            expert_shared_type: its expert_shard_type.
            num_max_dispatch_tokens_per_rank: as given to low_latency_dispatch.
            assist_info_for_combine, ep_send_counts, comm_alg, comm_quant_mode, x_active_mask, expand_scales,
                shared_expert_x, elastic_info, ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v,
                zero_expert_num, copy_expert_num, const_expert_num, shared_expert_num, shared_expert_rank_num:
                as there.

        Returns:
            (BS, H), dtype of x.

        Raises:
            ArgumentError, too: topk_idx and x_active_mask are not those of the dispatch that has returned
                assist_info_for_combine (NPU: RoutingMismatch). Not compared under torch.compile.
        """
        if not torch.compiler.is_compiling():
            topk_idx = self._pairs.checked("topk_idx", assist_info_for_combine, topk_idx, x_active_mask)
        return npu_moe_distribute_combine_v2(
            x, topk_idx, assist_info_for_combine, ep_send_counts, topk_weights, self.group_name, self.world_size,
            self.rank_id, num_experts,
            x_active_mask=x_active_mask, expand_scales=expand_scales, shared_expert_x=shared_expert_x,
            elastic_info=elastic_info, ori_x=ori_x, const_expert_alpha_1=const_expert_alpha_1,
            const_expert_alpha_2=const_expert_alpha_2, const_expert_v=const_expert_v,
            expert_shard_type=expert_shared_type, shared_expert_num=shared_expert_num,
            shared_expert_rank_num=shared_expert_rank_num,
            global_bs=num_max_dispatch_tokens_per_rank * self.world_size, comm_quant_mode=comm_quant_mode,
            comm_alg=comm_alg, zero_expert_num=zero_expert_num, copy_expert_num=copy_expert_num,
            const_expert_num=const_expert_num,
        )  # fmt: skip


# ---- as CANN's module


def install() -> ModuleType:
    """Makes ``import cann_ops_transformer.ops`` find this module's names; idempotent.

    Returns:
        The module ``cann_ops_transformer``, whose docstring says what it is.

    Raises:
        AscendMoeError: CANN's own package can be imported here; use that.
    """
    installed = sys.modules.get(_NAME)
    if installed is not None and _is_ours(installed):
        return installed
    if installed is not None or importlib.util.find_spec(_NAME) is not None:
        raise AscendMoeError(f"{_NAME} can be imported here, so nothing stands in for it: use it, or uninstall it")
    whole, ops = ModuleType(_NAME), ModuleType(f"{_NAME}.ops")
    for module in (whole, ops):
        module.__doc__ = f"Stands in for CANN's {module.__name__}: ascend_moe.interop.cann_ops_transformer."
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, None, is_package=module is whole)
    whole.__path__ = []
    for name in ("MoeDistributeBuffer", "SymmBuffer", "get_symm_buffer_for_mega_moe", "mega_moe"):
        setattr(ops, name, globals()[name])
    whole.ops = ops  # type: ignore[attr-defined]
    sys.modules[_NAME], sys.modules[f"{_NAME}.ops"] = whole, ops
    return whole


def uninstall() -> None:
    """Undoes ``install``; does nothing without it."""
    installed = sys.modules.get(_NAME)
    if installed is not None and _is_ours(installed):
        del sys.modules[_NAME], sys.modules[f"{_NAME}.ops"]


def _is_ours(module: ModuleType) -> bool:
    return getattr(getattr(module, "ops", None), "MoeDistributeBuffer", None) is MoeDistributeBuffer
