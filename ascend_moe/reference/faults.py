"""The two collective errors of routing, found by looking at all ranks' ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .records import Fault, Group, RankInput, active_pairs, group_of, routed_pairs


class FaultyRouting(ValueError):
    """The reference was asked for tensors that no rank gets. ``.fault`` says why."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def check(inputs: Sequence[RankInput], moe_expert_num: int, global_bs: int = 0) -> Fault | None:
    """Return the fault every rank must raise, or None.

    The lowest faulty rank is reported; within it an invalid id (its first flat pair) comes before an
    overflow (its first owner). Masked ids are not looked at. Capacity from one source to one owner is
    maxBS * min(K, L) rows.
    """
    group = group_of(inputs, moe_expert_num, global_bs)
    for rank, one in enumerate(inputs):
        fault = _invalid_id(rank, one, group) or _overflow(rank, one, group)
        if fault is not None:
            return fault
    return None


def require_sound(inputs: Sequence[RankInput], moe_expert_num: int, global_bs: int) -> Group:
    """Return the shared numbers of a call that is known to succeed; raises FaultyRouting otherwise."""
    fault = check(inputs, moe_expert_num, global_bs)
    if fault is not None:
        raise FaultyRouting(fault)
    return group_of(inputs, moe_expert_num, global_bs)


def _invalid_id(rank: int, one: RankInput, group: Group) -> Fault | None:
    for token, k, expert in active_pairs(one):
        if not -1 <= expert < group.moe_experts:
            return Fault("InvalidExpertId", rank, token=token, k=k, expert_id=expert)
    return None


def _overflow(rank: int, one: RankInput, group: Group) -> Fault | None:
    rows = Counter(expert // group.local_experts for _, _, expert in routed_pairs(one))
    for owner in sorted(rows):
        if rows[owner] > group.capacity:
            return Fault("RoutingOverflow", rank, owner=owner, rows=rows[owner], capacity=group.capacity)
    return None
