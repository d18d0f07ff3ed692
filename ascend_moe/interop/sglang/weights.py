"""EPMoE's weights: parameters, fp8 configuration, SGLang's loader and processing after loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ascend_moe._tensors import FLOATS, FittedModule, leaves_empty, without_casts
from ascend_moe.dispatchers.base import ROW_DTYPES
from ascend_moe.errors import need, need_dtype, need_one_of, need_shape, with_typed_errors
from ascend_moe.experts.quant import FP8, FP8_MAX, scaled
from ascend_moe.experts.rank_experts import RankExperts, held_text
from ascend_moe.experts.weights import Codes, ScaleWatch, keep_codes
from ascend_moe.ops.whole import WholeLayer

_SHARDS = ("w1", "w2", "w3")  # gate, down, up
_WEIGHTS = ("w13_weight", "w2_weight")


@dataclass(frozen=True)
class Fp8Config:
    """Configuration of fp8 (e4m3) weights and activations; SGLang's class of this name works too.

    Attributes:
        is_checkpoint_fp8_serialized: weights and their scales are loaded as fp8; False: they are quantized after
            loading. None: fp8 if weight scales are loaded.
        activation_scheme: "dynamic", or "static": the checkpoint has input scales.
    """

    is_checkpoint_fp8_serialized: bool | None = False
    activation_scheme: str = "dynamic"

    @classmethod
    def of(cls, given: Any) -> Fp8Config:
        """Return the configuration described by ``given``: SGLang's object, or a checkpoint's quantization_config.

        It has activation_scheme, and may have is_checkpoint_fp8_serialized. Raises ArgumentError if activation_scheme
        is unknown, or a quant_method is not "fp8", a fmt not "e4m3", or weight_block_size is set.
        """

        def read(name: str) -> Any:
            return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)

        scheme, method = read("activation_scheme"), read("quant_method")
        serialized = read("is_checkpoint_fp8_serialized")
        rule = "has activation_scheme {!r}; need an Fp8Config, 'dynamic' or 'static'"
        need(scheme in ("dynamic", "static"), "quant_config", rule, scheme)
        need(method in (None, "fp8"), "quant_config", "has quant_method {!r}; need 'fp8'", method)
        blocks, fmt = read("weight_block_size"), read("fmt")
        rule = "has weight_block_size {}; a weight must have one scale: use a checkpoint without blocks"
        need(blocks is None, "quant_config", rule, blocks)
        need(fmt in (None, "e4m3"), "quant_config", "has fmt {!r}; need 'e4m3'", fmt)
        return cls(None if serialized is None else bool(serialized), scheme)


class UnquantizedEPMoEMethod:
    """Factory of an EPMoE's unquantized parameters, in params_dtype. Source: SGLang ``UnquantizedEPMoEMethod``."""

    quant_config: Fp8Config | None = None

    def create_weights(
        self,
        layer: nn.Module,
        num_experts_per_partition: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``w13_weight`` ``(L, 2F, H)`` and ``w2_weight`` ``(L, H, F)`` in ``layer``, without values.

        With a quant_config they are fp8 if is_checkpoint_fp8_serialized is True, and float32 scales are registered too,
        NaN until they are loaded: ``w13_weight_scale`` ``(L, 2)``, ``w2_weight_scale`` ``(L,)``, and with static
        activations ``w13_input_scale`` and ``w2_input_scale`` ``(L,)``.

        Args:
            layer: receives the parameters. params_dtype: dtype of unquantized weights.
            num_experts_per_partition, hidden_size, intermediate_size: L, H and F.
            extra_weight_attrs: attributes of each parameter, such as ``weight_loader``.
        """
        local, config = num_experts_per_partition, self.quant_config
        dtype = FP8 if config is not None and config.is_checkpoint_fp8_serialized else params_dtype
        hidden, inner = hidden_size, intermediate_size
        put(layer, "w13_weight", torch.empty(local, 2 * inner, hidden, dtype=dtype), **extra_weight_attrs)
        put(layer, "w2_weight", torch.empty(local, hidden, inner, dtype=dtype), **extra_weight_attrs)
        scales: dict[str, tuple[int, ...]] = {}
        if config is not None:
            scales |= {"w13_weight_scale": (local, 2), "w2_weight_scale": (local,)}
            if config.activation_scheme == "static":
                scales |= {"w13_input_scale": (local,), "w2_input_scale": (local,)}
        for name, shape in scales.items():
            put(layer, name, torch.full(shape, torch.nan, dtype=torch.float32), **extra_weight_attrs)

    def process_weights_after_loading(self, layer: ExpertWeights) -> None:
        """Call ``layer.process_weights_after_loading()``."""
        layer.process_weights_after_loading()


class Fp8EPMoEMethod(UnquantizedEPMoEMethod):
    """Factory of an EPMoE's fp8 (e4m3) weights, one scale per matrix. Source: SGLang ``Fp8EPMoEMethod``.

    ``quant_config`` is what `Fp8Config.of` accepts; it refuses a scale per block.
    """

    @with_typed_errors
    def __init__(self, quant_config: Any) -> None:
        self.quant_config = Fp8Config.of(quant_config)
        self.block_quant = False


def put(layer: nn.Module, name: str, value: Tensor, **attributes: Any) -> None:
    """Register ``value`` as parameter ``name`` of ``layer`` with these attributes; fp8 parameters are `Codes`."""
    made = Codes(value) if value.dtype == FP8 else nn.Parameter(value, requires_grad=False)
    for attribute, given in attributes.items():
        setattr(made, attribute, given)
    layer.register_parameter(name, made)


def make_expert_params_mapping(
    ckpt_gate_proj_name: str, ckpt_down_proj_name: str, ckpt_up_proj_name: str, num_experts: int
) -> list[tuple[str, str, int, str]]:
    """Return (start of the parameter's name, part of the checkpoint's name, expert, shard "w1", "w2" or "w3").

    Args:
        ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name: the checkpoint's names of the three projections.
        num_experts: E; the list has three entries for each. Source: SGLang ``EPMoE.make_expert_params_mapping``.
    """
    names = zip(_SHARDS, (ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name), strict=True)
    shards = [("experts.w2_" if shard == "w2" else "experts.w13_", name, shard) for shard, name in names]
    return [
        (param, f"experts.{expert}.{name}.", expert, shard)
        for expert in range(num_experts)
        for param, name, shard in shards
    ]


class ExpertWeights(RankExperts, FittedModule, WholeLayer):
    """Base of EPMoE with its parameters, which it loads, copies, casts and quantizes."""

    _shared = ("group",)
    _expert_parameters = (*_WEIGHTS, "w13_weight_scale", "w2_weight_scale", "w13_input_scale", "w2_input_scale")

    w13_weight: Tensor
    w2_weight: Tensor
    w13_weight_scale: Tensor
    w2_weight_scale: Tensor
    w13_input_scale: Tensor
    w2_input_scale: Tensor
    group: dist.ProcessGroup | None
    start_expert_id: int
    end_expert_id: int
    num_experts_per_partition: int
    hidden_size: int
    intermediate_size: int
    params_dtype: torch.dtype
    use_fp8_w8a8: bool
    num_experts: int
    quant_method: UnquantizedEPMoEMethod

    @property
    def held(self) -> str:
        """This rank's experts, as text for error messages."""
        return held_text(list(range(self.start_expert_id, self.end_expert_id + 1)), self.num_experts)

    def _make_parameters(self, config: Fp8Config | None) -> None:
        self._serialized = None if config is None else config.is_checkpoint_fp8_serialized
        self._codes_came = False  # fp8 weights were loaded, so their scales must be
        self._static = config is not None and config.activation_scheme == "static"
        sizes = self.num_experts_per_partition, self.hidden_size, self.intermediate_size
        self.quant_method.create_weights(self, *sizes, self.params_dtype, weight_loader=self.weight_loader)
        self._ready = config is None
        self._watch = ScaleWatch(*_WEIGHTS)

    def _put(self, name: str, value: Tensor) -> None:
        put(self, name, value, weight_loader=self.weight_loader)

    def _put_again(self) -> None:
        """Register parameters again that torch has replaced."""
        keep_codes(self, *(name for name in _WEIGHTS if getattr(self, name).dtype == FP8))
        for parameter in self.parameters():
            parameter.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        if self.use_fp8_w8a8 and self._ready:
            self._watch.renew(self)

    def _forget_scales(self, names: Iterable[str]) -> None:
        """Reset scales to NaN, as before loading."""
        for name in names if not self._ready else ():
            self._put(name, torch.full_like(getattr(self, name), torch.nan, device=self.w2_weight.device))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load floats, or after process_weights_after_loading fp8 codes together with their scales."""
        for name in _WEIGHTS if self.use_fp8_w8a8 and self._ready else ():
            given = [prefix + each in state_dict for each in (name, f"{name}_scale")]
            need(given[0] == given[1], prefix + name, "and its scale belong together: pass both or none")
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._forget_scales([name for name in self._scales if getattr(self, name).is_meta])
        self._put_again()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExpertWeights:
        """Move and cast. fp8 codes and scales keep their dtypes; ``params_dtype`` follows the other weights."""
        dtype = fn(self.w2_weight.detach().new_empty(0, dtype=self.params_dtype)).dtype
        need(dtype in ROW_DTYPES, "params_dtype", "is {}; it must be bf16, fp16 or fp32", dtype)
        kept = (each for name, each in self.named_parameters() if name.endswith("scale") or each.dtype == FP8)
        super()._apply(without_casts(fn, kept), recurse)
        self.params_dtype = dtype
        if leaves_empty(fn):
            self._forget_scales(self._scales)
        self._put_again()
        return self

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._put_again()

    @property
    def _scales(self) -> list[str]:
        return [name for name in self._parameters if name.endswith("scale")]

    @with_typed_errors
    def weight_loader(
        self, param: nn.Parameter, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        """Copy one expert's weight or scale into ``param``; those of other ranks' experts are skipped.

        Args:
            param: one of this layer's parameters.
            loaded_weight: w1, w3 ``(F, H)``, w2 ``(H, F)``; a scale has one value.
            weight_name: its name in the checkpoint; a scale's contains "input_scale" or "weight_scale".
            shard_id: "w1" (gate), "w2" (down) or "w3" (up). expert_id: 0..E-1.

        Raises ArgumentError if the shard has another name, shape or dtype do not fit, w1 and w3 of an expert have input
        scales that differ by more than 1e-5, or after process_weights_after_loading with fp8. Source: SGLang
        ``EPMoE.weight_loader``.
        """
        need_one_of("shard_id", shard_id, _SHARDS)
        rule = "is of weights that have been processed with their scales: load other weights into a new layer"
        need(not (self.use_fp8_w8a8 and self._ready), "param", rule)
        floats = (*FLOATS, FP8) if self.use_fp8_w8a8 else FLOATS
        need_dtype(weight_name, loaded_weight, *((FP8,) if param.dtype == FP8 else floats))
        if not self.start_expert_id <= expert_id <= self.end_expert_id:
            return
        place = param.data[expert_id - self.start_expert_id]
        if "input_scale" in weight_name or "weight_scale" in weight_name:
            rule = "is {} for {}; a scale must have one value"
            need(loaded_weight.numel() == 1, "loaded_weight", rule, loaded_weight.shape, weight_name)
            value = loaded_weight.reshape(())
            if "input_scale" in weight_name:
                before, after = float(place), float(value)
                rule = "is {:g} for {}, but {:g} was loaded before; w1 and w3 need the same input scale"
                need(not abs(before - after) > 1e-5, "loaded_weight", rule, after, weight_name, before)
                place.copy_(value)
            elif shard_id == "w2":
                place.copy_(value)
            else:
                place[_SHARDS.index(shard_id) // 2] = value
            return
        if shard_id != "w2":
            first = 0 if shard_id == "w1" else self.intermediate_size
            place = place[first : first + self.intermediate_size]
        need_shape("loaded_weight", loaded_weight, tuple(place.shape))
        self._codes_came |= loaded_weight.dtype == FP8
        place.copy_(loaded_weight)  # other floats represent fp8's values exactly

    @torch.no_grad()
    def process_weights_after_loading(self) -> None:
        """Finish fp8 weights: requantize gate and up of w13 by a common scale, or quantize weights loaded as floats.

        Does nothing without fp8, or when called again. Raises ArgumentError if a scale has not been loaded.
        """
        if self._ready:
            return
        if self._static:
            self._need_loaded("w13_input_scale", "w2_input_scale")
        scales = (self.w13_weight_scale, self.w2_weight_scale)
        serialized = self._serialized or self._codes_came
        if self._serialized is None:
            serialized = serialized or not all(bool(scale.isnan().all()) for scale in scales)
        if not serialized:
            for name in _WEIGHTS:
                weight = getattr(self, name).float()
                top = weight.abs().amax((1, 2))
                scale = torch.where(top == 0, 1.0, top / FP8_MAX)
                self._replace(name, weight, scale)
        else:
            self._need_loaded("w13_weight_scale", "w2_weight_scale")
            halves = self.w13_weight_scale
            each = halves.repeat_interleave(self.intermediate_size, dim=1)
            self._replace("w13_weight", self.w13_weight.float() * each[..., None], halves.amax(1))
            self._put("w2_weight", self.w2_weight.to(FP8))
        self._ready = True
        self._watch.renew(self)

    def _replace(self, name: str, weight: Tensor, scale: Tensor) -> None:
        codes = torch.stack([scaled(w, s.expand(len(w)), FP8) for w, s in zip(weight, scale, strict=True)])
        self._put(name, codes)
        self._put(f"{name}_scale", scale)

    def _need_loaded(self, *names: str) -> None:
        for name in names:
            rule = "has not been loaded for every expert of this rank: load it first"
            need(not bool(getattr(self, name).isnan().any()), name, rule)
