"""The C++ library of the torch ops (csrc/torch): finding, loading and typing it; its communicator handles.

It uses torch's stable C interface, so one file works with every Python and every torch from 2.10 on. Importing this
module does not import torch, and `why_not` loads only torch's C++ library: `ascend-moe doctor` takes a second less.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import settings
from .._text import installed_version, version_numbers
from ..errors import LibraryError
from . import library as native_library

if TYPE_CHECKING:
    import torch

LIBRARY_NAME = "libascend_moe_torch.so"
INTERFACE = 9  # as in csrc/torch/api.cpp
OLDEST_TORCH = (2, 10)
_TEXT_BYTES = 1024
_SLICE_MS = 50  # longest wait for a lock in one call: between calls Python handles signals


class TorchCall(ctypes.Structure):
    """AmTorchCall of csrc/torch/api.h."""

    _fields_ = [
        ("op", c_char_p),
        ("group_ep", c_void_p),
        ("group_ep_bytes", c_uint64),
        ("comm_alg", c_void_p),
        ("comm_alg_bytes", c_uint64),
        ("world", c_int64),
        ("rank", c_int64),
        ("on_npu", c_int32),
        ("device_index", c_int32),
    ]


class Settings(ctypes.Structure):
    """AmTorchSettings of csrc/torch/api.h."""

    _fields_ = [
        *((name, c_int64) for name in ("world", "rank", "most_window_mib", "cores")),
        *((name, c_int64) for name in ("core_barrier", "timestamps", "deadline_micros", "first_deadline_micros")),
        ("comm_alg", ctypes.c_char * 64),
    ]


class _EndFacts(ctypes.Structure):
    """AmTorchHandle of csrc/torch/api.h."""

    _fields_ = [
        ("number", c_uint64),
        ("communicator", c_void_p),
        *((name, c_int64) for name in ("world", "rank", "window_mib", "registered_mib")),
        *((name, c_int32) for name in ("context_kind", "ranks_per_server", "intra_node_stores", "auto_is_window")),
        ("buffer_mib", c_int64),
        ("core_barrier", c_int64),
        *((name, c_int32) for name in ("on_npu", "of_process_group", "rdma_flags")),
    ]


class Callbacks(ctypes.Structure):
    """AmTorchPython of csrc/torch/api.h. Callbacks return the address of an error text, or None."""

    _fields_ = [
        ("settings", ctypes.CFUNCTYPE(c_void_p, POINTER(TorchCall), POINTER(Settings))),
        ("open", ctypes.CFUNCTYPE(c_void_p, POINTER(TorchCall), POINTER(c_void_p))),
        ("alive", ctypes.CFUNCTYPE(c_int, c_uint64)),
        ("unusable", ctypes.CFUNCTYPE(c_void_p, c_uint64)),
        ("failed", ctypes.CFUNCTYPE(c_void_p, c_uint64, c_int, c_void_p, c_char_p)),
        ("rule_broken", ctypes.CFUNCTYPE(c_void_p, POINTER(TorchCall), c_char_p, c_char_p, c_int64, c_char_p)),
        ("refused", ctypes.CFUNCTYPE(c_void_p, POINTER(TorchCall), c_char_p, c_char_p, c_char_p)),
    ]


_SIGNATURES: native_library.Signatures = {
    "am_torch_interface": (c_int, ()),
    "am_torch_python": (c_int, (POINTER(Callbacks), c_char_p, c_char_p, c_uint64)),
    "am_torch_register": (c_int, (c_char_p, c_char_p, c_char_p, c_uint64)),
    "am_torch_use_engine": (c_int, (c_char_p, c_char_p, c_uint64)),
    "am_torch_use_adapter": (c_int, (c_char_p, c_char_p, c_uint64)),
    "am_torch_handle_create": (c_void_p, (POINTER(_EndFacts),)),
    "am_torch_handle_destroy": (None, (c_void_p,)),
    "am_torch_handle_acquire": (None, (c_void_p, c_int, POINTER(c_int))),
    "am_torch_handle_release": (None, (c_void_p,)),
    "am_torch_handle_shut": (None, (c_void_p,)),
    "am_torch_handle_algorithm": (c_uint32, (c_void_p,)),
    "am_torch_handle_register": (None, (c_void_p, c_void_p)),
    "am_torch_last_call": (c_uint64, (POINTER(c_int64), c_void_p, c_uint64)),
    "am_torch_handle_failed": (None, (c_void_p, c_uint64, c_int64, c_uint64, c_char_p)),
    "am_torch_handle_calls": (c_uint64, (c_void_p, c_void_p, c_uint64)),
    "am_torch_forget": (None, ()),
    "am_torch_set_place": (None, (c_uint64,)),
    "am_torch_prepare_always": (None, (c_int,)),
    "am_torch_send_only": (None, (c_int,)),
    "am_torch_take_open": (c_void_p, ()),
    "am_torch_drop_open": (None, (c_void_p,)),
    "am_torch_counts": (None, (POINTER(c_uint64),)),
    "am_torch_call_times": (None, (POINTER(c_int64),)),
}


# ---- the library


def library_path() -> Path:
    """Return the library in the folder of $ASCEND_MOE_LIBRARY if there is one, else in lib/ of the package."""
    override = settings.LIBRARY.get()
    folders = [override.parent] if override else []
    folders += [entry / "lib" for entry in native_library._package_paths()]
    for folder in folders:
        if (folder / LIBRARY_NAME).is_file():
            return folder / LIBRARY_NAME
    looked = ", ".join(map(str, folders))
    raise LibraryError(f"no {LIBRARY_NAME} in {looked}: build it with {native_library.build_command()}")


@functools.cache
def library() -> ctypes.CDLL:
    """Return the loaded library with typed functions."""
    version = installed_version("torch")
    if version_numbers(version)[:2] < OLDEST_TORCH:
        raise LibraryError(f"torch is {version or 'missing'}, the ops need 2.10 or newer: pip install 'torch>=2.10'")
    path = library_path()
    _load_torch()
    opened = native_library.open_library(path, _SIGNATURES)
    interface = opened.am_torch_interface()
    if interface != INTERFACE:
        raise LibraryError(
            f"{path} has interface {interface}, this package needs {INTERFACE}: rebuild it with "
            f"{native_library.build_command()}"
        )
    return opened


def _load_torch() -> None:
    """Load the library of torch that ours is linked to. It has no effect after ``import torch``."""
    found = find_spec("torch")
    for folder in (found.submodule_search_locations or ()) if found else ():
        with contextlib.suppress(OSError):  # opening ours reports it
            ctypes.CDLL(str(Path(folder) / "lib" / "libtorch_cpu.so"))


def why_not() -> LibraryError | None:
    """Return why the ops are not available, with the fix, or None if they are."""
    try:
        library()
    except LibraryError as problem:
        return problem
    return None


def connect(callbacks: Callbacks, variables: tuple[str, ...]) -> None:
    """Register the callbacks and the environment variables that settings depend on, before the first call."""
    _must(library().am_torch_python, "the library", ctypes.byref(callbacks), " ".join(variables))


def register(name: str, schema: str) -> None:
    """Register the kernels of one op of torch.ops.ascend_moe for CPU and NPU tensors."""
    _must(library().am_torch_register, f"the kernels of {name}", name, schema)


@functools.cache
def use_engine() -> None:
    """Pass the library of the engine in ASCEND_MOE_ENGINE to the ops, once per process."""
    native_library.lib()
    _must(library().am_torch_use_engine, "the engine's library", str(native_library.library_path()))


@functools.cache
def use_adapter(path: Path) -> None:
    """Pass the loaded torch_npu adapter to the ops."""
    _must(library().am_torch_use_adapter, "the torch_npu adapter", str(path))


def _must(function: Any, what: str, *words: Any) -> None:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    given = (word.encode() if isinstance(word, str) else word for word in words)
    if function(*given, text, len(text)):
        raise LibraryError(
            f"{what} cannot be used ({text.value.decode()}): rebuild with {native_library.build_command()}"
        )


def _text_of(function: Callable[[Any, int], int]) -> str:
    """Return the text that ``function(buffer, bytes)`` writes; it may grow between two calls."""
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    while (size := int(function(text, len(text)))) > len(text):
        text = ctypes.create_string_buffer(size)
    return text.raw[:size].decode(errors="replace")


# ---- communicator handles


class RecordedCall(NamedTuple):
    """A recorded call, without its tensors.

    ``serial``: index among the calls of its thread. ``communicator``: number of its communicator. ``number``: index
    among the communicator's calls, 0 if it was refused. ``took``: nanoseconds, -1 if it did not return. ``tensors``:
    names, dtypes and shapes.
    """

    serial: int
    communicator: int
    number: int
    rank: int
    took: int
    op: str
    group: str
    comm_alg: str
    tensors: str


class CommHandle:
    """One rank's communicator in the ops' library: its lock and the parameters that calls are planned with.

    The lock is a context manager, held by one op at a time and by close.
    """

    def __init__(self, **facts: int | None) -> None:
        """``facts``: the fields of AmTorchHandle; omitted fields are 0."""
        self._library = library()
        self.handle: int = self._library.am_torch_handle_create(ctypes.byref(_EndFacts(**facts)))

    @property
    def algorithm(self) -> int:
        """NPU: code of the algorithm of the last op; 0 before the first."""
        return int(self._library.am_torch_handle_algorithm(self.handle))

    def take_record(self, record: torch.Tensor, host: torch.Tensor) -> None:
        """Set the error record of an NPU on the device and the pinned memory it is copied to."""
        import torch

        torch.ops.ascend_moe_binding.take_record(self.handle, record, host)

    def register_area(self, area: int) -> None:
        """Set the handle of an NPU's registered memory that combines send from, or 0. The caller holds the lock."""
        self._library.am_torch_handle_register(self.handle, area)

    def call_failed(self, call: RecordedCall, epoch: int, outcome: str) -> None:
        """Record what a call raised, and at which epoch."""
        self._library.am_torch_handle_failed(self.handle, call.number, call.took, epoch, outcome.encode())

    def last_calls(self) -> list[tuple[float, RecordedCall, str, int]]:
        """Return the recorded calls, oldest first: start time in seconds, call, outcome, epoch."""
        calls = []
        for line in _text_of(functools.partial(self._library.am_torch_handle_calls, self.handle)).split("\x1e")[:-1]:
            number, began, took, epoch, outcome, *fields = line.split("\x1f")
            call = RecordedCall(0, 0, int(number), 0, int(took), *fields)
            outcome = outcome or ("returned" if call.took >= 0 else "did not return")
            calls.append((int(began) / 1e9, call, outcome, int(epoch)))
        return calls

    def acquire(self, timeout: float = -1) -> bool:
        """Take the lock within ``timeout`` seconds and return whether it succeeded; negative: wait until Ctrl-C."""
        held, until = c_int(0), time.monotonic() + timeout
        try:
            self._library.am_torch_handle_acquire(self.handle, 0, ctypes.byref(held))
            while not held.value and (timeout < 0 or time.monotonic() < until):
                self._library.am_torch_handle_acquire(self.handle, _SLICE_MS, ctypes.byref(held))
        except BaseException:  # a signal handler may raise right after the lock was taken
            if held.value:
                self.release()
            raise
        return bool(held.value)

    def release(self) -> None:
        self._library.am_torch_handle_release(self.handle)

    def shut(self) -> None:
        """Mark the communicator as closed or failed, for good: no op uses it again, and one in flight cannot finish."""
        self._library.am_torch_handle_shut(self.handle)

    def __enter__(self) -> CommHandle:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.am_torch_handle_destroy(self.handle)


# ---- calls in two launches


@contextlib.contextmanager
def send_only() -> Iterator[list[InFlightCall]]:
    """Context manager: this thread's op only sends. The list then contains the in-flight call."""
    found: list[InFlightCall] = []
    library().am_torch_send_only(1)
    try:
        yield found
        handle = library().am_torch_take_open()
        if handle:
            found.append(InFlightCall(handle))
    finally:
        library().am_torch_send_only(0)


class InFlightCall:
    """A call that has only sent. Its communicator also keeps it until it is finished or the communicator is shut."""

    def __init__(self, handle: int) -> None:
        self._library, self._handle = library(), handle

    def finish(self) -> None:
        """Run the second launch. Raises torch's RuntimeError for an error that `callbacks.stored_error` returns."""
        import torch

        torch.ops.ascend_moe_binding.finish(self._handle)

    def __del__(self) -> None:
        self._library.am_torch_drop_open(self._handle)


# ---- cache of calls


def forget() -> None:
    """Clear the cache of calls, which then look up their communicators again."""
    if why_not() is None:
        library().am_torch_forget()


def set_place(place: int) -> None:
    """Set the calling thread's number: its rank and LocalCluster, above 0."""
    library().am_torch_set_place(place)


def last_call() -> RecordedCall | None:
    """Return this thread's last call that reached the library, or None."""
    words = (c_int64 * 5)()
    text = _text_of(functools.partial(library().am_torch_last_call, words))
    return RecordedCall(*words, *text.split("\x1f")) if text else None


def counts() -> tuple[int, int]:
    """Return the numbers of cache hits and of calls that were prepared (checked and planned)."""
    words = (c_uint64 * 2)()
    library().am_torch_counts(words)
    return int(words[0]), int(words[1])


@contextlib.contextmanager
def prepare_always() -> Iterator[None]:
    """Context manager: prepare every call of every thread again, for tools that observe preparations."""
    library().am_torch_prepare_always(1)
    try:
        yield
    finally:
        library().am_torch_prepare_always(-1)


def marks() -> tuple[int, int, int, int]:
    """Return time.monotonic_ns at which this thread's last call entered the op, entered and left the kernel (on an NPU:
    the launch), and left the op.
    """
    words = (c_int64 * 4)()
    library().am_torch_call_times(words)
    return words[0], words[1], words[2], words[3]
