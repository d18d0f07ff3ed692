"""The bounds that `make bench-check` checks: ratios within one run, never times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ascend_moe.bench.cases import Case, matrix
from ascend_moe.bench.methods import BARE, GROUPS, LIMIT, METHODS, OURS
from ascend_moe.bench.results import CaseResult, Run

TRIES = 3
ITERATIONS = 60


@dataclass(frozen=True)
class Bound:
    """A bound on a method's round trips: at most ``times`` x those of the bare exchange or of the machine's limit.

    ``against`` is then "bare" or "limit"; if it is another method, the bound is: at least ``times`` x faster than that.
    Medians are compared, if ``warm`` of calls that follow a call of the same method, in cases with one of ``ranks`` and
    at least ``tokens`` tokens per rank.
    """

    method: str
    against: str
    times: float
    tokens: int = 1
    warm: bool = False
    ranks: tuple[int, ...] = (2,)

    @property
    def of_kind(self) -> bool:
        """Whether ``against`` is "bare" or "limit": the fastest of that kind counts, ``times`` is an upper bound."""
        return self.against in (BARE, LIMIT)

    @property
    def text(self) -> str:
        if self.of_kind:
            what = "the bare exchange" if self.against == BARE else "the limit"
            return f"{self.method}: at most {self.times:g} x {what}{', warm' * self.warm}"
        return f"{self.method}: at least {self.times:g} x faster than {self.against}"


BOUNDS = (
    *(
        Bound(method, BARE, times, tokens=32, warm=warm)
        for method in ("direct", "direct-zero-copy")
        for times, warm in ((2.5, False), (3, True))
    ),
    Bound("direct", BARE, 5),
    Bound("window", BARE, 4, tokens=32),
    Bound("direct", "gloo-a2a-tuned", 5),
    Bound("direct", "mpi-a2a-tuned", 2),
    Bound("window", "gloo-a2a-tuned", 2.5),
    *(Bound(method, "gloo-a2a-tuned", 1, ranks=(4, 8)) for method in GROUPS[OURS]),
)
#: Preset, tokens and ranks of the cases.
SHAPES = (
    ("deepseek-v3", 8, 2),
    ("deepseek-v3", 32, 2),
    ("qwen3-235b", 32, 2),
    ("deepseek-v3", 32, 4),
    ("deepseek-v3", 32, 8),
)


@dataclass(frozen=True)
class BoundCheck:
    """Result of a bound in one case. ``ok`` None: it needs MPI, which did not run; ``seen``: the ratio, or why none."""

    bound: Bound
    ok: bool | None
    seen: str


def cases() -> list[Case]:
    return [matrix([preset], [ranks], [batch])[0] for preset, batch, ranks in SHAPES]


def judge(result: CaseResult) -> list[BoundCheck]:
    """Check the bounds that apply to a case. A bound whose method did not run fails, or for MPI's has ``ok`` None."""
    checks = []
    for bound in BOUNDS:
        if result.case.batch < bound.tokens or result.case.world not in bound.ranks:
            continue
        needed = [bound.method] if bound.of_kind else [bound.method, bound.against]
        absent = next((name for name in needed if result.row(name) is None), "")
        if absent:
            ok = None if METHODS[absent].needs_mpi else False
            why = result.missing.get(absent, "not among the methods")
            checks.append(BoundCheck(bound, ok, f" ({absent}: {why})"))
            continue
        ratio = ratio_of(bound, result)
        noise = " (of p10: more than half of the rows are noisy)" if result.too_noisy else ""
        ok = ratio <= bound.times if bound.of_kind else ratio >= bound.times
        checks.append(BoundCheck(bound, ok, f" = {ratio:.2f}{noise}"))
    return checks


def ratio_of(bound: Bound, result: CaseResult) -> float:
    """Return the median ratio that a bound limits; in a noisy case the ratio of the two p10, less sensitive to load."""
    ours = result.row(bound.method)
    if ours is not None and not result.too_noisy:
        ratios = ours.to.get(bound.against)
        return ours.faster[bound.against].p50 if ratios is None else (ratios.warm if bound.warm else ratios.cold).p50
    trips = [(row, (row.warm if bound.warm else row.round_trip).p10) for row in result.rows]
    own, other = (
        min(p10 for row, p10 in trips if name in (row.name, row.kind)) for name in (bound.method, bound.against)
    )
    return own / other if bound.of_kind else other / own


def check(measure: Callable[[Sequence[Case]], Run], say: Callable[[str], None]) -> bool:
    """Measure the cases and check their bounds; repeat those that fail, up to TRIES runs. Return whether all passed.

    ``say`` receives each result as a line of text, and in the end why cases that still fail may be due to load.
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
    """Return why the times of a case are not meaningful, such as load on the machine; "": they are."""
    reasons = []
    if result.too_noisy:
        reasons.append("more than half of the rows are noisy")
    if result.hindered:
        reasons.append(f"a rank's work took {result.hindrance:.2f} x as long while all ranks worked")
    if not reasons:
        return ""
    return f"{' and '.join(reasons)} (load average {result.load:g} on {result.cores} cores): measure again when idle"
