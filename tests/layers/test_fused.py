"""One call for a layer: its results are those of dispatch, expert MLP and combine, and of MoELayer, in every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from routed_tokens import KINDS, randn, routed

from ascend_moe import LocalCluster, MoEConfig, MoELayer
from ascend_moe.dispatchers import WindowDispatcher
from ascend_moe.errors import (
    ArgumentError,
    AscendMoeError,
    ConfigMismatch,
    InvalidExpertId,
    RoutingOverflow,
    WindowTooSmall,
)
from ascend_moe.experts import grouped_mlp, npu_dynamic_quant, quantize_weight
from ascend_moe.fused import SymmBuffer, calls, dispatch_ffn_combine, get_symm_buffer_for_mega_moe, mega_moe
from ascend_moe.fused.agreement import Limit, judge

BF16, FP32, I32, NAN = torch.bfloat16, torch.float32, torch.int32, float("nan")
K, H, F, L = 3, 64, 32, 4
MOST = 16  # tokens of a rank


class Rank:
    """Tokens and weights of one rank; ``int8``: W8A8."""

    def __init__(self, rank: int, world: int, tokens: int = 9, kind: str = "random", int8: bool = False) -> None:
        self.rank, self.world, self.experts, self.int8 = rank, world, L * world, int8
        self.x = randn(tokens, H, seed=rank).to(BF16)
        self.ids = routed(tokens, self.experts, K, kind)
        self.probs = randn(tokens, K, seed=50 + rank).softmax(1)
        self.mask: torch.Tensor | None = None
        weights = [randn(L, *shape, seed=100 + rank) / shape[0] ** 0.5 for shape in ((H, 2 * F), (F, H))]
        self.w1, self.w2 = (weight.to(BF16) for weight in weights)
        self.s1: torch.Tensor | None = None
        self.s2: torch.Tensor | None = None
        if int8:
            (self.w1, self.s1), (self.w2, self.s2) = map(quantize_weight, weights)

    def scales(self, form: str) -> list[Any]:
        """scale1 and scale2 as the call takes them: stacked, or a list, or as int64 of their bits."""
        if self.s1 is None or self.s2 is None:
            return [None, None]
        both = [self.s1, self.s2]
        if form.endswith("int64"):  # uint64 as CANN's documents have it
            both = [scale.view(I32).to(torch.int64).view(getattr(torch, form)) for scale in both]
        return [[scale] if form == "stacked" else list(scale) for scale in both]

    def weights(self, form: str) -> list[list[torch.Tensor]]:
        return [[weight] if form == "stacked" else list(weight) for weight in (self.w1, self.w2)]

    def one_call(self, group: str, form: str = "stacked", limit: int = 0, **given: Any) -> tuple[torch.Tensor, ...]:
        out, nums = torch.full_like(self.x, NAN), torch.full((L,), -1, dtype=I32)
        made = dispatch_ffn_combine(
            self.x, *self.weights(form), self.ids, *self.scales(form), None, None, self.probs, group, limit, out, nums,
            self.mask, **given,
        )  # fmt: skip
        assert made[0] is out and made[1] is nums
        return made

    def buffer(self, group: str, **given: Any) -> SymmBuffer:
        sizes = {"dispatch_quant_mode": 2 if self.int8 else 0, **given}
        return get_symm_buffer_for_mega_moe(group, self.experts, MOST, K, H, F, **sizes)

    def mega(self, buffer: SymmBuffer, form: str = "stacked", **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scales = dict(zip(("l1_weights_sf", "l2_weights_sf"), self.scales(form), strict=True))
        options = {**scales, "x_active_mask": self.mask, **given}
        return mega_moe(self.x, self.ids, self.probs, *self.weights(form), buffer, **options)

    def three_calls(
        self, group: str, limit: float = 0.0, shared: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dispatcher = WindowDispatcher(group, self.world, self.rank, self.experts)
        options = {"quant_mode": 2 if self.int8 else 0, "global_bs": self.world * MOST}
        sent = dispatcher.dispatch(self.x, self.ids, x_active_mask=self.mask, **options)
        rows = grouped_mlp(
            sent.expand_x, self.w1, self.w2, sent.expert_token_nums,
            dynamic_scales=sent.dynamic_scales if self.int8 else None, w_gate_up_scale=self.s1, w_down_scale=self.s2,
            output_dtype=BF16, swiglu_limit=limit,
        )  # fmt: skip
        return dispatcher.combine(rows, sent, self.probs, shared_expert_x=shared), sent.expert_token_nums


def same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert found[0].dtype == BF16 and found[1].dtype == I32
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1].int())


def outcomes(cluster: LocalCluster, body: Callable[[int, str], Any]) -> list[Any]:
    """What body returns on each rank, or its error; then the ranks use the group once more."""

    def guarded(rank: int, group: str) -> Any:
        try:
            found = body(rank, group)
        except AscendMoeError as error:
            found = error
        same(Rank(rank, cluster.world_size).one_call(group), Rank(rank, cluster.world_size).three_calls(group))
        return found

    return cluster.run(guarded)


# ---- results


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "W8A8"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_both_calls_are_the_three_calls(clusters: Any, world: int, int8: bool) -> None:
    """Kinds of ids; batches that differ, one of them empty; lists and stacked weights; limits; masks."""

    def body(rank: int, group: str) -> None:
        buffer = Rank(rank, world, int8=int8).buffer(group)
        for case, kind in enumerate([*KINDS, *KINDS]):
            tokens = 7 if case < len(KINDS) else 5 * ((rank + case) % 4)
            mine = Rank(rank, world, tokens, kind, int8)
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
                same(mine.mega(buffer, form), expected)

    clusters[world].run(body)


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "W8A8"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_both_calls_are_the_layer(clusters: Any, world: int, int8: bool) -> None:
    def body(rank: int, group: str) -> None:
        config = MoEConfig(H, F, L * world, K, shared_intermediate_size=F)
        layer = MoELayer(config, WindowDispatcher(group, world, rank, L * world)).init_weights(3)
        assert layer.shared_gate_up is not None and layer.shared_down is not None
        shared = ([layer.shared_gate_up], [layer.shared_down])
        if int8:
            layer.quantize_()
        mine = Rank(rank, world, int8=int8)
        mine.w1, mine.w2, mine.s1, mine.s2 = layer.w_gate_up, layer.w_down, layer.w_gate_up_scale, layer.w_down_scale
        mine.probs, mine.ids = layer.route(mine.x)
        with torch.no_grad():
            whole = layer(mine.x)
            y, nums = mine.mega(mine.buffer(group), shared_l1_weights=shared[0], shared_l2_weights=shared[1])
            assert torch.equal(y, whole)
            plain = mine.one_call(group)
            assert torch.equal(plain[1], nums)
            layer.shared_gate_up = layer.shared_down = None
            assert torch.equal(plain[0], layer(mine.x)) and not torch.equal(plain[0], whole)

    clusters[world].run(body)


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


def test_swiglu_limit(clusters: Any) -> None:
    """Gate cut above, up at both sides, before silu; what the default and 0 leave alone."""

    def body(rank: int, group: str) -> None:
        mine, quantized = Rank(0, 1), Rank(0, 1, int8=True)
        for limit in (0.25, 0.5, 1.0):
            found = mine.one_call(group, swiglu_limit=limit)
            torch.testing.assert_close(found[0].float(), limited(mine, limit), rtol=2**-6, atol=2**-6)
            same(found, mine.three_calls(group, limit))
            same(mine.mega(mine.buffer(group), activation_clamp=limit), mine.three_calls(group, limit))
            error = quantized.one_call(group, swiglu_limit=limit)[0].float() - limited(mine, limit)
            assert error.norm() < 0.03 * limited(mine, limit).norm()
            same(quantized.one_call(group, swiglu_limit=limit), quantized.three_calls(group, limit))
            assert not torch.equal(found[0], mine.one_call(group)[0])
        for each in (mine, quantized):
            for none in (0.0, 1e6, float("inf")):
                same(each.one_call(group, swiglu_limit=none), each.three_calls(group))

    clusters[1].run(body)


@pytest.mark.parametrize("int8", [False, True], ids=["bf16", "W8A8"])
def test_shared_experts(clusters: Any, int8: bool) -> None:
    def body(rank: int, group: str) -> None:
        mine = Rank(rank, 2, 5 * rank, int8=int8)
        buffer = mine.buffer(group)
        own = Rank(7, 2, int8=int8)  # its L experts are the shared ones
        rows, scales = npu_dynamic_quant(mine.x) if int8 else (mine.x, None)
        parts = []
        for number in range(L):
            expert = [
                None if value is None else value[number : number + 1] for value in (own.w1, own.w2, own.s1, own.s2)
            ]
            assert expert[0] is not None and expert[1] is not None
            parts.append(
                grouped_mlp(
                    rows,
                    expert[0],
                    expert[1],
                    torch.tensor([len(rows)]),
                    dynamic_scales=scales,
                    w_gate_up_scale=expert[2],
                    w_down_scale=expert[3],
                    output_dtype=BF16,
                )
            )
        for form in ("stacked", "list", "int64"):
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
            dispatcher = WindowDispatcher(group, 2, rank, mine.experts)
            sent = dispatcher.dispatch(x, mine.ids, quant_mode=2 if int8 else 0)
            rows = grouped_mlp(
                sent.expand_x, w1, w2, sent.expert_token_nums, dynamic_scales=sent.dynamic_scales if int8 else None,
                w_gate_up_scale=mine.s1, w_down_scale=mine.s2, output_dtype=dtype,
            )  # fmt: skip
            out, scales = torch.empty_like(x), mine.scales("list")
            dispatch_ffn_combine(x, [w1], [w2], mine.ids, *scales, None, None, mine.probs, group, 0, out, nums)
            assert torch.equal(out, dispatcher.combine(rows, sent, mine.probs))

    clusters[2].run(body)


def test_weights_of_tokens_may_be_bf16_in_mega_moe(clusters: Any) -> None:
    def body(rank: int, group: str) -> None:
        mine = Rank(rank, 1)
        half = mine.probs.to(BF16)
        mine.probs = half.float()
        expected = mine.three_calls(group)
        mine.probs = half
        same(mine.mega(mine.buffer(group)), expected)

    clusters[1].run(body)


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
            assert all(
                a is not None and b is not None and torch.equal(a, b) for a, b in zip(grads, found[2], strict=True)
            )

    clusters[2].run(body)


# ---- too many rows


@pytest.mark.parametrize("world", [1, 2, 4])
def test_overflow_on_one_rank_is_raised_on_all(clusters: Any, world: int) -> None:
    """Expert 1, of rank 0, gets every row: one more than the limit raises, the limit itself does not."""
    tokens = [(3 + 2 * rank) % 8 for rank in range(world)]
    arriving = sum(tokens) if world == 1 else sum(tokens) - tokens[0]

    def prepared(rank: int, extra: int = 0) -> Rank:
        mine = Rank(rank, world, tokens[rank] + extra)
        mine.ids = torch.full_like(mine.ids, -1)
        mine.ids[:, 0] = 1 if rank or world == 1 else L * world - 1
        return mine

    for name in ("max_output_size", "max_recv_token_num"):

        def body(rank: int, group: str, name: str = name) -> None:
            mine = prepared(rank)
            for limit in (arriving - 1, arriving):

                def call(limit: int = limit) -> tuple[torch.Tensor, ...]:
                    if name == "max_output_size":
                        return mine.one_call(group, limit=limit)
                    return mine.mega(mine.buffer(group, max_recv_token_num=limit))

                if limit < arriving:
                    with pytest.raises(
                        RoutingOverflow, match=f"{name} is {limit}, but {arriving} rows go to rank 0"
                    ) as raised:
                        call()
                    error = raised.value
                    assert (error.owner, error.rows, error.capacity) == (0, arriving, limit)
                else:
                    same(call(), mine.three_calls(group))

        assert outcomes(clusters[world], body) == [None] * world


@pytest.mark.parametrize("pairs", [False, True], ids=["tokens", "pairs"])
def test_masked_pairs_do_not_count(pairs: bool, clusters: Any) -> None:
    """The limit is that of the rows that are sent; an int8 mask is active where it is not 0."""

    def body(rank: int, group: str) -> None:
        mine = Rank(rank, 2)
        mine.ids[:, 0] = 1  # more for rank 0 than for rank 1
        active = randn(*(mine.ids.shape if pairs else (9,)), seed=9 + rank) > 0
        mine.mask = active
        expected = mine.three_calls(group)
        most = 0
        for other in range(2):
            ids = routed(9, 2 * L, K)
            ids[:, 0] = 1
            shape = (9, K) if pairs else (9, 1)
            most += int(((randn(*shape, seed=9 + other) > 0) & (ids < L)).sum())
        mine.mask = torch.where(active, torch.tensor([2, -1, 1])[torch.arange(active.numel()) % 3].view_as(active), 0)
        mine.mask = mine.mask.to(torch.int8)
        same(mine.one_call(group, limit=most), expected)
        same(mine.mega(mine.buffer(group, max_recv_token_num=most)), expected)
        with pytest.raises(RoutingOverflow, match=f"max_output_size is {most - 1}, but {most} rows go to rank 0"):
            mine.one_call(group, limit=most - 1)

    assert outcomes(clusters[2], body) == [None] * 2


@pytest.mark.parametrize("topk", [1, 3, 7])
def test_counts_are_compared_only_where_the_limit_can_be_reached(
    topk: int, clusters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below W * T * min(K, L) rows, of all ranks' batches: an NPU's host waits for it."""
    compared: list[int] = []
    gather_loads = calls.gather_loads

    def counted(*given: Any) -> Any:
        compared.append(given[-1].rows)
        return gather_loads(*given)

    monkeypatch.setattr(calls, "gather_loads", counted)
    most = 2 * 9 * min(topk, L)

    def body(rank: int, group: str) -> None:
        mine = Rank(rank, 2)
        mine.ids = routed(9, 2 * L, topk)
        mine.probs = randn(9, topk, seed=rank)
        for limit in (most - 1, most, most + 1):
            same(mine.one_call(group, limit=limit), mine.three_calls(group))

    clusters[2].run(body)
    assert compared == [most - 1] * 2


def test_a_rank_with_few_tokens_compares_counts_with_the_others(clusters: Any) -> None:
    """In mega_moe by the buffer's most tokens, which all ranks know, not by its own."""

    def body(rank: int, group: str) -> Any:
        mine = Rank(rank, 2, (1, 16)[rank])
        same(mine.mega(mine.buffer(group, max_recv_token_num=70)), mine.three_calls(group))
        return mine.mega(mine.buffer(group, max_recv_token_num=7))

    for error in outcomes(clusters[2], body):
        assert isinstance(error, RoutingOverflow) and error.capacity == 7 and error.rows > 7


def test_equal_batches_need_no_global_bs() -> None:
    """judge says what dispatch takes: 0, or W times the largest batch."""
    limit = Limit("max_output_size", 0)

    def table(*tokens: int) -> torch.Tensor:
        return torch.tensor([[each, 0, K, L, *([1] * len(tokens))] for each in tokens])

    assert judge(table(5, 5, 5), limit, 0) == 0 and judge(table(5, 0, 7), limit, 1) == 21


def test_some_ranks_only_could_overflow(clusters: Any) -> None:
    """By its own batch rank 0 need not compare rows, by theirs the others must: they find each other."""

    def body(rank: int, group: str) -> Any:
        mine = Rank(rank, 3, (1, 9, 9)[rank])
        same(mine.one_call(group, limit=50), mine.three_calls(group))
        return mine.one_call(group, limit=10)

    for error in outcomes(clusters[3], body):
        assert isinstance(error, RoutingOverflow) and error.capacity == 10


def test_ranks_with_different_limits(clusters: Any) -> None:
    for limits in ((0, 5, 5), (500, 5, 5), (0, 0, 7)):

        def body(rank: int, group: str, limits: tuple[int, ...] = limits) -> Any:
            return Rank(rank, 3, 4 + rank).one_call(group, limit=limits[rank])

        for rank, error in enumerate(outcomes(clusters[3], body)):
            assert isinstance(error, ConfigMismatch) and error.field == "max_output_size"
            assert error.ours == limits[rank] != error.theirs == limits[error.rank]


# ---- wrong arguments


def test_errors_of_all_ranks(clusters: Any) -> None:
    def wrong_id(rank: int, group: str) -> Any:
        mine = Rank(rank, 2, 4 + rank)
        mine.ids[1, 1] = mine.experts if rank else 0
        return mine.one_call(group, limit=200)

    def other_width(rank: int, group: str) -> Any:
        mine = Rank(rank, 2)
        if rank:
            mine.x, mine.w1, mine.w2 = mine.x[:, :32], mine.w1[:, :32], mine.w2[:, :, :32]
        return mine.one_call(group)

    for error in outcomes(clusters[2], wrong_id):
        assert isinstance(error, InvalidExpertId) and (error.rank, error.token, error.k) == (1, 1, 1)
    for rank, error in enumerate(outcomes(clusters[2], other_width)):
        assert isinstance(error, ConfigMismatch) and (error.field, error.rank) == ("H", 1 - rank)


WRONG = {
    "weight1": {
        "is empty": {"weight1": []},
        "carries int4": {"weight1": [torch.zeros(L, H, 2 * F // 8, dtype=I32)]},
        "torch.uint8, which carries int4": {"weight1": [torch.zeros(L, H, F, dtype=torch.uint8)]},
        "must be x's type torch.bfloat16, or int8": {"weight1": [torch.zeros(L, H, 2 * F)]},
        "L of (H, 2F)": {"weight1": [torch.zeros(L, H, 2 * F + 1, dtype=BF16)]},
        "must have a matrix of one shape": {"weight1": [torch.zeros(H, n, dtype=BF16) for n in (64, 64, 64, 32)]},
        "a list of tensors": {"weight1": [1]},
    },
    "weight2": {"it must be (4, 32, 64)": {"weight2": [torch.zeros(L, F, 32, dtype=BF16)]}},
    "scale1": {"scales go with int8 weights": {"scale1": [torch.ones(L, 2 * F)]}},
    "bias1": {"a bias belongs to int4": {"bias1": [torch.ones(L, 2 * F)]}},
    "bias2": {"a bias belongs to int4": {"bias2": torch.ones(L, H)}},
    "x": {
        "it must be (9, 64)": {"x": randn(9, 32).to(BF16)},
        "is torch.float64": {"x": randn(9, 64).double()},
        "is a NoneType; it must be a tensor": {"x": None},
    },
    "expert_idx": {
        "is torch.int64": {"expert_idx": torch.zeros(9, K, dtype=torch.int64)},
        "it must be (9, 3)": {"expert_idx": torch.zeros(8, K, dtype=I32)},
    },
    "probs": {"is torch.bfloat16": {"probs": torch.zeros(9, K, dtype=BF16)}, "is a NoneType": {"probs": None}},
    "x_active_mask": {
        "is (8,)": {"x_active_mask": torch.ones(8, dtype=torch.bool)},
        "is a list": {"x_active_mask": [True] * 9},
    },
    "out": {
        "it must be (9, 64)": {"out": torch.empty(8, H, dtype=BF16)},
        "must be on x's device, cpu": {"out": torch.empty(9, H, dtype=BF16, device="meta")},
    },
    "expert_token_nums": {
        "must be on x's device, cpu": {"expert_token_nums": torch.empty(L, dtype=I32, device="meta")},
        "is torch.int64": {"expert_token_nums": torch.empty(L, dtype=torch.int64)},
        "is (5,)": {"expert_token_nums": torch.empty(5, dtype=I32)},
    },
    "max_output_size": {
        "is -1": {"max_output_size": -1},
        "is a float; it must be an int": {"max_output_size": 3.5},
        "is a NoneType": {"max_output_size": None},
    },
    "swiglu_limit": {
        "is -1.0": {"swiglu_limit": -1.0},
        "is nan": {"swiglu_limit": NAN},
        "is a str; it must be a number": {"swiglu_limit": "1"},
    },
    "group": {"names no live group": {"group": "nobody's"}, "is a int": {"group": 3}},
}


@pytest.mark.parametrize("argument", WRONG)
def test_wrong_arguments(clusters: Any, argument: str) -> None:
    def body(rank: int, group: str) -> None:
        mine = Rank(rank, 1)
        sound: dict[str, Any] = {
            "x": mine.x, "weight1": [mine.w1], "weight2": [mine.w2], "expert_idx": mine.ids, "scale1": None,
            "scale2": None, "bias1": [torch.tensor([])], "bias2": torch.zeros(L, H), "probs": mine.probs,
            "group": group, "max_output_size": 0, "out": torch.empty_like(mine.x),
            "expert_token_nums": torch.empty(1, L, dtype=I32),
        }  # fmt: skip
        dispatch_ffn_combine(**sound)
        for rule, changed in WRONG[argument].items():
            with pytest.raises(ArgumentError) as raised:
                dispatch_ffn_combine(**sound | changed)
            assert rule in str(raised.value) and raised.value.argument == argument and "\n" not in str(raised.value)

    clusters[1].run(body)


def test_wrong_scales_of_int8_weights(clusters: Any) -> None:
    def body(rank: int, group: str) -> None:
        mine = Rank(rank, 1, int8=True)
        assert mine.s1 is not None
        bits = mine.s1.view(I32).long()
        for wrong, rule in (
            (None, "need 4 tensors"),
            ([mine.s1[:, :5]], "need 4 tensors"),
            ([mine.s1.half()], "is torch.float16"),
            ([*mine.s1[:3], bits[3]], "mixes torch.float32 and torch.int64"),
        ):
            with pytest.raises(ArgumentError, match=rule) as raised:
                dispatch_ffn_combine(
                    mine.x, [mine.w1], [mine.w2], mine.ids, wrong, [mine.s2], None, None,
                    mine.probs, group, 0, torch.empty_like(mine.x), torch.empty(L, dtype=I32),
                )  # fmt: skip
            assert raised.value.argument == "scale1"

    clusters[1].run(body)


MEGA_WRONG = {
    "l1_weights": {"has quantization 0 by its dtype": {"buffer": {"dispatch_quant_mode": 2}}},
    "l1_bias": {"a bias belongs to int4": {"l1_bias": [torch.ones(L, 2 * F)]}},
    "activation": {"is 'gelu'; need one of swiglu": {"activation": "gelu"}},
    "activation_clamp": {
        "is 0": {"activation_clamp": 0.0},
        "is nan": {"activation_clamp": NAN},
        "is a str": {"activation_clamp": "1"},
    },
    "topk_weights": {
        "is a NoneType": {"topk_weights": None},
        "is torch.float16": {"topk_weights": torch.ones(9, K).half()},
    },
    "weight1_type": {"is int4": {"weight1_type": 285}, "the weights are torch.bfloat16": {"weight1_type": 258}},
    "weight2_type": {"is the number 4444": {"weight2_type": 4444}},
    "shared_l2_weights": {"is empty": {"shared_l1_weights": [torch.zeros(H, 2 * F, dtype=BF16)]}},
    "shared_l1_bias": {
        "a bias belongs": {
            "shared_l1_weights": [torch.zeros(H, 2 * F, dtype=BF16)],
            "shared_l2_weights": [torch.zeros(F, H, dtype=BF16)],
            "shared_l1_bias": [torch.ones(2 * F)],
        }
    },
    "sym_buffer": {"is a int": {"sym_buffer": 1}},
    "x": {"is torch.float16": {"x": randn(9, H).half()}, "has 17 tokens": {"tokens": 17}},
    "topk_ids": {
        "is torch.int64": {"topk_ids": torch.zeros(9, K, dtype=torch.int64)},
        "K 3": {"sizes": (L, 16, 2, H, F)},
    },
}


@pytest.mark.parametrize("argument", MEGA_WRONG)
def test_wrong_arguments_of_mega_moe(clusters: Any, argument: str) -> None:
    def body(rank: int, group: str) -> None:
        for rule, changed in MEGA_WRONG[argument].items():
            given = dict(changed)
            mine = Rank(rank, 1, given.pop("tokens", 9))
            options: dict[str, Any] = given.pop("buffer", {})
            buffer = get_symm_buffer_for_mega_moe(group, *given.pop("sizes", (L, MOST, K, H, 2 * F)), **options)
            sound = {"x": mine.x, "topk_ids": mine.ids, "topk_weights": mine.probs, "sym_buffer": buffer}
            sound |= {"l1_weights": [mine.w1], "l2_weights": [mine.w2], "weight1_type": BF16, "weight2_type": 283}
            with pytest.raises(ArgumentError) as raised:
                mega_moe(**sound | given)
            assert rule in str(raised.value) and raised.value.argument == argument

    clusters[1].run(body)


def test_the_buffer_is_agreed_on(clusters: Any) -> None:
    """A value that differs on one rank, wrong or not, is told on all ranks; equal wrong values too."""
    different = {
        "num_experts": 15, "num_max_tokens_per_rank": 17, "num_topk": 2, "hidden": 32, "intermediate_hidden": 64,
        "max_recv_token_num": 100, "dispatch_quant_mode": 4, "dispatch_quant_out_dtype": torch.int8,
        "combine_quant_mode": 3, "comm_alg": "direct",
    }  # fmt: skip
    sizes = {
        "num_experts": 3 * L, "num_max_tokens_per_rank": MOST, "num_topk": K, "hidden": H, "intermediate_hidden": F,
    }  # fmt: skip
    cluster = clusters[3]
    for field, value in different.items():

        def differs_on_rank_1(rank: int, group: str, given: dict[str, Any] = {field: value}) -> Any:  # noqa: B006
            return get_symm_buffer_for_mega_moe(group, **{**sizes, **(given if rank == 1 else {})})

        for rank, error in enumerate(outcomes(cluster, differs_on_rank_1)):
            assert isinstance(error, ConfigMismatch) and error.field == field
            assert error.rank == (0 if rank == 1 else 1)
            assert (error.ours if rank == 1 else error.theirs) == repr(value) and error.ours != error.theirs
            assert f"{field} is {error.ours} on rank {rank} and {error.theirs} on rank {error.rank}" in str(error)
    wrong = {
        "num_experts": (10, 0), "num_topk": (0,), "dispatch_quant_mode": (4,), "combine_quant_mode": (3,),
        "dispatch_quant_out_dtype": (torch.bfloat16, 24), "comm_alg": ("ring",), "hidden": (40, "64"),
        "max_recv_token_num": (-1,), "num_max_tokens_per_rank": (5000,),
    }  # fmt: skip
    for field, values in wrong.items():
        for value in values:

            def all_of_them(rank: int, group: str, given: dict[str, Any] = {field: value}) -> Any:  # noqa: B006
                return get_symm_buffer_for_mega_moe(group, **{**sizes, **given})

            for error in outcomes(cluster, all_of_them):
                assert isinstance(error, ArgumentError), (field, value, error)


def test_a_window_too_small_is_told_when_the_buffer_is_made() -> None:
    def body(rank: int, group: str) -> Any:
        try:
            return get_symm_buffer_for_mega_moe(group, 4, 4096, 2, 4096, 512)
        except WindowTooSmall as error:
            return error.needed_mib

    with LocalCluster(2, window_mib=4) as cluster:
        needed = cluster.run(body)
        assert needed[0] == needed[1] > 4
    with LocalCluster(2, window_mib=needed[0]) as cluster:
        assert all(isinstance(made, SymmBuffer) for made in cluster.run(body))


def test_vllm_ascend_sets_the_quantization_of_its_buffer(clusters: Any) -> None:
    """One buffer for all layers: bf16 layers and W8A8 layers by turns; numbers of torch_npu."""

    def body(rank: int, group: str) -> None:
        plain, quantized = Rank(rank, 2), Rank(rank, 2, int8=True)
        buffer = plain.buffer(group, max_recv_token_num=2 * MOST * K)
        same(plain.mega(buffer), plain.three_calls(group))
        buffer.dispatch_quant_mode, buffer.dispatch_quant_out_dtype = 2, 258
        options = {"weight1_type": 258, "weight2_type": 258, "l1_bias": None}
        same(quantized.mega(buffer, "int64", **options), quantized.three_calls(group))
        with pytest.raises(ArgumentError, match="dispatch_quant_mode is 2"):
            plain.mega(buffer)

    clusters[2].run(body)


def test_meta_tensors() -> None:
    """Shapes and dtypes without a group: nothing is sent."""
    mine = Rank(0, 1)
    x, w1, w2, ids, probs = (value.to("meta") for value in (mine.x, mine.w1, mine.w2, mine.ids, mine.probs))
    out, nums = torch.empty_like(x), torch.empty(L, dtype=I32, device="meta")
    made = dispatch_ffn_combine(x, [w1], [w2], ids, None, None, None, None, probs, "none", 0, out, nums)
    assert made[0] is out and made[1] is nums
    buffer = SymmBuffer("none", L, MOST, K, H, F, 0, 0, None, 0, "", "none", 1, 0)
    y, counts = mega_moe(x, ids, probs, [w1], [w2], buffer)
    assert y.is_meta and y.shape == x.shape and (counts.shape, counts.dtype) == ((L,), I32)
