"""The reference against printed numbers, a dense layer, formulas worked by hand, and broken outputs."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import ascend_moe.reference as ref
from ascend_moe.reference.cases import DTYPES, Case

# --- one run of the operators with printed numbers: rank 0 of 2, 32 experts, 48 pairs a rank

PRINTED_IDS = """
11 17 29 12 24 23  1  0 16 30 18  8   2 14 11  3 30 21 12  0 10  9  6 31
22 27 30 21  1 24 17 11  3 19  2 29  16 13  7 27  6 29  5 22 24 19 23  2"""
PRINTED_IDX = """
0 0 0 0 0 0 0 0 0 0 0 0   0 0 1 0 1 0 1 1 0 0 0 0
0 0 2 1 1 1 1 2 1 0 1 1   1 0 0 1 1 2 0 1 2 1 1 2"""
PRINTED_COUNTS = """
 2  3  5  6  9 11 13 16  16 17 18 22 24 27 28 30  31 32 33 34 35 36 39 41  43 44 45 46 47 47 47 50"""
PRINTED_NUMS = "3 6 11 16 17 22 27 30 32 34 36 41 44 46 47 50"


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def rank_one_ids() -> list[int]:
    """48 ids of rank 1: the printed counts say how many go to experts 0..15; the rest goes to 16..31."""
    segments = np.diff(numbers(PRINTED_COUNTS), prepend=0)[1::2]
    ids = [expert for expert, rows in enumerate(segments) for _ in range(rows)]
    return sorted(ids + [16 + i % 16 for i in range(48 - len(ids))])


@pytest.mark.parametrize(("topk", "batch"), [(8, 6), (12, 4)])
@pytest.mark.parametrize("nums_type", [0, 1])
def test_the_worked_numbers_come_out(topk: int, batch: int, nums_type: int) -> None:
    zero = torch.tensor(numbers(PRINTED_IDS), dtype=torch.int32).reshape(batch, topk)
    # Deal the sorted ids out over the tokens, so that no token has an id twice.
    one = torch.tensor(rank_one_ids(), dtype=torch.int32).reshape(topk, batch).T.contiguous()
    assert all(len(set(ids)) == topk for ids in one.tolist())
    inputs = [ref.RankInput(torch.randn(batch, 32, dtype=torch.bfloat16), ids) for ids in (zero, one)]
    first, second = ref.dispatch(inputs, moe_expert_num=32, expert_token_nums_type=nums_type, tp_world_size=1)
    assert first.expand_idx.tolist() == numbers(PRINTED_IDX)
    assert first.ep_recv_counts.tolist() == numbers(PRINTED_COUNTS)
    nums = np.diff(numbers(PRINTED_NUMS), prepend=0).tolist() if nums_type else numbers(PRINTED_NUMS)
    assert first.expert_token_nums.tolist() == nums
    assert first.expand_x.shape == (50, 32) and first.tp_recv_counts.tolist() == [50]
    assert (first.rows_sent, second.rows_sent) == ([23, 25], [27, 21])
    assert second.expand_x.shape == (46, 32) and int(second.ep_recv_counts[-1]) == 46
    # Local expert 0: rows 0-1 from rank 0, row 2 from rank 1.
    assert [row[0] for row in first.assist_info.tolist()[:6]] == [0, 0, 1, 0, 0, 1]


# --- random routing, all the awkward kinds at once


def expert_row(expert: int, row: torch.Tensor) -> torch.Tensor:
    """Any function of one row that rounds and depends on the expert."""
    return (row.float() * (1 + expert / 7) + expert / 3).to(row.dtype)


def run_experts(results: list[ref.DispatchResult], moe_expert_num: int) -> list[torch.Tensor]:
    """Each rank's expert outputs, with a tail of NaN rows that combine must not read."""
    outputs = []
    for rank, result in enumerate(results):
        locals_ = moe_expert_num // len(results)
        ends = result.ep_recv_counts[len(results) - 1 :: len(results)].tolist()
        rows = [
            expert_row(rank * locals_ + sum(end <= i for end in ends), row) for i, row in enumerate(result.expand_x)
        ]
        tail = torch.full((3, result.expand_x.shape[1]), float("nan"), dtype=result.expand_x.dtype)
        outputs.append(torch.cat([torch.stack(rows), tail]) if rows else tail)
    return outputs


SIZES = [(1, 4, 2), (2, 1, 1), (2, 3, 4), (3, 2, 3), (4, 4, 8), (5, 1, 2), (8, 2, 16)]


@pytest.mark.parametrize("mask", ["none", "token", "pair"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(len(SIZES)))
def test_combine_gives_what_a_dense_layer_gives(seed: int, dtype: str, mask: str) -> None:
    """Combine gives what a dense layer gives; rows, counts and indices are what array arithmetic says."""
    world, local, topk = SIZES[seed]
    case = Case(
        world=world, local=local, topk=topk, batch=7 * topk, width=32, dtype=dtype, mask=mask, ids="mixed",
        batches=tuple((3 * rank + seed + 5) % 8 for rank in range(world)), shared=2 * (seed % 2), seed=seed,
    )  # fmt: skip
    inputs, experts = case.inputs, case.experts
    for given in inputs:
        if given.x_active_mask is not None:
            given.expert_ids[~given.x_active_mask] = 9999
    options = {"moe_expert_num": experts, "global_bs": case.global_bs}
    results = ref.dispatch(inputs, **options)
    got = ref.combine(inputs, run_experts(results, experts), results, **options)
    for ours, plain in zip(got, ref.dense(inputs, expert_row, experts), strict=True):
        assert ours.dtype == DTYPES[dtype] and torch.equal(ours, plain)
    table = np.zeros((world, experts), int)  # rows from source to expert
    for source, one in enumerate(inputs):
        active = torch.ones_like(one.expert_ids, dtype=torch.bool)
        if one.x_active_mask is not None:
            active &= one.x_active_mask[:, None] if mask == "token" else one.x_active_mask
        ids = np.where(active.numpy(), one.expert_ids.numpy(), -1).ravel()
        table[source] = np.bincount(ids[ids >= 0], minlength=experts)
        earlier = np.tril(ids[:, None] == ids[None, :], -1).sum(axis=1)
        assert results[source].expand_idx.tolist() == np.where(ids < 0, 0, earlier).tolist()
        assert results[source].rows_sent == table[source].reshape(world, -1).sum(axis=1).tolist()
    for rank, result in enumerate(results):
        own = table.reshape(world, world, -1)[:, rank].T  # [local expert][source]
        assert result.ep_recv_counts.tolist() == own.cumsum().tolist()
        assert result.expert_token_nums.tolist() == own.sum(axis=1).tolist()
        source_indices = result.assist_info.tolist()
        order = [(int(inputs[s].expert_ids[t, k]), s, t * topk + k) for s, t, k in source_indices]
        assert order == sorted(set(order)) and len(order) == own.sum()
        assert all(expert // (experts // world) == rank for expert, _, _ in order)
        for row, (source, token, _) in zip(result.expand_x, source_indices, strict=True):
            assert torch.equal(row, inputs[source].x[token])


# --- sums


def test_combine_refuses_a_mask_given_to_one_op_only() -> None:
    ids = torch.zeros(2, 1, dtype=torch.int32)
    one = ref.RankInput(torch.ones(2, 8), ids, expert_scales=torch.ones(2, 1))
    results = ref.dispatch([one], moe_expert_num=1)
    masked = dataclasses.replace(one, x_active_mask=torch.tensor([True, False]))
    with pytest.raises(ValueError, match="rank 0: combine's ids and mask"):
        ref.combine([masked], [torch.ones(2, 8)], results, moe_expert_num=1)


# --- quantization

INF, NAN = float("inf"), float("nan")
ROWS = {
    # row -> codes, scale
    "ties go to even": ([127, 0.5, 1.5, 2.5, -0.5, -2.5], [127, 0, 2, 2, 0, -2], 1.0),
    "all zero": ([0.0, -0.0, 0.0], [0, 0, 0], 1.0),
    "NaN is ignored": ([NAN, 127.0, -3.0], [0, 127, -3], 1.0),
    "NaN and zeros": ([NAN, 0.0], [0, 0], 1.0),
    "all NaN": ([NAN, NAN], [0, 0], NAN),
    "infinite": ([INF, -INF, 5.0], [0, 0, 0], INF),
    "denormal": ([1e-40, -1e-41, 0.0], [127, -128, 0], 0.0),
    "smallest with a finite factor": ([-(2.0**-120), 2.0**-121], [-127, 64], None),
}


@pytest.mark.parametrize("name", ROWS)
def test_quantized_rows_have_the_worked_codes_and_scales(name: str) -> None:
    values, codes, scale = ROWS[name]
    one = ref.RankInput(torch.tensor([values]), torch.zeros(1, 1, dtype=torch.int32))
    (result,) = ref.dispatch([one], moe_expert_num=1, quant_mode=2)
    assert result.expand_x.dtype == torch.int8 and result.expand_x.tolist() == [codes]
    assert result.dynamic_scales is not None
    if scale is None:
        scale = float(np.float32(1) / (np.float32(127) / np.float32(2.0**-120)))
    np.testing.assert_array_equal(result.dynamic_scales.numpy(), np.float32([scale]))


UNIT = 2.0**-24  # the smallest of fp16
BF16, FP16 = torch.bfloat16, torch.float16
BLOCKS = {
    # block, padded with zeros -> codes, scale, rows that come back
    "ties go to even": (BF16, [-127.0, 1.0, 0.5, 1.5, 2.5, -2.5, 0.0, 64.0], [-127, 1, 0, 2, 2, -2, 0, 64], 1.0, None),
    "a negative extreme": (BF16, [-254.0, 2.0, 127.0, 1.0], [-127, 1, 64, 0], 2.0, [-254.0, 2.0, 128.0, 0.0]),
    "a scale that is rounded": (BF16, [100.0, -50.0], [127, -64], 0.7890625, [100.0, -50.5]),
    "beyond fp16": (FP16, [-65504.0, 32752.0], [-127, 64], 516.0, [-INF, 33024.0]),
    "zeros": (BF16, [0.0, -0.0], [0, 0], 0.0, [0.0, 0.0]),
    "rounded to fp16, then to int8": (BF16, [126.0, 64.0], [127, 64], 0.9921875, [126.0, 63.5]),  # 64.508, 64.5, 64
    "fp16 subnormals": (FP16, [-254 * UNIT, 2 * UNIT, UNIT, 3 * UNIT], [-127, 1, 0, 2], 2 * UNIT, None),
    "a scale of one unit": (FP16, [100 * UNIT, -UNIT], [127, -1], UNIT, [127 * UNIT, -UNIT]),
    "a scale below fp16": (FP16, [60 * UNIT, -60 * UNIT], [127, -127], 0.0, [0.0, 0.0]),
    "NaN is ignored": (BF16, [NAN, 127.0, -3.0], [0, 127, -3], 1.0, [0.0, 127.0, -3.0]),
    "infinite": (BF16, [INF, 5.0], [0, 0], INF, [NAN] * 8),
    "all NaN": (FP16, [NAN] * 8, [0] * 8, NAN, [NAN] * 8),
}


def padded(values: list[float]) -> list[float]:
    return values + [0.0] * (8 - len(values))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_have_the_worked_codes_scales_and_rows(name: str) -> None:
    dtype, values, codes, scale, back = BLOCKS[name]
    other = padded([127.0])  # the neighbour has a scale of its own
    rows = torch.tensor([padded(values) + other], dtype=dtype)
    got, scales = ref.quantize_blocks(rows)
    assert (got.dtype, scales.dtype) == (torch.int8, dtype)
    assert got.tolist() == [[int(code) for code in padded(codes)] + [127] + [0] * 7]
    np.testing.assert_array_equal(scales.float().numpy(), np.float32([[scale, 1.0]]))
    if back is None:
        back = [code * scale for code in padded(codes)]
    restored = ref.restore_blocks(got, scales)
    assert restored.dtype == dtype
    np.testing.assert_array_equal(restored.float().numpy(), np.float32([padded(back) + other]))


def test_blocks_of_float32_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16 and float16 rows"):
        ref.quantize_blocks(torch.zeros(1, 8))


# --- faults and traffic


def ranks_of(*ids: list[list[int]]) -> list[ref.RankInput]:
    return [ref.RankInput(torch.zeros(len(table), 16), torch.tensor(table, dtype=torch.int32)) for table in ids]


FINE, OVERFLOW, BAD = [[0, 1], [2, 3]], [[0, 0], [0, 0]], [[0, 1], [0, 7]]


@pytest.mark.parametrize(
    ("ids", "experts", "global_bs", "fault"),
    [
        ([FINE, [[-1, 0], [3, 3]]], 4, 0, None),
        # The lowest rank and the first pair.
        ([FINE, [[0, -1], [4, -2]]], 4, 0, ref.Fault("InvalidExpertId", 1, token=1, k=0, expert_id=4)),
        ([[[0, -2], [4, 0]], FINE], 4, 0, ref.Fault("InvalidExpertId", 0, token=0, k=1, expert_id=-2)),
        # The capacity is maxBS * min(K, L): W 2, L 1, K 2, so a source may send an owner BS rows.
        ([[[0, 1], [0, 1]], [[1, 1], [-1, 0]]], 2, 0, None),
        ([[[0, 1]] * 2, [[1, 1], [0, 1]]], 2, 0, ref.Fault("RoutingOverflow", 1, owner=1, rows=3, capacity=2)),
        ([[[0, 1]] * 2, [[1, 1], [0, 1]]], 2, 6, None),
        # W 3, L 1, maxBS 3: rank 0 sends 4 rows to owner 2 (seen first) and 4 to owner 1.
        (
            [[[2, 2, 1], [2, 2, 1], [1, 1, -1]], *[[[0, -1, -1]] * 3] * 2],
            *(3, 0, ref.Fault("RoutingOverflow", 0, owner=1, rows=4, capacity=3)),
        ),
        # An overflow of a lower rank comes before an invalid id; on one rank the id does.
        ([OVERFLOW, BAD], 2, 0, ref.Fault("RoutingOverflow", 0, owner=0, rows=4, capacity=2)),
        ([[[1, 1], [1, 9]], BAD], 2, 0, ref.Fault("InvalidExpertId", 0, token=1, k=1, expert_id=9)),
    ],
)
def test_faults_are_found_and_name_the_rank(
    ids: list[list[list[int]]], experts: int, global_bs: int, fault: ref.Fault | None
) -> None:
    assert ref.check(ranks_of(*ids), experts, global_bs) == fault
    if fault is not None:
        assert f"rank {fault.rank}" in str(fault)
        with pytest.raises(ref.FaultyRouting) as raised:
            ref.dispatch(ranks_of(*ids), moe_expert_num=experts, global_bs=global_bs)
        assert raised.value.fault == fault


def test_inputs_that_are_no_legal_call() -> None:
    for inputs, experts, global_bs in [
        (ranks_of([[0]], [[0], [1]]), 2, 0),  # unequal batches need global_bs
        (ranks_of([[0]], [[0], [1]]), 2, 2),  # maxBS 1
        (ranks_of([[0]], [[0]]), 2, 3),
        (ranks_of([[0]], [[0]]), 3, 0),
        (ranks_of([[0, 1]], [[0]]), 2, 0),
    ]:
        with pytest.raises(ValueError) as raised:
            ref.check(inputs, experts, global_bs)
        assert not isinstance(raised.value, ref.FaultyRouting)


def test_traffic_counts_every_byte() -> None:
    inputs = ranks_of([[0, 1], [1, -1]], [[1, 1], [1, 0]])  # sent 3 and 4, received 2 and 5
    common = {"moe_expert_num": 2, "H": 40, "global_bs": 8}
    plain = ref.predict_traffic(inputs, dtype=torch.bfloat16, quant_mode=0, contract="v1", **common)
    assert plain == [
        ref.Traffic(3 * 96, 2 * 96, 2 * 80, 2 * 96, 3 * 80),
        ref.Traffic(4 * 96, 5 * 96, 5 * 80, 5 * 96, 4 * 80),
    ]
    both = ref.predict_traffic(inputs, dtype=torch.float16, quant_mode=2, contract="v2", **common)
    assert both[0] == ref.Traffic(3 * 128, 2 * 128, 2 * 40, 2 * 128, 3 * 80 + 4 * 32, combine_window_read_slack=2 * 32)
    coded = {"dtype": torch.bfloat16, "quant_mode": 0, "contract": "v2", "comm_quant_mode": 2, **common}
    back = ref.predict_traffic(inputs, **coded)  # 40 codes in 64 bytes, 5 scales in 32
    marks = {"combine_window_read_slack": 2 * 32}
    assert back[0] == ref.Traffic(3 * 128, 2 * 128, 2 * 80, 2 * 128, 3 * 74 + 4 * 32, **marks)
    back = ref.predict_traffic(inputs, algorithm="direct", **coded)
    assert [(rank.combine_window_write, rank.combine_window_read) for rank in back] == [(192, 222), (480, 296)]
    wide = ref.predict_traffic(inputs, dtype=torch.float32, quant_mode=0, contract="v2", **common)
    assert wide[1] == ref.Traffic(
        4 * 192, 5 * 192, 5 * 160, 5 * 192, 4 * 160 + 4 * 32, combine_window_read_slack=2 * 32
    )


# --- validate: every kind of difference fires and says where


def sample(quant_mode: int = 0, nums_type: int = 1) -> ref.DispatchResult:
    """Rank 1 of 2, experts 2 and 3: rows (0,0,1) (1,0,0) for expert 2, (0,1,0) (1,0,1) (1,1,1) for 3."""
    inputs = ranks_of([[0, 2], [3, 1]], [[2, 3], [-1, 3]])
    for rank, one in enumerate(inputs):
        one.x = (torch.arange(32.0).reshape(2, 16) + 1 + 100 * rank).to(torch.bfloat16)
    options = {"moe_expert_num": 4, "expert_token_nums_type": nums_type, "tp_world_size": 1}
    return ref.dispatch(inputs, quant_mode=quant_mode, **options)[1]


def outputs_of(expected: ref.DispatchResult, contract: str = "v1") -> list[torch.Tensor]:
    """The operator's seven tensors, allocated in full, with poison in every undefined part."""
    index = expected.expand_idx if contract == "v1" else expected.assist_info.reshape(-1)
    scales = torch.empty(0) if expected.dynamic_scales is None else expected.dynamic_scales
    parts = {
        "expand_x": expected.expand_x,
        "dynamic_scales": scales,
        "expand_idx" if contract == "v1" else "assist_info_for_combine": index,
        "expert_token_nums": expected.expert_token_nums,
        "ep_recv_counts": expected.ep_recv_counts,
        "tp_recv_counts": expected.tp_recv_counts,
        "expand_scales": torch.empty(0),
    }
    outputs = []
    for name, part in parts.items():
        whole = torch.full(expected.allocated[name], 77).to(part.dtype)
        whole[: len(part)] = part
        outputs.append(whole)
    return outputs


@pytest.mark.parametrize("contract", ["v1", "v2"])
@pytest.mark.parametrize("quant_mode", [0, 2])
def test_equal_outputs_pass(contract: str, quant_mode: int) -> None:
    expected = sample(quant_mode)
    options = {"rank": 1, "contract": contract, "quantized": bool(quant_mode), "exact_shapes": True}
    report = ref.validate("dispatch", outputs_of(expected, contract), expected, **options)
    assert report and report.ok and not report.differences
    assert report.text == "dispatch on rank 1: equal to the reference, bit for bit (5 rows)"


@pytest.mark.parametrize(
    ("quant_mode", "contract", "output", "element", "value", "sentence"),
    [
        (0, "v1", 4, 1, 3, "ep_recv_counts[1] (local expert 0 = expert 2, from rank 1; .* expected 2, got 3"),
        (0, "v1", 3, 1, 9, "expert_token_nums[1] (local expert 1 = expert 3): expected 3, got 9; 1 of 2"),
        (0, "v1", 5, 0, 4, "tp_recv_counts[0] (all rows of this rank): expected 5, got 4"),
        (0, "v1", 2, 3, 0, "expand_idx[3] (token 1, k 1, expert 3; .*: expected 1, got 0"),
        (0, "v2", 2, 7, 7, "assist_info_for_combine row 2 (.* = expert 3, from rank 0, token 1, k 0)"),
        (0, "v2", 0, (2, 3), 20.125, "row 2 .* element 3: expected 20 (0x41a0), got 20.125 (0x41a1)"),
        (2, "v1", 0, (0, 15), 126, "expand_x row 0 .* element 15: expected 127, got 126; 1 of its 16"),
        (2, "v1", 1, 3, -1.0, "dynamic_scales[3] .*: expected 0.913385868 (0x3f69d3a8), got -1"),
    ],
)
def test_one_broken_element_is_named(
    quant_mode: int, contract: str, output: int, element: Any, value: float, sentence: str
) -> None:
    expected = sample(quant_mode)
    outputs = outputs_of(expected, contract)
    outputs[output][element] = value
    report = ref.validate("dispatch", outputs, expected, rank=1, contract=contract)
    assert not report.ok and not report and len(report.differences) == 1
    assert report.text.startswith("dispatch on rank 1: ")
    assert re.search(re.escape(sentence).replace(r"\.\*", ".*"), report.text), report.text


def test_between_servers_the_third_tensor_is_expand_idx() -> None:
    """Rank 1 of two, on servers of their own: what is defined is compared, nothing behind it."""
    expected = sample()
    outputs = outputs_of(expected, "v2")
    pairs = len(expected.expand_idx)
    outputs[2] = torch.full((outputs[2].numel() + pairs,), -7, dtype=torch.int32)
    outputs[2][:pairs] = expected.expand_idx

    def compared(**options: Any) -> ref.Comparison:
        return ref.validate("dispatch", outputs, expected, rank=1, contract="v2", **options)

    for share in (0, 2):  # one server
        assert "assist_info_for_combine row" in compared(ranks_per_server=share).text
    report = compared(ranks_per_server=1)
    assert report.ok and "several servers: assist_info_for_combine as expand_idx, not as" in report.text
    outputs[2][3] += 1
    assert compared(ranks_per_server=1).text.startswith("dispatch on rank 1: expand_idx[3] (token 1, k 1")


def test_hints_say_what_is_there_instead() -> None:
    expected = sample(2)
    outputs = outputs_of(expected, "v2")
    outputs[0][0], outputs[0][4] = expected.expand_x[2], 0
    outputs[1][:5] = 1 / outputs[1][:5]
    outputs[2][0:3] = expected.assist_info[4]
    outputs[3] = sample(0, nums_type=0).expert_token_nums
    nums, source_index, row, scale = ref.validate("dispatch", outputs, expected, rank=1, contract="v2").differences
    assert "these are the numbers of expert_token_nums_type 0, 1 was asked for" in nums
    assert "it has the bits of row 4 (local expert 1 = expert 3, from rank 1, token 1, k 1)" in source_index
    assert "it has the bits of row 2 (local expert 1 = expert 3, from rank 0, token 1, k 0)" in row
    assert "the reciprocal" in scale
    outputs[0][0] = expected.expand_x[0]
    assert "it is all zeros" in ref.validate("dispatch", outputs, expected, rank=1, contract="v2").text


def test_wrong_forms_are_named() -> None:
    expected = sample()
    for index, value, text in (
        (0, torch.zeros(8, 16), "expand_x has dtype torch.float32, expected torch.bfloat16"),
        (0, torch.zeros(4, 16).bfloat16(), "expand_x has shape (4, 16), expected (5 or more, 16)"),
        (2, torch.zeros(5, dtype=torch.int32), "expand_idx has shape (5,), expected (4,)"),
        (4, None, "ep_recv_counts is not a tensor but NoneType"),
        (6, torch.zeros(0), "equal"),
    ):
        outputs: list[Any] = outputs_of(expected)
        outputs[index] = value
        assert text in ref.validate("dispatch", outputs, expected).text
    exact = ref.validate("dispatch", outputs, expected, exact_shapes=True).text
    assert "expand_scales has shape (0,), the operator allocates (8,)" in exact
    assert "the operator returns 7 tensors" in ref.validate("dispatch", outputs[:6], expected).text
    with pytest.raises(ValueError, match="unquantized"):
        ref.validate("dispatch", outputs, expected, quantized=True)


def test_combine_reports() -> None:
    want = torch.tensor([[1.0, 2.0], [3.0, NAN], [0.0, INF]])
    equal = want.clone()
    equal.view(torch.int32)[1, 1] = 0x7FC12345  # another NaN
    assert ref.validate("combine", equal, want).ok
    for at, value, text in (
        ((0, 1), 2.0000002, "token 0, element 1: expected 2 (0x40000000), got 2.00000024 (0x40000001), 1 ulp"),
        ((1, 1), 1.0, "expected nan (0x7fc00000), got 1 (0x3f800000); 1 of its 2 elements"),
        ((2, 1), NAN, "expected inf (0x7f800000), got nan"),
        ((2, 0), -0.0, "got -0 (0x80000000), they differ in the sign of zero"),
    ):
        got = want.clone()
        got[at] = value
        report = ref.validate("combine", got, want, rank=3)
        assert not report.ok and report.text.startswith("combine on rank 3: ") and text in report.text
    assert "2 ulp apart" in ref.validate("combine", torch.tensor([[-1e-45]]), torch.tensor([[1e-45]])).text
    swapped = ref.validate("combine", want[[2, 1, 0]], want).text
    assert swapped.endswith("in all 2 of 3 rows; it has the bits of row 2")
    assert "has shape (2, 2), expected (3, 2)" in ref.validate("combine", want[:2], want).text
    assert "has dtype torch.float64" in ref.validate("combine", want.double(), want).text


def special(ids: list[int], weights: list[float] | None, alphas: tuple[list[Any], list[Any]]) -> torch.Tensor:
    """The sum of a token with E = 1, a zero, a copy and two const experts; expert 0 returns 100, ori_x is (1, -2)."""
    given = ref.RankInput(
        torch.zeros(1, 2),
        torch.tensor([ids], dtype=torch.int32),
        expert_scales=torch.empty(0) if weights is None else torch.tensor([weights]),
        ori_x=torch.tensor([[1.0, -2.0]]),
        const_expert_alpha_1=torch.tensor(alphas[0]),
        const_expert_alpha_2=torch.tensor(alphas[1]),
        const_expert_v=torch.tensor([[10.0, 20.0], [4.0, 8.0]]),
    )
    kinds = ref.SpecialExperts(1, 1, 2)
    (sent,) = ref.dispatch([given], moe_expert_num=1, special=kinds)
    assert sent.ep_recv_counts.tolist() == [ids.count(0)] and len(sent.assist_info) == ids.count(0)
    (out,) = ref.combine([given], [torch.full((9, 2), 100.0)], [sent], moe_expert_num=1, special=kinds)
    return out[0]


FACTORS = ([3.0, 0.5], [0.25, 2.0])


@pytest.mark.parametrize(
    ("ids", "weights", "want"),
    [
        ([1], [7.0], [0.0, 0.0]),  # zero
        ([2], [0.5], [0.5, -1.0]),  # copy
        ([2, 2], None, [2.0, -4.0]),  # twice, without weights
        ([3], [2.0], [11.0, -2.0]),  # 2 * (3 * (1, -2) + 0.25 * (10, 20))
        ([4], None, [8.5, 15.0]),  # 0.5 * (1, -2) + 2 * (4, 8)
        ([0, 1, 4, -1, 2], [0.01, 9.0, 2.0, 9.0, 4.0], [22.0, 23.0]),  # 1 + 17 + 4; 1 + 30 - 8
    ],
    ids=str,
)
def test_special_experts_add_the_worked_numbers(ids: list[int], weights: list[float] | None, want: list[float]) -> None:
    assert special(ids, weights, FACTORS).tolist() == want


def test_const_experts_whose_alphas_are_vectors() -> None:
    """d1 = (2, 1) . (1, -2) = 0 and d2 = (0, 0) . (1, -2) = 0: halves; (0, -1) and (-1, 0): e^2 and e^-1."""
    alphas = ([[2.0, 1.0], [0.0, -1.0]], [[0.0, 0.0], [-1.0, 0.0]])
    assert special([3], [1.0], alphas).tolist() == [5.5, 9.0]
    share = math.exp(2) / (math.exp(2) + math.exp(-1))
    want = [share * 1 + (1 - share) * 4, share * -2 + (1 - share) * 8]
    torch.testing.assert_close(special([4], [1.0], alphas), torch.tensor(want), rtol=1e-6, atol=1e-6)


def test_products_of_const_experts_are_rounded_one_by_one() -> None:
    """1/3 * 3 - 1 is 0 with a rounded product, and not with a fused one."""
    third = np.float32(1) / np.float32(3)
    row = ref.const_row(np.full(8, 3, np.float32), third, np.float32(1), np.full(8, -1, np.float32))
    assert not row.any()


def test_an_id_behind_the_special_ones_is_a_fault() -> None:
    for last, fault in ((4, None), (5, "InvalidExpertId")):
        one = ref.RankInput(torch.zeros(1, 2), torch.tensor([[last]], dtype=torch.int32))
        found = ref.check([one], 1, special=ref.SpecialExperts(1, 1, 2))
        assert (found and found.kind) == fault
