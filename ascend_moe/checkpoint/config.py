"""A layer's numbers from the config.json of a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from ascend_moe.errors import ArgumentError, need
from ascend_moe.layer import MoEConfig

Json = dict[str, Any]


def need_directory(directory: object) -> None:
    """Raise unless ``directory`` is a path."""
    rule = f"is {directory!r:.60}; it must be the path of a checkpoint's directory"
    need(isinstance(directory, (str, PathLike)), "directory", rule)


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


def block_sides(values: Json) -> tuple[int, int]:
    """Rows and columns of a block of fp8 weights, which has one scale."""
    quantised = values.get("quantization_config") or {}
    sides = quantised.get("weight_block_size") if isinstance(quantised, dict) else quantised
    if sides is None:
        return 128, 128
    if not isinstance(sides, (list, tuple)) or len(sides) != 2 or not all(type(n) is int and n > 0 for n in sides):
        raise _unfit(f"has weight_block_size {sides!r:.60}; need two numbers of at least 1")
    return sides[0], sides[1]


def moe_config(values: Json) -> MoEConfig:
    """MoEConfig of a config.json's values.

    Raises:
        ArgumentError: the model_type is none of ``MODEL_TYPES``, a number is missing, or the model has
            something that this layer does not compute.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise _unfit(f"has model_type {kind!r}; need one of {', '.join(MODEL_TYPES)}, or pass config=")
    act = values.get("hidden_act", "silu")
    if act != "silu":
        raise _unfit(f"has hidden_act {act!r}; the expert MLP is SwiGLU (silu)")
    try:
        return MODEL_TYPES[kind](values)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise _unfit(f"has a value of the wrong kind: {error}") from error


def _unfit(why: str) -> ArgumentError:
    return ArgumentError(f"config.json {why}", argument="directory")


def _layer(values: Json, inner: str, experts: str, **others: Any) -> MoEConfig:
    """The numbers that every model has; ``inner`` and ``experts``: config.json's names of two of them."""
    return MoEConfig(
        hidden_size=_get(values, "hidden_size"),
        moe_intermediate_size=_get(values, inner),
        num_experts=_get(values, experts, "num_local_experts"),
        top_k=_get(values, "num_experts_per_tok"),
        **others,
    )


def _mixtral(values: Json) -> MoEConfig:
    return _layer(values, "intermediate_size", "num_local_experts")


def _qwen3(values: Json) -> MoEConfig:
    normalised = bool(values.get("norm_topk_prob", False))
    return _layer(values, "moe_intermediate_size", "num_experts", renormalize=normalised)


def _qwen2(values: Json) -> MoEConfig:
    shared = int(values.get("shared_expert_intermediate_size") or 0)
    return replace(_qwen3(values), shared_intermediate_size=shared, shared_expert_gate=shared > 0)


def _deepseek(values: Json, router: str, grouped: bool) -> MoEConfig:
    inner = "moe_intermediate_size"
    return _layer(
        values,
        inner,
        "n_routed_experts",
        router=router,
        renormalize=bool(values.get("norm_topk_prob", router == "deepseek_v3")),
        n_group=_get(values, "n_group") if grouped else 1,
        topk_group=_get(values, "topk_group") if grouped else 1,
        routed_scaling_factor=float(values.get("routed_scaling_factor", 1.0)),
        shared_intermediate_size=_get(values, inner) * int(values.get("n_shared_experts") or 0),
    )


def _deepseek_v2(values: Json) -> MoEConfig:
    method = values.get("topk_method", "greedy")
    _only("topk_method", method, ("greedy", "group_limited_greedy"))
    _only("scoring_func", values.get("scoring_func", "softmax"), ("softmax",))
    if values.get("norm_topk_prob"):
        # Model codes disagree here: some drop the scaling factor then, some the normalisation.
        raise _unfit("has norm_topk_prob with deepseek_v2, which is ambiguous; pass config=")
    return _deepseek(values, "softmax", method == "group_limited_greedy")


def _deepseek_v3(values: Json) -> MoEConfig:
    _only("topk_method", values.get("topk_method", "noaux_tc"), ("noaux_tc",))
    _only("scoring_func", values.get("scoring_func", "sigmoid"), ("sigmoid",))
    return _deepseek(values, "deepseek_v3", True)


#: model_type -> its reader. The published and the fused layout are read for each.
MODEL_TYPES: dict[str, Callable[[Json], MoEConfig]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2,
    "qwen3_moe": _qwen3,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}


def _get(values: Json, *names: str) -> int:
    for name in dict.fromkeys(names):
        if values.get(name) is not None:
            return int(values[name])
    raise _unfit(f"of a {values['model_type']} has no {' or '.join(dict.fromkeys(names))}")


def _only(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _unfit(f"has {name} {value!r}; need {' or '.join(allowed)}")
