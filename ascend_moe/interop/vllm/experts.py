"""Experts of vLLM's modular kernel over this package's grouped matmuls, and their FusedMoEQuantConfig."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ascend_moe.errors import need, need_dims, need_one_of, need_shape, with_signature_of, with_typed_errors
from ascend_moe.experts import Activation, grouped_mlp
from ascend_moe.interop.vllm.bases import FusedMoEPermuteExpertsUnpermute
from ascend_moe.native.torch_npu import on_npu
from ascend_moe.permute import need_map, sort_by_expert

P = ParamSpec("P")
R = TypeVar("R")

#: Parameters of the activation in the newest releases: argument, attribute, `Activation`'s field, neutral value.
_ACTIVATION = (
    ("quant_config", "gemm1_clamp_limit", "limit", 0),
    ("quant_config", "gemm1_alpha", "alpha", 1),
    ("quant_config", "gemm1_beta", "bias", 0),
    ("moe_config", "swiglu_limit", "limit", 0),
    ("moe_config", "swiglu_alpha", "alpha", 1),
    ("moe_config", "swiglu_beta", "bias", 0),
    ("moe_config", "activation_situ_beta", "beta", None),
    ("moe_config", "activation_situ_linear_beta", "linear_beta", None),
)
#: Activations with numbers that vLLM has no default for: their attribute of moe_config, its number, other defaults.
_NEEDED: dict[str, tuple[str, str, dict[str, float]]] = {
    "swigluoai_uninterleave": ("swiglu_limit", "limit", {"alpha": 1.0, "bias": 0.0}),
    "situ": ("activation_situ_beta", "beta", {}),
}
#: vLLM's names -> `ascend_moe.experts.activations`' names. "swigluoai" interleaves gate and up, as gpt-oss's files.
ACTIVATIONS = {
    "silu": "swiglu",
    "gelu": "geglu",
    "gelu_tanh": "geglu_tanh",
    "relu2": "reglu2",
    "swigluoai": "clipped_swiglu",
    "swigluoai_uninterleave": "clipped_swiglu",
    "swiglustep": "swiglustep",
    "situ": "situglu",
}


@dataclass
class FusedMoEQuantConfig:
    """Quantization of a layer, for programs without vLLM, whose class has this name; the defaults mean none.

    Attributes:
        quant_dtype: dtype in which rows are sent: int8, or None: the activations'.
        per_act_token_quant: every row has its own scale; must be True with int8.
        w1_scale, w2_scale: with int8 the weights' scales per output channel, ``(L, 2F)`` and ``(L, H)`` float32, also
            with a dimension of 1 before or after the last; else None.
        per_out_ch_quant: not read.
        block_shape, a1_scale, a2_scale, w1_bias, w2_bias, w1_zp, w2_zp: must stay None.
    """

    quant_dtype: torch.dtype | str | None = None
    per_act_token_quant: bool = False
    per_out_ch_quant: bool = False
    block_shape: list[int] | None = None
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None
    w1_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    w1_zp: Tensor | None = None
    w2_zp: Tensor | None = None

    @classmethod
    def make(cls, quant_dtype: torch.dtype | str | None = None, *args: Any, **kwargs: Any) -> FusedMoEQuantConfig:
        """Return an object with quant_dtype and, as args in their order or kwargs by name, the other attributes."""
        return cls(quant_dtype, *args, **kwargs)

    @property
    def is_quantized(self) -> bool:
        """Whether rows are quantized."""
        return self.quant_dtype is not None


def int8_w8a8_moe_quant_config(
    w1_scale: Tensor,
    w2_scale: Tensor,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    *,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    per_act_token_quant: bool = True,
) -> FusedMoEQuantConfig:
    """Return the configuration of int8 weights with a scale per output channel and int8 rows with a scale each.

    w1_scale, w2_scale, a1_scale, a2_scale, w1_bias, w2_bias are as of `FusedMoEQuantConfig`: the last four None.
    per_act_token_quant is False by default in vLLM; `make_experts` refuses False.
    """
    scales = (w1_scale, w2_scale, a1_scale, a2_scale)
    return FusedMoEQuantConfig(torch.int8, per_act_token_quant, True, None, *scales, w1_bias, w2_bias)


def with_optional_inplace(call: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``call`` for positional arguments of newer vLLM releases, which have no inplace between ids and activation.

    As the activation is no bool, one in the place of inplace means that inplace was left out.
    """
    at = list(inspect.signature(call).parameters).index("inplace")

    @functools.wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        given: Any = args if len(args) <= at or isinstance(args[at], bool) else (*args[:at], False, *args[at:])
        return call(*given, **kwargs)

    return run


def is_w8a8(quant_config: Any) -> bool:
    """Return True if rows are sent as int8 with a scale each, False if unquantized.

    quant_config is vLLM's FusedMoEQuantConfig of any release, an object with its attributes, or None: unquantized.
    Raises ArgumentError for another quantization.
    """
    dtype = getattr(quant_config, "quant_dtype", None)
    if dtype is None:
        return False
    need(dtype == torch.int8, "quant_config", "has quant_dtype {}; need None, or int8 with a scale per token", dtype)
    by_token = getattr(quant_config, "per_act_token_quant", False) or getattr(quant_config, "is_per_act_token", False)
    need(bool(by_token), "quant_config", "has int8 rows without per_act_token_quant: set it to True")
    given = getattr(quant_config, "a1_scale", None) is not None or getattr(quant_config, "a2_scale", None) is not None
    need(not given, "quant_config", "has a1_scale or a2_scale, but rows have their own scales: leave them out")
    return True


def check_experts(quant_config: Any) -> Any:
    """Return quant_config, or the default for None. Raises ArgumentError if the experts do not support it."""
    config = FusedMoEQuantConfig() if quant_config is None else quant_config
    for name in ("w1_bias", "w2_bias", "w1_zp", "w2_zp"):
        rule = "has {}, but experts have no biases and zero points: leave it out"
        need(getattr(config, name, None) is None, "quant_config", rule, name)
    rule = "has block_shape; need scales per channel: pass block_shape None"
    need(getattr(config, "block_shape", None) is None, "quant_config", rule)
    scales = [getattr(config, name, None) for name in ("w1_scale", "w2_scale")]
    if is_w8a8(config):
        need(all(each is not None for each in scales), "quant_config", "needs w1_scale and w2_scale with int8 rows")
    else:
        rule = "has scales of weights but unquantized rows; pass quant_dtype int8 and per_act_token_quant too"
        need(all(each is None for each in scales), "quant_config", rule)
    return config


def activation_of(name: str, quant_config: Any, moe_config: Any) -> Activation:
    """Return the activation with vLLM's ``name``, with its parameters (limit, alpha, beta) from the two configs.

    Raises ArgumentError if the name is unknown, a config sets a parameter that the activation does not have, or none
    sets one that vLLM has no default for.
    """
    need_one_of("activation", name, ACTIVATIONS)
    activation = Activation(ACTIVATIONS[name], interleaved=name == "swigluoai")
    given = {"quant_config": quant_config, "moe_config": moe_config}
    numbers: dict[str, float] = {}
    for argument, attribute, number, plain in _ACTIVATION:
        value = getattr(given[argument], attribute, None)
        if value is not None and activation.has(number):
            numbers.setdefault(number, value)
        rule = "has {} {}, but activation {!r} has no such parameter: pass {} or None"
        need(value in (None, plain) or activation.has(number), argument, rule, attribute, value, name, plain)
    if name in _NEEDED:
        attribute, number, defaults = _NEEDED[name]
        need(number in numbers, "activation", "is {!r}, which needs {} in make_experts' moe_config", name, attribute)
        numbers = defaults | numbers
    return replace(activation, numbers=numbers)


_OPERATORS = ("npu_grouped_matmul", "npu_swiglu", "npu_dequant_swiglu_quant")


class Experts:
    """Experts of a rank in both formats of rows: `make_experts` joins it with a base class of vLLM 0.11 or newer."""

    batched: bool  # format of the rows, of each class
    row_format: Any

    def __init__(self, war: Any, ops: Any, quant_config: Any, num_local_experts: int, moe_config: Any) -> None:
        self.war = war
        self.quant_config = quant_config
        self.num_local_experts = num_local_experts
        self.operators = ops if all(hasattr(ops, name) for name in _OPERATORS) else None
        self.quantized = is_w8a8(quant_config)
        self.activation = Activation()
        # The newest kernel reads these attributes.
        self.moe_config = SimpleNamespace(moe_parallel_config=None) if moe_config is None else moe_config
        self.max_num_tokens = self.num_dispatchers = None

    # ---- what it is

    @classmethod
    def activation_format(cls) -> Any:
        return cls.row_format

    @property
    def activation_formats(self) -> tuple[Any, Any]:
        return self.row_format, self.row_format

    def supports_chunking(self) -> bool:
        """Return False: a part of the rows would need its own counts."""
        return False

    def supports_expert_map(self) -> bool:
        """Return True: `apply` takes expert_map for rows with global ids, from another prepare."""
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Return a TopKWeightAndReduceDelegate: the experts' rows are weighted and summed by combine."""
        return self.war.TopKWeightAndReduceDelegate()

    # The bases read these from the config's class; here any object with some of them works.
    quant_dtype = property(lambda self: getattr(self.quant_config, "quant_dtype", None))
    per_act_token_quant = property(lambda self: self.quantized)
    a1_scale = property(lambda self: getattr(self.quant_config, "a1_scale", None))
    a2_scale = property(lambda self: getattr(self.quant_config, "a2_scale", None))
    w1_scale = property(lambda self: getattr(self.quant_config, "w1_scale", None))
    w2_scale = property(lambda self: getattr(self.quant_config, "w2_scale", None))

    # ---- queries of the newest releases on the class

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return name_of(activation) in ACTIVATIONS

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        kinds = {getattr(key, "dtype", None) for key in (weight_key, activation_key)}
        return kinds in ({None}, {torch.int8})

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    # ---- memory

    def workspace_shapes(self, *args: Any, **kwargs: Any) -> Any:
        """Return the shapes of workspace13, workspace2 and the output, in the form of the calling vLLM release.

        Args:
            0.11: a, aq, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta.
            newest: M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation.
            M: number of rows (batched: of places per expert). N: 2F. K: H.

        Returns ``(M*topk, max(N, K))``, ``(M*topk, N // 2)``, ``(M*topk, K)``; batched ``(L, M, ...)`` each; for 0.11
        also a's dtype. The modular kernel may put the output into workspace13; `apply` uses no workspace.
        """
        first = kwargs.pop("a", args[0] if args else None)
        if not isinstance(first, Tensor):
            return self._shapes(*args, **kwargs)
        given = [each for each in args if not isinstance(each, Tensor)]
        kwargs.pop("aq", None)
        return *self._shapes(*given, **kwargs), first.dtype

    def _shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int = 0, local_num_experts: int = 0,
        expert_tokens_meta: Any = None, activation: Any = None,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:  # fmt: skip
        rows = (self.num_local_experts, M) if self.batched else (M * topk,)
        return (*rows, max(N, K)), (*rows, N // 2), (*rows, K)

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        """Return act_dtype: workspaces and output have the tokens' dtype."""
        return act_dtype

    # ---- the experts

    @with_signature_of(FusedMoEPermuteExpertsUnpermute.apply)
    @with_typed_errors
    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor, activation: Any,
        expert_map: Tensor | None, a1q_scale: Tensor | None, a2_scale: Tensor | None, expert_tokens_meta: Any,
    ) -> None:  # fmt: skip
        """Run the experts on every row: product with w1, activation, product with w2; rows are not weighted or summed.

        Args:
            output: ``(M*K, H)`` or, batched, ``(L, M, H)``, in the tokens' dtype, to write to; may lie in workspace13.
                Unused rows and places are not changed, on an NPU undefined.
            hidden_states: prepare's rows, ``(M, H)`` or ``(L, M, H)``; int8 if quant_config has quant_dtype int8.
            w1: ``(L, 2F, H)``, gate rows first. w2: ``(L, H, F)``. In the rows' dtype.
            topk_ids: ``(M, K)``, ids of the rows. Not read for this package's prepare, whose rows are in expert order;
                others are sorted by them, which reads counts on the host; -1 and other ranks' experts: zeros.
            activation: a name, or vLLM's MoEActivation, of ``quantization.ACTIVATIONS``; its limit, alpha and beta are
                quant_config's or moe_config's.
            expert_map: ``(E,)``, local numbers of global ids, -1 for experts of other ranks; for sorted rows only.
            a1q_scale: one scale for each int8 row; None for other rows.
            expert_tokens_meta: number of rows of each local expert; needed for batched rows. None, or that of another
                prepare: standard rows are sorted.
            topk_weights, global_num_experts, workspace13, workspace2, apply_router_weight_on_input: not used.
            a2_scale: None.

        Raises ArgumentError if an argument breaks one of these rules.
        """
        self.activation = activation_of(name_of(activation), self.quant_config, self.moe_config)
        self._check(hidden_states, w1, w2, a1q_scale, a2_scale)
        with torch.no_grad():
            if self.batched:
                self._places(output, hidden_states, w1, w2, a1q_scale, expert_tokens_meta)
            elif topk_ids.shape[1] == 1 and getattr(expert_tokens_meta, "rows_by_expert", False):
                counts = _counts(expert_tokens_meta)
                need_shape("output", output, tuple(hidden_states.shape))
                self._mlp(hidden_states, w1, w2, counts, a1q_scale, output.dtype, output)
            else:
                self._sorted(output, hidden_states, w1, w2, topk_ids, expert_map, a1q_scale)

    def _mlp(
        self, rows: Tensor, w1: Tensor, w2: Tensor, counts: Tensor, scales: Tensor | None, dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the experts on rows in expert order; the work is proportional to counts."""
        given: dict[str, Any] = {"operators": self.operators, "activation": self.activation}
        if self.quantized:
            assert scales is not None
            local, double, hidden = w1.shape
            given |= {
                "dynamic_scales": scales.reshape(len(rows)),
                "w_gate_up_scale": self.w1_scale.reshape(local, double),
                "w_down_scale": self.w2_scale.reshape(local, hidden),
            }
            if on_npu(rows) and dtype == torch.bfloat16:  # the NPU needs the output's dtype there
                given["w_down_scale"] = given["w_down_scale"].to(dtype)
        weights = (w1.transpose(1, 2), w2.transpose(1, 2))
        return grouped_mlp(rows, *weights, counts, output_dtype=dtype, out=out, **given)

    def _sorted(
        self, output: Tensor, x: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
        scales: Tensor | None,
    ) -> None:  # fmt: skip
        """Run the experts on rows of tokens with K experts each: sort, multiply, and write by (token, k)."""
        tokens, topk = topk_ids.shape
        need_shape("topk_ids", topk_ids, (len(x), topk), dtypes=(torch.int32, torch.int64))
        shapes = ((tokens * topk, x.shape[1]), (tokens, topk, x.shape[1]))
        need_shape("output", output, *shapes)
        ids = topk_ids
        if expert_map is not None:
            need_map(expert_map, len(expert_map), self.num_local_experts)
            known = (ids >= 0) & (ids < len(expert_map))
            ids = torch.where(known, expert_map[torch.where(known, ids, 0).long()], -1)
        pairs = sort_by_expert(ids, self.num_local_experts)
        first, last = int(pairs.bounds[0]), int(pairs.bounds[-1])
        chosen = pairs.order[first:last]
        own = None if scales is None else scales.reshape(-1)[chosen // topk]
        made = self._mlp(x[chosen // topk], w1, w2, pairs.bounds.diff(), own, output.dtype)
        flat = output.view(tokens * topk, x.shape[1])
        flat.zero_()
        flat[chosen] = made

    def _places(
        self, output: Tensor, x: Tensor, w1: Tensor, w2: Tensor, scales: Tensor | None, expert_tokens_meta: Any
    ) -> None:
        """Run the experts on batched rows, compacted first."""
        local, most, hidden = x.shape
        need_shape("output", output, (local, most, hidden))
        rule = "is None; batched rows need counts of experts: pass prepare's"
        need(expert_tokens_meta is not None, "expert_tokens_meta", rule)
        counts = _counts(expert_tokens_meta)[:local]
        free = (torch.arange(most, device=x.device) >= counts[:, None]).reshape(-1)
        # Sorting avoids that the NPU waits for the number of rows; on a CPU only used rows are read.
        used = free.to(torch.uint8).argsort(stable=True) if on_npu(x) else (~free).nonzero().squeeze(1)
        own = None if scales is None else scales.reshape(-1)[used]
        made = self._mlp(x.reshape(local * most, hidden)[used], w1, w2, counts, own, output.dtype)
        output.view(local * most, hidden)[used] = made

    def _check(self, x: Tensor, w1: Tensor, w2: Tensor, a1q_scale: Tensor | None, a2_scale: Tensor | None) -> None:
        local, hidden = self.num_local_experts, x.shape[-1]
        dims = 3 if self.batched else 2
        fits = x.dim() == dims and (not self.batched or x.shape[0] == local)
        need(fits, "hidden_states", "is {}; it must be " + ("({}, M, H)" if self.batched else "(M, H)"), x.shape, local)
        kinds = "int8" if self.quantized else "bf16, fp16 or fp32"
        fits = (x.dtype == torch.int8) == self.quantized
        need(fits, "hidden_states", "is {}; with this quant_config it must be {}", x.dtype, kinds)
        fits = w1.dim() == 3 and w1.shape[1] % 2 == 0
        need(fits, "w1", "is {}; it must be ({}, 2F, {})", w1.shape, local, hidden)
        need_shape("w1", w1, (local, w1.shape[1], hidden), dtypes=(x.dtype,))
        need_shape("w2", w2, (local, hidden, w1.shape[1] // 2), dtypes=(x.dtype,))
        need((a1q_scale is not None) == self.quantized, "a1q_scale", "must be passed with, and only with, int8 rows")
        need(a2_scale is None, "a2_scale", "is given, but rows have their own scales: leave it out")
        if self.quantized:
            for name, rows in (("w1_scale", w1.shape[1]), ("w2_scale", hidden)):
                need_shape(name, getattr(self, name), (local, rows), (local, rows, 1), (local, 1, rows))


def _counts(expert_tokens_meta: Any) -> Tensor:
    """Return the rows of each local expert, int64."""
    counts: Tensor = expert_tokens_meta.expert_num_tokens
    need_dims("expert_num_tokens", counts, 1, dtypes=(torch.int32, torch.int64))
    return counts.long()


def name_of(activation: Any) -> str:
    """Return the name of an activation, or the value of an enumeration's member."""
    return str(getattr(activation, "value", activation))
