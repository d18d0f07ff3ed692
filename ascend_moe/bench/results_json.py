"""A run as JSON and back. The schema's name changes when the meaning of a field does."""

from __future__ import annotations

import math
from typing import Any

from ascend_moe.bench.cases import Case
from ascend_moe.bench.results import CaseResult, Limits, Row, Run
from ascend_moe.bench.statistics import Spread
from ascend_moe.errors import ArgumentError

SCHEMA = "ascend-moe-bench/1"
_DERIVED = ("oversubscribed", "cache_resident", "too_noisy")  # of a case, for readers of the file alone
_DIGITS = 4  # significant ones: more would be noise


def dump(run: Run, *, samples: bool) -> dict[str, Any]:
    """``samples``: every iteration's dispatch and combine, µs, too."""
    return {
        "schema": SCHEMA,
        "about": run.about,
        "limits": [_limits(one) for one in run.limits],
        "cases": [_case(one, samples) for one in run.cases],
    }


def load(values: dict[str, Any]) -> Run:
    """Undoes ``dump``.

    Raises:
        ArgumentError: another schema.
    """
    if values.get("schema") != SCHEMA:
        raise ArgumentError(f"schema is {values.get('schema')!r}; need {SCHEMA!r}", argument="schema")
    return Run(
        values["about"],
        [_load_limits(one) for one in values["limits"]],
        [_load_case(one) for one in values["cases"]],
    )


def _limits(one: Limits) -> dict[str, Any]:
    rates = {what: {str(n): _round(rate) for n, rate in by.items()} for what, by in one.rates.items()}
    flags = {how: _spread(flag) for how, flag in one.flags_ns.items()}
    return {**vars(one), "rates": rates, "flags_ns": flags}


def _load_limits(values: dict[str, Any]) -> Limits:
    rates = {what: {int(n): rate for n, rate in by.items()} for what, by in values["rates"].items()}
    flags = {how: _load_spread(flag) for how, flag in values["flags_ns"].items()}
    return Limits(**{**values, "rates": rates, "flags_ns": flags})


def _case(one: CaseResult, samples: bool) -> dict[str, Any]:
    found = {
        **vars(one),
        "case": one.case.as_dict(),
        "rows": [_row(row) for row in one.rows],
        "faster": {o: {p: _spread(s) for p, s in by.items()} for o, by in one.faster.items()},
        "oversubscribed": one.oversubscribed,
        "cache_resident": one.cache_resident,
        "too_noisy": one.too_noisy,
    }
    rounded = {
        m: {half: [_round(us) for us in all_] for half, all_ in by.items()} for m, by in one.samples.items()
    }
    return {**found, "samples": rounded if samples else {}}


def _load_case(values: dict[str, Any]) -> CaseResult:
    given = {name: value for name, value in values.items() if name not in _DERIVED}
    rows = [_load_row(row) for row in values["rows"]]
    faster = {o: {p: _load_spread(s) for p, s in by.items()} for o, by in values["faster"].items()}
    return CaseResult(**{**given, "case": Case(**values["case"]), "rows": rows, "faster": faster})


def _row(row: Row) -> dict[str, Any]:
    found = {
        name: _spread(value) if isinstance(value, Spread) else value for name, value in vars(row).items()
    }
    return {
        **found,
        "gb_per_s": _round(row.gb_per_s),
        "p10_to_limit": _round(row.p10_to_limit),
        "noisy": row.noisy,
    }


def _load_row(values: dict[str, Any]) -> Row:
    given: dict[str, Any] = {n: _load_spread(v) if isinstance(v, dict) else v for n, v in values.items()}
    given.pop("noisy")
    return Row(**given)


def _spread(one: Spread) -> dict[str, Any]:
    return {"p10": _round(one.p10), "p50": _round(one.p50), "p90": _round(one.p90), "n": one.n}


def _load_spread(values: dict[str, Any]) -> Spread:
    return Spread(**values)


def _round(value: float) -> float:
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, _DIGITS - 1 - math.floor(math.log10(abs(value))))
