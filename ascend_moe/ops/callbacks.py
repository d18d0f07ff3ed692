"""Callbacks of the torch ops' C++ library into Python: settings, groups and error classes.

The library calls them on a cache miss (no equal call before) and on an error. An error is stored per thread, the
library makes torch raise a RuntimeError with the same text, and `stored_error` returns the original error to raise
instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from .. import comm, errors, settings
from ..comm.communicator import by_number
from ..native import binding
from ..native.windows import deadline_s, timeout_s
from ..settings import MAX_WINDOW_MIB
from . import calls, npu_adapter, npu_communicator

# Environment variables that `_settings` reads, so that a change takes effect in the next call.
VARIABLES = (
    settings.AIV_CORES.name,
    settings.COMM_ALG.name,
    settings.CORE_BARRIER.name,
    settings.TIMESTAMPS.name,
    settings.TIMEOUT_S.name,
    settings.HCCL_INTRA_PCIE.name,
    settings.HCCL_INTRA_ROCE.name,
    "HCCL_EXEC_TIMEOUT",
)
_NAME_BYTES = binding.Settings.comm_alg.size - 1

T = TypeVar("T")
_here = threading.local()  # .error: of this thread's call; .text: its message, which the library reads
missed: set[int] = set()  # threads whose call missed the library's cache of calls


# ---- errors


def _store(error: BaseException) -> int:
    """Store an error for `stored_error`; return the address of its message."""
    # A typed error's traceback would keep the tensors of the call alive and adds nothing to the message.
    _here.error = error.with_traceback(None) if isinstance(error, errors.AscendMoeError) else error
    _here.text = ctypes.create_string_buffer((str(error) or type(error).__name__).encode())
    return ctypes.addressof(_here.text)


def stored_error(error: RuntimeError) -> BaseException:
    """Return the error that a callback has stored for this thread if ``error`` begins with its text, else ``error``."""
    found, _here.error = getattr(_here, "error", None), None
    return found if found is not None and str(error).startswith(_here.text.value.decode()) else error


def _callback(name: str) -> Callable[..., int | None]:
    """Return a C callback for ``_name`` of this module, looked up per call.

    No exception may pass through C: it is stored, and the callback returns the address of its message.
    """

    def run(*arguments: Any) -> int | None:
        try:
            globals()[f"_{name}"](*arguments)
            return None
        except BaseException as error:  # also KeyboardInterrupt, in the opening of a group
            return _store(error)

    return run


# ---- callbacks


@contextlib.contextmanager
def deadline(micros: int) -> Iterator[None]:
    """Context manager: this thread's CPU ops wait at most ``micros`` microseconds for peers, each op prepared anew."""
    _here.deadline = micros / 1e6
    try:
        with binding.prepare_always():
            yield
    finally:
        _here.deadline = None


def _text(address: int, size: int) -> str:
    return ctypes.string_at(address, size).decode()


def _settings(pointer: Any, out: Any) -> None:
    call, reply = pointer.contents, out.contents
    missed.add(threading.get_ident())
    binding.use_engine()
    algorithm = calls.comm_algorithm(_text(call.comm_alg, call.comm_alg_bytes))
    cores, deadline = calls.core_count(), getattr(_here, "deadline", None) or timeout_s()
    first_deadline = deadline
    if call.on_npu:
        binding.use_adapter(npu_adapter.load())
        deadline, first_deadline = (deadline_s(first=first) for first in (False, True))
    world, rank = comm.size_and_rank(_text(call.group_ep, call.group_ep_bytes)) or (-1, None)
    reply.world, reply.rank = world, -1 if rank is None else rank
    reply.most_window_mib, reply.cores = MAX_WINDOW_MIB, cores
    reply.core_barrier = settings.CORE_BARRIERS.index(settings.CORE_BARRIER.get())
    reply.timestamps = int(settings.TIMESTAMPS.get())
    reply.deadline_micros, reply.first_deadline_micros = int(deadline * 1e6), int(first_deadline * 1e6)
    reply.comm_alg = algorithm.encode()[:_NAME_BYTES]


def _open(pointer: Any, end: Any) -> None:
    call = pointer.contents
    group_ep = _text(call.group_ep, call.group_ep_bytes)
    if call.on_npu:
        device = torch.device(torch._C._get_privateuse1_backend_name(), call.device_index)
        op = call.op.decode()
        levels = op.endswith("_v2") and calls.is_two_level(_text(call.comm_alg, call.comm_alg_bytes))
        found: Any = npu_communicator.find(group_ep, call.world, call.rank, device, op, levels)
    else:
        found = comm.lookup(group_ep, call.world, call.rank)
    end[0] = found.ops_handle.handle
    _here.end = found  # kept alive until this thread's next call: the library takes its reference after this returns


def _alive(number: int) -> int:
    end = by_number(number)
    return int(end is not None and (end.alive is None or end.alive()))


def _unusable(number: int) -> None:
    end = by_number(number)
    if end is None:
        raise errors.CommClosed("the communicator of this call was closed; call again to open a new one")
    end.raise_why_unusable()
    text = f"rank {end.rank}: the communicator of group {end.name!r} is closed, or its process group was destroyed"
    raise errors.CommClosed(f"{text}: finish ops before that", rank=end.rank)


def _failed(number: int, code: int, record: int, fault: bytes) -> None:
    """Raise the error of a failed op; the caller holds the communicator's lock."""
    end = by_number(number)
    if end is None:
        raise errors.AscendMoeError(f"an op failed with code {code}, its communicator is closed: close it after ops")
    words = (ctypes.c_int32 * calls.error_record_words()).from_address(record)
    raise calls.failure(code, words, fault.decode(), end)


def _rule_broken(pointer: Any, rule: bytes, argument: bytes, needed_mib: int, dtype: bytes) -> None:
    call = pointer.contents
    algorithm = calls.comm_algorithm(_text(call.comm_alg, call.comm_alg_bytes))
    words = (call.op.decode(), rule.decode(), argument.decode(), needed_mib, dtype.decode(), algorithm)
    error = calls.rule_broken(*words)
    if call.on_npu and isinstance(error, errors.WindowTooSmall):
        error = npu_communicator.of_own_window(error, _text(call.group_ep, call.group_ep_bytes))
    raise error


def _refused(pointer: Any, kind: bytes, text: bytes, argument: bytes) -> None:
    details = {"argument": argument.decode()} if argument else {}
    raise getattr(errors, kind.decode())(text.decode(), **details)


_for_good: list[binding.Callbacks] = []  # the library calls them until the process exits


def connect() -> None:
    """Register this module's callbacks with the ops' C++ library, before the first op."""
    kinds: dict[str, Any] = {field[0]: field[1] for field in binding.Callbacks._fields_}
    functions = {name: _alive if name == "alive" else _callback(name) for name in kinds}
    _for_good.append(binding.Callbacks(**{name: kinds[name](functions[name]) for name in kinds}))
    binding.connect(_for_good[0], VARIABLES)
