"""Calls across the C ABI: descriptions of calls, plans (checked calls with their tiling), launches."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import torch

from .. import errors, settings
from ..comm.communicator import MAX_WINDOW_MIB, Communicator
from ..native import library as _lib

OP_DISPATCH, OP_COMBINE = 1, 2
DEFAULT_CORES = 1  # all cores of a rank share one thread: more only add meetings
CHECKED_CORES = 8  # races are looked for between cores, too
MAX_CORES = 64
_NO_VALUE = -(2**63)
_TEXT_BYTES = 1024
_LENT_REFUSED = -1  # by am_run
_OTHER_TYPE = "another dtype"

_DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}


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


@functools.cache
def tensor_names() -> tuple[str, ...]:
    """Tensor arguments of all four ops, in the order of their native index."""
    return tuple(_lib.lib().am_tensor_names().decode().split())


@functools.cache
def attribute_names() -> tuple[str, ...]:
    """Integer attributes of all four ops, in the order of their native index."""
    return tuple(_lib.lib().am_attribute_names().decode().split())


@functools.cache
def _type_codes() -> dict[torch.dtype, int]:
    return {dtype: _lib.lib().am_type_code(name.encode()) for dtype, name in _DTYPES.items()}


@functools.cache
def _spec_type() -> Any:
    class CallSpec(ctypes.Structure):
        _fields_ = [
            ("op", ctypes.c_int32),
            ("contract", ctypes.c_int32),
            ("group_ep_length", ctypes.c_int32),
            ("comm_alg", ctypes.c_int32),
            ("context_kind", ctypes.c_int32),
            ("ranks_per_server", ctypes.c_int32),
            ("comm_world", ctypes.c_int64),
            ("comm_rank", ctypes.c_int64),
            ("window_mib", ctypes.c_int64),
            ("lent_mib", ctypes.c_int64),
            ("cores", ctypes.c_int64),
            ("deadline_micros", ctypes.c_int64),
            ("attributes", ctypes.c_int64 * len(attribute_names())),
            ("tensors", TensorDesc * len(tensor_names())),
            ("list_cores", ctypes.c_int32),
            ("ub_bytes", ctypes.c_int32),
            ("part", ctypes.c_int32),
            ("near_stores", ctypes.c_int32),
        ]

    library = _lib.lib()
    if ctypes.sizeof(CallSpec) != library.am_spec_bytes() or ctypes.sizeof(CheckResult) != library.am_check_bytes():
        raise errors.LibraryError(
            f"{_lib.library_path()} describes calls differently: rebuild it with {_lib.build_command()}"
        )
    return CallSpec


@functools.cache
def error_record_words() -> int:
    return int(_lib.lib().am_error_record_words())


def core_count() -> int:
    """AIV cores a launch: ASCEND_MOE_AIV_CORES, default 1; 8 on the checked engine."""
    cores = settings.AIV_CORES.get()
    if cores is not None:
        return cores
    return DEFAULT_CORES if _lib.engine_name() == "fast" else CHECKED_CORES


def comm_algorithm(name: str) -> str:
    """``comm_alg`` of a call; where it is "" (as in every V1 call) ASCEND_MOE_COMM_ALG, default "auto"."""
    return name or settings.COMM_ALG.get() or "auto"


Shapes = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


def describe(
    op: int, contract: int, group_ep: str, comm_alg: str, shapes: Shapes, attributes: Mapping[str, int | None]
) -> Any:
    """A call without its communicator: what shape functions and checks read."""
    library = _lib.lib()
    spec = _spec_type()()
    spec.op, spec.contract = op, contract
    spec.group_ep_length = len(group_ep.encode())
    # C would stop at a NUL and read another name.
    spec.comm_alg = -1 if "\0" in comm_alg else library.am_comm_algorithm(comm_alg.encode())
    for index, name in enumerate(attribute_names()):
        value = attributes.get(name)
        if value == _NO_VALUE:
            raise errors.ArgumentError(f"{name} is {value}, which no rule allows", argument=name)
        spec.attributes[index] = _NO_VALUE if value is None else value
    codes, other, names = _type_codes(), library.am_type_code(_OTHER_TYPE.encode()), tensor_names()
    for name, dtype, shape in shapes:
        desc = spec.tensors[names.index(name)]
        desc.dtype = codes.get(dtype, other)
        desc.rank = len(shape)
        for i, size in enumerate(shape[:3]):
            desc.dims[i] = size
    return spec


def outputs_of(spec: Any) -> list[tuple[torch.dtype | None, tuple[int, ...]]]:
    """Dtype (None: the input rows', one that no kernel knows) and shape of every output, as allocated."""
    found: list[tuple[torch.dtype | None, tuple[int, ...]]] = []
    out, dtypes = (ctypes.c_int64 * 4)(), {code: dtype for dtype, code in _type_codes().items()}
    while _lib.lib().am_call_output(ctypes.byref(spec), len(found), out):
        found.append((dtypes.get(out[0]), tuple(out[2 : 2 + out[1]])))
    return found


def infer(
    op: int,
    contract: int,
    dtypes: Mapping[str, torch.dtype],
    attributes: Mapping[str, int | None],
    batch: Any,
    topk: int,
    hidden: Any,
) -> list[tuple[torch.dtype | None, tuple[Any, ...]]]:
    """Dtype and shape of every output, as ``outputs_of``, of a call whose BS and H may be symbolic."""

    def at(bs: int) -> list[tuple[torch.dtype | None, tuple[int, ...]]]:
        ids = (bs, topk)
        shapes = tuple((name, dtype, ids if name == "expert_ids" else (bs, 1)) for name, dtype in dtypes.items())
        return outputs_of(describe(op, contract, "g", "", shapes, attributes))

    def first_sizes(bs: int) -> list[int]:
        return [shape[0] for _, shape in at(bs)]

    def along(bs: Any) -> list[Any]:
        pairs = zip(first_sizes(0), first_sizes(1), strict=True)
        return [low + (high - low) * bs if high != low else low for low, high in pairs]

    # First dimensions are affine in BS, but for BS*W // shared ranks with a rest: there BS is specialised.
    far = max(2, attributes["shared_expert_rank_num"] or 0)
    symbolic = isinstance(batch, torch.SymInt) and along(far) == first_sizes(far)
    sizes = along(batch) if symbolic else first_sizes(int(batch))
    # The second dimension is always H.
    return [(dtype, (size, hidden)[: len(shape)]) for size, (dtype, shape) in zip(sizes, at(0), strict=True)]


def rule_broken(
    op_name: str, rule: str, argument: str, needed_mib: int, dtype: str = "", comm_alg: str = ""
) -> errors.ArgumentError:
    """The error of a call that breaks a rule of op_host.

    Args:
        dtype: of the argument, where it is a tensor. The rules name neither dtypes that no kernel knows nor
            unknown names of algorithms: a call's description does not hold them.
    """
    message = f"{op_name}: {rule}"
    if dtype:
        message = message.replace(_OTHER_TYPE, dtype.removeprefix("torch."))
    if argument == "comm_alg":
        message = message.replace("comm_alg must", f"comm_alg is {comm_alg[:64]!r}, it must")
    if needed_mib > MAX_WINDOW_MIB:
        message = (
            f"{op_name}: this call needs windows of {needed_mib} MiB, HCCL_BUFFSIZE may be at "
            f"most {MAX_WINDOW_MIB}: use smaller batches, or global_bs for the largest that there are"
        )
        return errors.WindowTooSmall(message, argument="global_bs", needed_mib=needed_mib)
    if needed_mib:
        return errors.WindowTooSmall(message, argument=argument, needed_mib=needed_mib)
    return errors.ArgumentError(message, argument=argument)


class Plan:
    """A call that keeps all rules, tiled for one communicator's world and window."""

    def __init__(self, op_name: str, spec: Any, comm_alg: str = "") -> None:
        """Raises ArgumentError or WindowTooSmall when the call breaks a rule; ``comm_alg``: as it was given."""
        self.handle: int | None = None
        self._library = _lib.lib()
        check = CheckResult()
        self.handle = self._library.am_plan_create(ctypes.byref(spec), ctypes.byref(check))
        if not self.handle:
            raise rule_broken(op_name, check.message.decode(), check.argument.decode(), check.needed_mib, "", comm_alg)
        self.outputs = outputs_of(spec)

    def __del__(self) -> None:
        if self.handle:
            self._library.am_plan_destroy(self.handle)


def failure(code: int, record: Any, fault: str, communicator: Communicator) -> errors.AscendMoeError:
    """``error_of`` an op that ran on the CPU; a fatal one marks the communicator. Within its ``use()``."""
    error = error_of(code, record, fault, communicator)
    if _lib.lib().am_error_is_fatal(code):
        communicator.failed = error
    return error


def error_of(code: int, record: Any, fault: str, communicator: Any) -> errors.AscendMoeError:
    """The error that an error record tells of; ``record``: its words, an array (on an NPU their address)."""
    if fault and code == _LENT_REFUSED:
        return errors.WindowTensorError(fault, argument="expand_x", generation=record[0], epoch=record[1])
    if fault:
        return errors.KernelFault(fault, rank=communicator.rank)
    library = _lib.lib()
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    library.am_error_fields(record, text, _TEXT_BYTES)
    fields: dict[str, Any] = {}
    for field in text.value.decode().split(";"):
        name, _, value = field.partition("=")
        fields[name] = int(value) if value.lstrip("-").isdigit() else value
    library.am_error_message(record, text, _TEXT_BYTES)
    message = text.value.decode()
    kind = getattr(errors, library.am_error_name(code).decode())
    if issubclass(kind, errors.CommError) and fields["rank"] != communicator.rank:
        seen = communicator.describe_peer(fields["rank"])
        message += f" [rank {fields['rank']}: {seen}]" if seen else ""
    error: errors.AscendMoeError = kind(message, **fields)
    return error


def traffic(communicator: Communicator) -> dict[str, int]:
    """Bytes that the MTE pipes of this rank moved in its last op, by direction and kind of GM."""
    kinds = ("tensor", "window_data", "window_state", "workspace", "window_lent")
    counts = (ctypes.c_uint64 * (2 * len(kinds)))()
    with communicator.use() as handle:
        _lib.lib().am_comm_traffic(handle, counts)
    names = [f"{direction}_{kind}" for direction in ("read", "written") for kind in kinds]
    return dict(zip(names, counts, strict=True))
