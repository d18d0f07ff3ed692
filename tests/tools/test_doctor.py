"""`ascend-moe doctor`: what it says of a sound machine, and of each thing that can be wrong with one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import pytest

from ascend_moe.doctor import cann as doctor_cann
from ascend_moe.doctor import group, settings
from ascend_moe.doctor import machine as doctor_machine
from ascend_moe.doctor.finding import ERROR, OK, WARN, Finding, text
from ascend_moe.native import library as _lib
from ascend_moe.plan import Request

VARIABLES = ("ASCEND_", "HCCL_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "GLOO_")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables, but where the library is."""
    for name in list(os.environ):
        if name.startswith(VARIABLES) and name != "ASCEND_MOE_LIBRARY":
            monkeypatch.delenv(name)


def by_topic(found: Iterator[Finding]) -> dict[str, Finding]:
    return {one.topic: one for one in found}


def wheels(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """What is installed."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in versions and not versions[name]:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


# ---- variables


def test_settings_of_a_bare_machine() -> None:
    assert {one.level for one in settings.findings()} == {OK}


SETTINGS = [
    ({"HCCL_BUFFSIZE": "200MB"}, "HCCL_BUFFSIZE", ERROR, "whole number of MiB"),
    ({"HCCL_BUFFSIZE": "512"}, "HCCL_BUFFSIZE", OK, "512 MiB a rank"),
    ({"ASCEND_MOE_TIMEOUT_S": "-1"}, "ASCEND_MOE_TIMEOUT_S", ERROR, "above 0"),
    ({"ASCEND_MOE_AIV_CORES": "65"}, "ASCEND_MOE_AIV_CORES", ERROR, "1..64"),
    ({"ASCEND_MOE_ENGINE": "slow"}, "ASCEND_MOE_ENGINE", ERROR, "is no engine"),
    ({"ASCEND_MOE_CONTEXT": "a4"}, "ASCEND_MOE_CONTEXT", ERROR, "one of table, a3, a2"),
    ({"ASCEND_MOE_CONTEXT": "a3"}, "ASCEND_MOE_CONTEXT", OK, "context a3"),
    ({"ASCEND_MOE_RANKS_PER_SERVER": "8"}, "ASCEND_MOE_RANKS_PER_SERVER", OK, "8 ranks a server"),
    ({"ASCEND_MOE_CONTEXT": "a2", "HCCL_BUFFSIZE": "512"}, "HCCL_BUFFSIZE", OK, "512 MiB a rank"),
    ({"ASCEND_MOE_TIMEOUT": "3"}, "ASCEND_MOE_TIMEOUT", WARN, "did you mean ASCEND_MOE_TIMEOUT_S?"),
    ({"HCCL_OP_EXPANSION_MODE": "AIV"}, "HCCL_OP_EXPANSION_MODE", WARN, "107020"),
    ({"HCCL_OP_EXPANSION_MODE": "AI_CPU"}, "HCCL_OP_EXPANSION_MODE", OK, "AI_CPU"),
    ({"HCCL_EXEC_TIMEOUT": "5"}, "HCCL_EXEC_TIMEOUT", WARN, "507014"),
    (
        {"HCCL_EXEC_TIMEOUT": "100", "ASCEND_MOE_TIMEOUT_S": "120"},
        "HCCL_EXEC_TIMEOUT",
        WARN,
        "wait 90 s only",
    ),
    ({"HCCL_EXEC_TIMEOUT": "1836"}, "HCCL_EXEC_TIMEOUT", OK, "at most 600 s"),
    ({"HCCL_EXEC_TIMEOUT": "long"}, "HCCL_EXEC_TIMEOUT", ERROR, "whole number of seconds"),
    ({"HCCL_CONNECT_TIMEOUT": "30"}, "HCCL_CONNECT_TIMEOUT", WARN, "120 to 7200"),
    ({"HCCL_CONNECT_TIMEOUT": "600"}, "HCCL_CONNECT_TIMEOUT", OK, "600 s"),
    ({"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}, "HCCL_INTRA_*", OK, "hierarchy"),
    ({"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "1"}, "HCCL_INTRA_*", ERROR, "both"),
    ({"HCCL_IF_IP": "192.0.2.77"}, "HCCL_IF_IP", ERROR, "no address of this host"),
    ({"HCCL_IF_IP": "127.0.0.1"}, "HCCL_IF_IP", OK, "127.0.0.1"),
    ({"HCCL_SOCKET_IFNAME": "nosuch"}, "HCCL_SOCKET_IFNAME", ERROR, "use one of"),
    ({"HCCL_SOCKET_IFNAME": "=lo"}, "HCCL_SOCKET_IFNAME", OK, "=lo"),
    ({"GLOO_SOCKET_IFNAME": "l"}, "GLOO_SOCKET_IFNAME", OK, "l"),
    ({"HCCL_SOCKET_IFNAME": "^nosuch"}, "HCCL_SOCKET_IFNAME", OK, "^nosuch"),
    ({"HCCL_SOCKET_IFNAME": "=l"}, "HCCL_SOCKET_IFNAME", ERROR, "matches no interface"),
]


@pytest.mark.parametrize(("values", "topic", "level", "said"), SETTINGS)
def test_settings(
    values: dict[str, str], topic: str, level: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    one = by_topic(settings.findings())[topic]
    assert one.level == level and said in " ".join((one.what, one.why, one.fix)), one
    assert level == OK or (one.why and one.fix)


# ---- the machine


def test_machine() -> None:
    found = by_topic(doctor_machine.findings())
    assert {"python", "torch", "native library", "compiler", "cores", "shared memory", "open files"} <= set(
        found
    )
    assert found["python"].level == found["torch"].level == found["shared memory"].level == OK


def test_library_of_other_sources_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "_source_hash", lambda root: _lib.lib().am_source_hash().decode())
    assert by_topic(doctor_machine.findings())["native library"].level == OK
    monkeypatch.setattr(doctor_machine, "_source_hash", lambda root: "0" * 64)
    one = by_topic(doctor_machine.findings())["native library"]
    assert one.level == WARN and "cmake --build" in one.fix


def test_missing_library_is_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_LIBRARY", "/nowhere/libascend_moe.so")
    found = by_topic(doctor_machine.findings())
    assert found["native library"].level == ERROR and found["compiler"].topic == "compiler"


@pytest.mark.parametrize(
    ("change", "topic", "level"),
    [
        (lambda m: m.setattr(doctor_machine, "_available_mib", lambda: 150), "memory", WARN),
        (lambda m: m.setattr(doctor_machine, "_available_mib", lambda: 4096), "memory", OK),
        (lambda m: m.setenv("CXX", "no-such-compiler"), "compiler", WARN),
        (
            lambda m: m.setattr(doctor_machine.resource, "getrlimit", lambda what: (256, 256)),
            "open files",
            WARN,
        ),
        (lambda m: m.setattr(os, "memfd_create", _refuse), "shared memory", ERROR),
        (lambda m: wheels(m, torch="2.6.0+cpu"), "torch", ERROR),
        (lambda m: m.setattr(sys, "version_info", (3, 9, 1)), "python", ERROR),
    ],
)
def test_machine_that_is_not_sound(
    change: Callable[[pytest.MonkeyPatch], None], topic: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    assert by_topic(doctor_machine.findings())[topic].level == level


def _refuse(name: str) -> int:
    raise PermissionError("Operation not permitted")


# ---- Ascend


def install(root: Path, version: str) -> Path:
    home = root / "ascend-toolkit" / "latest"
    (home / "x86_64-linux").mkdir(parents=True)
    (home / "x86_64-linux" / "ascend_toolkit_install.info").write_text(f"package_name=x\nversion={version}\n")
    return home


def test_cann_is_found_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_cann.cann_version(tmp_path) == ("", None)
    home = install(tmp_path, "8.5.0")
    assert doctor_cann.cann_version(tmp_path) == ("8.5.0", home)
    (home / "version.cfg").write_text("# version: 1.0\nruntime_running_version=[7.7.0.1:8.1.RC1]\n")
    assert doctor_cann.cann_version(tmp_path)[0] == "8.1.RC1"
    other = tmp_path / "mine"
    other.mkdir()
    (other / "version.info").write_text("Version=9.1.0\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(other))
    assert doctor_cann.cann_version(tmp_path) == ("9.1.0", other)


PAIRS = [
    ("2.9.0", "8.5.0", OK),
    ("2.10.0.post4", "9.1.0", OK),
    ("2.5.1.post1", "8.2.RC1", OK),
    ("2.9.0", "8.3.RC1", ERROR),
    ("2.6.0", "8.1.RC1", ERROR),
    ("2.13.0", "9.1.0", WARN),
    ("2.9.0", "8.4.0", WARN),
]


@pytest.mark.parametrize(("torch_npu", "cann", "level"), PAIRS)
def test_matrix_of_versions(
    torch_npu: str, cann: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(install(tmp_path, cann)))
    short = ".".join(torch_npu.split(".")[:3])
    wheels(monkeypatch, torch=f"{short}+cpu", torch_npu=torch_npu)
    monkeypatch.setattr(doctor_cann, "_probe", lambda cann: Finding(OK, "NPUs", "not asked"))
    found = by_topic(doctor_cann.findings(tmp_path))
    assert found["versions"].level == level, found["versions"]
    assert found["torch_npu"].level == OK


def test_torch_npu_of_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels(monkeypatch, torch="2.13.0", torch_npu="2.9.0")
    monkeypatch.setattr(doctor_cann, "_probe", lambda cann: Finding(OK, "NPUs", "not asked"))
    one = by_topic(doctor_cann.findings(tmp_path))["torch_npu"]
    assert one.level == ERROR and "torch==2.9.*" in one.fix


def test_cann_that_is_not_there_or_not_sourced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels(monkeypatch, torch_npu="")
    home = install(tmp_path, "8.5.0")
    one = by_topic(doctor_cann.findings(tmp_path))["CANN"]
    assert one.level == WARN and "set_env.sh" in one.fix
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home / "gone"))
    assert by_topic(doctor_cann.findings(tmp_path))["CANN"].level == ERROR
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    assert by_topic(doctor_cann.findings(tmp_path))["CANN"].level == OK


def test_operator_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels(monkeypatch, torch_npu="")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(install(tmp_path, "8.5.0")))
    opp = tmp_path / "opp"
    library = opp / "vendors" / "someone" / "op_api" / "lib" / "libcust_opapi.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"aclnnSomethingElse")
    monkeypatch.setenv("ASCEND_OPP_PATH", str(opp))
    one = by_topic(doctor_cann.findings(tmp_path))["operator package"]
    assert one.level == ERROR and "1 packages of others" in one.what and "build.sh" in one.fix
    ours = tmp_path / "ours" / "op_api" / "lib" / "libcust_opapi.so"
    ours.parent.mkdir(parents=True)
    ours.write_bytes(b"..".join(doctor_cann.SYMBOLS))
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"{tmp_path / 'ours'}:/nowhere")
    one = by_topic(doctor_cann.findings(tmp_path))["operator package"]
    assert one.level == OK and str(ours) in one.what


def test_symbols_are_those_of_the_package() -> None:
    folder = _lib.native_source_root() / "op_host" / "op_api"
    sources = "".join(path.read_text() for path in folder.rglob("*.[hc]*"))
    assert all(symbol.decode() in sources for symbol in doctor_cann.SYMBOLS)


def test_old_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels(monkeypatch, torch_npu="")
    (tmp_path / "driver").mkdir()
    for version, level in (("24.1.0", WARN), ("25.3.rc1", OK)):
        (tmp_path / "driver" / "version.info").write_text(f"Version={version}\n")
        one = by_topic(doctor_cann.findings(tmp_path))["driver"]
        assert one.level == level and version in one.what


def test_torch_npu_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: a crash there is a finding here."""
    fake = tmp_path / "torch_npu"
    fake.mkdir()
    (fake / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    one = doctor_cann._probe("")
    assert one.level == WARN and "libhccl.so" in one.what and "set_env.sh" in one.fix
    assert doctor_cann._probe("8.5.0").level == ERROR
    (fake / "__init__.py").write_text("import os; os.abort()\n")
    assert "exit code -6" in doctor_cann._probe("8.5.0").what
    (fake / "__init__.py").write_text("import time; time.sleep(60)\n")
    monkeypatch.setattr(doctor_cann, "_PROBE_S", 4)
    assert "did not end within 4 s" in doctor_cann._probe("8.5.0").what


# ---- ranks


def test_rank_0_that_answers_and_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert by_topic(group.findings(f"127.0.0.1:{port}"))["rank 0"].level == OK
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        found = by_topic(group.findings())
        assert found["rank 0"].level == OK and "rank 1 of 2" in found["ranks"].what
    assert by_topic(group.findings())["rank 0"].level == WARN
    monkeypatch.setenv("RANK", "0")
    assert by_topic(group.findings())["rank 0"].level == OK  # it will listen there itself
    monkeypatch.setenv("RANK", "2")
    assert by_topic(group.findings())["ranks"].level == ERROR
    monkeypatch.setenv("RANK", "one")
    assert by_topic(group.findings())["RANK"].level == ERROR


@pytest.mark.parametrize("address", ["nonsense", "host:", ":29500", "127.0.0.1:99999"])
def test_address_that_is_none(address: str) -> None:
    assert by_topic(group.findings(address))["rank 0"].level == ERROR


def test_configuration() -> None:
    one = Request(ranks=16, experts=256, topk=8, hidden=7168, batch=128)
    found = list(group.fits(one))
    assert [finding.level for finding in found] == [OK] and "HCCL_BUFFSIZE" in found[0].what
    small = Request(ranks=16, experts=256, topk=8, hidden=7168, batch=128, window_mib=200)
    found = list(group.fits(small))
    assert [finding.level for finding in found] == [ERROR] and "export HCCL_BUFFSIZE=" in found[0].fix
    wide = Request(ranks=100, experts=2000, topk=8, hidden=9000, batch=128)
    assert len(list(group.fits(wide))) >= 3


# ---- the command


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wheels(monkeypatch, torch_npu="")
    monkeypatch.setattr(doctor_machine, "_source_hash", lambda root: _lib.lib().am_source_hash().decode())
    assert commands.run("doctor", []) == 0
    said = capsys.readouterr().out
    assert "0 errors" in said and "error  " not in said and said.isascii()
    assert all(len(line.split("  ")[0]) <= 5 for line in said.splitlines()[2:-2])


def test_command_json_and_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels(monkeypatch, torch_npu="")
    monkeypatch.setenv("HCCL_BUFFSIZE", "many")
    assert commands.run("doctor", ["--json", "-p", "deepseek-v3"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert {one["topic"]: one["level"] for one in found}["HCCL_BUFFSIZE"] == ERROR
    assert {one["topic"]: one["level"] for one in found}["configuration"] == OK  # as far as can be said
    monkeypatch.delenv("HCCL_BUFFSIZE")
    assert commands.run("doctor", ["-p", "deepseek-v3"]) == 1  # 200 MiB are too few
    assert "export HCCL_BUFFSIZE=" in capsys.readouterr().out


def test_a_part_that_breaks_is_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Iterator[Finding]:
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr(doctor_machine, "findings", broken)
    assert commands.run("doctor", []) == 1
    said = capsys.readouterr().out
    assert "ZeroDivisionError: nobody thought of this" in said and "HCCL_BUFFSIZE" in said


def test_text_names_why_and_fix() -> None:
    said = text([Finding(OK, "a", "fine"), Finding(ERROR, "topic", "bad", "because", "do this")])
    assert "ok     a      fine" in said
    assert "error  topic  bad\n" in said and "why: because\n" in said and "fix: do this\n" in said
    assert said.endswith("1 error, 0 warnings, 1 ok")


def test_where_torch_npu_breaks_import_torch(tmp_path: Path) -> None:
    """CANN's variables are set, its libraries are not there: doctor must still speak."""
    fake = tmp_path / "torch_npu"
    fake.mkdir()
    (fake / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    env = {**os.environ, "ASCEND_HOME_PATH": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    env.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    done = subprocess.run(
        [sys.executable, "-m", "ascend_moe", "doctor"], env=env, capture_output=True, text=True, timeout=200
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 1 and "torch_npu cannot be imported" in done.stdout
