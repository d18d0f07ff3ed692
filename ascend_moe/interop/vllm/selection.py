"""Factories of the two parts of vLLM's modular kernel, and of the kernel."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from torch import nn

from ascend_moe.errors import ArgumentError, need, need_one_of, with_typed_errors
from ascend_moe.interop.vllm import bases, weight_and_reduce
from ascend_moe.interop.vllm.all2all import DEFAULT_MAX_TOKENS, DISPATCHERS, All2AllManager
from ascend_moe.interop.vllm.experts import Experts
from ascend_moe.interop.vllm.kernel import FusedMoEModularKernel
from ascend_moe.interop.vllm.prepare_finalize import PrepareAndFinalize
from ascend_moe.interop.vllm.quantization import check_experts

EXPERTS = ("standard", "batched")  # kinds


@functools.cache
def _prepare_class(base: type, batched: bool) -> type:
    name = "AscendBatchedPrepareAndFinalize" if batched else "AscendPrepareAndFinalize"
    return type(name, (PrepareAndFinalize, base), {"__doc__": f"{base.__name__} over dispatch and combine."})


def base_of(mk: Any, *names: str) -> Any:
    """Return the first of the classes that the module contains."""
    for name in names:
        if hasattr(mk, name):
            return getattr(mk, name)
    raise ArgumentError(f"mk has none of {', '.join(names)}; pass vLLM's fused_moe.modular_kernel", argument="mk")


@with_typed_errors
def make_prepare_finalize(
    mk: Any,
    ops: Any,
    group_name: str,
    rank: int,
    world: int,
    num_experts: int,
    kind: str = "mc2",
    *,
    max_num_tokens: int = DEFAULT_MAX_TOKENS,
    manager: All2AllManager | None = None,
) -> Any:
    """Return the PrepareAndFinalize of a group, of a subclass of ``mk``'s base.

    Args:
        mk: vLLM's module fused_moe.modular_kernel, 0.11 or newer; None: ``ascend_moe.interop.vllm.bases``.
        ops: namespace with npu_moe_distribute_dispatch_v2 and _combine_v2: ascend_moe, ascend_moe.npu, a patched
            torch_npu; None: ascend_moe. prepare and finalize are async if its operators are ascend_moe's.
        group_name, rank, world: as of `All2AllManager`; W ranks.
        num_experts: E of all ranks, a multiple of W; rank r has experts r*L to r*L + L-1, L = E/W.
        kind: "mc2": windows, standard rows. "batched": windows, rows by expert, ``(L, max_num_tokens * W, H)``, where
            the largest count is read on the host. "alltoall", "allgather": standard rows by collectives, which read
            all counts on the host.
        max_num_tokens: most tokens of a rank, the same on all ranks, up to 4096; for windows.
        manager: its handle is used, so that layers share one; None: a new one.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: vLLM ``FusedMoEPrepareAndFinalize``, ``FusedMoEPrepareAndFinalizeModular``.
    """
    need_one_of("kind", kind, DISPATCHERS)
    mk = bases if mk is None else mk
    base = base_of(mk, "FusedMoEPrepareAndFinalizeModular", "FusedMoEPrepareAndFinalize")
    manager = All2AllManager(group_name, rank, world, ops) if manager is None else manager
    wanted = {"kind": kind, "num_experts": num_experts, "max_num_tokens": max_num_tokens}
    batched = kind == "batched"
    return _prepare_class(base, batched)(mk, manager.get_handle(wanted), batched)


@functools.cache
def _experts_class(base: type, formats: Any, batched: bool) -> type:
    chosen = formats.BatchedExperts if batched else formats.Standard
    name = "AscendBatchedExperts" if batched else "AscendExperts"
    own = {"activation_format": staticmethod(lambda: chosen), "__doc__": f"{base.__name__} over grouped matmuls."}
    return type(name, (Experts, base), own)


@with_typed_errors
def make_experts(
    mk: Any,
    war: Any,
    ops: Any,
    quant_config: Any,
    num_local_experts: int,
    kind: str = "standard",
    *,
    moe_config: Any = None,
) -> Any:
    """Return the experts of a rank, of a subclass of ``mk``'s base.

    Args:
        mk: vLLM's module fused_moe.modular_kernel, 0.11 or newer; None: ``ascend_moe.interop.vllm.bases``.
        war: vLLM's module fused_moe.topk_weight_and_reduce; None: ``ascend_moe.interop.vllm.weight_and_reduce``.
        ops: namespace with npu_grouped_matmul, npu_swiglu and npu_dequant_swiglu_quant; without them, or None, this
            package's, which are torch_npu's for NPU tensors.
        quant_config: vLLM's FusedMoEQuantConfig, ours, or None. quant_dtype int8 with per_act_token_quant is W8A8,
            with w1_scale ``(L, 2F)`` and w2_scale ``(L, H)`` float32, a dimension of 1 may follow; None: unquantized.
        num_local_experts: L.
        kind: "standard" or "batched", that of the PrepareAndFinalize.
        moe_config: of the newest releases, an attribute of the experts. It and quant_config contain the parameters
            (limit, alpha, beta) of the activation.

    Raises:
        ArgumentError: an argument breaks one of these rules.

    Source: vLLM ``FusedMoEPermuteExpertsUnpermute``, ``FusedMoEExpertsModular``.
    """
    need_one_of("kind", kind, EXPERTS)
    need(num_local_experts >= 1, "num_local_experts", "is {}; need at least 1", num_local_experts)
    mk = bases if mk is None else mk
    base = base_of(mk, "FusedMoEExpertsModular", "FusedMoEPermuteExpertsUnpermute")
    made = _experts_class(base, mk.FusedMoEActivationFormat, kind == "batched")
    war = weight_and_reduce if war is None else war
    return made(mk, war, ops, check_experts(quant_config), num_local_experts, moe_config)


@dataclass
class MoEKernelConfig:
    """Configuration of `select`.

    Attributes:
        group_name, rank, world, num_experts: as of make_prepare_finalize.
        max_num_tokens: most tokens of a rank, the same on all.
        kind: of the PrepareAndFinalize; "auto": "mc2" up to 512 tokens per rank, else "alltoall", without a limit.
        experts_kind: "auto": the one that fits.
        quant_config, ops, mk, war: as of the two factories.
        shared_experts: of the kernel.
        manager: whose handles are shared.
    """

    group_name: str
    rank: int
    world: int
    num_experts: int
    max_num_tokens: int = DEFAULT_MAX_TOKENS
    kind: str = "auto"
    experts_kind: str = "auto"
    quant_config: Any = None
    ops: Any = None
    mk: Any = None
    war: Any = None
    shared_experts: nn.Module | None = None
    manager: All2AllManager | None = None


def _config(config: Any) -> MoEKernelConfig:
    """Return the configuration from a mapping or an object with these names."""
    if isinstance(config, MoEKernelConfig):
        return config
    names = [each.name for each in fields(MoEKernelConfig)]
    if not isinstance(config, Mapping):
        config = {name: getattr(config, name) for name in names if hasattr(config, name)}
    given = dict(config)
    for name in given:
        need_one_of("config", name, names)
    for each in fields(MoEKernelConfig):
        need(each.name in given or each.default is not MISSING, "config", "has no {}, which has no default", each.name)
    return MoEKernelConfig(**given)


def maybe_make_prepare_finalize(config: Any) -> Any:
    """Return the PrepareAndFinalize of ``config``: a `MoEKernelConfig`, or a mapping or an object with its names."""
    config = _config(config)
    kind = config.kind
    if kind == "auto":
        kind = "mc2" if config.max_num_tokens <= DEFAULT_MAX_TOKENS else "alltoall"
    place = (config.group_name, config.rank, config.world, config.num_experts)
    given: dict[str, Any] = {"max_num_tokens": config.max_num_tokens, "manager": config.manager}
    return make_prepare_finalize(config.mk, config.ops, *place, kind, **given)


def select_gemm_impl(config: Any, prepare_finalize: Any) -> Any:
    """Return the experts of ``config`` for the result ``prepare_finalize`` of `maybe_make_prepare_finalize`."""
    config = _config(config)
    kind, local = config.experts_kind, config.num_experts // config.world
    if kind == "auto":
        kind = "batched" if prepare_finalize.activation_format.name == "BatchedExperts" else "standard"
    return make_experts(config.mk, config.war, config.ops, config.quant_config, local, kind)


@with_typed_errors
def select(config: Any) -> Any:
    """Return the kernel of a configuration, of ``config.mk``'s class if that is given.

    Args:
        config: a `MoEKernelConfig`, or a mapping or an object with its names.

    Raises:
        ArgumentError: kinds that do not fit, or what either factory refuses.

    Source: vLLM's ``init_prepare_finalize``, which calls ``maybe_make_prepare_finalize`` and ``select_gemm_impl``.
    """
    config = _config(config)
    prepare_finalize = maybe_make_prepare_finalize(config)
    chosen = select_gemm_impl(config, prepare_finalize)
    if config.mk is None or config.mk is bases:
        return FusedMoEModularKernel(prepare_finalize, chosen, config.shared_experts)
    if hasattr(config.mk, "FusedMoEModularKernel"):
        return config.mk.FusedMoEModularKernel(prepare_finalize, chosen, config.shared_experts)
    rule = "belong to the newest kernel's apply: leave them out here"
    need(config.shared_experts is None, "shared_experts", rule)
    return config.mk.FusedMoEKernel(prepare_finalize, chosen)


init_prepare_finalize = select  # vLLM's name
