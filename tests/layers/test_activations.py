"""The table of activations: each against its formula in float64, its gradients, compiled, int8, and in every user."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from bad_arguments import refused
from gloo_ranks import threads
from torch import Tensor

from ascend_moe.dispatchers import AllToAllDispatcher
from ascend_moe.experts import (
    Activation,
    grouped_mlp,
    npu_clipped_swiglu,
    npu_dequant_swiglu_quant,
    npu_dynamic_quant,
    npu_swiglu,
    quantize_weight,
)
from ascend_moe.experts.activations import ACTIVATIONS
from ascend_moe.interop.fused_moe import fused_experts
from ascend_moe.interop.megatron import GroupedMLP
from ascend_moe.interop.sglang import EPMoE
from ascend_moe.interop.vllm import make_experts
from ascend_moe.layer import MoEConfig, MoELayer
from ascend_moe.moe_config import ACTIVATIONS as NAMES
from ascend_moe.moe_config import ALIASES

L, H, INNER, COUNTS = 3, 16, 8, [4, 0, 5]
OWNERS = [0] * 4 + [2] * 5


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def cut(x: float, limit: float) -> float:
    return max(-limit, min(limit, x))


#: What an activation is, for one gate and one up, written here again.
FORMULAS: dict[str, Callable[..., float]] = {
    "swiglu": lambda g, u, limit=math.inf: min(g, limit) * sigmoid(min(g, limit)) * cut(u, limit),
    "clipped_swiglu": lambda g, u, limit=7.0, alpha=1.702, bias=1.0: (
        min(g, limit) * sigmoid(alpha * min(g, limit)) * (cut(u, limit) + bias)
    ),
    "swiglustep": lambda g, u, limit=7.0: min(g * sigmoid(g), limit) * cut(u, limit),
    "situ": lambda x, beta=1.0: beta * math.tanh(x / beta) * sigmoid(x),
    "situglu": lambda g, u, beta=1.0, linear_beta=0.0: (
        beta * math.tanh(g / beta) * sigmoid(g) * (linear_beta * math.tanh(u / linear_beta) if linear_beta else u)
    ),
    "geglu": lambda g, u: g * (1 + math.erf(g / math.sqrt(2))) / 2 * u,
    "geglu_tanh": lambda g, u: gelu_tanh(g) * u,
    "sigmoid_glu": lambda g, u: sigmoid(g) * u,
    "relu2": lambda x: max(x, 0.0) ** 2,
    "reglu2": lambda g, u: max(g, 0.0) ** 2 * u,
}
#: Each with its defaults, and each number at another value.
CASES = [(name, {}) for name in FORMULAS]
CASES += [("swiglu", {"limit": 0.8}), ("clipped_swiglu", {"limit": 0.7, "alpha": 1.0, "bias": 0.0})]
CASES += [("clipped_swiglu", {"limit": 0.9, "alpha": -1.3, "bias": -0.5}), ("swiglustep", {"limit": 0.4})]
CASES += [("situ", {"beta": 0.6}), ("situglu", {"beta": 4.0, "linear_beta": 25.0}), ("situglu", {"linear_beta": 0.5})]
EVERY = pytest.mark.parametrize(("name", "numbers"), CASES, ids=str)


def by_hand(act: Activation, x: Tensor) -> Tensor:
    """float64 of rows (N, 2I) or (N, I), value by value."""
    formula, width = FORMULAS[act.name], act.inner(x.shape[1])
    rows = x.double().tolist()
    if not act.gated:
        return torch.tensor([[formula(v, **act.numbers) for v in row] for row in rows], dtype=torch.float64)
    pairs = [zip(row[::2], row[1::2]) if act.interleaved else zip(row[:width], row[width:]) for row in rows]  # noqa: B905
    made = [[formula(g, u, **act.numbers) for g, u in row] for row in pairs]
    return torch.tensor(made, dtype=torch.float64)


def rows(dtype: torch.dtype = torch.float32, width: int = H, count: int = 9, spread: float = 1.0) -> Tensor:
    values = torch.randn(count, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (values * spread).to(dtype)


def weights(act: Activation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    parts = 2 if act.gated else 1
    gate_up = torch.randn(L, H, parts * INNER, generator=generator, dtype=torch.float64) * 2 * H**-0.5
    return gate_up.to(dtype), torch.randn(L, INNER, H, generator=generator, dtype=torch.float64).to(dtype)


def expected_mlp(act: Activation, x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    hidden = torch.stack([x[row].double() @ gate_up[e].double() for row, e in enumerate(OWNERS)])
    return torch.stack([by_hand(act, hidden)[row] @ down[e].double() for row, e in enumerate(OWNERS)])


def test_the_table_is_whole() -> None:
    assert set(FORMULAS) == set(ACTIVATIONS)
    assert {name: formula.__kwdefaults__ or {} for name, formula in ACTIVATIONS.items()} == NAMES
    assert all(formula.__doc__ for formula in ACTIVATIONS.values()) and set(ALIASES.values()) <= set(ACTIVATIONS)


@pytest.mark.parametrize("interleaved", [False, True])
@EVERY
def test_values_are_the_formula_rounded_once(name: str, numbers: dict[str, float], interleaved: bool) -> None:
    act = Activation(name, numbers, interleaved)
    tolerance = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
    for dtype, relative in tolerance.items():
        x = rows(dtype, spread=3.0)
        y, wanted = act(x), by_hand(act, x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), wanted, rtol=1.01 * relative, atol=1e-6 if dtype != torch.float64 else 0)


@EVERY
def test_gradients(name: str, numbers: dict[str, float]) -> None:
    act = Activation(name, numbers)
    assert torch.autograd.gradcheck(act, (rows(torch.float64).requires_grad_(),), fast_mode=True)
    gate_up, down = (weight.requires_grad_() for weight in weights(act, torch.float64))
    x, counts = rows(torch.float64).requires_grad_(), torch.tensor(COUNTS)
    mlp = lambda *given: grouped_mlp(*given, counts, activation=act)  # noqa: E731
    assert torch.autograd.gradcheck(mlp, (x, gate_up, down), fast_mode=True)
    torch.testing.assert_close(mlp(x, gate_up, down), expected_mlp(act, x, gate_up, down), rtol=1e-12, atol=1e-12)


def int8_given(act: Activation) -> dict[str, Tensor]:
    gate_up, down = weights(act, torch.float32)
    codes, scales = npu_dynamic_quant(rows())
    given = {"expand_x": codes, "dynamic_scales": scales}
    for key, weight in (("w_gate_up", gate_up), ("w_down", down)):
        given[key], given[f"{key}_scale"] = quantize_weight(weight)
    return given


def test_compiled_formulas_give_the_same() -> None:
    """All of them with their gradients, by a graph captured whole; of int8 rows where some are nobody's."""
    acts = [Activation(name) for name in FORMULAS]

    def run(x: Tensor) -> list[Tensor]:
        return [act(x) for act in acts]

    made = []
    for each in (run, torch.compile(run, fullgraph=True, backend="eager")):
        x = rows(spread=2.0).requires_grad_()
        results = each(x)
        made.append([*results, *torch.autograd.grad(sum(y.square().sum() for y in results), x)])
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    given, fewer = int8_given(Activation("geglu")), torch.tensor([2, 0, 3])
    mlp = lambda counts: grouped_mlp(**given, expert_token_nums=counts, activation="geglu")[:5]  # noqa: E731
    assert torch.equal(torch.compile(mlp, fullgraph=True, backend="eager")(fewer), mlp(fewer))


def test_a_limit_may_change_in_a_compiled_program() -> None:
    def run(x: Tensor, limit: float) -> Tensor:
        return x * Activation.of("swiglu", limit=limit).numbers["limit"]

    compiled, x = torch.compile(run, fullgraph=True, dynamic=True, backend="eager"), torch.ones(3)
    for limit in (7.0, 5.0, 3.5):
        assert torch.equal(compiled(x, limit), run(x, limit))
    for wrong in (math.inf, math.nan, -1.0):
        refused("limit", run, x, wrong)


@pytest.mark.parametrize("interleaved", [False, True])
@EVERY
def test_int8_rows(name: str, numbers: dict[str, float], interleaved: bool) -> None:
    """The second product's input is the activation of dequantized sums, in int8 with a scale a row."""
    act, given = Activation(name, numbers, interleaved), int8_given(Activation(name))
    y = grouped_mlp(**given, expert_token_nums=torch.tensor(COUNTS), output_dtype=torch.float32, activation=act)
    x = given["expand_x"].double() * given["dynamic_scales"].double()[:, None]
    gate_up = given["w_gate_up"].double() * given["w_gate_up_scale"].double()[:, None]
    hidden = by_hand(act, torch.stack([x[row] @ gate_up[e] for row, e in enumerate(OWNERS)]))
    scale = hidden.abs().amax(1, keepdim=True) / 127
    down = given["w_down"].double() * given["w_down_scale"].double()[:, None]
    codes = torch.nan_to_num(hidden / scale).round()
    wanted = torch.stack([(codes * scale)[row] @ down[e] for row, e in enumerate(OWNERS)])
    close = (y.double() - wanted).abs() <= 1e-5 * (1 + wanted.abs())
    assert close.all(1).sum() >= len(OWNERS) - 1  # a value that lies between two codes may be rounded to either
    assert (y.double() - wanted).norm() <= 0.01 * wanted.norm()


def test_biases_of_both_products() -> None:
    act = Activation("clipped_swiglu", interleaved=True)
    gate_up, down = weights(act, torch.float64)
    x, counts = rows(torch.float64), torch.tensor(COUNTS)
    first, second = rows(torch.float64, 2 * INNER, L), rows(torch.float64, H, L)
    y = grouped_mlp(x, gate_up, down, counts, activation=act, gate_up_bias=first, down_bias=second)
    for row, e in enumerate(OWNERS):
        hidden = by_hand(act, (x[row] @ gate_up[e] + first[e])[None])[0]
        torch.testing.assert_close(y[row], hidden @ down[e] + second[e], rtol=1e-12, atol=1e-12)
    refused("gate_up_bias", grouped_mlp, **int8_given(act), expert_token_nums=counts, gate_up_bias=first)


def test_what_is_not_in_the_table_is_refused_by_name() -> None:
    counts, listed = torch.tensor(COUNTS), r"need one of swiglu, clipped_swiglu, swiglustep, situ, situglu, geglu"
    for wrong in ("mish", "", None, 3):
        for taker, given in (
            (Activation.of, (wrong,)),
            (grouped_mlp, (rows(), *weights(Activation(), torch.float32), counts)),
            (MoEConfig, (H, INNER, 4, 2)),
            (GroupedMLP, (L, H, INNER)),
            (EPMoE, (4, 2, H, INNER)),
        ):
            last = {} if taker == Activation.of else {"activation": wrong}
            refused("activation", taker, *given, **last, says=f"activation is {wrong!r}; {listed}")
    for name, numbers, rule in (
        ("geglu", {"limit": 1.0}, "limit is not a number of activation geglu, which has none"),
        ("situglu", {"alpha": 1.0}, "alpha is not a number of activation situglu, which has beta, linear_beta"),
        ("swiglu", {"limit": -1.0}, r"limit is -1.0; it must be above 0, or 0 for no limit"),
        ("clipped_swiglu", {"limit": 0.0}, r"limit is 0.0; it must be above 0$"),
        ("situglu", {"beta": 0.0}, r"beta is 0.0; it must be above 0"),
        ("situ", {"beta": math.nan}, r"beta is nan; it must be a finite number"),
    ):
        refused(rule.split()[0], Activation, name, numbers, says=rule)
    refused("activation", EPMoE, 4, 2, H, INNER, activation="relu2", says="which has no gate")


# ---- who uses it


GATED = [(name, numbers) for name, numbers in CASES if Activation(name).gated]


@pytest.mark.parametrize(("name", "numbers"), CASES, ids=str)
def test_layers_and_swiglu_limit_reaches_shared_experts(name: str, numbers: dict[str, float]) -> None:
    """MoELayer's routed and shared experts compute the same activation with the same numbers."""
    config = MoEConfig(H, INNER, 4, 2, shared_intermediate_size=6, activation=name, activation_numbers=numbers)
    act = Activation(name, numbers)
    layer = MoELayer(config, AllToAllDispatcher(threads(1).groups[0], 4), dtype=torch.float32).init_weights(3)
    x = rows(spread=2.0)
    chosen, ids = layer.route(x)
    out = torch.zeros(len(x), H, dtype=torch.float64)
    assert layer.shared_gate_up is not None and layer.shared_down is not None
    shared = by_hand(act, x @ layer.shared_gate_up) @ layer.shared_down.double()
    torch.testing.assert_close(layer.run_shared(x).double(), shared, rtol=1e-5, atol=1e-5)
    for token in range(len(x)):
        for k in range(2):
            expert = int(ids[token, k])
            y = by_hand(act, (x[token] @ layer.w_gate_up[expert])[None])[0] @ layer.w_down[expert].double()
            out[token] += chosen[token, k].double() * y
    torch.testing.assert_close(layer(x).double(), out + shared, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "numbers"), GATED, ids=str)
def test_frameworks_experts(name: str, numbers: dict[str, float]) -> None:
    """EPMoE, GroupedMLP and fused_experts of one expert for each token against the formula."""
    act = Activation(name, numbers)
    gate_up, down = weights(act, torch.float32)
    x, ids = rows(), torch.tensor(OWNERS)[:, None]
    wanted = expected_mlp(act, x, gate_up, down).float()
    close = {"rtol": 1e-5, "atol": 1e-5}
    megatron = GroupedMLP(L, H, INNER, dtype=torch.float32, activation=act).load_experts(gate_up, down)
    torch.testing.assert_close(megatron(x, torch.tensor(COUNTS))[0], wanted, **close)
    logits = torch.full((len(x), L), -30.0).scatter(1, ids, 30.0)
    sglang = EPMoE(L, 1, H, INNER, torch.float32, activation=act)
    with torch.no_grad():
        sglang.w13_weight.copy_(gate_up.transpose(1, 2))
        sglang.w2_weight.copy_(down.transpose(1, 2))
    torch.testing.assert_close(sglang(x, logits), wanted, **close)
    y = fused_experts(x, sglang.w13_weight, sglang.w2_weight, torch.ones(len(x), 1), ids.int(), activation=act)
    torch.testing.assert_close(y, wanted, **close)


CLIPPED = Activation("clipped_swiglu", {"limit": 0.8, "alpha": 1.0, "bias": 0.0})
CLIPPED_AS_GPT_OSS = Activation("clipped_swiglu", {"limit": 0.8})
GEMM1 = {"limit": "clamp_limit", "alpha": "alpha", "beta": "beta"}
SITU = {"activation_situ_beta": 2.0, "activation_situ_linear_beta": 0.5}


@pytest.mark.parametrize(
    ("vllm", "act", "numbers"),
    [
        ("silu", Activation(), {}),
        ("silu", Activation("swiglu", {"limit": 0.8}), {"swiglu_limit": 0.8}),
        ("gelu", Activation("geglu"), {}),
        ("relu2", Activation("reglu2"), {}),
        ("swigluoai", Activation("clipped_swiglu", interleaved=True), {}),
        ("swigluoai_uninterleave", CLIPPED, {"swiglu_limit": 0.8}),
        (
            "swigluoai_uninterleave",
            CLIPPED_AS_GPT_OSS,
            {"swiglu_limit": 0.8, "swiglu_alpha": 1.702, "swiglu_beta": 1.0},
        ),
        ("situ", Activation("situglu", {"beta": 2.0}), {"activation_situ_beta": 2.0}),
        ("situ", Activation("situglu", {"beta": 2.0, "linear_beta": 0.5}), SITU),
        ("swiglustep", Activation("swiglustep"), {}),
    ],
)
def test_vllms_experts(vllm: str, act: Activation, numbers: dict[str, float]) -> None:
    gate_up, down = weights(act, torch.float32)
    x, ids = rows(), torch.tensor(OWNERS)[:, None]
    experts = make_experts(None, None, None, None, L, moe_config=SimpleNamespace(**numbers))
    output = torch.empty(len(x), H)
    w1, w2 = gate_up.transpose(1, 2), down.transpose(1, 2)
    experts.apply(output, x, w1, w2, torch.ones(len(x), 1), ids, vllm, L, *(None,) * 6, False)
    found = [output]
    if vllm != "situ":  # without a moe_config
        config = SimpleNamespace(**{f"gemm1_{ours}": numbers.get(f"swiglu_{name}") for name, ours in GEMM1.items()})
        named = {"activation": SimpleNamespace(value=vllm), "quant_config": config}
        found.append(fused_experts(x, w1, w2, torch.ones(len(x), 1), ids, **named))
    for each in found:
        torch.testing.assert_close(each, expected_mlp(act, x, gate_up, down).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_npus_operators_take_their_formulas_from_it(dtype: torch.dtype, interleaved: bool) -> None:
    """Along every dimension; of the rows before it those of the groups alone."""
    numbers = {"limit": 2.0, "alpha": 1.3, "bias": 0.5}
    act, x = Activation("clipped_swiglu", numbers, interleaved), rows(dtype, 4 * H, H, spread=3.0).view(H, 4, H)
    codes, scale = npu_dequant_swiglu_quant(
        x.float(), activate_left=True, quant_mode=1, swiglu_mode=1 if interleaved else 2, clamp_limit=2.0,
        glu_alpha=1.3, glu_bias=0.5,
    )  # fmt: skip
    assert torch.equal(codes, (act(x.float()) / scale[..., None]).round().to(torch.int8))
    for dim in range(-1, 3):
        given, wanted = x.movedim(-1, dim), act(x).movedim(-1, dim)
        assert torch.equal(npu_clipped_swiglu(given, dim=dim, interleaved=interleaved, **numbers), wanted)
        some = npu_clipped_swiglu(given, dim=dim, interleaved=interleaved, **numbers, group_index=torch.tensor([1, 0]))
        kept, whole = (each.reshape(given.shape[:dim].numel(), -1) for each in (some, wanted))
        assert torch.equal(kept[0], whole[0]) and not kept[1:].any()
        assert torch.equal(npu_swiglu(given, dim), Activation()(x).movedim(-1, dim))
