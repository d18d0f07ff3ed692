"""Checks of Ascend: torch_npu, CANN, driver, devices, the operator package, the virtual NPU."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from ascend_vnpu import PAIRS, library_folder, pair_of

from .. import settings
from .._text import installed_version, version_numbers
from ..errors import AscendMoeError, LibraryError
from ..native import library, probe_results
from ..native.probe_results import cann_version, driver_version
from . import Diagnostic, error, fine, warn

# CANN release -> compatible torch_npu releases (lowest, highest), from the READMEs of torch_npu's wheels; 9.1 from
# vllm-ascend's images. Nothing else is published.
MATRIX: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "8.1": ((2, 3), (2, 5)),
    "8.2": ((2, 5), (2, 6)),
    "8.3": ((2, 6), (2, 8)),
    "8.5": ((2, 6), (2, 12)),
    "9.1": ((2, 10), (2, 10)),
}
LEAST_CANN_FOR_V2 = (8, 3)
PLUGIN = "ascend_moe"  # its name in pyproject.toml
PLUGIN_GROUPS = ("vllm.general_plugins", "sglang.srt.plugins")  # where vLLM and SGLang look for it
_ROOT = Path("/usr/local/Ascend")
_OPS_INFO = "op_impl/ai_core/tbe/config/*/aic-*-ops-info.json"
_PROBE = """
import os, torch, torch_npu
print("devices", torch.npu.device_count() if torch.npu.is_available() else 0)
print("name", torch.npu.get_device_name(0) if torch.npu.is_available() else "none")
"""
_PROBE_S = 90


def diagnostics(root: Path = _ROOT) -> Iterator[Diagnostic]:
    """Check torch_npu, CANN, driver, NPUs and packages; ``root``: folder of CANN and driver if no variable names it."""
    cann, cann_diagnostic = _cann(root)
    torch_npu = installed_version("torch_npu")
    yield from _torch_npu(torch_npu)
    yield cann_diagnostic
    yield from _pair(torch_npu, cann)
    yield _driver(root)
    yield from _package()
    yield _plugin()
    if torch_npu:
        yield _probe(cann)
    yield from _bring_ups(bool(torch_npu))
    yield _virtual(torch_npu)


def _bring_ups(npus: bool) -> Iterator[Diagnostic]:
    """Check the stored probe results of bring-ups. ``npus``: whether ops may run on NPUs."""
    topic = "bring-up"
    if settings.PROVEN.is_set():
        return  # doctor/settings.py reports it
    paths = [*probe_results.files()]
    for path in paths:
        try:
            here = probe_results.read(path)
        except AscendMoeError as problem:
            what, _, fix = str(problem).rpartition(": ")
            yield warn(topic, what, "without probe results comm_alg auto is window", fix)
            continue
        if here is not None:
            yield fine(topic, probe_results.about(here))
    if npus and not paths:
        what = f"no probe results: on NPUs comm_alg auto is window until `{probe_results.COMMAND}` has passed"
        yield fine(topic, what)


def _torch_npu(version: str) -> Iterator[Diagnostic]:
    torch = installed_version("torch")
    if not version:
        release = ".".join(map(str, version_numbers(torch)[:2])) or "<torch's>"
        fix = f"For NPUs install CANN and run: pip install 'torch_npu=={release}.*'"
        yield fine("torch_npu", f"not installed: ops run on the CPU. {fix}")
        return
    ours, theirs = version_numbers(version)[:2], version_numbers(torch)[:2]
    if ours != theirs:
        fix = f"pip install 'torch=={'.'.join(map(str, ours))}.*' or 'torch_npu=={'.'.join(map(str, theirs))}.*'"
        why = "each torch_npu release needs the torch release of the same number"
        yield error("torch_npu", f"{version} with torch {torch}", why, fix)
    else:
        yield fine("torch_npu", f"{version}, for torch {torch}")


def _cann(root: Path) -> tuple[str, Diagnostic]:
    version, place = cann_version(root)
    home = os.environ.get("ASCEND_HOME_PATH", "")
    if home and not Path(home).is_dir():
        what, why = f"ASCEND_HOME_PATH={home} is not a folder", "torch_npu and build.sh use it"
        return "", error("CANN", what, why, "source set_env.sh of an installed CANN")
    if not version:
        known = " (ASCEND_HOME_PATH is set, but its version cannot be read)" if home else ""
        return "", fine("CANN", f"not found{known}: needed for NPUs only, see docs/cluster.md")
    what = f"{version} in {place}"
    if not home:
        what, why = f"{what}, but ASCEND_HOME_PATH is not set", "torch_npu does not find its libraries"
        return version, warn("CANN", what, why, f"source {place}/set_env.sh, or ../set_env.sh")
    if version_numbers(version)[:2] < LEAST_CANN_FOR_V2:
        why = "CANN's own V2 operators need 8.3; this package needs 8.1 and is written for 8.5 and 9.1"
        return version, warn("CANN", what, why, "install CANN 8.5 or 9.1")
    return version, fine("CANN", what)


def _pair(torch_npu: str, cann: str) -> Iterator[Diagnostic]:
    if not torch_npu or not cann:
        return
    release = ".".join(map(str, version_numbers(cann)[:2]))
    have = version_numbers(torch_npu)[:2]
    known = ", ".join(f"{name}: {a}.{b} to {c}.{d}" for name, ((a, b), (c, d)) in MATRIX.items())
    if release not in MATRIX or have > max(high for _, high in MATRIX.values()):
        what = f"torch_npu {torch_npu} with CANN {cann} is not in a published table"
        yield warn("versions", what, f"known pairs (CANN: torch_npu): {known}", "run `ascend-moe validate`")
        return
    low, high = MATRIX[release]
    if not low <= have <= high:
        what = f"torch_npu {torch_npu} is not compatible with CANN {cann}"
        why = f"symbols are missing or differ; known pairs (CANN: torch_npu): {known}"
        yield error("versions", what, why, "change one of them")
    else:
        yield fine("versions", f"torch_npu {torch_npu} is compatible with CANN {cann}")


def _driver(root: Path) -> Diagnostic:
    found, smi = driver_version(root), shutil.which("npu-smi")
    if not found and smi is None:
        return fine("driver", "none: this machine has no NPU, or the container hides its driver")
    version = found or "of unknown version"
    if found and version_numbers(version)[:2] < (25, 0):
        why = "windows between servers and HCCL's hierarchy need 25.0.RC1.1 or later"
        return warn("driver", version, why, "install a newer driver and firmware")
    devices = len(list(Path("/dev").glob("davinci[0-9]*")))
    return fine("driver", f"{version}, {devices} devices in /dev, npu-smi {smi or 'not in PATH'}")


def owners() -> dict[str, list[Path]]:
    """Return for each operator type the operator packages with its kernels, for any SoC; CANN loads the first one's."""
    found = dict[str, list[Path]]()
    for package in library.operator_packages():
        types = set[str]()
        for path in package.glob(_OPS_INFO):
            with contextlib.suppress(OSError, ValueError):
                described = json.loads(path.read_text())
                types |= described.keys() if isinstance(described, Mapping) else set()
        for op in types:
            found.setdefault(op, []).append(package)
    return found


def _owners() -> Iterator[Diagnostic]:
    """The package that CANN loads each operator of ours from, and each MC2 operator that several packages provide."""
    topic = "operator sources"
    for op, trees in sorted(owners().items()):
        first, *others = map(str, trees)
        if others and op in library.OPERATORS:
            what = f"{op} comes from {first}, not from {', '.join(others)}"
            fix = "keep only the newest of them in ASCEND_CUSTOM_OPP_PATH"
            yield warn(topic, what, "CANN loads an operator from the first package that provides it", fix)
        elif op in library.OPERATORS or (others and op.startswith("MoeDistribute")):
            yield fine(topic, f"{op} comes from {first}" + f", not from {', '.join(others)}" * bool(others))


def _plugin() -> Diagnostic:
    """Check whether vLLM and SGLang load this package's plug-in, which replaces torch_npu's operators."""
    topic, names = "plug-in", os.environ.get("VLLM_PLUGINS")
    if settings.PATCH.text() != "1":
        return fine(topic, f"off: {settings.PATCH.name}=1 turns it on in every process of vLLM and SGLang")
    if names is not None and PLUGIN not in (name.strip() for name in names.split(",")):
        why = "vLLM loads only the plug-ins in that list"
        return warn(topic, f"{settings.PATCH.name}=1, but VLLM_PLUGINS={names}", why, f"add {PLUGIN} to VLLM_PLUGINS")
    missing = [group for group in PLUGIN_GROUPS if not any(e.name == PLUGIN for e in entry_points(group=group))]
    if missing:
        why = "vLLM and SGLang find plug-ins by the metadata of installed packages"
        what = f"{settings.PATCH.name}=1, but the package is not installed with its entry in {', '.join(missing)}"
        return warn(topic, what, why, "pip install ascend_moe")
    return fine(topic, "on: the processes of vLLM and SGLang run this package's operators")


def _package() -> Iterator[Diagnostic]:
    topic = "operator package"
    yield from _owners()
    libraries, ours = library.operator_libraries(), library.own_operator_library()
    if ours is not None:
        yield fine(topic, f"installed: {ours}")
        return
    if settings.VNPU.is_set():
        yield fine(topic, "part of the virtual NPU")
        return
    others = f" ({len(libraries)} other packages are)" if libraries else ""
    if not os.environ.get("ASCEND_HOME_PATH"):
        yield fine(topic, f"not installed{others}: needed for NPUs only")
        return
    why = "ops with tensors on an NPU find no kernel (161xxx or a missing symbol)"
    fix = "./build.sh --soc=ascend910b,ascend910_93, run the .run file it makes, then source its set_env.bash"
    yield error(topic, f"not installed{others}", why, fix)


def _probe(cann: str) -> Diagnostic:
    """Import torch_npu in a child process, because it may crash or hang if CANN is broken."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    topic = "NPUs"
    command = [sys.executable, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, env=env, cwd="/")
    except subprocess.TimeoutExpired:
        why = "another process uses the device, or the driver does not respond"
        return error(topic, f"import torch_npu did not end within {_PROBE_S} s", why, "npu-smi info; dmesg")
    report = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    if done.returncode != 0 or "devices" not in report:
        last = [f"exit code {done.returncode}", *filter(str.strip, done.stderr.splitlines())][-1]
        why = "NPUs cannot be used; `import torch` fails too unless TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        what, fix = f"torch_npu cannot be imported: {last}", "source CANN's set_env.sh"
        if not cann:
            fix += "; without an NPU: `ascend-moe vnpu -- COMMAND`, or pip uninstall torch_npu"
            return warn(topic, what, why, fix)
        return error(topic, what, why, fix if "libascendcl" in last or "libhccl" in last else "see the error")
    count = int(report["devices"])
    if not count:
        fix = "npu-smi info; ls -l /dev/davinci*"
        return warn(topic, "torch_npu finds no NPU", "the driver is missing, or /dev/davinci* is not accessible", fix)
    kind = " (virtual: host memory and CPU cores)" if settings.VNPU.is_set() else ""
    return fine(topic, f"{count} x {report.get('name', '?')}{kind}")


def _virtual(torch_npu: str) -> Diagnostic:
    topic = "virtual NPU"
    if settings.VNPU.is_set():
        return fine(topic, "active: results do not apply to real NPUs")
    named = settings.VNPU_LIBRARIES
    try:
        folder = library_folder() if named.is_set() else library.vnpu_folder_if_built()
    except LibraryError as problem:
        return error(topic, str(problem).partition(":")[0], "ascend-moe vnpu cannot start", f"unset {named.name}")
    if folder is None:
        return fine(topic, "not built: the first use builds it, which takes about a minute")
    if pair_of(installed_version("torch"), torch_npu) is None:
        return fine(topic, f"in {folder}; it needs {' or '.join(map(str, PAIRS))}")
    return fine(topic, f"in {folder}: ascend-moe vnpu -- COMMAND")
