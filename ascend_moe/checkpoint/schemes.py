"""Supported keys and values of a quantization_config, and compressed-tensors' groups.

Names and values are those of compressed-tensors 0.20 (QuantizationConfig, QuantizationScheme, QuantizationArgs), and
of transformers' fp8 and mxfp4 configs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ascend_moe.checkpoint.config import Json
from ascend_moe.checkpoint.patterns import Names
from ascend_moe.checkpoint.stored import MX_GROUP, Block
from ascend_moe.errors import ArgumentError, need

COMPRESSED = "compressed-tensors"
READ, UNUSED, SHOWN = "read", "not used", "the tensors"
_FP8_KEYS: dict[str, object] = {
    "quant_method": (None, "fp8"),
    "fmt": (None, "e4m3", "float8_e4m3fn"),
    "scale_fmt": (None, "float", "ue8m0"),
    "activation_scheme": (None, "dynamic"),
    **dict.fromkeys(("weight_block_size", "expert_dtype"), READ),
    **dict.fromkeys(("modules_to_not_convert", "modules_to_convert", "ignored_layers"), SHOWN),
    "dequantize": UNUSED,
}
#: Supported keys and values of each object of a quantization_config; all others raise an error that names them.
KEYS: dict[str, dict[str, object]] = {
    "quantization_config of fp8": _FP8_KEYS,
    "quantization_config of mxfp4": {
        "quant_method": ("mxfp4",),
        "modules_to_not_convert": SHOWN,
        "dequantize": UNUSED,
    },
    f"quantization_config of {COMPRESSED}": {
        "quant_method": (COMPRESSED,),
        **dict.fromkeys(("format", "config_groups", "ignore"), READ),
        "kv_cache_scheme": UNUSED,
        "quantization_status": SHOWN,
        **dict.fromkeys(("global_compression_ratio", "version", "run_compressed"), UNUSED),
        **dict.fromkeys(("sparsity_config", "transform_config"), (None, {})),
        "moe_sparsity_config": (None,),
    },
    "a group": {
        **dict.fromkeys(("targets", "weights", "format", "input_activations"), READ),
        "output_activations": (None,),
    },
    "weights": {
        **dict.fromkeys(("num_bits", "type", "strategy", "group_size", "block_structure"), READ),
        "symmetric": (True, False),
        "dynamic": (None, False),
        "actorder": (None, False, "weight", "static"),
        **dict.fromkeys(("scale_dtype", "zp_dtype"), SHOWN),
        **dict.fromkeys(("observer", "observer_kwargs"), UNUSED),
    },
    "input_activations": {
        **dict.fromkeys(("num_bits", "type", "strategy", "symmetric"), READ),
        "dynamic": (True,),
        **dict.fromkeys(("group_size", "block_structure"), UNUSED),
        "actorder": (None, False),
        **dict.fromkeys(("scale_dtype", "zp_dtype", "observer", "observer_kwargs"), UNUSED),
    },
}


class Form(NamedTuple):
    """Values of num_bits, type, strategy and symmetric that a compressed-tensors format may have for weights."""

    bits: tuple[int, ...]
    type: str
    strategies: tuple[str, ...]
    symmetric: tuple[bool, ...] = (True,)


#: The supported formats.
FORMS = {
    "int-quantized": Form((4, 8), "int", ("channel", "tensor", "group"), (True, False)),
    "float-quantized": Form((8,), "float", ("channel", "tensor", "block")),
    "pack-quantized": Form((4, 8), "int", ("channel", "group"), (True, False)),
    "mxfp4-pack-quantized": Form((4,), "float", ("group",)),
    "mxfp8-quantized": Form((8,), "float", ("group",)),
}
#: Supported besides quant_model_description.json.
METHODS = ("fp8", "mxfp4", COMPRESSED)


class Scheme(NamedTuple):
    """How a group quantizes weights (``form``: format), and whether rows are int8 per token; unused sizes are 0."""

    form: str
    bits: int
    strategy: str
    group_size: int
    block: Block
    symmetric: bool
    rows_are_int8: bool


@dataclass(frozen=True)
class Schemes:
    """The groups of a compressed-tensors quantization_config, and the modules that it leaves in float.

    Attributes:
        said: the quantization_config.
        groups: (targets, content) of each group, by the group's name.
        ignored: modules left in float: names, "Linear" (all), or patterns after "re:". Targets are written alike.
    """

    said: Json
    groups: dict[str, tuple[list[str], Json]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    @staticmethod
    def of(values: Json) -> Schemes | None:
        """Return the groups in the values of a config.json; None if its quant_method is not compressed-tensors.

        Raises:
            ArgumentError: a quant_method, key or value is not supported.
        """
        said = values.get("quantization_config") or values.get("compression_config") or {}
        need(isinstance(said, dict), "directory", "has quantization_config {!r:.60}; need an object", said)
        method = said.get("quant_method") or "fp8"
        rule = "has quant_method {!r:.40} in quantization_config; supported are {}, and ModelSlim's files"
        need(method in METHODS, "directory", rule, method, ", ".join(METHODS))
        _check(said, f"quantization_config of {method}")
        if method != COMPRESSED:
            return None
        groups = said.get("config_groups")
        if not isinstance(groups, dict):
            text = f"directory has config_groups {groups!r:.60} in quantization_config; need an object, group by name"
            raise ArgumentError(text, argument="directory")
        read = {}
        for name, group in groups.items():
            rule = "has {!r:.60} in config_groups of quantization_config; need an object with targets and weights"
            need(isinstance(group, dict), "directory", rule, {name: group})
            read[name] = (_strings(group.get("targets"), f"targets of {name}"), group)
        return Schemes(said, read, _strings(said.get("ignore") or [], "ignore"))

    def of_matrices(self, names: Iterable[str]) -> dict[str, str]:
        """Return the name of the group of each matrix in ``names``; matrices without a group are left out.

        A target that is a name takes precedence over a pattern, and a pattern over "Linear", as in compressed-tensors.

        Raises:
            ArgumentError: a pattern is not supported, or two groups contradict each other.
        """
        modules = {name.removesuffix(".weight"): name for name in names}
        matched = Names(list(modules))
        left = set(modules) - _matching(self.ignored, modules, matched)
        group_of: dict[str, str] = {}
        kinds = (
            lambda target: not target.startswith("re:") and target != "Linear",
            lambda target: target.startswith("re:"),
            lambda target: target == "Linear",
        )
        for kind in kinds:
            before = set(group_of)
            for name, (targets, group) in self.groups.items():
                for module in (_matching(filter(kind, targets), modules, matched) & left) - before:
                    other = group_of.setdefault(module, name)
                    rule = "has the groups {} and {} in quantization_config, which both name {} and differ: remove one"
                    same = other == name or {**self.groups[other][1], "targets": 0} == {**group, "targets": 0}
                    need(same, "directory", rule, other, name, module)
        return {modules[module]: name for module, name in group_of.items()}

    def scheme(self, name: str) -> Scheme:
        """Return the scheme of the group ``name``; its own format takes precedence over quantization_config's.

        Raises:
            ArgumentError: a key or value is not supported.
        """
        group = self.groups[name][1]
        _check(group, "a group", name)
        form = str(group.get("format") or self.said.get("format"))
        rule = "has format {!r:.40} of {} in quantization_config; need one of {}"
        need(form in FORMS, "directory", rule, form, name, ", ".join(FORMS))
        weights, allowed = _check(group.get("weights"), "weights", name), FORMS[form]
        strategy, bits, kind = (weights.get(key) for key in ("strategy", "num_bits", "type"))
        rule = "has {} weights with {!r:.20} bits, type {!r:.20}, strategy {!r:.20}; need bits {}, type {}, strategy {}"
        fits = type(bits) is int and bits in allowed.bits and kind == allowed.type and strategy in allowed.strategies
        need(fits, "directory", rule, form, bits, kind, strategy, *allowed[:3])
        symmetric = bool(weights.get("symmetric", True))
        rule = "has symmetric {} of {} weights; need true"
        need(symmetric in allowed.symmetric, "directory", rule, symmetric, form)
        size, block = _sizes(form, weights)
        rows_are_int8 = _int8_by_token(group, name)
        return Scheme(form, int(bits or 0), str(strategy), size, block, symmetric, rows_are_int8)


def _sizes(form: str, weights: Json) -> tuple[int, Block]:
    """Return the group_size of strategy group and the block_structure of strategy block, else zeros."""
    size, block, strategy = (weights.get(key) for key in ("group_size", "block_structure", "strategy"))
    least = MX_GROUP if form.startswith("mx") else 1
    if strategy == "group":
        fits = type(size) is int and size >= least and (least == 1 or size == least)
        wanted = "a whole number above 0" if least == 1 else least
        need(fits, "directory", "has group_size {!r:.20} of {} weights; need {}", size, form, wanted)
        return int(size or 0), (0, 0)
    if strategy == "block":
        fits = isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
        need(fits, "directory", "has block_structure {!r:.30} of {} weights; need two whole numbers", block, form)
        return 0, (int(block[0]), int(block[1])) if block else (0, 0)
    return 0, (0, 0)


def _int8_by_token(group: Json, name: str) -> bool:
    """Return whether a group's activations are symmetric int8 per token."""
    given = group.get("input_activations")
    if given is None:
        return False
    said = {"symmetric": True} | _check(given, "input_activations", name)
    rule = "has input_activations of {} without dynamic true; static scales are not supported"
    need(said.get("dynamic") is True, "directory", rule, name)
    keys = ("num_bits", "type", "strategy", "symmetric")
    return [said.get(key) for key in keys] == [8, "int", "token", True]


def _check(given: Any, where: str, of: str = "") -> Json:
    """Return an object; raise ArgumentError for keys that ``KEYS`` lacks and values that are not supported."""
    shown = f"{where} of {of}" if of else where
    need(isinstance(given, dict), "directory", "has {} {!r:.60} in quantization_config; need an object", shown, given)
    keys = KEYS[where]
    for key, value in given.items():
        rule = "has {} {!r:.40} in {}, which is not supported; supported keys: {}"
        need(key in keys, "directory", rule, key, value, shown, ", ".join(keys))
        allowed = keys[key]
        if isinstance(allowed, tuple):
            fits = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed)
            rule = "has {} {!r:.40} in {}, which is not supported; need {}"
            need(fits, "directory", rule, key, value, shown, " or ".join(map(repr, allowed)))
    return dict(given)


def _strings(given: object, what: str) -> list[str]:
    fits = isinstance(given, list) and all(isinstance(each, str) for each in given)
    need(fits, "directory", "has {} {!r:.60} in quantization_config; need a list of strings", what, given)
    assert isinstance(given, list)
    return given


def _matching(patterns: Iterable[str], modules: Sequence[str] | dict[str, str], names: Names) -> set[str]:
    """Return the modules named by one of the targets or ignores; "Linear" means every matrix."""
    found: set[str] = set()
    for pattern in patterns:
        if pattern.startswith("re:"):
            found |= names.matching(pattern[3:])
        elif pattern == "Linear":
            return set(modules)
        elif pattern in modules:
            found.add(pattern)
    return found
