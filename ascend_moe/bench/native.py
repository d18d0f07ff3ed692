"""The library's plain C++ functions that limits and tuned peers use: row copies, weighted sums, flags."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ascend_moe.errors import ArgumentError
from ascend_moe.native import library as _lib

COPIES = {"memcpy": 0, "stream": 1, "through UB": 2}  # am_bench_copy_rows
_LANES = 16  # of the weighted sum
WAITS = {"spin": 0, "spin, then yield": 1, "futex": 2}  # am_bench_flag


def pointers(rows: Tensor, index: Tensor) -> Tensor:
    """(n,) int64 addresses of the rows ``index`` (int64) of a contiguous (m, H) tensor."""
    return torch.mul(index, rows.size(1) * rows.element_size()).add_(rows.data_ptr())


def row_copy(to: Tensor, addresses: Tensor, method: str) -> Callable[[], None]:
    """Copies the rows at ``addresses`` (n,) to the first n rows of ``to``, which have their size."""
    function = _lib.lib().am_bench_copy_rows
    size = to.size(1) * to.element_size()
    arguments = (to.data_ptr(), addresses.data_ptr(), addresses.numel(), size, COPIES[method])
    return functools.partial(_keep, function, arguments, (to, addresses))


def weighted_sum(out: Tensor, addresses: Tensor, weights: Tensor) -> Callable[[], None]:
    """out (BS, H): fp32 sums over ascending k of the rows at ``addresses`` (BS * K) times weights (BS, K).

    Raises:
        ArgumentError: H is no multiple of 16.
    """
    if out.size(1) % _LANES:
        raise ArgumentError(f"hidden is {out.size(1)}; need a multiple of {_LANES}", argument="hidden")
    function = _lib.lib().am_bench_weighted_sum
    tokens, topk = weights.shape
    places = (out.data_ptr(), addresses.data_ptr(), weights.data_ptr())
    arguments = (*places, tokens, topk, out.size(1), _type_code(out.dtype))
    return functools.partial(_keep, function, arguments, (out, addresses, weights))


def _keep(function: Callable[..., int], arguments: tuple[int, ...], alive: tuple[Tensor, ...]) -> None:
    """``alive``: whose memory the arguments point to."""
    if function(*arguments):
        raise ArgumentError("the benchmark's copy or sum refused its arguments", argument="methods")


@functools.cache
def _type_code(dtype: torch.dtype) -> int:
    return int(_lib.lib().am_type_code(str(dtype).removeprefix("torch.").encode()))


def flag_round(cells: int, side: int, first: int, rounds: int, how: str, patience_us: int) -> int:
    """Nanoseconds of ``rounds`` ping-pongs over the shared cells at this address; -1: nobody answered."""
    ns: int = _lib.lib().am_bench_flag(cells, side, first, rounds, WAITS[how], patience_us)
    return ns
