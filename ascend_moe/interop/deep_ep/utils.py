"""Helpers of DeepEP's programs: ``deep_ep.utils.envs``, ``.math`` and ``.testing``, for CPU and NPU tensors.

Seconds are by the host's clock.
"""

from __future__ import annotations

import functools
import operator
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascend_moe.errors import need, need_dims
from ascend_moe.experts.quant import FP8, FP8_GROUP, cast_fp8
from ascend_moe.interop.deep_ep.base import npu_here

_FLUSH_BYTES = 256_000_000
_seeds = {"local": 0, "global": 0}
_local_rank = 0

# ---- envs


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Start torch.distributed as rank ``local_rank`` of ``num_local_ranks`` on this node.

    Also sets torch's default dtype to bf16, its default device to this rank's, and the seeds by `init_seed`. Reads
    MASTER_ADDR (127.0.0.1), MASTER_PORT (8361), WORLD_SIZE (number of nodes, 1), RANK (this node, 0). The backend is
    "hccl" if an NPU is available, else "gloo". Returns the rank, the number of ranks, a group of all.
    """
    global _local_rank
    _local_rank = local_rank
    nodes, node = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    address = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '8361')}"
    npu = npu_here()
    dist.init_process_group(
        "hccl" if npu else "gloo",
        init_method=f"tcp://{address}",
        world_size=nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(f"npu:{local_rank}" if npu else "cpu")
    if npu:
        npu.set_device(local_rank)
    init_seed(seed)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(dist.get_world_size())))


def init_seed(global_seed: int) -> None:
    """Seed torch and random with ``global_seed`` plus this rank's number in torch.distributed."""
    _seeds.update({"global": global_seed, "local": global_seed + dist.get_rank()})
    torch.manual_seed(_seeds["local"])
    random.seed(_seeds["local"])


def get_local_seed() -> int:
    """Return the seed of this rank: the global one plus the rank; 0 before `init_seed`."""
    return _seeds["local"]


def get_global_seed() -> int:
    """Return the seed that was passed to `init_seed`; 0 before."""
    return _seeds["global"]


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print ``s`` on every rank, with once_in_node on the first of each node only; then run a barrier on all."""
    if not once_in_node or _local_rank == 0:
        print(s, flush=True)
    dist.barrier()


# ---- math


def calc_diff(x: Tensor, y: Tensor) -> float:
    """Return ``1 - 2 sum(ab) / sum(a^2 + b^2)`` for ``a = x + 1``, ``b = y + 1`` in float64: 0 if x and y are equal."""
    one, other = x.double() + 1, y.double() + 1
    return float(1 - 2 * (one * other).sum() / (one * one + other * other).sum())


def safe_div(a: float, b: float) -> float:
    """Return ``a / b``, and 0 for 0 / 0."""
    return 0 if a == 0 and b == 0 else a / b


def ceil_div(x: int, y: int) -> int:
    """Return ``x / y``, rounded up to a whole number."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Return x rounded up to a multiple of y."""
    return ceil_div(x, y) * y


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes ``(m, n)`` of rows x and float32 scales ``(m, ceil(n / 128))``: value = code * scale."""
    need_dims("x", x, 2)
    columns = x.shape[1]
    codes, scales = cast_fp8(torch.nn.functional.pad(x, (0, -columns % FP8_GROUP)))
    return codes[:, :columns].contiguous(), scales


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """Undo `per_token_cast_to_fp8`; return ``(m, n)`` bf16. x_scales: float32, or int32 of four ue8m0 exponents."""
    need_dims("x_fp8", x_fp8, 2, dtypes=(FP8,))
    rows, columns = x_fp8.shape
    if x_scales.dtype == torch.int32:
        exponents = x_scales.contiguous().view(torch.uint8).to(torch.int32)
        x_scales = (exponents << 23).view(torch.float32)
    groups = ceil_div(columns, FP8_GROUP)
    values = torch.nn.functional.pad(x_fp8.float(), (0, -columns % FP8_GROUP)).view(rows, groups, FP8_GROUP)
    back = values * x_scales.reshape(rows, groups, 1)
    return back.view(rows, groups * FP8_GROUP)[:, :columns].to(torch.bfloat16)


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Replace each row of x ``(m, n)``, values below num_slots, by its distinct ones from 0 on, descending, then -1."""
    need_dims("x", x, 2)
    there = x.new_zeros((x.shape[0], num_slots + 1), dtype=torch.bool)
    there.scatter_(1, x.masked_fill(x < 0, num_slots).long(), True)
    numbers = torch.arange(num_slots, dtype=x.dtype, device=x.device).expand(x.shape[0], num_slots)
    found = numbers.masked_fill(~there[:, :num_slots], -1).sort(1, descending=True).values
    x.fill_(-1)
    width = min(num_slots, x.shape[1])
    x[:, :width] = found[:, :width]


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """Return scores ``(T, E)``, zero for tokens' groups of E / num_groups experts not in group_idx ``(T, n)`` int64."""
    chosen = scores.new_zeros((scores.shape[0], num_groups), dtype=torch.bool).scatter_(1, group_idx, True)
    return scores * chosen.repeat_interleave(scores.shape[1] // num_groups, 1)


def hash_tensor(t: Tensor) -> int:
    """Return the sum of a tensor's memory, read as int32 numbers."""
    return int(t.view(torch.int32).sum())


def hash_tensors(*tensors: Any) -> int:
    """Return the xor of `hash_tensor` of all tensors, also in tuples and lists; other arguments are ignored."""
    hashes = (hash_tensor(each) for each in _flat(tensors) if isinstance(each, Tensor))
    return functools.reduce(operator.xor, hashes, 0)


def count_bytes(*tensors: Any) -> int:
    """Return the number of bytes of all tensors, also in tuples and lists; None is ignored."""
    return sum(each.numel() * each.element_size() for each in _flat(tensors) if each is not None)


def _flat(tensors: Iterable[Any]) -> Iterator[Any]:
    for each in tensors:
        yield from _flat(each) if isinstance(each, (tuple, list)) else (each,)


# ---- testing


def flush_l2_cache(enabled: bool = True) -> None:
    """Write 256 MB of zeros on the default device, more than its cache holds; do nothing unless ``enabled``."""
    if enabled:
        torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32).zero_()


def bench(
    fn: Callable[[], object],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], object] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Return the mean, least and largest seconds of num_tests calls of fn, without the first, after num_warmups calls.

    flush_l2: run `flush_l2_cache` before each timed call. post_fn: called after each, untimed.
    """
    for _ in range(num_warmups):
        fn()
    times = []
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        _synchronize()
        began = time.perf_counter()
        fn()
        _synchronize()
        times.append(time.perf_counter() - began)
        if post_fn is not None:
            post_fn()
    counted = times[1:] or times
    return sum(counted) / len(counted), min(counted), max(counted)


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], object] | None = None,
) -> Any:
    """Return the mean seconds on the host of torch ops whose names contain a word, by torch's profiler; 0 if none ran.

    Args:
        fn: called once for warm-up, then ``num_tests`` times.
        kernel_names: a word, or a tuple of words for a tuple of results. trace_path: Chrome trace to write, or None.
        barrier_comm_profiling: run ``barrier``, or if it is None an all-reduce, before each call.
        num_kernels_per_period: ops of a word per call; above 1 the result of each word is a list of that length.
        suppress_kineto_output, flush_l2: have no effect; the profiler prints nothing.

    Raises ArgumentError if the number of ops of a name is not a multiple of the period.
    """
    words = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    wait = barrier or (lambda: dist.all_reduce(torch.ones(1, dtype=torch.float32, device="cpu")))
    fn()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(num_tests):
            if barrier_comm_profiling:
                wait()
            fn()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    found = [_mean_seconds(profiler.events(), word, num_kernels_per_period) for word in words]
    return found[0] if isinstance(kernel_names, str) else tuple(found)


def _mean_seconds(events: Any, word: str, period: int) -> float | list[float]:
    """Return the mean seconds of the outermost ops with this word, in start order."""
    ops = [event for event in events if word in event.name and not _within(event.cpu_parent, word)]
    seconds = [event.time_range.elapsed_us() / 1e6 for event in sorted(ops, key=lambda event: event.time_range.start)]
    rule = "is {}, but {} ops with {!r} in their names ran: pass a divisor of that"
    need(len(seconds) % period == 0, "num_kernels_per_period", rule, period, len(seconds), word)
    calls = max(1, len(seconds) // period)
    means = [sum(seconds[at::period]) / calls for at in range(period)]
    return means if period > 1 else means[0]


def _within(event: Any, word: str) -> bool:
    return event is not None and (word in event.name or _within(event.cpu_parent, word))


def _synchronize() -> None:
    if npu := npu_here():
        npu.synchronize()
