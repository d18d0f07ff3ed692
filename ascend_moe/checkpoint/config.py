"""A layer's numbers from the config.json of a Hugging Face checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ascend_moe.checkpoint.keys import HARMLESS, NEUTRAL
from ascend_moe.errors import ArgumentError, need
from ascend_moe.moe_config import MoEConfig

Json = dict[str, Any]


def need_directory(directory: object) -> None:
    """Raise unless ``directory`` is a path."""
    rule = "is {!r:.60}; it must be the path of a checkpoint's directory"
    need(isinstance(directory, (str, PathLike)), "directory", rule, directory)


def read_json(directory: str | Path) -> Json:
    """config.json as a dictionary."""
    need_directory(directory)
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ArgumentError(f"{path} does not exist; pass a checkpoint's directory", argument="directory")
    return read_object(path)


def read_object(path: Path) -> Json:
    """A file with one JSON object."""
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError, OSError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}", argument="directory") from error
    if not isinstance(values, dict):
        raise ArgumentError(f"{path} has a {type(values).__name__}; it must have an object", argument="directory")
    return values


@dataclass(frozen=True)
class Fp8Format:
    """Holds what a config says of fp8 weights: sides of a block with one scale; whether bytes are exponents."""

    rows: int = 128
    columns: int = 128
    exponents: bool = False

    @staticmethod
    def of(values: Json) -> Fp8Format:
        """Reads it from the values of a config.json."""
        quantized = values.get("quantization_config") or {}
        known = isinstance(quantized, dict)
        sides = quantized.get("weight_block_size") if known else quantized
        if sides is None:
            sides = (Fp8Format.rows, Fp8Format.columns)
        if not isinstance(sides, (list, tuple)) or len(sides) != 2 or not all(type(n) is int and n > 0 for n in sides):
            raise _unfit(f"has weight_block_size {sides!r:.60}; need two numbers of at least 1")
        return Fp8Format(sides[0], sides[1], known and quantized.get("scale_fmt") == "ue8m0")


def moe_config(values: Json) -> MoEConfig:
    """MoEConfig of a config.json's values.

    Raises:
        ArgumentError: the model_type is none of ``MODEL_TYPES``, a number is missing, the model has something that
            this layer does not compute, or there is a key of which the reader cannot say that it changes nothing.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise _unfit(f"has model_type {kind!r}; need one of {', '.join(MODEL_TYPES)}, or pass config=")
    config = _Values(values)
    try:
        numbers = MODEL_TYPES[kind].read(config)
        config.need_no_more()
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise _unfit(f"has a value of the wrong kind: {error}") from error
    return numbers


def _unfit(why: str) -> ArgumentError:
    return ArgumentError(f"config.json {why}", argument="directory")


class _Values:
    """The values of a config.json, and which of them were read. A null counts as absent."""

    def __init__(self, values: Json) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._read: set[str] = {"model_type"}

    def get(self, name: str, default: Any) -> Any:
        self._read.add(name)
        return self._values.get(name, default)

    def int(self, name: str, default: int | None = None) -> int:
        """A whole number; without a default it must be there."""
        value = self.get(name, default)
        if value is None:
            raise _unfit(f"of a {self._values['model_type']} has no {name}")
        if type(value) is not int:
            raise TypeError(f"{name} is {value!r:.60}, not a whole number")
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
        """The value, which must be one of these; the first where it is absent."""
        value = self.get(name, allowed[0])
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
            raise _unfit(f"has {name} {value!r:.60}; need {' or '.join(map(str, allowed))}")
        return value

    def need_no_more(self) -> None:
        """Raises for the first key that was not read and may change the layer."""
        for name, value in self._values.items():
            if name in self._read or name in HARMLESS or name.startswith("_"):
                continue
            neutral = NEUTRAL.get(name)
            if name not in NEUTRAL:
                rule = "which may change the layer and is not computed; pass config= if it changes nothing here"
                raise _unfit(f"has {name} {value!r:.60}, {rule}")
            if value != neutral or isinstance(value, bool) != isinstance(neutral, bool):
                raise _unfit(f"has {name} {value!r:.60}, which is not computed; need {neutral}, or none at all")


@dataclass(frozen=True)
class _Model:
    """How one model_type names its numbers, and what it takes for those that are absent (as transformers does).

    Attributes:
        experts: the key of E.
        inner: the key of I.
        sigmoid: the router scores by sigmoid and has a correction bias; else softmax.
        renormalize: default of norm_topk_prob; ``always`` True: the model divides whatever that key says.
        groups: n_group and topk_group where they are absent; None: the model has no groups; 0: they must be there.
        scaling: default of routed_scaling_factor; None: the model has none.
        shared: the key of the dense shared expert: its width, or n_shared_experts, which are I wide each.
    """

    experts: str
    inner: str = "moe_intermediate_size"
    sigmoid: bool = False
    renormalize: bool = False
    always: bool = False
    groups: int | None = None
    scaling: float | None = None
    shared: str = ""

    def read(self, config: _Values) -> MoEConfig:
        """The numbers, from every key that a layer of this model depends on."""
        config.only("hidden_act", "silu")
        self._check_router(config)
        n_group, topk_group = self._read_groups(config)
        inner = config.int(self.inner)
        gated = self.shared.endswith("_size")
        shared = config.int(self.shared, 0) if self.shared else 0
        return MoEConfig(
            hidden_size=config.int("hidden_size"),
            moe_intermediate_size=inner,
            num_experts=self._read_experts(config),
            top_k=config.int("num_experts_per_tok"),
            router="deepseek_v3" if self.sigmoid else "softmax",
            renormalize=self._read_renormalize(config),
            n_group=n_group,
            topk_group=topk_group,
            routed_scaling_factor=1.0 if self.scaling is None else config.float("routed_scaling_factor", self.scaling),
            shared_intermediate_size=shared if gated else inner * shared,
            shared_expert_gate=gated and shared > 0,
        )

    def _check_router(self, config: _Values) -> None:
        config.only("scoring_func", "sigmoid" if self.sigmoid else "softmax")
        if self.sigmoid:
            config.only("topk_method", "noaux_tc")
            config.only("use_routing_bias", True)

    def _read_renormalize(self, config: _Values) -> bool:
        if self.always:
            return bool(config.only("norm_topk_prob", True))
        return config.bool("norm_topk_prob", self.renormalize)

    def _read_groups(self, config: _Values) -> tuple[int, int]:
        if self.groups is None:
            return 1, 1
        default = self.groups or None
        return config.int("n_group", default), config.int("topk_group", default)

    def _read_experts(self, config: _Values) -> int:
        """E by its key, or by the other name that transformers gives it; both must say the same."""
        numbers = [config.get(name, None) for name in (self.experts, "num_local_experts")]
        if None not in numbers and numbers[0] != numbers[1]:
            raise _unfit(f"has {self.experts} {numbers[0]!r:.60} and num_local_experts {numbers[1]!r:.60}")
        return config.int(self.experts if numbers[1] is None else "num_local_experts")


class _DeepseekV2(_Model):
    """Its topk_method says whether there are groups."""

    def _check_router(self, config: _Values) -> None:
        config.only("scoring_func", "softmax")
        config.only("topk_method", "greedy", "group_limited_greedy")

    def _read_renormalize(self, config: _Values) -> bool:
        if config.bool("norm_topk_prob", False):
            # Model codes disagree here: some drop the scaling factor then, some the normalisation.
            raise _unfit("has norm_topk_prob with deepseek_v2, which is ambiguous; pass config=")
        return False

    def _read_groups(self, config: _Values) -> tuple[int, int]:
        grouped = config.get("topk_method", "greedy") == "group_limited_greedy"
        groups = config.int("n_group", None if grouped else 1), config.int("topk_group", None if grouped else 1)
        return groups if grouped else (1, 1)


def _like_deepseek_v3(
    *, renormalize: bool = True, scaling: float = 1.0, groups: int = 1, shared: bool = True
) -> _Model:
    return _Model(
        "n_routed_experts",
        sigmoid=True,
        renormalize=renormalize,
        groups=groups,
        scaling=scaling,
        shared="n_shared_experts" if shared else "",
    )


def _like_qwen(*, shared: bool = False, renormalize: bool = False, always: bool = False) -> _Model:
    width = "shared_expert_intermediate_size" if shared else ""
    return _Model("num_experts", renormalize=renormalize, always=always, shared=width)


#: model_type -> how it is read. The published and the fused layout are read for each.
MODEL_TYPES: dict[str, _Model] = {
    "mixtral": _Model("num_local_experts", "intermediate_size", always=True),
    "minimax": _Model("num_local_experts", "intermediate_size", always=True),
    "minimax_m2": _Model("num_local_experts", "intermediate_size", sigmoid=True, always=True),
    "olmoe": _Model("num_experts", "intermediate_size"),
    "flex_olmo": _Model("num_experts", "intermediate_size"),
    "qwen2_moe": _like_qwen(shared=True),
    "qwen3_moe": _like_qwen(),
    "qwen3_next": _like_qwen(shared=True, renormalize=True),
    "qwen3_5_moe_text": _like_qwen(shared=True, always=True),
    "deepseek_v2": _DeepseekV2("n_routed_experts", scaling=1.0, shared="n_shared_experts"),
    "deepseek_v3": _like_deepseek_v3(scaling=2.5, groups=0),
    "deepseek_v32": _like_deepseek_v3(scaling=2.5, groups=0),
    "glm_moe_dsa": _like_deepseek_v3(scaling=2.5),
    "glm4_moe": _like_deepseek_v3(),
    "glm4_moe_lite": _like_deepseek_v3(scaling=1.8),
    "solar_open": _like_deepseek_v3(),
    "dots1": _like_deepseek_v3(renormalize=False),
    "mimo_v2_flash": _like_deepseek_v3(shared=False),
}
