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
    """A call of an op that the C++ library has not prepared before (AmTorchCall of csrc/torch/api.h)."""

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
    """Values from the environment and the group for preparing a call (AmTorchSettings of csrc/torch/api.h)."""

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
    """The Python functions that the C++ library calls (AmTorchPython of csrc/torch/api.h).

    ``alive`` returns 1 or 0. The others return None, or after an error the address of its text.
    """

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
    """Return the path of the ops' library, beside $ASCEND_MOE_LIBRARY or in lib/. Raises LibraryError without one."""
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
    """Return the loaded library with typed functions. Raises LibraryError if it or torch is missing or does not fit."""
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
    """Return the error that says why the ops are not available, with the fix, or None if they are."""
    try:
        library()
    except LibraryError as problem:
        return problem
    return None


def connect(callbacks: Callbacks, variables: tuple[str, ...]) -> None:
    """Register the callbacks, and the names of the variables that ``settings`` reads. Call it before the first op."""
    _must(library().am_torch_python, "the library", ctypes.byref(callbacks), " ".join(variables))


def register(name: str, schema: str) -> None:
    """Register the CPU and NPU kernels of an op of torch.ops.ascend_moe, by its name and schema."""
    _must(library().am_torch_register, f"the kernels of {name}", name, schema)


@functools.cache
def use_engine() -> None:
    """Make the CPU ops run the engine (fast or checked) of ASCEND_MOE_ENGINE, once per process."""
    native_library.lib()
    _must(library().am_torch_use_engine, "the engine's library", str(native_library.library_path()))


@functools.cache
def use_adapter(path: Path) -> None:
    """Make the NPU ops launch through the torch_npu adapter, a library loaded from ``path``."""
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
    """A recorded call of an op, without its tensors.

    ``serial``: index among the calls of its thread. ``communicator``: number of its communicator. ``number``: index
    among the communicator's calls from 1 on, 0 if arguments were refused. ``took``: nanoseconds, -1 if it did not
    return. ``tensors``: names, dtypes and shapes.
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
    """The C++ library's object for one rank's communicator: its lock, and the parameters for planning calls.

    As a context manager it holds the lock, as every op and close do.
    """

    def __init__(self, **facts: int | None) -> None:
        """``facts``: values of the fields of AmTorchHandle (csrc/torch/api.h); omitted fields are 0."""
        self._library = library()
        self.handle: int = self._library.am_torch_handle_create(ctypes.byref(_EndFacts(**facts)))

    @property
    def algorithm(self) -> int:
        """On an NPU the last op's algorithm, as an index into `plans.ALGORITHMS`; 0 before the first."""
        return int(self._library.am_torch_handle_algorithm(self.handle))

    def take_record(self, record: torch.Tensor, host: torch.Tensor) -> None:
        """Set the tensors for errors on an NPU: ``record`` on the device, and its copy ``host`` in pinned memory."""
        import torch

        torch.ops.ascend_moe_binding.take_record(self.handle, record, host)

    def register_area(self, area: int) -> None:
        """Set the native handle of an NPU's memory for registered buffers; 0: none. The caller holds the lock."""
        self._library.am_torch_handle_register(self.handle, area)

    def call_failed(self, call: RecordedCall, epoch: int, outcome: str) -> None:
        """Record that ``call`` raised: ``outcome`` is the text; ``epoch`` numbers the group's ops (0: unknown)."""
        self._library.am_torch_handle_failed(self.handle, call.number, call.took, epoch, outcome.encode())

    def last_calls(self) -> list[tuple[float, RecordedCall, str, int]]:
        """Return the recorded calls, oldest first: (start in seconds since 1970, call, outcome, epoch or 0)."""
        calls = []
        for line in _text_of(functools.partial(self._library.am_torch_handle_calls, self.handle)).split("\x1e")[:-1]:
            number, began, took, epoch, outcome, *fields = line.split("\x1f")
            call = RecordedCall(0, 0, int(number), 0, int(took), *fields)
            outcome = outcome or ("returned" if call.took >= 0 else "did not return")
            calls.append((int(began) / 1e9, call, outcome, int(epoch)))
        return calls

    def acquire(self, timeout: float = -1) -> bool:
        """Take the lock, waiting at most ``timeout`` seconds (negative: no limit); return whether that succeeded."""
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
        """Mark the communicator as closed or failed for ever: no op uses it, and an in-flight op cannot finish."""
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
    """Context manager: an op called inside only sends. On exit the yielded list contains the in-flight call, if any."""
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
    """A call that has sent and not received. Its communicator keeps it too, until it is finished or closed."""

    def __init__(self, handle: int) -> None:
        self._library, self._handle = library(), handle

    def finish(self) -> None:
        """Wait for the other ranks and receive. Raises RuntimeError, which `callbacks.stored_error` converts."""
        import torch

        torch.ops.ascend_moe_binding.finish(self._handle)

    def __del__(self) -> None:
        self._library.am_torch_drop_open(self._handle)


# ---- cache of calls


def forget() -> None:
    """Clear the cache of prepared calls, so that the next calls look up their communicators again."""
    if why_not() is None:
        library().am_torch_forget()


def set_place(place: int) -> None:
    """Set the number, above 0, that distinguishes the calling thread's LocalCluster and rank in the cache of calls."""
    library().am_torch_set_place(place)


def last_call() -> RecordedCall | None:
    """Return this thread's last call of an op that reached the C++ library, or None if there is none."""
    words = (c_int64 * 5)()
    text = _text_of(functools.partial(library().am_torch_last_call, words))
    return RecordedCall(*words, *text.split("\x1f")) if text else None


def counts() -> tuple[int, int]:
    """Return how many calls used the cache, and how many were prepared (checked and planned)."""
    words = (c_uint64 * 2)()
    library().am_torch_counts(words)
    return int(words[0]), int(words[1])


@contextlib.contextmanager
def prepare_always() -> Iterator[None]:
    """Context manager: make every call of every thread bypass the cache of prepared calls."""
    library().am_torch_prepare_always(1)
    try:
        yield
    finally:
        library().am_torch_prepare_always(-1)


def marks() -> tuple[int, int, int, int]:
    """Return four times of this thread's last call, as time.monotonic_ns: it entered the op, entered the kernel, left
    the kernel (on an NPU: the launch), left the op.
    """
    words = (c_int64 * 4)()
    library().am_torch_call_times(words)
    return words[0], words[1], words[2], words[3]
