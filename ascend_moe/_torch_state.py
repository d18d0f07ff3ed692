"""Torch's state around a call: autocast, the default device, and a backward that runs a forward again (checkpoint).

A layer has dtypes of its own: a router in another dtype chooses other experts. A forward that a backward runs again
takes the place of one that has been: what counts or records its tokens does so once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def autocasts(tensor: torch.Tensor) -> bool:
    """Whether torch.autocast changes the dtypes of operators on ``tensor``'s device now."""
    kind = tensor.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which computes in the dtypes of its tensors under torch.autocast too. One is given by position."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = next(each for each in args if isinstance(each, torch.Tensor))
        if not autocasts(first):
            return function(*args, **kwargs)
        with torch.autocast(first.device.type, enabled=False):
            return function(*args, **kwargs)

    return run


def on_the_host(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, whose new tensors are on the CPU, whatever torch's default device is."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run


def runs_again() -> bool:
    """Whether a backward runs this forward, whose tokens an earlier forward has seen, with or without gradients."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def runs_again_with_gradients() -> bool:
    """`runs_again` for a forward that ran with gradients before too, by ``checkpoint(use_reentrant=False)``.

    A reentrant checkpoint, torch's or Megatron-LM's, runs it without gradients first.
    """
    if not runs_again():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "unpack_hook" and code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False
