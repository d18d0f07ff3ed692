"""`ascend-moe plan`: what a configuration needs, as text or JSON."""

from __future__ import annotations

import json

import typer

from ascend_moe import plan as planning
from ascend_moe._text import table
from ascend_moe.cli import options
from ascend_moe.plan import OpPlan, Report
from ascend_moe.plan.soc import DEFAULT_SOC

app = typer.Typer()


@app.command()
def plan(
    preset: options.Preset = None,
    ranks: options.Ranks = None,
    batch: options.Batch = None,
    global_bs: options.GlobalBatch = None,
    hidden: options.Hidden = None,
    topk: options.TopK = None,
    experts: options.Experts = None,
    dtype: options.Dtype = "bf16",
    quant: options.Quant = False,
    smooth: options.Smooth = False,
    contract: options.Contract = "v2",
    soc: options.Soc = DEFAULT_SOC,
    cores: options.Cores = 0,
    window: options.Window = 0,
    comm_alg: options.CommAlg = "",
    ranks_per_server: options.RanksPerServer = 0,
    as_json: options.Json = False,
) -> None:
    """What a configuration of dispatch and combine needs. Opens no window.

    Exit code 0: the operators take this configuration. 1: it breaks limits of ours. 2: wrong options.
    """
    given = locals()
    as_json = given.pop("as_json")
    report = planning.plan(options.request_of(exported=planning.exported_mib(0), **given))
    print(json.dumps(report.as_dict(), indent=2) if as_json else text(report))
    raise typer.Exit(0 if report.ok else 1)


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
