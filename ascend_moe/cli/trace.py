"""`ascend-moe trace`: a timeline of dispatch and combine, as trace JSON and as a chart."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_moe._text import OPS, PICKS, TRACED, filled, show, table, write_whole
from ascend_moe.call import QUANTS
from ascend_moe.cli import options
from ascend_moe.cli.options import bar, started

if TYPE_CHECKING:
    from ascendc_twin.timeline import Timeline
    from ascendc_twin.timeline.stats import OpRun

app = typer.Typer()
HEAD = ["step, µs", "work", "worst", "%", "cores", "SyncAll", "wait", "MB"]


@app.command()
def trace(
    ranks: Annotated[int, typer.Option("-r", "--ranks", metavar="W", help="EP ranks.")] = 2,
    batch: Annotated[int, typer.Option("-b", "--batch", metavar="BS", help="Tokens per rank.")] = 32,
    preset: options.Preset = None,
    hidden: options.Hidden = None,
    topk: options.TopK = None,
    experts: options.Experts = None,
    quant: options.Quant = "none",
    op: Annotated[str, typer.Option(metavar="|".join(OPS), help="Ops to run.")] = "both",
    comm_alg: Annotated[
        str, typer.Option("--comm-alg", metavar="|".join(TRACED), help="Algorithm of the ops.")
    ] = "auto",
    repeat: Annotated[int, typer.Option("--iterations", "-n", metavar="N", max=100_000, help="Rounds to record.")] = 15,
    pick: Annotated[str, typer.Option(metavar="|".join(PICKS), help="Round to show.")] = "p10",
    seed: Annotated[int, typer.Option(min=0, max=options.MAX_SEED, help="Seed of inputs and routing.")] = 0,
    soc: Annotated[str, typer.Option(metavar="NAME", help="Predict for this SoC instead of measuring here.")] = "",
    out: Annotated[Path | None, options.output("Write trace JSON for ui.perfetto.dev.")] = None,
    plot: Annotated[Path | None, options.output("Write an SVG chart.")] = None,
    as_json: options.Json = "",
) -> None:
    """Run dispatch and combine and show where the time goes.

    Without --soc the kernels run on this CPU and the timeline is measured. With --soc the timed engine runs
    them and the timeline is predicted by a model of that SoC. Every output states which of the two it is.

    Exit code 0: success. 2: wrong options, or a file that cannot be written.
    """
    from ascend_moe.predict import roundtrip
    from ascend_moe.predict.roundtrip import TraceRequest
    from ascendc_twin.timeline import chrome, picture

    shape = options.shape_of(preset, hidden, topk, experts)
    asked: dict[str, Any] = {"op": op, "algorithm": comm_alg, "repeat": repeat, "pick": pick, "seed": seed}
    request = TraceRequest(ranks=ranks, batch=batch, quant_mode=QUANTS[quant], **shape, **asked)
    how = f"prediction for {soc}" if soc else f"recording {repeat} rounds"
    begin = functools.partial(started, "trace", f"{request.title}; {how}")
    with bar("rounds"):
        timeline = roundtrip.predicted(request, soc, begin) if soc else roundtrip.measured(request, begin)
    show(as_dict(timeline), as_json, lambda: print("\n".join(text(timeline))))
    lines: list[str] = []
    for path, content in ((out, chrome.text), (plot, picture.svg)):
        if path is None:
            continue
        write_whole(path, content(timeline))
        lines.append(f"wrote {path}")
        if content is chrome.text:
            lines.append(f"open it at https://ui.perfetto.dev: Open trace file, {path.resolve()}")
    if lines and as_json != "-":
        print("\n".join(lines))


def as_dict(timeline: Timeline) -> dict[str, Any]:
    """Return the summary of a timeline as a dict for JSON; times in ns."""
    from ascendc_twin.timeline import picture
    from ascendc_twin.timeline.stats import longest_waits, op_runs, phase_rows

    def step(row: Any) -> dict[str, Any]:
        names = ("working", "worst", "cores", "sync_all", "wait", "bytes")
        return {"step": picture.phase_name(row.phase), **{name: getattr(row, name) for name in names}}

    def waited(longest: Any) -> dict[str, Any]:
        phase = picture.phase_name(longest.wait.phase)
        return {"rank": longest.wait.rank, "for_rank": longest.store.rank, "step": phase, "ns": longest.wait.ns}

    return {
        "title": timeline.title,
        "source": timeline.source,
        "details": timeline.details,
        "dropped": timeline.dropped,
        "ops": [
            {
                "op": run.name,
                "ns": run.ns,
                "ranks": len(run.ranks),
                "cores": run.cores,
                "steps": [step(row) for row in phase_rows(run)],
                "waits": [waited(longest_wait) for longest_wait in longest_waits(run)[:3]],
            }
            for run in op_runs(timeline)
        ],
    }


def text(timeline: Timeline) -> list[str]:
    """Return the summary of a timeline as lines of text; times in µs."""
    from ascendc_twin.timeline import picture
    from ascendc_twin.timeline.stats import longest_waits, op_runs

    lines = filled(f"{timeline.title} [{timeline.source}]".split())
    if "rounds" in timeline.details:
        lines += filled(timeline.details["rounds"].split(), "rounds: ")
    for run in op_runs(timeline):
        lines.append(f"{run.name}: {run.ns / 1000:.1f} µs on {len(run.ranks)} ranks, {run.cores} cores each")
        lines += table([HEAD, *_cells(run)], "")
        for waited in longest_waits(run)[:3]:
            words = f"waited {waited.wait.ns / 1000:.1f} µs for rank {waited.store.rank}'s status, in"
            lines += filled([*words.split(), picture.phase_name(waited.wait.phase)], f"  rank {waited.wait.rank} ")
    if timeline.dropped:
        lines.append(f"{timeline.dropped} events were dropped: the buffer was full")
    return lines


def _cells(run: OpRun) -> list[list[str]]:
    """One row per step. Work: time in which any core of a rank works in the step, mean over ranks."""
    from ascendc_twin.timeline import picture
    from ascendc_twin.timeline.stats import phase_rows

    rows = []
    for row in phase_rows(run):
        work = [f"{row.working / 1000:.1f}", f"{row.worst / 1000:.1f}", f"{100 * row.working / run.ns:.1f}"]
        blocked = [f"{row.cores:.1f}", f"{row.sync_all / 1000:.1f}", f"{row.wait / 1000:.1f}"]
        rows.append([picture.phase_name(row.phase), *work, *blocked, f"{row.bytes / 1e6:.2f}"])
    return rows
