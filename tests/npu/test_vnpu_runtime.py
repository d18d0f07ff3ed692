"""The virtual NPU under an unmodified torch_npu: devices, memory, streams, graphs, and how it is started."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import commands
import pytest
from conftest import Once
from vnpu_process import HERE, checks_of, launch, left_behind, run, traces

from ascend_moe import vnpu
from ascend_moe.errors import ArgumentError, LibraryError
from ascend_moe.vnpu.launch import Wheel, verify

pytestmark = pytest.mark.npu

CHECKS = HERE / "vnpu_runtime_checks.py"


@pytest.fixture(scope="module")
def found(once: Once) -> dict[str, str]:
    def run_checks() -> dict[str, str]:
        before = traces()
        done = launch(
            "--soc", "Ascend910B3", "--devices", "4", "--no-verify", "--", sys.executable, str(CHECKS)
        )
        assert not left_behind(before)
        assert "not an NPU, times mean nothing" in done.stderr and done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1])["found"])

    return dict(once("runtime", run_checks))


@pytest.mark.parametrize("name", checks_of(CHECKS))
def test_check(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]


def test_environment_is_what_the_launcher_makes() -> None:
    """For programs that start processes themselves."""
    assert vnpu.info() == {"virtual": False} and not vnpu.is_active()
    env = vnpu.environment(devices=1, base={**os.environ, "ASCEND_HOME_PATH": "/nowhere"})
    assert "ASCEND_HOME_PATH" not in env
    outcome = run("import torch; print(torch.npu.device_count(), torch.npu.get_device_name(0))", devices=1)
    assert outcome.stdout[0].endswith("1 Ascend910_9391\n"), outcome.stderr


def test_exit_code_is_the_commands() -> None:
    done = launch("--quiet", "--", sys.executable, "-S", "-c", "import sys; sys.exit(7)")
    assert done.returncode == 7 and not done.stderr


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
def test_wrong_options(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "execvpe", None)  # what would become the command
    assert commands.run("vnpu", list(arguments)) == 2
    assert message in capsys.readouterr().err


def test_missing_wheel_fails_with_the_pip_command(tmp_path: Path) -> None:
    """An interpreter without torch_npu: its site-packages is an empty folder."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    outcome = launch("--", str(bare), "-c", "print('ran')")
    assert outcome.returncode == 2 and "ran" not in outcome.stdout
    last = outcome.stderr.strip().splitlines()[-1]
    assert "the virtual NPU needs torch 2.13.0" in last and f"{bare} has none: " in last
    assert "-m pip install torch==2.13.0 torch_npu==2.13.0" in last


@pytest.fixture
def library_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(vnpu.library_folder(), tmp_path / "vnpu"))


@pytest.mark.parametrize("name", ["libhccl.so", "libopapi.so", "opp/op_api/lib/libcust_opapi.so"])
def test_missing_library_is_named(library_copy: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (library_copy / name).unlink()
    monkeypatch.setenv("ASCEND_MOE_VNPU_LIBRARIES", str(library_copy))
    with pytest.raises(LibraryError, match=f"lacks {name} of the virtual NPU"):
        vnpu.environment()


def test_removed_symbol_fails(library_copy: Path) -> None:
    """Positive control: torch_npu really calls this library. One name spoilt, and its copies fail."""
    path = library_copy / "libascendcl.so"
    path.write_bytes(path.read_bytes().replace(b"aclrtMemcpyAsync\0", b"aclrtMemcpyAsynX\0"))
    text = "import torch; print(torch.ones(3).pin_memory().to('npu', non_blocking=True).cpu())"
    outcome = launch("--", sys.executable, "-c", text, ASCEND_MOE_VNPU_LIBRARIES=str(library_copy))
    assert outcome.returncode and "aclrtMemcpyAsync" in outcome.stderr


def test_modified_wheel_is_refused(tmp_path: Path) -> None:
    metadata = tmp_path / "torch_npu-2.13.0.dist-info"
    metadata.mkdir()
    module = tmp_path / "torch_npu.py"
    module.write_text("original")
    digest = base64.urlsafe_b64encode(hashlib.sha256(module.read_bytes()).digest()).rstrip(b"=").decode()
    (metadata / "RECORD").write_text(f"torch_npu.py,sha256={digest},8\ntorch_npu-2.13.0.dist-info/RECORD,,\n")
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


def test_without_cann_the_package_still_imports() -> None:
    """torch_npu is installed and there is no CANN: importing this package first must not fail."""
    env = {
        k: v for k, v in os.environ.items() if k not in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "LD_LIBRARY_PATH")
    }
    text = "import ascend_moe, os; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    outcome = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True)
    assert outcome.stdout == "0\n", outcome.stderr
