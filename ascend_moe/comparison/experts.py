"""The experts of a layer, recomputed in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ascend_moe._tensors import without_autocast
from ascend_moe.comparison.difference import Rows, first_of, mismatch
from ascend_moe.errors import need
from ascend_moe.experts import Activation, quantize_weight
from ascend_moe.experts.int4 import unpack_int4
from ascend_moe.experts.quant import scale_of_bits
from ascend_moe.experts.weights import plain
from ascend_moe.layer import MoELayer

# |difference| <= tolerance * (RMS of the expected values + |expected value|)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
QUANT_TOLERANCE = 2e-1


class Experts:
    """This rank's experts in a layer, and checks of their output rows, recomputed in fp32, and of their parameters.

    The weights are ``w_gate_up`` and ``w_down`` of a MoELayer, else ``w13_weight`` and ``w2_weight`` of it or a module
    within; ``parameters``: expected values by name in the state dict. Raises ArgumentError if the layer lacks one.
    """

    def __init__(self, layer: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self._names = ("w_gate_up", "w_down") if isinstance(layer, MoELayer) else ("w13_weight", "w2_weight")
        layer = next((one for one in layer.modules() if hasattr(one, self._names[0])), layer)
        self._layer: Any = layer
        rule = "is a {} without {}; pass a MoELayer, or a module with w13_weight and w2_weight"
        for name in self._names:
            need(hasattr(layer, name), "layer", rule, type(layer).__name__, name)
        self._parameters = parameters
        state = layer.state_dict()
        for name, value in parameters.items():
            rule = "has {} {}, which the layer lacks; pass names and shapes of this rank's state dict"
            known = name in state and (state[name].shape == value.shape or state[name].dtype == torch.int32)
            need(known, "parameters", rule, name, value)
        self.device: torch.device = getattr(layer, self._names[0]).device

    def _matrix(self, number: int, local: int, width: int) -> Tensor:
        """Return the fp32 weight (inputs, outputs) of one expert's first or second product, of rows of ``width``."""
        name = self._names[number]
        weight, scale = plain(getattr(self._layer, name))[local].cpu(), getattr(self._layer, f"{name}_scale", None)
        values = (unpack_int4(weight) if weight.dtype == torch.int32 else weight).float()
        if values.shape[number] != width:
            values = values.T  # as loaded; vllm-ascend transposes w13 and w2 later
        if scale is not None:
            scale = (scale_of_bits(scale) if scale.dtype == torch.int64 else scale)[local].cpu().float()
            groups = scale.reshape(-1, values.shape[1])
            values = values * groups.repeat_interleave(values.shape[0] // len(groups), 0)
        return values

    @without_autocast
    def rows_differ(self, at: Rows, got: Tensor, quant_mode: int) -> dict[str, Any] | None:
        """Return the first element of the experts' output ``got`` that is not within the tolerance, or None."""
        want = self._run(at).float()
        tolerance = QUANT_TOLERANCE if quant_mode else TOLERANCES[got.dtype]
        got = got.float()
        rms = want[want.isfinite()].double().square().mean().sqrt().nan_to_num()  # 0 without finite values
        near = torch.isclose(got, want, tolerance, tolerance * float(rms), equal_nan=True)
        return at.rows_differ("experts", got, want, ~near)

    def _run(self, at: Rows) -> Tensor:
        rows, layer = at.want.expand_x.float(), self._layer
        if at.want.dynamic_scales is not None:
            rows = rows * at.want.dynamic_scales[:, None]
        width = rows.shape[1]
        act = layer.activation if isinstance(layer, MoELayer) else getattr(layer, "activation", "silu")
        activation = Activation.of(getattr(act, "value", act))  # of an enum
        biases = [getattr(layer, name, None) for name in ("gate_up_bias", "down_bias")]
        out, start = [rows.new_empty(0, width)], 0
        for local, count in enumerate(at.counts):
            if count:
                first, second = (0.0 if bias is None else bias[local].cpu().float() for bias in biases)
                hidden = activation(rows[start : start + count] @ self._matrix(0, local, width) + first)
                out.append(hidden.float() @ self._matrix(1, local, width) + second)
            start += count
        return torch.cat(out)

    def parameter_differs(self, at: Rows) -> dict[str, Any] | None:
        """Return the first element of a parameter that differs in bits from its expected value, or None."""
        state = self._layer.state_dict()
        for name, value in self._parameters.items():
            got, want = plain(state[name]).cpu(), value.detach().cpu()
            if got.dtype == torch.int8 and want.is_floating_point():
                want = quantize_weight(want)[0]
            place = first_of(got, want.to(got.dtype))
            if place is not None:
                row, element = place
                of_expert = got.dim() > 1 and len(got) == at.local
                where = at.of_expert(row, element) if of_expert else {"element": row if got.dim() < 2 else element}
                expected, found = (one.reshape(len(got), -1)[row, element] for one in (want.to(got.dtype), got))
                return mismatch("parameters", at.rank, expected, found, where, name)
        return None
