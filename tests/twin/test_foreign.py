"""Vector kernels as an Ascend engineer writes them, run unmodified and compared with numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from twin_kernels import MODES, kernels, tiling, tree_sum

modes = pytest.mark.parametrize("mode", MODES)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@modes
@pytest.mark.parametrize("length,cores", [(2048, 8), (1003, 5), (7, 3), (40, 48)])
def test_add(mode: str, length: int, cores: int) -> None:
    x, y = (rng(length + i).standard_normal(length).astype(np.float16) for i in range(2))
    z = np.full(length, 9, np.float16)
    add = kernels("add_custom", "DTYPE_X=half")
    add.launch("add_custom", [x, y, z], tiling(length, 128), cores, 1, workspace_bytes=0, mode=mode)
    assert np.array_equal(z, x + y)


@modes
def test_add_of_torch_tensors_in_place(mode: str) -> None:
    x = torch.randn(96, generator=torch.Generator().manual_seed(3)).half()
    want = x + x
    kernels("add_custom", "DTYPE_X=half").launch(
        "add_custom", [x, x, x, None], torch.tensor([96, 32], dtype=torch.int32), 2, 1, mode=mode
    )
    assert torch.equal(x, want)


@modes
@pytest.mark.parametrize("rows,columns", [(5, 64), (3, 100), (9, 7)])
def test_softmax(mode: str, rows: int, columns: int) -> None:
    x = rng(columns).standard_normal((rows, columns)).astype(np.float32)
    y = np.zeros_like(x)
    kernels("softmax_custom").launch("softmax_custom", [x, y, None], tiling(rows, columns), 4, mode=mode)
    exp = np.exp((x - x.max(1, keepdims=True)).astype(np.float64)).astype(np.float32)
    total = np.array([tree_sum(row) for row in exp])
    assert np.array_equal(y, exp * (np.float32(1) / total)[:, None])


@modes
def test_layernorm(mode: str) -> None:
    rows, columns = 7, 96
    x = rng(1).standard_normal((rows, columns)).astype(np.float16)
    gamma, beta = (rng(2 + i).standard_normal(columns).astype(np.float32) for i in range(2))
    y = np.zeros_like(x)
    kernels("layernorm_custom", "DTYPE_X=half", "ORIG_DTYPE_X=DT_FLOAT16").launch(
        "layernorm_custom", [x, gamma, beta, y, None], tiling(rows, columns, 1e-5), 3, mode=mode
    )
    value = x.astype(np.float64)
    value -= value.mean(1, keepdims=True)
    want = value / np.sqrt((value**2).mean(1, keepdims=True) + 1e-5) * gamma + beta
    assert np.abs(y - want).max() < 4e-3
    assert np.abs(y).max() > 1  # not zeros


@modes
def test_reduce_rows(mode: str) -> None:
    rows, columns = 32, 29
    x = rng(4).standard_normal((rows, columns)).astype(np.float32)
    sums, maxima = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    kernels("reduce_rows").launch("reduce_rows", [x, sums, maxima], tiling(rows, columns, 32), 2, mode=mode)
    assert np.array_equal(maxima, x.max(1))
    assert np.allclose(sums, x.sum(1, dtype=np.float64), atol=1e-5)


@modes
@pytest.mark.parametrize("threshold", [0.0, 99.0, -99.0])
def test_compaction_by_gather_mask(mode: str, threshold: float) -> None:
    cores, chunk = 4, 192
    x = rng(5).standard_normal((cores, chunk)).astype(np.float32)
    y, counts = np.zeros_like(x), np.full((cores, 8), -1, np.int32)
    kernels("compact_custom").launch(
        "compact_custom", [x, y, counts], tiling(chunk, threshold), cores, mode=mode
    )
    for core in range(cores):
        kept = x[core][x[core] > threshold]
        assert counts[core, 0] == len(kept)
        assert np.array_equal(y[core, : len(kept)], kept)
        assert not y[core, len(kept) :].any()


@modes
def test_topk_by_sorting(mode: str) -> None:
    rows, k = 6, 16
    x = rng(6).permutation(rows * 128).reshape(rows, 128).astype(np.float32)
    values, indices = np.zeros((rows, k), np.float32), np.zeros((rows, k), np.uint32)
    kernels("topk_custom").launch("topk_custom", [x, values, indices], tiling(rows, k), 3, mode=mode)
    want = np.argsort(-x, axis=1)[:, :k]
    assert np.array_equal(indices, want)
    assert np.array_equal(values, np.take_along_axis(x, want, 1))


@modes
@pytest.mark.parametrize("dtype,name", [(np.float16, "half"), (ml_dtypes.bfloat16, "bfloat16_t")])
def test_quantisation(mode: str, dtype: type, name: str) -> None:
    rows, hidden = 5, 160
    x = rng(7).standard_normal((rows, hidden)).astype(dtype)
    codes, scales = np.zeros((rows, hidden), np.int8), np.zeros(rows, np.float32)
    kernels("quant_custom", f"DTYPE_X={name}").launch(
        "quant_custom", [x, codes, scales], tiling(rows, hidden), 2, workspace_bytes=32, mode=mode
    )
    value = x.astype(np.float32)
    factor = np.float32(127) / np.abs(value).max(1)
    assert np.array_equal(scales, np.float32(1) / factor)
    assert np.array_equal(codes, np.rint(value * factor[:, None]).astype(np.int8))


@modes
@pytest.mark.parametrize("total,cores", [(1000, 7), (3, 8)])
def test_histogram_by_atomic_add(mode: str, total: int, cores: int) -> None:
    ids = rng(8).integers(0, 24, total).astype(np.int32)
    counts = np.zeros(24, np.int32)
    kernels("histogram_custom").launch("histogram_custom", [ids, counts], tiling(total, 24), cores, mode=mode)
    assert np.array_equal(counts, np.bincount(ids, minlength=24))


@modes
@pytest.mark.parametrize("cores", [1, 6])
def test_prefix_sum_over_soft_sync_all(mode: str, cores: int) -> None:
    chunk = 24
    x = rng(9).integers(-50, 50, cores * chunk).astype(np.int32)
    y = np.zeros_like(x)
    kernels("prefix_sum").launch(
        "prefix_sum", [x, y], tiling(chunk), cores, workspace_bytes=cores * 64, mode=mode
    )
    assert np.array_equal(y, np.cumsum(x))
