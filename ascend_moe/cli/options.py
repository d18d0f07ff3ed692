"""The options of a layer's shape that several commands have: a preset's H, K and E, or one's own numbers."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from ..checkpoint.presets import PRESETS, preset

DEFAULT_PRESET = "deepseek-v3"


class Shape(NamedTuple):
    """H, K and E of a layer."""

    hidden: int
    topk: int
    experts: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """-p, --hidden, -k and -e."""
    usual = _of_preset(DEFAULT_PRESET)
    add = parser.add_argument
    add("-p", "--preset", metavar="NAME", help=f"H, K and E of a model: {', '.join(PRESETS)}")
    add("--hidden", type=int, metavar="H", help=f"elements of a row (default {usual.hidden})")
    add("-k", "--topk", type=int, metavar="K", help=f"experts a token (default {usual.topk})")
    add(
        "-e",
        "--experts",
        type=int,
        metavar="E",
        help=f"routed experts of all ranks (default {usual.experts})",
    )


def shape_of(options: argparse.Namespace) -> Shape:
    """What the options say; the rest is the preset's, or ``DEFAULT_PRESET``'s.

    Raises:
        ArgumentError: no such preset.
    """
    usual = _of_preset(options.preset or DEFAULT_PRESET)
    given = (options.hidden, options.topk, options.experts)
    return Shape(*(usual[i] if one is None else one for i, one in enumerate(given)))


def _of_preset(name: str) -> Shape:
    layer = preset(name).published
    return Shape(layer.hidden_size, layer.top_k, layer.num_experts)
