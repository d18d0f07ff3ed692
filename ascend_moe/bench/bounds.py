"""The bounds that `make bench-check` checks: ratios within one run, never times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ascend_moe.bench.cases import Case, matrix
from ascend_moe.bench.methods import LIMIT, METHODS
from ascend_moe.bench.results import CaseResult, Run

TRIES = 3
ITERATIONS = 60


@dataclass(frozen=True)
class Bound:
    """A method takes at most ``times`` x the limit, or is at least so many times faster than a peer, by medians.

    Applies to cases with ``tokens`` or more tokens. With fewer, the limit's rows fit into L2, and the ratio depends
    mostly on the machine.
    """

    method: str
    against: str
    times: float
    tokens: int = 1

    @property
    def text(self) -> str:
        if self.against == LIMIT:
            return f"{self.method}: at most {self.times:g} x the limit"
        return f"{self.method}: at least {self.times:g} x faster than {self.against}"


BOUNDS = (
    Bound("direct", LIMIT, 5, tokens=32),
    Bound("direct-zero-copy", LIMIT, 5, tokens=32),
    Bound("direct", "gloo-a2a-tuned", 2.5),
    Bound("direct", "mpi-a2a-tuned", 1.8),
    Bound("window", "gloo-a2a-tuned", 1.6),
)
#: Preset and tokens of the cases, on 2 ranks.
SHAPES = (("deepseek-v3", 8), ("deepseek-v3", 32), ("qwen3-235b", 32))


@dataclass(frozen=True)
class BoundCheck:
    """Result of a bound. ``ok`` None: not applicable; ``seen``: the median ratio, or why there is none."""

    bound: Bound
    ok: bool | None
    seen: str


def cases() -> list[Case]:
    return [matrix([preset], [2], [batch])[0] for preset, batch in SHAPES]


def judge(result: CaseResult) -> list[BoundCheck]:
    """Check every bound on a case. A missing method fails, except one of MPI.

    Ratios are medians; in a noisy case the ratio of the two p10, which depends less on the load.
    """
    checks = []
    for bound in BOUNDS:
        if result.case.batch < bound.tokens:
            continue
        ours, peer = result.row(bound.method), result.row(bound.against)
        absent = bound.method if ours is None else bound.against if bound.against != LIMIT and not peer else ""
        if absent or ours is None:
            ok = None if METHODS[absent].needs_mpi else False
            why = result.missing.get(absent, "not among the methods")
            checks.append(BoundCheck(bound, ok, f" ({absent}: {why})"))
            continue
        of_limit = bound.against == LIMIT
        if result.too_noisy:
            ratio = ours.p10_to_limit if peer is None else peer.round_trip.p10 / ours.round_trip.p10
        else:
            ratio = (ours.to_limit if of_limit else ours.faster[bound.against]).p50
        ok = ratio <= bound.times if of_limit else ratio >= bound.times
        noise = " (of p10: more than half of the rows are noisy)" if result.too_noisy else ""
        checks.append(BoundCheck(bound, ok, f" = {ratio:.2f}{noise}"))
    return checks


def check(measure: Callable[[Sequence[Case]], Run], say: Callable[[str], None]) -> bool:
    """Measure until every case has passed all bounds within one run, at most TRIES times.

    Return whether all passed. If a case fails on a busy machine, the reason is printed.
    """
    left = cases()
    busy: list[str] = []
    for number in range(1, TRIES + 1):
        say(f"try {number} of {TRIES}: {', '.join(case.name for case in left)}")
        results = measure(left).cases
        judged = [(result.case, judge(result)) for result in results]
        for case, checks in judged:
            for each in checks:
                word = {True: "ok", False: "FAIL", None: "skipped"}[each.ok]
                say(f"  {word:8}{case.name}: {each.bound.text}{each.seen}")
        left = [case for case, checks in judged if any(each.ok is False for each in checks)]
        if not left:
            return True
        busy = [f"  {result.case.name} does not count: {why}" for result in results if (why := why_not(result))]
    for line in busy:
        say(line)
    return False


def why_not(result: CaseResult) -> str:
    """Return why the times of a case are not meaningful, such as load on the machine, or ""."""
    reasons = []
    if result.too_noisy:
        reasons.append("more than half of the rows are noisy")
    if result.hindered:
        reasons.append(f"a rank's work took {result.hindrance:.2f} x as long while all ranks worked")
    if not reasons:
        return ""
    return f"{' and '.join(reasons)} (load average {result.load:g} on {result.cores} cores): measure again when idle"
