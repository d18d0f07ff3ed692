"""Group lists: which rows of a matrix belong to which expert.

Three forms, numbered as torch_npu's ``group_list_type``: 0 running sums, 1 counts, 2 (expert, count) pairs. A list may
cover fewer rows than the matrix has: dispatch's expand_x is allocated for the worst case, and rows after the last group
belong to no expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ascend_moe.errors import need, need_dtype

CUMSUM, COUNTS, PAIRS = 0, 1, 2


class Group(NamedTuple):
    """Rows ``start`` to ``stop`` (exclusive) belong to ``expert``."""

    expert: int
    start: int
    stop: int


def read_groups(
    group_list: torch.Tensor | Sequence[int],
    group_list_type: int,
    experts: int,
    rows: int,
    argument: str = "group_list",
) -> list[Group]:
    """Return the groups in row order, including empty ones. Reads the list on the host: not for NPU tensors.

    Args:
        group_list: ``(experts,)`` running sums or counts, or ``(n, 2)`` pairs (expert, count).
        group_list_type: 0, 1 or 2 for those forms.
        experts: number of experts.
        rows: rows of the matrix; the list may cover fewer.
        argument: name of the list in errors.

    Raises:
        ArgumentError: wrong length or shape, a negative count, falling sums, an expert outside
            0..experts-1, or more rows than the matrix has.
    """
    if isinstance(group_list, torch.Tensor):
        need_dtype(argument, group_list, torch.int64, torch.int32)
    values: list[Any] = _values(group_list) if isinstance(group_list, torch.Tensor) else list(group_list)
    if group_list_type == PAIRS:
        formed = all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in values)
        need(formed, argument, "with group_list_type 2 must be (n, 2): pairs of expert and row count")
        for index, count in values:
            # Pairs without rows are padding: their expert is not checked.
            known = count == 0 or 0 <= index < experts
            need(known, argument, "names expert {} for rows; it must be 0..{}", index, experts - 1)
        pairs = [(index, count) for index, count in values]
    else:
        rule = "is {}; it must be 0 (running sums), 1 (counts) or 2 (pairs)"
        need(group_list_type in (CUMSUM, COUNTS), "group_list_type", rule, group_list_type)
        fits = len(values) == experts and not any(isinstance(value, list) for value in values)
        rule = "has {} entries, but there are {} experts; give one number per expert"
        need(fits, argument, rule, len(values), experts)
        if group_list_type == CUMSUM:
            values = [after - before for before, after in zip([0, *values], values, strict=False)]
        pairs = list(enumerate(values))
    whole = all(type(number) is int for pair in pairs for number in pair)
    need(whole, argument, "contains numbers that are not int; give whole numbers of rows")
    groups, start = [], 0
    for index, count in pairs:
        rule = (
            "gives expert {} {} rows; counts must not be negative and running sums must not fall "
            "(is group_list_type right?)"
        )
        need(count >= 0, argument, rule, index, count)
        groups.append(Group(index, start, start + count))
        start += count
    rule = "covers {} rows, but the matrix has {} (is group_list_type right?)"
    need(start <= rows, argument, rule, start, rows)
    return groups


def _values(group_list: torch.Tensor) -> list[Any]:
    """Return a list's values; CPU tensors are read in place, others copied."""
    if type(group_list) is torch.Tensor and group_list.device.type == "cpu":
        found: list[Any] = group_list.detach().numpy().tolist()
        return found
    copied: list[Any] = group_list.tolist()
    return copied


def as_counts(group_list: torch.Tensor, group_list_type: int) -> torch.Tensor:
    """Return the counts per expert of ``(L,)`` counts or running sums, on their device; the host reads nothing."""
    rule = "is {}; the expert MLP supports 0 (running sums) and 1 (counts), like "
    rule += "expert_token_nums_type"
    need(group_list_type in (CUMSUM, COUNTS), "group_list_type", rule, group_list_type)
    if group_list_type == COUNTS:
        return group_list
    return torch.diff(group_list, prepend=group_list.new_zeros(1))
