"""Lists what callers import from the two packages called ``deep_ep``, and from sgl-kernel-npu's ``deep_ep_cpp``.

``OURS``: for each flavour every module, and what its public names are here. ``REFUSED``: the public names and modules
of theirs that are not here, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ascend_moe.interop.deep_ep import strategies, utils
from ascend_moe.interop.deep_ep.ascend import AscendBuffer
from ascend_moe.interop.deep_ep.buffer import Buffer
from ascend_moe.interop.deep_ep.events import EventHandle, EventOverlap
from ascend_moe.interop.deep_ep.fused import FuseMode
from ascend_moe.interop.deep_ep.layout import Config, get_low_latency_rdma_size_hint
from ascend_moe.interop.deep_ep.runtime import Runtime

Names = dict[str, Any]

CPP: Names = {
    "Buffer": Runtime,
    "Config": Config,
    "EventHandle": EventHandle,
    "get_low_latency_rdma_size_hint": get_low_latency_rdma_size_hint,
}
_EVENTS: Names = {"EventHandle": EventHandle, "EventOverlap": EventOverlap}


def _strategies(*names: str) -> Names:
    return {name: getattr(strategies, name) for name in names}


_KINDS = _strategies("NormalStrategy", "LowLatencyStrategy")
_BASES = _strategies("EPCommStrategy", "NormalEPCommStrategy", "LowLatencyEPCommStrategy")
_FINDERS = _strategies("get_normal_strategy", "get_low_latency_strategy")
_REGISTRY = _FINDERS | _strategies("register_normal_strategy", "register_low_latency_strategy")
_NORMAL = _strategies("DefaultNormalCommStrategy", "AlltoAllNormalCommStrategy")
_LOW_LATENCY = _strategies("DefaultLowLatencyCommStrategy", "OpsLowLatencyCommStrategy")
_LAST = _strategies("AllToAllLowLatencyCommStrategy")
_MAP, _MODES = _strategies("StrategyMap"), _strategies("VALID_QUANT_MODES")


def _utils(*names: str) -> Names:
    return {name: getattr(utils, name) for name in names}


OURS: Mapping[str, Mapping[str, Names]] = {
    "deepep": {
        "deep_ep": {"Buffer": Buffer, "Config": Config, "topk_idx_t": torch.int64} | _EVENTS | _KINDS,
        "deep_ep.buffer": {"Buffer": Buffer, "Config": Config} | _EVENTS,
        "deep_ep.buffers": {},
        "deep_ep.buffers.legacy": {"Buffer": Buffer, "Config": Config} | _EVENTS,
        "deep_ep.utils": _EVENTS,
        "deep_ep.utils.event": _EVENTS,
        "deep_ep.utils.envs": _utils("init_dist", "init_seed", "get_local_seed", "get_global_seed", "dist_print"),
        "deep_ep.utils.math": _utils("calc_diff", "safe_div", "ceil_div", "align", "inplace_unique")
        | _utils("per_token_cast_to_fp8", "per_token_cast_back", "create_grouped_scores")
        | _utils("hash_tensor", "hash_tensors", "count_bytes"),
        "deep_ep.utils.testing": _utils("bench", "bench_kineto", "flush_l2_cache"),
    },
    "ascend": {
        "deep_ep": {"Buffer": AscendBuffer, "Config": Config, "topk_idx_t": torch.int64} | _EVENTS | _KINDS,
        "deep_ep.buffer": {"Buffer": AscendBuffer, "Config": Config, "FuseMode": FuseMode}
        | (_EVENTS | _KINDS | _MAP | _FINDERS),
        "deep_ep.ep_strategy": {"EventOverlap": EventOverlap} | _KINDS | _BASES | _REGISTRY | _MAP | _MODES,
        "deep_ep.strategies": _BASES | _REGISTRY | _NORMAL | _LOW_LATENCY,
        "deep_ep.strategies.normal_strategy": _EVENTS
        | (_strategies("NormalEPCommStrategy", "register_normal_strategy") | _NORMAL | _MODES),
        "deep_ep.strategies.low_latency_strategy": _EVENTS
        | (_strategies("LowLatencyEPCommStrategy", "register_low_latency_strategy") | _LOW_LATENCY | _LAST),
        "deep_ep.utils": {"Config": Config} | _EVENTS,
    },
}

_LOGGING = "it logs sgl-kernel-npu's own calls; ascend_moe.trace records what the ops do"
_PATHS = "it is where sgl-kernel-npu's own kernels lie"
_ELASTIC = "DeepEP's second interface is not built; use Buffer"
_QUIET = "nothing is printed that had to be hidden"
_CUDA = "it belongs to CUDA, NCCL or NVLink, which are not used here"

REFUSED: Mapping[str, Mapping[str, str]] = {
    "deepep": {
        "deep_ep.ElasticBuffer": _ELASTIC,
        "deep_ep.EPHandle": _ELASTIC,
        "deep_ep.buffers.elastic": _ELASTIC,
        "deep_ep.get_physical_domain_size": _CUDA,
        "deep_ep.get_logical_domain_size": _CUDA,
        "deep_ep.find_cuda_home": _CUDA,
        "deep_ep.check_nccl_so": _CUDA,
        "deep_ep.init_jit": _CUDA,
        "deep_ep.utils.check_nvlink_connections": _CUDA,
        "deep_ep.utils.envs.get_physical_domain_size": _CUDA,
        "deep_ep.utils.envs.get_logical_domain_size": _CUDA,
        "deep_ep.utils.envs.check_nvlink_connections": _CUDA,
        "deep_ep.utils.envs.check_torch_deterministic": _CUDA,
        "deep_ep.utils.envs.check_fast_rdma_atomic_support": _CUDA,
        "deep_ep.utils.envs.get_nvlink_gbs": _CUDA,
        "deep_ep.utils.envs.get_rdma_gbs": _CUDA,
        "deep_ep.utils.testing.empty_suppress": _QUIET,
        "deep_ep.utils.testing.suppress_stdout_stderr": _QUIET,
    },
    "ascend": {
        "deep_ep.current_dir": _PATHS,
        "deep_ep.opp_path": _PATHS,
        "deep_ep.lib_path": _PATHS,
        "deep_ep.buffer.log_parameters": _LOGGING,
        "deep_ep.utils.log_parameters": _LOGGING,
        "deep_ep.utils.get_simplify_tensor": _LOGGING,
        "deep_ep.utils.logger": _LOGGING,
        "deep_ep.strategies.normal_strategy.COMM_STREAM": "calls run on the current stream",
    },
}
