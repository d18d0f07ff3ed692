"""The virtual NPU's built-in operators, called by an unmodified torch_npu: the same results as on the CPU."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vnpu_operator_all_cases import cases
from vnpu_operator_cases import difference
from vnpu_operator_moe_cases import moe_cases
from vnpu_process import HERE, run

from ascend_moe.vnpu import library_folder
from ascend_moe.vnpu.operators import OPERATORS

pytestmark = pytest.mark.npu

# The functions of vnpu_operator_checks.py, which only the virtual NPU can import.
CHECKS = re.findall(r"@check\ndef (\w+)", (HERE / "vnpu_operator_checks.py").read_text())
# How torch_npu hands work over: by a thread of its own (default), later still, at once, waiting each time.
MODES = {
    "queue": {},
    "late-queue": {"TASK_QUEUE_ENABLE": "2"},
    "no-queue": {"TASK_QUEUE_ENABLE": "0"},
    "blocking": {"ASCEND_LAUNCH_BLOCKING": "1"},
}


def operator_of(name: str) -> str:
    return name.split("-")[0]


Read = Callable[[str], dict[str, Any]]


def run_child(kind: str) -> dict[str, Any]:
    """What every case, or every check in a mode, found, and which operators it called."""
    if kind in MODES:
        outcome = run(HERE / "vnpu_operator_checks.py", env=MODES[kind])
    else:
        outcome = run(HERE / "vnpu_operator_child.py", kind)
    if outcome.codes != (0,):
        return {"failed": f"ended with {outcome.codes[0]}: {outcome.stdout[0]}\n{outcome.stderr[0][-4000:]}"}
    return dict(json.loads(outcome.stdout[0].splitlines()[-1]))


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """`run_child`, once a kind for all test processes of this session."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    @functools.cache
    def read(kind: str) -> dict[str, Any]:
        path = folder / f"vnpu_operators_{kind}.json"
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_text(json.dumps(run_child(kind)))
        found = dict(json.loads(path.read_text()))
        assert "failed" not in found, found["failed"]
        return found

    return read


def wrong(read: Read, kind: str, names: list[str]) -> dict[str, str]:
    assert names
    found = read(kind)["found"]
    return {name: found[name] for name in names if found[name]}


@pytest.mark.parametrize("operator", sorted({operator_of(case.name) for case in cases()}))
def test_torch_operator_gives_what_it_gives_on_the_cpu(output: Read, operator: str) -> None:
    assert wrong(output, "torch", [case.name for case in cases() if operator_of(case.name) == operator]) == {}


@pytest.mark.parametrize("name", [case.name for case in moe_cases()])
def test_moe_operator_gives_what_ours_gives(output: Read, name: str) -> None:
    assert wrong(output, "moe", [name]) == {}


def test_the_comparison_sees_differences() -> None:
    one = [torch.ones(3, dtype=torch.bfloat16)]
    assert difference(one, [torch.ones(3, dtype=torch.bfloat16)]) == ""
    assert difference(one, [torch.tensor([1, 1, 1.0078125], dtype=torch.bfloat16)]) != ""
    assert difference(one, [torch.ones(3)], exact=False) != ""
    assert difference(one, [torch.ones(4, dtype=torch.bfloat16)], exact=False) != ""
    assert difference(one, [1.05 * one[0]], exact=False) != ""
    assert difference(one, []) != ""


def test_every_exported_operator_is_registered_and_the_other_way_round() -> None:
    path = library_folder() / "libopapi.so"
    exported = re.findall(rb"(?<=\0)(aclnn\w+)GetWorkspaceSize(?=\0)", path.read_bytes())
    assert {name.decode() for name in exported} == set(OPERATORS)
    library = ctypes.CDLL(str(path))
    for name in OPERATORS:
        assert hasattr(library, name) and hasattr(library, f"{name}GetWorkspaceSize"), name


def test_every_operator_is_called_by_torch_npu_in_these_tests(output: Read) -> None:
    # A wrong type in the table of entries shows only when torch_npu calls the entry.
    called = {name for kind in ("torch", "moe", "queue") for name in output(kind)["called"]}
    # It looks for V4 to learn whether there is a grouped matmul, and then calls V5.
    assert set(OPERATORS) - called == {"aclnnGroupedMatmulV4"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CHECKS)
def test_check(output: Read, name: str, mode: str) -> None:
    problem = output(mode)["found"][name]
    assert not problem, problem


def test_no_operator_file_imports_torch_npu() -> None:
    files = sorted((HERE.parents[1] / "ascend_moe" / "vnpu" / "operators").glob("*.py"))
    assert files and [path.name for path in files if "import torch_npu" in path.read_text()] == []
