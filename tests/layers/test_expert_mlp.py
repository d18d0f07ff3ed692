"""The expert MLP against loops over experts and transformers' own; grouped_mlp(out=) gives the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bad_arguments import refused
from torch.nn.functional import silu

import ascend_moe
from ascend_moe.experts import grouped_mlp, npu_dynamic_quant, quantize_weight
from ascend_moe.experts.products import float_matmul

L, H, INNER, ROWS = 4, 32, 24, 14
COUNTS = [5, 0, 1, 4]
OWNERS = [0] * 5 + [2] + [3] * 4
USED = sum(COUNTS)
NOBODY = torch.zeros(L, dtype=torch.int64)


def expert_weights(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(L, H, 2 * INNER, generator=generator) / H**0.5
    down = torch.randn(L, INNER, H, generator=generator) / INNER**0.5
    return gate_up.to(dtype), down.to(dtype)


def rows_of(dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


def looped_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Float64, row by row; zeros behind the last expert's rows."""
    y = torch.zeros(ROWS, H, dtype=torch.float64)
    for row, expert in enumerate(OWNERS):
        gate, up = (x[row].double() @ gate_up[expert].double()).chunk(2)
        y[row] = (silu(gate) * up) @ down[expert].double()
    return y


def w8a8_inputs() -> dict[str, torch.Tensor]:
    gate_up, down = expert_weights(torch.float32)
    codes, dynamic_scales = npu_dynamic_quant(rows_of(torch.float32))
    names = ("expand_x", "dynamic_scales", "w_gate_up", "w_gate_up_scale", "w_down", "w_down_scale")
    tensors = (codes, dynamic_scales, *quantize_weight(gate_up), *quantize_weight(down))
    return dict(zip(names, tensors, strict=True)) | {"expert_token_nums": torch.tensor(COUNTS)}


def looped_w8a8(inputs: dict[str, torch.Tensor], weights: torch.Tensor | None = None) -> torch.Tensor:
    y = torch.zeros(ROWS, H)
    for row, expert in enumerate(OWNERS):
        total = inputs["expand_x"][row].long() @ inputs["w_gate_up"][expert].long()
        value = total.float() * inputs["w_gate_up_scale"][expert] * inputs["dynamic_scales"][row]
        hidden = silu(value[:INNER]) * value[INNER:]
        scale = hidden.abs().max() / 127
        codes = torch.zeros_like(hidden) if scale == 0 else torch.round(hidden / scale)
        scale = scale if weights is None else scale * weights[row]
        total = codes.long() @ inputs["w_down"][expert].long()
        y[row] = total.float() * inputs["w_down_scale"][expert] * scale
    return y


def given(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of a plain call, or of a W8A8 one."""
    if kind == "w8a8":
        return dict(w8a8_inputs()) | {"output_dtype": dtype}
    gate_up, down = expert_weights(dtype)
    weights = {"w_gate_up": gate_up, "w_down": down, "expert_token_nums": torch.tensor(COUNTS)}
    return {"expand_x": rows_of(dtype), **weights}


# ---- results


@pytest.mark.parametrize("list_type", [0, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_rows_pass_through_their_own_expert(dtype: torch.dtype, tolerance: float, list_type: int) -> None:
    (gate_up, down), x = expert_weights(dtype), rows_of(dtype)
    x[USED:] = torch.nan
    counts = torch.tensor(COUNTS)
    group_list = counts if list_type == 1 else counts.cumsum(0)
    y = grouped_mlp(x, gate_up, down, group_list, group_list_type=list_type)
    assert y.dtype == dtype and y.shape == (ROWS, H)
    assert torch.allclose(y.double(), looped_mlp(x, gate_up, down), rtol=tolerance, atol=tolerance)
    assert not y[USED:].any()


@pytest.mark.parametrize("list_type", [0, 1])
def test_w8a8_is_the_loop_and_near_the_floats(list_type: int) -> None:
    inputs = w8a8_inputs()
    inputs["expand_x"][2] = 0  # an all-zero row
    inputs["dynamic_scales"][USED:] = torch.nan
    expected = looped_w8a8(inputs)
    if list_type == 0:
        inputs["expert_token_nums"] = inputs["expert_token_nums"].cumsum(0)
    y = grouped_mlp(**inputs, group_list_type=list_type, output_dtype=torch.float32)
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert not y[2].any() and y[0].any() and not y[USED:].any()
    floats = looped_mlp(rows_of(torch.float32), *expert_weights(torch.float32))
    floats[2] = 0
    assert (y - floats).norm() < 0.03 * floats.norm()
    # The output's type is the scale's.
    assert grouped_mlp(**inputs, group_list_type=list_type).dtype == torch.bfloat16
    inputs["w_down_scale"] = inputs["w_down_scale"].half()
    assert grouped_mlp(**inputs, group_list_type=list_type).dtype == torch.float16
    assert grouped_mlp(**inputs, group_list_type=list_type, output_dtype=15).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1)])
def test_topk_scales_weigh_each_row(shape: tuple[int, ...]) -> None:
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(4))
    plain = given("plain", torch.float32)
    y = grouped_mlp(**plain, topk_scales=weights.reshape(shape))
    loop = looped_mlp(plain["expand_x"], plain["w_gate_up"], plain["w_down"])
    assert torch.allclose(y.double(), loop * weights.double()[:, None], rtol=1e-5, atol=1e-6)
    inputs = w8a8_inputs()
    y = grouped_mlp(**inputs, topk_scales=weights.reshape(shape), output_dtype=torch.float32)
    assert torch.allclose(y, looped_w8a8(inputs, weights), rtol=1e-5, atol=1e-6)


# ---- out=


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_rows_are_not_rounded(dtype: torch.dtype) -> None:
    """Only their product with the activation is."""
    x, w_gate_up, w_down = (torch.randn(shape).to(dtype) for shape in ((ROWS, 16), (1, 16, 16), (1, 8, 16)))
    weights = torch.linspace(0.1, 0.9, ROWS)
    found = grouped_mlp(x, w_gate_up, w_down, torch.tensor([ROWS]), topk_scales=weights)
    gate, up = float_matmul(x, w_gate_up[0], None).float().chunk(2, -1)
    hidden = (torch.nn.functional.silu(gate) * up).to(dtype)
    assert torch.equal(found, float_matmul((hidden * weights[:, None]).to(dtype), w_down[0], None))


@pytest.mark.parametrize("kind", ["plain", "w8a8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_same_bits_in_out_and_no_others(dtype: torch.dtype, kind: str) -> None:
    """Also in an out with strides, and in one without rows."""
    values = given(kind, dtype)
    for counts in (COUNTS, [0, 0, 0, 0], [ROWS, 0, 0, 0], [0, 0, 0, 1]):
        values["expert_token_nums"] = torch.tensor(counts)
        want, used = grouped_mlp(**values), sum(counts)
        wide = torch.full((ROWS, 2 * H), -77.0, dtype=dtype)
        for out in (torch.full((ROWS, H), -77.0, dtype=dtype), wide[:, ::2]):
            assert grouped_mlp(**values, out=out) is out
            assert used == 0 or same_bits(out[:used], want[:used])
            assert (out[used:] == -77).all()
        assert not want[used:].any() and (wide[:, 1::2] == -77).all()
    rows = {"expand_x": values["expand_x"][:0], "expert_token_nums": NOBODY, "out": torch.empty(0, H, dtype=dtype)}
    rows |= {"dynamic_scales": torch.empty(0)} if kind == "w8a8" else {}
    assert grouped_mlp(**values | rows).shape == (0, H)


@pytest.mark.parametrize("name", ["expand_x", "w_gate_up", "w_down", "out"])
def test_out_takes_no_part_in_autograd(name: str) -> None:
    values = given("plain", torch.float32) | {"out": torch.empty(ROWS, H)}
    values[name] = values[name].requires_grad_()
    refused("out", grouped_mlp, **values, says="does not support autograd")
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
            place = {"group_ep": group, "ep_world_size": 1, "ep_rank_id": rank}
            out = ascend_moe.window_empty((rows, hidden), dtype=torch.float32, **place)
            before = resident_kib()
            grouped_mlp(x, *weights, counts, out=out)
            return resident_kib() - before

        assert cluster.run(work)[0] < 8 * 1024  # 64 MiB when all of it were written


# ---- refused


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("w_gate_up", {"w_gate_up": torch.ones(L, H + 1, 2 * INNER)}),
        ("w_gate_up", {"expand_x": torch.ones(H)}),
        ("w_down", {"w_down": torch.ones(L, INNER + 1, H)}),
        ("w_down", {"w_down": torch.ones(L + 1, INNER, H)}),
        ("weight", {"w_down": torch.ones(L, INNER, H, dtype=torch.bfloat16)}),
        ("expert_token_nums", {"expert_token_nums": torch.tensor([1, 2])}),
        ("expert_token_nums", {"expert_token_nums": torch.tensor([ROWS, 1, 0, 0])}),
        ("group_list_type", {"group_list_type": 2}),
        ("topk_scales", {"topk_scales": torch.ones(ROWS + 1)}),
        ("dynamic_scales", {"dynamic_scales": torch.ones(ROWS)}),
        ("dynamic_scales", {"expand_x": torch.ones(ROWS, H, dtype=torch.int8)}),
        ("w_down_scale", {"w_down_scale": torch.ones(L, H)}),
        ("output_dtype", {"output_dtype": torch.bfloat16}),
        ("out", {"out": torch.empty(ROWS - 1, H)}),
        ("out", {"out": torch.empty(ROWS, H, dtype=torch.bfloat16)}),
        ("out", {"out": torch.empty(ROWS, H, device="meta")}),
        *((missing, missing) for missing in ("dynamic_scales", "w_gate_up_scale", "w_down_scale")),
    ],
)
def test_bad_arguments_are_named(argument: str, changes: dict[str, object] | str) -> None:
    """``changes``: of a plain call, or what a W8A8 call leaves out."""
    if isinstance(changes, str):
        arguments = w8a8_inputs()
        del arguments[changes]
    else:
        arguments = given("plain", torch.float32) | changes
    refused(argument, grouped_mlp, **arguments)
