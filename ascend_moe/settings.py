"""Every environment variable of this package: name, parser, default, rule and one line of help.

No other module spells the name of one of these variables. A reader writes ``settings.TIMEOUT_S.get()``; an
error text takes ``settings.TIMEOUT_S.name``. tools/pages_from_code.py writes `TABLE` into docs/debugging.md.

A variable is read when its value is needed, never at import: a change of ``os.environ`` counts from the next
read on. A value of blanks only counts as not set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from .errors import ArgumentError, AscendMoeError, LibraryError

T = TypeVar("T")

# Limits of the wire protocol (op_kernel/protocol/window.h; a test compares).
MAX_WORLD = 384
MAX_CORES = 64
MAX_WINDOW_MIB = 65535

DEFAULT_WINDOW_MIB = 200  # as in CANN
DEFAULT_TIMEOUT_S = 60.0
CONTEXTS = ("table", "a3", "a2")  # by number, as in op_kernel/protocol/tiling.h
MEETINGS = ("blocks", "syncall")  # by number, as in op_kernel/protocol/tiling.h
ENGINES = ("fast", "checked")
LOG_LEVELS = ("debug", "info", "warning")
# Probes of the bring-up that a choice rests on (native/probe_results.py).
PROVABLE = ("data before flag", "pull", "writer-side relay")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable.

    Attributes:
        name: the variable.
        parse: text to value; raises ValueError when the text breaks the rule.
        default: the value when the variable is not set.
        rule: ends the sentence "NAME=text must be ...".
        help: one line: what the value does.
        shown: the default in words, for pages.
        refusal: the sentence for a bad value, where it is not "NAME=text must be RULE".
        error: the class of the error for a bad value.
    """

    name: str
    parse: Callable[[str], T]
    default: T
    rule: str
    help: str
    shown: str
    refusal: str = ""
    error: type[AscendMoeError] = ArgumentError

    def text(self) -> str:
        """The variable as it is set, without blanks around it; "" when it is not set."""
        return os.environ.get(self.name, "").strip()

    def is_set(self) -> bool:
        """Whether the variable has a value."""
        return bool(self.text())

    def get(self) -> T:
        """The value."""
        text = self.text()
        return self.value_of(text) if text else self.default

    def value_of(self, text: str, name: str = "") -> T:
        """The value that ``text`` stands for; ``name`` is an argument that follows the same rule.

        Raises:
            ArgumentError, or the class ``error``: the text breaks the rule.
        """
        name = name or self.name
        try:
            return self.parse(text)
        except ValueError:
            why = self.refusal or f"must be {self.rule}"
            raise self.error(f"{name}={text} {why}", argument=name) from None


def _whole_number(low: int, high: int) -> Callable[[str], int]:
    """A parser of decimal whole numbers in low..high."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise ValueError
        return int(text)

    return parse


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1e6:
        raise ValueError
    return value


def _choice(*names: str) -> Callable[[str], str]:
    """A parser that takes these names only."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return parse


def _names(*known: str) -> Callable[[str], tuple[str, ...]]:
    """A parser of some of these names, or of "all" or "none"."""

    def parse(text: str) -> tuple[str, ...]:
        if text in ("all", "none"):
            return known if text == "all" else ()
        given = tuple(name.strip() for name in text.split(","))
        if not set(given) <= set(known):
            raise ValueError
        return given

    return parse


def _text(name: str, rule: str, help: str, shown: str = "not set", default: str = "") -> Setting[str]:
    """A setting that any text is fit for; who reads it judges it."""
    return Setting(name, str, default, rule, help, shown)


def _path(name: str, kind: str, help: str, shown: str) -> Setting[Path | None]:
    return Setting[Path | None](name, Path, None, f"a {kind}", help, shown)


# ---- how the ops run

HCCL_BUFFSIZE = Setting(
    "HCCL_BUFFSIZE",
    _whole_number(1, MAX_WINDOW_MIB),
    DEFAULT_WINDOW_MIB,
    f"a whole number of MiB in 1..{MAX_WINDOW_MIB} (default {DEFAULT_WINDOW_MIB})",
    "MiB of a rank's window; read when a communicator opens; the same on all ranks",
    str(DEFAULT_WINDOW_MIB),
)
TIMEOUT_S = Setting(
    "ASCEND_MOE_TIMEOUT_S",
    _seconds,
    DEFAULT_TIMEOUT_S,
    "a number of seconds above 0, at most 1000000",
    "seconds that an op waits for another rank; on an NPU a communicator's first op waits twice as long",
    "60; 300 on an NPU",
)
COMM_ALG = _text(
    "ASCEND_MOE_COMM_ALG",
    "a name that comm_alg takes",
    'algorithm of an op whose comm_alg is "": `window`, `direct`, `hierarchy` or `auto`; the same on all ranks',
    "`auto`, which on an NPU is `window` until `validate --bringup` has passed",
)
_HIERARCHY = 'with {} and {}: an op of a group of several A2 servers whose comm_alg is "" runs `hierarchy`, as in CANN'
_BESIDE = "; `ASCEND_MOE_COMM_ALG` overrules it"
HCCL_INTRA_PCIE = _text(
    "HCCL_INTRA_PCIE_ENABLE", "0 or 1", _HIERARCHY.format("1", "`HCCL_INTRA_ROCE_ENABLE=0`") + _BESIDE
)
HCCL_INTRA_ROCE = _text(
    "HCCL_INTRA_ROCE_ENABLE", "0 or 1", _HIERARCHY.format("0", "`HCCL_INTRA_PCIE_ENABLE=1`") + _BESIDE
)
LOGIC_SUPER_POD = _text(
    "HCCL_LOGIC_SUPERPOD_ID",
    "a number",
    "HCCL's: which super-pod of A3 this rank counts to; a group of ranks that say different ones is refused",
)
AIV_CORES = Setting[int | None](
    "ASCEND_MOE_AIV_CORES",
    _whole_number(1, MAX_CORES),
    None,
    f"a whole number in 1..{MAX_CORES}",
    "AIV cores of a launch on the twin; may differ from call to call, changes no result",
    "1; 8 on the checked engine",
)
LENT_MIB = Setting[int | None](
    "ASCEND_MOE_LENT_MIB",
    _whole_number(0, MAX_WINDOW_MIB),
    None,
    f"a whole number of MiB in 0..{MAX_WINDOW_MIB} (default: as much as the window)",
    "MiB for tensors of `window_empty`: behind a window on a CPU, part of it on an NPU; 0: none; the same on all ranks",
    "CPU: as `HCCL_BUFFSIZE`; NPU: 0",
)
RANKS_PER_SERVER = Setting(
    "ASCEND_MOE_RANKS_PER_SERVER",
    _whole_number(0, MAX_WORLD),
    0,
    f"a whole number in 0..{MAX_WORLD} (0: not told)",
    "ranks of a server. A2: goes before host names, counts ranks of the job. CPU: simulates A2's servers of that many; "
    "the same on all ranks",
    "0: A2: host names tell; CPU: one server",
)
NEAR_STORES = Setting(
    "ASCEND_MOE_NEAR_STORES",
    _choice("0", "1"),
    "0",
    "0 or 1",
    "`1`: on several servers of A2 stores reach the ranks of the own server, not BatchWrite; the same on all ranks",
    "0, until probe 2 of `validate --bringup` has passed",
)
RDMA_FLAGS = Setting(
    "ASCEND_MOE_RDMA_FLAGS",
    _choice("0", "1"),
    "0",
    "0 or 1",
    "`1`: rows between servers of A2 travel in blocks of 480 bytes and a flag of 32, which the receiver checks, so "
    "that it does not depend on the order within an item; the same on all ranks",
    "0: set it where probe 11 of `validate --bringup` fails",
)
MEETING = Setting(
    "ASCEND_MOE_MEETING",
    _choice(*MEETINGS),
    "blocks",
    f"one of {', '.join(MEETINGS)}",
    "how the cores of a rank wait for each other: for blocks of every core, or by `syncall`; goes before what probe 8 "
    "of `validate --bringup` has timed; may differ between ranks, changes no result",
    "NPU: the faster by the verdict of bring-up; else `blocks`",
)
STAMPS = Setting(
    "ASCEND_MOE_STAMPS",
    _choice("0", "1"),
    "0",
    "0 or 1",
    "`1`: every core of an op leaves the cycle at which it began each phase, as `validate --bringup --times` prints "
    "them; may differ between ranks, changes no result",
    "0",
)
CONTEXT = Setting(
    "ASCEND_MOE_CONTEXT",
    _choice(*CONTEXTS),
    "",
    f"one of {', '.join(CONTEXTS)}",
    "CPU: layout of the communication context: this package's own (`table`), or HCCL's on A3 or A2",
    "`table`; `a2` with several servers",
)
PROVEN = Setting[tuple[str, ...]](
    "ASCEND_MOE_PROVEN",
    _names(*PROVABLE),
    (),
    f"none, all, or probes of `validate --bringup` with commas between them: {', '.join(PROVABLE)}",
    "NPU: the bring-up probes that count as passed, in the place of the verdict that `ascend-moe validate --bringup` "
    "has written; `none`, `all`, or names with commas between them; the same on all ranks",
    "the verdict's file in `ASCEND_MOE_CACHE`",
)
PATCH = Setting(
    "ASCEND_MOE_PATCH",
    _choice("0", "1"),
    "0",
    "0 or 1",
    "`1`: in every process of vLLM and SGLang, their plug-in loaders put this package's operators in torch_npu's place",
    "0",
)
CHECK_PAIRS = Setting(
    "ASCEND_MOE_CHECK_PAIRS",
    _choice("0", "1"),
    "0",
    "0 or 1",
    "`1`: every combine compares its ids with those of the dispatch whose tensors it is given; each dispatch reads it",
    "0",
)
ENGINE = Setting(
    "ASCEND_MOE_ENGINE",
    _choice(*ENGINES),
    "fast",
    f"one of {', '.join(ENGINES)}",
    "`checked`: ops run on the checked engine; the ranks must be threads of a `LocalCluster`",
    "`fast`",
    refusal=f"is no engine: set it to one of {', '.join(ENGINES)}",
    error=LibraryError,
)

LOG = Setting(
    "ASCEND_MOE_LOG",
    _choice(*LOG_LEVELS),
    "warning",
    f"one of {', '.join(LOG_LEVELS)}",
    "records of the logger `ascend_moe` that go to stderr; `info`: windows, algorithms, builds; `debug`: every op; "
    "read when windows open",
    "not set: Python's `logging` decides",
)

# ---- the C++ of the twin reads these

ISA = Setting(
    "ASCEND_MOE_ISA",
    _choice("baseline", "avx2"),
    "",
    "baseline or avx2",
    "`baseline` or `avx2`: vector loops leave out the wider instructions of the machine",
    "the widest",
)
FORWARD = Setting(
    "ASCEND_MOE_FORWARD",
    _choice("0", "1"),
    "1",
    "0 or 1",
    "`0`: every copy into UB happens at once, even where the row only passes through UB",
    "1",
)
SEED = Setting[int | None](
    "ASCEND_MOE_SEED",
    _whole_number(0, 2**64 - 1),
    None,
    "a whole number of 64 bits",
    "checked engine: seed of a random schedule; without it every access happens as late as allowed",
    "not set",
)

# ---- files and folders

_OWN = "the package's own"
LIBRARY = _path("ASCEND_MOE_LIBRARY", "file", "library of the CPU ops", _OWN)
CHECKED_LIBRARY = _path("ASCEND_MOE_CHECKED_LIBRARY", "file", "library of `ascend-moe explore`", _OWN)
NPU_LIBRARY = _path(
    "ASCEND_MOE_NPU_LIBRARY",
    "file",
    "adapter between the ops and torch_npu, used as it is",
    "the package's, else built on first use",
)
VNPU_LIBRARIES = _path(
    "ASCEND_MOE_VNPU_LIBRARIES",
    "folder",
    "folder of the virtual NPU's libraries",
    "`vnpu/` beside the library of the CPU ops",
)
CACHE = _path(
    "ASCEND_MOE_CACHE",
    "folder",
    "folder for what is compiled at run time, and for the verdicts of `validate --bringup`",
    "`$XDG_CACHE_HOME/ascend_moe`, else `~/.cache/ascend_moe`",
)

CALLS = _path(
    "ASCEND_MOE_CALLS",
    "folder",
    "folder for a rank's last calls, which are written beside PeerLost and CommTimeout",
    "the temporary folder",
)

# ---- set by this package for the processes that it starts

VNPU = _text("ASCEND_MOE_VNPU", "a folder", "set by `ascend-moe vnpu`: the virtual NPU's libraries")
VNPU_SOC = _text(
    "ASCEND_MOE_VNPU_SOC", "the name of a SoC", "set by `ascend-moe vnpu`: the SoC that virtual devices report"
)
VNPU_DEVICES = _text("ASCEND_MOE_VNPU_DEVICES", "a number", "set by `ascend-moe vnpu`: the number of virtual devices")
VNPU_REPORT = _text(
    "ASCEND_MOE_VNPU_REPORT", "a file", "file to which the virtual NPU appends every launch of an op, for tests"
)
VALIDATE_OUTCOME = _path(
    "ASCEND_MOE_VALIDATE_OUTCOME",
    "file",
    "set by `ascend-moe validate`: the file into which rank 0 writes the result",
    "not set",
)

# By heading of the page.
TABLE: dict[str, tuple[Setting[Any], ...]] = {
    "How the ops run": (
        HCCL_BUFFSIZE, TIMEOUT_S, COMM_ALG, HCCL_INTRA_PCIE, HCCL_INTRA_ROCE, LOGIC_SUPER_POD, AIV_CORES, LENT_MIB,
        RANKS_PER_SERVER, NEAR_STORES, RDMA_FLAGS, MEETING, STAMPS, CONTEXT, PROVEN, PATCH, CHECK_PAIRS, ENGINE, LOG,
    ),
    "How the twin runs": (ISA, FORWARD, SEED),
    "Files and folders": (LIBRARY, CHECKED_LIBRARY, NPU_LIBRARY, VNPU_LIBRARIES, CACHE, CALLS),
    "Set by this package itself": (
        VNPU, VNPU_SOC, VNPU_DEVICES, VNPU_REPORT, VALIDATE_OUTCOME,
    ),
}  # fmt: skip
PREFIX = "ASCEND_MOE_"
NAMES = frozenset(setting.name for group in TABLE.values() for setting in group)


def setting_of(problem: BaseException) -> Setting[Any] | None:
    """The variable whose value the error ``problem`` is about; None: none's."""
    argument = getattr(problem, "details", {}).get("argument")
    return next((setting for group in TABLE.values() for setting in group if setting.name == argument), None)


def own_variables() -> dict[str, str]:
    """Every variable of the environment whose name begins with `PREFIX`, known here or not, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)}
