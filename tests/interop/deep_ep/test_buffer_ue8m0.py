"""fp8 rows whose scales are exponents, four in an int32, and rows with one scale: against numpy and ml_dtypes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from deep_ep_buffers import FP8, Case, empty_stack, finish, low, low_rows, low_sum, on_all, send
from op_runs import Clusters
from routed_tokens import randn

from ascend_moe.errors import ArgumentError
from ascend_moe.experts import fp8


def oracle(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes and exponents as bytes, by numpy in float64 and ml_dtypes' two types."""
    groups = x.float().numpy().astype(np.float64).reshape(len(x), x.shape[1] // 128, 128)
    top = np.maximum(np.abs(groups).max(2), np.float32(1e-4)).astype(np.float32)
    least = (top / np.float32(448)).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(least))  # the power of two that is no smaller
    codes = (groups / scale[..., None]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8).reshape(x.shape), scale.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)


def drawn(n: int, hidden: int, seed: int) -> torch.Tensor:
    """Groups of very different sizes, among them zeros, powers of two, and bf16's largest and smallest."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((n, hidden // 128, 128)) * 2.0 ** generator.integers(-60, 60, (n, hidden // 128, 1))
    kinds = generator.integers(0, 8, (n, hidden // 128))
    x[kinds == 0] = 0
    x[kinds == 1] = 448 * 2.0 ** generator.integers(-20, 20)
    x[kinds == 2, 5] = 3.38e38
    x[kinds == 3] *= 1e-38
    return torch.from_numpy(x.reshape(n, hidden).astype(np.float32)).bfloat16()


@pytest.mark.parametrize("seed", range(6))
def test_codes_and_exponents_equal_ml_dtypes(seed: int) -> None:
    x = drawn(17, 512, seed)
    codes, scales = fp8.cast_fp8(x, round_scale=True)
    expected, exponents = oracle(x)
    assert np.array_equal(codes.view(torch.uint8).numpy(), expected)
    assert np.array_equal(fp8.ue8m0(scales).numpy(), exponents)
    groups = x.float().numpy().reshape(17, 4, 128)
    top = np.maximum(np.abs(groups).max(2), np.float32(1e-4))
    codes, scales = fp8.cast_fp8(x, round_scale=False)
    expected = (groups * (np.float32(448) / top)[..., None]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(codes.view(torch.uint8).numpy(), expected.reshape(17, 512))
    assert np.array_equal(scales.numpy(), top / np.float32(448))


def test_exponents_of_every_power_of_two() -> None:
    powers = torch.tensor([2.0**e for e in range(-126, 128)])
    expected = powers.numpy().astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    assert np.array_equal(fp8.ue8m0(powers).numpy(), expected)
    assert fp8.ue8m0(torch.tensor([float("inf")])).item() == 255  # e8m0's NaN, DeepEP's infinity


def bytes_of(scales: torch.Tensor) -> torch.Tensor:
    """Four for each int32: ``(.., H / 128)``."""
    return scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize("kind", ["-1", "empty rank", "one expert"])
@pytest.mark.parametrize(
    ("rounded", "packed", "hook"), [(False, False, False), (True, False, True), (True, True, False), (True, True, True)]
)
def test_low_latency_rows_are_cast_and_scales_packed(
    clusters: Clusters, kind: str, rounded: bool, packed: bool, hook: bool
) -> None:
    case = Case(kind=kind, hidden=1024)

    def body(rank: int, buffer: Any) -> None:
        sent = low(case, rank, buffer, use_fp8=True, round_scale=rounded, use_ue8m0=packed, return_recv_hook=hook)
        sent[4]()
        (codes, scales), count, *_ = sent
        assert codes.dtype == FP8 and scales.dtype == (torch.int32 if packed else torch.float32)
        assert scales.shape == (*codes.shape[:2], 1024 // (512 if packed else 128)) and scales.stride(1) == 1
        # As DeepEP decodes it: the bytes are the exponents of float32.
        factors = (bytes_of(scales).int() << 23).view(torch.float32) if packed else scales
        for expert in range(case.local):
            expected, exact = fp8.cast_fp8(low_rows(case, rank, expert), round_scale=rounded)
            n = int(count[expert])
            assert torch.equal(codes[expert, :n].view(torch.uint8), expected.view(torch.uint8))
            assert torch.equal(factors[expert, :n], exact)
        back = (codes.float().view(*codes.shape[:2], -1, 128) * factors.unsqueeze(3)).view(codes.shape).bfloat16()
        total = finish(case, rank, buffer, sent, x=back)
        torch.testing.assert_close(total.float(), low_sum(case, rank).float(), rtol=0.1, atol=0.3)

    on_all(clusters, case, body)


def test_formats_that_do_not_go_together(clusters: Clusters) -> None:
    case = Case(world=1, hidden=256)

    def body(rank: int, buffer: Any) -> None:
        for text, given in (
            ("use_ue8m0 is True without round_scale", {"use_fp8": True, "use_ue8m0": True}),
            ("round_scale is True without use_fp8", {"round_scale": True}),
            ("x has rows of 256; with use_ue8m0", {"use_fp8": True, "round_scale": True, "use_ue8m0": True}),
        ):
            with pytest.raises(ArgumentError, match=text):
                low(case, rank, buffer, **given)

    on_all(clusters, case, body)


def rows_oracle(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    value = x.float().numpy()
    top = np.abs(value).max(1)
    factor = np.where(top == 0, np.float32(1), np.float32(448) / np.where(top == 0, np.float32(1), top))
    codes = (value * factor[:, None]).astype(ml_dtypes.float8_e4m3fn)
    return codes.view(np.uint8), (np.float32(1) / factor).astype(np.float32)


@pytest.mark.parametrize("seed", range(3))
def test_rows_with_one_scale_equal_ml_dtypes(seed: int) -> None:
    x = randn(9, 256, seed=seed).bfloat16() * 10.0 ** (seed * 5 - 5)
    x[2] = 0
    codes, scales = fp8.cast_fp8_rows(x)
    expected, factors = rows_oracle(x)
    assert np.array_equal(codes.view(torch.uint8).numpy(), expected) and np.array_equal(scales[:, 0].numpy(), factors)


@pytest.mark.parametrize("kind", ["-1", "empty rank"])
def test_pertoken_fp8_of_flavour_ascend(clusters: Clusters, kind: str) -> None:
    case, mode = Case(kind=kind), "pertoken_fp8_e4m3"

    def body(rank: int, buffer: Any) -> None:
        mine = [low_rows(case, rank, expert) for expert in range(case.local)]
        codes, scales = rows_oracle(empty_stack([row for each in mine for row in each], low_rows(case, rank, 0)))
        for sent in (send(case, rank, buffer, quant_mode=mode), low(case, rank, buffer, quant_mode=mode)):
            (got, factors), n = sent[0], len(codes)
            assert got.dtype == FP8 and factors.dtype == torch.float32 and factors.shape == got.shape[:1]
            assert np.array_equal(got[:n].view(torch.uint8).numpy(), codes)
            assert np.array_equal(factors[:n].numpy(), scales)
            back = torch.where(torch.arange(len(got))[:, None] < n, got.float() * factors[:, None], 0).bfloat16()
            if len(sent) == 6:
                total = buffer.combine(back, sent[4])[0]
            else:
                total = finish(case, rank, buffer, sent, x=back)
            torch.testing.assert_close(total.float(), low_sum(case, rank).float(), rtol=0.1, atol=0.3)

    on_all(clusters, case, body, "ascend")
