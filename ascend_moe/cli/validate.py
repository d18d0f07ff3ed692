"""`ascend-moe validate`: on an NPU, a virtual one or the CPU; alone, or as the ranks of torchrun."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import validate
from .._text import Parser
from ..comm.communicator import MAX_WORLD
from ..errors import ArgumentError
from ..reference.cases import DTYPES, Case
from ..validate import devices
from ..validate.cases import matrix

DEFAULT_RANKS = 4
DEFAULT_TIMEOUT_S = "20"  # of a wait: enough where nothing is wrong, short where a rank does not come
OUTCOME = "ASCEND_MOE_VALIDATE_OUTCOME"  # where rank 0 leaves it for the process that started torchrun


def main(argv: list[str]) -> int:
    """Exit code 0: all right. 1: a difference, a wrong error, or a rank that stopped. 2: wrong options."""
    options = _parser().parse_args(argv)
    names = [name for name in options.dtypes.split(",") if name]
    for name in names:
        if name not in DTYPES:
            raise ArgumentError(f"--dtypes {name!r} is none of {', '.join(DTYPES)}", argument="dtypes")
    if options.ranks is not None and not 1 <= options.ranks <= MAX_WORLD:
        raise ArgumentError(f"--ranks {options.ranks} must be in 1..{MAX_WORLD}", argument="ranks")
    device = devices.find(options.device)
    os.environ.setdefault("ASCEND_MOE_TIMEOUT_S", DEFAULT_TIMEOUT_S)
    if options.bringup:
        from . import bringup as bringup_cli

        return bringup_cli.run(device, options, argv)

    def choose(world: int) -> Sequence[Case]:
        return matrix(world, options.seed, options.extra, tuple(names))

    if validate.under_torchrun():
        return _rank(device, choose, options)
    ranks = options.ranks or (min(device.count, MAX_WORLD) if device.kind == "npu" else DEFAULT_RANKS)
    if device.kind == "npu":
        return _start(device, ranks, argv)
    outcome = validate.threads(ranks, choose(ranks))
    _print(outcome, options.json)
    return 0 if outcome.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "validate",
        "Dispatch and combine on all ranks, every result against the reference, bit for bit.\n"
        "Alone it starts the ranks itself; under torchrun it takes the ranks that are given.",
    )
    add = parser.add_argument
    add("-r", "--ranks", type=int, metavar="N", help="EP ranks (default: all NPUs here, else 4)")
    add(
        "--device",
        default="auto",
        metavar="|".join(devices.KINDS),
        help="default auto: an NPU if there is one",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the tensors")
    add("--extra", type=int, default=24, metavar="N", help="calls by chance, beside those by name")
    add("--dtypes", default=",".join(DTYPES), metavar="A,B", help="of the rows")
    add("--bringup", action="store_true", help="instead: probe one by one what new silicon must do")
    add("--json", action="store_true", help="print JSON only")
    return parser


def _rank(device: devices.Device, choose: validate.Choose, options: argparse.Namespace) -> int:
    """One rank of torchrun."""
    place, about = open_group(device)
    outcome = validate.processes(place, about, choose)
    path = os.environ.get(OUTCOME)
    if outcome is not None and path:
        Path(path).write_text(json.dumps({"text": validate.text(outcome), **outcome.as_dict()}))
    elif outcome is not None:
        _print(outcome, options.json)
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


def _start(device: devices.Device, ranks: int, argv: list[str]) -> int:
    """Starts torchrun on this machine and reports what its rank 0 leaves behind."""
    if ranks > device.count and not device.virtual:
        raise ArgumentError(f"--ranks {ranks}, but this machine has {device.count} NPUs", argument="ranks")
    code, found = outcome_of(ranks, argv)
    if found is None:
        print(
            f"ascend-moe validate: rank 0 ended without a result (torchrun: exit code {code})",
            file=sys.stderr,
        )
        return 1
    text = found.pop("text")
    print(json.dumps(found, indent=2) if "--json" in argv else text)
    return 0 if found["ok"] else 1


def outcome_of(ranks: int, argv: Sequence[str]) -> tuple[int, dict[str, Any] | None]:
    """`ascend-moe validate` on the NPUs of this machine: torchrun's exit code, and what rank 0 left."""
    with tempfile.TemporaryDirectory(prefix="ascend_moe_validate_") as folder:
        path = Path(folder) / "outcome.json"
        code = torchrun(ranks, ["validate", *argv, "--device", "npu"], {OUTCOME: str(path)})
        return code, json.loads(path.read_text()) if path.is_file() else None


def torchrun(ranks: int, command: Sequence[str], env: dict[str, str]) -> int:
    """`ascend-moe COMMAND` as ``ranks`` processes of this machine; torchrun's exit code."""
    # Not -m: torch_npu imports the module first, and Python warns about that.
    start = [sys.executable, "-c", "from torch.distributed.run import main; main()"]
    # The ranks run this very package: -m would take another one that lies in the current folder.
    here = str(Path(__file__).resolve().parents[2])
    rank = f"import sys; sys.path[0] = {here!r}; from ascend_moe.cli import main; main()"
    options = ["--standalone", f"--nproc-per-node={ranks}", "--no-python", sys.executable, "-c", rank]
    return subprocess.run([*start, *options, *command], env={**os.environ, **env}).returncode


def _print(outcome: validate.Outcome, as_json: bool) -> None:
    print(json.dumps(outcome.as_dict(), indent=2) if as_json else validate.text(outcome))
