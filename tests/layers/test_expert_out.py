"""grouped_mlp(out=): the same bits as without it, written where they belong and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_expert_mlp import COUNTS, ROWS, H, expert_weights, rows_of, w8a8_inputs

import ascend_moe
from ascend_moe.errors import ArgumentError
from ascend_moe.experts import grouped_matmul, grouped_mlp

USED = sum(COUNTS)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def given(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    if kind == "w8a8":
        return dict(w8a8_inputs()) | {"output_dtype": dtype}
    gate_up, down = expert_weights(dtype)
    values: dict[str, Any] = {"expand_x": rows_of(dtype), "w_gate_up": gate_up, "w_down": down}
    if kind == "transposed weights":
        values["w_down"] = down.transpose(1, 2).contiguous().transpose(1, 2)
    return values | {"expert_token_nums": torch.tensor(COUNTS)}


def poisoned(dtype: torch.dtype) -> torch.Tensor:
    return torch.full((ROWS, H), -77.0, dtype=dtype)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["plain", "transposed weights", "w8a8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_and_no_others(dtype: torch.dtype, kind: str, weighted: bool) -> None:
    if kind == "w8a8" and dtype == torch.float64:
        pytest.skip("no such output")
    values = given(kind, dtype)
    if weighted:
        values["topk_scales"] = torch.linspace(0.1, 2, ROWS)
    want = grouped_mlp(**values)
    out = poisoned(dtype)
    place = out.data_ptr()
    result = grouped_mlp(**values, out=out)
    assert result is out and out.data_ptr() == place
    assert same_bits(out[:USED], want[:USED])
    assert (out[USED:] == -77).all() and not want[USED:].any()


@pytest.mark.parametrize("hidden", [1, 7, 96, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_at_other_widths(dtype: torch.dtype, hidden: int) -> None:
    """Widths that vector units and blocked products treat each in their own way."""
    generator = torch.Generator().manual_seed(hidden)
    counts = [0, 1, 37, 64, 5, 0]
    x = torch.randn(sum(counts) + 3, hidden, generator=generator).to(dtype)
    gate_up = torch.randn(len(counts), hidden, 2 * 48, generator=generator).to(dtype)
    down = torch.randn(len(counts), 48, hidden, generator=generator).to(dtype)
    want = grouped_mlp(x, gate_up, down, torch.tensor(counts))
    out = grouped_mlp(x, gate_up, down, torch.tensor(counts), out=torch.empty_like(x))
    assert same_bits(out[: sum(counts)], want[: sum(counts)])


def test_no_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last product goes into `out` itself: nothing is concatenated, nothing stacked."""
    monkeypatch.setattr(grouped_matmul, "_stack", None)
    inner = grouped_matmul.npu_grouped_matmul
    calls = []
    monkeypatch.setattr(grouped_matmul, "npu_grouped_matmul", lambda *a, **k: calls.append(inner))
    values = given("plain", torch.float32)
    hidden = torch.randn(USED, values["w_down"].shape[1])
    out = poisoned(torch.float32)[:USED]
    grouped_matmul.grouped_matmul_out(out, hidden, values["w_down"], values["expert_token_nums"], 1)
    assert not calls and not (out == -77).all(1).any()


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [ROWS, 0, 0, 0], [0, 0, 0, 1]])
def test_corner_counts(counts: list[int]) -> None:
    values = given("plain", torch.bfloat16) | {"expert_token_nums": torch.tensor(counts)}
    want = grouped_mlp(**values)
    out = grouped_mlp(**values, out=poisoned(torch.bfloat16))
    assert same_bits(out[: sum(counts)], want[: sum(counts)]) and (out[sum(counts) :] == -77).all()


def test_no_rows_at_all() -> None:
    values = given("plain", torch.float32) | {"expand_x": torch.empty(0, H)}
    values["expert_token_nums"] = torch.zeros(4, dtype=torch.int64)
    assert grouped_mlp(**values, out=torch.empty(0, H)).shape == (0, H)


def test_out_with_strides() -> None:
    values = given("plain", torch.float32)
    wide = torch.full((ROWS, 2 * H), -77.0)
    grouped_mlp(**values, out=wide[:, ::2])
    assert same_bits(wide[:USED, ::2], grouped_mlp(**values)[:USED]) and (wide[:, 1::2] == -77).all()


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(ROWS - 1, H),
        torch.empty(ROWS, H + 1),
        torch.empty(ROWS, H, dtype=torch.bfloat16),
        torch.empty(ROWS, H, device="meta"),
        torch.empty(H, ROWS),
    ],
)
def test_what_does_not_fit(out: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match="out is ") as raised:
        grouped_mlp(**given("plain", torch.float32), out=out)
    assert raised.value.argument == "out"


@pytest.mark.parametrize("name", ["expand_x", "w_gate_up", "w_down", "out"])
def test_autograd_is_refused(name: str) -> None:
    values = given("plain", torch.float32) | {"out": poisoned(torch.float32)}
    values[name] = values[name].requires_grad_()
    with pytest.raises(ArgumentError, match="no part in autograd"):
        grouped_mlp(**values)
    with torch.no_grad():
        grouped_mlp(**values)


def resident_kib() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(("Rss:", "Pss_Shmem:")))


def test_only_rows_that_arrived_touch_memory() -> None:
    """A window tensor for the worst case costs what arrives: here 1 row in 8192 of 8 KiB."""
    hidden, rows = 2048, 8192
    counts = torch.tensor([1, 0])
    weights = torch.randn(2, hidden, 2), torch.randn(2, 1, hidden)
    x = torch.empty(rows, hidden)
    x[0] = 1
    with ascend_moe.LocalCluster(1, window_mib=64) as cluster:

        def work(rank: int, group: str) -> int:
            out = ascend_moe.window_empty(
                (rows, hidden), dtype=torch.float32, group_ep=group, ep_world_size=1, ep_rank_id=rank
            )
            before = resident_kib()
            grouped_mlp(x, *weights, counts, out=out)
            return resident_kib() - before

        assert cluster.run(work)[0] < 8 * 1024  # 64 MiB when all of it were written
