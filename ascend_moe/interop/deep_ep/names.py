"""Lists what callers import from the two packages called ``deep_ep``, and from sgl-kernel-npu's ``deep_ep_cpp``.

``OURS``: for each flavour every module, and what its public names are here. ``REFUSED``: the public names and modules
of theirs that are not here, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ascend_moe.interop.deep_ep import events, layout, strategies, utils
from ascend_moe.interop.deep_ep.ascend import AscendBuffer
from ascend_moe.interop.deep_ep.buffer import Buffer
from ascend_moe.interop.deep_ep.fused import FuseMode
from ascend_moe.interop.deep_ep.runtime import Runtime

Names = dict[str, Any]


def _of(module: Any, names: str) -> Names:
    return {name: getattr(module, name) for name in names.split()}


CPP: Names = {"Buffer": Runtime} | _of(layout, "Config get_low_latency_rdma_size_hint") | _of(events, "EventHandle")

_EVENTS = _of(events, "EventHandle EventOverlap")
_KINDS = _of(strategies, "NormalStrategy LowLatencyStrategy")
_FINDERS = _of(strategies, "get_normal_strategy get_low_latency_strategy")
_BASES = _of(strategies, "EPCommStrategy NormalEPCommStrategy LowLatencyEPCommStrategy")
_BASES |= _FINDERS | _of(strategies, "register_normal_strategy register_low_latency_strategy")
_NORMAL = _of(strategies, "DefaultNormalCommStrategy AlltoAllNormalCommStrategy")
_LOW_LATENCY = _of(strategies, "DefaultLowLatencyCommStrategy OpsLowLatencyCommStrategy")
_BUFFER: Names = {"Buffer": Buffer, "Config": layout.Config} | _EVENTS
_ASCEND: Names = {"Buffer": AscendBuffer, "Config": layout.Config} | _EVENTS | _KINDS

OURS: Mapping[str, Mapping[str, Names]] = {
    "deepep": {
        "deep_ep": _BUFFER | _KINDS | {"topk_idx_t": torch.int64},
        "deep_ep.buffer": _BUFFER,
        "deep_ep.buffers": {},
        "deep_ep.buffers.legacy": _BUFFER,
        "deep_ep.utils": _EVENTS,
        "deep_ep.utils.event": _EVENTS,
        "deep_ep.utils.envs": _of(utils, "init_dist init_seed get_local_seed get_global_seed dist_print"),
        "deep_ep.utils.math": _of(utils, "calc_diff safe_div ceil_div align inplace_unique per_token_cast_to_fp8")
        | _of(utils, "per_token_cast_back create_grouped_scores hash_tensor hash_tensors count_bytes"),
        "deep_ep.utils.testing": _of(utils, "bench bench_kineto flush_l2_cache"),
    },
    "ascend": {
        "deep_ep": _ASCEND | {"topk_idx_t": torch.int64},
        "deep_ep.buffer": _ASCEND | _FINDERS | _of(strategies, "StrategyMap") | {"FuseMode": FuseMode},
        "deep_ep.ep_strategy": _KINDS
        | (_BASES | _of(strategies, "StrategyMap VALID_QUANT_MODES") | _of(events, "EventOverlap")),
        "deep_ep.strategies": _BASES | _NORMAL | _LOW_LATENCY,
        "deep_ep.strategies.normal_strategy": _EVENTS
        | (_NORMAL | _of(strategies, "NormalEPCommStrategy register_normal_strategy VALID_QUANT_MODES")),
        "deep_ep.strategies.low_latency_strategy": _EVENTS
        | (_LOW_LATENCY | _of(strategies, "LowLatencyEPCommStrategy register_low_latency_strategy"))
        | _of(strategies, "AllToAllLowLatencyCommStrategy"),
        "deep_ep.utils": _of(layout, "Config") | _EVENTS,
    },
}


def _reasons(names_by_reason: Mapping[str, str]) -> dict[str, str]:
    """The reason of each name, all below ``deep_ep``."""
    return {f"deep_ep.{name}": reason for reason, names in names_by_reason.items() for name in names.split()}


REFUSED: Mapping[str, Mapping[str, str]] = {
    "deepep": _reasons(
        {
            "DeepEP's second interface is not built; use Buffer": "ElasticBuffer EPHandle buffers.elastic",
            "it belongs to CUDA, NCCL or NVLink, which are not used here": """
                get_physical_domain_size get_logical_domain_size find_cuda_home check_nccl_so init_jit
                utils.check_nvlink_connections utils.envs.get_physical_domain_size utils.envs.get_logical_domain_size
                utils.envs.check_nvlink_connections utils.envs.check_torch_deterministic
                utils.envs.check_fast_rdma_atomic_support utils.envs.get_nvlink_gbs utils.envs.get_rdma_gbs""",
            "nothing is printed that had to be hidden": """
                utils.testing.empty_suppress utils.testing.suppress_stdout_stderr""",
        }
    ),
    "ascend": _reasons(
        {
            "it is where sgl-kernel-npu's own kernels lie": "current_dir opp_path lib_path",
            "it logs sgl-kernel-npu's own calls; ascend_moe.trace records what the ops do": """
                buffer.log_parameters utils.log_parameters utils.get_simplify_tensor utils.logger""",
            "calls run on the current stream": "strategies.normal_strategy.COMM_STREAM",
        }
    ),
}
