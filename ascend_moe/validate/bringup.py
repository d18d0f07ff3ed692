"""All bring-up probes in order: with ranks as threads on the twin, or as the ranks of torchrun.

The probes through dispatch and combine alone are here too, the same on the twin, the virtual NPU and an NPU:
each runs on all ranks, on a communicator of its own; ``run(rank's DevicePlace)`` returns what that rank saw.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ascend_moe
from ascend_moe import comm, settings
from ascend_moe.errors import AscendMoeError, CommError, CommTimeout
from ascend_moe.native import probe_results
from ascend_moe.ops.npu_communicator import soc_of
from ascend_moe.ops.npu_servers import ServerRecord, topology
from ascend_moe.plan import Request, plan
from ascend_moe.reference.cases import Case
from ascend_moe.validate import Device, times
from ascend_moe.validate.probes import FAIL, KERNEL_PROBES, PASS, SERVERS, SKIPPED, Judged, Probe, ProbeResult, Skipped
from ascend_moe.validate.probes_kernel import Npu, Twin
from ascend_moe.validate.run import run_case

from .run import DevicePlace

_COLLECT_S = 60.0
BATCH, TWO_LEVELS = "BatchWrite order", "two levels"
DEADLINE_S = 2.0
SOON_S = 1.0  # in which a failed communicator refuses
ALGORITHMS = ("window", "direct")  # whose phases are timed
PREDICTING = "the model's times"
LATE_S = 1.5  # after the deadline, by which a wait must have ended
Tell = Callable[[str], object]  # hears what begins now


def _compare(place: DevicePlace, case: Case) -> None:
    for result in run_case(place, case):
        assert result.ok, result.text.partition("\n")[2] or result.text


def _fresh(place: DevicePlace) -> str:
    _compare(place, Case("first op", place.world, ids="distinct", seed=1))
    return "the first op of a new communicator is right"


def _no_tokens(place: DevicePlace) -> str:
    for contract in (1, 2):
        _compare(place, Case("no tokens", place.world, contract=contract, batches="no tokens", seed=2))
        _compare(place, Case("one rank", place.world, contract=contract, batches="one rank only", seed=3))
    return "ranks with BS = 0 took part in 8 ops"


_lock = threading.Lock()
_short_ranks = 0  # ranks of this process that need a short deadline now: ranks may be threads
_before: str | None = None


@contextmanager
def _deadline() -> Iterator[None]:
    """The environment's deadline is short while any rank of this process is in here."""
    global _short_ranks, _before
    name = settings.TIMEOUT_S.name
    with _lock:
        if _short_ranks == 0:
            _before = os.environ.get(name)
            os.environ[name] = str(DEADLINE_S)
        _short_ranks += 1
    try:
        yield
    finally:
        with _lock:
            _short_ranks -= 1
            if _short_ranks == 0:
                os.environ.pop(name)
                os.environ.update({} if _before is None else {name: _before})


def _dispatch(place: DevicePlace) -> Any:
    out = ascend_moe.npu_moe_distribute_dispatch(*_arguments(place))
    ascend_moe.check()
    return out


def _arguments(place: DevicePlace) -> tuple[Any, ...]:
    x = torch.ones(4, 256, dtype=torch.bfloat16, device=place.device)
    ids = torch.tensor([[0, place.world]] * 4, dtype=torch.int32, device=place.device)
    return x, ids, place.group_ep, place.world, place.rank, 2 * place.world


def _abort(place: DevicePlace) -> str:
    """The last rank does not come; the others must say so at the deadline, and go on saying so at once."""
    if place.world < 2:
        raise Skipped("it takes two ranks")
    missing = place.world - 1
    _dispatch(place)  # all together, so that windows and kernels are there
    if place.rank == missing:
        time.sleep(DEADLINE_S + LATE_S)
        error = _failure(place)
        assert isinstance(error, CommError), f"the late rank got {error!r}"
        return f"the late rank raised {type(error).__name__}"
    start = time.monotonic()
    error = _failure(place)
    waited = time.monotonic() - start
    assert isinstance(error, CommTimeout), f"a missing rank gave {error!r}"
    assert error.rank == missing, f"rank {missing} was missing, the error names {error.rank}"
    assert 0.8 * DEADLINE_S <= waited <= DEADLINE_S + LATE_S, f"waited {waited:.1f} s, not {DEADLINE_S:g} s"
    start = time.monotonic()
    again = _failure(place)
    assert isinstance(again, CommError), f"the next op gave {again!r}"
    assert time.monotonic() - start < SOON_S, "the next op waited again"
    return f"CommTimeout about rank {missing} after {waited:.1f} s, the next op failed at once"


def _failure(place: DevicePlace) -> AscendMoeError | None:
    with _deadline():
        try:
            _dispatch(place)
        except AscendMoeError as error:
            return error
    return None


def _capture(place: DevicePlace) -> str:
    """A captured dispatch, replayed with other rows in the same places."""
    if place.device.type != "npu":
        raise Skipped("graphs are captured on NPUs, this device is cpu")
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
    return "2 replays, each with the rows of its time"


OP_PROBES = (
    Probe("first op", "a new communicator works without any preparation", _fresh),
    Probe("BS = 0 launch", "CANN launches an op on a rank without tokens", _no_tokens),
    Probe("abort", "a rank that does not come is named at the deadline; the failure stays", _abort),
    Probe("capture and replay", "a captured op runs again, on what its tensors hold then", _capture),
)


# ---- all of them, in order

_UNSAFE = f"the probe {SERVERS.name!r} failed, and this one reaches ranks by loads and stores"


def untold(what: str) -> None:
    """Stands for a Tell where nobody listens."""


def _probing(probe: Probe) -> str:
    return f"probe {probe.name!r}"


def on_threads(ranks: int, tell: Tell = untold) -> list[ProbeResult]:
    """All probes on the twin."""
    return kernel_findings(Twin(world=ranks), tell) + thread_findings(ranks, tell=tell)


def kernel_findings(device: Any, tell: Tell = untold) -> list[ProbeResult]:
    """Returns the kernel findings of the servers and of the probe kernel; on the twin in both of HCCL's layouts."""
    runs = [(probe, device) for probe in (SERVERS, *KERNEL_PROBES)]
    if isinstance(device, Twin) and device.layout == "a3":
        runs = [(probe, between_servers(device, probe.name)) for probe, _ in runs]
        runs.insert(2, (KERNEL_PROBES[0], replace(device, layout="a2")))
    findings = []
    for probe, where in runs:
        tell(_probing(probe))
        findings.append(probe.on(where))
    return findings


def between_servers(device: Twin, name: str) -> Twin:
    """The twin that a kernel probe takes: between servers where that is its subject, else ``device`` itself."""
    if name == BATCH:
        return replace(device, layout="a2", near=1)  # each rank on its own: BatchWrite carries all between them
    return replace(device, layout="a2", near=2, world=4) if name == TWO_LEVELS else device


def thread_findings(ranks: int, probes: Sequence[Probe] = OP_PROBES, tell: Tell = untold) -> list[ProbeResult]:
    """The probes through the ops, ranks as threads."""
    findings = []
    for probe in probes:
        tell(_probing(probe))
        verdicts: dict[int, Judged] = {}

        def body(rank: int, group_ep: str, probe: Probe = probe, verdicts: Any = verdicts) -> None:
            verdicts[rank] = _verdict(probe, DevicePlace(group_ep, ranks, rank, torch.device("cpu")))

        with comm.LocalCluster(ranks, window_mib=16) as cluster:
            cluster.run(body)
        findings.append(_together(probe, [verdicts[rank] for rank in range(ranks)]))
    return findings


def times_on_threads(ranks: int, tell: Tell = untold) -> list[times.Phase]:
    """Phases of both algorithms, ranks as threads, and what the model says of as many cores."""
    request, found = times.configuration(ranks), []
    with times.stamped():
        for algorithm in ALGORITHMS:
            tell(f"times of {algorithm}")
            with comm.LocalCluster(ranks, window_mib=_window_mib(request)) as cluster:

                def body(rank: int, group_ep: str, algorithm: str = algorithm) -> list[times.Round]:
                    return times.rounds(DevicePlace(group_ep, ranks, rank), request, algorithm)

                found += times.phases(cluster.run(body), algorithm)
    tell(PREDICTING)
    return times.with_prediction(found, request, "")


def _window_mib(request: Request) -> int:
    return plan(request).buffsize_mib


def times_in_group(
    device: Device, place: torch.device, findings: Sequence[ProbeResult], tell: Tell = untold
) -> list[times.Phase]:
    """The same on the ranks of the default group. Collective; only rank 0 has the phases.

    On NPUs not after the probe of the servers has failed, and direct only where what it rests on has passed.
    """
    rank, world, on_npu = dist.get_rank(), dist.get_world_size(), device.kind == "npu"
    passed = frozenset(finding.name for finding in findings if finding.verdict == PASS)
    if on_npu and SERVERS.name not in passed:
        return []
    safe = not on_npu or probe_results.allows("direct", passed)
    request, found = times.configuration(world), []
    store: Any = dist.distributed_c10d._get_default_store()
    with times.stamped():
        for algorithm in ALGORITHMS if safe else ALGORITHMS[:1]:
            tell(f"times of {algorithm}")
            name = comm.comm_name(dist.new_group())
            own = times.rounds(DevicePlace(name, world, rank, place), request, algorithm)
            store.set(f"ascend_moe/bringup/times/{algorithm}/{rank}", json.dumps(own))
            keys = [f"ascend_moe/bringup/times/{algorithm}/{other}" for other in range(world)]
            store.wait(keys, timedelta(seconds=_COLLECT_S))
            comm.close(name)
            if rank == 0:
                found += times.phases([json.loads(store.get(key)) for key in keys], algorithm)
    tell(PREDICTING)
    return times.with_prediction(found, request, soc_of(place) if on_npu else "") if rank == 0 else []


def in_group(device: Device, place: torch.device, tell: Tell = untold) -> tuple[list[ProbeResult], str]:
    """All probes on the ranks of the default group; each probe has a process group of its own. Collective.

    On NPUs none is run after that of the servers has failed, and what was found becomes this machine's verdict, which
    the sentence is about; "" on a CPU.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    kind = _kind_of_machine(place) if device.kind == "npu" else None
    if kind is not None:
        probe_results.forget(kind)  # where this does not come to its end, nothing is proven any more
    store: Any = dist.distributed_c10d._get_default_store()
    findings, unsafe = [], False
    probes = [*OP_PROBES]
    if device.kind == "cpu":
        # The twin is a device of one process; the others need not know what it shows.
        findings = kernel_findings(Twin(world=min(world, 4)), tell) if rank == 0 else []
    else:
        probes = [*(_by_rank(probe) for probe in (SERVERS, *KERNEL_PROBES)), *OP_PROBES]
    for number, probe in enumerate(probes):
        if unsafe:
            findings.append(probe.skipped(_UNSAFE))
            continue
        tell(_probing(probe))
        name = comm.comm_name(dist.new_group())
        seen = _verdict(probe, DevicePlace(name, world, rank, place))
        store.set(f"ascend_moe/bringup/{number}/{rank}", json.dumps(seen))
        keys = [f"ascend_moe/bringup/{number}/{other}" for other in range(world)]
        store.wait(keys, timedelta(seconds=_COLLECT_S))
        comm.close(name)  # when all are done with it; a failure that stays must not be the next probe's
        findings.append(_together(probe, [tuple(json.loads(store.get(key))) for key in keys]))
        unsafe = probe.name == SERVERS.name and findings[-1].verdict == FAIL
    return findings, "" if kind is None else _keep(kind, world, findings)


def _kind_of_machine(place: torch.device) -> probe_results.Machine:
    """What the verdict speaks for. Collective: the ranks tell each other their hosts."""
    store: Any = dist.distributed_c10d._get_default_store()
    mine = ServerRecord()
    store.set(f"ascend_moe/bringup/host/{dist.get_rank()}", json.dumps({"host": mine.host, "boot": mine.boot}))
    keys = [f"ascend_moe/bringup/host/{rank}" for rank in range(dist.get_world_size())]
    store.wait(keys, timedelta(seconds=_COLLECT_S))
    return probe_results.machine(soc_of(place), topology([ServerRecord(**json.loads(store.get(key))) for key in keys]))


def _keep(kind: probe_results.Machine, world: int, findings: Sequence[ProbeResult]) -> str:
    """Writes the verdict; a sentence about it."""
    try:
        meetings = next((finding.figures for finding in findings if finding.name == probe_results.BARRIER_PROBE), {})
        path = probe_results.write(kind, world, {finding.name: finding.verdict for finding in findings}, meetings)
        found = probe_results.read(path)
    except (OSError, AscendMoeError) as error:
        return f"verdict: not kept, {error}: export {settings.PROVEN.name} on all ranks instead"
    return (
        f"verdict: {probe_results.about(found)}; in {path}" if found is not None else f"verdict: {path} has gone again"
    )


def _by_rank(probe: Probe) -> Probe:
    """A probe of the kernel as one rank's part of it."""
    return replace(probe, run=lambda place: probe.run(Npu(place)))


def _verdict(probe: Probe, place: DevicePlace) -> Judged:
    """Verdict, detail and figures of one rank."""
    verdict, text, figures = probe.verdict(place)
    named = verdict != FAIL or text.startswith(f"rank {place.rank}, core")
    return verdict, text if named else f"rank {place.rank}: {text}", figures


def _together(probe: Probe, verdicts: Sequence[Judged]) -> ProbeResult:
    """The worst of all ranks, in each figure too."""
    verdict, text, _ = min(verdicts, key=lambda each: (FAIL, SKIPPED, PASS).index(each[0]))
    names = dict.fromkeys(name for each in verdicts for name in each[2])
    figures = {name: max(each[2].get(name, 0.0) for each in verdicts) for name in names}
    return ProbeResult(probe.name, probe.assumption, verdict, text, figures)
