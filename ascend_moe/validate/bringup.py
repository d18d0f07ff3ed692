"""The steps of a bring-up, and the process that runs them for one rank or for ranks as threads (`Session`).

validate/supervisor.py starts such processes and survives them. This module also contains the probes that use dispatch
and combine only. They are the same on the twin, the virtual NPU and an NPU. Each runs on all ranks with its own
communicator; ``run(rank's DevicePlace)`` returns what it observed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

import ascend_moe
from ascend_moe import comm, settings
from ascend_moe.errors import AscendMoeError, CommError, CommTimeout
from ascend_moe.native import probe_results
from ascend_moe.ops import callbacks, npu_communicator
from ascend_moe.ops.npu_communicator import soc_of
from ascend_moe.ops.npu_servers import ServerRecord, module_of, topology
from ascend_moe.plan import plan
from ascend_moe.reference.cases import Case
from ascend_moe.validate import Device, open_group, probes, times
from ascend_moe.validate.probes import FAIL, FAULT, PASS, SERVERS, SKIPPED, Judged, Probe, ProbeResult, Skipped
from ascend_moe.validate.probes_kernel import Npu, Twin
from ascend_moe.validate.run import DevicePlace, Stopped, exchanged, run_case

_COLLECT_S = 60.0
BATCH, TWO_LEVELS = "BatchWrite order", "two levels"
DEADLINE_S = 2.0
SOON_S = 1.0  # limit for an op of a failed communicator to raise
ALGORITHMS = ("window", "direct")  # whose phases are timed
LATE_S = 1.5  # limit for a wait to end after the deadline
ROUNDS = "rounds"  # a figure that is no number: `times.rounds` of all ranks
WINDOW_MIB = 16  # of ranks as threads


def _compare(place: DevicePlace, case: Case) -> None:
    wrong = list[str]()
    try:
        for result in run_case(place, case):
            wrong += [result.text] * (not result.ok)
    except Stopped:
        if len(wrong) == 1:  # it names the op's error, which the exception carries; else a wrong result came before
            raise
    assert not wrong, wrong[0].partition("\n")[2] or wrong[0]


def _first_op(place: DevicePlace) -> str:
    _compare(place, Case("first op", place.world, ids="distinct", seed=1))
    return "the first op of a new communicator is right"


def _no_tokens(place: DevicePlace) -> str:
    for contract in (1, 2):
        _compare(place, Case("no tokens", place.world, contract=contract, batches="no tokens", seed=2))
        _compare(place, Case("one rank", place.world, contract=contract, batches="one rank only", seed=3))
    return "ranks with BS = 0 took part in 8 ops"


def _dispatch(place: DevicePlace) -> Any:
    out = ascend_moe.npu_moe_distribute_dispatch(*_arguments(place))
    ascend_moe.check()
    return out


def _arguments(place: DevicePlace) -> tuple[Any, ...]:
    x = torch.ones(4, 256, dtype=torch.bfloat16, device=place.device)
    ids = torch.tensor([[0, place.world]] * 4, dtype=torch.int32, device=place.device)
    return x, ids, place.group_ep, place.world, place.rank, 2 * place.world


def _abort(place: DevicePlace) -> str:
    """The last rank is missing; the others must report it at the deadline, and later ops immediately."""
    if place.world < 2:
        raise Skipped("it needs two ranks")
    missing = place.world - 1
    _dispatch(place)  # opens windows and loads kernels on all ranks
    if place.rank == missing:
        time.sleep(DEADLINE_S + LATE_S)
        error = _failure(place)
        assert isinstance(error, CommError), f"the late rank got {error!r}"
        return f"the late rank raised {type(error).__name__}"
    start = time.monotonic()
    error = _failure(place)
    waited = time.monotonic() - start
    assert isinstance(error, CommTimeout), f"a missing rank caused {error!r}"
    assert error.rank == missing, f"rank {missing} was missing, the error names rank {error.rank}"
    assert 0.8 * DEADLINE_S <= waited <= DEADLINE_S + LATE_S, f"waited {waited:.1f} s, not {DEADLINE_S:g} s"
    start = time.monotonic()
    again = _failure(place)
    assert isinstance(again, CommError), f"the next op raised {again!r}"
    assert time.monotonic() - start < SOON_S, "the next op waited again"
    return f"CommTimeout about rank {missing} after {waited:.1f} s, the next op failed at once"


def _failure(place: DevicePlace) -> AscendMoeError | None:
    soon = settings.TIMEOUT_S.within(str(DEADLINE_S))  # ranks on a CPU may be threads, which share it
    with soon if place.device.type == "npu" else callbacks.deadline(int(DEADLINE_S * 1e6)):
        try:
            _dispatch(place)
        except AscendMoeError as error:
            return error
    return None


def _capture(place: DevicePlace) -> str:
    """Capture a dispatch and replay it with other rows in the same tensors."""
    if place.device.type != "npu":
        raise Skipped("graphs can be captured on NPUs only, this device is the CPU")
    npu: Any = torch.npu  # type: ignore[attr-defined,unused-ignore]
    arguments = _arguments(place)
    ascend_moe.npu_moe_distribute_dispatch(*arguments)
    ascend_moe.check()
    graph = npu.NPUGraph()
    with npu.graph(graph):
        out = ascend_moe.npu_moe_distribute_dispatch(*arguments)
    for value in (2.0, 3.0):
        arguments[0].fill_(value)
        graph.replay()
        npu.synchronize()
        ascend_moe.check()
        rows = int(out[4][-1])
        owners = (0, place.world // 2)  # of the two ids, which every rank sends four rows
        expected = 4 * place.world * owners.count(place.rank)
        assert rows == expected, f"{rows} rows after a replay, not {expected}"
        assert bool((out[0][:rows] == value).all()), f"a replay did not send the rows of {value}"
    return "2 replays, each with the current rows"


OP_PROBES = (
    Probe("first op", "a new communicator works without any preparation", _first_op),
    Probe("BS = 0 launch", "CANN launches an op on a rank without tokens", _no_tokens),
    Probe("abort", "a missing rank is named at the deadline; the failure is permanent", _abort),
    Probe("capture and replay", "a replayed op uses the current contents of its tensors", _capture),
)


# ---- all steps, in order


@dataclass(frozen=True)
class Ranks:
    """The ranks of a bring-up.

    ``rank``: this one; ``threads``: all ranks are threads of one process; ``timed``: also time the phases of ops;
    ``variables``: environment of the process that runs the steps, by name; "" unsets one.
    """

    device: str  # as in `find`
    world: int
    rank: int = 0
    threads: bool = False
    timed: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A probe, or if ``algorithm`` is set the times of its phases. ``twin``: the probe's device; None: the ranks'."""

    probe: Probe
    twin: Twin | None = None
    algorithm: str = ""


def steps(kind: str, ranks: Ranks) -> list[Step]:
    """Return the steps for "npu" or "cpu", in order; on a CPU the twin runs kernel probes, one with both layouts."""
    kernels = (SERVERS, *probes.KERNEL_PROBES)
    if kind == "npu":
        todo = [Step(_by_rank(probe)) for probe in kernels]
    else:
        twin = Twin(world=ranks.world if ranks.threads else min(ranks.world, 4))
        todo = [Step(probe, between_servers(twin, probe.name)) for probe in kernels]
        todo.insert(2, Step(probes.KERNEL_PROBES[0], replace(twin, layout="a2")))
    todo += [Step(probe) for probe in OP_PROBES]
    return todo + [_times(algorithm) for algorithm in ALGORITHMS if ranks.timed]


def between_servers(device: Twin, name: str) -> Twin:
    """Return a copy of ``device`` with several servers if the kernel probe ``name`` needs them, else ``device``."""
    if name == BATCH:
        return replace(device, layout="a2", ranks_per_server=1)  # one rank per server: all transfers use BatchWrite
    return replace(device, layout="a2", ranks_per_server=2, world=4) if name == TWO_LEVELS else device


def _by_rank(probe: Probe) -> Probe:
    """Return a probe of the kernel that runs one rank's part."""
    return replace(probe, run=lambda place: probe.run(Npu(place)))


def _times(algorithm: str) -> Step:
    """Return the step whose figures are the rounds of `times.rounds`."""

    def run(place: DevicePlace) -> tuple[str, dict[str, Any]]:
        rounds = times.rounds(place, times.configuration(place.world), algorithm)
        return f"{len(rounds)} round trips", {ROUNDS: rounds}

    return Step(Probe(f"times of {algorithm}", "an op records when each phase begins", run), algorithm=algorithm)


def why_skipped(step: Step, kind: str, results: Sequence[ProbeResult]) -> str:
    """Return why a step must not run after these results, or "" if it may run, as always on other devices than NPUs.

    No step runs if the probe of the servers failed; direct is timed only if the probes that it needs passed.
    """
    if kind != "npu":
        return ""
    if any(result.name == SERVERS.name and result.status == FAIL for result in results):
        return f"the probe {SERVERS.name!r} failed, and this one uses loads and stores between ranks"
    passed = frozenset(result.name for result in results if result.status == PASS)
    missing = step.algorithm == "direct" and not probe_results.allows("direct", passed)
    return "a probe that direct needs did not pass" if missing else ""


def on_threads(probe: Probe, ranks: int, window_mib: int = WINDOW_MIB) -> list[Judged]:
    """Run a probe of the ops on threads of this process and return the result of each rank."""

    def body(rank: int, group_ep: str) -> Judged:
        return _of_rank(probe, DevicePlace(group_ep, ranks, rank, torch.device("cpu")))

    with comm.LocalCluster(ranks, window_mib=window_mib) as cluster:
        return cluster.run(body)


class Session:
    """Runs steps in this process, each with its own communicator.

    ``machine``: the kind of machine for which results are stored; None on a CPU. ``name``: of the process group, the
    same on all ranks, and used by no earlier session.
    """

    def __init__(self, ranks: Ranks, device: Device, name: str) -> None:
        self.ranks, self._group = ranks, ""
        self.machine: probe_results.Machine | None = None
        self._place = torch.device("cpu")
        if not ranks.threads:
            self._place = open_group(device, f"ascend_moe/bringup/{name}", ranks.rank, ranks.world)
        if device.kind == "npu":
            self.machine = _kind_of_machine(self._place)

    def run(self, step: Step) -> list[Judged]:
        """Run a step and return the results of this process's ranks; one with a twin runs on rank 0 only."""
        self._close_group()
        if step.twin is not None:
            return [step.probe.judge(step.twin)] if self.ranks.rank == 0 else []
        with settings.TIMESTAMPS.within("1" if step.algorithm else ""):
            if not self.ranks.threads:
                return [self._in_group(step.probe)]
            world = self.ranks.world
            window = plan(times.configuration(world)).buffsize_mib if step.algorithm else WINDOW_MIB
            return on_threads(step.probe, world, window)

    def _in_group(self, probe: Probe) -> Judged:
        self._group = comm.comm_name(dist.new_group())
        found = _of_rank(probe, DevicePlace(self._group, self.ranks.world, self.ranks.rank, self._place))
        opened = npu_communicator.known(self._group)
        if opened is not None and opened.links:
            found = found._replace(detail=f"{found.detail}; {opened.links}", links=opened.links)
        if found.status == FAIL and (error := device_error(self._place)):
            found = found._replace(status=FAULT, detail=f"{found.detail}\nthe device: {error}")
        return found

    def _close_group(self) -> None:
        """Close the communicator of the last step, which all ranks have left: its failure must not affect the next."""
        if self._group:
            comm.close(self._group)
        self._group = ""

    def close(self) -> None:
        """Close the communicator and leave the process groups."""
        self._close_group()
        if not self.ranks.threads:
            dist.destroy_process_group()


def device_error(place: torch.device) -> str:
    """Return the text of the error that a small computation on the device raises, or ""; on a CPU always ""."""
    if place.type == "cpu":
        return ""
    try:
        torch.ones(1, device=place).cpu()
    except RuntimeError as error:
        return str(error)
    return ""


def _kind_of_machine(place: torch.device) -> probe_results.Machine:
    """The kind of machine of this group. Collective: the ranks exchange their hosts."""
    store: Any = dist.distributed_c10d._get_default_store()
    mine = ServerRecord()
    of_rank = {"host": mine.host, "machine": mine.machine, "module": module_of(soc_of(place))}
    ranks = dist.get_rank(), dist.get_world_size()
    records = exchanged(store, "ascend_moe/bringup/host", ranks, of_rank, _COLLECT_S)
    return probe_results.machine(soc_of(place), topology([ServerRecord(**each) for each in records]))


def _of_rank(probe: Probe, place: DevicePlace) -> Judged:
    """The result of one rank, which a failure names."""
    found = probe.judge(place)
    named = found.status not in (FAIL, FAULT) or found.detail.startswith(f"rank {place.rank}, core")
    return found if named else found._replace(detail=f"rank {place.rank}: {found.detail}")


def of_all_ranks(probe: Probe, ranks: Sequence[Judged]) -> ProbeResult:
    """Return the worst of the ranks' results, with the largest value of each figure (`ROUNDS`: all values)."""
    order = FAULT, FAIL, SKIPPED, PASS
    # A rank that waited for another in vain has only seen what the other's result says.
    worst = min(ranks, key=lambda each: (order.index(each.status), each.waited))
    names = dict.fromkeys(name for each in ranks for name in each.figures)
    figures: dict[str, Any] = {}
    for name in names:
        of_ranks = [each.figures[name] for each in ranks if name in each.figures]
        figures[name] = of_ranks if name == ROUNDS else max(of_ranks)
    links = next((each.links for each in ranks if each.links), "")
    return ProbeResult(probe.name, probe.assumption, worst.status, worst.detail, figures, links)
