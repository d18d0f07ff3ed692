"""What ``ascend-moe validate --bringup`` has shown of this kind of machine, kept for later processes.

A bring-up on NPUs leaves a file for a SoC, a release of CANN and a topology: all ranks on one server, or on several.
The file names each probe and its verdict, and it speaks for groups of up to as many ranks. ASCEND_MOE_PROVEN says the
same where no file can lie (containers). What rests on an assumption of the hardware asks here for the probes of
`NEEDS`; where nothing is known, nothing is proven.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .. import settings
from .._text import write_whole
from ..errors import AscendMoeError
from ..settings import MEETINGS, PROVABLE
from .build import cache_directory

NEEDS: dict[str, tuple[str, ...]] = {"direct": PROVABLE}  # by what asks; names of probes (validate/probes.py)
ONE_SERVER, SEVERAL_SERVERS = TOPOLOGIES = ("one-server", "several-servers")
PASS = "PASS"
MEETING_PROBE = "meeting"
MAX_AGE_DAYS = 180
COMMAND = "ascend-moe validate --bringup"
_FORMAT, _DAY_S = 1, 86400.0
_ROOT = Path("/usr/local/Ascend")


@dataclass(frozen=True)
class Machine:
    """The kind of machine that a verdict speaks for. ``soc``: as torch_npu names it, "virtual ..." of the vnpu."""

    soc: str
    cann: str
    topology: str

    @property
    def path(self) -> Path:
        """Where the verdict lies."""
        words = (self.soc, f"cann-{self.cann or 'none'}", self.topology)
        name = "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", word) for word in words)
        return cache_directory() / "bringup" / f"{name}.json"


@dataclass(frozen=True)
class ProbeResults:
    """What a bring-up has found. ``ranks``: that it ran on; ``written``: seconds since 1970; ``probes``: by name.

    ``meetings``: microseconds of a meeting of a rank's cores, by `MEETINGS`; empty: not timed.
    """

    soc: str
    cann: str
    topology: str
    ranks: int
    written: float
    probes: Mapping[str, str]
    meetings: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(name for name, verdict in self.probes.items() if verdict == PASS)


def cann_version(root: Path = _ROOT) -> tuple[str, Path | None]:
    """CANN's release and where it lies; empty: none found."""
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


def machine(soc: str, topology: str) -> Machine:
    """The kind of machine that this process runs on; the virtual NPU is one of its own."""
    virtual = settings.VNPU.is_set()
    return Machine(f"virtual {soc}" if virtual else soc, "" if virtual else cann_version()[0], topology)


def proven(soc: str, topology: str, ranks: int) -> frozenset[str]:
    """The probes of `NEEDS` that count as passed for a group of so many ranks.

    A verdict of several servers speaks for one server too, because its ranks reached neighbours on their own.
    """
    wanted = frozenset(PROVABLE)
    if settings.PROVEN.is_set():
        return wanted & frozenset(settings.PROVEN.get())
    for each in TOPOLOGIES[TOPOLOGIES.index(topology) :]:
        with contextlib.suppress(AscendMoeError, OSError):
            found = read(machine(soc, each).path)
            if found is not None:
                return wanted & found.passed if ranks <= found.ranks else frozenset()
    return frozenset()


def faster_meeting(soc: str, topology: str) -> str:
    """Which of `MEETINGS` is the faster among the cores of a rank, as bring-up has timed both; "": not known.

    The number of ranks is no matter, and ranks may differ: no other rank takes part in a meeting.
    """
    for each in TOPOLOGIES[TOPOLOGIES.index(topology) :]:
        with contextlib.suppress(AscendMoeError, OSError):
            found = read(machine(soc, each).path)
            if found is not None:
                timed = found.probes.get(MEETING_PROBE) == PASS and set(found.meetings) == set(MEETINGS)
                return min(MEETINGS, key=found.meetings.__getitem__) if timed else ""
    return ""


def allows(what: str, passed: frozenset[str]) -> bool:
    """Whether every probe that ``what`` needs is among those that have passed."""
    return passed.issuperset(NEEDS[what])


def about(found: ProbeResults) -> str:
    """One line for people: the kind of machine, which of `NEEDS` it allows, what has not passed, and its age."""
    days = max(0, int((time.time() - found.written) / _DAY_S))
    where = f"{found.soc}, CANN {found.cann or 'unknown'}, {found.topology.replace('-', ' ')}, {found.ranks} ranks"
    missing = [name for name in PROVABLE if name not in found.passed]
    auto = f"window ({', '.join(missing)} not passed)" if missing else "direct"
    times = ", ".join(f"{found.meetings[way]:.2f} us by {way}" for way in MEETINGS if way in found.meetings)
    return f"{where}, {days} day(s) old: comm_alg auto is {auto}" + (f"; a meeting takes {times}" if times else "")


def write(kind: Machine, ranks: int, probes: Mapping[str, str], meetings: Mapping[str, float] | None = None) -> Path:
    """Keeps what a bring-up of so many ranks has found, in the place of an earlier verdict."""
    path = kind.path
    path.parent.mkdir(mode=0o700, exist_ok=True)
    verdict = ProbeResults(
        **asdict(kind), ranks=ranks, written=time.time(), probes=dict(probes), meetings=dict(meetings or {})
    )
    write_whole(path, json.dumps({"format": _FORMAT, **asdict(verdict)}, indent=2) + "\n")
    path.chmod(0o644)  # whatever the umask is: a file that others may write does not count
    return path


def forget(kind: Machine) -> None:
    """Removes the verdict: a bring-up that does not come to its end leaves none."""
    kind.path.unlink(missing_ok=True)


def read(path: Path) -> ProbeResults | None:
    """The verdict in a file; None: there is none.

    Raises:
        AscendMoeError: it belongs to another user, others may write it, it is too old, or it is no verdict.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror})") from None
    with open(handle, encoding="utf-8") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise _unusable(path, "is no regular file")
        if info.st_uid not in (0, os.getuid()):
            raise _unusable(path, f"belongs to user {info.st_uid}, not to this one ({os.getuid()}) or root")
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _unusable(path, f"may be written by others (mode {stat.S_IMODE(info.st_mode):o})")
        text = file.read()
    try:
        words = json.loads(text)
        if words.pop("format") != _FORMAT:
            raise ValueError
        verdict = ProbeResults(**words)
        days, probes, ranks = (time.time() - verdict.written) / _DAY_S, dict(verdict.probes), int(verdict.ranks)
        meetings = {way: float(us) for way, us in verdict.meetings.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _unusable(path, "is no verdict of this version") from None
    if not -1 <= days <= MAX_AGE_DAYS:
        age = f"is {days:.0f} days old, at most {MAX_AGE_DAYS} count" if days > 0 else "is of the future"
        raise _unusable(path, age)
    return ProbeResults(verdict.soc, verdict.cann, verdict.topology, ranks, verdict.written, probes, meetings)


def _unusable(path: Path, why: str) -> AscendMoeError:
    return AscendMoeError(f"{path} {why}: run `{COMMAND}` again")


def files() -> list[Path]:
    """Every verdict in the cache, also those that do not count."""
    return sorted((cache_directory() / "bringup").glob("*.json"))
