"""`ascend-moe validate --bringup`: all probes in order, on this device."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import comm, validate
from ..errors import AscendMoeError
from ..reference.cases import Place
from ..validate import probes as bringup
from ..validate.devices import Device
from ..validate.probes import FAIL, KERNEL_PROBES, PASS, SKIPPED, Finding, Probe, Skipped
from ..validate.probes_kernel import Npu, Twin
from ..validate.probes_ops import OP_PROBES, OpProbe
from ..validate.run import Stopped
from . import validate as validate_cli

_COLLECT_S = 60.0


def run(device: Device, options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Exit code 0: all probes passed. 1: one failed. 3: none failed, some cannot run here."""
    if validate.under_torchrun():
        return _rank(device, options.json)
    if device.kind == "npu":
        return _start(device, options, argv)
    ranks = options.ranks or 2
    findings = kernel_findings(Twin(world=ranks)) + thread_findings(ranks)
    return report(f"{device.about}, {ranks} ranks", findings, options.json)


def report(about: str, findings: Sequence[Finding], as_json: bool) -> int:
    """Prints the findings; returns the exit code."""
    if as_json:
        print(json.dumps({"device": about, "findings": bringup.as_dicts(findings)}, indent=2))
    else:
        print("\n".join([about, "", *map(str, findings), "", bringup.summary(findings)]))
    return bringup.exit_code(findings)


def kernel_findings(device: Any) -> list[Finding]:
    """Of the probe kernel; on the twin in both of HCCL's layouts."""
    findings = [probe.on(device) for probe in KERNEL_PROBES]
    if isinstance(device, Twin) and device.layout == "a3":
        findings.insert(1, KERNEL_PROBES[0].on(replace(device, layout="a2")))
    return findings


def thread_findings(ranks: int, probes: Sequence[OpProbe] = OP_PROBES) -> list[Finding]:
    """The probes through the ops, ranks as threads."""
    findings = []
    for probe in probes:
        seen: dict[int, tuple[str, str]] = {}

        def body(rank: int, group_ep: str, probe: OpProbe = probe, seen: Any = seen) -> None:
            seen[rank] = _one(probe, Place(rank, ranks, group_ep, torch.device("cpu")))

        with comm.LocalCluster(ranks, window_mib=16) as cluster:
            cluster.run(body)
        findings.append(_together(probe, [seen[rank] for rank in range(ranks)]))
    return findings


def _one(probe: OpProbe, place: Place) -> tuple[str, str]:
    """Verdict and detail of one rank."""
    try:
        return PASS, probe.run(place)
    except Skipped as why:
        return SKIPPED, f"not run: {why}"
    except (AssertionError, AscendMoeError, Stopped, RuntimeError) as error:
        text = str(error.__cause__ or error).partition("\n")[0]
        return FAIL, text if text.startswith(f"rank {place.rank}, core") else f"rank {place.rank}: {text}"


def _together(probe: OpProbe, seen: Sequence[tuple[str, str]]) -> Finding:
    """The worst of all ranks."""
    for verdict in (FAIL, SKIPPED):
        for found, detail in seen:
            if found == verdict:
                return Finding(probe.name, probe.assumption, verdict, detail)
    return Finding(probe.name, probe.assumption, PASS, seen[0][1])


def _rank(device: Device, as_json: bool) -> int:
    """One rank of torchrun; each probe has a process group of its own."""
    where, about = validate_cli.open_group(device)
    rank, world = dist.get_rank(), dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()
    findings = []
    probes = [*OP_PROBES]
    if device.kind == "cpu":
        # The twin is a device of one process; the others need not know what it shows.
        findings = kernel_findings(Twin(world=min(world, 4))) if rank == 0 else []
    else:
        probes = [*(_by_rank(probe) for probe in KERNEL_PROBES), *OP_PROBES]
    for number, probe in enumerate(probes):
        name = comm.comm_name(dist.new_group())
        verdict = _one(probe, Place(rank, world, name, where))
        store.set(f"ascend_moe/bringup/{number}/{rank}", json.dumps(verdict))
        keys = [f"ascend_moe/bringup/{number}/{other}" for other in range(world)]
        store.wait(keys, timedelta(seconds=_COLLECT_S))
        comm.close(name)  # when all are done with it; a failure that stays must not be the next probe's
        findings.append(_together(probe, [tuple(json.loads(store.get(key))) for key in keys]))
    code = 0
    if rank == 0:
        path = os.environ.get(validate_cli.OUTCOME)
        if path:
            Path(path).write_text(json.dumps({"about": about, "findings": bringup.as_dicts(findings)}))
        else:
            code = report(about, findings, as_json)
            code = 0 if code == 3 else code  # torchrun takes it for a crash, and says so at length
    dist.destroy_process_group()
    return code


def _by_rank(probe: Probe) -> OpProbe:
    """A probe of the kernel as one rank's part of it."""
    return OpProbe(probe.name, probe.assumption, lambda place: probe.run(Npu(place)))


def _start(device: Device, options: argparse.Namespace, argv: Sequence[str]) -> int:
    ranks = options.ranks or device.count
    code, found = validate_cli.outcome_of(ranks, argv)
    if found is None:
        raise AscendMoeError(f"bringup: rank 0 ended without a result (torchrun: exit code {code})")
    return report(found["about"], [Finding(**one) for one in found["findings"]], options.json)
