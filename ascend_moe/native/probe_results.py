"""Results of ``ascend-moe validate --bringup`` for this kind of machine, stored for later processes.

A bring-up on NPUs writes one file per SoC, CANN release and topology (all ranks on one server, or on several). It
contains the result of each probe and applies to groups of up to as many ranks. ASCEND_MOE_PROVEN replaces it where no
file can be stored (containers). Code that relies on hardware behaviour requires the probes in `NEEDS` to have passed;
without results nothing counts as passed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from .. import settings
from .._text import write_whole
from ..errors import AscendMoeError
from ..settings import CORE_BARRIERS, PROVABLE
from .build import cache_directory

NEEDS: dict[str, tuple[str, ...]] = {"direct": PROVABLE}  # algorithm -> names of probes (validate/probes.py)
ONE_SERVER, SEVERAL_SERVERS = TOPOLOGIES = ("one-server", "several-servers")
PASS = "PASS"
BARRIER_PROBE = "core barrier"
MAX_AGE_DAYS = 180
COMMAND = "ascend-moe validate --bringup"
_FORMAT, _DAY_S = 2, 86400.0
_ROOT = Path("/usr/local/Ascend")


@dataclass(frozen=True)
class Machine:
    """A kind of machine: SoC (torch_npu's name, "virtual NAME" on the virtual NPU), CANN's release, topology."""

    soc: str
    cann: str
    topology: str

    @property
    def path(self) -> Path:
        """Path of the file with the bring-up results for this kind of machine."""
        words = (self.soc, f"cann-{self.cann or 'none'}", self.topology)
        name = "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", word) for word in words)
        return cache_directory() / "bringup" / f"{name}.json"


@dataclass(frozen=True)
class ProbeResults:
    """Results of a bring-up: number of ranks, ``written`` in seconds since 1970, result of each probe by name.

    ``barriers``: microseconds of a core barrier by kind (`CORE_BARRIERS`); empty if not timed. ``links``: for probes on
    several A2 servers, how HCCL linked the ranks of a server (by stores or by RDMA); their results apply to that only.
    """

    soc: str
    cann: str
    topology: str
    ranks: int
    written: float
    probes: Mapping[str, str]
    barriers: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(name for name, result in self.probes.items() if result == PASS)

    def passed_for(self, topology: str) -> frozenset[str]:
        """Return the passed probes that apply to ``topology``; if it is another one, without those that ran by RDMA."""
        if topology == self.topology:
            return self.passed
        return frozenset(name for name in self.passed if not self.links.get(name, "").startswith("RDMA"))


def cann_version(root: Path = _ROOT) -> tuple[str, Path | None]:
    """Return CANN's (release, folder), looked for in ASCEND_HOME_PATH, ASCEND_TOOLKIT_HOME, ``root``; or ("", None)."""
    named = [os.environ.get(name, "") for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    places = [Path(name) for name in named if name]
    places += [root / "ascend-toolkit" / "latest", root / "cann", root / "latest"]
    for place in places:
        names = ["version.cfg", "version.info", "*-linux/ascend_toolkit_install.info"]
        names += ["compiler/version.info", "runtime/version.info"]
        for info in [info for name in names for info in place.glob(name)]:
            try:
                match = re.search(r"(?i)version\s*=\s*\[?(?:[^:\]\n]*:)?v?(\d+\.\d+[\w.]*)", info.read_text())
            except OSError:
                continue
            if match:
                return match.group(1), place
    return "", None


def driver_version(root: Path = _ROOT) -> str:
    """Return the version of the NPU driver below ``root``, or "" if it is not found."""
    try:
        match = re.search(r"(?i)^version\s*=\s*(\S+)", (root / "driver" / "version.info").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return match.group(1) if match else ""


def machine(soc: str, topology: str) -> Machine:
    """Return the kind of this machine, with the SoC and topology as passed; the virtual NPU is a kind of its own."""
    virtual = settings.VNPU.is_set()
    return Machine(f"virtual {soc}" if virtual else soc, "" if virtual else cann_version()[0], topology)


def proven(soc: str, topology: str, ranks: int) -> frozenset[str]:
    """Return the probes of `NEEDS` that count as passed for a group of ``ranks`` ranks: those in ASCEND_MOE_PROVEN.

    If it is unset, those in the stored results of a bring-up on at least as many ranks. Results of several servers also
    apply to one server if the probe ran by stores within a server.
    """
    wanted = frozenset(PROVABLE)
    if settings.PROVEN.is_set():
        return wanted & frozenset(settings.PROVEN.get())
    found = _stored(soc, topology)
    return wanted & found.passed_for(topology) if found is not None and ranks <= found.ranks else frozenset()


def _stored(soc: str, topology: str) -> ProbeResults | None:
    """Return the valid results for this machine and topology, or else for several servers."""
    for each in TOPOLOGIES[TOPOLOGIES.index(topology) :]:
        with contextlib.suppress(AscendMoeError, OSError):
            found = read(machine(soc, each).path)
            if found is not None:
                return found
    return None


def faster_barrier(soc: str, topology: str) -> str:
    """Return the faster kind of core barrier in `CORE_BARRIERS` as timed by bring-up, or "" if unknown.

    It applies to any number of ranks: a core barrier involves the cores of one rank only.
    """
    found = _stored(soc, topology)
    if found is None or found.probes.get(BARRIER_PROBE) != PASS or set(found.barriers) != set(CORE_BARRIERS):
        return ""
    return min(CORE_BARRIERS, key=found.barriers.__getitem__)


def allows(what: str, passed: frozenset[str]) -> bool:
    """Return whether ``passed`` contains all probes that the algorithm ``what`` (a key of `NEEDS`) needs."""
    return passed.issuperset(NEEDS[what])


def about(found: ProbeResults) -> str:
    """Return one line on results: the kind of machine, their age, the algorithm of comm_alg auto, probes not passed."""
    days = max(0, int((time.time() - found.written) / _DAY_S))
    where = f"{found.soc}, CANN {found.cann or 'unknown'}, {found.topology.replace('-', ' ')}, {found.ranks} ranks"
    missing = [name for name in PROVABLE if name not in found.passed]
    auto = f"window ({', '.join(missing)} not passed)" if missing else "direct"
    times = ", ".join(f"{found.barriers[kind]:.2f} us by {kind}" for kind in CORE_BARRIERS if kind in found.barriers)
    return f"{where}, {days} day(s) old: comm_alg auto is {auto}" + (f"; core barrier: {times}" if times else "")


def write(
    kind: Machine,
    ranks: int,
    probes: Mapping[str, str],
    barriers: Mapping[str, float] | None = None,
    links: Mapping[str, str] | None = None,
) -> Path:
    """Store the results of a complete bring-up on ``ranks`` ranks, atomically replacing others; return the path."""
    path = kind.path
    path.parent.mkdir(mode=0o700, exist_ok=True)
    results = ProbeResults(
        **asdict(kind),
        ranks=ranks,
        written=time.time(),
        probes=dict(probes),
        barriers=dict(barriers or {}),
        links=dict(links or {}),
    )
    write_whole(path, json.dumps({"format": _FORMAT, **asdict(results)}, indent=2) + "\n")
    path.chmod(0o644)  # independent of the umask: a file that others may write is refused
    return path


def read(path: Path) -> ProbeResults | None:
    """Return the results in a file, or None if there is none.

    Raises:
        AscendMoeError: another user owns it, others may write it, it is too old, or its content is invalid.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror})") from None
    with open(handle, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise _unusable(path, "is not a regular file")
        if info.st_uid not in (0, os.getuid()):
            raise _unusable(path, f"belongs to user {info.st_uid}, not to this user ({os.getuid()}) or root")
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _unusable(path, f"may be written by others (mode {stat.S_IMODE(info.st_mode):o})")
        text = file.read()
    try:
        words = json.loads(text)
        if words.pop("format") != _FORMAT:
            raise ValueError
        results = ProbeResults(**words)
        days, probes, ranks = (time.time() - results.written) / _DAY_S, dict(results.probes), int(results.ranks)
        barriers = {kind: float(us) for kind, us in results.barriers.items()}
        links = {name: str(of_probe) for name, of_probe in results.links.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _unusable(path, "is not a result file of this version") from None
    if not -1 <= days <= MAX_AGE_DAYS:
        age = f"is {days:.0f} days old, the limit is {MAX_AGE_DAYS}" if days > 0 else "has a time in the future"
        raise _unusable(path, age)
    return replace(results, ranks=ranks, probes=probes, barriers=barriers, links=links)


def _unusable(path: Path, why: str) -> AscendMoeError:
    return AscendMoeError(f"{path} {why}: run `{COMMAND}` again")


def files() -> list[Path]:
    """Return all result files in the cache, including invalid ones."""
    return sorted((cache_directory() / "bringup").glob("*.json"))
