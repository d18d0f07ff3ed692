"""The bring-up: all probes in order, on ranks that are threads on the twin or processes of torchrun.

This module also contains the probes that use dispatch and combine only. They are the same on the twin, the virtual
NPU and an NPU. Each runs on all ranks with its own communicator; ``run(rank's DevicePlace)`` returns what it observed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ascend_moe.ops import npu_communicator
from ascend_moe.ops.npu_communicator import soc_of
from ascend_moe.ops.npu_servers import ServerRecord, module_of, topology
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
SOON_S = 1.0  # limit for an op of a failed communicator to raise
ALGORITHMS = ("window", "direct")  # whose phases are timed
PREDICTING = "the model's times"
LATE_S = 1.5  # limit for a wait to end after the deadline
Progress = Callable[[str], object]  # receives the name of the step that begins


def _compare(place: DevicePlace, case: Case) -> None:
    for result in run_case(place, case):
        assert result.ok, result.text.partition("\n")[2] or result.text


def _first_op(place: DevicePlace) -> str:
    _compare(place, Case("first op", place.world, ids="distinct", seed=1))
    return "the first op of a new communicator is right"


def _no_tokens(place: DevicePlace) -> str:
    for contract in (1, 2):
        _compare(place, Case("no tokens", place.world, contract=contract, batches="no tokens", seed=2))
        _compare(place, Case("one rank", place.world, contract=contract, batches="one rank only", seed=3))
    return "ranks with BS = 0 took part in 8 ops"


_lock = threading.Lock()
_short_ranks = 0  # ranks (threads) of this process that currently need a short deadline
_before: str | None = None


@contextmanager
def _deadline() -> Iterator[None]:
    """Shorten the deadline in the environment while any rank of this process is in the block."""
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
    with _deadline():
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


# ---- all probes, in order

_UNSAFE = f"the probe {SERVERS.name!r} failed, and this one uses loads and stores between ranks"


def silent(step: str) -> None:
    """Ignore the step; a Progress for callers that show none."""


def _probing(probe: Probe) -> str:
    return f"probe {probe.name!r}"


def on_threads(ranks: int, progress: Progress = silent) -> list[ProbeResult]:
    """Run all probes on the twin."""
    return kernel_results(Twin(world=ranks), progress) + thread_results(ranks, progress=progress)


def kernel_results(device: Any, progress: Progress = silent) -> list[ProbeResult]:
    """Run the probes of the servers and of the probe kernel; on the twin with both layouts of HCCL's context."""
    runs = [(probe, device) for probe in (SERVERS, *KERNEL_PROBES)]
    if isinstance(device, Twin) and device.layout == "a3":
        runs = [(probe, between_servers(device, probe.name)) for probe, _ in runs]
        runs.insert(2, (KERNEL_PROBES[0], replace(device, layout="a2")))
    results = []
    for probe, where in runs:
        progress(_probing(probe))
        results.append(probe.on(where))
    return results


def between_servers(device: Twin, name: str) -> Twin:
    """Return a twin with several servers if the kernel probe ``name`` needs them, else ``device``."""
    if name == BATCH:
        return replace(device, layout="a2", near=1)  # one rank per server: all transfers use BatchWrite
    return replace(device, layout="a2", near=2, world=4) if name == TWO_LEVELS else device


def thread_results(ranks: int, probes: Sequence[Probe] = OP_PROBES, progress: Progress = silent) -> list[ProbeResult]:
    """Run the probes of the ops with ranks as threads."""
    results = []
    for probe in probes:
        progress(_probing(probe))

        def body(rank: int, group_ep: str, probe: Probe = probe) -> Judged:
            return _of_rank(probe, DevicePlace(group_ep, ranks, rank, torch.device("cpu")))

        with comm.LocalCluster(ranks, window_mib=16) as cluster:
            results.append(_of_all_ranks(probe, cluster.run(body)))
    return results


def times_on_threads(ranks: int, progress: Progress = silent) -> list[times.Phase]:
    """Time the phases of both algorithms with ranks as threads, and predict them for as many cores."""
    request, found = times.configuration(ranks), []
    with times.stamped():
        for algorithm in ALGORITHMS:
            progress(f"times of {algorithm}")
            with comm.LocalCluster(ranks, window_mib=_window_mib(request)) as cluster:

                def body(rank: int, group_ep: str, algorithm: str = algorithm) -> list[times.Round]:
                    return times.rounds(DevicePlace(group_ep, ranks, rank), request, algorithm)

                found += times.phases(cluster.run(body), algorithm)
    progress(PREDICTING)
    return times.with_prediction(found, request, "")


def _window_mib(request: Request) -> int:
    return plan(request).buffsize_mib


def times_in_group(
    device: Device, place: torch.device, results: Sequence[ProbeResult], progress: Progress = silent
) -> list[times.Phase]:
    """Time the phases on the ranks of the default group. Collective; only rank 0 returns the phases.

    On NPUs nothing runs if the probe of the servers failed, and direct runs only if the probes it needs passed.
    """
    rank, world, on_npu = dist.get_rank(), dist.get_world_size(), device.kind == "npu"
    passed = frozenset(result.name for result in results if result.status == PASS)
    if on_npu and SERVERS.name not in passed:
        return []
    safe = not on_npu or probe_results.allows("direct", passed)
    request, found = times.configuration(world), []
    store: Any = dist.distributed_c10d._get_default_store()
    with times.stamped():
        for algorithm in ALGORITHMS if safe else ALGORITHMS[:1]:
            progress(f"times of {algorithm}")
            name = comm.comm_name(dist.new_group())
            own = times.rounds(DevicePlace(name, world, rank, place), request, algorithm)
            store.set(f"ascend_moe/bringup/times/{algorithm}/{rank}", json.dumps(own))
            keys = [f"ascend_moe/bringup/times/{algorithm}/{other}" for other in range(world)]
            store.wait(keys, timedelta(seconds=_COLLECT_S))
            comm.close(name)
            if rank == 0:
                found += times.phases([json.loads(store.get(key)) for key in keys], algorithm)
    progress(PREDICTING)
    return times.with_prediction(found, request, soc_of(place) if on_npu else "") if rank == 0 else []


def in_group(device: Device, place: torch.device, progress: Progress = silent) -> tuple[list[ProbeResult], str]:
    """Run all probes on the ranks of the default group, each with its own process group. Collective.

    On NPUs no probe runs after that of the servers has failed, and the results are stored for this kind of machine.

    Returns:
        The results, and a sentence about where they are stored; "" on a CPU.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    kind = _kind_of_machine(place) if device.kind == "npu" else None
    if kind is not None:
        probe_results.forget(kind)  # no results remain if this bring-up does not finish
    store: Any = dist.distributed_c10d._get_default_store()
    results, links, unsafe = [], {}, False
    probes = [*OP_PROBES]
    if device.kind == "cpu":
        # the twin is a device of one process
        results = kernel_results(Twin(world=min(world, 4)), progress) if rank == 0 else []
    else:
        probes = [*(_by_rank(probe) for probe in (SERVERS, *KERNEL_PROBES)), *OP_PROBES]
    for number, probe in enumerate(probes):
        if unsafe:
            results.append(probe.skipped(_UNSAFE))
            continue
        progress(_probing(probe))
        name = comm.comm_name(dist.new_group())
        seen = _of_rank(probe, DevicePlace(name, world, rank, place))
        store.set(f"ascend_moe/bringup/{number}/{rank}", json.dumps(seen))
        keys = [f"ascend_moe/bringup/{number}/{other}" for other in range(world)]
        store.wait(keys, timedelta(seconds=_COLLECT_S))
        opened = npu_communicator.known(name)
        comm.close(name)  # a permanent failure must not affect the next probe
        found = _of_all_ranks(probe, [tuple(json.loads(store.get(key))) for key in keys])
        if opened is not None and opened.links:
            links[probe.name] = opened.links
            found = replace(found, detail=f"{found.detail}; {opened.links}")
        results.append(found)
        unsafe = probe.name == SERVERS.name and results[-1].status == FAIL
    return results, "" if kind is None else _store(kind, world, results, links)


def _kind_of_machine(place: torch.device) -> probe_results.Machine:
    """The kind of machine of this group. Collective: the ranks exchange their hosts."""
    store: Any = dist.distributed_c10d._get_default_store()
    mine = ServerRecord()
    of_rank = {"host": mine.host, "boot": mine.boot, "module": module_of(soc_of(place))}
    store.set(f"ascend_moe/bringup/host/{dist.get_rank()}", json.dumps(of_rank))
    keys = [f"ascend_moe/bringup/host/{rank}" for rank in range(dist.get_world_size())]
    store.wait(keys, timedelta(seconds=_COLLECT_S))
    return probe_results.machine(soc_of(place), topology([ServerRecord(**json.loads(store.get(key))) for key in keys]))


def _store(kind: probe_results.Machine, world: int, results: Sequence[ProbeResult], links: Mapping[str, str]) -> str:
    """Store the results and return a sentence about that."""
    try:
        barriers = next((result.figures for result in results if result.name == probe_results.BARRIER_PROBE), {})
        statuses = {result.name: result.status for result in results}
        path = probe_results.write(kind, world, statuses, barriers, links)
        found = probe_results.read(path)
    except (OSError, AscendMoeError) as error:
        return f"probe results: not stored, {error}: export {settings.PROVEN.name} on all ranks instead"
    about = f"{probe_results.about(found)}; in {path}" if found is not None else f"{path} was removed again"
    return f"probe results: {about}"


def _by_rank(probe: Probe) -> Probe:
    """Return a probe of the kernel that runs one rank's part."""
    return replace(probe, run=lambda place: probe.run(Npu(place)))


def _of_rank(probe: Probe, place: DevicePlace) -> Judged:
    """Status, detail and figures of one rank."""
    status, text, figures = probe.judge(place)
    named = status != FAIL or text.startswith(f"rank {place.rank}, core")
    return status, text if named else f"rank {place.rank}: {text}", figures


def _of_all_ranks(probe: Probe, ranks: Sequence[Judged]) -> ProbeResult:
    """The worst status and the largest figures of all ranks."""
    status, text, _ = min(ranks, key=lambda each: (FAIL, SKIPPED, PASS).index(each[0]))
    names = dict.fromkeys(name for each in ranks for name in each[2])
    figures = {name: max(each[2].get(name, 0.0) for each in ranks) for name in names}
    return ProbeResult(probe.name, probe.assumption, status, text, figures)
