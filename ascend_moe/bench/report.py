"""The table of each case on the terminal, and the notes below it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ascend_moe.bench.methods import BARE, LIMIT, OURS
from ascend_moe.bench.results import NOISY, CaseResult, Run, Spread

_STYLE = {LIMIT: "dim", BARE: "dim", OURS: "bold"}
COLUMNS = (
    *("method", "dispatch", "combine", "round trip p10 / p50 / p90", "GB/s per rank"),
    *("÷ bare", "p10 ÷ p10", "÷ limit", "warm", "÷ bare", "÷ limit", "checked"),
)


def show(run: Run, console: Console, force: bool) -> None:
    """Print the machine, then a table, notes and a summary of each case; ``force``: ratios also in noisy cases."""
    for line in about_lines(run.about):
        console.print(escape(line), highlight=False)
    for case in run.cases:
        table = Table(title=escape(case_title(case)), title_justify="left", title_style="bold")
        for number, name in enumerate(COLUMNS):
            table.add_column(escape(name), justify="right" if number else "left")
        claims = force or not case.too_noisy
        for row in case.rows:
            trip, bare, limit = row.round_trip, row.to[BARE], row.to[LIMIT]
            cells = (
                row.name + (" *" if row.name in case.best.values() else "") + (" (noisy)" if trip.noisy else ""),
                f"{row.dispatch.p50:.0f}",
                f"{row.combine.p50:.0f}",
                f"{trip.p10:.0f} / {trip.p50:.0f} / {trip.p90:.0f}",
                f"{row.gb_per_s:.2f}",
                times_text(bare.cold) if claims else "too noisy",
                f"{bare.p10:.2f}",
                f"{limit.cold.p50:.2f}" if claims else "",
                f"{row.warm.p50:.0f}",
                f"{bare.warm.p50:.2f}" if claims else "",
                f"{limit.warm.p50:.2f}" if claims else "",
                "bit for bit" if row.exact else "within rounding",
            )
            table.add_row(*map(escape, cells), style=_STYLE.get(row.kind, ""))
        console.print(table)
        for line in notes(case):
            console.print(escape(f"  {line}"), style="yellow", highlight=False)
        console.print(escape(headline(case, force)), style="bold green", highlight=False, end="\n\n")


def about_lines(about: dict[str, Any]) -> list[str]:
    """Return lines of text on the machine, the versions and the settings in ``about``."""
    settings = ", ".join(f"{name}={value}" for name, value in about["settings"].items())
    busy = about["load_before"] > about["cores"] / 2
    return [
        f"{about['cpu']}, {about['cores']} cores ({about['caches']}), Linux {about['kernel']}, "
        f"load average {about['load_before']}, {about['date']}",
        f"torch {about['torch']}, {about['mpi'] or 'no MPI'}, Python {about['python']}, "
        f"{about['engine']} engine of the twin",
        f"rank r is pinned to core r modulo {about['cores']}; settings of all methods: {settings}",
        *["the machine was busy before the run: measure again when it is idle"] * busy,
    ]


def case_title(case: CaseResult) -> str:
    shape, n = case.case, case.rows[0].round_trip.n
    title = (
        f"{shape.name}: K {shape.topk}, E {shape.experts}, {shape.dispatch_bytes / 1e6:.2f} MB sent and "
        f"{shape.combine_bytes / 1e6:.2f} MB received back per rank, n = {n}, µs"
    )
    more = f"; more ranks than cores: {shape.world} ranks on {case.cores}" if case.oversubscribed else ""
    return title + more


def notes(case: CaseResult) -> list[str]:
    """Return the notes below a case's table: what its columns mean, what was omitted, and what disturbed it."""
    lines = [
        f"* the denominators: bare, an exchange of the rows with one flag per peer, fastest by {case.best[BARE]}; "
        f"limit, copies and sums without communication, fastest by {case.best[LIMIT]}",
        "warm and the columns after it: after two calls of the same method; the others: after a call of another method",
        "latency of a flag between the ranks' cores, ns: "
        f"{case.latency_ns[0]:.0f} before the case, {case.latency_ns[1]:.0f} after it",
    ]
    lines += [f"{name} omitted: {why}" for name, why in case.missing.items()]
    noisy = [row.name for row in case.rows if row.round_trip.noisy]
    if noisy:
        lines.append(f"noisy (p50 more than {NOISY} x p10): {', '.join(noisy)}")
    if case.hindered:
        lines.append(
            f"a rank's work takes {case.hindrance:.2f} x as long while all ranks work, because they share a core's "
            "units or the machine is busy. This slows down calls more than the limit, which is bound by memory"
        )
    firsts = ", ".join(f"{row.name} {row.first_us:.0f}" for row in case.rows if row.kind != LIMIT)
    lines.append(f"first call, µs, including page faults: {firsts}")
    return [*lines, f"load average {case.load}"]


def headline(case: CaseResult, force: bool = False) -> str:
    """Return a line with the median ratios of this package's methods, or why there are none."""
    if case.too_noisy and not force:
        noisy = sum(row.round_trip.noisy for row in case.rows)
        return (
            f"{case.case.name}: no ratios, {noisy} of {len(case.rows)} rows are noisy: "
            "run again on a quiet machine, or pass --force"
        )
    best = case.best_peer()
    words = []
    for row in case.rows:
        if row.kind == OURS:
            bare, limit = row.to[BARE], row.to[LIMIT]
            words.append(
                f"{row.name} {times_text(bare.cold)} the bare exchange (warm {bare.warm.p50:.2f} x), "
                f"{limit.cold.p50:.2f} x the limit"
            )
            for peer, ratio in row.faster.items():
                if peer.endswith("tuned") or (best and peer == best.name):
                    p50 = ratio.p50
                    speed = f"{p50:.1f} x faster" if p50 >= 1 else f"{1 / p50:.1f} x slower"
                    words[-1] += f", {speed} than {peer}"
    marks = [f"{case.case.world} ranks on {case.cores} cores"] if case.oversubscribed else []
    marks += ["noisy"] if case.too_noisy else []
    return f"{case.case.name}: {'; '.join(words)}" + (f" ({', '.join(marks)})" if marks else "")


def times_text(ratios: Spread) -> str:
    """Format ratios as "p50 x (p10..p90)"."""
    digits = 1 if ratios.p50 >= 10 else 2
    return f"{ratios.p50:.{digits}f} x ({ratios.p10:.{digits}f}..{ratios.p90:.{digits}f})"
