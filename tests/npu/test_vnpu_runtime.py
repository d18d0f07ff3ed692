"""The virtual NPU under an unmodified torch_npu: devices, memory, streams, graphs, and how it is started."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from vnpu_process import HERE, left_behind, run, traces

pytestmark = pytest.mark.npu

CHECKS = (
    "autoload",
    "between_devices",
    "devices",
    "fork",
    "graph",
    "info",
    "memory",
    "no_wait_in_graph",
    "pinned",
    "properties",
    "refused",
    "round_trips",
    "streams",
)


@pytest.fixture(scope="module")
def report() -> str:
    before = traces()
    outcome = run(HERE / "vnpu_runtime_checks.py", options=("--soc", "Ascend910B3", "--devices", "4"))
    assert not left_behind(before)
    assert "not an NPU, times mean nothing" in outcome.stderr[0]
    return outcome.must_pass().stdout[0]


@pytest.mark.parametrize("name", CHECKS)
def test_check(report: str, name: str) -> None:
    assert f"ok check_{name}\n" in report, report


def test_every_check_is_named_here(report: str) -> None:
    assert report.count("ok check_") == len(CHECKS) and "FAILED" not in report, report


def test_same_answer_without_launcher_environment() -> None:
    """environment() is what the launcher uses, for programs that start processes themselves."""
    import ascend_moe.vnpu as vnpu

    assert vnpu.info() == {"virtual": False} and not vnpu.is_active()
    env = vnpu.environment(devices=1, base={**os.environ, "ASCEND_HOME_PATH": "/nowhere"})
    assert "ASCEND_HOME_PATH" not in env
    text = "import torch; print(torch.npu.device_count(), torch.npu.get_device_name(0))"
    outcome = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True)
    assert outcome.stdout.endswith("1 Ascend910_9391\n"), outcome.stderr


def test_exit_code_is_the_commands() -> None:
    assert run("import sys; sys.exit(7)", options=("--quiet",)).codes == (7,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'COMMAND"),
        (("--soc", "Ascend1", "--", "true"), "soc is 'Ascend1'; need one of Ascend910B1"),
        (("--devices", "65", "--", "true"), "devices is 65; need 1 to 64"),
        (("--", "no-such-command"), "no-such-command is no command of PATH"),
        (("--fast", "--", "true"), "No such option: --fast"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "ascend_moe", "vnpu", *arguments]
    outcome = subprocess.run(command, capture_output=True, text=True)
    assert outcome.returncode == 2 and message in outcome.stderr, outcome.stderr


def test_missing_wheel_fails_with_the_pip_command(tmp_path: Path) -> None:
    """An interpreter without torch_npu: its site-packages is an empty folder."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    command = [sys.executable, "-m", "ascend_moe", "vnpu", "--", str(bare), "-c", "print('ran')"]
    outcome = subprocess.run(command, capture_output=True, text=True)
    assert outcome.returncode == 2 and "ran" not in outcome.stdout
    last = outcome.stderr.strip().splitlines()[-1]
    assert "the virtual NPU needs torch 2.13.0" in last and f"{bare} has none: " in last
    assert "-m pip install torch==2.13.0 torch_npu==2.13.0" in last


@pytest.fixture
def library_copy(tmp_path: Path) -> Path:
    import ascend_moe.vnpu as vnpu

    return Path(shutil.copytree(vnpu.library_folder(), tmp_path / "vnpu"))


@pytest.mark.parametrize("name", ["libhccl.so", "libopapi.so", "opp/op_api/lib/libcust_opapi.so"])
def test_missing_library_is_named(library_copy: Path, name: str) -> None:
    (library_copy / name).unlink()
    outcome = run("print('ran')", env={"ASCEND_MOE_VNPU_LIBRARIES": str(library_copy)})
    assert outcome.codes == (2,) and "ran" not in outcome.stdout[0]
    assert f"lacks {name} of the virtual NPU" in outcome.stderr[0]


def test_removed_symbol_fails(library_copy: Path) -> None:
    """Positive control: torch_npu really calls this library. One name spoilt, and its copies fail."""
    path = library_copy / "libascendcl.so"
    path.write_bytes(path.read_bytes().replace(b"aclrtMemcpyAsync\0", b"aclrtMemcpyAsynX\0"))
    text = "import torch; print(torch.ones(3).pin_memory().to('npu', non_blocking=True).cpu())"
    outcome = run(text, env={"ASCEND_MOE_VNPU_LIBRARIES": str(library_copy)})
    assert outcome.codes != (0,) and "aclrtMemcpyAsync" in outcome.stderr[0]


def test_modified_wheel_is_refused(tmp_path: Path) -> None:
    from ascend_moe.errors import ArgumentError
    from ascend_moe.vnpu.versions import Wheel, verify

    metadata = tmp_path / "torch_npu-2.13.0.dist-info"
    metadata.mkdir()
    module = tmp_path / "torch_npu.py"
    module.write_text("original")
    digest = "sha256=" + urlsafe(module.read_bytes())
    (metadata / "RECORD").write_text(f"torch_npu.py,{digest},8\ntorch_npu-2.13.0.dist-info/RECORD,,\n")
    wheel = Wheel("2.13.0", tmp_path, metadata)
    assert verify(wheel) == 1
    module.write_text("modified")
    with pytest.raises(ArgumentError, match=r"torch_npu\.py does not hash to what its RECORD says"):
        verify(wheel)
    module.write_text("longer than it was")
    with pytest.raises(ArgumentError, match=r"has 18 bytes, its RECORD says 8"):
        verify(wheel)
    module.unlink()
    with pytest.raises(ArgumentError, match="is missing"):
        verify(wheel)


def urlsafe(data: bytes) -> str:
    import base64

    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def test_the_installed_wheel_is_as_published() -> None:
    from ascend_moe.vnpu.versions import find_wheels, verify

    assert verify(find_wheels(sys.executable)["torch_npu"]) > 1000


def test_without_cann_the_package_still_imports() -> None:
    """torch_npu is installed and there is no CANN: importing this package first must not fail."""
    env = {
        k: v for k, v in os.environ.items() if k not in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "LD_LIBRARY_PATH")
    }
    text = "import ascend_moe, os; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    outcome = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True)
    assert outcome.stdout == "0\n", outcome.stderr
