"""Checks what programs written for DeepEP import beside its Buffer."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from ascend_moe.interop.deep_ep import utils


@pytest.fixture
def defaults() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_rng_state(state)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_init_dist_makes_the_group_and_the_defaults(defaults: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(20000 + os.getpid() % 20000))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    rank, world, group = utils.init_dist(0, 1, seed=7)
    assert (rank, world, group.size()) == (0, 1, 1) and dist.get_backend() == "gloo"
    assert torch.get_default_dtype() == torch.bfloat16 and torch.ones(1).device.type == "cpu"
    assert (utils.get_local_seed(), utils.get_global_seed(), torch.initial_seed()) == (7, 7, 7)


@pytest.mark.parametrize("columns", [128, 100, 300])
def test_a_cast_and_back_is_within_the_steps_of_e4m3(columns: int) -> None:
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns))
    codes, scales = utils.per_token_cast_to_fp8(x)
    assert codes.shape == x.shape and scales.shape == (5, -(-columns // 128)) and codes.is_contiguous()
    back = utils.per_token_cast_back(codes, scales)
    assert back.dtype == torch.bfloat16 and bool(((back.float() - x).abs() <= x.abs() / 14 + 0.02).all())
    assert utils.per_token_cast_back(codes[:0], scales[:0]).shape == (0, columns)
    assert utils.calc_diff(x, x) == 0 and 0 < utils.calc_diff(x, back) < 1e-3


def test_unique_values_come_first_and_the_largest_before_the_others() -> None:
    x = torch.tensor([[3, 1, 3, -1], [-1, -1, -1, -1], [0, 1, 2, 3], [2, 2, 2, 2]])
    utils.inplace_unique(x, 4)
    assert x.tolist() == [[3, 1, -1, -1], [-1] * 4, [3, 2, 1, 0], [2, -1, -1, -1]]
    few = torch.tensor([[0, 1, 0]])
    utils.inplace_unique(few, 2)
    assert few.tolist() == [[1, 0, -1]]


def test_small_sums() -> None:
    scores = torch.arange(1, 9).float().view(1, 8)
    grouped = utils.create_grouped_scores(scores, torch.tensor([[1, 3]]), 4)
    assert grouped.tolist() == [[0, 0, 3, 4, 0, 0, 7, 8]]
    ones = torch.ones(2, 4, dtype=torch.int32)
    assert utils.hash_tensors(ones, (ones, None), [ones]) == 8 and utils.count_bytes(ones, (None, [ones])) == 64
    assert (utils.ceil_div(7, 4), utils.align(7, 4), utils.safe_div(0, 0)) == (2, 8, 0)
    with pytest.raises(ZeroDivisionError):
        utils.safe_div(1, 0)
