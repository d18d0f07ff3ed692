"""One call for a layer names wrong arguments and errors of all ranks, and agrees on its buffer."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from bad_arguments import refused
from layer_op_ranks import BF16, I32, MOST, NAN, F, H, K, L, Rank, outcomes, same
from routed_tokens import randn

from ascend_moe import LocalCluster
from ascend_moe.errors import ArgumentError, ConfigMismatch, InvalidExpertId, WindowTooSmall
from ascend_moe.layer_ops import SymmBuffer, dispatch_ffn_combine, get_symm_buffer_for_mega_moe, mega_moe


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
        "torch.uint8: int4 are int32 of eight": {"weight1": [torch.zeros(L, H, F, dtype=torch.uint8)]},
        "must be of x's type torch.bfloat16, all int8, or all int32": {"weight1": [torch.zeros(L, H, 2 * F)]},
        "L of (H, 2F)": {"weight1": [torch.zeros(L, H, 2 * F + 1, dtype=BF16)]},
        "must contain a matrix of one shape": {"weight1": [torch.zeros(H, n, dtype=BF16) for n in (64, 64, 64, 32)]},
        "a list of tensors": {"weight1": [1]},
    },
    "weight2": {
        "it must be (4, 32, 64)": {"weight2": [torch.zeros(L, F, 32, dtype=BF16)]},
        "it must be weight1's torch.int32": {"weight1": [torch.zeros(L, H, 2 * F // 8, dtype=I32)]},
    },
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
    "group": {"names no open group": {"group": "nobody's"}, "is a int": {"group": 3}},
}


def sound_call(mine: Rank, group: str) -> dict[str, Any]:
    """Return arguments of `dispatch_ffn_combine` that are right."""
    call = {
        "x": mine.x, "weight1": [mine.w1], "weight2": [mine.w2], "expert_idx": mine.ids, "probs": mine.probs,
        "group": group, "max_output_size": 0, "out": torch.empty_like(mine.x),
        "expert_token_nums": torch.empty(L, dtype=I32),
    }  # fmt: skip
    beside = {"scale1": mine.s1, "scale2": mine.s2, "bias1": mine.b1, "bias2": mine.b2}
    return call | {name: None if value is None else [value] for name, value in beside.items()}


@pytest.mark.parametrize("argument", WRONG)
def test_wrong_arguments_are_named(group_ep: str, argument: str) -> None:
    sound = sound_call(Rank(0, 1), group_ep) | {"bias1": [torch.tensor([])], "bias2": torch.zeros(L, H)}
    sound["expert_token_nums"] = torch.empty(1, L, dtype=I32)
    dispatch_ffn_combine(**sound)
    for rule, changed in WRONG[argument].items():
        refused(argument, dispatch_ffn_combine, **sound | changed, says=re.escape(rule))


@pytest.mark.parametrize("int4", [0, 2], ids=["int8", "int4"])
def test_wrong_scales_and_biases_of_integer_weights(group_ep: str, int4: int) -> None:
    mine = Rank(0, 1, int8=not int4, int4=int4)
    assert mine.s1 is not None
    sound, bits = sound_call(mine, group_ep), mine.s1.view(I32).long()
    dispatch_ffn_combine(**sound)
    wrong = [
        ("scale1", None, "need 4 tensors"),
        ("scale1", [mine.s1.half()], "is torch.float16"),
        ("scale1", [*mine.s1[:3], bits[3]], "mixes torch.float32 and torch.int64"),
        ("scale1", [mine.s1[..., :5]], "has shapes [(4, 2, 5)]; int4 weights need" if int4 else "need 4 tensors"),
    ]
    if mine.b2 is not None:
        wrong += [
            ("scale1", [torch.ones(L, 3, 2 * F)], "G a divisor of 64"),
            ("bias1", None, "int4 weights need 8 * sum(weight * scale)"),
            ("bias2", [mine.b2.double()], "is torch.float64"),
        ]
    for argument, value, rule in wrong:
        refused(argument, dispatch_ffn_combine, **sound | {argument: value}, says=re.escape(rule))


def test_types_of_int4_weights_are_of_both_and_of_whole_words(group_ep: str) -> None:
    mine = Rank(0, 1, int4=2)
    buffer = mine.buffer(group_ep)
    refused("weight2_type", mine.mega, buffer, weight1_type=285, says="is None, weight1_type 285; both must be int4")
    mine.w1 = mine.w1.view(torch.int8)[..., :30]
    types = {"weight1_type": 285, "weight2_type": 285}
    refused("l1_weights", mine.mega, buffer, **types, says="its last dimension must be a multiple of 4")


MEGA_WRONG = {
    "l1_weights": {"has quantization 0 by its dtype": {"buffer": {"dispatch_quant_mode": 2}}},
    "l1_bias": {"a bias belongs to int4": {"l1_bias": [torch.ones(L, 2 * F)]}},
    "activation": {
        "is 'mish'; need one of swiglu": {"activation": "mish"},
        "is 'relu2', which has no gate": {"activation": "relu2"},
    },
    "activation_clamp": {
        "is 0": {"activation_clamp": 0.0},
        "is nan": {"activation_clamp": NAN},
        "is a str": {"activation_clamp": "1"},
    },
    "beta": {"is not a number of activation swiglu, which has limit": {"beta": 4.0}},
    "topk_weights": {
        "is a NoneType": {"topk_weights": None},
        "is torch.float16": {"topk_weights": torch.ones(9, K).half()},
    },
    "weight1_type": {
        "is int4; the weights are torch.bfloat16": {"weight1_type": 285},
        "the weights are torch.bfloat16": {"weight1_type": 258},
    },
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
def test_wrong_arguments_of_mega_moe(group_ep: str, argument: str) -> None:
    for rule, changed in MEGA_WRONG[argument].items():
        given = dict(changed)
        mine = Rank(0, 1, given.pop("tokens", 9))
        options: dict[str, Any] = given.pop("buffer", {})
        buffer = get_symm_buffer_for_mega_moe(group_ep, *given.pop("sizes", (L, MOST, K, H, 2 * F)), **options)
        sound = {"x": mine.x, "topk_ids": mine.ids, "topk_weights": mine.probs, "sym_buffer": buffer}
        sound |= {"l1_weights": [mine.w1], "l2_weights": [mine.w2], "weight1_type": BF16, "weight2_type": 283}
        refused(argument, mega_moe, **sound | given, says=re.escape(rule))


def test_the_buffer_is_agreed_on(clusters: Any) -> None:
    """A value that differs on one rank, wrong or not, is reported on all ranks; equal wrong values too."""
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


def test_a_window_too_small_is_reported_when_the_buffer_is_made() -> None:
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
        refused("l1_weights", plain.mega, buffer, says="dispatch_quant_mode is 2")

    clusters[2].run(body)


def test_meta_tensors_need_no_group() -> None:
    """Shapes and dtypes without a group: nothing is sent."""
    mine = Rank(0, 1)
    x, w1, w2, ids, probs = (value.to("meta") for value in (mine.x, mine.w1, mine.w2, mine.ids, mine.probs))
    out, nums = torch.empty_like(x), torch.empty(L, dtype=I32, device="meta")
    made = dispatch_ffn_combine(x, [w1], [w2], ids, None, None, None, None, probs, "none", 0, out, nums)
    assert made[0] is out and made[1] is nums
    buffer = SymmBuffer("none", L, MOST, K, H, F, 0, 0, None, 0, "", "none", 1, 0)
    y, counts = mega_moe(x, ids, probs, [w1], [w2], buffer)
    assert y.is_meta and y.shape == x.shape and (counts.shape, counts.dtype) == ((L,), I32)
