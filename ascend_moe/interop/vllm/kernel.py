"""vLLM's modular kernel: factories of its two parts, and the kernel itself for programs without vLLM."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ascend_moe.errors import ArgumentError, need, need_one_of, with_typed_errors
from ascend_moe.interop.vllm import bases
from ascend_moe.interop.vllm.all2all import DEFAULT_MAX_TOKENS, DISPATCHERS, All2AllManager
from ascend_moe.interop.vllm.experts import Experts, check_experts, name_of, with_optional_inplace
from ascend_moe.interop.vllm.prepare_finalize import PrepareAndFinalize
from ascend_moe.ops.whole import WholeCall, WholeLayer


class FusedMoEModularKernel(WholeLayer):
    """MoE layer's routed experts over all ranks: dispatch (prepare), the experts, combine (finalize).

    Args:
        prepare_finalize, fused_experts: from `make_prepare_finalize` and `make_experts`, or others with the same
            methods; their activation formats must be equal.
        shared_experts: a module for all tokens, which runs while combine is in flight; None: none.

    Raises ArgumentError if the formats differ. Source: vLLM 0.11 ``FusedMoEModularKernel``.
    """

    @with_typed_errors
    def __init__(self, prepare_finalize: Any, fused_experts: Any, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        given, taken = prepare_finalize.activation_format.name, fused_experts.activation_formats[0].name
        names = type(prepare_finalize).__name__, type(fused_experts).__name__
        rule = "do not fit: {} returns {} rows, {} needs {} rows; make both standard or both batched"
        need(given == taken, "fused_experts", rule, names[0], given, names[1], taken)
        self.prepare_finalize = prepare_finalize
        self.fused_experts = fused_experts
        self.shared_experts = shared_experts

    def output_is_reduced(self) -> bool:
        """Return whether the result is complete, so that no all-reduce may follow."""
        return bool(self.prepare_finalize.output_is_reduced())

    @with_optional_inplace
    def forward(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        inplace: bool = False,
        activation: str = "silu",
        global_num_experts: int = -1,
        expert_map: Tensor | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the weighted sums of the tokens' experts. Collective; has no gradient.

        Args:
            hidden_states: ``(T, H)``. w1: ``(L, 2F, H)``. w2: ``(L, H, F)``. topk_weights, topk_ids: ``(T, K)``.
            inplace: write the result into hidden_states; not with shared_experts, which read them later. As in
                newer releases of vLLM, it can also be left out of positional arguments.
            activation: "silu", or another that fused_experts supports. global_num_experts: E; -1: prepare_finalize's.
            expert_map: ``(E,)`` or None. apply_router_weight_on_input: weight the tokens, not the results; K must be 1.

        Returns ``(T, H)``; with shared_experts the pair (shared_experts' output, ``(T, H)``).
        """
        given: tuple[Any, ...] = (w1, w2, topk_weights, topk_ids, name_of(activation), global_num_experts)
        given = (*given, expert_map, apply_router_weight_on_input)
        inplace = inplace and self.shared_experts is None
        if torch.compiler.is_compiling():
            summed = _in_one(self, hidden_states, *given)
            shared = None if self.shared_experts is None else self.shared_experts(hidden_states)
            output = hidden_states.copy_(summed) if inplace else summed
        else:
            output = hidden_states if inplace else torch.empty_like(hidden_states)
            shared = self._into(output, self.shared_experts, hidden_states, *given)
        return output if shared is None else (shared, output)

    def _into(
        self, output: Tensor, shared_experts: nn.Module | None, x: Tensor, w1: Tensor, w2: Tensor,
        topk_weights: Tensor, topk_ids: Tensor, activation: str, global_num_experts: int, expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
    ) -> Tensor | None:  # fmt: skip
        """Write the sums; return the shared experts' result."""
        steps, experts, local = self.prepare_finalize, self.fused_experts, w1.shape[0]
        experts_of_all = local if global_num_experts == -1 else global_num_experts
        given = (x, topk_weights, topk_ids, experts_of_all, expert_map, apply_router_weight_on_input)
        started = (steps.prepare_async if steps.supports_async() else steps.prepare)(*given, experts.quant_config)
        rows, scales, meta, ids, weights = _received(started) if steps.supports_async() else started
        ids, weights = (topk_ids if ids is None else ids), (topk_weights if weights is None else weights)
        fused = rows.new_empty(rows.shape, dtype=x.dtype)
        if rows.numel() > 0:
            fused, *workspaces = self._allocate(x, rows, w1, ids, experts_of_all, meta)
            experts.apply(
                fused, rows, w1, w2, weights, ids, activation, experts_of_all, expert_map, scales, None,
                *workspaces, meta, apply_router_weight_on_input,
            )  # fmt: skip
        result = (output, fused, weights, ids, apply_router_weight_on_input, experts.finalize_weight_and_reduce_impl())
        if not steps.supports_async():
            steps.finalize(*result)
            return None if shared_experts is None else shared_experts(x)
        started = steps.finalize_async(*result)
        shared = None if shared_experts is None else shared_experts(x)
        _received(started)
        return shared

    def _allocate(self, x: Tensor, rows: Tensor, w1: Tensor, ids: Tensor, experts: int, meta: Any) -> list[Tensor]:
        """Return the experts' output, in workspace13, and both workspaces, new ones for each call."""
        sizes = (rows.shape[-2], w1.shape[1], rows.shape[-1], ids.shape[1], experts, w1.shape[0], meta)
        *shapes, dtype = self.fused_experts.workspace_shapes(x, rows, *sizes)
        first, second, out = (torch.Size(shape) for shape in shapes)
        memory = rows.new_empty(max(first.numel(), out.numel()), dtype=dtype)
        whole, part = memory[: out.numel()].view(out), memory[: first.numel()].view(first)
        return [whole, part, rows.new_empty(second, dtype=dtype)]


def _summed(kernel: FusedMoEModularKernel, x: Tensor, *given: Any) -> Tensor:
    output = torch.empty_like(x)
    kernel._into(output, None, x, *given)
    return output


_in_one = WholeCall(
    "modular_kernel",
    "Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, str activation, "
    "int global_num_experts, Tensor? expert_map, bool apply_router_weight_on_input",
    _summed,
)


def _received(started: Any) -> Any:
    """Return the result of a receiver, or of a hook and a receiver."""
    hook, receiver = started if isinstance(started, tuple) else (None, started)
    if hook is not None:
        hook()
    return receiver()


EXPERTS = ("standard", "batched")  # kinds


@functools.cache
def _joined(ours: type, base: type, formats: Any, batched: bool) -> type:
    """Return a subclass of our class and the caller's base for one of the ``formats`` of rows."""
    own = {"batched": batched, "row_format": formats.BatchedExperts if batched else formats.Standard}
    own["__doc__"] = f"{base.__name__} over the operators of ascend_moe."
    return type(f"Ascend{'Batched' if batched else ''}{ours.__name__}", (ours, base), own)


def base_of(mk: Any, *names: str) -> Any:
    """Return the first of the classes ``names`` that the module ``mk`` contains; raise ArgumentError without one."""
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
    """Return a PrepareAndFinalize (dispatch and combine) over a group, of a subclass of ``mk``'s base class.

    Args:
        mk: vLLM's module fused_moe.modular_kernel, 0.11 or newer; None: ``ascend_moe.interop.vllm.bases``.
        ops: namespace with npu_moe_distribute_dispatch_v2 and _combine_v2: ascend_moe, ascend_moe.npu, a patched
            torch_npu; None: ascend_moe. prepare and finalize are async if its operators are ascend_moe's.
        group_name, rank, world: as for `All2AllManager`, with W = world ranks.
        num_experts: E of all ranks, a multiple of W; rank r has experts r*L to r*L + L-1, L = E/W.
        kind: "mc2": the V2 ops, standard rows. "batched": the V2 ops, rows by expert, ``(L, max_num_tokens * W, H)``;
            the largest count is read on the host. "alltoall", "allgather": standard rows by torch.distributed's
            collectives, which read all counts on the host.
        max_num_tokens: most tokens of a rank, the same on all ranks, up to 4096; for the V2 ops only.
        manager: an `All2AllManager` whose cached dispatcher is used, so that layers share it; None: a new one.

    Raises ArgumentError if an argument breaks one of these rules. Source: vLLM ``FusedMoEPrepareAndFinalize``,
    ``FusedMoEPrepareAndFinalizeModular``.
    """
    need_one_of("kind", kind, DISPATCHERS)
    mk = bases if mk is None else mk
    base = base_of(mk, "FusedMoEPrepareAndFinalizeModular", "FusedMoEPrepareAndFinalize")
    manager = All2AllManager(group_name, rank, world, ops) if manager is None else manager
    wanted = {"kind": kind, "num_experts": num_experts, "max_num_tokens": max_num_tokens}
    made = _joined(PrepareAndFinalize, base, mk.FusedMoEActivationFormat, kind == "batched")
    return made(mk, manager.get_handle(wanted))


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
    """Return the experts of a rank, an object of a subclass of ``mk``'s base class.

    Args:
        mk: vLLM's module fused_moe.modular_kernel, 0.11 or newer; None: ``ascend_moe.interop.vllm.bases``.
        war: vLLM's module fused_moe.topk_weight_and_reduce; None: ``ascend_moe.interop.vllm.bases``.
        ops: namespace with npu_grouped_matmul, npu_swiglu and npu_dequant_swiglu_quant; without them, or None, this
            package's, which are torch_npu's for NPU tensors.
        quant_config: vLLM's FusedMoEQuantConfig, or this package's `FusedMoEQuantConfig`, which describes the supported
            values (int8 rows and weights, or unquantized); None: unquantized.
        num_local_experts: L.
        kind: "standard" or "batched", the format of the PrepareAndFinalize's rows.
        moe_config: vLLM's, in the newest releases: like quant_config it may contain parameters of the activation
            (limit, alpha, beta). None: none.

    Raises ArgumentError if an argument breaks one of these rules. Source: vLLM ``FusedMoEPermuteExpertsUnpermute``,
    ``FusedMoEExpertsModular``.
    """
    need_one_of("kind", kind, EXPERTS)
    need(num_local_experts >= 1, "num_local_experts", "is {}; need at least 1", num_local_experts)
    mk = bases if mk is None else mk
    base = base_of(mk, "FusedMoEExpertsModular", "FusedMoEPermuteExpertsUnpermute")
    made = _joined(Experts, base, mk.FusedMoEActivationFormat, kind == "batched")
    war = bases if war is None else war
    return made(war, ops, check_experts(quant_config), num_local_experts, moe_config)


@dataclass
class MoEKernelConfig:
    """Configuration of `select`.

    Attributes:
        group_name, rank, world, num_experts, max_num_tokens, manager: as for `make_prepare_finalize`.
        kind: as there; or "auto": "mc2" if max_num_tokens is up to 512, else "alltoall", which has no limit.
        experts_kind: as kind of `make_experts`; "auto": the one that fits. shared_experts: the kernel's.
        quant_config, ops, mk, war: as for `make_experts`, mk and ops as for `make_prepare_finalize` too.
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
        rule = "has no {}, which has no default: pass it"
        need(each.name in given or each.default is not MISSING, "config", rule, each.name)
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
    """Return the experts of ``config`` that fit ``prepare_finalize``, from `maybe_make_prepare_finalize`."""
    config = _config(config)
    kind, local = config.experts_kind, config.num_experts // config.world
    if kind == "auto":
        kind = "batched" if prepare_finalize.activation_format.name == "BatchedExperts" else "standard"
    return make_experts(config.mk, config.war, config.ops, config.quant_config, local, kind)


@with_typed_errors
def select(config: Any) -> Any:
    """Return the modular kernel of a configuration: this package's `FusedMoEModularKernel`, or with mk vLLM's class.

    ``config``: a `MoEKernelConfig`, or a mapping or an object with its names. Raises ArgumentError if the kinds do not
    fit, or a factory refuses an argument. Source: vLLM's ``init_prepare_finalize``, which calls
    ``maybe_make_prepare_finalize`` and ``select_gemm_impl``.
    """
    config = _config(config)
    prepare_finalize = maybe_make_prepare_finalize(config)
    chosen = select_gemm_impl(config, prepare_finalize)
    if config.mk is None or config.mk is bases:
        return FusedMoEModularKernel(prepare_finalize, chosen, config.shared_experts)
    if hasattr(config.mk, "FusedMoEModularKernel"):
        return config.mk.FusedMoEModularKernel(prepare_finalize, chosen, config.shared_experts)
    rule = "belong to the newest kernel's apply: leave them out here, pass them there"
    need(config.shared_experts is None, "shared_experts", rule)
    return config.mk.FusedMoEKernel(prepare_finalize, chosen)


init_prepare_finalize = select  # vLLM's name
