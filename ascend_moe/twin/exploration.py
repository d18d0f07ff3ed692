"""What `Kernels.explore` found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exploration:
    """Schedules that ran, how many of them differed, and the first finding, if any.

    ``finding`` is the class of the finding ("race between cores", "hang", "wrong result", ...) or None,
    ``text`` its line. The same launch with mode="checked" and this seed and policy shows it again.
    """

    schedules: int
    distinct: int
    steps: int
    finding: str | None = None
    text: str | None = None
    seed: int | None = None
    policy: str | None = None

    @property
    def ok(self) -> bool:
        return self.finding is None

    def __str__(self) -> str:
        head = f"{self.schedules} schedules, {self.distinct} distinct, {self.steps} steps"
        return f"{head}: no finding" if self.ok else f"{head}: {self.text}"
