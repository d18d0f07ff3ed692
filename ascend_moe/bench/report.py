"""The tables of a run on the terminal, and its sentences; the page in docs has the same in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ascend_moe.bench.methods import LIMIT, OURS
from ascend_moe.bench.results import CaseResult, Limits, Row, Run
from ascend_moe.bench.statistics import NOISY, Spread

_STYLE = {LIMIT: "dim", OURS: "bold"}
COLUMNS = (
    "method",
    "dispatch",
    "combine",
    "round trip p10 / p50 / p90",
    "GB/s a rank",
    "÷ limit",
    "p10 ÷ p10",
    "÷ {ours}",
    "checked",
)


def show(run: Run, console: Console, force: bool) -> None:
    """Everything, in the order of reading: where, limits, a table and a line a case."""
    for line in about_lines(run.about):
        console.print(escape(line), highlight=False)
    for one in run.limits:
        console.print(_table(*limit_table(one)))
    for case in run.cases:
        head, *rows = case_table(case, force)
        styles = [_STYLE.get(row.kind, "") for row in case.rows]
        console.print(_table(case_title(case), [head, *rows], styles))
        for line in notes(case):
            console.print(escape(f"  {line}"), style="yellow", highlight=False)
        console.print(escape(headline(case, force)), style="bold green", highlight=False)
        console.print()


def about_lines(about: dict[str, Any]) -> list[str]:
    """Machine and versions, and how the ranks ran."""
    settings = ", ".join(f"{name}={value}" for name, value in about["settings"].items())
    busy = about["load_before"] > about["cores"] / 2
    warning = ["the machine was busy before the run began: measure again when it is not"] if busy else []
    return [
        f"{about['cpu']}, {about['cores']} cores, L2 {about['l2_bytes'] / 2**20:g} MiB, "
        f"Linux {about['kernel']}, load average {about['load_before']}, {about['date']}",
        f"torch {about['torch']}, {about['mpi'] or 'no MPI'}, Python {about['python']}",
        f"our ops: {about['engine']} engine of the twin, {about['aiv_cores']} AIV cores a rank, "
        f"torch ops in {'C++' if about['compiled_ops'] else 'Python'}",
        f"rank r is pinned to core r modulo {about['cores']}; for all methods alike: {settings}",
        *warning,
    ]


def limit_table(one: Limits) -> tuple[str, list[list[str]]]:
    """Title and rows: what the machine does at best, by ranks at it at once."""
    title = (
        f"limits, {one.world} ranks, {one.bytes / 1e6:.2f} MB a rank ({one.case}): GB/s of all ranks together"
    )
    columns = list(range(1, one.world + 1))
    rows = [["", *(f"{n} rank{'s' * (n > 1)}" for n in columns)]]
    rows += [[what, *(f"{rates[n]:.1f}" for n in columns)] for what, rates in one.rates.items()]
    for how, flag in one.flags_ns.items():
        text = f"{flag.p10 / 1e3:.2f} / {flag.p50 / 1e3:.2f} / {flag.p90 / 1e3:.2f} µs"
        rows.append([f"flag one way, {how}: {text}", *[""] * len(columns)])
    return title, rows


def case_title(case: CaseResult) -> str:
    shape, n = case.case, case.rows[0].round_trip.n
    title = (
        f"{shape.name}: K {shape.topk}, E {shape.experts}, {shape.dispatch_bytes / 1e6:.2f} MB there and "
        f"{shape.combine_bytes / 1e6:.2f} MB back a rank, n = {n}, µs"
    )
    return title + (
        f" — oversubscribed: {shape.world} ranks on {case.cores} cores" if case.oversubscribed else ""
    )


def case_table(case: CaseResult, force: bool = False) -> list[list[str]]:
    """Head and rows of the main table; no ratios where the run is too noisy for them."""
    head = [column.format(ours=case.ours or "ours") for column in COLUMNS]
    return [head, *(_cells(row, case, force or not case.too_noisy) for row in case.rows)]


def _cells(row: Row, case: CaseResult, claim: bool) -> list[str]:
    trip = row.round_trip
    name = row.name + (" *" if row.name == case.limit else "") + (" (noisy)" if row.noisy else "")
    return [
        name,
        f"{row.dispatch.p50:.0f}",
        f"{row.combine.p50:.0f}",
        f"{trip.p10:.0f} / {trip.p50:.0f} / {trip.p90:.0f}",
        f"{row.gb_per_s:.2f}",
        times_text(row.to_limit) if claim else "too noisy",
        f"{row.p10_to_limit:.2f}",
        times_text(row.to_ours) if row.to_ours and claim else "",
        "bit for bit" if row.exact else "within rounding",
    ]


def notes(case: CaseResult) -> list[str]:
    """What a reader of the table must know."""
    found = [f"* the limit: the fastest of the three copies here, {case.limit}"]
    if case.cache_resident:
        size = case.case.combine_bytes / 1e6
        found.append(f"cache-resident: the {size:.2f} MB of one way fit into a core's L2")
    found += [f"{row.name}: {row.flag}" for row in case.rows if row.flag]
    found += [f"{name} left out: {why}" for name, why in case.missing.items()]
    noisy = [row.name for row in case.rows if row.noisy]
    if noisy:
        found.append(f"noisy (p50 more than {NOISY} x p10): {', '.join(noisy)}")
    firsts = ", ".join(f"{row.name} {row.first_us:.0f}" for row in case.rows if row.kind != LIMIT)
    found.append(f"first call, µs, memory not touched before: {firsts}")
    found.append(
        f"while measuring, ranks lost their core {case.switched_out} times and took "
        f"{case.page_faults} page faults; load average {case.load}"
    )
    return found


def headline(case: CaseResult, force: bool = False) -> str:
    """One line of medians of ratios, or why there is none."""
    if case.too_noisy and not force:
        noisy = sum(row.noisy for row in case.rows)
        return (
            f"{case.case.name}: no ratios claimed, {noisy} of {len(case.rows)} rows are noisy: "
            "run again on a quiet machine, or pass --force"
        )
    words = []
    for mine, peers in case.faster.items():
        row = case.row(mine)
        assert row is not None
        text = f"{mine} {times_text(row.to_limit)} the limit"
        best = case.best_peer()
        told = [peer for peer in peers if peer.endswith("tuned") or (best and peer == best.name)]
        text += "".join(f", {speed_text(peers[peer].p50)} than {peer}" for peer in told)
        words.append(text)
    marks = [f"{case.case.world} ranks on {case.cores} cores"] if case.oversubscribed else []
    marks += ["noisy"] if case.too_noisy else []
    return f"{case.case.name}: {'; '.join(words)}" + (f" ({', '.join(marks)})" if marks else "")


def speed_text(ratio: float) -> str:
    """Of a peer's time over ours."""
    return f"{ratio:.1f} x faster" if ratio >= 1 else f"{1 / ratio:.1f} x slower"


def times_text(one: Spread) -> str:
    """Median of ratios with p10 and p90."""
    digits = 1 if one.p50 >= 10 else 2
    return f"{one.p50:.{digits}f} x ({one.p10:.{digits}f}..{one.p90:.{digits}f})"


def _table(title: str, rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> Table:
    made = Table(title=escape(title), title_justify="left", title_style="bold")
    for i, name in enumerate(rows[0]):
        made.add_column(escape(name), justify="left" if i == 0 else "right")
    for i, row in enumerate(rows[1:]):
        made.add_row(*(escape(cell) for cell in row), style=styles[i] if i < len(styles) else "")
    return made
