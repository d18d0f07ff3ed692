"""The first difference of a tensor from the reference, by token, expert and element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_moe.comm.place import Place
from ascend_moe.reference import DispatchResult
from ascend_moe.reference.report import differing, gap, words

STAGES = ("x", "ids", "scales", "dispatch", "parameters", "experts", "combine")


def first_of(got: Tensor, want: Tensor, wrong: Tensor | None = None) -> tuple[int, int] | None:
    """Return row and column of the first element that differs in bits, or is True in ``wrong``; None if none does."""
    unequal = torch.from_numpy(differing(got, want)) if wrong is None else wrong
    if not unequal.any():
        return None
    unequal = unequal.reshape(len(want), -1)
    row = int(unequal.any(1).int().argmax())
    return row, int(unequal[row].int().argmax())


def mismatch(stage: str, rank: int, want: Tensor, got: Tensor, where: dict[str, Any], what: str = "") -> dict[str, Any]:
    """Return the attributes of a ReferenceMismatch of element ``got`` from ``want``, and its message as "text"."""
    places = {"token": "token {} of rank " + str(where.get("source")), "expert": "expert {}", "element": "element {}"}
    text = ", ".join(form.format(where[name]) for name, form in places.items() if where.get(name) is not None)
    head = f"{stage} on rank {rank}" + (f", {what}" if what else "")
    values = {"expected": want.item(), "got": got.item()}
    return {
        "text": f"{head}: {text}: expected {words(want)}, got {words(got)}{gap(got, want)}",
        "stage": stage,
        "rank": rank,
        **{name: where.get(name) for name in ("token", "source", "expert", "element")},
        **values,
    }


class Rows:
    """The rows that the reference's dispatch brings to a rank, to find and locate the first difference of a result."""

    def __init__(self, want: DispatchResult, place: Place) -> None:
        self.want, self.rank, self.world = want, place.rank, place.world
        self.local = len(want.expert_token_nums)
        ends = want.ep_recv_counts[place.world - 1 :: place.world].tolist()
        self.counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def of_row(self, row: int, element: int | None = None) -> dict[str, Any]:
        """Return token, source rank and expert of row ``row`` of expand_x, and ``element``, as a dict."""
        source, token, _ = self.want.assist_info[row].tolist()
        ends = torch.tensor(self.counts, device="cpu").cumsum(0)
        local = int((ends <= row).sum())
        return {"token": token, "source": source, "expert": self.rank * self.local + local, "element": element}

    def of_expert(self, local: int, element: int) -> dict[str, Any]:
        """Return expert and element of a parameter, and the first token that the expert receives, if any, as a dict."""
        first = sum(self.counts[:local])
        place = self.of_row(first) if self.counts[local] else {}
        return place | {"expert": self.rank * self.local + local, "element": element}

    def rows_differ(self, stage: str, got: Tensor, want: Tensor, wrong: Tensor | None = None) -> dict[str, Any] | None:
        """Return the first difference of rows in expand_x order, in bits or where ``wrong`` is True, or None."""
        at = first_of(got, want, wrong)
        if at is None:
            return None
        row, element = at
        values = (want.reshape(len(want), -1)[row, element], got.reshape(len(got), -1)[row, element])
        return mismatch(stage, self.rank, *values, self.of_row(row, element))

    def dispatch_differs(self, rows: Tensor, scales: Tensor, counts: Tensor) -> dict[str, Any] | None:
        """Return the first difference of dispatch's counts, ``rows`` or ``scales`` from the reference, or None."""
        want = self.want
        if (at := first_of(counts, want.ep_recv_counts)) is not None:
            segment = at[0]
            expert = self.rank * self.local + segment // self.world
            where = {"expert": expert, "source": segment % self.world}
            values = want.ep_recv_counts[segment], counts[segment]
            return mismatch("dispatch", self.rank, *values, where, "ep_recv_counts")
        found = self.rows_differ("dispatch", rows, want.expand_x)
        if found is None and want.dynamic_scales is not None:
            found = self.rows_differ("dispatch", scales, want.dynamic_scales)
        return found

    def sums_differ(self, got: Tensor, want: Tensor) -> dict[str, Any] | None:
        """Return the first difference of combine's sums (BS, H), ``got`` from ``want``, or None."""
        at = first_of(got, want)
        if at is None:
            return None
        where = {"token": at[0], "source": self.rank, "element": at[1]}
        return mismatch("combine", self.rank, want[at], got[at], where)
