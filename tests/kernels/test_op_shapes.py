"""Sizes of outputs on Meta tensors: symbolic, or an error that names the argument.

That they are torch_npu's is asked by tests/npu/wheel_checks.py, that a CPU gives them by opcheck.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
from torch_calls import overload

from ascend_moe import comm
from ascend_moe.errors import ArgumentError

I32 = torch.int32
PLACE = {"group_ep": "nobody", "ep_world_size": 8, "ep_rank_id": 0, "moe_expert_num": 24}


def no_communicator() -> Any:
    """Within it, looking a communicator up is a failure."""
    return mock.patch.object(comm, "lookup", side_effect=AssertionError("a communicator was looked up"))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("arguments", "argument", "text"),
    [
        ({"ep_world_size": 0}, "ep_world_size", ""),
        ({"ep_rank_id": -1}, "ep_rank_id", ""),
        ({"ep_rank_id": 99}, "ep_rank_id", r"ep_rank_id is 99, it must be in 0\.\.7"),
        ({"shared_expert_rank_num": 8}, "shared_expert_rank_num", ""),
        ({"shared_expert_rank_num": -1}, "shared_expert_rank_num", ""),
        ({"y_dtype": 290}, "y_dtype", "y_dtype is the number 290"),
    ],
)
def test_meta_names_what_has_no_size(arguments: dict[str, Any], argument: str, text: str) -> None:
    with no_communicator(), pytest.raises(ArgumentError, match=text or argument) as caught:
        overload("npu_moe_distribute_dispatch_v2")(meta(6, 64), meta(6, 4, dtype=I32), **{**PLACE, **arguments})
    assert caught.value.argument == argument


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
    kwargs = PLACE | kwargs
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, ids, weights: op(x, ids, expert_scales=weights, **kwargs), dynamic=True, backend=counter
    )
    with no_communicator():
        for bs, hidden in [(5, 48), (11, 8), (64, 7168)]:
            args = meta(bs, hidden), meta(bs, 3, dtype=I32), meta(bs, 3)
            assert described(compiled(*args)) == described(op(*args[:2], expert_scales=args[2], **kwargs))
    assert counter.frame_count == (1 if version else frames)
