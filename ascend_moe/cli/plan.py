"""`ascend-moe plan`: what a configuration needs, as text or JSON."""

from __future__ import annotations

import argparse
import json
import os

from .. import plan as planning
from .._text import Parser, table
from ..comm.communicator import window_data_bytes
from ..errors import ArgumentError
from ..plan import OpPlan, Report, Request
from ..plan.soc import DEFAULT_SOC, SOCS
from . import options as shape_options
from .options import shape_of


def main(argv: list[str]) -> int:
    """Exit code 0: the operators take this configuration. 1: it breaks limits of ours. 2: wrong options."""
    parser = Parser("plan", "What a configuration of dispatch and combine needs. Opens no window.")
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args(argv)
    report = planning.plan(request_of(options))
    print(json.dumps(report.as_dict(), indent=2) if options.json else text(report))
    return 0 if report.ok else 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that describe a configuration; doctor has them too."""
    add = parser.add_argument
    add("-r", "--ranks", type=int, metavar="W", help="EP ranks (default 16)")
    add("-b", "--batch", type=int, metavar="BS", help="tokens a rank, the same on all (default 128)")
    add("--global-bs", type=int, metavar="N", help="ranks times the largest batch; batches may then differ")
    shape_options.add_options(parser)
    add("--dtype", default="bf16", metavar="|".join(planning.DTYPES), help="of x (default bf16)")
    add("--quant", action="store_true", help="int8 rows, quant_mode 2")
    add("--smooth", action="store_true", help="with smooth scales (implies --quant)")
    add("--contract", default="v2", metavar="|".join(planning.CONTRACTS), help="default v2")
    add("--soc", default=DEFAULT_SOC, metavar="NAME", help=f"{', '.join(SOCS)}; default {DEFAULT_SOC}")
    add("--cores", type=int, default=0, metavar="N", help="AIV cores of a launch (default: all of the SoC)")
    add("--window", type=int, default=0, metavar="MIB", help="HCCL_BUFFSIZE as it is, to compare with")
    add("--comm-alg", default="", metavar="NAME", help="window, direct or auto (default window)")
    add("--ranks-per-server", type=int, default=0, metavar="N", help="default: a full server of the SoC")


def request_of(options: argparse.Namespace, exported: int | None = None) -> Request:
    """The configuration that the options describe. ``exported``: HCCL_BUFFSIZE, None to look for it.

    Raises:
        ArgumentError: no such preset, or --batch and --global-bs both.
    """
    ranks = 16 if options.ranks is None else options.ranks
    if options.batch is not None and options.global_bs is not None:
        raise ArgumentError("--global-bs is ranks * batch: leave --batch out", argument="global_bs")
    batch = 128 if options.batch is None else options.batch
    if options.global_bs is not None:
        if options.global_bs < 1 or options.global_bs % max(1, ranks):
            text = f"--global-bs {options.global_bs} must be a multiple of the {ranks} ranks"
            raise ArgumentError(text, argument="global_bs")
        batch = options.global_bs // ranks

    return Request(
        ranks=ranks,
        **shape_of(options)._asdict(),
        batch=batch,
        equal_batches=options.global_bs is None,
        dtype=options.dtype,
        quant=options.quant or options.smooth,
        smooth=options.smooth,
        contract=options.contract,
        soc=options.soc,
        cores=options.cores,
        window_mib=options.window or (exported_mib(0) if exported is None else exported),
        ranks_per_server=options.ranks_per_server,
        comm_alg=options.comm_alg,
    )


def exported_mib(default: int) -> int:
    """HCCL_BUFFSIZE of this shell, ``default`` when it is not set.

    Raises:
        ArgumentError: it is no size that a window can have.
    """
    given = os.environ.get("HCCL_BUFFSIZE", "").strip()
    window_data_bytes()
    return int(given) if given else default


def text(report: Report) -> str:
    """The report in lines of plain text."""
    lines = [_head(report), ""]
    lines += [f"not possible: {one.message}" for one in report.violations]
    lines += [""] if report.violations else []
    lines += [*_window(report), "", *_cann(report)]
    for name, op in report.ops.items():
        lines += ["", f"{name}: algorithm {op.algorithm}, tiling key {op.tiling['tiling_key']}"]
        skipped = ("algorithm", "tiling_key", "transport")
        lines += table([[_words(key), value] for key, value in op.tiling.items() if key not in skipped])
        if op.tiling["transport"]:
            lines.append("  ranks of other servers are reached by RDMA")
        lines += [
            f"  UB of a core: {op.ub_peak:,} of {report.ub_bytes:,} bytes in the fullest step".replace(
                ",", " "
            )
        ]
        lines += table(_steps(op), "    ")
    return "\n".join(lines)


def _head(report: Report) -> str:
    one = report.request
    local = report.window["local_experts"]
    batch = f"BS {one.batch}" if one.equal_batches else f"BS up to {one.batch}"
    rows = f"{one.dtype} rows" + (", int8 on the way" if one.quant else "")
    return (
        f"{batch}, H {one.hidden}, K {one.topk}, E {one.experts} ({local} a rank), W {one.ranks}, {rows}, "
        f"contract {one.contract}\n{one.soc} ({report.soc.series}), {report.cores} AIV cores"
    )


def _window(report: Report) -> list[str]:
    need, exported = report.window, report.request.window_mib
    rows: list[list[object]] = [
        ["dispatch", need["dispatch_bytes"], "bytes", need["dispatch_mib"], "MiB"],
        ["combine", need["combine_bytes"], "bytes", need["combine_mib"], "MiB"],
    ]
    lines = ["window of a rank, both halves", *table(rows)]
    if need["state_in_window_mib"]:
        lines.append(f"  {need['state_in_window_mib']} MiB of it is the state area (A2)")
    lines.append(f"  export HCCL_BUFFSIZE={report.buffsize_mib}")
    if exported:
        lines[-1] += f"  (is {exported}: {'enough' if exported >= report.buffsize_mib else 'too small'})"
    return lines


def _cann(report: Report) -> list[str]:
    rows = [
        [one.version, one.mib, "MiB", f"refused: {one.refuses}" if one.refuses else ""] for one in report.cann
    ]
    return ["HCCL_BUFFSIZE for CANN's own operators, for comparison", *table(rows)]


def _steps(op: OpPlan) -> list[list[object]]:
    """Items of UB, each step's sum before its own."""
    rows: list[list[object]] = []
    for step in dict.fromkeys(item.step for item in op.ub):
        items = [item for item in op.ub if item.step == step]
        rows.append([step, "", sum(item.bytes for item in items)])
        rows += [["", item.name, item.bytes] for item in items]
    return rows


def _words(name: str) -> str:
    return name.replace("_", " ")
