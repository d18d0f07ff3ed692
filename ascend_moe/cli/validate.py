"""`ascend-moe validate`: on NPUs, virtual NPUs or the CPU; alone, or as a rank of torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ascend_moe import settings
from ascend_moe._text import DEVICES, show
from ascend_moe.call import DTYPES
from ascend_moe.cli import options
from ascend_moe.cli.options import bad, bar, started, steps
from ascend_moe.errors import AscendMoeError, need, need_one_of
from ascend_moe.settings import MAX_WORLD

if TYPE_CHECKING:
    from ascend_moe import validate as validation
    from ascend_moe.validate.supervisor import BringUpResult

app = typer.Typer()
DEFAULT_RANKS = 4
RESULTS = "results of rank 0"
DEFAULT_TIMEOUT_S = "20"  # of a wait


@app.command()
def validate(
    ranks: Annotated[
        int | None, typer.Option("-r", "--ranks", metavar="N", help="EP ranks; default: all NPUs, else 4.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="|".join(DEVICES), help="auto: an NPU if there is one, else the CPU.")
    ] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=options.MAX_SEED, help="Seed of the tensors.")] = 0,
    extra: Annotated[int, typer.Option(min=0, max=100_000, help="Random calls, in addition to the fixed ones.")] = 24,
    dtype: Annotated[str, typer.Option(metavar="A,B", help="Element types of the rows.")] = ",".join(DTYPES),
    bring_up: Annotated[
        bool, typer.Option("--bringup", help="Instead probe, one by one, what the kernels assume of the hardware.")
    ] = False,
    times: Annotated[
        bool,
        typer.Option("--times", help="With --bringup: also print the time of each phase of an op, and the model's."),
    ] = False,
    one_card: Annotated[
        int | None, typer.Option("--one-card", metavar="W", help="Instead run W ranks (2, 4 or 8) on one device.")
    ] = None,
    comm_alg: options.CommAlg = "",
    as_json: options.Json = "",
) -> None:
    """Run dispatch and combine on all ranks and compare every result with the reference, bit for bit.

    The command starts its ranks itself; under torchrun it is one rank.

    Exit code 0: all equal. 1: a difference, a wrong error, or a rank that stopped. 2: wrong options.
    With --bringup 0: all probes passed. 1: one failed or faulted. 3: neither, but some cannot run (0 under torchrun).
    Probes run in processes of their own; results are printed, and appended to a file to send back, as they come.
    """
    names = tuple(dtype.split(","))
    for name in names:
        need_one_of("dtype", name, DTYPES)
    need(ranks is None or 1 <= ranks <= MAX_WORLD, "ranks", "is {}; need 1..{}", ranks, MAX_WORLD)
    if one_card is not None:
        if ranks is not None or bring_up:
            bad("--one-card", "sets the ranks: leave out --ranks and --bringup")
        raise typer.Exit(_one_card(one_card, device, (seed, extra), as_json))
    if times and not bring_up:
        bad("--times", "needs --bringup: give both")
    what = "" if not bring_up else "times" if times else "probes"
    own = [f"--seed={seed}", f"--extra={extra}", f"--dtype={dtype}", *["--bringup"] * bring_up, *["--times"] * times]
    with settings.COMM_ALG.within(comm_alg):
        raise typer.Exit(_validate(device, ranks, own, (seed, extra, names), what, as_json))


def _one_card(world: int, device: str, drawn: tuple[int, int], as_json: str) -> int:
    """Run all ranks on one device and return the command's exit code; ``drawn``: seed, number of random calls."""
    import torch

    from ascend_moe import validate as validation
    from ascend_moe.validate import one_card

    here = validation.find(device)
    started("validate", f"{world} ranks on one device, {here.about}")
    with bar("results") as advance:
        place = torch.device("npu", 0) if here.kind == "npu" else torch.device("cpu")
        result = one_card.validate(world, place, here.about, drawn, lambda *counts: advance("results", *counts))
    return _print({"text": validation.text(result), **result.as_dict()}, as_json)


def _validate(
    device: str,
    ranks: int | None,
    own: Sequence[str],
    drawn: tuple[int, int, tuple[str, ...]],
    bring_up: str,
    as_json: str,
) -> int:
    """Return the command's exit code.

    Args:
        own: its options, for the ranks that it starts.
        drawn: seed, number of random calls, and dtypes.
        bring_up: "", "probes", or "times" for both.
    """
    from ascend_moe import validate as validation
    from ascend_moe.native import binding, library
    from ascend_moe.native.windows import ranks_per_server
    from ascend_moe.validate.cases import matrix

    os.environ.setdefault(settings.TIMEOUT_S.name, DEFAULT_TIMEOUT_S)
    if bring_up and validation.under_torchrun():
        return _supervise(device, None, bring_up, as_json)
    here = validation.find(device)
    if validation.under_torchrun():
        return _rank(here, lambda world: matrix(world, *drawn), as_json)
    if here.kind == "npu":
        started("validate", here.about)
        return _start(here, ranks, own, bring_up, as_json)
    if bring_up:
        return _supervise(device, ranks or 2, bring_up, as_json)
    library.lib()  # reports a missing library before anything starts
    binding.library()
    ranks = ranks or DEFAULT_RANKS
    cases = validation.fitting(matrix(ranks, *drawn), ranks, ranks_per_server())
    started("validate", f"{len(cases)} calls of dispatch and combine on {ranks} ranks, {here.about}")
    with bar(RESULTS) as advance:
        most = 2 * len(cases)  # about: errors are results too
        result = validation.threads(ranks, cases, lambda done: advance(RESULTS, done, max(done, most)))
    return _print({"text": validation.text(result), **result.as_dict()}, as_json)


def _supervise(device: str, threads: int | None, bring_up: str, as_json: str) -> int:
    """Run the bring-up with ``threads`` ranks as threads, or one rank of torchrun (None).

    Rank 0 prints each result; with --json, all of them at the end.
    """
    from torch.distributed.rendezvous import rendezvous

    from ascend_moe.validate import bringup, supervisor

    store, rank, world = (None, 0, threads) if threads else next(iter(rendezvous("env://")))
    ranks = bringup.Ranks(device, world, rank, threads=bool(threads), timed=bring_up == "times")

    def show(line: object) -> None:
        if rank == 0 and as_json != "-":
            print(line, flush=True)

    with steps("validate", "probes") if rank == 0 else nullcontext(lambda step: None) as begin:
        outcome = supervisor.Supervisor(ranks, store, begin, show).run()
    path = settings.VALIDATE_OUTCOME.get()
    if rank == 0 and path:
        path.write_text(json.dumps(asdict(outcome)))
    elif rank == 0:
        code = _report(outcome, as_json)
        return 0 if code == 3 and not threads else code  # torchrun would report a crash
    return 0


def _rank(device: validation.Device, choose: validation.Choose, as_json: str) -> int:
    """Run one rank of torchrun. Rank 0 prints the result, or writes it for the process that started it."""
    import torch.distributed as dist

    from ascend_moe import validate as validation

    place, code = validation.open_group(device), 0
    first, ranks = dist.get_rank() == 0, dist.get_world_size()
    about = f"{device.about if device.kind == 'npu' else 'cpu'}, {ranks} processes, {dist.get_backend()}"
    if first:
        started("validate", f"calls of dispatch and combine on {ranks} ranks, {about}")
    most = 2 * len(choose(ranks))  # about: errors are results too, and some calls are refused between servers
    with bar(RESULTS) if first else nullcontext(lambda *counts: None) as advance:
        result = validation.processes(place, about, choose, lambda done: advance(RESULTS, done, max(done, most)))
    if result is not None:
        found, path = {"text": validation.text(result), **result.as_dict()}, settings.VALIDATE_OUTCOME.get()
        if path:
            path.write_text(json.dumps(found))
        else:
            code = _print(found, as_json)
    dist.destroy_process_group()
    return code


def _start(device: validation.Device, ranks: int | None, own: Sequence[str], bring_up: str, as_json: str) -> int:
    """Start torchrun on the NPUs of this machine and report what its rank 0 has written."""
    from ascend_moe.validate import probes, supervisor
    from ascend_moe.validate.times import Phase

    ranks = ranks or (device.count if bring_up else min(device.count, MAX_WORLD))
    if ranks > device.count and not device.virtual and not bring_up:
        bad("--ranks", f"{ranks}: use at most {device.count}, the NPUs of this machine")
    with tempfile.TemporaryDirectory(prefix="ascend_moe_validate_") as folder:
        path = Path(folder) / "outcome.json"
        env = {settings.VALIDATE_OUTCOME.name: str(path)}
        json_of_ranks = ["--json", "-"] * (as_json == "-" and bool(bring_up))  # they print nothing then
        code = torchrun(ranks, ["validate", *own, *json_of_ranks, "--device", "npu"], env)
        found = json.loads(path.read_text()) if path.is_file() else None
    why = f"rank 0 ended without a result (torchrun: exit code {code})"
    if bring_up:
        if found is None:
            raise AscendMoeError(f"bringup: {why}; see the ranks' errors above")
        found["results"] = [probes.ProbeResult(**result) for result in found["results"]]
        found["phases"] = [Phase(**phase) for phase in found["phases"]]
        return _report(supervisor.BringUpResult(**found), as_json)
    if found is None:
        print(f"ascend-moe validate: {why}", file=sys.stderr)
        return 1
    return _print(found, as_json)


def torchrun(ranks: int, command: Sequence[str], env: dict[str, str]) -> int:
    """Run `ascend-moe COMMAND` by torchrun as ``ranks`` processes, with ``env`` added; return torchrun's exit code."""
    # Not -m: torch_npu imports the module before, and Python warns about that.
    start = [sys.executable, "-c", "from torch.distributed.run import main; main()"]
    # -m would import a package of the same name in the current folder.
    here = str(Path(__file__).resolve().parents[2])
    rank = f"import sys; sys.path = [{here!r}, *filter(None, sys.path)]; from ascend_moe.cli import main; main()"
    launch = ["--standalone", f"--nproc-per-node={ranks}", "--no-python", sys.executable, "-c", rank]
    return subprocess.run([*start, *launch, *command], env={**os.environ, **env}).returncode


def _print(result: dict[str, Any], as_json: str) -> int:
    """Print a result and return the exit code."""
    text = result.pop("text")
    show(result, as_json, lambda: print(text))
    return 0 if result["ok"] else 1


def _report(outcome: BringUpResult, as_json: str) -> int:
    """Print what follows the results of --bringup, or all of it as JSON; return the exit code."""
    from ascend_moe.validate import probes, times

    results, phases = outcome.results, outcome.phases
    lines = ["", probes.summary(results), *[outcome.stored] * bool(outcome.stored), f"results: {outcome.path}"]
    if phases:
        lines += ["", *times.lines(phases, times.configuration(outcome.ranks))]
    printed = {"device": outcome.about, "probes": [asdict(result) for result in results], "stored": outcome.stored}
    printed["file"] = outcome.path
    if phases:
        printed["times"] = [asdict(phase) for phase in phases]
    show(printed, as_json, lambda: print("\n".join(lines)))
    return probes.exit_code(results)
