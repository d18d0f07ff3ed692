"""Comparison of a MoE layer's steps with the reference, on every rank, while the layer runs: `compare`.

Hooks record what a forward routes, dispatches, computes and combines, gather it from all ranks, compute the same with
`ascend_moe.reference` and find the first difference.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ascend_moe import reference
from ascend_moe.comm.place import Place
from ascend_moe.comparison.difference import STAGES, Rows
from ascend_moe.comparison.experts import Experts
from ascend_moe.comparison.taps import DispatcherTap, OpsTap, Step
from ascend_moe.dispatchers.base import Dispatcher
from ascend_moe.errors import ReferenceMismatch, need
from ascend_moe.layer import MoELayer
from ascend_moe.native.windows import ranks_per_server
from ascend_moe.ops.collectives import gather, gather_words

_PIECE = 2048  # words of an all-gather

Route = Callable[..., tuple[Tensor, Tensor]]


def compare(
    layer: nn.Module, parameters: Mapping[str, Tensor] | None = None, *, route: Route | None = None, raises: bool = True
) -> Comparison:
    """Compare every later forward of a layer with the reference, on all ranks of its group, until ``remove()``.

    Call it on all ranks, for a `MoELayer` with any dispatcher, or for another module whose forward calls the operators
    npu_moe_distribute_dispatch and _combine, as vllm-ascend's fused MoE does with MC2. Rows, scales and sums must equal
    the reference bit for bit. The experts' rows are recomputed in fp32 and must be within the tolerance of
    ``ascend-moe run``. A compared forward is slow, and gathers all tokens on every rank.

    Args:
        layer: the module. If it is no MoELayer, it or a module within it must have the experts' weights as
            ``w13_weight`` and ``w2_weight``, with scales ``w13_weight_scale`` and ``w2_weight_scale`` if int8 or int4.
        parameters: expected values of parameters, by their names in this rank's state dict of the layer, or of the
            module with the experts; they must be equal bit for bit. For int8 weights floats are quantized first.
        route: function of the arguments of ``forward`` that returns the weights (BS, K) and expert ids (BS, K) which
            must be dispatched; None: a MoELayer's own router, without replay or jitter; else they are not checked.
        raises: ``forward`` raises the first difference, on every rank; False: it is only stored in ``found``.

    Returns:
        A handle with ``steps``, ``found`` and ``remove()``; as a context manager, it calls ``remove()`` at exit.

    Raises:
        ArgumentError: the layer has no experts of these forms, or lacks one of ``parameters``.
        From ``forward``: ReferenceMismatch; ArgumentError if it called no such operators.
    """
    return Comparison(layer, dict(parameters or {}), route, raises)


class Comparison:
    """Handle returned by `compare`: it compares a layer's forwards until ``remove()`` or the end of its with block.

    Attributes:
        steps: number of compared forwards.
        found: the first difference, or None.
    """

    def __init__(self, layer: nn.Module, parameters: dict[str, Tensor], route: Route | None, raises: bool) -> None:
        self.steps = 0
        self.found: ReferenceMismatch | None = None
        self._experts, self._route, self._raises = Experts(layer, parameters), route, raises
        self._tap: DispatcherTap | OpsTap | None = None
        others = [hook for hook in layer._forward_pre_hooks.values() if hasattr(hook, "__self__")]
        known = any(isinstance(hook.__self__, Comparison) for hook in others)
        need(not known, "layer", "is compared already: call remove() of that comparison")
        self._handles = [
            layer.register_forward_pre_hook(self._before),
            layer.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks from the layer, so that later forwards are not compared."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Comparison:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _before(self, layer: nn.Module, args: Any) -> None:
        dispatcher = getattr(layer, "dispatcher", None)
        self._tap = DispatcherTap(dispatcher) if isinstance(dispatcher, Dispatcher) else OpsTap()  # type: ignore[no-untyped-call]
        self._tap.__enter__()

    @torch.no_grad()
    def _after(self, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        tap, self._tap = self._tap, None
        if tap is None:
            return
        tap.__exit__(None, None, None)
        if out is None:  # forward has raised
            return
        rule = "has called no npu_moe_distribute_dispatch and _combine in forward; pass its MoE module, and use MC2"
        step: Step | None = tap.step
        need(step is not None and step.out is not None, "layer", rule)
        assert step is not None
        self.steps += 1
        found = self._judged(layer, step, args, kwargs)
        self.found = self.found or found
        if found is not None and self._raises:
            raise found

    def _judged(self, layer: nn.Module, step: Step, args: Any, kwargs: Any) -> ReferenceMismatch | None:
        """Return the first difference on any rank: the earliest stage, on the lowest rank."""
        expected = self._expected(layer, args, kwargs)
        everyone = _gathered((step.given(), step.expert_rows()), step, self._experts.device)
        mine = step.route_difference(expected)
        if mine is None:
            mine = self._difference(step, [reference.RankInput(**one) for one, _ in everyone], [r for _, r in everyone])
        differences = [one for one in _gathered(mine, step, self._experts.device) if one is not None]
        if not differences:
            return None
        first = min(differences, key=lambda one: (STAGES.index(one["stage"]), one["rank"]))
        return ReferenceMismatch(first.pop("text"), **first)

    def _expected(self, layer: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
        """Return what must be dispatched, by the operators' names; nothing where it is unknown."""
        if self._route is not None:
            weights, ids = self._route(*args, **kwargs)
            return {"expert_ids": ids, "expert_scales": weights}
        if not isinstance(layer, MoELayer) or layer.replay is not None or layer.draws:  # ids are given, or drawn
            return {}
        capture, layer.capture = layer.capture, None
        try:
            given = {name: value for name, value in kwargs.items() if name != "global_bs"}
            x, *others = args if args else (given.pop("x"),)
            made = MoELayer.prepared(layer, x.to(layer.dtype), *others, **given)
        finally:
            layer.capture = capture
        return {"x": made.entering, "expert_ids": made.ids, "expert_scales": made.weights}

    def _difference(self, step: Step, inputs: list[reference.RankInput], rows: list[Tensor]) -> dict[str, Any] | None:
        """Return the first difference of this rank's rows, parameters, experts and sums."""
        common: dict[str, Any] = {"moe_expert_num": step.experts, "global_bs": step.sent.get("global_bs") or 0}
        common["special"] = step.special
        quant_mode = step.sent.get("quant_mode") or 0
        sent = reference.dispatch(inputs, quant_mode=quant_mode, **common)
        at = Rows(sent[step.place.rank], step.place)
        found = at.dispatch_differs(*step.arrived) or self._experts.parameter_differs(at)
        found = found or self._experts.rows_differ(at, rows[step.place.rank], quant_mode)
        if found is not None:
            return found
        share = ranks_per_server() if step.algorithm == "hierarchy" else 0
        mode = step.returned.get("comm_quant_mode") or 0
        sums = reference.combine(inputs, rows, sent, ranks_per_server=share, comm_quant_mode=mode, **common)
        assert step.out is not None
        return at.sums_differ(step.out, sums[step.place.rank])


def _gathered(value: Any, step: Step, device: torch.device) -> list[Any]:
    """Return every rank's ``value``: tensors on the CPU, in containers."""
    raw = io.BytesIO()
    torch.save(value, raw)
    mine = torch.frombuffer(bytearray(raw.getvalue().ljust(-(-raw.tell() // 4) * 4, b"\0")), dtype=torch.int32)

    def everyone(words: Tensor) -> Tensor:
        if isinstance(step.group, Place):
            return gather_words(words, step.group, device)
        return gather(words.to(device), step.group).cpu()

    sizes = everyone(torch.tensor([len(mine)], dtype=torch.int32, device="cpu"))[:, 0].tolist()
    padded = torch.nn.functional.pad(mine, (0, -(-max(sizes) // _PIECE) * _PIECE - len(mine)))
    whole = torch.cat([everyone(piece) for piece in torch.split(padded, _PIECE)], 1)
    return [
        torch.load(io.BytesIO(one[:size].contiguous().numpy().tobytes()), weights_only=True)
        for one, size in zip(whole, sizes, strict=True)
    ]
