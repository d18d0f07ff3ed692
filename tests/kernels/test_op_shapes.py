"""Checks what the ops allocate on Meta and Fake tensors: torch_npu's sizes, also symbolic, and what CPU gets."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
from torch_calls import overload, own_terms

from ascend_moe import comm
from ascend_moe.errors import ArgumentError

BATCH, HIDDEN, TOPK, WORLD, EXPERTS = 6, 64, 4, 8, 16
BF16, FP16, FP32, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.int8
I32, I64 = torch.int32, torch.int64


def no_communicator() -> Any:
    """Within it, looking a communicator up is a failure."""
    return mock.patch.object(comm, "lookup", side_effect=AssertionError("a communicator was looked up"))


def meta(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dispatch(
    version: str = "",
    *,
    batch: int = BATCH,
    topk: int = TOPK,
    world: int = WORLD,
    rank: int = 0,
    experts: int = EXPERTS,
    dtype: torch.dtype = BF16,
    **kwargs: Any,
) -> list[Any]:
    """Shapes of dispatch's outputs on Meta tensors, the dtype of expand_x in front."""
    for name, shape in {
        "scales": (experts, HIDDEN),
        "expert_scales": (batch, topk),
        "elastic_info": (9,),
    }.items():
        if kwargs.get(name):
            kwargs[name] = meta(*shape)
    args = meta(batch, HIDDEN, dtype=dtype), meta(batch, topk, dtype=I32), "nobody", world, rank, experts
    with no_communicator():
        outputs = overload(f"npu_moe_distribute_dispatch{version}")(*args, **kwargs)
    assert all(out.device.type == "meta" and out.is_contiguous() for out in outputs)
    assert [out.dtype for out in outputs[1:]] == [FP32, I32, I64, I32, I32, FP32]
    return [outputs[0].dtype, *(tuple(out.shape) for out in outputs)]


Row = tuple[dict[str, Any], torch.dtype, int, int, int, int]
SHARED = {"shared_expert_rank_num": 2, "experts": 12}
REST = {"shared_expert_rank_num": 3, "experts": 15, "batch": 5}
# Where V1 and V2 agree but for the third output: arguments, dtype, rows, local experts, counts, ranks of TP.
# G = 48, L = 2, A = 96 where nothing else is said.
BOTH: list[Row] = [
    ({}, BF16, 96, 2, 16, 0),
    ({"dtype": FP16}, FP16, 96, 2, 16, 0),
    ({"dtype": FP32}, FP32, 96, 2, 16, 0),
    ({"dtype": torch.float64}, torch.float64, 96, 2, 16, 0),  # a dtype no kernel knows
    ({"topk": 1}, BF16, 48, 2, 16, 0),
    ({"global_bs": 80}, BF16, 160, 2, 16, 0),
    ({"batch": 0, "global_bs": 80}, BF16, 160, 2, 16, 0),
    ({"batch": 0}, BF16, 0, 2, 16, 0),
    ({"experts": 7}, BF16, 0, 0, 0, 0),
    ({"quant_mode": 2}, INT8, 96, 2, 16, 0),
    ({"quant_mode": 2, "scales": True}, INT8, 96, 2, 16, 0),
    ({"tp_world_size": 1}, BF16, 96, 2, 16, 1),
    ({"tp_world_size": 2}, BF16, 96, 2, 32, 2),
    ({"expert_scales": True}, BF16, 96, 2, 16 + 2 * 48 * 4, 0),
    ({"expert_scales": True, "global_bs": 80}, BF16, 160, 2, 656, 0),
    ({"expert_scales": True, "world": 16}, BF16, 96, 1, 1552, 0),
    ({"expert_scales": True, "world": 4}, BF16, 96, 4, 16, 0),
    (SHARED, BF16, 24, 1, 8, 0),
    ({**SHARED, "rank": 2}, BF16, 96, 2, 16, 0),
    ({**SHARED, "global_bs": 80}, BF16, 40, 1, 8, 0),
]
V1: list[Row] = [
    ({"scales": True}, INT8, 96, 2, 16, 0),  # alone they quantize
    (REST, BF16, 40 // 3, 1, 8, 0),
    ({**SHARED, "rank": 6, "expert_shard_type": 1}, BF16, 24, 1, 8, 0),
    ({**SHARED, "rank": 5, "expert_shard_type": 1}, BF16, 96, 2, 16, 0),
]
V2: list[Row] = [
    ({"scales": True}, BF16, 96, 2, 16, 0),
    (REST, BF16, 5 * 3, 1, 8, 0),
    # Two shared experts; shard type 1 is a MoE rank, though torch_npu's own Meta says otherwise.
    ({**SHARED, "shared_expert_rank_num": 4, "shared_expert_num": 2, "rank": 3}, BF16, 24, 1, 8, 0),
    ({**SHARED, "rank": 0, "expert_shard_type": 1}, BF16, 96, 2, 16, 0),
    ({**SHARED, "rank": 7, "expert_shard_type": 1}, BF16, 96, 2, 16, 0),
    # Elastic ranks; with few experts the shared rows prevail.
    ({**SHARED, "elastic_info": True}, BF16, 96, 2, 16, 0),
    ({"elastic_info": True}, BF16, 96, 2, 16, 0),
    ({**SHARED, "experts": 3, "rank": 5, "elastic_info": True}, BF16, 24, 1, 8, 0),
    # A torch.dtype, torch_npu's int8, and one over quant_mode.
    ({"y_dtype": FP16}, FP16, 96, 2, 16, 0),
    ({"quant_mode": 2, "y_dtype": 258}, INT8, 96, 2, 16, 0),
    ({"quant_mode": 2, "y_dtype": BF16}, BF16, 96, 2, 16, 0),
]
ROWS = [("", *row) for row in (*BOTH, *V1)] + [("_v2", *row) for row in (*BOTH, *V2)]


@pytest.mark.parametrize(("version", "kwargs", "dtype", "rows", "local", "counts", "tp"), ROWS)
def test_dispatch_allocates_as_torch_npu(
    version: str, kwargs: dict[str, Any], dtype: torch.dtype, rows: int, local: int, counts: int, tp: int
) -> None:
    """Where torch_npu's own Meta and its C++ disagree, ours follows the C++; no device is asked."""
    pairs = kwargs.get("batch", BATCH) * kwargs.get("topk", TOPK)
    index = max(128 * rows, pairs) if version else pairs
    both = 2 * rows if tp == 2 else rows  # those of the other TP rank too
    expected = [dtype, (both, HIDDEN), (both,), (index,), (local,), (counts,), (tp,), (rows,)]
    assert dispatch(version, **kwargs) == expected
    assert "torch_npu" not in sys.modules


def combine(version: str = "", *, dtype: torch.dtype = BF16, **kwargs: Any) -> tuple[Any, ...]:
    index = {"": 24, "_v2": 96 * 128}[version]
    tensors = meta(96, HIDDEN, dtype=dtype), meta(BATCH, TOPK, dtype=I32), meta(index, dtype=I32)
    args = *tensors, meta(16, dtype=I32), meta(BATCH, TOPK), "nobody", WORLD, 0, EXPERTS
    with no_communicator():
        out = overload(f"npu_moe_distribute_combine{version}")(*args, **kwargs)
    assert out.device.type == "meta"
    return out.dtype, *out.shape


@pytest.mark.parametrize("version", ["", "_v2"])
def test_combine_allocates_as_torch_npu(version: str) -> None:
    arguments = overload(f"npu_moe_distribute_combine{version}")._schema.arguments
    optional = [argument.name for argument in arguments if str(argument.type) == "Optional[Tensor]"]
    assert set(own_terms(None)) & set(optional)
    for dtype in (BF16, FP16, FP32):
        others = dict.fromkeys(optional, meta(BATCH, HIDDEN, dtype=dtype)) | {"tp_world_size": 2}
        assert combine(version, dtype=dtype) == combine(version, dtype=dtype, **others) == (dtype, BATCH, HIDDEN)
    assert combine(version, dtype=I32)[0] == BF16
    for dtype, out in ((I32, FP16), (BF16, BF16)) if version == "" else ():
        assert combine(dtype=dtype, out_dtype=1)[0] == out


# ---- what has no size


@pytest.mark.parametrize(
    ("arguments", "argument", "text"),
    [
        ({"world": 0}, "ep_world_size", ""),
        ({"world": -3}, "ep_world_size", ""),
        ({"rank": -1}, "ep_rank_id", ""),
        ({"world": 16, "rank": 99}, "ep_rank_id", r"ep_rank_id is 99, it must be in 0\.\.15"),
        ({"version": "_v2", "world": 16, "rank": 99}, "ep_rank_id", "ep_rank_id is 99"),
        ({"shared_expert_rank_num": 8}, "shared_expert_rank_num", ""),
        ({"shared_expert_rank_num": -1}, "shared_expert_rank_num", ""),
        ({"version": "_v2", "y_dtype": 290}, "y_dtype", "y_dtype is the number 290"),
    ],
)
def test_meta_names_what_has_no_size(arguments: dict[str, Any], argument: str, text: str) -> None:
    with pytest.raises(ArgumentError, match=text or argument) as caught:
        dispatch(**arguments)
    assert caught.value.argument == argument
    assert dispatch()[1] == (96, HIDDEN)


# ---- symbolic sizes; that CPU outputs are what Meta says is asked by opcheck


def described(outputs: Any) -> list[Any]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(out.dtype, tuple(out.shape), out.stride()) for out in outputs]


@pytest.mark.parametrize("version", ["", "_v2"])
@pytest.mark.parametrize(
    ("kwargs", "frames"),
    [
        ({"quant_mode": 2, "tp_world_size": 2}, 1),
        ({"global_bs": 8 * 64}, 1),
        ({"shared_expert_rank_num": 2, "ep_rank_id": 5}, 1),
        ({"shared_expert_rank_num": 4, "moe_expert_num": 40}, 1),
        ({"shared_expert_rank_num": 3, "moe_expert_num": 40}, 3),  # V1's rows have a rest
    ],
    ids=str,
)
def test_batch_and_hidden_stay_symbolic(version: str, kwargs: dict[str, Any], frames: int) -> None:
    op, counter = overload(f"npu_moe_distribute_dispatch{version}"), torch._dynamo.testing.CompileCounter()
    kwargs = {"group_ep": "nobody", "ep_world_size": 8, "ep_rank_id": 0, "moe_expert_num": 24, **kwargs}
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, ids, weights: op(x, ids, expert_scales=weights, **kwargs), dynamic=True, backend=counter
    )
    with no_communicator():
        for bs, hidden in [(5, 48), (11, 8), (64, 7168)]:
            args = meta(bs, hidden), meta(bs, 3, dtype=I32), meta(bs, 3)
            assert described(compiled(*args)) == described(op(*args[:2], expert_scales=args[2], **kwargs))
    assert counter.frame_count == (1 if version else frames)
