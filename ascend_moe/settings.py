"""Every environment variable of this package: name, parser, default, rule and one line of help.

No other module spells the name of one of these variables: code reads ``settings.TIMEOUT_S.get()``, a message contains
``settings.TIMEOUT_S.name``. tools/pages_from_code.py writes `TABLE` into docs/debugging.md.

A variable is read when its value is needed, never at import: a change of ``os.environ`` takes effect at the next
read. A blank value counts as not set.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
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
CORE_BARRIERS = ("blocks", "syncall")  # by number, as in op_kernel/protocol/tiling.h
ENGINES = ("fast", "checked")
LOG_LEVELS = ("debug", "info", "warning")
# Probes of the bring-up that select an algorithm (native/probe_results.py).
PROVABLE = ("data before flag", "pull", "writer-side relay")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable.

    Attributes:
        name: the variable.
        parse: converts the text to the value; raises ValueError if the text breaks the rule.
        default: the value when the variable is not set.
        rule: the end of the sentence "NAME=text must be ...".
        help: one line: what the value does.
        shown: the default in words, for pages.
        refusal: the end of the sentence "NAME=text ..." for a bad value; "": "must be RULE".
        error: the error class for a bad value.
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
        """Return the variable's value without surrounding blanks, or "" if it is not set."""
        return os.environ.get(self.name, "").strip()

    def is_set(self) -> bool:
        """Return whether the variable has a value."""
        return bool(self.text())

    def get(self) -> T:
        """Return the parsed value, or the default if the variable is not set. Raises as `value_of`."""
        text = self.text()
        return self.value_of(text) if text else self.default

    @contextlib.contextmanager
    def within(self, text: str) -> Iterator[None]:
        """Context manager: set the variable to ``text`` in a block, also for child processes; "" changes nothing."""
        before = os.environ.get(self.name)
        os.environ.update({self.name: text} if text else {})
        try:
            yield
        finally:
            if text:
                os.environ.pop(self.name)
                os.environ.update({} if before is None else {self.name: before})

    def value_of(self, text: str, name: str = "") -> T:
        """Return the value of ``text``. Errors name the variable, or ``name``, an argument with the same rule.

        Raises ArgumentError, or the class ``error``, if the text breaks the rule.
        """
        name = name or self.name
        try:
            return self.parse(text)
        except ValueError:
            why = self.refusal or f"must be {self.rule}"
            raise self.error(f"{name}={text} {why}", argument=name) from None


def _whole_number(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of decimal integers in low..high."""

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


def _choice(
    name: str, names: tuple[str, ...], default: str, help: str, shown: str, rule: str = "one of {}", **other: Any
) -> Setting[str]:
    """Return a setting whose value is one of ``names``."""
    listed = ", ".join(names)

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return Setting(name, parse, default, rule.format(listed), help, shown, **other)


def _flag(name: str, help: str, shown: str = "0", default: bool = False) -> Setting[bool]:
    return Setting(name, lambda text: bool(("0", "1").index(text)), default, "0 or 1", help, shown)


def _names(*known: str) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of a comma-separated list of these names, "all" or "none"."""

    def parse(text: str) -> tuple[str, ...]:
        if text in ("all", "none"):
            return known if text == "all" else ()
        given = tuple(name.strip() for name in text.split(","))
        if not set(given) <= set(known):
            raise ValueError
        return given

    return parse


def _text(name: str, rule: str, help: str, shown: str = "not set", default: str = "") -> Setting[str]:
    """Return a setting that accepts any text; its reader checks it."""
    return Setting(name, str, default, rule, help, shown)


def _path(name: str, kind: str, help: str, shown: str) -> Setting[Path | None]:
    return Setting[Path | None](name, Path, None, f"a {kind}", help, shown)


def _there(name: str, kind: str, help: str, shown: str) -> Setting[Path | None]:
    """Return a setting that names an existing file or folder with libraries."""

    def parse(text: str) -> Path:
        if not {"file": os.path.isfile, "folder": os.path.isdir}[kind](text):
            raise ValueError
        return Path(text)

    refusal = f"is not a {kind}: unset it or name one"
    return Setting[Path | None](name, parse, None, f"a {kind}", help, shown, refusal, LibraryError)


# ---- how the ops run

HCCL_BUFFSIZE = Setting(
    "HCCL_BUFFSIZE",
    _whole_number(1, MAX_WINDOW_MIB),
    DEFAULT_WINDOW_MIB,
    f"a whole number of MiB in 1..{MAX_WINDOW_MIB} (default {DEFAULT_WINDOW_MIB})",
    "window size of a rank in MiB; read when a communicator opens; must be equal on all ranks",
    str(DEFAULT_WINDOW_MIB),
)
TIMEOUT_S = Setting(
    "ASCEND_MOE_TIMEOUT_S",
    _seconds,
    DEFAULT_TIMEOUT_S,
    "a number of seconds above 0, at most 1000000",
    "seconds that an op waits for another rank; twice as long in a communicator's first op on an NPU",
    "60; 300 on an NPU",
)
WATCHDOG_S = Setting[float | None](
    "ASCEND_MOE_WATCHDOG_S",
    _seconds,
    None,
    "a number of seconds above 0, at most 1000000",
    "CPU and virtual NPU: an op that takes longer (seconds) writes what `ascend-moe hang` prints to a new file in "
    "`ASCEND_MOE_CALLS`; read when windows open",
    "not set",
)
COMM_ALG = _choice(
    "ASCEND_MOE_COMM_ALG",
    ("auto", "window", "direct", "hierarchy", "fullmesh", "fullmesh_v1", "fullmesh_v2"),  # the last are CANN's names
    "",
    'algorithm of an op whose comm_alg is "": `window`, `direct`, `hierarchy` or `auto`; must be equal on all ranks',
    "`auto`; on an NPU that is `window` until `validate --bringup` has passed",
)
HCCL_INTRA_PCIE = _text(
    "HCCL_INTRA_PCIE_ENABLE",
    "0 or 1",
    'with 1 and `HCCL_INTRA_ROCE_ENABLE=0`, an op whose comm_alg is "" on several A2 servers runs `hierarchy`, as in '
    "CANN; `ASCEND_MOE_COMM_ALG` takes precedence",
)
HCCL_INTRA_ROCE = _text("HCCL_INTRA_ROCE_ENABLE", "0 or 1", "see `HCCL_INTRA_PCIE_ENABLE`")
LOGIC_SUPER_POD = _text(
    "HCCL_LOGIC_SUPERPOD_ID",
    "a number",
    "HCCL's super-pod id of this rank (A3); a group whose ranks have different ids is refused",
)
AIV_CORES = Setting[int | None](
    "ASCEND_MOE_AIV_CORES",
    _whole_number(1, MAX_CORES),
    None,
    f"a whole number in 1..{MAX_CORES}",
    "AIV cores per launch on the twin; may change between calls; does not change results",
    "1; 8 on the checked engine",
)
REGISTERED_MIB = Setting[int | None](
    "ASCEND_MOE_REGISTERED_MIB",
    _whole_number(0, MAX_WINDOW_MIB),
    None,
    f"a whole number of MiB in 0..{MAX_WINDOW_MIB} (default: the window size)",
    "MiB for tensors of `window_empty`: outside the window on a CPU, part of it on an NPU; 0: none; must be equal on "
    "all ranks",
    "CPU: as `HCCL_BUFFSIZE`; NPU: 0",
)
RANKS_PER_SERVER = Setting(
    "ASCEND_MOE_RANKS_PER_SERVER",
    _whole_number(0, MAX_WORLD),
    0,
    f"a whole number in 0..{MAX_WORLD} (0: not set)",
    "ranks per server. A2: takes precedence over host names, counts ranks of the job. CPU: simulates A2 servers of "
    "this size; must be equal on all ranks",
    "0: A2: from host names; CPU: one server",
)
INTRA_NODE_STORES = _flag(
    "ASCEND_MOE_INTRA_NODE_STORES",
    "`1`: on several A2 servers, ranks of one server communicate by stores, not BatchWrite; must be equal on all ranks",
    "0, until probe 2 of `validate --bringup` has passed",
)
RDMA_FLAGS = _flag(
    "ASCEND_MOE_RDMA_FLAGS",
    "`1`: rows between A2 servers travel in blocks of 480 bytes plus a 32-byte flag, which the receiver checks, so "
    "that the order of writes within an item does not matter; must be equal on all ranks",
    "0; set it if probe 11 of `validate --bringup` fails",
)
CORE_BARRIER = _choice(
    "ASCEND_MOE_CORE_BARRIER",
    CORE_BARRIERS,
    "blocks",
    "core barrier of a rank: `blocks` (one status block per core) or `syncall`; takes precedence over the timing of "
    "probe 8 of `validate --bringup`; may differ between ranks; does not change results",
    "NPU: the faster one in the bring-up results; else `blocks`",
)
TIMESTAMPS = _flag(
    "ASCEND_MOE_TIMESTAMPS",
    "`1`: every core of an op records the cycle at which each phase began; `validate --bringup --times` prints them; "
    "may differ between ranks; does not change results",
)
CONTEXT = _choice(
    "ASCEND_MOE_CONTEXT",
    CONTEXTS,
    "",
    "CPU: layout of the communication context: this package's own (`table`), or HCCL's on A3 or A2",
    "`table`; `a2` with several servers",
)
PROVEN = Setting[tuple[str, ...]](
    "ASCEND_MOE_PROVEN",
    _names(*PROVABLE),
    (),
    f"none, all, or a comma-separated list of probes of `validate --bringup`: {', '.join(PROVABLE)}",
    "NPU: bring-up probes that count as passed instead of the results stored by `ascend-moe validate --bringup`: "
    "`none`, `all`, or a comma-separated list; must be equal on all ranks",
    "the results in `ASCEND_MOE_CACHE`",
)
PATCH = _flag(
    "ASCEND_MOE_PATCH",
    "`1`: the plug-in loaders of vLLM and SGLang replace torch_npu's operators by this package's in every process",
)
CHECK_ROUTING = _flag(
    "ASCEND_MOE_CHECK_ROUTING",
    "`1`: every combine compares its ids with those of its dispatch; read by each dispatch",
)
ENGINE = _choice(
    "ASCEND_MOE_ENGINE",
    ENGINES,
    "fast",
    "`checked`: ops run on the checked engine; the ranks must be threads of a `LocalCluster`",
    "`fast`",
    refusal=f"is no engine: set it to one of {', '.join(ENGINES)}",
    error=LibraryError,
)

LOG = _choice(
    "ASCEND_MOE_LOG",
    LOG_LEVELS,
    "warning",
    "level of the logger `ascend_moe` on stderr: `info`: windows, algorithms, builds; `debug`: every op; "
    "read when windows open",
    "not set: Python's `logging` decides",
)

# ---- read by the C++ code of the twin

ISA = _choice(
    "ASCEND_MOE_ISA",
    ("baseline", "avx2"),
    "",
    "`baseline` or `avx2`: restricts vector loops to these instructions",
    "the widest",
    "baseline or avx2",
)
FORWARD = _flag(
    "ASCEND_MOE_FORWARD",
    "`0`: copy rows into UB at once, even if they only pass through it",
    "1",
    default=True,
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
LIBRARY = _there("ASCEND_MOE_LIBRARY", "file", "library of the CPU ops", _OWN)
CHECKED_LIBRARY = _there("ASCEND_MOE_CHECKED_LIBRARY", "file", "library of `ascend-moe explore`", _OWN)
NPU_LIBRARY = _there(
    "ASCEND_MOE_NPU_LIBRARY",
    "file",
    "adapter between the ops and torch_npu, used as it is",
    "the package's, else built on first use",
)
VNPU_LIBRARIES = _there(
    "ASCEND_MOE_VNPU_LIBRARIES",
    "folder",
    "folder of the virtual NPU's libraries",
    "`vnpu/` in the folder of the library of the CPU ops",
)
CACHE = _path(
    "ASCEND_MOE_CACHE",
    "folder",
    "folder for code compiled at run time and for the results of `validate --bringup`",
    "`$XDG_CACHE_HOME/ascend_moe`, else `~/.cache/ascend_moe`",
)

CALLS = _path(
    "ASCEND_MOE_CALLS",
    "folder that can be written",
    "folder for the log of a rank's last calls, written on PeerLost and CommTimeout; watchdog files",
    "the temporary folder",
)

# ---- set by this package for its child processes

VNPU = _text("ASCEND_MOE_VNPU", "a folder", "set by `ascend-moe vnpu`: folder of the virtual NPU's libraries")
VNPU_SOC = _text(
    "ASCEND_MOE_VNPU_SOC", "the name of a SoC", "set by `ascend-moe vnpu`: SoC name reported by virtual devices"
)
VNPU_DEVICES = _text("ASCEND_MOE_VNPU_DEVICES", "a number", "set by `ascend-moe vnpu`: number of virtual devices")
VNPU_REPORT = _text(
    "ASCEND_MOE_VNPU_REPORT", "a file", "file to which the virtual NPU appends every launched op, for tests"
)
VNPU_CANN = _text(
    "ASCEND_MOE_VNPU_CANN",
    "a version",
    "CANN release whose HCCL the virtual NPU mimics, such as 8.1, for tests: before 8.3 HCCL_INTRA_* decide how the "
    "ranks of an A2 server are linked",
)
VALIDATE_OUTCOME = _path(
    "ASCEND_MOE_VALIDATE_OUTCOME",
    "file",
    "set by `ascend-moe validate`: result file of rank 0",
    "not set",
)

# By heading of the page.
TABLE: dict[str, tuple[Setting[Any], ...]] = {
    "How the ops run": (
        HCCL_BUFFSIZE, TIMEOUT_S, WATCHDOG_S, COMM_ALG, HCCL_INTRA_PCIE, HCCL_INTRA_ROCE, LOGIC_SUPER_POD, AIV_CORES,
        REGISTERED_MIB, RANKS_PER_SERVER, INTRA_NODE_STORES, RDMA_FLAGS, CORE_BARRIER, TIMESTAMPS, CONTEXT, PROVEN,
        PATCH, CHECK_ROUTING, ENGINE, LOG,
    ),
    "How the twin runs": (ISA, FORWARD, SEED),
    "Files and folders": (LIBRARY, CHECKED_LIBRARY, NPU_LIBRARY, VNPU_LIBRARIES, CACHE, CALLS),
    "Set by this package itself": (
        VNPU, VNPU_SOC, VNPU_DEVICES, VNPU_REPORT, VNPU_CANN, VALIDATE_OUTCOME,
    ),
}  # fmt: skip
PREFIX = "ASCEND_MOE_"
NAMES = frozenset(setting.name for group in TABLE.values() for setting in group)


def setting_of(problem: BaseException) -> Setting[Any] | None:
    """Return the `Setting` that ``problem.argument`` names, or None if the error is not about a setting."""
    argument = getattr(problem, "details", {}).get("argument")
    return next((setting for group in TABLE.values() for setting in group if setting.name == argument), None)


def own_variables() -> dict[str, str]:
    """Return {name: value} of all environment variables whose name begins with `PREFIX`, sorted, known or not."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIX)}
