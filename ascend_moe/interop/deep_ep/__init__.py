"""DeepEP by DeepEP's names: `Buffer`, `Config`, `EventOverlap`, `EventHandle`; `install()` is `import deep_ep`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from ascend_moe.errors import need_one_of
from ascend_moe.interop.deep_ep import base, strategies, utils
from ascend_moe.interop.deep_ep.ascend import AscendBuffer, FuseMode, Runtime
from ascend_moe.interop.deep_ep.base import Config, EventHandle, EventOverlap
from ascend_moe.interop.deep_ep.buffer import Buffer

__all__ = ["AscendBuffer", "Buffer", "Config", "EventHandle", "EventOverlap", "install", "uninstall"]

Names = dict[str, Any]


def _of(module: Any, names: str) -> Names:
    return {name: getattr(module, name) for name in names.split()}


#: sgl-kernel-npu's compiled module ``deep_ep_cpp``.
CPP: Names = {"Buffer": Runtime} | _of(base, "Config EventHandle get_low_latency_rdma_size_hint")

_COMMON = _of(base, "Config EventHandle EventOverlap") | {"topk_idx_t": torch.int64}
_BUFFER: Names = {"Buffer": Buffer} | _COMMON
_KINDS = "NormalStrategy LowLatencyStrategy"
_STRATEGIES = _COMMON | _of(
    strategies,
    f"""{_KINDS} StrategyMap VALID_QUANT_MODES EPCommStrategy NormalEPCommStrategy LowLatencyEPCommStrategy
    register_normal_strategy register_low_latency_strategy get_normal_strategy get_low_latency_strategy
    DefaultNormalCommStrategy AlltoAllNormalCommStrategy
    DefaultLowLatencyCommStrategy OpsLowLatencyCommStrategy AllToAllLowLatencyCommStrategy""",
)
_ASCEND: Names = {"Buffer": AscendBuffer, "FuseMode": FuseMode} | _STRATEGIES
_OF_STRATEGIES = ("ep_strategy", "strategies", "strategies.normal_strategy", "strategies.low_latency_strategy")

#: For each flavour, the public names of every module; modules that share names may have more than theirs.
OURS: Mapping[str, Mapping[str, Names]] = {
    "deepep": {
        "deep_ep": _BUFFER | _of(strategies, _KINDS),
        "deep_ep.buffer": _BUFFER,
        "deep_ep.buffers": {},
        "deep_ep.buffers.legacy": _BUFFER,
        "deep_ep.utils": _COMMON,
        "deep_ep.utils.event": _COMMON,
        "deep_ep.utils.envs": _of(utils, "init_dist init_seed get_local_seed get_global_seed dist_print"),
        "deep_ep.utils.math": _of(utils, "calc_diff safe_div ceil_div align inplace_unique per_token_cast_to_fp8")
        | _of(utils, "per_token_cast_back create_grouped_scores hash_tensor hash_tensors count_bytes"),
        "deep_ep.utils.testing": _of(utils, "bench bench_kineto flush_l2_cache"),
    },
    "ascend": {
        "deep_ep": _ASCEND,
        "deep_ep.buffer": _ASCEND,
        **{f"deep_ep.{module}": _STRATEGIES for module in _OF_STRATEGIES},
        "deep_ep.utils": _COMMON,
    },
}


def _reasons(names_by_reason: Mapping[str, str]) -> dict[str, str]:
    """Return the reason of each name, prefixed by ``deep_ep``."""
    return {f"deep_ep.{name}": reason for reason, names in names_by_reason.items() for name in names.split()}


#: For each flavour, unsupported names and modules, and why.
REFUSED: Mapping[str, Mapping[str, str]] = {
    "deepep": _reasons(
        {
            "DeepEP's second interface is not supported; use Buffer": """
                ElasticBuffer EPHandle buffers.elastic utils.gate utils.refs utils.semantic""",
            "it belongs to CUDA, NCCL or NVLink, which are not used here": """
                get_physical_domain_size get_logical_domain_size find_cuda_home find_nccl_root check_nccl_so init_jit
                utils.check_nvlink_connections utils.envs.get_physical_domain_size utils.envs.get_logical_domain_size
                utils.envs.check_nvlink_connections utils.envs.check_torch_deterministic utils.comm utils.find_pkgs
                utils.envs.check_fast_rdma_atomic_support utils.envs.get_nvlink_gbs utils.envs.get_rdma_gbs""",
            "no output needs to be suppressed": "utils.testing.empty_suppress utils.testing.suppress_stdout_stderr",
        }
    ),
    "ascend": _reasons(
        {
            "it is the path of sgl-kernel-npu's own kernels": "current_dir opp_path lib_path",
            "it logs sgl-kernel-npu's own calls; ascend_moe.trace records the ops": """
                buffer.log_parameters utils.log_parameters utils.get_simplify_tensor utils.logger""",
            "calls run on the current stream": "strategies.normal_strategy.COMM_STREAM",
        }
    ),
}


_MISSING: Any = object()
_before: dict[str, Any] = {}


def install(flavour: str = "deepep", *, package: bool = True) -> None:
    """Make ``import deep_ep`` and sgl-kernel-npu's ``import deep_ep_cpp`` import this package.

    Args:
        flavour: "deepep": deep_ep as DeepEP's; "ascend": as sgl-kernel-npu's. ``OURS`` lists the modules of each.
        package: True: both packages. False: only deep_ep_cpp, for sgl-kernel-npu's own Python package ``deep_ep``.

    A second call changes the flavour. `uninstall` restores modules of these names that were imported before.
    Importing an unsupported name raises ImportError with the reason. Raises ArgumentError if flavour is unknown.
    """
    need_one_of("flavour", flavour, OURS)
    uninstall()
    _add("deep_ep_cpp", CPP)
    if not package:
        return
    for name in [name for name in sys.modules if name.split(".")[0] == "deep_ep"]:
        _before[name] = sys.modules.pop(name)
    for name, names in OURS[flavour].items():
        _add(name, {**names, "__path__": []})
    for name in OURS[flavour]:
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, sys.modules[name])
    sys.meta_path.insert(0, _Refusals(REFUSED[flavour]))


def uninstall() -> None:
    """Undo `install`, if it was called: restore the earlier modules. Objects of the removed modules stay valid."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Refusals)]
    while _before:
        name, module = _before.popitem()
        if module is _MISSING:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


class _Refusals:
    """Finder that raises ImportError with the reason for unsupported names of ``deep_ep``."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self._reasons = reasons

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Find nothing. Raises ImportError for an unsupported name."""
        if name in self._reasons:
            raise ImportError(f"{name} is not in ascend_moe.interop.deep_ep: {self._reasons[name]}", name=name)


def _add(name: str, names: Mapping[str, Any]) -> None:
    module = ModuleType(name, "ascend_moe.interop.deep_ep under this name.")
    vars(module).update(names)
    module.__spec__ = ModuleSpec(name, None, origin=__name__, is_package="__path__" in names)
    _before.setdefault(name, sys.modules.get(name, _MISSING))
    sys.modules[name] = module
