"""A timeline as one HTML page that opens anywhere: the picture, and tables of what it shows."""

from __future__ import annotations

from html import escape

from . import MEASURED, Timeline
from .picture import WIDTH, phase_name, svg
from .stats import OpRun, longest_waits, op_runs, phase_rows, rank_ns

_STYLE = f"""
body {{ margin: 24px auto; max-width: {WIDTH + 40}px; padding: 0 20px; color: #1c2430; background: #fff;
       font: 14px/1.5 Inter, "Segoe UI", Helvetica, Arial, sans-serif; }}
svg {{ max-width: 100%; height: auto; display: block; }}
h2 {{ font-size: 16px; margin: 28px 0 8px; }}
table {{ border-collapse: collapse; margin: 8px 0 16px; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid #e3e7ec; }}
th {{ font-weight: 600; color: #5b6675; vertical-align: bottom; }}
th:first-child, td:first-child {{ text-align: left; }}
p {{ margin: 6px 0; max-width: 90ch; }}
.note {{ color: #5b6675; }}
"""

_MEASURED_NOTE = (
    "Measured: the kernels ran on the CPU twin, whose cores take turns on one thread a rank; this machine's "
    "load is in it, and it says nothing about the speed of an NPU. Vector instructions and copies below "
    "4 KiB are not noted one by one."
)
_PREDICTED_NOTE = (
    "Predicted: a model of the SoC drove the same kernels; no NPU was measured. Figures of the model and "
    "where they come from: ascend-moe predict --help."
)


def page(timeline: Timeline) -> str:
    """The page, without references to anything outside itself."""
    title = timeline.title or "Timeline"
    body = [svg(timeline)]
    note = _MEASURED_NOTE if timeline.source == MEASURED else _PREDICTED_NOTE
    body.append(f"<p class='note'>{escape(note)}</p>")
    if timeline.dropped:
        lost = f"{timeline.dropped} events were dropped for want of room: the end is missing."
        body.append(f"<p><b>{lost}</b></p>")
    for run in op_runs(timeline):
        body += [f"<h2>{escape(run.name)}: {run.ns / 1000:.1f} µs</h2>", _phases(run), _waits(run)]
    if timeline.details:
        rows = [[name, value] for name, value in timeline.details.items()]
        body.append(f"<h2>What was run</h2>{_table(['', ''], rows)}")
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}: "
        f"{escape(timeline.source)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{''.join(cells)}</table>"


HEAD = ["step", "at work, µs", "slowest, µs", "of the op, %", "cores", "SyncAll, µs", "wait, µs", "MB"]


def phase_cells(run: OpRun) -> list[list[str]]:
    """A row a step, as text: time at work is when any core of a rank works in it, mean over ranks."""
    return [
        [
            phase_name(row.phase),
            f"{row.working / 1000:.1f}",
            f"{row.worst / 1000:.1f}",
            f"{100 * row.working / run.ns:.1f}",
            f"{row.cores:.1f}",
            f"{row.sync_all / 1000:.1f}",
            f"{row.wait / 1000:.1f}",
            f"{row.bytes / 1e6:.2f}",
        ]
        for row in phase_rows(run)
    ]


def _phases(run: OpRun) -> str:
    slowest = max(rank_ns(run).items(), key=lambda item: item[1])
    return (
        _table(HEAD, phase_cells(run))
        + "<p class='note'>Mean over ranks; slowest: the rank where it is longest; cores: how many work at "
        + "a time; SyncAll and wait: mean over cores. Rank "
        + f"{slowest[0]} took longest, {slowest[1] / 1000:.1f} µs.</p>"
    )


def _waits(run: OpRun) -> str:
    rows = [
        [
            f"rank {one.wait.rank}, core {one.wait.core}",
            f"rank {one.store.rank}, core {one.store.core}",
            phase_name(one.wait.phase),
            f"{one.wait.ns / 1000:.1f}",
            f"{(one.store.start_ns - run.start_ns) / 1000:.1f}",
            f"{(one.seen_ns - one.store.end_ns) / 1000:.1f}",
        ]
        for one in longest_waits(run)
    ]
    if not rows:
        return "<p class='note'>No core had to wait for another rank's status.</p>"
    head = ["longest wait of", "for status of", "in step", "waited, µs", "stored at, µs", "seen after, µs"]
    return _table(head, rows)
