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
    """Return row and column of the first differing element, by bits or as in ``wrong``; None if there is none."""
    unequal = torch.from_numpy(differing(got, want)) if wrong is None else wrong
    if not unequal.any():
        return None
    unequal = unequal.reshape(len(want), -1)
    row = int(unequal.any(1).int().argmax())
    return row, int(unequal[row].int().argmax())


def mismatch(stage: str, rank: int, want: Tensor, got: Tensor, where: dict[str, Any], what: str = "") -> dict[str, Any]:
    """Return the fields of a ReferenceMismatch and its text."""
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
    """The rows that dispatch brings to a rank, by the reference: their places in messages."""

    def __init__(self, want: DispatchResult, place: Place) -> None:
        self.want, self.rank, self.world = want, place.rank, place.world
        self.local = len(want.expert_token_nums)
        ends = want.ep_recv_counts[place.world - 1 :: place.world].tolist()
        self.counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def of_row(self, row: int, element: int | None = None) -> dict[str, Any]:
        """Return the place of a row of expand_x."""
        source, token, _ = self.want.assist_info[row].tolist()
        ends = torch.tensor(self.counts, device="cpu").cumsum(0)
        local = int((ends <= row).sum())
        return {"token": token, "source": source, "expert": self.rank * self.local + local, "element": element}

    def of_expert(self, local: int, element: int) -> dict[str, Any]:
        """Return the place of an element of an expert's parameter, with its first token here, if any."""
        first = sum(self.counts[:local])
        place = self.of_row(first) if self.counts[local] else {}
        return place | {"expert": self.rank * self.local + local, "element": element}

    def rows_differ(self, stage: str, got: Tensor, want: Tensor, wrong: Tensor | None = None) -> dict[str, Any] | None:
        """Return the first difference of rows in expand_x order."""
        at = first_of(got, want, wrong)
        if at is None:
            return None
        row, element = at
        values = (want.reshape(len(want), -1)[row, element], got.reshape(len(got), -1)[row, element])
        return mismatch(stage, self.rank, *values, self.of_row(row, element))

    def dispatch_differs(self, rows: Tensor, scales: Tensor, counts: Tensor) -> dict[str, Any] | None:
        """Return the first difference of dispatch's results."""
        want = self.want
        if (at := first_of(counts, want.ep_recv_counts)) is not None:
            segment = at[0]
            expert = self.rank * self.local + segment // self.world
            where = {"expert": expert, "source": segment % self.world}
            return mismatch(
                "dispatch", self.rank, want.ep_recv_counts[segment], counts[segment], where, "ep_recv_counts"
            )
        found = self.rows_differ("dispatch", rows, want.expand_x)
        if found is None and want.dynamic_scales is not None:
            found = self.rows_differ("dispatch", scales, want.dynamic_scales)
        return found

    def sums_differ(self, got: Tensor, want: Tensor) -> dict[str, Any] | None:
        """Return the first difference of combine's results."""
        at = first_of(got, want)
        if at is None:
            return None
        where = {"token": at[0], "source": self.rank, "element": at[1]}
        return mismatch("combine", self.rank, want[at], got[at], where)
