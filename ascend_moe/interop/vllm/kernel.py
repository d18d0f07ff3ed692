"""Modular kernel for programs without vLLM: a PrepareAndFinalize and experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ascend_moe.errors import need, with_typed_errors
from ascend_moe.interop.vllm.experts import name_of
from ascend_moe.ops.whole import WholeCall, WholeLayer


def misfit(prepare_finalize: Any, fused_experts: Any) -> str:
    """Return why the two cannot be joined; "" if they can."""
    given, taken = prepare_finalize.activation_format, fused_experts.activation_formats[0]
    if given.name == taken.name:
        return ""
    names = type(prepare_finalize).__name__, type(fused_experts).__name__
    return f"{names[0]} returns {given.name} rows, {names[1]} needs {taken.name} rows"


class FusedMoEModularKernel(WholeLayer):
    """Experts of a layer over all ranks: prepare, experts, finalize.

    Args:
        prepare_finalize, fused_experts: of ``make_prepare_finalize`` and ``make_experts``, or others with the
            same methods; their formats must be equal.
        shared_experts: a module for all tokens; it runs while combine is in flight.

    Raises:
        ArgumentError: the formats differ.

    Source: vLLM 0.11 ``FusedMoEModularKernel``.
    """

    @with_typed_errors
    def __init__(self, prepare_finalize: Any, fused_experts: Any, shared_experts: nn.Module | None = None) -> None:
        super().__init__()
        reason = misfit(prepare_finalize, fused_experts)
        need(not reason, "fused_experts", "do not fit: {}; make both standard or both batched", reason)
        self.prepare_finalize = prepare_finalize
        self.fused_experts = fused_experts
        self.shared_experts = shared_experts

    def output_is_reduced(self) -> bool:
        """Return whether the result is complete, so that no all-reduce may follow."""
        return bool(self.prepare_finalize.output_is_reduced())

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
            inplace: write the result into hidden_states; not with shared_experts, which read them later.
            activation: "silu". global_num_experts: E; -1: prepare_finalize's.
            expert_map: ``(E,)``. apply_router_weight_on_input: the weights multiply x; K is 1.

        Returns:
            ``(T, H)``; with shared_experts a pair, their output first.
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
