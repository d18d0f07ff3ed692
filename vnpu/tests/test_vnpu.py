"""The virtual NPU under an unmodified torch_npu: devices, operators, HCCL, and how it is started."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from npu_runs import HERE, LAST_LINE, launch, left_behind, run, traces

import ascend_vnpu
from ascend_moe.errors import ArgumentError, LibraryError
from ascend_vnpu.wheels import PAIRS, Wheel, verify

pytestmark = pytest.mark.npu


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    before = traces()
    yield
    assert not left_behind(before)


# How torch_npu hands work over: by a thread of its own (default), later still, at once, waiting each time.
MODES = [
    {},
    pytest.param({"TASK_QUEUE_ENABLE": "2"}, marks=pytest.mark.nightly),
    pytest.param({"TASK_QUEUE_ENABLE": "0"}, marks=pytest.mark.nightly),
    pytest.param({"ASCEND_LAUNCH_BLOCKING": "1"}, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_operators_give_what_the_cpu_gives(mode: dict[str, str]) -> None:
    run("operator_checks.py", env=mode).must_pass()


def test_models_of_transformers_compute_generate_and_train() -> None:
    run("model_checks.py").must_pass()


def test_operators_of_servers() -> None:
    run("serving_checks.py", env={"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}).must_pass()


def test_devices_memory_streams_and_graphs() -> None:
    script = str(HERE / "runtime_checks.py")
    done = launch("--soc", "Ascend910B3", "--devices", "4", "--no-verify", "--", sys.executable, script)
    assert "not an NPU, times mean nothing" in done.stderr
    assert done.returncode == 0 and done.stdout.endswith(f"{LAST_LINE}\n"), done.stderr


def test_no_blocking_call_waits_for_operators_that_wait_for_it() -> None:
    run("blocking_checks.py").must_pass()


# How a program meets SIGTERM while its main thread waits for queued work that takes a minute.
_LONG = """
import signal, sys, torch
{handler}
x = torch.ones(2048, 2048).npu()
for _ in range(400):
    x = x @ x
print("queued", flush=True)
{wait}
"""


_HANDLER = "signal.signal(signal.SIGTERM, lambda *_: print('handled', flush=True))"


@pytest.mark.parametrize(
    ("handler", "wait"), [("", "torch.npu.empty_cache()"), (_HANDLER, "torch.npu.empty_cache()"), (_HANDLER, "x.cpu()")]
)
def test_sigterm_reaches_a_program_that_waits(wait: str, handler: str) -> None:
    """It ends at once; where it has a handler of its own, that is called."""
    env = ascend_vnpu.environment(base={**os.environ, "ASCEND_MOE_TIMEOUT_S": "60"})
    command = [sys.executable, "-c", _LONG.format(handler=handler, wait=wait)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and "queued\n" in iter(process.stdout.readline, "")
            time.sleep(0.5)  # now it waits
            sent = time.monotonic()
            process.send_signal(signal.SIGTERM)
            if handler:
                assert process.stdout.readline() == "handled\n"
            else:
                assert process.wait(20) == -signal.SIGTERM
            assert time.monotonic() - sent < 2
        finally:
            process.kill()


# ---- HCCL


def test_every_collective_gives_what_the_ranks_data_say() -> None:
    """Reductions, moves, messages, groups, graphs, data larger than the windows of 1 MiB."""
    run("hccl_ranks.py", world=3, env={"HCCL_BUFFSIZE": "1"}).must_pass()


# Case of hccl_ranks.py: its environment, how many seconds the error takes, what it says.
FAILURES: dict[str, tuple[dict[str, str], tuple[float, float], str]] = {
    "mismatch": ({}, (0, 60), r"different collectives.*(1 calls Broadcast|0 calls AllReduce)\(count 8, fp32, "),
    "sizes": ({}, (0, 60), r"(0 calls AllReduce\(count 8|1 calls AllReduce\(count 9), fp32, sum\)"),
    "killed": ({}, (0, 5), r"rank 1 \(process \d+.*is gone: it exited or was killed"),
    "late": ({"ASCEND_MOE_TIMEOUT_S": "4"}, (4, 8), "waited 4 s for rank 1.*which is alive"),
    "absent": ({"HCCL_CONNECT_TIMEOUT": "2"}, (2, 6), r"waited for rank\(s\) 1, which never came"),
    "unequal_windows": ({}, (0, 60), "rank 0 has windows of 2 MiB, rank 1 of 3 MiB"),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(failure, marks=pytest.mark.nightly) if failure in ("late", "sizes") else failure
        for failure in FAILURES
    ],
)
def test_a_failing_collective_names_ranks_and_reason(case: str) -> None:
    env, (least, most), pattern = FAILURES[case]
    outcome = run("hccl_ranks.py", case, world=2, env=env)
    alone = case in ("killed", "late", "absent")  # rank 1 makes no call
    assert outcome.codes == (0, -9 if case == "killed" else 0), outcome.stderr
    for rank in (0,) if alone else (0, 1):
        match = re.search(r"^failed (\S+) (.*)$", outcome.stdout[rank], re.MULTILINE)
        assert match, (outcome.stdout[rank], outcome.stderr[rank][-3000:])
        assert least <= float(match[1]) < most and re.search(pattern, match[2]), match[0]
        both = len(re.findall(r"rank [01] calls \w+\(count", match[2]))
        assert both >= 2 or case not in ("mismatch", "sizes"), match[2]


# ---- how it is started


def test_environment_is_what_the_launcher_makes() -> None:
    """For programs that start processes themselves."""
    assert ascend_vnpu.info() == {"virtual": False} and not ascend_vnpu.is_active()
    env = ascend_vnpu.environment(devices=1, base={**os.environ, "ASCEND_HOME_PATH": "/nowhere"})
    assert "ASCEND_HOME_PATH" not in env
    outcome = run("import torch; print(torch.npu.device_count(), torch.npu.get_device_name(0))", devices=1)
    assert outcome.stdout[0].endswith("1 Ascend910_9391\n"), outcome.stderr


def test_the_readmes_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    page = (HERE.parent / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "script.py").write_text(program)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = launch("--", *torchrun, str(tmp_path / "script.py"))
    (shown,) = re.findall(r"```\n(Ascend910.*?\n)```", page)
    printed = [line for line in done.stdout.splitlines(keepends=True) if "ASCEND_HOME_PATH" not in line]  # torch_npu's
    assert "".join(printed) == shown, done.stderr


def test_exit_code_is_the_commands() -> None:
    done = launch("--quiet", "--", sys.executable, "-S", "-c", "import sys; sys.exit(7)")
    assert done.returncode == 7 and not done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument 'COMMAND"),
        (("--devices", "33", "--", "true"), "devices is 33; need 1 to 32, torch_npu's limit"),
        (("--", "no-such-command"), "no-such-command is no command of PATH"),
    ],
)
def test_wrong_options_are_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "execvpe", None)  # what would become the command
    assert commands.run("vnpu", list(arguments)) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def library_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ascend_vnpu.library_folder(), tmp_path / "vnpu"))


def test_missing_libraries_are_named(library_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("libhccl.so", "opp/op_api/lib/libcust_opapi.so"):
        (library_copy / name).unlink()
    monkeypatch.setenv("ASCEND_MOE_VNPU_LIBRARIES", str(library_copy))
    with pytest.raises(LibraryError, match=r"lacks libhccl\.so, opp/op_api/lib/libcust_opapi\.so of .*: unset ASCEND"):
        ascend_vnpu.environment()


def test_removed_symbol_fails(library_copy: Path) -> None:
    """Positive control: torch_npu really calls this library. One name spoilt, and its copies fail."""
    path = library_copy / "libascendcl.so"
    path.write_bytes(path.read_bytes().replace(b"aclrtMemcpyAsync\0", b"aclrtMemcpyAsynX\0"))
    text = "import torch; print(torch.ones(3).pin_memory().to('npu', non_blocking=True).cpu())"
    outcome = launch("--", sys.executable, "-c", text, ASCEND_MOE_VNPU_LIBRARIES=str(library_copy))
    assert outcome.returncode and "aclrtMemcpyAsync" in outcome.stderr


# The child makes the root info as the user of the second argument and waits; the parent joins it as rank 1 of 2.
JOIN = """
import ctypes, os, sys
def library(name): return ctypes.CDLL(os.path.join(sys.argv[1], name), mode=ctypes.RTLD_GLOBAL)
(info_out, info_in), (end_out, end_in) = os.pipe(), os.pipe()
if os.fork() == 0:
    if int(sys.argv[2]) != os.geteuid():
        os.setgid(int(sys.argv[2]))
        os.setuid(int(sys.argv[2]))
    os.close(end_in)
    info = ctypes.create_string_buffer(4108)
    library("libascendcl.so"), library("libhccl.so").HcclGetRootInfo(info)
    os.write(info_in, info.raw)
    os.read(end_out, 1)
    os._exit(0)
os.close(info_in)
info = os.read(info_out, 4108)
acl, hccl = library("libascendcl.so"), library("libhccl.so")
acl.aclInit(None), acl.aclrtSetDevice(0)
hccl.HcclCommInitRootInfo(2, info, 1, ctypes.byref(ctypes.c_void_p()))
os.close(end_in)
os.wait()
"""


def test_a_root_of_another_user_is_not_joined() -> None:
    """Root could open its memory. Without root the kernel refuses it, and the test joins a root of its own user."""
    other = os.geteuid() == 0
    command = [sys.executable, "-c", JOIN, str(ascend_vnpu.library_folder()), "65534" if other else str(os.geteuid())]
    environment = {**os.environ, "HCCL_CONNECT_TIMEOUT": "1", "HCCL_BUFFSIZE": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    said = "it belongs to another machine or user" if other else "waited for rank(s) 0"
    assert done.returncode == 0 and said in done.stderr, done.stderr


def test_modified_wheel_is_refused(tmp_path: Path) -> None:
    metadata = tmp_path / "torch_npu-2.13.0.dist-info"
    metadata.mkdir()
    module = tmp_path / "torch_npu.py"
    module.write_text("original")
    digest = base64.urlsafe_b64encode(hashlib.sha256(module.read_bytes()).digest()).rstrip(b"=").decode()
    (metadata / "RECORD").write_text(f"torch_npu.py,sha256={digest},8\ntorch_npu-2.13.0.dist-info/RECORD,,\n")
    wheel = Wheel("2.13.0", tmp_path, metadata, PAIRS[0])
    assert verify(wheel) == 1
    module.write_text("modified")
    with pytest.raises(ArgumentError, match=r"torch_npu\.py differs from the hash in its RECORD"):
        verify(wheel)
    module.write_text("longer than it was")
    with pytest.raises(ArgumentError, match=r"has 18 bytes, its RECORD has 8"):
        verify(wheel)
    module.unlink()
    with pytest.raises(ArgumentError, match="is missing"):
        verify(wheel)
