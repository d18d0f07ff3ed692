"""`ascend-moe tune`: a tuning table for shapes of dispatch and combine on a SoC, from the timed engine."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .._text import Parser, table
from ..errors import ArgumentError
from ..plan import DTYPES, Request
from ..plan.soc import DEFAULT_SOC, soc
from ..timed.costs import cost_table, known_socs
from ..timeline.chrome import write_whole
from ..tune_search import Choice, Search, entries_of
from ..tuning import VARIABLE, Entry, Table, load
from . import options as shape_options
from .options import shape_of

_ABOUT = """Searches AIV cores and their roles, rows in flight, rows of a copy and the algorithm of dispatch
and combine on a model of the SoC, and writes a table that the operators' tiling reads
(ASCEND_MOE_TUNING_TABLE).

All times are predictions of a model, no measurements. Nothing is taken that the model finds slower than the
tiling's own choice. Results of the operators are the same bits with any table."""
_ALGORITHMS = ("window", "direct")


def main(argv: list[str]) -> int:
    """Exit code 0: the table is written. 1: it could not be. 2: wrong options."""
    options = _parser().parse_args(argv)
    if options.check:
        found = load(options.check)
        print(f"{options.check}: {len(found.entries)} entries, hash {found.hash}")
        return 0
    shapes, out = _shapes(options), Path(options.out)
    if not out.absolute().parent.is_dir() or out.is_dir():
        raise ArgumentError(f"--out {out} must be a file in a folder that exists", argument="out")
    print(f"predicted (model) for {options.soc}; µs of the last of all ranks")
    began, evaluations = time.monotonic(), 0
    entries: list[Entry] = []
    rows: list[list[object]] = []
    for shape in shapes:
        choices = []
        for algorithm in _algorithms(options):
            search = Search(shape, algorithm, options.evaluations)
            try:
                choices += search.run()
            except ArgumentError as refused:  # e.g. direct between servers of A2
                if len(_algorithms(options)) == 1 or (algorithm == _ALGORITHMS[-1] and not choices):
                    raise
                print(f"{shape.ranks} ranks: without {algorithm}: {refused}")
            evaluations += search.evaluations
        entries += entries_of(shape, choices)
        rows += _rows(shape, choices)
        print(f"{shape.ranks} ranks, {shape.batch} tokens: done", file=sys.stderr)
    made = Table(tuple(entries), _about(options, evaluations))
    print("\n".join(table([_HEAD, *rows])))
    print(f"{evaluations} evaluations in {time.monotonic() - began:.0f} s; table {made.hash}")
    try:
        write_whole(out, made.text())
    except OSError as problem:
        print(f"ascend-moe tune: {out}: {problem.strerror}", file=sys.stderr)
        return 1
    print(f"wrote {out}; on all ranks: export {VARIABLE}={out.absolute()}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("tune", _ABOUT)
    add = parser.add_argument
    socs = f"{', '.join(known_socs())}; default {DEFAULT_SOC}"
    add("--soc", default=DEFAULT_SOC, metavar="NAME", help=socs)
    add("--ep", default="16", metavar="W,...", help="EP ranks (default 16)")
    add("-b", "--bs", default="32,128", metavar="BS,...", help="largest batches of a rank (default 32,128)")
    shape_options.add_options(parser)
    add("--dtype", default="bf16", choices=tuple(DTYPES), help="of x (default bf16)")
    add("--quant", action="store_true", help="int8 rows in dispatch")
    add("--algorithm", default="all", choices=("all", *_ALGORITHMS), help="default all")
    add("--evaluations", type=int, default=50, metavar="N", help="most a shape and algorithm (default 50)")
    add("--out", default="tuning.json", metavar="FILE", help="the table (default tuning.json)")
    add("--check", metavar="FILE", help="only read this table, and say what it is")
    return parser


def _numbers(text: str, name: str) -> list[int]:
    found = [int(one) if one.strip().isascii() and one.strip().isdigit() else 0 for one in text.split(",")]
    if min(found) < 1:
        raise ArgumentError(f"--{name} {text} must be whole numbers above 0, as in 8,16", argument=name)
    return sorted(set(found))


def _shapes(options: argparse.Namespace) -> list[Request]:
    if options.evaluations < 1:
        raise ArgumentError(f"--evaluations {options.evaluations} must be at least 1", argument="evaluations")
    cost_table(options.soc)
    shape = shape_of(options)._asdict()
    return [
        Request(
            ranks=ranks,
            **shape,
            batch=batch,
            dtype=options.dtype,
            quant=options.quant,
            soc=options.soc,
            cores=soc(options.soc).aiv,
        )
        for ranks, batch in itertools.product(_numbers(options.ep, "ep"), _numbers(options.bs, "bs"))
    ]


def _algorithms(options: argparse.Namespace) -> tuple[str, ...]:
    return _ALGORITHMS if options.algorithm == "all" else (options.algorithm,)


_HEAD = [
    *("ranks", "BS", "op", "algorithm", "untuned, µs", "tuned, µs", "gain, %"),
    *("other routing, %", "cores", "lists", "ring", "rows"),
]


def _rows(shape: Request, choices: Sequence[Choice]) -> list[list[object]]:
    """0 of cores, ring and rows: the tiling's own choice; of lists: all cores make them and publish rows."""
    ordered = sorted(choices, key=lambda one: (one.op != "dispatch", one.tuned_us))
    return [
        [
            *(shape.ranks, shape.batch, one.op, one.algorithm, f"{one.own_us:.1f}", f"{one.tuned_us:.1f}"),
            f"{100 * (1 - one.tuned_us / one.own_us):.1f}",
            f"{100 * (1 - one.other_tuned_us / one.other_own_us):.1f}",
            *(one.setting.cores, one.entry(shape).list_cores, one.setting.ring, one.setting.rows),
        ]
        for one in ordered
    ]


def _about(options: argparse.Namespace, evaluations: int) -> dict[str, object]:
    return {
        "made": "ascend-moe tune, on a model of the SoC: predictions, no measurements",
        "soc": options.soc,
        "evaluations": evaluations,
        "routing": "uniform",
    }
