"""A bring-up whose probes fault, hang, abort and are killed: all other probes still report, and the file has it all."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import rank_processes
import torch.distributed as dist
from planted_faults import KINDS, WRONG, Planted

from ascend_moe.errors import PeerLost
from ascend_moe.native import probe_results
from ascend_moe.validate import supervisor
from ascend_moe.validate.bringup import BATCH, Ranks, of_all_ranks, steps
from ascend_moe.validate.probes import FAIL, FAULT, PASS, SKIPPED, Judged, Probe, ProbeResult
from ascend_moe.validate.supervisor import BringUpResult, Supervisor

THREADS = Ranks("cpu", 2, threads=True)
STEPS = steps("cpu", THREADS)
NAMES = list(dict.fromkeys(step.probe.name for step in STEPS))


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CONTEXT", rank_processes.CONTEXT)
    monkeypatch.setenv("ASCEND_MOE_CACHE", str(tmp_path))


def lines_of(outcome: BringUpResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(outcome.path).read_text().splitlines()]


def bring_up(ranks: Ranks, planted: Planted, store: Any = None) -> BringUpResult:
    return Supervisor(ranks, store, lambda step: None, lambda line: None, planted).run()


def on_two_supervisors(planted: Planted, world: int = 2) -> BringUpResult:
    """Rank 0's outcome where each of two ranks has a supervisor, here a thread, and a process in a gloo group."""
    c10d: Any = dist
    host = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    planted = replace(planted, environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(host.port)})
    outcomes: dict[int, BringUpResult] = {}

    def body(rank: int) -> None:
        store = c10d.TCPStore("127.0.0.1", host.port)
        outcomes[rank] = bring_up(Ranks("cpu", 2, rank), planted, store)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes[0]


def check(outcome: BringUpResult, planted: Planted) -> None:
    """All other probes have reported; the planted ones, faults or failures, with the device's text, in the file too."""
    assert [result.name for result in outcome.results] == [step.probe.name for step in STEPS]
    written = {line["name"]: line for line in lines_of(outcome) if line["line"] == "probe"}
    others = {"capture and replay": SKIPPED} if planted.real else {}
    for result in outcome.results:
        if result.name in planted.faults:
            kind = planted.faults[result.name]
            text, status = KINDS[kind][1], FAIL if kind == WRONG else FAULT
            assert result.status == status == written[result.name]["status"], result
            assert text in str(result) and text in written[result.name]["detail"], result
        elif result.name != "cycle rate":  # measured beside other tests: anything
            assert result.status == others.get(result.name, PASS), result
    faults = sum(result.status == FAULT for result in outcome.results)
    assert not faults or f"{faults} ended by a fault" in str(lines_of(outcome)[-1])


def planted_in(names: Sequence[str], kinds: Sequence[str], **more: Any) -> Planted:
    return Planted(dict(zip(names, itertools.cycle(kinds))), **more)


def test_all_other_probes_report_beside_a_fault_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file also says where it ran, with which versions, variables and plan; a hang shows where it hangs."""
    monkeypatch.setattr(supervisor, "STEP_S", 1.5)
    monkeypatch.setenv("HCCL_BUFFSIZE", "64")
    planted = planted_in([NAMES[2], *NAMES[::4]], [*KINDS])
    assert set(planted.faults.values()) == set(KINDS)
    outcome = bring_up(THREADS, planted)
    check(outcome, planted)
    server, *_, last = lines_of(outcome)
    assert server["line"] == "server"
    assert set(server["versions"]) == {"CANN", "driver", "ascend_moe", "torch", "torch_npu"}
    assert server["variables"]["HCCL_BUFFSIZE"] == "64" and server["plan"]["ops"] and "npu-smi info" in server
    assert last["line"] == "end"
    hang = next(result for result in outcome.results if planted.faults.get(result.name) == "hang")
    assert "planted_faults.py" in hang.detail, hang


def test_a_lost_rank_is_named_and_the_ranks_go_on_in_a_new_group() -> None:
    planted = Planted({"first op": "killed", "abort": "AI core"})
    outcome = on_two_supervisors(planted)
    check(outcome, planted)
    assert "rank 1: its process was ended by SIGKILL" in str(outcome.results[-4])


@pytest.mark.nightly
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_real_probes_pass_beside_faults_in_every_other_one(
    kind: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STEP_S", 15.0 if kind == "hang" else 240.0)  # waited for, else never
    planted = planted_in(NAMES[first::2], [kind], real=True, environment={"ASCEND_MOE_TIMEOUT_S": "5"})
    check(bring_up(THREADS, planted), planted)


@pytest.mark.nightly
@pytest.mark.parametrize("first", [0, 1])
def test_real_probes_of_two_processes_pass_beside_faults_of_one(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STEP_S", 40.0)
    monkeypatch.setattr(supervisor, "GRACE_S", 3.0)
    names = NAMES[-4:][first::2]
    planted = planted_in(names, [*KINDS][first:], real=True, environment={"ASCEND_MOE_TIMEOUT_S": "5"})
    check(on_two_supervisors(planted), planted)


def test_of_two_failures_the_one_that_is_no_vain_wait_is_reported() -> None:
    probe = replace(STEPS[0].probe, run=Mock(side_effect=PeerLost("dispatch: rank 1 did not arrive")))
    failed = [probe.judge(None), Judged(FAIL, "rank 1: word 3 is 0x5")]
    assert of_all_ranks(probe, failed).detail == "rank 1: word 3 is 0x5"


@pytest.mark.nightly
def test_a_rank_without_supervisor_ends_the_run_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("START_S", "STEP_S", "GRACE_S", "_SMI_S"):
        monkeypatch.setattr(supervisor, name, 1.0)
    results = on_two_supervisors(Planted(), world=1).results
    assert results[0].status == FAULT and "no result within 1 s" in results[0].detail, results[0]
    assert {result.status for result in results[1:]} == {SKIPPED}
    assert "rank(s) 1 no longer report" in results[1].detail


def test_earlier_results_stay_until_a_run_is_complete() -> None:
    """A lost rank leaves them; a complete run replaces them even if it has a fault."""
    kind = probe_results.Machine("Ascend910_9391", "", probe_results.ONE_SERVER)
    probe_results.write(kind, 2, {"pull": PASS})
    run = Supervisor(Ranks("npu", 2), None, str, str)
    run._machine, run._lost = kind, [1]
    results = [ProbeResult("pull", "", FAULT, "")]
    assert "not stored, rank(s) 1 no longer report" in run._stored(results)
    found = probe_results.read(kind.path)
    assert found is not None and found.probes == {"pull": PASS}
    run._lost = []
    assert run._stored(results).startswith("probe results: Ascend910_9391")
    found = probe_results.read(kind.path)
    assert found is not None and found.probes == {"pull": FAULT}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("call aclnnX failed, error code is 561002"), FAIL),
        (RuntimeError("vector core exception, error code is 507035"), FAULT),
        (ValueError("no probe raises it"), FAULT),
    ],
)
def test_an_error_of_the_device_is_a_fault_and_a_refusal_is_not(error: Exception, status: str) -> None:
    def run(device: Any) -> str:
        raise error

    found = Probe("n", "it works", run).on(None)
    assert found.status == status and str(error) in found.detail


@pytest.mark.parametrize(("cann", "pcie"), [("8.1.RC1", "1"), ("8.3.RC1", None), ("", None)])
def test_links_of_a_probe_follow_variables_before_cann_8_3(
    cann: str, pcie: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_MOE_VNPU_CANN", cann)
    todo = {step.probe.name: supervisor._variables_of(step, "npu") for step in steps("npu", Ranks("npu", 4))}
    links = [todo[step].get("HCCL_INTRA_PCIE_ENABLE") for step in ("two levels", BATCH, "first op")]
    assert links == [pcie, *["" if pcie else None] * 2]
