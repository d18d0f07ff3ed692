"""The compiled kernels of the torch ops (csrc/torch): found, loaded, told what Python has found out.

A call that equals one before it runs without Python: its plan, its communicator and the shapes of its outputs
are remembered by everything that the checks read. Every other call, and every error, is Python's
(`ascend_moe.ops`), which remains the whole implementation where the library does not fit the torch that runs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int16, c_int64, c_uint64, c_void_p
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch

from ..errors import LibraryError
from ..native import library as _lib

Caller = Callable[[tuple[Any, ...], dict[str, Any]], Any]

SWITCH = "ASCEND_MOE_TORCH_OPS"
CHOICES = ("auto", "compiled", "python")
# Read by Python in every call (native.plan_for), so that a change of os.environ takes effect in the next one.
VARIABLES = (
    "ASCEND_MOE_AIV_CORES",
    "ASCEND_MOE_COMM_ALG",
    "ASCEND_MOE_TIMEOUT_S",
)
INTERFACE = 3  # as in csrc/torch/api.cpp
RECORD_WORDS = 64  # that its launches have room for
_SLICE_MS = 50  # of a wait for a gate: between them Python sees its signals


class _Call(ctypes.Structure):
    """AmTorchCall of csrc/torch/api.h."""

    _fields_ = [
        ("plan", c_void_p),
        ("gate", c_void_p),
        ("communicator_id", c_uint64),
        ("run", c_void_p),
        ("group", c_char_p),
        ("positions", POINTER(c_int16)),
        ("arguments", c_uint64),
        ("inputs", c_uint64),
        ("outputs", POINTER(c_int64)),
        ("output_count", c_uint64),
    ]


class _Lender(ctypes.Structure):
    """AmTorchLender of csrc/torch/api.h."""

    _fields_ = [
        ("group_ep", c_char_p),
        ("world", c_int64),
        ("rank", c_int64),
        ("group", c_char_p),
        ("gate", c_void_p),
        ("area", c_void_p),
        ("take", c_void_p),
        ("release", c_void_p),
        ("unused", c_void_p),
    ]


# c10::ScalarType of what outputs are of; torch has no accessor.
_SCALAR_TYPES: dict[torch.dtype | None, int] = {
    torch.int8: 1,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.bfloat16: 15,
}

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "am_torch_watch": (None, (c_char_p,)),
    "am_torch_register": (c_int, (c_uint64, c_char_p, c_char_p, c_uint64)),
    "am_torch_gate_create": (c_void_p, (c_void_p,)),
    "am_torch_gate_destroy": (None, (c_void_p,)),
    "am_torch_gate_acquire": (None, (c_void_p, c_int, POINTER(c_int))),
    "am_torch_gate_release": (None, (c_void_p,)),
    "am_torch_gate_close": (None, (c_void_p,)),
    "am_torch_plan_create": (c_void_p, (c_void_p, c_void_p)),
    "am_torch_plan_drop": (None, (c_void_p,)),
    "am_torch_remember": (c_int, (POINTER(_Call),)),
    "am_torch_generation": (c_uint64, ()),
    "am_torch_remember_lender": (None, (c_uint64, POINTER(_Lender))),
    "am_torch_end_lending": (None, ()),
    "am_torch_forget": (None, ()),
    "am_torch_set_place": (None, (c_uint64,)),
    "am_torch_pause": (None, (c_int,)),
    "am_torch_counts": (None, (POINTER(c_uint64),)),
    "am_torch_clocks": (None, (c_int,)),
    "am_torch_marks": (None, (POINTER(c_int64),)),
}


# ---- the library


def choice() -> str:
    """Which kernels the torch ops get: ASCEND_MOE_TORCH_OPS, ``auto`` when it is not set.

    Raises:
        LibraryError: it is none of ``CHOICES``.
    """
    text = os.environ.get(SWITCH, "").strip() or "auto"
    if text not in CHOICES:
        raise LibraryError(f"{SWITCH}={text} must be one of {', '.join(CHOICES)}")
    return text


def library_name() -> str:
    """File name of the library for the torch that is imported: for no other, not even of another build."""
    return f"libascend_moe_torch-{torch.__version__}.so"


def library_path() -> Path:
    """Beside $ASCEND_MOE_LIBRARY when it is there, else in lib/ of the package.

    Raises:
        LibraryError: there is none for this torch; with the command that builds it.
    """
    override = os.environ.get("ASCEND_MOE_LIBRARY")
    folders = [Path(override).parent] if override else []
    folders += [entry / "lib" for entry in _lib._package_paths()]
    for folder in folders:
        if (folder / library_name()).is_file():
            return folder / library_name()
    others = sorted({path.name for folder in folders for path in folder.glob("libascend_moe_torch-*.so")})
    known = f", only {', '.join(others)}" if others else ""
    looked = ", ".join(map(str, folders))
    raise LibraryError(f"no {library_name()} in {looked}{known}: build it with\n  {_lib.build_command()}")


@functools.cache
def why_not() -> LibraryError | None:
    """Why the torch ops' Python kernels run, with the fix; None: the compiled ones do."""
    try:
        if choice() == "python":
            return LibraryError(f"{SWITCH}=python: unset it")
        _open()
    except LibraryError as problem:
        return problem
    return None


@functools.cache
def refusal() -> LibraryError | None:
    """What an op says instead of running Python's kernel against the caller's wish."""
    asked = os.environ.get(SWITCH, "").strip()
    return None if asked in ("", "auto", "python") else why_not()


@functools.cache
def _open() -> ctypes.CDLL:
    path = library_path()
    fix = f"rebuild it with\n  {_lib.build_command()}"
    try:
        library = ctypes.CDLL(str(path))
        interface = int(library.am_torch_interface())
        for name, (restype, argtypes) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = restype, argtypes
    except (OSError, AttributeError) as error:
        raise LibraryError(f"{path} cannot be loaded ({error}): {fix}") from error
    if interface != INTERFACE:
        raise LibraryError(f"{path} is of interface {interface}, this package of {INTERFACE}: {fix}")
    library.am_torch_watch(" ".join(VARIABLES).encode())
    return library


def active() -> bool:
    """Whether the compiled kernels run."""
    return why_not() is None


def loaded() -> str:
    """Path of the library whose kernels run; empty: none's."""
    return str(_open()._name) if active() else ""


def register(number: int, name: str) -> None:
    """Puts the compiled kernels of one op of torch.ops.ascend_moe in place, once, over the Python op's.

    Raises:
        LibraryError: torch refuses.
    """
    text = ctypes.create_string_buffer(1024)
    if _open().am_torch_register(number, name.encode(), text, len(text)):
        raise LibraryError(f"the compiled kernel of {name} cannot be registered: {text.value.decode()}")


def calls_name() -> str:
    """File name of the extension module, beside the library, for this torch and this Python."""
    return f"ascend_moe_calls-{torch.__version__}{sysconfig.get_config_var('EXT_SUFFIX')}"


@functools.cache
def calls() -> ModuleType | None:
    """The extension module of calls past torch's binding; None: there is none for this Python and torch."""
    if not active():
        return None
    path = Path(loaded()).with_name(calls_name())
    if not path.is_file():
        return None
    loader = importlib.machinery.ExtensionFileLoader("ascend_moe_calls", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError:  # of another build: torch's own way is left
        return None
    atexit.register(_open().am_torch_end_lending)
    return module


def caller(number: int, name: str, names: Sequence[str]) -> Caller | None:
    """Of an op that is registered: the call of its compiled kernel past torch, with a tuple and a dict.

    It returns None where torch has to be asked: a call that nobody has planned, gradients, modes, errors.
    """
    module = calls()
    return None if module is None else module.caller(number, name, tuple(names))


# ---- locks and plans


class Gate:
    """A communicator's lock, which the compiled kernels take too. As threading.Lock, and ``close``."""

    def __init__(self, communicator: int) -> None:
        self._library = _open()
        self.handle: int = self._library.am_torch_gate_create(communicator)

    def acquire(self, timeout: float = -1) -> bool:
        """Whether it was free within ``timeout`` seconds; negative: waits on, and Ctrl-C ends it."""
        held, until = c_int(0), time.monotonic() + timeout
        try:
            self._library.am_torch_gate_acquire(self.handle, 0, ctypes.byref(held))
            while not held.value and (timeout < 0 or time.monotonic() < until):
                self._library.am_torch_gate_acquire(self.handle, _SLICE_MS, ctypes.byref(held))
        except BaseException:  # of a signal handler, which may run right after the gate was taken
            if held.value:
                self.release()
            raise
        return bool(held.value)

    def release(self) -> None:
        self._library.am_torch_gate_release(self.handle)

    def close(self) -> None:
        """For good: equal calls go to Python again."""
        self._library.am_torch_gate_close(self.handle)

    def __enter__(self) -> Gate:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.am_torch_gate_destroy(self.handle)


class SharedPlan:
    """A native plan that remembered calls own together with Python's Plan."""

    def __init__(self, plan: int, destroy: Any) -> None:
        self._library = _open()
        self.handle: int = self._library.am_torch_plan_create(plan, ctypes.cast(destroy, c_void_p))

    def drop(self) -> None:
        self._library.am_torch_plan_drop(self.handle)


# ---- remembered calls


def remember(
    plan: SharedPlan,
    gate: Gate,
    communicator_id: int,
    run: Any,
    group: str | None,
    positions: Sequence[int],
    inputs: int,
    outputs: Sequence[tuple[torch.dtype | None, tuple[int, ...]]],
) -> bool:
    """Of the call that this thread's kernel has handed to Python: equal ones launch at once from now on.

    Args:
        communicator_id: given back to ``ascend_moe_python::raise_error`` when such a call fails.
        run: am_run of the library that made plan and communicator.
        group: the process group's name in c10d, with which the call ends; None for a LocalCluster.
        positions: by argument of the op its place among am_run's ``inputs``, -1 for what is no tensor.
    """
    words: list[int] = []
    for dtype, shape in outputs:
        if dtype not in _SCALAR_TYPES or len(shape) > 2:
            return False
        words += _SCALAR_TYPES[dtype], len(shape), *(*shape, 0, 0)[:2]
    call = _Call(
        plan.handle,
        gate.handle,
        communicator_id,
        ctypes.cast(run, c_void_p),
        None if group is None else group.encode(),
        (c_int16 * len(positions))(*positions),
        len(positions),
        inputs,
        (c_int64 * len(words))(*words),
        len(outputs),
    )
    return bool(_open().am_torch_remember(ctypes.byref(call)))


def generation() -> int:
    """Of what is remembered: read it before finding out what ``remember_lender`` is told."""
    return int(_open().am_torch_generation())


def remember_lender(
    generation: int,
    group_ep: str,
    world: int,
    rank: int,
    group: str | None,
    gate: Gate,
    area: int,
    take: Any,
    release: Any,
    unused: Any,
) -> None:
    """Whom ``lend`` of the extension module asks when it is called with these on this thread.

    Args:
        group: the process group's name in c10d, with which this ends; None for a LocalCluster.
        area, take, release: the lent area, and am_lent_take and am_lent_release of its library.
        unused: a ctypes callback that lives as long as tensors do: the last one of a closed area has died.
    """
    pointers = (ctypes.cast(function, c_void_p) for function in (take, release, unused))
    names = (group_ep.encode(), world, rank, None if group is None else group.encode())
    lender = _Lender(*names, gate.handle, area, *pointers)
    _open().am_torch_remember_lender(generation, ctypes.byref(lender))


def forget() -> None:
    """What calls find may be another communicator or none from now on."""
    if active():
        _open().am_torch_forget()


def set_place(place: int) -> None:
    """Which rank of which LocalCluster the calling thread is, above 0."""
    if active():
        _open().am_torch_set_place(place)


def counts() -> tuple[int, int, int]:
    """Calls so far: launched by the compiled kernels alone, handed to Python, and of the first those that
    torch did not see either. Zeros where those kernels do not run.
    """
    found = (c_uint64 * 3)()
    if active():
        _open().am_torch_counts(found)
    return int(found[0]), int(found[1]), int(found[2])


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Every call is Python's meanwhile, in all threads: for tools that look at launches there."""
    if not active():
        yield
        return
    _open().am_torch_pause(1)
    try:
        yield
    finally:
        _open().am_torch_pause(-1)


@contextlib.contextmanager
def clocks() -> Iterator[Callable[[], tuple[int, int, int, int]]]:
    """Measurements: gives what tells, of this thread's last call without Python, in nanoseconds of
    time.monotonic_ns, when it entered the kernel, entered and left am_run, left the kernel.
    """
    library, found = _open(), (c_int64 * 4)()

    def marks() -> tuple[int, int, int, int]:
        library.am_torch_marks(found)
        return found[0], found[1], found[2], found[3]

    library.am_torch_clocks(1)
    try:
        yield marks
    finally:
        library.am_torch_clocks(0)
