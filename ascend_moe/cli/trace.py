"""`ascend-moe trace`: a timeline of dispatch and combine, as trace JSON, a page, a picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .._text import Parser, table
from ..errors import ArgumentError
from ..timed import roundtrip
from ..timed.roundtrip import ALGORITHMS, OPS, PICKS, TraceRequest
from ..timeline import Timeline, chrome
from ..timeline import html as trace_html
from ..timeline import picture as trace_picture
from ..timeline.stats import longest_waits, op_runs
from . import options as shape_options
from .options import shape_of

_ABOUT = """Runs dispatch and combine and shows where the time goes.

Without --soc the kernels run on this CPU and the timeline is measured; with it, the timed engine runs
them and the timeline is predicted by a model of that SoC. Every output says which of the two it is."""


def main(argv: list[str]) -> int:
    """Exit code 0: the files are written. 1: one could not be. 2: wrong options."""
    options = _parser().parse_args(argv)
    request = _request(options)
    outputs = _outputs(options)
    timeline = roundtrip.predicted(request, options.soc) if options.soc else roundtrip.measured(request)
    print("\n".join(text(timeline)))
    for path, content in outputs:
        try:
            chrome.write_whole(path, content(timeline))
        except OSError as problem:
            print(f"ascend-moe trace: {path}: {problem.strerror}", file=sys.stderr)
            return 1
        print(f"wrote {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("trace", _ABOUT)
    add = parser.add_argument
    add("-r", "--ranks", type=int, default=2, metavar="W", help="EP ranks (default 2)")
    add("-b", "--bs", type=int, default=32, metavar="BS", help="tokens a rank (default 32)")
    shape_options.add_options(parser)
    add("--quant", action="store_true", help="int8 rows, quant_mode 2")
    add("--op", choices=OPS, default="both", help="default both")
    add("--algorithm", choices=ALGORITHMS, default="window", help="default window")
    add("--repeat", type=int, default=15, metavar="N", help="rounds that are recorded (default 15)")
    add("--pick", choices=tuple(PICKS), default="p10", help="which round to show (default p10)")
    add("--seed", type=int, default=0, help="of inputs and routing")
    add("--soc", metavar="NAME", help="predict for this SoC instead of measuring here")
    add("--out", default="trace.json", metavar="FILE", help="trace JSON for ui.perfetto.dev; - for none")
    add("--html", metavar="FILE", help="summary, one page without outside references")
    add("--svg", metavar="FILE", help="the summary's picture alone")
    return parser


def _request(options: argparse.Namespace) -> TraceRequest:
    return TraceRequest(
        ranks=options.ranks,
        batch=options.bs,
        **shape_of(options)._asdict(),
        quant=options.quant,
        op=options.op,
        algorithm=options.algorithm,
        repeat=options.repeat,
        seed=options.seed,
        pick=options.pick,
    )


def _outputs(options: argparse.Namespace) -> list[tuple[Path, chrome.Writer]]:
    """Files and what they hold; refused before anything runs when they cannot be written."""
    wanted: list[tuple[str | None, chrome.Writer]] = [
        (options.out if options.out != "-" else None, chrome.text),
        (options.html, trace_html.page),
        (options.svg, trace_picture.svg),
    ]
    found = [(Path(path), content) for path, content in wanted if path]
    for path, _ in found:
        if not path.absolute().parent.is_dir() or path.is_dir():
            raise ArgumentError(f"{path} must be a file in a folder that exists", argument="out")
    return found


def text(timeline: Timeline) -> list[str]:
    """The summary as lines."""
    lines = [f"{timeline.title} [{timeline.source}]"]
    if "rounds" in timeline.details:
        lines.append(f"rounds: {timeline.details['rounds']}")
    for run in op_runs(timeline):
        lines.append(f"{run.name}: {run.ns / 1000:.1f} µs on {len(run.ranks)} ranks, {run.cores} cores each")
        lines += table([trace_html.HEAD, *trace_html.phase_cells(run)])
        for waited in longest_waits(run)[:3]:
            lines.append(
                f"  rank {waited.wait.rank} waited {waited.wait.ns / 1000:.1f} µs for rank "
                f"{waited.store.rank}'s status, in {trace_picture.phase_name(waited.wait.phase)}"
            )
    if timeline.dropped:
        lines.append(f"{timeline.dropped} events were dropped for want of room")
    return lines
