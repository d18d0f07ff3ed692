"""`ascend-moe validate --bringup`: every probe passes on the twin, and fails on a device that is broken."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest

import ascend_moe
from ascend_moe import twin
from ascend_moe.validate import bringup as all_probes
from ascend_moe.validate import probes as bringup
from ascend_moe.validate import probes_ops
from ascend_moe.validate.probes import FAIL, KERNEL_PROBES, PASS, SKIPPED, Finding, Probe, exit_code, summary
from ascend_moe.validate.probes_kernel import MODES, PASSED, Twin
from ascend_moe.validate.probes_ops import OP_PROBES

PROBES = {probe.name: probe for probe in KERNEL_PROBES}
OPS = {probe.name: probe for probe in OP_PROBES}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bringup, "ROUNDS", 20)
    monkeypatch.setattr(probes_ops, "DEADLINE_S", 0.5)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("layout", ["a3", "a2"])
@pytest.mark.parametrize("name", [name for name in PROBES if name != "cycle rate"])
def test_kernel_probes_pass(name: str, layout: str) -> None:
    found = PROBES[name].on(Twin(world=3, cores=4, layout=layout))
    assert found.verdict == PASS, found


class Clock(Twin):
    """The twin, with launches as long as its cycles at ``rate`` and some overhead: no other load disturbs."""

    rate = 50e6

    def launch(self, mode: str, rounds: int = 1, cycles: int = 0) -> Any:
        found, _ = super().launch(mode, rounds, cycles)
        return found, 0.02 + found[0].cycles / self.rate


@pytest.mark.parametrize(
    ("rate", "verdict"), [(50e6, PASS), (45e6, PASS), (100e6, FAIL), (1e9, FAIL), (25e6, FAIL)]
)
def test_cycle_rate(rate: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bringup, "SPIN_S", 0.02)
    monkeypatch.setattr(Clock, "rate", rate)
    found = PROBES["cycle rate"].on(Clock())
    assert found.verdict == verdict and f"{rate / 1e6:.1f} " in found.detail, found


BROKEN = [
    ("peer store and read", "store", r"rank 0, core \d: at \d is 0x\w+, not 0x\w+"),
    ("32-byte atomicity", "atomic", r"rank \d, core 1: at 7 is"),
    ("data before flag", "order", r"rank \d, core 1: at \d is 0x\w+, not"),
    ("SyncAll", "syncall", r"rank \d, core \d: at 1 is"),
]


@pytest.mark.parametrize("name, mode, text", BROKEN)
def test_kernel_probes_fail_on_a_broken_device(name: str, mode: str, text: str) -> None:
    """The device does what the assumption rules out: loses a store, tears a block, lets a flag overtake..."""
    found = PROBES[name].on(Twin(broken=mode))
    assert found.verdict == FAIL and re.search(text, found.detail), found


@pytest.mark.parametrize(
    "field, value, text",
    [
        ("data_bytes", 3 << 20, "context's window KiB is 4096, the host side says 3072"),
        ("data_bytes", 5 << 20, "context's window KiB is 4096, the host side says 5120"),
        ("context_kind", 2, ""),
    ],
)
def test_context_probe_fails_on_another_context(field: str, value: int, text: str) -> None:
    class Other(Twin):
        def _tiling(self, *args: Any) -> Any:
            tiling = super()._tiling(*args)
            setattr(tiling, field, value)
            return tiling

    found = PROBES["context layout"].on(Other(window_mib=4))
    assert found.verdict == FAIL and text in found.detail, found


def test_zero_state_probe_fails_on_used_memory() -> None:
    def spoil(windows: twin.Windows) -> None:
        windows.state(1)[4100] = 3

    found = PROBES["zero-initialised state"].on(Twin(spoil=spoil))
    assert found.verdict == FAIL and "rank 1, core 0: at 4100 is 0x3, not 0x0" in found.detail


def test_a_kernel_that_does_not_report_fails() -> None:
    class Silent(Twin):
        def launch(self, mode: str, rounds: int = 1, cycles: int = 0) -> Any:
            found, seconds = super().launch(mode, rounds, cycles)
            return [bringup.Seen(one.rank, one.core, 0, 0, 0, 0, 0) for one in found], seconds

    for probe in KERNEL_PROBES:
        assert probe.on(Silent()).verdict == FAIL, probe.name


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "cycles"])
def test_probe_kernel_has_no_races(mode: str) -> None:
    """Under schedules of the checked engine: what the probes find on a device is the device's."""
    device = Twin(world=2, cores=2)
    found, reports = device.explore(mode, rounds=2, schedules=4)
    assert found.ok, found.text
    assert {one.code for one in reports} == {PASSED}


# ---- through the ops


def abort_probe(monkeypatch: pytest.MonkeyPatch, failure: Callable[[Any], Any]) -> Finding:
    """What the probe finds where an op fails, or does not, in another way."""
    monkeypatch.setattr(probes_ops, "_failure", failure)
    (found,) = all_probes.thread_findings(2, [OPS["abort"]])
    assert found.verdict == FAIL, found
    return found


def test_abort_probe_fails_where_ops_do_not_give_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gave None" in abort_probe(monkeypatch, lambda place: None).detail
    monkeypatch.undo()
    real, calls = probes_ops._failure, Counter[int]()

    def early(place: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probes_ops, "DEADLINE_S", 0.1)
            return real(place)

    def forgets(place: Any) -> Any:
        calls[place.rank] += 1
        return real(place) if calls[place.rank] == 1 else None

    monkeypatch.setattr(probes_ops, "DEADLINE_S", 0.5)
    found = abort_probe(monkeypatch, early)  # long before the deadline: a counter that is too fast
    assert re.search(r"waited 0\.[12] s, not 0\.5 s", found.detail), found
    assert "the next op gave None" in abort_probe(monkeypatch, forgets).detail


def test_no_tokens_probe_fails_where_a_rank_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """CANN's own rule: no output bytes, no launch. The other rank must not wait for ever either."""
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "1")
    real = ascend_moe.npu_moe_distribute_combine

    def op(**arguments: Any) -> Any:
        rows = arguments["expand_x"]
        skipped = arguments["expert_ids"].shape[0] == 0
        return rows.new_empty(0, rows.shape[1]) if skipped else real(**arguments)

    monkeypatch.setattr(ascend_moe, "npu_moe_distribute_combine", op)
    start = time.monotonic()
    found = all_probes.thread_findings(2, [OPS["BS = 0 launch"]])[0]
    assert found.verdict == FAIL and time.monotonic() - start < 20, found


# ---- the report


def test_skipped_is_not_passed() -> None:
    def skip(device: Any) -> str:
        raise bringup.Skipped("no such device")

    passed, skipped = Finding("a", "b", PASS, "c"), Probe("n", "it works", skip).on(None)
    assert skipped.verdict == SKIPPED and "not run: no such device" in str(skipped)
    assert summary([passed, skipped]) == "1 of 2 probes passed, 1 not run"
    assert exit_code([passed]) == 0 and exit_code([passed, skipped]) == 3
    assert exit_code([passed, skipped, Finding("a", "b", FAIL, "c")]) == 1 and exit_code([]) == 3


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = commands.run("validate", ["--bringup", "--device", "cpu", "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    names = [one["name"] for one in found]
    assert names.count("context layout") == 2  # of A3 and A2
    assert set(names) == {*PROBES, *OPS}
    others = {one["name"]: one["verdict"] for one in found if one["verdict"] != PASS}
    rate = others.pop("cycle rate", PASS)  # measured beside other tests: anything
    assert others == {"capture and replay": SKIPPED} and code == (3 if rate == PASS else 1)
    assert all(one["assumption"] and one["detail"] for one in found)
    page = Path(bringup.__file__).resolve().parents[2] / "docs" / "bringup.md"
    if page.is_file():  # the source tree
        rows = [line.split("|")[2].strip() for line in page.read_text().splitlines() if line.startswith("| ")]
        assert {*PROBES, *OPS} <= set(rows)
