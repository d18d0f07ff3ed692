"""What `make bench-check` holds the ops to: ratios of one run, never times. The docs show them too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ascend_moe.bench.cases import Case, matrix
from ascend_moe.bench.methods import METHODS
from ascend_moe.bench.published import GLOO_TUNED, MPI_TUNED
from ascend_moe.bench.results import CaseResult, Run

LIMIT = "the limit"
TRIES = 3
ITERATIONS = 60


@dataclass(frozen=True)
class Rule:
    """On a median of ratios: ``method`` takes ``most`` x the limit, or is ``least`` x faster than a peer.

    ``aim``: what it is meant to reach, where that is more than it is held to.
    """

    method: str
    against: str
    most: float = 0.0
    least: float = 0.0
    aim: float = 0.0

    @property
    def text(self) -> str:
        if self.most:
            return f"{self.method}: at most {self.most:g} x {self.against}"
        return f"{self.method}: at least {self.least:g} x faster than {self.against}"

    def kept(self, value: float, bound: float = 0.0) -> bool:
        """Whether the ratio keeps the rule, or another bound in its place."""
        return value <= (bound or self.most) if self.most else value >= (bound or self.least)

    def reached(self, value: float) -> bool:
        """Whether the ratio is what was aimed at."""
        return self.kept(value, self.aim)


RULES = (
    Rule("direct", LIMIT, most=3, aim=2.5),
    Rule("direct-zero-copy", LIMIT, most=3, aim=1.6),
    Rule("direct", GLOO_TUNED, least=5),
    Rule("direct", MPI_TUNED, least=3),
    Rule("window", GLOO_TUNED, least=2),
)
# preset, BS; on 2 ranks
SHAPES = (("deepseek-v3", 8), ("deepseek-v3", 32), ("qwen3", 32))
RANKS = 2


@dataclass(frozen=True)
class Verdict:
    """``value``: the median of ratios; None where a method was not there. ``ok`` None: not judged."""

    rule: Rule
    case: str
    value: float | None
    ok: bool | None
    why: str = ""

    @property
    def text(self) -> str:
        word = {True: "ok", False: "FAIL", None: "skipped"}[self.ok]
        value = "" if self.value is None else f" = {self.value:.2f}"
        return f"{word:8}{self.case}: {self.rule.text}{value}{self.why and f' ({self.why})'}"


def cases() -> list[Case]:
    return [matrix([preset], [RANKS], [batch])[0] for preset, batch in SHAPES]


def judge(result: CaseResult) -> list[Verdict]:
    """Every rule on one case. MPI may be missing; ours and gloo may not. A noisy case proves nothing."""
    return [_one(rule, result) for rule in RULES]


def _one(rule: Rule, result: CaseResult) -> Verdict:
    name = result.case.name
    for method in (rule.method, rule.against):
        if method in METHODS and result.row(method) is None:
            why = result.missing.get(method, "not among the methods")
            return Verdict(rule, name, None, None if method == MPI_TUNED else False, f"{method}: {why}")
    row = result.row(rule.method)
    assert row is not None
    value = row.to_limit.p50 if rule.against == LIMIT else result.faster[rule.method][rule.against].p50
    kept = rule.kept(value)
    if kept and result.too_noisy:
        return Verdict(rule, name, value, False, "but more than half of the rows are noisy")
    return Verdict(rule, name, value, kept)


def check(measure: Callable[[Sequence[Case]], Run], say: Callable[[str], None]) -> bool:
    """Measures until every case has kept all rules within one run, at most TRIES times; says what it sees."""
    left = cases()
    for number in range(1, TRIES + 1):
        say(f"try {number} of {TRIES}: {', '.join(case.name for case in left)}")
        failed = []
        for result in measure(left).cases:
            verdicts = judge(result)
            for verdict in verdicts:
                say(f"  {verdict.text}")
            if any(verdict.ok is False for verdict in verdicts):
                failed.append(result.case)
        left = failed
        if not left:
            return True
    return False
