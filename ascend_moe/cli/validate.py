"""`ascend-moe validate`: on an NPU, a virtual one or the CPU; alone, or as the ranks of torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from ascend_moe import settings
from ascend_moe import validate as validation
from ascend_moe.cli import options
from ascend_moe.comm.communicator import MAX_WORLD
from ascend_moe.errors import ArgumentError, AscendMoeError
from ascend_moe.reference.cases import DTYPES, Case
from ascend_moe.validate import bringup, devices, probes
from ascend_moe.validate.cases import matrix

app = typer.Typer()
DEFAULT_RANKS = 4
DEFAULT_TIMEOUT_S = "20"  # of a wait: enough where nothing is wrong, short where a rank does not come


@dataclass(frozen=True)
class _Wanted:
    """The options."""

    ranks: int | None
    seed: int
    extra: int
    dtypes: tuple[str, ...]
    as_json: bool

    def cases(self, world: int) -> Sequence[Case]:
        return matrix(world, self.seed, self.extra, self.dtypes)

    def arguments(self) -> list[str]:
        """For the ranks of torchrun."""
        return ["--seed", str(self.seed), "--extra", str(self.extra), "--dtypes", ",".join(self.dtypes)]


@app.command()
def validate(
    ranks: Annotated[
        int | None, typer.Option("-r", "--ranks", metavar="N", help="EP ranks; default: all NPUs, else 4.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="|".join(devices.KINDS), help="auto: an NPU if there is one.")
    ] = "auto",
    seed: Annotated[int, typer.Option(metavar="N", help="Of the tensors.")] = 0,
    extra: Annotated[int, typer.Option(metavar="N", help="Calls by chance, beside those by name.")] = 24,
    dtypes: Annotated[str, typer.Option(metavar="A,B", help="Of the rows.")] = ",".join(DTYPES),
    bring_up: Annotated[
        bool, typer.Option("--bringup", help="Instead: probe one by one what new silicon must do.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Dispatch and combine on all ranks, every result against the reference, bit for bit.

    Alone it starts the ranks itself; under torchrun it takes the ranks that are given.

    Exit code 0: all right. 1: a difference, a wrong error, or a rank that stopped. 2: wrong options.
    With --bringup 0: all probes passed. 1: one failed. 3: none failed, some cannot run here.
    """
    names = tuple(name for name in dtypes.split(",") if name)
    for name in names:
        if name not in DTYPES:
            raise ArgumentError(f"--dtypes {name!r} is none of {', '.join(DTYPES)}", argument="dtypes")
    if ranks is not None and not 1 <= ranks <= MAX_WORLD:
        raise ArgumentError(f"--ranks {ranks} must be in 1..{MAX_WORLD}", argument="ranks")
    here = devices.find(device)
    os.environ.setdefault(settings.TIMEOUT_S.name, DEFAULT_TIMEOUT_S)
    wanted = _Wanted(ranks, seed, extra, names, as_json)
    raise typer.Exit(_bring_up(here, wanted) if bring_up else _validate(here, wanted))


def _validate(device: devices.Device, wanted: _Wanted) -> int:
    if validation.under_torchrun():
        return _rank(device, wanted)
    npu = device.kind == "npu"
    ranks = wanted.ranks or (min(device.count, MAX_WORLD) if npu else DEFAULT_RANKS)
    if npu:
        return _start(device, ranks, wanted)
    outcome = validation.threads(ranks, wanted.cases(ranks))
    _print(outcome, wanted.as_json)
    return 0 if outcome.ok else 1


def _rank(device: devices.Device, wanted: _Wanted) -> int:
    """One rank of torchrun."""
    place, about = open_group(device)
    outcome = validation.processes(place, about, wanted.cases)
    path = settings.VALIDATE_OUTCOME.get()
    if outcome is not None and path:
        path.write_text(json.dumps({"text": validation.text(outcome), **outcome.as_dict()}))
    elif outcome is not None:
        _print(outcome, wanted.as_json)
    dist.destroy_process_group()
    return 0 if outcome is None or outcome.ok or path else 1


def open_group(device: devices.Device) -> tuple[torch.device, str]:
    """Joins torchrun's default group; this rank's device, and a sentence about it."""
    if device.kind == "npu":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.npu.set_device(local)  # type: ignore[attr-defined,unused-ignore]
        dist.init_process_group("hccl")
        return torch.device("npu", local), f"{device.about}, {dist.get_world_size()} processes, hccl"
    dist.init_process_group("gloo")
    return torch.device("cpu"), f"cpu, {dist.get_world_size()} processes, gloo"


def _start(device: devices.Device, ranks: int, wanted: _Wanted) -> int:
    """Starts torchrun on this machine and reports what its rank 0 leaves behind."""
    if ranks > device.count and not device.virtual:
        raise ArgumentError(f"--ranks {ranks}, but this machine has {device.count} NPUs", argument="ranks")
    code, outcome = outcome_of(ranks, wanted.arguments())
    if outcome is None:
        print(
            f"ascend-moe validate: rank 0 ended without a result (torchrun: exit code {code})",
            file=sys.stderr,
        )
        return 1
    text = outcome.pop("text")
    print(json.dumps(outcome, indent=2) if wanted.as_json else text)
    return 0 if outcome["ok"] else 1


def outcome_of(ranks: int, arguments: Sequence[str]) -> tuple[int, dict[str, Any] | None]:
    """`ascend-moe validate` on the NPUs of this machine: torchrun's exit code, and what rank 0 left."""
    with tempfile.TemporaryDirectory(prefix="ascend_moe_validate_") as folder:
        path = Path(folder) / "outcome.json"
        code = torchrun(
            ranks, ["validate", *arguments, "--device", "npu"], {settings.VALIDATE_OUTCOME.name: str(path)}
        )
        return code, json.loads(path.read_text()) if path.is_file() else None


def torchrun(ranks: int, command: Sequence[str], env: dict[str, str]) -> int:
    """`ascend-moe COMMAND` as ``ranks`` processes of this machine; torchrun's exit code."""
    # Not -m: torch_npu imports the module first, and Python warns about that.
    start = [sys.executable, "-c", "from torch.distributed.run import main; main()"]
    # The ranks run this very package: -m would take another one that lies in the current folder.
    here = str(Path(__file__).resolve().parents[2])
    rank = f"import sys; sys.path[0] = {here!r}; from ascend_moe.cli import main; main()"
    launch = ["--standalone", f"--nproc-per-node={ranks}", "--no-python", sys.executable, "-c", rank]
    return subprocess.run([*start, *launch, *command], env={**os.environ, **env}).returncode


def _print(outcome: validation.Outcome, as_json: bool) -> None:
    print(json.dumps(outcome.as_dict(), indent=2) if as_json else validation.text(outcome))


# ---- --bringup: all probes in order


def _bring_up(device: devices.Device, wanted: _Wanted) -> int:
    if validation.under_torchrun():
        return _probing_rank(device, wanted.as_json)
    if device.kind == "npu":
        return _start_probes(device, wanted)
    ranks = wanted.ranks or 2
    return _report(f"{device.about}, {ranks} ranks", bringup.on_threads(ranks), wanted.as_json)


def _report(about: str, findings: Sequence[probes.Finding], as_json: bool) -> int:
    """Prints the findings; returns the exit code."""
    if as_json:
        print(json.dumps({"device": about, "findings": probes.as_dicts(findings)}, indent=2))
    else:
        print("\n".join([about, "", *map(str, findings), "", probes.summary(findings)]))
    return probes.exit_code(findings)


def _probing_rank(device: devices.Device, as_json: bool) -> int:
    """One rank of torchrun."""
    place, about = open_group(device)
    findings = bringup.in_group(device, place)
    code = 0
    if dist.get_rank() == 0:
        path = settings.VALIDATE_OUTCOME.get()
        if path:
            path.write_text(json.dumps({"about": about, "findings": probes.as_dicts(findings)}))
        else:
            code = _report(about, findings, as_json)
            code = 0 if code == 3 else code  # torchrun takes it for a crash, and says so at length
    dist.destroy_process_group()
    return code


def _start_probes(device: devices.Device, wanted: _Wanted) -> int:
    ranks = wanted.ranks or device.count
    code, outcome = outcome_of(ranks, [*wanted.arguments(), "--bringup"])
    if outcome is None:
        raise AscendMoeError(f"bringup: rank 0 ended without a result (torchrun: exit code {code})")
    findings = [probes.Finding(**values) for values in outcome["findings"]]
    return _report(outcome["about"], findings, wanted.as_json)
