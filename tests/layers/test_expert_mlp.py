"""The expert MLP as a whole, against loops over experts and transformers' own experts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from ascend_moe import experts
from ascend_moe.errors import ArgumentError
from ascend_moe.experts import grouped_mlp, npu_dynamic_quant, npu_swiglu, quantize_weight
from ascend_moe.routing import softmax_topk

L, H, INNER, ROWS = 4, 32, 24, 14
COUNTS = [5, 0, 1, 4]
OWNERS = [0] * 5 + [2] + [3] * 4


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


@pytest.mark.parametrize("list_type", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
def test_rows_pass_through_their_own_expert(dtype: torch.dtype, tolerance: float, list_type: int) -> None:
    (gate_up, down), x = expert_weights(dtype), rows_of(dtype)
    x[sum(COUNTS) :] = torch.nan
    counts = torch.tensor(COUNTS)
    group_list = counts if list_type == 1 else counts.cumsum(0)
    y = grouped_mlp(x, gate_up, down, group_list, group_list_type=list_type)
    assert y.dtype == dtype and y.shape == (ROWS, H)
    assert torch.allclose(y.double(), looped_mlp(x, gate_up, down), rtol=tolerance, atol=tolerance)
    assert not y[sum(COUNTS) :].any()


def test_a_rank_without_rows_returns_zeros_and_gradients() -> None:
    gate_up, down = (w.requires_grad_() for w in expert_weights(torch.float32))
    x = rows_of(torch.float32).requires_grad_()
    y = grouped_mlp(x, gate_up, down, torch.zeros(L, dtype=torch.int64))
    assert torch.equal(y, torch.zeros(ROWS, H))
    gradients = torch.autograd.grad(y.sum(), (x, gate_up, down))
    assert all(not gradient.any() for gradient in gradients)
    empty = grouped_mlp(x[:0], gate_up, down, torch.zeros(L, dtype=torch.int64))
    assert empty.shape == (0, H)


def test_work_follows_the_rows_that_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watched(gate_up: torch.Tensor) -> torch.Tensor:
        seen.append(gate_up.shape[0])
        return npu_swiglu(gate_up)

    monkeypatch.setattr(experts, "npu_swiglu", watched)
    y = grouped_mlp(rows_of(torch.float32), *expert_weights(torch.float32), torch.tensor(COUNTS))
    assert y.shape == (ROWS, H) and seen == [sum(COUNTS)]


def test_gradients_are_those_of_the_loop() -> None:
    gate_up, down = (w.requires_grad_() for w in expert_weights(torch.float64))
    x = rows_of(torch.float64).requires_grad_()
    y = grouped_mlp(x, gate_up, down, torch.tensor(COUNTS))
    loop = looped_mlp(x, gate_up, down)
    gradient = torch.randn(ROWS, H, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours = torch.autograd.grad(y, (x, gate_up, down), gradient)
    theirs = torch.autograd.grad(loop, (x, gate_up, down), gradient)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(ours, theirs, strict=True))
    assert ours[1].abs().sum() > 0


def w8a8_inputs() -> dict[str, torch.Tensor]:
    gate_up, down = expert_weights(torch.float32)
    codes, dynamic_scales = npu_dynamic_quant(rows_of(torch.float32))
    quantised_gate_up, gate_up_scale = quantize_weight(gate_up)
    quantised_down, down_scale = quantize_weight(down)
    return {
        "expand_x": codes,
        "w_gate_up": quantised_gate_up,
        "w_down": quantised_down,
        "expert_token_nums": torch.tensor(COUNTS),
        "dynamic_scales": dynamic_scales,
        "w_gate_up_scale": gate_up_scale,
        "w_down_scale": down_scale,
    }


def looped_w8a8(inputs: dict[str, torch.Tensor], weights: torch.Tensor | None = None) -> torch.Tensor:
    y = torch.zeros(ROWS, H)
    for row, expert in enumerate(OWNERS):
        total = inputs["expand_x"][row].long() @ inputs["w_gate_up"][expert].long()
        value = total.float() * inputs["w_gate_up_scale"][expert] * inputs["dynamic_scales"][row]
        hidden = silu(value[:INNER]) * value[INNER:]
        scale = hidden.abs().max() / 127
        codes = torch.zeros_like(hidden) if scale == 0 else torch.round(hidden / scale)
        if weights is not None:
            scale = scale * weights[row]
        total = codes.long() @ inputs["w_down"][expert].long()
        y[row] = total.float() * inputs["w_down_scale"][expert] * scale
    return y


@pytest.mark.parametrize("list_type", [0, 1])
def test_w8a8_is_the_loop_and_near_the_floats(list_type: int) -> None:
    inputs = w8a8_inputs()
    inputs["expand_x"][2] = 0  # an all-zero row
    inputs["dynamic_scales"][sum(COUNTS) :] = torch.nan
    expected = looped_w8a8(inputs)
    if list_type == 0:
        inputs["expert_token_nums"] = inputs["expert_token_nums"].cumsum(0)
    y = grouped_mlp(**inputs, group_list_type=list_type, output_dtype=torch.float32)
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert not y[2].any() and y[0].any() and not y[sum(COUNTS) :].any()
    floats = looped_mlp(rows_of(torch.float32), *expert_weights(torch.float32))
    floats[2] = 0
    assert (y - floats).norm() < 0.03 * floats.norm()


def test_w8a8_output_type_follows_the_scale() -> None:
    inputs = w8a8_inputs()
    assert grouped_mlp(**inputs).dtype == torch.bfloat16
    inputs["w_down_scale"] = inputs["w_down_scale"].to(torch.float16)
    assert grouped_mlp(**inputs).dtype == torch.float16
    assert grouped_mlp(**inputs, output_dtype=15).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1)])
def test_topk_scales_weigh_each_row(shape: tuple[int, ...]) -> None:
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(4))
    x, (gate_up, down) = rows_of(torch.float32), expert_weights(torch.float32)
    counts = torch.tensor(COUNTS)
    y = grouped_mlp(x, gate_up, down, counts, topk_scales=weights.reshape(shape))
    expected = looped_mlp(x, gate_up, down) * weights.double()[:, None]
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-6)
    inputs = w8a8_inputs()
    y = grouped_mlp(**inputs, topk_scales=weights.reshape(shape), output_dtype=torch.float32)
    assert torch.allclose(y, looped_w8a8(inputs, weights), rtol=1e-5, atol=1e-6)


def test_transformers_mixtral_block() -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(
        hidden_size=H, intermediate_size=INNER, num_local_experts=L, num_experts_per_tok=2
    )
    torch.manual_seed(5)
    block = mixtral.MixtralSparseMoeBlock(config).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randn(1, 9, H)
    with torch.no_grad():
        expected = block(tokens)
        expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(9, H)
        weights, ids = softmax_topk(tokens[0] @ block.gate.weight.t(), 2, True)
        order = torch.argsort(ids.flatten(), stable=True)
        counts = torch.bincount(ids.flatten(), minlength=L)
        # The checkpoint's (E, out, in) layout, used in place through transposed views.
        gate_up, down = block.experts.gate_up_proj.transpose(1, 2), block.experts.down_proj.transpose(1, 2)
        rows = grouped_mlp(tokens[0][order // 2], gate_up, down, counts)
        y = torch.zeros(9, H).index_add_(0, order // 2, rows * weights.flatten()[order, None])
    assert expected.square().mean().sqrt() > 0.05
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)


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
    ],
)
def test_bad_arguments_are_named(argument: str, changes: dict[str, object]) -> None:
    gate_up, down = expert_weights(torch.float32)
    good = {"expand_x": rows_of(torch.float32), "w_gate_up": gate_up, "w_down": down,
            "expert_token_nums": torch.tensor(COUNTS)}  # fmt: skip
    with pytest.raises(ArgumentError) as caught:
        grouped_mlp(**{**good, **changes})  # type: ignore[arg-type]
    assert caught.value.argument == argument


@pytest.mark.parametrize("missing", ["dynamic_scales", "w_gate_up_scale", "w_down_scale"])
def test_w8a8_needs_all_its_scales(missing: str) -> None:
    inputs = w8a8_inputs()
    del inputs[missing]
    with pytest.raises(ArgumentError) as caught:
        grouped_mlp(**inputs)
    assert caught.value.argument == missing
    with pytest.raises(ArgumentError) as caught:
        grouped_mlp(**{**w8a8_inputs(), "expand_x": rows_of(torch.float32)})
    assert caught.value.argument == "expand_x"
