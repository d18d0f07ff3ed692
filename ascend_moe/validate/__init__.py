"""Comparison of dispatch and combine with the reference on all ranks; the first thing to run on a new cluster.

    result = validate.threads(4)       # ranks are threads of this process, on the CPU
    print(validate.text(result))

``processes`` runs one rank of torchrun, on NPUs (HCCL) or on the CPU (gloo).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from textwrap import indent
from typing import Any

import torch
import torch.distributed as dist

from ascend_vnpu import is_active

from .. import comm
from .._text import DEVICES, table
from ..errors import ArgumentError, need_one_of
from ..native.windows import ranks_per_server
from ..reference.cases import Case
from .cases import between_servers, matrix
from .run import DevicePlace, Result, Stopped, by_two_levels, exchanged, run_all

Progress = Callable[[int], None]  # receives the number of rank 0's results so far
Choose = Callable[[int], Sequence[Case]]  # number of ranks -> cases
SHOWN = 6  # differences printed in full
_COLLECT_S = 60.0  # wait of rank 0 for another rank's results, after its own


@dataclass(frozen=True)
class ValidationResult:
    """Results of all ranks. ``cases``: their number; ``stopped``: a sentence for each rank that did not finish."""

    world: int
    device: str
    cases: int
    seconds: float
    results: list[Result]
    stopped: list[str] = field(default_factory=list)
    ranks_per_server: int = 0  # 0: all of them
    two_levels: bool = False  # the ops ran hierarchy between servers

    @property
    def ok(self) -> bool:
        """Whether every rank made every call and every result was right."""
        return not self.stopped and bool(self.results) and all(result.ok for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts by op and mode, and every wrong result, as a dict for JSON."""
        names = ("ok", "world", "device", "ranks_per_server", "two_levels", "cases")
        return {
            **{name: getattr(self, name) for name in names},
            "seconds": round(self.seconds, 3),
            "counts": [
                {"op": op, "mode": mode, "checks": good + bad, "wrong": bad}
                for (op, mode), (good, bad) in counts(self.results).items()
            ],
            "stopped": self.stopped,
            "wrong": [asdict(result) for result in self.results if not result.ok],
        }


def fitting(cases: Sequence[Case], world: int, share: int) -> Sequence[Case]:
    """Return ``cases``; if calls run hierarchy in servers of ``share`` ranks: those it supports, changed to run it."""
    return between_servers(cases, share) if by_two_levels(world, share) else cases


def threads(
    world: int, cases: Sequence[Case] | None = None, progress: Progress = lambda done: None
) -> ValidationResult:
    """Run ``cases`` (None: `matrix`) on ranks that are threads of this process, with kernels on the twin (emulator)."""
    servers = ranks_per_server()
    chosen = fitting(matrix(world) if cases is None else cases, world, servers)
    found: list[list[Result]] = [[] for _ in range(world)]
    stopped: dict[int, str] = {}
    start, cpu = time.monotonic(), torch.device("cpu")

    def body(rank: int, group_ep: str) -> None:
        def note(result: Result) -> None:
            found[rank].append(result)
            if rank == 0:
                progress(len(found[0]))

        try:
            run_all(DevicePlace(group_ep, world, rank, cpu), chosen, note)
        except (Stopped, RuntimeError) as error:  # AscendMoeError is one
            stopped[rank] = _why(rank, error, found[rank])
            raise

    with comm.LocalCluster(world) as cluster, contextlib.suppress(Stopped, RuntimeError):
        cluster.run(body)
    results = [peer for ranks in found for peer in ranks]
    about, seconds = f"cpu, {world} ranks as threads of one process", time.monotonic() - start
    why = [stopped[rank] for rank in sorted(stopped)]
    return ValidationResult(world, about, len(chosen), seconds, results, why, servers, by_two_levels(world, servers))


def processes(
    device: torch.device, about: str, choose: Choose, progress: Progress = lambda done: None
) -> ValidationResult | None:
    """Run this process as one rank of the default group. Rank 0 returns the results of all ranks, the others None.

    ``about`` describes ``device``; ``choose`` returns the cases for a number of ranks. Results are sent through the
    group's store, because collectives may not work.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    cases, found, start = choose(world), list[Result](), time.monotonic()
    why, servers = "", 0
    try:
        place = DevicePlace(comm.comm_name(), world, rank, device)
        servers = comm.ranks_per_server(place.group_ep, world, rank)
        cases = fitting(cases, world, servers)

        def note(result: Result) -> None:
            found.append(result)
            progress(len(found))

        run_all(place, cases, note)
    except (Stopped, RuntimeError) as error:  # AscendMoeError is one
        why = _why(rank, error, found)
    store: Any = dist.distributed_c10d._get_default_store()
    own = {"why": why, "results": [asdict(each) for each in found]}
    everyone = exchanged(store, "ascend_moe/validate", (rank, world), own, _COLLECT_S)
    if rank != 0:
        with contextlib.suppress(RuntimeError):  # rank 0 owns the store: exit after it has read
            store.wait(["ascend_moe/validate/done"], timedelta(seconds=_COLLECT_S))
        return None
    results, stopped = list[Result](), list[str]()
    for other, one in enumerate(everyone):
        late = f"rank {other}: no results within {_COLLECT_S:g} s after rank 0 had its own"
        one = one or {"why": late, "results": []}
        results += [Result(**result) for result in one["results"]]
        stopped += [one["why"]] if one["why"] else []
    store.set("ascend_moe/validate/done", "1")
    seconds, two_levels = time.monotonic() - start, by_two_levels(world, servers)
    return ValidationResult(world, about, len(cases), seconds, results, stopped, servers, two_levels)


def _why(rank: int, error: BaseException, found: Sequence[Result]) -> str:
    what = str(error.__cause__ or error) or (found[-1].text.partition("\n")[0] if found else "")
    return f"rank {rank} stopped after {len(found)} results: {what}"


def counts(results: Sequence[Result]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (op, mode) -> numbers of right and wrong results: dispatch, combine, errors, each as modes first occur."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for result in sorted(results, key=lambda one: ("dispatch", "combine", "errors").index(one.op)):
        good, bad = found.get((result.op, result.mode), (0, 0))
        found[result.op, result.mode] = (good + result.ok, bad + (not result.ok))
    return found


def text(outcome: ValidationResult) -> str:
    """Format the results as plain text: counts, the first wrong results, stopped ranks, PASS or FAIL."""
    rows: list[list[object]] = [["op", "mode", "checks", "wrong"]]
    rows += [[op, mode, good + bad, bad or ""] for (op, mode), (good, bad) in counts(outcome.results).items()]
    lines = [
        f"{outcome.device}: {outcome.cases} calls of dispatch and combine on {outcome.world} ranks, "
        "compared with the reference bit for bit",
        *table(rows),
    ]
    if 0 < outcome.ranks_per_server < outcome.world:
        if outcome.two_levels:
            first = "hierarchy between them: V2 only, with expert_scales in dispatch,"
            second = "without smooth scales; sums are rounded once per server (docs/cluster.md)"
        else:  # RDMA, or its emulation
            first = "RDMA between them: V2's assist_info_for_combine begins with expand_idx"
            second = "instead of source indices, and was compared accordingly (docs/cluster.md)"
        lines += ["", f"several servers ({outcome.ranks_per_server} ranks each), {first}", second]
    wrong = [result for result in outcome.results if not result.ok]
    for difference in wrong[:SHOWN]:
        lines += [
            "",
            f"{difference.op}, {difference.mode}, {difference.case}, rank {difference.rank}:",
            indent(difference.text, "  "),
        ]
    if len(wrong) > SHOWN:
        lines += ["", f"and {len(wrong) - SHOWN} more wrong results (--json has all)"]
    lines += ["", *outcome.stopped] if outcome.stopped else []
    total = len(outcome.results)
    status = "PASS" if outcome.ok else "FAIL"
    lines += ["", f"{status}: {total - len(wrong)} of {total} results right, in {outcome.seconds:.1f} s"]
    return "\n".join(lines)


def under_torchrun() -> bool:
    """Return whether a launcher has assigned a rank to this process, in RANK and WORLD_SIZE."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


# ---- the device; torch_npu is imported only when needed


@dataclass(frozen=True)
class Device:
    """Where ops run. ``kind``: "npu" or "cpu"; ``about``: description; ``virtual``: an NPU of ``ascend-moe vnpu``."""

    kind: str
    about: str
    count: int = 1
    virtual: bool = False


def find(wanted: str = "auto") -> Device:
    """Return the "cpu" or an "npu"; "auto": an NPU if torch_npu finds one. Raises ArgumentError if there is none."""
    need_one_of("device", wanted, DEVICES)
    if wanted == "cpu":
        return Device("cpu", "cpu, kernels on the twin")
    found, why = _npu()
    if found is None and wanted == "npu":
        raise ArgumentError(f"there is no NPU: {why}; run `ascend-moe doctor`", argument="device")
    return found or Device("cpu", "cpu, kernels on the twin")


def _npu() -> tuple[Device | None, str]:
    if importlib.util.find_spec("torch_npu") is None:
        return None, "torch_npu is not installed"
    try:
        importlib.import_module("torch_npu")
        npu: Any = torch.npu  # type: ignore[attr-defined,unused-ignore]
        if not npu.is_available():
            return None, "torch_npu finds no device"
        name, count = str(npu.get_device_name(0)), int(npu.device_count())
    except Exception as error:  # a broken CANN raises many types
        return None, f"torch_npu cannot be used: {str(error).partition(chr(10))[0]}"
    virtual = is_active()
    return Device("npu", f"{'virtual ' if virtual else ''}npu, {name}", count, virtual), ""


def open_group(device: Device, name: str = "", rank: int = -1, world: int = -1) -> torch.device:
    """Open the default group of torchrun's ranks and return this rank's device.

    ``name``: "", or a prefix of the group's keys in the store at MASTER_ADDR, which another process hosts; later
    processes can open groups with other names. ``rank``, ``world``: -1: from the environment.
    """
    store: Any = None
    if name:
        c10d: Any = dist
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = c10d.PrefixStore(name, c10d.TCPStore(*address, is_master=False))
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # no rank of this group hosts it
    if device.kind == "cpu":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    torch.npu.set_device(local)  # type: ignore[attr-defined,unused-ignore]
    dist.init_process_group("hccl", store=store, rank=rank, world_size=world)
    return torch.device("npu", local)
