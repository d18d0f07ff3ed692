"""Which PrepareAndFinalize goes with which experts, and the pair for a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

from torch import nn

from ascend_moe.choices import EXPERTS, PREPARE_FINALIZE
from ascend_moe.errors import need, need_one_of, with_typed_errors
from ascend_moe.interop.vllm import bases, factories
from ascend_moe.interop.vllm.all2all import DEFAULT_MAX_TOKENS, All2AllManager
from ascend_moe.interop.vllm.kernel import FusedMoEModularKernel


class Pair(NamedTuple):
    """A cell of the compatibility matrix; ``reason``: why they do not fit, "" where they do."""

    prepare_finalize: str
    experts: str
    reason: str


def compatibility() -> list[Pair]:
    """Every kind of PrepareAndFinalize with every kind of experts."""
    return [Pair(way, kind, reason(way, kind)) for way in PREPARE_FINALIZE for kind in EXPERTS]


@with_typed_errors
def reason(pf_kind: str, experts_kind: str) -> str:
    """Why the two kinds cannot be joined; "" if they can."""
    need_one_of("kind of PrepareAndFinalize", pf_kind, PREPARE_FINALIZE)
    need_one_of("kind of experts", experts_kind, EXPERTS)
    given = experts_of(pf_kind)
    if given == experts_kind:
        return ""
    return f"{pf_kind} gives {given} rows, {experts_kind} experts take {experts_kind} rows"


def experts_of(pf_kind: str) -> str:
    """The kind of experts that fits."""
    return "batched" if pf_kind == "batched" else "standard"


@dataclass
class MoEKernelConfig:
    """Tells `select` what it needs to know.

    Attributes:
        group_name, rank, world, num_experts: as of make_prepare_finalize.
        max_num_tokens: most tokens of a rank, the same on all.
        kind: of the PrepareAndFinalize; "auto": "mc2" up to 512 tokens a rank, else "alltoall", which have no limit.
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
    """The configuration, of the same names in a mapping or an object."""
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
    """The PrepareAndFinalize of ``config``: a `MoEKernelConfig`, or a mapping or an object with its names."""
    config = _config(config)
    kind = config.kind
    if kind == "auto":
        kind = "mc2" if config.max_num_tokens <= DEFAULT_MAX_TOKENS else "alltoall"
    place = (config.group_name, config.rank, config.world, config.num_experts)
    given: dict[str, Any] = {"max_num_tokens": config.max_num_tokens, "manager": config.manager}
    return factories.make_prepare_finalize(config.mk, config.ops, *place, kind, **given)


def select_gemm_impl(config: Any, prepare_finalize: Any) -> Any:
    """The experts of ``config``, as `maybe_make_prepare_finalize` takes it, for its result ``prepare_finalize``."""
    config = _config(config)
    kind, local = config.experts_kind, config.num_experts // config.world
    if kind == "auto":
        kind = "batched" if prepare_finalize.activation_format.name == "BatchedExperts" else "standard"
    return factories.make_experts(config.mk, config.war, config.ops, config.quant_config, local, kind)


@with_typed_errors
def select(config: Any) -> Any:
    """The joined kernel of a configuration: of ``config.mk``'s own class where that is given.

    Args:
        config: a `MoEKernelConfig`, or a mapping or an object with its names.

    Raises:
        ArgumentError: kinds that do not fit, or what either factory refuses.

    Source: vLLM's ``init_prepare_finalize``, which calls ``maybe_make_prepare_finalize`` and ``select_gemm_impl``.
    """
    config = _config(config)
    way = maybe_make_prepare_finalize(config)
    chosen = select_gemm_impl(config, way)
    if config.mk is None or config.mk is bases:
        return FusedMoEModularKernel(way, chosen, config.shared_experts)
    if hasattr(config.mk, "FusedMoEModularKernel"):
        return config.mk.FusedMoEModularKernel(way, chosen, config.shared_experts)
    rule = "are given to the newest kernel in its apply: leave them out here"
    need(config.shared_experts is None, "shared_experts", rule)
    return config.mk.FusedMoEKernel(way, chosen)


init_prepare_finalize = select  # vLLM's name
