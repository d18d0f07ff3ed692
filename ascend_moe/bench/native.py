"""The library's plain C++ functions that limits and tuned peers use: row copies, weighted sums, flags."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ascend_moe import _lib
from ascend_moe.errors import ArgumentError

COPIES = {"memcpy": 0, "stream": 1, "through UB": 2}  # am_bench_copy_rows
WAITS = {"spin": 0, "spin, then yield": 1, "futex": 2}  # am_bench_flag


def pointers(rows: Tensor, index: Tensor) -> Tensor:
    """(n,) int64 addresses of the rows ``index`` (int64) of a contiguous (m, H) tensor."""
    return torch.mul(index, rows.size(1) * rows.element_size()).add_(rows.data_ptr())


def copy_rows(to: Tensor, addresses: Tensor, method: str) -> None:
    """Copies the rows at ``addresses`` to the first rows of ``to``; rows have ``to``'s size."""
    count, size = addresses.numel(), to.size(1) * to.element_size()
    _lib.lib().am_bench_copy_rows(to.data_ptr(), addresses.data_ptr(), count, size, COPIES[method])


def weighted_sum(out: Tensor, addresses: Tensor, weights: Tensor) -> None:
    """out (BS, H): fp32 sums over ascending k of the rows at ``addresses`` (BS * K) times weights (BS, K)."""
    tokens, topk = weights.shape
    kind = _type_code(out.dtype)
    failed = _lib.lib().am_bench_weighted_sum(
        out.data_ptr(), addresses.data_ptr(), weights.data_ptr(), tokens, topk, out.size(1), kind
    )
    if failed:
        raise ArgumentError(
            f"the weighted sum needs H a multiple of 16, H is {out.size(1)}", argument="hidden"
        )


@functools.cache
def _type_code(dtype: torch.dtype) -> int:
    return int(_lib.lib().am_type_code(str(dtype).removeprefix("torch.").encode()))


def flag_round(cells: int, side: int, first: int, rounds: int, how: str, patience_us: int) -> int:
    """Nanoseconds of ``rounds`` ping-pongs over the shared cells at this address; -1: nobody answered."""
    ns: int = _lib.lib().am_bench_flag(cells, side, first, rounds, WAITS[how], patience_us)
    return ns
