"""One call for a layer gives what three calls give, and refuses more rows than its limit on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_op_ranks import BF16, FP32, I32, MOST, F, H, K, L, Rank, outcomes, same
from routed_tokens import KINDS, randn, routed

from ascend_moe import MoEConfig, MoELayer, layer_ops
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ConfigMismatch, RoutingOverflow
from ascend_moe.experts import Activation, grouped_mlp, npu_dynamic_quant
from ascend_moe.layer_ops import calls, dispatch_ffn_combine
from ascend_moe.layer_ops.agreement import Limit, judge


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "W8A8"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_both_calls_are_the_three_calls(clusters: Any, world: int, int8: bool) -> None:
    """Kinds of ids; batches that differ, one of them empty; lists and stacked weights; limits; masks."""

    def body(rank: int, group: str) -> None:
        buffer = Rank(rank, world, int8=int8).buffer(group)
        for case, kind in enumerate([*KINDS, *KINDS]):
            tokens = 7 if case < len(KINDS) else 5 * ((rank + case) % 4)
            mine = Rank(rank, world, tokens, kind, int8)
            mine.probs = mine.probs.to(BF16).float()
            if case % 3 == 1:
                mine.mask = torch.arange(tokens) % 3 != 1
            if case % 3 == 2:
                mine.mask = torch.arange(tokens * K).reshape(tokens, K) % 4 != 1
            form = ("stacked", "list", "int64", "uint64")[case % 4]
            expected = mine.three_calls(group)
            same(mine.one_call(group, form), expected)
            same(mine.mega(buffer, form), expected)
            if mine.mask is not None:
                mine.mask = mine.mask.to(torch.int8)
                same(mine.one_call(group, form, limit=world * MOST * K), expected)
                mine.probs = mine.probs.to(BF16)
                same(mine.mega(buffer, form), expected)

    clusters[world].run(body)


def alone(own: Rank, number: int, x: torch.Tensor) -> torch.Tensor:
    """Every row through one expert of a rank."""
    rows, scales = npu_dynamic_quant(x) if own.int8 else (x, None)
    values = {
        "w_gate_up": own.w1, "w_down": own.w2, "w_gate_up_scale": own.s1, "w_down_scale": own.s2,
        "gate_up_bias": own.b1, "down_bias": own.b2,
    }  # fmt: skip
    one: dict[str, Any] = {name: None if each is None else each[number : number + 1] for name, each in values.items()}
    counts = torch.tensor([len(rows)])
    return grouped_mlp(rows, **one, expert_token_nums=counts, dynamic_scales=scales, output_dtype=BF16)


@pytest.mark.parametrize("groups", [1, 4])
def test_int4_weights_of_both_calls_are_the_three_calls(clusters: Any, groups: int) -> None:
    """Lists and stacked, scales as int64; in mega_moe also bytes of two with their type, as vllm-ascend has them."""

    def body(rank: int, group: str) -> None:
        mine = Rank(rank, 2, int4=groups)
        buffer, expected = mine.buffer(group), mine.three_calls(group)
        for form in ("stacked", "list", "int64", "uint64"):
            same(mine.one_call(group, form), expected)
            same(mine.mega(buffer, form), expected)
        words, types = (mine.w1, mine.w2), {"weight1_type": 285, "weight2_type": 285}
        same(mine.mega(buffer, **types), expected)
        mine.w1, mine.w2 = (each.view(torch.int8) for each in words)
        same(mine.mega(buffer, "list", **types), expected)
        mine.w1, mine.w2 = words
        config = MoEConfig(H, F, L * 2, K)
        layer = MoELayer(config, MC2Dispatcher(group, 2, rank, L * 2)).init_weights(3).quantize_(4, (groups, groups))
        mine.w1, mine.w2, mine.s1, mine.s2 = layer.w_gate_up, layer.w_down, layer.w_gate_up_scale, layer.w_down_scale
        mine.b1, mine.b2 = layer.w_gate_up_correction, layer.w_down_correction
        mine.probs, mine.ids = layer.route(mine.x)
        own = Rank(9, 2, int4=groups)  # its first expert is the shared one
        shared = {"shared_l1_weights": own.w1[:1], "shared_l2_weights": own.w2[:1], "shared_l1_weights_sf": own.s1[:1]}
        shared |= {"shared_l2_weights_sf": own.s2[:1], "shared_l1_bias": own.b1[:1], "shared_l2_bias": own.b2[:1]}
        with torch.no_grad():
            assert torch.equal(mine.one_call(group)[0], layer(mine.x))
            with_shared = mine.mega(buffer, **shared)[0]
        assert torch.equal(with_shared, mine.three_calls(group, shared=alone(own, 0, mine.x))[0])

    clusters[2].run(body)


def limited(mine: Rank, limit: float) -> torch.Tensor:
    """The layer's definition for one rank, unquantized, in float32 from bf16 gate and up."""
    out = torch.zeros(len(mine.x), H)
    for token in range(len(mine.x)):
        for k in range(K):
            expert = int(mine.ids[token, k])
            gate, up = (mine.x[token].float() @ mine.w1[expert].float()).to(BF16).float().chunk(2)
            hidden = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            out[token] += mine.probs[token, k] * (hidden.to(BF16).float() @ mine.w2[expert].float())
    return out


def test_the_swiglu_limit_cuts_before_silu_and_other_activations_have_their_numbers(group_ep: str) -> None:
    """Gate cut above, up at both sides, before silu; what the default and 0 leave alone."""
    mine, quantized = Rank(0, 1), Rank(0, 1, int8=True)
    for limit in (0.25, 0.5, 1.0):
        found = mine.one_call(group_ep, swiglu_limit=limit)
        torch.testing.assert_close(found[0].float(), limited(mine, limit), rtol=2**-6, atol=2**-6)
        same(found, mine.three_calls(group_ep, limit))
        same(mine.mega(mine.buffer(group_ep), activation_clamp=limit), mine.three_calls(group_ep, limit))
        error = quantized.one_call(group_ep, swiglu_limit=limit)[0].float() - limited(mine, limit)
        assert error.norm() < 0.03 * limited(mine, limit).norm()
        same(quantized.one_call(group_ep, swiglu_limit=limit), quantized.three_calls(group_ep, limit))
        assert not torch.equal(found[0], mine.one_call(group_ep)[0])
    betas = {"beta": 4.0, "linear_beta": 25.0}
    for each in (mine, quantized):
        for none in (0.0, 1e6, float("inf")):
            same(each.one_call(group_ep, swiglu_limit=none), each.three_calls(group_ep))
        found = each.mega(each.buffer(group_ep), activation="situglu", **betas)
        same(found, each.three_calls(group_ep, activation=Activation("situglu", betas)))


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "W8A8"])
def test_shared_experts_are_added(clusters: Any, int8: bool) -> None:
    def body(rank: int, group: str) -> None:
        mine = Rank(rank, 2, 5 * rank, int8=int8)
        buffer = mine.buffer(group)
        own = Rank(7, 2, int8=int8)  # its L experts are the shared ones
        parts = [alone(own, number, mine.x) for number in range(L)]
        partly = torch.arange(len(mine.x) * K).reshape(-1, K) % 7 < 2  # tokens with all, some and none of their K
        for form, mine.mask in (("stacked", None), ("list", partly), ("int64", None)):
            names = ("shared_l1_weights", "shared_l2_weights", "shared_l1_weights_sf", "shared_l2_weights_sf")
            given = dict(zip(names, (*own.weights(form), *own.scales(form)), strict=True))
            added = torch.stack(parts).float().sum(0).to(BF16)
            same(mine.mega(buffer, **given), mine.three_calls(group, shared=added))
            if form != "stacked":
                first = {name: value and value[:1] for name, value in given.items()}
                same(mine.mega(buffer, **first), mine.three_calls(group, shared=parts[0]))

    clusters[2].run(body)


@pytest.mark.parametrize("dtype", [torch.float16, FP32])
def test_other_dtypes_of_rows(clusters: Any, dtype: torch.dtype) -> None:
    """dispatch_ffn_combine takes them, with weights of their own dtype and with int8 weights; mega_moe is bf16's."""

    def body(rank: int, group: str) -> None:
        for int8 in (False, True):
            mine = Rank(rank, 2, int8=int8)
            x, nums = mine.x.to(dtype), torch.empty(L, dtype=I32)
            w1, w2 = (weight if int8 else weight.to(dtype) for weight in (mine.w1, mine.w2))
            dispatcher = MC2Dispatcher(group, 2, rank, mine.experts)
            sent = dispatcher.dispatch(x, mine.ids, quant_mode=2 if int8 else 0)
            rows = grouped_mlp(
                sent.expand_x, w1, w2, sent.expert_token_nums, dynamic_scales=sent.dynamic_scales if int8 else None,
                w_gate_up_scale=mine.s1, w_down_scale=mine.s2, output_dtype=dtype,
            )  # fmt: skip
            out, scales = torch.empty_like(x), mine.scales("list")
            dispatch_ffn_combine(x, [w1], [w2], mine.ids, *scales, None, None, mine.probs, group, 0, out, nums)
            assert torch.equal(out, dispatcher.combine(rows, sent, mine.probs))

    clusters[2].run(body)


def test_gradients_are_those_of_the_three_calls(clusters: Any) -> None:
    def body(rank: int, group: str) -> None:
        found = []
        for call in ("one", "mega", "three"):
            mine = Rank(rank, 2)
            leaves = (mine.x, mine.w1, mine.w2, mine.probs)
            for leaf in leaves:
                leaf.requires_grad_()
            if call == "one":
                out, nums = torch.empty(len(mine.x), H, dtype=BF16), torch.empty(L, dtype=I32)
                lists = (*mine.weights("list"), mine.ids, None, None, None, None)
                y = dispatch_ffn_combine(mine.x, *lists, mine.probs, group, 0, out, nums, swiglu_limit=0.0)[0]
            elif call == "mega":
                y = mine.mega(mine.buffer(group), "list")[0]
            else:
                y = mine.three_calls(group)[0]
            y.backward(randn(*y.shape, seed=9).to(BF16))
            found.append([leaf.grad for leaf in leaves])
        for grads in found[:2]:
            assert all(torch.equal(one, other) for one, other in zip(grads, found[2], strict=True))

    clusters[2].run(body)


# ---- limits


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("mask", ["none", "tokens", "pairs"])
def test_one_row_above_the_limit_is_raised_on_all_ranks(mask: str, world: int, clusters: Any) -> None:
    """The limit is that of the rows that are sent; an int8 mask is active where it is not 0."""

    def given(rank: int) -> tuple[Rank, int]:
        """A rank's tokens, and how many of its rows go to rank 0, to which most go."""
        mine = Rank(rank, world, 9 - 2 * rank)
        mine.ids[:, 0] = 1
        active = randn(len(mine.x), K if mask == "pairs" else 1, seed=9 + rank) > 0
        mine.mask = {"none": None, "tokens": active[:, 0], "pairs": active}[mask]
        return mine, int(((active | (mask == "none")) & (mine.ids < L)).sum())

    most = sum(rows for _, rows in map(given, range(world)))

    def body(rank: int, group: str) -> None:
        mine, _ = given(rank)
        expected = mine.three_calls(group)
        if mine.mask is not None:
            numbers = torch.tensor([2, -1, 1])[torch.arange(mine.mask.numel()) % 3].view_as(mine.mask)
            mine.mask = torch.where(mine.mask, numbers, 0).to(torch.int8)
        for name in ("max_output_size", "max_recv_token_num"):
            mega = name == "max_recv_token_num"
            same(mine.limited(group, most, mega), expected)
            with pytest.raises(RoutingOverflow, match=f"{name} is {most - 1}, but {most} rows go to rank 0") as raised:
                mine.limited(group, most - 1, mega)
            assert (raised.value.owner, raised.value.rows, raised.value.capacity) == (0, most, most - 1)

    assert outcomes(clusters[world], body) == [None] * world


@pytest.mark.parametrize(("topk", "mega"), [(1, False), (3, False), (7, False), (K, True)])
def test_counts_are_compared_only_where_the_limit_can_be_reached(
    topk: int, mega: bool, clusters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below W * T * min(K, L) rows, of all ranks' batches or buffers: an NPU's host waits for it."""
    compared: list[int] = []
    gather_loads = calls.gather_loads

    def counted(*given: Any) -> Any:
        compared.append(given[-1].rows)
        return gather_loads(*given)

    monkeypatch.setattr(layer_ops if mega else calls, "gather_loads", counted)
    most = 2 * (MOST if mega else 9) * min(topk, L)

    def body(rank: int, group: str) -> None:
        mine = Rank(rank, 2)
        mine.ids = routed(9, 2 * L, topk)
        mine.probs = randn(9, topk, seed=rank)
        for limit in (most - 1, most, most + 1):
            same(mine.limited(group, limit, mega), mine.three_calls(group))

    clusters[2].run(body)
    assert compared == [most - 1] * 2


@pytest.mark.parametrize("mega", [False, True])
def test_ranks_of_unequal_batches_compare_counts_together(mega: bool, clusters: Any) -> None:
    """Where some could overflow by their own batch only; in mega_moe by the buffer's most tokens."""
    tokens, limits = ((1, 16), (70, 7)) if mega else ((1, 9, 9), (50, 10))

    def body(rank: int, group: str) -> Any:
        mine = Rank(rank, len(tokens), tokens[rank])
        same(mine.limited(group, limits[0], mega), mine.three_calls(group))
        return mine.limited(group, limits[1], mega)

    for error in outcomes(clusters[len(tokens)], body):
        assert isinstance(error, RoutingOverflow) and error.capacity == limits[1] < error.rows


def test_equal_batches_need_no_global_bs() -> None:
    """judge says what dispatch takes: 0, or W times the largest batch."""
    limit = Limit("max_output_size", 0)

    def table(*tokens: int) -> torch.Tensor:
        return torch.tensor([[each, 0, K, L, *([1] * len(tokens))] for each in tokens])

    assert judge(table(5, 5, 5), limit, 0) == 0 and judge(table(5, 0, 7), limit, 1) == 21


def test_ranks_with_different_limits(clusters: Any) -> None:
    for limits in ((0, 5, 5), (500, 5, 5), (0, 0, 7)):

        def body(rank: int, group: str, limits: tuple[int, ...] = limits) -> Any:
            return Rank(rank, 3, 4 + rank).one_call(group, limit=limits[rank])

        for rank, error in enumerate(outcomes(clusters[3], body)):
            assert isinstance(error, ConfigMismatch) and error.field == "max_output_size"
            assert error.ours == limits[rank] != error.theirs == limits[error.rank]
