"""The releases of torch and torch_npu that the package runs with on the virtual NPU, and what sets them apart.

The operators' schemas and rules here are those of torch_npu 2.13.0. `OLDER` says what torch_npu has otherwise in its
wheels up to 2.9.0 and 2.10.0.post6. Later wheels of the same torch (2.9.0.post9, 2.10.0.post7) have the newer ones, so
a call asks the wheel that is there (`ascend_moe.native.torch_npu.operators`), not its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Operators:
    """Where one generation of torch_npu's MoE operators differs from that of 2.13.0."""

    lacks: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Arguments that it does not know, by operator, with 2.13.0's defaults."""
    defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Its own defaults, by operator and argument."""
    more: tuple[str, ...] = ()
    """Operators of dispatch and combine that it has and 2.13.0 has not."""
    refuses: Mapping[str, Mapping[str, tuple[object, ...]]] = field(default_factory=dict)
    """Values that it refuses, by operator and argument: torch's own operators compute such a call on the NPU."""
    shapes: Mapping[str, Mapping[str, tuple[object, ...]]] = field(default_factory=dict)
    """Calls, by operator and values of all these arguments, whose outputs have another shape."""
    uncalled: tuple[str, ...] = ()
    """Functions of the virtual NPU's libopapi.so that it never calls: torch_npu computes these on the CPU."""


NEWER = Operators()
OLDER = Operators(
    lacks={"npu_moe_gating_top_k": {"input_ids": None, "tid2eid": None}, "npu_moe_finalize_routing": {"k": 1}},
    defaults={"npu_grouped_matmul_swiglu_quant_v2": {"dequant_dtype": 0}},
    more=(
        "npu_moe_distribute_dispatch_setup",
        "npu_moe_distribute_dispatch_teardown",
        "npu_moe_distribute_combine_setup",
        "npu_moe_distribute_combine_teardown",
    ),
    uncalled=(
        "aclnnInplaceCeil",
        "aclnnLeftShift",
        "aclnnLeftShifts",
        "aclnnRightShift",
        "aclnnRepeatInterleaveTensor",
        "aclnnMoeGatingTopKV2",
    ),
    # An output a group of a product by columns: without rows.
    shapes={"npu_grouped_matmul": {"group_type": (2,), "split_item": (0, 1)}},
    refuses={"npu_dequant_swiglu_quant": {"swiglu_mode": (2,)}},
)
MARK = "npu_moe_gating_top_k", "input_ids"  # an operator's argument that tells the generations apart


@dataclass(frozen=True)
class Pair:
    """torch and torch_npu of one virtual NPU. ``tested``: ``make test-npu`` has passed with it."""

    torch: str
    torch_npu: str
    operators: Operators = NEWER
    tested: bool = True

    def __str__(self) -> str:
        return f"torch {self.torch} with torch_npu {self.torch_npu}"


# The first is what a message offers where the environment has neither.
PAIRS = (
    Pair("2.13.0", "2.13.0"),
    Pair("2.10.0", "2.10.0.post4", OLDER),  # what vllm-ascend 0.23.0 and 0.26.0rc1 pin
    Pair("2.14.0", "2.14.0", tested=False),
)


def pair_of(torch: str | None, torch_npu: str | None) -> Pair | None:
    """The pair of these installed versions, whose part behind a + says nothing."""
    have = [(version or "").partition("+")[0] for version in (torch, torch_npu)]
    return next((pair for pair in PAIRS if [pair.torch, pair.torch_npu] == have), None)
