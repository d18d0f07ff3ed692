"""`ascend-moe doctor`: what it says of a sound machine, and of each thing that can be wrong with one."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import commands
import pytest

from ascend_moe import doctor as group
from ascend_moe.doctor import ERROR, OK, WARN, Diagnostic, machine, settings
from ascend_moe.doctor import cann as doctor_cann
from ascend_moe.native import library as _lib
from ascend_moe.native import probe_results
from ascend_moe.plan import Request
from ascend_moe.settings import PROVABLE, TABLE

HOME = "ASCEND_HOME_PATH"
VARIABLES = ("ASCEND_", "HCCL_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "GLOO_")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the variables, but where the library is."""
    for name in list(os.environ):
        if name.startswith(VARIABLES) and name != "ASCEND_MOE_LIBRARY":
            monkeypatch.delenv(name)


def by_topic(found: Iterable[Diagnostic]) -> dict[str, Diagnostic]:
    return {each.topic: each for each in found}


def wheels(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretends what is installed."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in versions and not versions[name]:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


RULED = [one for group in TABLE.values() for one in group if one.parse not in (str, Path)]
SETTINGS = [
    ({"ASCEND_MOE_ENGINE": "slow"}, "ASCEND_MOE_ENGINE", ERROR, "is no engine"),
    *(({one.name: "\1"}, one.name, ERROR, one.rule) for one in RULED),
    ({"ASCEND_MOE_CALLS": "/nothing"}, "ASCEND_MOE_CALLS", ERROR, "must be a folder that can be written"),
    ({"ASCEND_MOE_LOG": "info"}, "ASCEND_MOE_LOG", OK, "info"),
    ({"ASCEND_MOE_PROVEN": "all"}, "ASCEND_MOE_PROVEN", OK, "on NPUs comm_alg auto is direct"),
    (
        {"ASCEND_MOE_PROVEN": "pull"},
        "ASCEND_MOE_PROVEN",
        OK,
        "pull of the bring-up are taken as passed: on NPUs comm_alg auto is window",
    ),
    ({"ASCEND_MOE_ENGINE": "checked"}, "ASCEND_MOE_ENGINE", OK, "must be threads of a LocalCluster"),
    ({"ASCEND_MOE_ENGINE": "checked", "WORLD_SIZE": "1"}, "ASCEND_MOE_ENGINE", OK, "engine checked"),
    ({"ASCEND_MOE_ENGINE": "checked", "WORLD_SIZE": "2"}, "ASCEND_MOE_ENGINE", ERROR, "unset ASCEND_MOE_ENGINE"),
    ({"ASCEND_MOE_RANKS_PER_SERVER": "8"}, "ASCEND_MOE_RANKS_PER_SERVER", OK, "8 ranks per server"),
    ({"ASCEND_MOE_RDMA_FLAGS": "1"}, "ASCEND_MOE_RDMA_FLAGS", OK, "rows and a flag"),
    ({"ASCEND_MOE_TIMEOUT": "3"}, "ASCEND_MOE_TIMEOUT", WARN, "did you mean ASCEND_MOE_TIMEOUT_S?"),
    ({"HCCL_OP_EXPANSION_MODE": "AIV"}, "HCCL_OP_EXPANSION_MODE", WARN, "107020"),
    ({"HCCL_EXEC_TIMEOUT": "5"}, "HCCL_EXEC_TIMEOUT", WARN, "507014"),
    ({"HCCL_EXEC_TIMEOUT": "100", "ASCEND_MOE_TIMEOUT_S": "120"}, "HCCL_EXEC_TIMEOUT", WARN, "only 90 s"),
    ({"HCCL_EXEC_TIMEOUT": "1836"}, "HCCL_EXEC_TIMEOUT", OK, "at most 600 s"),
    ({"HCCL_EXEC_TIMEOUT": "long"}, "HCCL_EXEC_TIMEOUT", ERROR, "an integer, in seconds"),
    ({"HCCL_CONNECT_TIMEOUT": "30"}, "HCCL_CONNECT_TIMEOUT", WARN, "120 to 7200"),
    ({"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}, "HCCL_INTRA_*", OK, "V1 is refused"),
    ({"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "1"}, "HCCL_INTRA_*", ERROR, "both"),
    ({"HCCL_IF_IP": "192.0.2.77"}, "HCCL_IF_IP", ERROR, "not an address of this host"),
    ({"HCCL_IF_IP": "127.0.0.1"}, "HCCL_IF_IP", OK, "127.0.0.1"),
    ({"HCCL_SOCKET_IFNAME": "nosuch"}, "HCCL_SOCKET_IFNAME", ERROR, "use one of"),
    ({"HCCL_SOCKET_IFNAME": "=lo"}, "HCCL_SOCKET_IFNAME", OK, "=lo"),
    ({"HCCL_SOCKET_IFNAME": "=l"}, "HCCL_SOCKET_IFNAME", ERROR, "matches no interface"),
    ({"HCCL_SOCKET_IFNAME": "^nosuch"}, "HCCL_SOCKET_IFNAME", OK, "^nosuch"),
    ({"GLOO_SOCKET_IFNAME": "nosuch,lo"}, "GLOO_SOCKET_IFNAME", OK, "nosuch,lo"),
    ({"GLOO_SOCKET_IFNAME": "l"}, "GLOO_SOCKET_IFNAME", ERROR, "matches no interface"),
]


@pytest.mark.parametrize(("values", "topic", "level", "said"), SETTINGS)
def test_wrong_settings_are_found_with_their_fix(
    values: dict[str, str], topic: str, level: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {each.level for each in settings.diagnostics()} == {OK}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    found = list(settings.diagnostics())
    one = by_topic(found)[topic]
    wrong = [each.topic for each in found if each.level == ERROR]
    assert wrong in ([], [topic]), wrong
    assert one.level == level and said in " ".join((one.what, one.why, one.fix)), one
    assert level == OK or (one.why and one.fix)


def install(root: Path, version: str, file: str = "x86_64-linux/ascend_toolkit_install.info") -> str:
    home = root / "ascend-toolkit" / "latest"
    (home / file).parent.mkdir(parents=True, exist_ok=True)
    (home / file).write_text(f"package_name=x\nversion={version}\n")
    return str(home)


def driver(root: Path, version: str) -> None:
    (root / "driver").mkdir()
    (root / "driver" / "version.info").write_text(f"Version={version}\n")


def pair(m: pytest.MonkeyPatch, root: Path, torch_npu: str, cann: str, torch: str = "") -> None:
    wheels(m, torch=torch or f"{'.'.join(torch_npu.split('.')[:3])}+cpu", torch_npu=torch_npu)
    m.setenv(HOME, install(root, cann))


def package(m: pytest.MonkeyPatch, root: Path, symbols: bytes) -> None:
    """torch_npu finds its operators through either variable."""
    m.setenv(HOME, install(root, "8.5.0"))
    library = root / "opp" / "vendors" / "someone" / "op_api" / "lib" / "libcust_opapi.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(symbols)
    m.setenv("ASCEND_OPP_PATH", str(root / "opp"))
    if symbols == OURS:
        m.delenv("ASCEND_OPP_PATH")
        m.setenv("ASCEND_CUSTOM_OPP_PATH", f"{library.parents[2]}:/nowhere")


BOTH = ("vllm.general_plugins", "sglang.srt.plugins")


def plugin(m: pytest.MonkeyPatch, groups: tuple[str, ...] = BOTH, **variables: str) -> None:
    """The package is installed, with its entry points in these groups; variables of vLLM."""
    entry = importlib.metadata.EntryPoint
    m.setattr(doctor_cann, "entry_points", lambda group: [entry("ascend_moe", "somewhere", group)] * (group in groups))
    for name, value in variables.items():
        m.setenv(name, value)


def vendors(m: pytest.MonkeyPatch, root: Path, op: str) -> None:
    """Two operator packages, a before b, have kernels of an operator."""
    for name in "ab":
        folder = root / name / "op_impl/ai_core/tbe/config/ascend910_93"
        folder.mkdir(parents=True)
        (folder / "aic-ascend910_93-ops-info.json").write_text(json.dumps({op: {}}))
    m.setenv("ASCEND_CUSTOM_OPP_PATH", f"{root / 'a'}:{root / 'b'}")


OURS = b"..".join(_lib.OPERATOR_SYMBOLS)
REFUSE = Mock(side_effect=PermissionError("Operation not permitted"))


@pytest.mark.parametrize(
    ("change", "topic", "level", "said"),
    [
        (lambda m, root: m.setattr(machine, "source_hash", lambda _: ""), "native library", WARN, "lib"),
        (lambda m, root: m.setenv("ASCEND_MOE_LIBRARY", "/gone/x.so"), "native library", ERROR, "/gone"),
        (lambda m, root: m.setattr(machine, "_available_mib", lambda: 150), "memory", WARN, "150 MiB"),
        (lambda m, root: m.setenv("CXX", "no-such-compiler"), "compiler", WARN, ""),
        (lambda m, root: m.setattr(resource, "getrlimit", lambda _: (256, 256)), "open files", WARN, "256"),
        (lambda m, root: m.setattr(os, "memfd_create", REFUSE), "shared memory", ERROR, "not permitted"),
        (lambda m, root: wheels(m, torch="2.6.0+cpu", torch_npu=""), "torch", ERROR, "torch>=2.10"),
        (lambda m, root: wheels(m, torch="2.13.1", torch_npu=""), "torch_npu", OK, "'torch_npu==2.13.*'"),
        (lambda m, root: m.setattr(sys, "version_info", (3, 9, 1)), "python", ERROR, "3.10 or later"),
        (lambda m, root: None, "CANN", OK, "not found"),
        (lambda m, root: install(root, "8.5.0"), "CANN", WARN, "set_env.sh"),
        (lambda m, root: m.setenv(HOME, install(root, "8.5.0")), "CANN", OK, "8.5.0"),
        (lambda m, root: m.setenv(HOME, install(root, "[7.7:8.1.RC1]", "version.cfg")), "CANN", WARN, "8.1.RC1"),
        (lambda m, root: pair(m, root, "2.9.0", "8.5.0"), "versions", OK, "is compatible with"),
        (lambda m, root: pair(m, root, "2.9.0", "8.3.RC1"), "versions", ERROR, "is not compatible with"),
        (lambda m, root: pair(m, root, "2.13.0", "9.1.0"), "versions", WARN, "not in a published table"),
        (lambda m, root: pair(m, root, "2.9.0", "8.5.0", "2.13.0"), "torch_npu", ERROR, "torch==2.9.*"),
        (lambda m, root: package(m, root, b"aclnnElse"), "operator package", ERROR, "1 other packages"),
        (lambda m, root: package(m, root, OURS), "operator package", OK, "someone"),
        (lambda m, root: plugin(m), "plug-in", OK, "off: ASCEND_MOE_PATCH=1 turns it on in every process of vLLM and "),
        (lambda m, root: plugin(m, BOTH[:1], ASCEND_MOE_PATCH="1"), "plug-in", WARN, "entry in sglang.srt.plugins "),
        (
            lambda m, root: plugin(m, ASCEND_MOE_PATCH="1", VLLM_PLUGINS="ascend, other"),
            *("plug-in", WARN, "add ascend_moe to VLLM_PLUGINS"),
        ),
        (lambda m, root: vendors(m, root, _lib.OPERATORS[0]), "operator sources", WARN, "a, not from"),
        (lambda m, root: driver(root, "24.1.0"), "driver", WARN, "24.1.0"),
        (lambda m, root: m.setenv("ASCEND_MOE_VNPU_LIBRARIES", str(root)), "virtual NPU", ERROR, "lacks libascend"),
        (
            lambda m, root: m.setattr(doctor_cann.library, "vnpu_folder_if_built", lambda: None),
            *("virtual NPU", OK, "not built: the first use builds it"),
        ),
    ],
)
def test_what_can_be_wrong(
    change: Callable[[pytest.MonkeyPatch, Path], object],
    topic: str,
    level: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheels(monkeypatch, torch_npu="")
    monkeypatch.setattr(doctor_cann, "_probe", lambda cann: Diagnostic(OK, "NPUs", "not asked"))
    change(monkeypatch, tmp_path)
    found = itertools.chain(machine.diagnostics(), doctor_cann.diagnostics(tmp_path))
    one = next(each for each in found if each.topic == topic)
    assert one.level == level and said in f"{one.what} {one.why} {one.fix}", one


def test_stored_probe_results_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def findings(npus: bool = True) -> list[tuple[str, str]]:
        return [(found.level, found.what) for found in doctor_cann._bring_ups(npus)]

    monkeypatch.setenv("ASCEND_MOE_CACHE", str(tmp_path / "cache"))
    ((level, what),) = findings()
    assert level == OK and what.startswith(
        "no probe results: on NPUs comm_alg auto is window until `ascend-moe validate --bringup`"
    )
    assert findings(npus=False) == []
    kinds = [probe_results.Machine("Ascend910B3", "8.5.0", each) for each in probe_results.TOPOLOGIES]
    probe_results.write(kinds[0], 8, dict.fromkeys(PROVABLE, "PASS"))
    path = probe_results.write(kinds[1], 16, {})
    assert findings() == [
        (OK, "Ascend910B3, CANN 8.5.0, one server, 8 ranks, 0 day(s) old: comm_alg auto is direct"),
        (
            OK,
            "Ascend910B3, CANN 8.5.0, several servers, 16 ranks, 0 day(s) old: comm_alg auto is window "
            "(data before flag, pull, writer-side relay not passed)",
        ),
    ]
    path.chmod(0o666)
    assert findings()[1] == (WARN, f"{path} may be written by others (mode 666)")
    assert list(doctor_cann._bring_ups(True))[1].fix == "run `ascend-moe validate --bringup` again"


def test_symbols_are_those_of_the_package(tmp_path: Path) -> None:
    tool = _lib.native_source_root() / "tools" / "op_description.py"
    subprocess.run([sys.executable, "-S", str(tool), "aclnn", str(tmp_path)], check=True)
    sources = "".join(path.read_text() for path in tmp_path.glob("*.[hc]*"))
    assert all(symbol.decode() in sources for symbol in _lib.OPERATOR_SYMBOLS)


def broken_torch_npu(folder: Path) -> Path:
    (folder / "torch_npu").mkdir()
    file = folder / "torch_npu" / "__init__.py"
    file.write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    return file


def test_torch_npu_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a child process: a crash there becomes a diagnostic."""
    fake = broken_torch_npu(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(doctor_cann, "_PROBE", "import torch_npu")  # not torch, which takes seconds
    one = doctor_cann._probe("")
    assert one.level == WARN and "libhccl.so" in one.what and "set_env.sh" in one.fix
    assert doctor_cann._probe("8.5.0").level == ERROR
    fake.write_text("import os; os.abort()\n")
    assert "exit code -6" in doctor_cann._probe("8.5.0").what
    fake.write_text("import time; time.sleep(60)\n")
    monkeypatch.setattr(doctor_cann, "_PROBE_S", 1)
    assert "did not end within 1 s" in doctor_cann._probe("8.5.0").what


# ---- ranks


def test_rank_0_that_answers_and_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert by_topic(group.group_diagnostics(f"127.0.0.1:{port}"))["rank 0"].level == OK
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        found = by_topic(group.group_diagnostics())
        assert found["rank 0"].level == OK and "rank 1 of 2" in found["ranks"].what
    closed = [("1", "rank 0", WARN), ("0", "rank 0", OK), ("2", "ranks", ERROR), ("one", "RANK", ERROR)]
    for rank, topic, level in closed:  # rank 0 will listen there itself
        monkeypatch.setenv("RANK", rank)
        assert by_topic(group.group_diagnostics())[topic].level == level
    monkeypatch.delenv("RANK")
    for address in ("nonsense", "host:", ":29500", "127.0.0.1:99999"):
        assert by_topic(group.group_diagnostics(address))["rank 0"].level == ERROR


def test_a_fix_is_the_least_of_what_was_asked_and_names_less_by_auto() -> None:
    asked = Request(ranks=16, experts=256, topk=8, hidden=7168, batch=64, window_mib=10, comm_alg="window")
    (found,) = group.fits(asked)
    auto = "; comm_alg auto needs only 15 (dispatch by direct, combine by window)"
    assert found.fix == f"export HCCL_BUFFSIZE=225 on all ranks{auto}"
    (found,) = group.fits(replace(asked, comm_alg="auto"))
    assert "HCCL_BUFFSIZE=224 on all ranks; the minimum is 15" in found.fix and "comm_alg" not in found.fix


# ---- the command


def test_the_command_prints_every_diagnostic(monkeypatch: pytest.MonkeyPatch) -> None:
    wheels(monkeypatch, torch_npu="")
    monkeypatch.setattr(machine, "source_hash", lambda root: _lib.lib().am_source_hash().decode())
    code, said, _ = commands.said("doctor")
    assert code == 0 and "0 errors" in said and "error  " not in said and said.isascii()
    code, said, _ = commands.said("doctor", "-p", "deepseek-v3", "--comm-alg", "window")  # 200 MiB are too few
    assert code == 1 and re.search(r"\n +why: .*\n +fix: .*export HCCL_BUFFSIZE=.*\n", said)
    for options, why in (
        (["--soc", "foo"], "soc is 'foo'"),
        (["--ranks", "0"], "ranks is 0; need 1.."),
        (["--comm-alg", "foo"], "comm_alg is 'foo', it must be one of"),
    ):
        code, said, _ = commands.said("doctor", *options)
        assert code == 1 and why in " ".join(said.split())
    monkeypatch.setenv("HCCL_BUFFSIZE", "many")
    code, said, _ = commands.said("doctor", "--json", "-p", "deepseek-v3")
    levels = {load["topic"]: load["level"] for load in json.loads(said)["diagnostics"]}
    assert code == 1 and levels["HCCL_BUFFSIZE"] == ERROR and {"compiler", "cores", "open files"} <= set(levels)
    # What is well, and the configuration as far as can be said.
    well = ("python", "torch", "shared memory", "native library", "configuration")
    assert [levels[topic] for topic in well] == [OK] * 5


def test_a_part_that_breaks_is_a_diagnostic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "diagnostics", Mock(side_effect=ZeroDivisionError("nobody thought of this")))
    code, said, _ = commands.said("doctor")
    assert code == 1 and "ZeroDivisionError: nobody thought of this" in said and "HCCL_BUFFSIZE" in said


def test_where_torch_npu_breaks_import_torch(tmp_path: Path) -> None:
    """CANN's variables are set, its libraries are not there: doctor must still speak."""
    broken_torch_npu(tmp_path)
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    env = {**os.environ, "ASCEND_HOME_PATH": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    env.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    env["PATH"] = ""  # no compiler: the virtual NPU is not built for this
    done = subprocess.run(
        [sys.executable, "-m", "ascend_moe", "doctor"], env=env, capture_output=True, text=True, timeout=200
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 1 and "torch_npu cannot be imported" in done.stdout
