"""The benchmark's limits do what they say: copies by three methods, the weighted sum bit for bit."""

from __future__ import annotations

import ctypes

import pytest
import torch

from ascend_moe.native import library

COPY_METHODS = (0, 1, 2)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def addresses(tensor: torch.Tensor, rows: list[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    step = tensor.stride(0) * tensor.element_size()
    return (ctypes.c_void_p * len(rows))(
        *(None if row is None else tensor.data_ptr() + row * step for row in rows)
    )


@pytest.mark.parametrize("method", COPY_METHODS)
@pytest.mark.parametrize("row_bytes", [64, 14336, 200, 400_000])
def test_rows_are_copied(method: int, row_bytes: int) -> None:
    source = torch.randint(0, 256, (5, row_bytes), dtype=torch.uint8)
    order: list[int | None] = [3, 3, 0, 4, 1, 2, 0]
    target = torch.zeros(len(order) + 1, row_bytes, dtype=torch.uint8)
    code = library.lib().am_bench_copy_rows(
        target.data_ptr(), addresses(source, order), len(order), row_bytes, method
    )
    assert code == 0
    assert torch.equal(target[:-1], source[order]) and not target[-1].any()


def test_other_methods_are_refused() -> None:
    assert library.lib().am_bench_copy_rows(None, None, 0, 64, 3) == 1
    assert library.lib().am_bench_weighted_sum(None, None, None, 0, 1, 16, 4) == 1
    assert library.lib().am_bench_weighted_sum(None, None, None, 0, 1, 17, 1) == 1


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("hidden", [16, 80, 4096])
def test_weighted_sum_has_the_reference_bits(name: str, hidden: int) -> None:
    tokens, top_k, dtype = 6, 5, DTYPES[name]
    rows = (torch.randn(40, hidden) * 100).to(dtype)
    rows[7, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0]).to(dtype)
    rows[8] = (torch.randn(hidden) * 1e-6).to(dtype)  # denormal in float16
    chosen: list[int | None] = [int(row) for row in torch.randint(0, 40, (tokens * top_k,))]
    chosen[:2] = [7, 8]
    chosen[9] = None
    weights = torch.randn(tokens, top_k)
    out = torch.zeros(tokens, hidden, dtype=dtype)
    expected = torch.zeros(tokens, hidden)
    for place, row in enumerate(chosen):
        if row is not None:
            expected[place // top_k] += rows[row].float() * weights.flatten()[place]
    code = library.lib().am_bench_weighted_sum(
        out.data_ptr(),
        addresses(rows, chosen),
        weights.data_ptr(),
        tokens,
        top_k,
        hidden,
        library.lib().am_type_code(name.encode()),
    )
    assert code == 0
    nan = expected.isnan()
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out[~nan], expected.to(dtype)[~nan])
