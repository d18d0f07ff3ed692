"""`ascend-moe plan`: the needs of a configuration, as text or JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ascend_moe import plan as planning
from ascend_moe._text import show, table
from ascend_moe.call import DTYPES, SpecialExperts
from ascend_moe.cli import options
from ascend_moe.errors import ArgumentError
from ascend_moe.plan import OpPlan, PlanReport, WindowFit
from ascend_moe.settings import DEFAULT_WINDOW_MIB

app = typer.Typer()


@app.command()
@options.with_configuration
def plan(
    asked: dict[str, Any],
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Also print the window's parts, the needs of CANN's versions, and each op's tiling and UB.",
        ),
    ] = False,
    as_json: options.Json = "",
    checkpoint: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Take E, K, H and dtype from a Hugging Face checkpoint."),
    ] = None,
) -> None:
    """Print the recommended and the minimum HCCL_BUFFSIZE, the UB and the limits of a configuration.

    The window in use is --window, else HCCL_BUFFSIZE. If neither is set, the default is shown for comparison.

    Exit code 0: the operators accept this configuration. 1: it exceeds a limit. 2: wrong options.
    """
    asked["window"] = asked["window"] or planning.exported_mib(0)
    about = {} if checkpoint is None else _of_checkpoint(checkpoint, asked)
    rows, request = asked.pop("rows_of_a_token", 1), options.request_of(**asked)
    report = planning.plan(replace(request, batch=request.batch * rows))
    said = [about.pop("sentence"), text(report, details)] if about else [text(report, details)]
    show(report.as_dict() | about, as_json, lambda: print("\n".join(said)))
    raise typer.Exit(0 if report.ok else 1)


def _of_checkpoint(directory: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Store the layers' numbers in ``asked``; return the checkpoint's other properties, and a sentence about them."""
    for name in ("preset", "hidden", "topk", "experts", *SpecialExperts._fields):
        if asked[name] is not None:
            why = "conflicts with --checkpoint, which sets this number: remove one of the two"
            options.bad(f"--{name.replace('_', '-')}", why)
    from ascend_moe.checkpoint import kept_bits, layer_kinds
    from ascend_moe.checkpoint.config import moe_config, read_json, text_values

    try:
        values = read_json(directory)
        config = moe_config(values)
        has_files = any(directory.glob("*.safetensors*"))
        kinds = layer_kinds(directory) if has_files else {}
        routed = kinds.get("routed", []) + kinds.get("hash", [])
        # otherwise some layers send float rows
        coded = bool(routed) and all(kept_bits(directory, layer) > 0 for layer in routed)
    except ArgumentError as error:
        options.bad("--checkpoint", str(error))
    dtype = text_values(values).get("dtype") or text_values(values).get("torch_dtype")
    known = {name: short for short, name in DTYPES.items()}
    asked |= {"hidden": config.row_size, "topk": config.top_k // config.rows_of_a_token, "experts": config.num_experts}
    asked["rows_of_a_token"] = config.rows_of_a_token
    asked |= config.special._asdict()
    asked["quant"] = "int8" if coded else asked["quant"]
    asked["dtype"] = known.get(str(dtype), "bf16")
    found = {"model_type": text_values(values)["model_type"], "router": config.router, "activation": config.activation}
    found |= {"hidden_size": config.hidden_size}
    layers = ", ".join(f"{len(numbers)} {kind}" for kind, numbers in kinds.items() if numbers)
    named = ", ".join(f"{name.replace('hidden_size', 'hidden size')} {value}" for name, value in found.items())
    sentence = f"{named}; layers: {layers or 'no files, not known'}"
    return {"checkpoint": found | {"layers": kinds}, "sentence": sentence}


def text(report: PlanReport, details: bool = False) -> str:
    """Return the report as plain text: what to export and what fits; with ``details`` also window parts, tiling, UB."""
    lines = [_head(report), ""]
    for violation in report.violations:
        option = ": give --weights" if violation.argument == "expert_scales" else ""
        lines.append(f"not possible: {violation.message}{option}")
    if report.fit is None:  # no window would help
        return "\n".join(lines)
    lines += [""] if report.violations else []
    known = [need for need in report.cann if need.version.startswith(report.soc.series)]
    needs = [f"{need.mib} ({need.version})" for need in known if not need.refuses]
    cann = f"  CANN's own operators: {', '.join(needs) or 'none accepts this configuration'}"
    lines += [f"export HCCL_BUFFSIZE={report.buffsize_mib}", *_fit(report, report.fit), cann, ""]
    for name, op in report.ops.items():
        ub = f"UB of a core: {op.ub_peak:,} of {report.ub_bytes:,}".replace(",", " ")
        lines.append(f"{name}: algorithm {op.algorithm}, {ub} bytes at its peak, in step {op.fullest}")
    if not details:
        return "\n".join([*lines, "Use --details for the parts of the window, CANN's versions, tiling and UB."])
    lines += ["", *_window(report), "", *_cann(report)]
    for name, op in report.ops.items():
        lines += ["", f"{name}: tiling key {op.tiling['tiling_key']}"]
        skipped = ("algorithm", "tiling_key", "transport", "rdma_flags")
        tiling = {key: value for key, value in op.tiling.items() if key not in skipped}
        lines += table([[key.replace("_", " "), value] for key, value in tiling.items()])
        if op.tiling["transport"]:
            extra = report.window[f"{name}_flag_bytes"]
            flags = f", in flagged blocks: up to {extra} bytes more to each such rank" if extra else ""
            lines.append("  ranks of other servers are reached by RDMA" + flags)
        lines += ["  UB of a core in each step, in bytes", *table(_steps(op), "    ")]
    return "\n".join(lines)


def _head(report: PlanReport) -> str:
    one = report.request
    local = report.window["local_experts"]
    batch = f"BS {one.batch}" if one.equal_batches else f"BS up to {one.batch}"
    special = [f"{number} {name.split('_')[0]}" for name, number in one.special.given.items()]
    kinds = f" + {' + '.join(special)} experts" if special else ""
    rows = f"{one.dtype} rows" + (", sent as int8" if one.quant_mode else "")
    rows += ", smooth scales" if one.smooth else ""
    rows += ", sent with expert_scales" if one.weights else ""
    rows += ", returned as int8" if one.returns_int8 else ""
    return (
        f"{batch}, H {one.hidden}, K {one.topk}, E {one.experts} ({local} per rank){kinds}, W {one.ranks}, {rows}, "
        f"contract {one.contract}\n{one.soc} ({report.soc.series}), {report.cores} AIV cores"
    )


def _fit(report: PlanReport, fit: WindowFit) -> list[str]:
    """The windows that are large enough, and whether the current one is."""
    if fit.mib:
        return [f"  {fit.needs()}", f"  HCCL_BUFFSIZE={fit.about()}"]
    usual = planning.plan(replace(report.request, window_mib=DEFAULT_WINDOW_MIB)).fit
    assert usual is not None
    return [f"  {fit.needs()}", f"  HCCL_BUFFSIZE is not set: the default of {usual.about()}"]


def _window(report: PlanReport) -> list[str]:
    need = report.window
    rows: list[list[object]] = [
        ["dispatch", need["dispatch_bytes"], "bytes", need["dispatch_mib"], "MiB"],
        ["combine", need["combine_bytes"], "bytes", need["combine_mib"], "MiB"],
    ]
    lines = ["window of a rank, both ping-pong buffers", *table(rows)]
    if need["state_in_window_mib"]:
        lines.append(f"  {need['state_in_window_mib']} MiB of it is the state area (A2)")
    if need["aligned_mib"]:
        aligned = f"with HCCL_BUFFSIZE={need['aligned_mib']} or more, rows of both ops are aligned to 512 bytes"
        lines.append(f"  {aligned}; with less, to 32")
    return lines


def _cann(report: PlanReport) -> list[str]:
    rows = [[need.version, need.mib, "MiB", f"refused: {need.refuses}" if need.refuses else ""] for need in report.cann]
    more = max(need.state_kib for need in report.cann)
    state = f"  the state window of A3 V2 has {more} KiB more since {planning.cann_state_since()}"
    return ["HCCL_BUFFSIZE for CANN's own operators, for comparison", *table(rows), state]


def _steps(op: OpPlan) -> list[list[object]]:
    """Items of UB by step, each step preceded by its sum."""
    rows: list[list[object]] = []
    for step in dict.fromkeys(item.step for item in op.ub):
        items = [item for item in op.ub if item.step == step]
        rows.append([step, "", sum(item.bytes for item in items)])
        rows += [["", item.name, item.bytes] for item in items]
    return rows
