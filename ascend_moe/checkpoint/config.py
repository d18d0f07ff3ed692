"""A layer's numbers from the config.json of a Hugging Face checkpoint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from ascend_moe.checkpoint.keys import HARMLESS, NEUTRAL
from ascend_moe.errors import ArgumentError, need
from ascend_moe.moe_config import ROUTERS, MoEConfig

Json = dict[str, Any]
LFS = "it is a pointer of git-lfs: run git lfs pull"


def need_directory(directory: object) -> None:
    """Raise ArgumentError unless ``directory`` is a path, str or PathLike; it need not exist."""
    rule = "is {!r:.60}; it must be the path of a checkpoint's directory"
    need(isinstance(directory, (str, PathLike)), "directory", rule, directory)


def read_json(directory: str | Path) -> Json:
    """Return the values of a checkpoint's config.json; raise ArgumentError if it is absent or no JSON object."""
    need_directory(directory)
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ArgumentError(f"{path} does not exist; pass a directory with a config.json", argument="directory")
    return read_object(path)


def read_object(path: Path) -> Json:
    """Return the JSON object in a file; raise ArgumentError if there is none, or a key has two different values."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError, OSError) as error:
        why = LFS if is_pointer(path) else f"{error}; correct it, or download it again"
        raise ArgumentError(f"{path} cannot be read: {why}", argument="directory") from error
    if not isinstance(values, dict):
        raise ArgumentError(
            f"{path} contains a {type(values).__name__}; it must contain a JSON object: download it again",
            argument="directory",
        )
    return values


def _once(pairs: list[tuple[str, Any]]) -> Json:
    """Return a JSON object, checking that no key is repeated."""
    values = dict(pairs)
    for name, value in pairs if len(values) < len(pairs) else ():
        if values[name] != value:
            raise ValueError(f"it has {name!r:.80} twice, {value!r:.40} and {values[name]!r:.40}")
    return values


def is_pointer(path: Path) -> bool:
    """Return whether a file is a git-lfs pointer, which git stores in place of the data until ``git lfs pull``."""
    try:
        return path.stat().st_size < 1024 and path.read_bytes().startswith(b"version https://git-lfs")
    except OSError:
        return False


@dataclass(frozen=True)
class Fp8Format:
    """Format of a checkpoint's fp8 weights: one scale per ``block`` (rows, columns) of a matrix; None: one per matrix.

    exponents: scales are powers of two (e8m0). fp4_experts: the experts' weights are fp4 instead (DeepSeek-V4).
    """

    block: tuple[int, int] | None = (128, 128)
    exponents: bool = False
    fp4_experts: bool = False

    @staticmethod
    def of(values: Json) -> Fp8Format:
        """Return the format from a config.json's ``values``; raise ArgumentError for a wrong weight_block_size."""
        quantized = values.get("quantization_config") or {}
        need(isinstance(quantized, dict), "directory", "has quantization_config {!r:.60}; need an object", quantized)
        sides = quantized.get("weight_block_size", Fp8Format.block)
        pair = isinstance(sides, (list, tuple)) and len(sides) == 2 and all(type(n) is int and n > 0 for n in sides)
        if sides is not None and not pair:
            raise _unfit(f"has weight_block_size {sides!r:.60}; need null or two integers of at least 1, as [128, 128]")
        dtype = values.get("expert_dtype") or quantized.get("expert_dtype")
        block = None if sides is None else (int(sides[0]), int(sides[1]))
        return Fp8Format(block, quantized.get("scale_fmt") == "ue8m0", dtype == "fp4")


def moe_config(values: Json) -> MoEConfig:
    """Return the MoEConfig of a config.json's values.

    Raises:
        ArgumentError: the model_type is not in ``MODEL_TYPES``, a value is missing or of a wrong type, the model has a
            feature that `MoELayer` does not support, or a key is unknown and may affect the layer.
    """
    values = text_values(values)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        known = ", ".join((*MODEL_TYPES, *(f"{name} (its text_config)" for name in WRAPPERS)))
        raise _unfit(f"has model_type {kind!r}; need one of {known}, or pass a MoEConfig as config{_hints(values)}")
    config = _Values(values)
    try:
        numbers = MODEL_TYPES[kind].read(config)
        config.need_no_more()
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ArgumentError) and error.argument == "directory":
            raise
        raise _unfit(f"has a value that does not fit: {error}; correct it, or pass a MoEConfig as config") from error
    return numbers


def text_values(values: Json) -> Json:
    """Return a config.json's ``values``, or a multimodal model's text_config, with outer quantization and dtype."""
    text = values.get("text_config")
    if values.get("model_type") not in WRAPPERS or not isinstance(text, dict):
        return values
    shared = ("quantization_config", "compression_config", "dtype", "torch_dtype")
    outer: Json = {name: values[name] for name in shared if name in values}
    return outer | {name: value for name, value in text.items() if value is not None}


def returns_pair(values: Json) -> bool:
    """Return whether the MoE block of the model returns two values in transformers; ``values``: its config.json."""
    model = MODEL_TYPES.get(str(text_values(values).get("model_type")))
    return model is not None and model.pair


def _hints(values: Json) -> str:
    """Describe the MoE layers in a config of an unknown model."""
    shown = [f"{name} {value!r:.40}" for name, value in values.items() if re.search("expert|moe|router|scor", name)]
    return f"; its MoE keys: {', '.join(shown[:8])}" if shown else ""


def _unfit(why: str) -> ArgumentError:
    return ArgumentError(f"config.json {why}", argument="directory")


class _Values:
    """The values of a config.json, and which of them were read. null counts as absent."""

    def __init__(self, values: Json) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._read: set[str] = {"model_type"}

    def get(self, name: str, default: Any) -> Any:
        self._read.add(name)
        return self._values.get(name, default)

    def same(self, *names: str) -> str:
        """Return the first of these names that has a value, else the first; several values must be equal."""
        there = [name for name in names if self.get(name, None) is not None]
        for name in there[1:]:
            if self._values[name] != self._values[there[0]]:
                both = f"{there[0]} {self._values[there[0]]!r:.60} and {name} {self._values[name]!r:.60}"
                raise _unfit(f"has {both}, which must be equal; correct one of them")
        return there[0] if there else names[0]

    def int(self, name: str, default: int | None = None) -> int:
        """Return an integer, or a list of one integer per layer; required unless there is a default."""
        value = self.get(name, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if value is None:
            raise _unfit(f"of model_type {self._values['model_type']} has no {name}; add it, or pass config=")
        if type(value) is not int:
            raise TypeError(f"{name} is {value!r:.60}, not an integer")
        return value

    def bool(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if type(value) is not bool:
            raise TypeError(f"{name} is {value!r:.60}, neither true nor false")
        return value

    def float(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise TypeError(f"{name} is {value!r:.60}, not a finite number")
        return float(value)

    def only(self, name: str, *allowed: object) -> Any:
        """Return the value, which must be one of these; the first if absent."""
        value = self.get(name, allowed[0])
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
            raise _unfit(f"has {name} {value!r:.60}; need {' or '.join(map(str, allowed))}; or pass config=")
        return value

    def need_no_more(self) -> None:
        """Raise ArgumentError for the first key that was not read and may change the layer."""
        for name, value in self._values.items():
            if name in self._read or name in HARMLESS or name.startswith("_"):
                continue
            neutral = NEUTRAL.get(name)
            if name not in NEUTRAL:
                rule = "which may change the layer and is not supported; pass config= if it has no effect here"
                raise _unfit(f"has {name} {value!r:.60}, {rule}")
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
                raise _unfit(f"has {name} {value!r:.60}, which is not supported; need {neutral}, or no such key")


@dataclass(frozen=True)
class _Model:
    """The keys of one model_type's numbers, and the defaults of absent ones (as in transformers).

    Attributes:
        experts: key of E.
        inner: key of I.
        router: router of `MoEConfig`.
        renormalize: default of norm_topk_prob; ``always`` True: normalize whatever that key says.
        groups: default of n_group and topk_group; None: the model has no groups; 0: required.
        scaling: default of routed_scaling_factor; None: the model has none.
        shared: key of the dense shared expert: its width, or n_shared_experts, each I wide.
        shared_gate: the shared expert has a gate. None: if ``shared`` is a width.
        topk: key of K.
        pair: transformers' block returns two values, of which the decoder layer uses the first.
        more: reads further fields of MoEConfig.
    """

    experts: str
    inner: str = "moe_intermediate_size"
    router: str = "softmax"
    renormalize: bool = False
    always: bool = False
    groups: int | None = None
    scaling: float | None = None
    shared: str = ""
    shared_gate: bool | None = None
    topk: str = "num_experts_per_tok"
    pair: bool = False
    more: Callable[[_Values], Json] | None = None

    def read(self, config: _Values) -> MoEConfig:
        """Return the numbers, read from every key that a layer of this model depends on."""
        more = {} if self.more is None else self.more(config)
        if "activation" not in more:
            more["activation"] = _ACTIVATIONS[config.only("hidden_act", *_ACTIVATIONS)]
        self._check_router(config)
        n_group, topk_group = self._read_groups(config)
        inner = config.int(self.inner)
        wide = self.shared.endswith("_size")
        shared = config.int(self.shared, 0) if self.shared else 0
        gated = wide if self.shared_gate is None else self.shared_gate
        scaled = self.scaling is not None
        norm = config.same("norm_topk_prob", "moe_renormalize")
        numbers: Json = {
            "hidden_size": config.int("hidden_size"),
            "moe_intermediate_size": inner,
            "num_experts": config.int(config.same(self.experts, "num_local_experts")),
            "top_k": config.int(
                config.same(self.topk, "num_experts_per_tok", "num_experts_per_token", "experts_per_token")
            ),
            "router": self.router,
            "renormalize": bool(config.only(norm, True)) if self.always else config.bool(norm, self.renormalize),
            "n_group": n_group,
            "topk_group": topk_group,
            "routed_scaling_factor": config.float("routed_scaling_factor", self.scaling or 1.0) if scaled else 1.0,
            "shared_intermediate_size": shared if wide else inner * shared,
            "shared_expert_gate": gated and shared > 0,
        }
        return MoEConfig(**numbers | more)

    def _check_router(self, config: _Values) -> None:
        router = ROUTERS[self.router]
        name = config.same("scoring_func", "score_function", "moe_router_activation_func")
        config.only(name, router.scores)
        if router.biased:
            config.only("topk_method", "noaux_tc")
            config.only("use_routing_bias", True)
            config.only("moe_router_enable_expert_bias", True)

    def _read_groups(self, config: _Values) -> tuple[int, int]:
        if self.groups is None:
            return 1, 1
        default = self.groups or None
        return config.int(config.same("n_group", "num_expert_group"), default), config.int("topk_group", default)


#: hidden_act -> activation.
_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}


def _deepseek_v2(config: _Values) -> Json:
    """topk_method determines whether there are groups."""
    if config.bool("norm_topk_prob", False):
        # Implementations disagree: some drop the scaling factor then, some the normalization.
        raise _unfit("has a true norm_topk_prob with deepseek_v2, which implementations read differently; pass config=")
    grouped = config.only("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    groups = [config.int(name, None if grouped else 1) for name in ("n_group", "topk_group")]
    return {"n_group": groups[0], "topk_group": groups[1]} if grouped else {}


def _deepseek_v4(config: _Values) -> Json:
    config.only("hidden_act", "silu")
    return {"activation": "swiglu", "activation_numbers": {"limit": config.float("swiglu_limit", 10.0)}}


def _gpt_oss(config: _Values) -> Json:
    config.only("hidden_act", "silu")
    numbers = {"limit": config.float("swiglu_limit", 7.0), "alpha": config.float("swiglu_alpha", 1.702)}
    more = {"activation": "clipped_swiglu", "activation_numbers": numbers, "interleaved": True}
    return more | {"router_bias": True, "expert_bias": True}


def _ernie(config: _Values) -> Json:
    config.only("moe_norm_min", 1e-12)
    config.only("moe_use_aux_free", True)
    config.only("moe_gate", "topk")
    return {}


def _hunyuan(config: _Values) -> Json:
    """Experts are as wide as the dense layers if no other width is given."""
    config.only("use_mixed_mlp_moe", True)  # a shared expert, as wide as the dense layers
    for name in ("group_limited_greedy", "moe_drop_tokens", "moe_random_routing_dropped_token"):
        config.only(name, False)
    dense = config.int("intermediate_size")
    inner, shared = config.int("moe_intermediate_size", dense), config.int("num_shared_expert", 1)
    return {"moe_intermediate_size": inner, "shared_intermediate_size": dense * shared}


def _bailing(config: _Values) -> Json:
    """Shared experts may have a different width."""
    width = config.int("moe_shared_expert_intermediate_size", config.int("moe_intermediate_size"))
    return {"shared_intermediate_size": width * config.int(config.same("num_shared_experts", "n_shared_experts"), 0)}


def _phimoe(config: _Values) -> Json:
    noise = config.float("input_jitter_noise", 0.0)
    return {"jitter_eps": config.float("router_jitter_noise", 0.01), "input_jitter": noise}


def _jitter(config: _Values) -> Json:
    """router_jitter_noise multiplies the block's input."""
    return {"input_jitter": config.float("router_jitter_noise", 0.0)}


def _longcat(config: _Values) -> Json:
    """Zero experts return their input."""
    config.only("zero_expert_type", "identity")
    config.only("norm_topk_prob", False)
    config.only("router_bias", False)
    return {"copy_expert_num": config.int("zero_expert_num", 256)}


def _llama4(config: _Values) -> Json:
    return {"shared_intermediate_size": config.int("intermediate_size")}


def _nemotron(config: _Values) -> Json:
    """No gates, and rows of a separate width."""
    config.only("mlp_hidden_act", "relu2")
    config.only("n_shared_experts", 1)
    return {"activation": "relu2", "latent_size": config.int("moe_latent_size", 0)}


def _like_deepseek_v3(
    *, renormalize: bool = True, scaling: float = 1.0, groups: int = 1, shared: str = "n_shared_experts"
) -> _Model:
    return _Model(
        "n_routed_experts", router="deepseek_v3", renormalize=renormalize, groups=groups, scaling=scaling, shared=shared
    )


def _like_qwen(*, shared: bool = False, renormalize: bool = False, always: bool = False) -> _Model:
    width = "shared_expert_intermediate_size" if shared else ""
    return _Model("num_experts", renormalize=renormalize, always=always, shared=width)


_MIXTRAL = _Model("num_local_experts", "intermediate_size", always=True, more=_jitter)
_BAILING = _Model("num_experts", router="deepseek_v3", renormalize=True, groups=0, scaling=2.5, more=_bailing)

#: model_type -> its reader, for the published and the fused layout.
MODEL_TYPES: dict[str, _Model] = {
    "mixtral": _MIXTRAL,
    "minimax": _MIXTRAL,
    "minimax_m2": replace(_MIXTRAL, router="deepseek_v3"),
    "olmoe": _Model("num_experts", "intermediate_size"),
    "flex_olmo": _Model("num_experts", "intermediate_size"),
    "granitemoe": _Model("num_local_experts", "intermediate_size", always=True),
    "phimoe": _Model("num_local_experts", "intermediate_size", router="sparsemixer", more=_phimoe),
    "llama4_text": _Model("num_local_experts", "intermediate_size", router="llama4", pair=True, more=_llama4),
    "gpt_oss": _Model("num_local_experts", "intermediate_size", always=True, pair=True, more=_gpt_oss),
    "hunyuan_v1_moe": _Model("num_experts", "intermediate_size", always=True, topk="moe_topk", more=_hunyuan),
    "ernie4_5_moe": _Model(
        "moe_num_experts",
        router="softmax_bias",
        always=True,
        shared="moe_num_shared_experts",
        topk="moe_k",
        more=_ernie,
    ),
    "qwen2_moe": _like_qwen(shared=True),
    "qwen3_moe": _like_qwen(),
    "qwen3_vl_moe_text": _like_qwen(always=True),
    "qwen3_next": _like_qwen(shared=True, renormalize=True),
    "qwen3_5_moe_text": _like_qwen(shared=True, always=True),
    "deepseek_v2": _Model("n_routed_experts", scaling=1.0, shared="n_shared_experts", more=_deepseek_v2),
    "deepseek_v3": _like_deepseek_v3(scaling=2.5, groups=0),
    "deepseek_v32": _like_deepseek_v3(scaling=2.5, groups=0),
    "deepseek_v4": _Model(
        "n_routed_experts", router="deepseek_v4", always=True, scaling=1.5, shared="n_shared_experts", more=_deepseek_v4
    ),
    "kimi_k2": _like_deepseek_v3(scaling=2.5, groups=0),
    "glm_moe_dsa": _like_deepseek_v3(scaling=2.5),
    "glm4_moe": _like_deepseek_v3(),
    "glm4_moe_lite": _like_deepseek_v3(scaling=1.8),
    "solar_open": _like_deepseek_v3(),
    "dots1": _like_deepseek_v3(renormalize=False),
    "mimo_v2_flash": _like_deepseek_v3(shared=""),
    "bailing_moe_v2": _BAILING,
    "bailing_hybrid": _BAILING,
    "nemotron_h": replace(
        _like_deepseek_v3(shared="moe_shared_expert_intermediate_size"), shared_gate=False, more=_nemotron
    ),
    "longcat_flash": _Model(
        "n_routed_experts", "expert_ffn_hidden_size", router="softmax_bias", scaling=6.0, topk="moe_topk", more=_longcat
    ),
}
#: Models whose text_config describes another model.
WRAPPERS = ("qwen3_vl_moe", "qwen3_5_moe", "llama4", "kimi_k25", "kimi_vl")
