"""Calls across the C ABI: descriptions, and plans, which are checked calls with their tiling. Does not import torch.

dtypes are torch's, or their names ("bfloat16").
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

from .. import errors, settings
from ..settings import MAX_WINDOW_MIB
from . import library as _lib

OP_DISPATCH, OP_COMBINE = 1, 2
ALGORITHMS = ("", "window", "direct", "hierarchy")  # by the kernels' codes
MAX_CORES = 64
DEFAULT_CORES = 1  # all cores of a rank share one thread: more only add core barriers
CHECKED_CORES = 8  # to detect races between cores too
_NO_VALUE = -(2**63)
_INFO_WORDS = 7  # of am_plan_info
_OTHER_TYPE = "another dtype"
_DTYPES = ("float32", "float16", "bfloat16", "int8", "int32", "int64", "bool")


class TensorDesc(ctypes.Structure):
    _fields_ = [("dtype", ctypes.c_int32), ("rank", ctypes.c_int32), ("dims", ctypes.c_int64 * 3)]


class CheckResult(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("needed_mib", ctypes.c_int64),
        ("argument", ctypes.c_char * 64),
        ("message", ctypes.c_char * 448),
    ]


# ---- settings of calls


def core_count() -> int:
    """Return the AIV cores per launch: ASCEND_MOE_AIV_CORES, default 1 on the fast engine, 8 on the others."""
    cores = settings.AIV_CORES.get()
    if cores is not None:
        return cores
    return DEFAULT_CORES if _lib.engine_name() == "fast" else CHECKED_CORES


_BY_HCCL = "auto by HCCL_INTRA_*"  # as in op_host/rules: hierarchy between servers of A2, else auto


def comm_algorithm(name: str) -> str:
    """Return the algorithm of a call with ``comm_alg=name``; for "" (and every V1 call) ASCEND_MOE_COMM_ALG.

    Its default is "auto", or where `hccl_selects_hierarchy` a name for "hierarchy between A2 servers, else auto".
    """
    return name or settings.COMM_ALG.get() or (_BY_HCCL if hccl_selects_hierarchy() else "auto")


def hccl_selects_hierarchy() -> bool:
    """Return whether HCCL_INTRA_PCIE_ENABLE=1 and HCCL_INTRA_ROCE_ENABLE=0, by which CANN selects hierarchy on A2."""
    return (settings.HCCL_INTRA_PCIE.text(), settings.HCCL_INTRA_ROCE.text()) == ("1", "0")


def is_two_level(name: str) -> bool:
    """Return whether a call with ``comm_alg=name`` runs hierarchy, if its group has several A2 servers."""
    return comm_algorithm(name) in ("hierarchy", _BY_HCCL)


# ---- descriptions


@functools.cache
def tensor_names() -> tuple[str, ...]:
    """Return the names of the tensor arguments of dispatch and combine, V1 and V2, in the order of their C++ index."""
    return tuple(_lib.lib().am_tensor_names().decode().split())


@functools.cache
def attribute_names() -> tuple[str, ...]:
    """Return the names of the integer arguments of dispatch and combine, V1 and V2, in the order of their C++ index."""
    return tuple(_lib.lib().am_attribute_names().decode().split())


@functools.cache
def _type_codes() -> dict[str, int]:
    return {dtype: _lib.lib().am_type_code(dtype.encode()) for dtype in _DTYPES}


@functools.cache
def _spec_type() -> Any:
    class CallSpec(ctypes.Structure):
        _fields_ = [
            *((name, ctypes.c_int32) for name in ("op", "contract", "group_ep_length")),
            *((name, ctypes.c_int32) for name in ("comm_alg", "context_kind", "ranks_per_server")),
            *((name, ctypes.c_int64) for name in ("comm_world", "comm_rank", "window_mib")),
            *((name, ctypes.c_int64) for name in ("registered_mib", "cores", "deadline_micros")),
            ("attributes", ctypes.c_int64 * len(attribute_names())),
            ("tensors", TensorDesc * len(tensor_names())),
            *((name, ctypes.c_int32) for name in ("list_cores", "ub_bytes", "part", "intra_node_stores")),
            *((name, ctypes.c_int32) for name in ("core_barrier", "timestamps", "rdma_flags", "row_unit")),
            ("planned", ctypes.c_int64),
        ]

    library = _lib.lib()
    if ctypes.sizeof(CallSpec) != library.am_spec_bytes() or ctypes.sizeof(CheckResult) != library.am_check_bytes():
        raise errors.LibraryError(
            f"{_lib.library_path()} has another layout of calls: rebuild it with {_lib.build_command()}"
        )
    return CallSpec


NamedShapes = tuple[tuple[str, object, tuple[int, ...]], ...]  # argument, dtype, shape


def describe(
    op: int, contract: int, group_ep: str, comm_alg: str, shapes: NamedShapes, attributes: Mapping[str, int | None]
) -> Any:
    """Return the C struct that describes a call, without its communicator; None among ``attributes``: not passed."""
    library = _lib.lib()
    spec = _spec_type()()
    spec.op, spec.contract = op, contract
    spec.group_ep_length = len(group_ep.encode())
    # C would stop at a NUL and read another name.
    spec.comm_alg = -1 if "\0" in comm_alg else library.am_comm_algorithm(comm_alg.encode())
    for index, name in enumerate(attribute_names()):
        value = attributes.get(name)
        if value == _NO_VALUE:
            raise errors.ArgumentError(f"{name} is {value}; it must be above {_NO_VALUE}", argument=name)
        spec.attributes[index] = _NO_VALUE if value is None else value
    codes, other, names = _type_codes(), library.am_type_code(_OTHER_TYPE.encode()), tensor_names()
    for name, dtype, shape in shapes:
        desc = spec.tensors[names.index(name)]
        desc.dtype = codes.get(str(dtype).removeprefix("torch."), other)
        desc.rank = len(shape)
        for i, size in enumerate(shape[:3]):
            desc.dims[i] = size
    return spec


def outputs_of(spec: Any) -> list[tuple[str | None, tuple[int, ...]]]:
    """Return dtype and allocated shape of every output; dtype None: that of the input rows, unknown to the kernels."""
    found: list[tuple[str | None, tuple[int, ...]]] = []
    out, dtypes = (ctypes.c_int64 * 4)(), {code: dtype for dtype, code in _type_codes().items()}
    while _lib.lib().am_call_output(ctypes.byref(spec), len(found), out):
        found.append((dtypes.get(out[0]), tuple(out[2 : 2 + out[1]])))
    return found


def rule_broken(
    op_name: str, rule: str, argument: str, needed_mib: int, dtype: str = "", comm_alg: str = ""
) -> errors.ArgumentError:
    """Return the error of a call of ``op_name`` whose ``argument`` breaks a rule of op_host, with its text ``rule``.

    Args:
        needed_mib: the window size that the call needs; 0: the rule is not about the window.
        dtype, comm_alg: as passed, dtype if the argument is a tensor; they complete texts on unknown names.
    """
    message = f"{op_name}: {rule}"
    if dtype:
        message = message.replace(_OTHER_TYPE, dtype.removeprefix("torch."))
    if argument == "comm_alg":
        message = message.replace("comm_alg must", f"comm_alg is {comm_alg[:64]!r}, it must")
    if needed_mib > MAX_WINDOW_MIB:
        message = (
            f"{op_name}: this call needs windows of {needed_mib} MiB, HCCL_BUFFSIZE is at "
            f"most {MAX_WINDOW_MIB}: use smaller batches, or global_bs for the largest actual batch"
        )
        return errors.WindowTooSmall(message, argument="global_bs", needed_mib=needed_mib)
    if needed_mib:
        return errors.WindowTooSmall(message, argument=argument, needed_mib=needed_mib)
    return errors.ArgumentError(message, argument=argument)


class Plan:
    """A call with checked arguments and its tiling (kernel parameters) for one communicator's world size and window."""

    def __init__(self, op_name: str, spec: Any, comm_alg: str = "", library: ctypes.CDLL | None = None) -> None:
        """Raise ArgumentError or WindowTooSmall if the call ``spec`` breaks a rule.

        ``comm_alg``: as passed; ``library``: of another engine.
        """
        self.handle: int | None = None
        self._library = library or _lib.lib()
        check = CheckResult()
        self.handle = self._library.am_plan_create(ctypes.byref(spec), ctypes.byref(check))
        if not self.handle:
            raise rule_broken(op_name, check.message.decode(), check.argument.decode(), check.needed_mib, "", comm_alg)

    def tiled(self) -> tuple[int, int, bytes]:
        """Return (tiling key, size of the workspace in bytes, tiling data)."""
        info = (ctypes.c_uint64 * _INFO_WORDS)()
        self._library.am_plan_info(self.handle, info, _INFO_WORDS)
        tiling = ctypes.create_string_buffer(self._library.am_plan_tiling(self.handle, None, 0))
        self._library.am_plan_tiling(self.handle, tiling, len(tiling))
        return int(info[1]), int(info[4]), tiling.raw

    def __del__(self) -> None:
        if self.handle:
            self._library.am_plan_destroy(self.handle)
