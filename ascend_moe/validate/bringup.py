"""All bring-up probes in order: with ranks as threads on the twin, or as the ranks of torchrun."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ascend_moe import comm
from ascend_moe.reference.cases import Place
from ascend_moe.validate import Device
from ascend_moe.validate.probes import FAIL, KERNEL_PROBES, PASS, SKIPPED, Finding, Probe
from ascend_moe.validate.probes_kernel import Npu, Twin
from ascend_moe.validate.probes_ops import OP_PROBES

_COLLECT_S = 60.0


def on_threads(ranks: int) -> list[Finding]:
    """All probes on the twin."""
    return kernel_findings(Twin(world=ranks)) + thread_findings(ranks)


def kernel_findings(device: Any) -> list[Finding]:
    """Of the probe kernel; on the twin in both of HCCL's layouts."""
    findings = [probe.on(device) for probe in KERNEL_PROBES]
    if isinstance(device, Twin) and device.layout == "a3":
        findings.insert(1, KERNEL_PROBES[0].on(replace(device, layout="a2")))
    return findings


def thread_findings(ranks: int, probes: Sequence[Probe] = OP_PROBES) -> list[Finding]:
    """The probes through the ops, ranks as threads."""
    findings = []
    for probe in probes:
        verdicts: dict[int, tuple[str, str]] = {}

        def body(rank: int, group_ep: str, probe: Probe = probe, verdicts: Any = verdicts) -> None:
            verdicts[rank] = _verdict(probe, Place(rank, ranks, group_ep, torch.device("cpu")))

        with comm.LocalCluster(ranks, window_mib=16) as cluster:
            cluster.run(body)
        findings.append(_together(probe, [verdicts[rank] for rank in range(ranks)]))
    return findings


def in_group(device: Device, place: torch.device) -> list[Finding]:
    """All probes on the ranks of the default group; each probe has a process group of its own. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()
    findings = []
    probes = [*OP_PROBES]
    if device.kind == "cpu":
        # The twin is a device of one process; the others need not know what it shows.
        findings = kernel_findings(Twin(world=min(world, 4))) if rank == 0 else []
    else:
        probes = [
            *(_by_rank(probe) for probe in KERNEL_PROBES),
            *OP_PROBES,
        ]
    for number, probe in enumerate(probes):
        name = comm.comm_name(dist.new_group())
        verdict = _verdict(probe, Place(rank, world, name, place))
        store.set(f"ascend_moe/bringup/{number}/{rank}", json.dumps(verdict))
        keys = [f"ascend_moe/bringup/{number}/{other}" for other in range(world)]
        store.wait(keys, timedelta(seconds=_COLLECT_S))
        comm.close(name)  # when all are done with it; a failure that stays must not be the next probe's
        findings.append(_together(probe, [tuple(json.loads(store.get(key))) for key in keys]))
    return findings


def _by_rank(probe: Probe) -> Probe:
    """A probe of the kernel as one rank's part of it."""
    return replace(probe, run=lambda place: probe.run(Npu(place)))


def _verdict(probe: Probe, place: Place) -> tuple[str, str]:
    """Verdict and detail of one rank."""
    verdict, text = probe.verdict(place)
    named = verdict != FAIL or text.startswith(f"rank {place.rank}, core")
    return verdict, text if named else f"rank {place.rank}: {text}"


def _together(probe: Probe, verdicts: Sequence[tuple[str, str]]) -> Finding:
    """The worst of all ranks."""
    for worst in (FAIL, SKIPPED):
        for verdict, detail in verdicts:
            if verdict == worst:
                return Finding(probe.name, probe.assumption, verdict, detail)
    return Finding(probe.name, probe.assumption, PASS, verdicts[0][1])
