"""The table of a case on the terminal, and the sentences under it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ascend_moe.bench.methods import LIMIT, OURS
from ascend_moe.bench.results import NOISY, CaseResult, Run, Spread

_STYLE = {LIMIT: "dim", OURS: "bold"}
_TIMES = (
    "dispatch",
    "combine",
    "round trip p10 / p50 / p90",
    "GB/s a rank",
    "÷ limit",
    "p10 ÷ p10",
    "warm",
    "warm ÷ limit",
)
COLUMNS = ("method", *_TIMES, "checked")


def show(run: Run, console: Console, force: bool) -> None:
    """Where it ran; then of each case a table, notes, and the ratios in a sentence."""
    for line in about_lines(run.about):
        console.print(escape(line), highlight=False)
    for case in run.cases:
        table = Table(title=escape(case_title(case)), title_justify="left", title_style="bold")
        for number, name in enumerate(COLUMNS):
            table.add_column(escape(name), justify="right" if number else "left")
        claims = force or not case.too_noisy
        for row in case.rows:
            trip = row.round_trip
            cells = (
                row.name + (" *" if row.name == case.limit else "") + (" (noisy)" if trip.noisy else ""),
                f"{row.dispatch.p50:.0f}",
                f"{row.combine.p50:.0f}",
                f"{trip.p10:.0f} / {trip.p50:.0f} / {trip.p90:.0f}",
                f"{row.gb_per_s:.2f}",
                times_text(row.to_limit) if claims else "too noisy",
                f"{row.p10_to_limit:.2f}",
                f"{row.warm.p50:.0f}",
                f"{row.warm_to_limit.p50:.2f} x" if claims else "too noisy",
                "bit for bit" if row.exact else "within rounding",
            )
            table.add_row(*map(escape, cells), style=_STYLE.get(row.kind, ""))
        console.print(table)
        for line in notes(case):
            console.print(escape(f"  {line}"), style="yellow", highlight=False)
        console.print(escape(headline(case, force)), style="bold green", highlight=False, end="\n\n")


def about_lines(about: dict[str, Any]) -> list[str]:
    """Machine and versions, and how the ranks ran."""
    settings = ", ".join(f"{name}={value}" for name, value in about["settings"].items())
    busy = about["load_before"] > about["cores"] / 2
    return [
        f"{about['cpu']}, {about['cores']} cores, Linux {about['kernel']}, "
        f"load average {about['load_before']}, {about['date']}",
        f"torch {about['torch']}, {about['mpi'] or 'no MPI'}, Python {about['python']}, "
        f"{about['engine']} engine of the twin",
        f"rank r is pinned to core r modulo {about['cores']}; for all methods alike: {settings}",
        *["the machine was busy before the run began: measure again when it is not"] * busy,
    ]


def case_title(case: CaseResult) -> str:
    shape, n = case.case, case.rows[0].round_trip.n
    title = (
        f"{shape.name}: K {shape.topk}, E {shape.experts}, {shape.dispatch_bytes / 1e6:.2f} MB there and "
        f"{shape.combine_bytes / 1e6:.2f} MB back a rank, n = {n}, µs"
    )
    more = f"; more ranks than cores: {shape.world} ranks on {case.cores}" if case.oversubscribed else ""
    return title + more


def notes(case: CaseResult) -> list[str]:
    """Return what a reader of the table must know."""
    lines = [
        f"* the limit: the fastest of the three copies here, {case.limit}",
        "warm: right after two of the same calls; the other columns are of calls right after another method's",
    ]
    lines += [f"{name} left out: {why}" for name, why in case.missing.items()]
    noisy = [row.name for row in case.rows if row.round_trip.noisy]
    if noisy:
        lines.append(f"noisy (p50 more than {NOISY} x p10): {', '.join(noisy)}")
    if case.hindered:
        lines.append(
            f"a rank's work takes {case.hindrance:.2f} x as long while all work: they share a core's units, or the "
            "machine is busy. What a call executes then weighs more against the limit, which waits for memory"
        )
    firsts = ", ".join(f"{row.name} {row.first_us:.0f}" for row in case.rows if row.kind != LIMIT)
    lines.append(f"first call, µs, memory not touched before: {firsts}")
    return [*lines, f"load average {case.load}"]


def headline(case: CaseResult, force: bool = False) -> str:
    """One line of medians of ratios, or why there is none."""
    if case.too_noisy and not force:
        noisy = sum(row.round_trip.noisy for row in case.rows)
        return (
            f"{case.case.name}: no ratios claimed, {noisy} of {len(case.rows)} rows are noisy: "
            "run again on a quiet machine, or pass --force"
        )
    best = case.best_peer()
    words = []
    for row in case.rows:
        if row.kind == OURS:
            words.append(f"{row.name} {times_text(row.to_limit)} the limit (warm {row.warm_to_limit.p50:.2f} x)")
            for peer, ratio in row.faster.items():
                if peer.endswith("tuned") or (best and peer == best.name):
                    p50 = ratio.p50
                    speed = f"{p50:.1f} x faster" if p50 >= 1 else f"{1 / p50:.1f} x slower"
                    words[-1] += f", {speed} than {peer}"
    marks = [f"{case.case.world} ranks on {case.cores} cores"] if case.oversubscribed else []
    marks += ["noisy"] if case.too_noisy else []
    return f"{case.case.name}: {'; '.join(words)}" + (f" ({', '.join(marks)})" if marks else "")


def times_text(ratios: Spread) -> str:
    """Median of ratios with p10 and p90."""
    digits = 1 if ratios.p50 >= 10 else 2
    return f"{ratios.p50:.{digits}f} x ({ratios.p10:.{digits}f}..{ratios.p90:.{digits}f})"
