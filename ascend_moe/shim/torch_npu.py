"""A shim of torch_npu for MoE code on machines that have none: "npu" means CPU, "hccl" means gloo.

    from ascend_moe.shim import torch_npu as shim
    shim.install()
    import torch_npu            # the operators of ascend_moe.npu

`install` changes torch for the whole process, `uninstall` undoes it. ``ascend-moe shim -- python script.py`` installs
it in a program before its first line, and in its child processes.

Use it to check results. Tensors are on the CPU and their device is "cpu"; ``x.npu()`` returns x, not a copy. With the
torch_npu wheel, use `ascend-moe vnpu`, which runs the real one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import _device

from ascend_moe import npu
from ascend_moe.comm import comm_name
from ascend_moe.errors import ArgumentError, LibraryError, need, need_dims, need_dtype, need_shape, with_typed_errors
from ascend_moe.experts.int4 import pack_int4
from ascend_moe.experts.quant import scale_of_bits
from ascend_moe.native import log
from ascend_moe.native.torch_npu import resolve_dtype
from ascend_moe.ops.registration import SCHEMAS, TORCH_NPU_SCHEMAS
from ascend_moe.shim import ABOUT, VERSION
from ascend_moe.shim import npu as shim_npu
from ascend_moe.shim import profiler as shim_profiler

# torch functions with an argument device, beside those that torch's device modes list
_FACTORIES = ("empty_like", "full_like", "normal", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
# torch_npu's numbers of dtypes: 256 + aclDataType
_DTYPES = {
    "float32": 256,
    "float16": 257,
    "int8": 258,
    "int32": 259,
    "bfloat16": 283,
    "int4": 285,
    "hifloat8": 290,
    "float8_e5m2": 291,
    "float8_e4m3fn": 292,
    "float8_e8m0fnu": 293,
    "float4_e2m1fn_x2": 296,
    "float4_e1m2fn_x2": 297,
}


class _Changes(contextlib.ExitStack):
    """Changes of install, undone in reverse order by `close`."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `close`, which restores the one that ``owner`` itself had, or deletes the new one."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)


_changes: _Changes | None = None


def is_installed() -> bool:
    """Return whether the shim is installed in this process."""
    return _changes is not None


def install(quiet: bool = False) -> None:
    """Make ``import torch_npu`` import this shim, and torch accept "npu" and "hccl". A second call does nothing.

    Args:
        quiet: log no warning about the shim.

    Raises:
        LibraryError: torch_npu is installed, or a module of that name was imported before.
    """
    global _changes
    if _changes is not None:
        return
    if "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is not None:
        raise LibraryError(
            "torch_npu is installed or imported; the shim is for machines without it. On NPUs call "
            "ascend_moe.patch_torch_npu(); without an NPU start the program with `ascend-moe vnpu -- `"
        )
    with _Changes() as changes:
        changes.callback(_forget_functions)
        _add_modules(changes)
        _change_devices(changes)
        _change_groups(changes)
        _add_operators(changes)
        _changes = changes.pop_all()
    if not quiet:
        log.say(logging.WARNING, "torch_npu %s: %s", VERSION, ABOUT)


def _forget_functions() -> None:
    """Clear torch.compile's table of torch functions, which it builds at its first use."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.clear_lru_cache()


def uninstall() -> None:
    """Undo `install`; do nothing if the shim is not installed. Existing groups and tensors stay valid."""
    global _changes
    if _changes is not None:
        _changes.close()
        _changes = None


# ---- the modules


class _Module(ModuleType):
    """A module whose repr and AttributeError state that it is a shim."""

    def __repr__(self) -> str:
        return f"<module '{self.__name__}' ({ABOUT})>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self.__name__} has no {name}: it is {ABOUT}")


class _Loaded:
    """Loader of an existing module, for an import that began before install."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is already initialized."""


def _add_modules(changes: _Changes) -> None:
    runtime = _Module("torch.npu", shim_npu.__doc__)
    vars(runtime).update({name: getattr(shim_npu, name) for name in shim_npu.__all__})
    root = _Module("torch_npu", __doc__)
    operators = {name: getattr(npu, name) for name in npu.__all__ if name != "patch_torch_npu"}
    groups = SimpleNamespace(ProcessGroupHCCL=ProcessGroupHCCL)
    own = {
        "npu": runtime,
        "npu_fusion_attention": npu_fusion_attention,
        "npu_format_cast": npu_format_cast,
        "npu_format_cast_": npu_format_cast,
        "get_npu_format": get_npu_format,
        "npu_quant_matmul": npu_quant_matmul,
        "npu_convert_weight_to_int4pack": npu_convert_weight_to_int4pack,
        "_C": SimpleNamespace(_distributed_c10d=groups, _npu_get_soc_version=shim_npu.get_soc_version),
        "__version__": VERSION,
        "__path__": [],
    }
    vars(root).update(operators | own | _DTYPES)
    amp = _Module("torch_npu.npu.amp")
    vars(amp).update({"autocast": _autocast, "GradScaler": functools.partial(torch.amp.GradScaler, "cpu")})
    streams = _Module("torch_npu.npu.streams")
    vars(streams).update({name: getattr(shim_npu, name) for name in ("Event", "ExternalEvent", "Stream")})
    vars(runtime).update({"streams": streams, "amp": amp, "__path__": []})
    profiler = _Module("torch_npu.profiler", shim_profiler.__doc__)
    names = (*shim_profiler.__all__, "_ExperimentalConfig")
    vars(profiler).update({name: getattr(shim_profiler, name) for name in names})
    vars(root)["profiler"] = profiler
    for module in (root, runtime, amp, streams, profiler):
        loader: Any = _Loaded(module)
        module.__spec__ = ModuleSpec(module.__name__, loader, origin=ABOUT, is_package=hasattr(module, "__path__"))
    for name, module in (
        ("torch_npu", root),
        ("torch_npu.npu", runtime),
        ("torch_npu.npu.amp", amp),
        ("torch.npu.amp", amp),
        ("torch_npu.npu.streams", streams),
        ("torch_npu.profiler", profiler),
        ("torch.npu", runtime),
    ):
        sys.modules[name] = module
        changes.callback(sys.modules.pop, name, None)
    changes.set(torch, "npu", runtime)


def _add_operators(changes: _Changes) -> None:
    """Define ``torch.ops.npu``, whose operators call those of ``torch.ops.ascend_moe`` with the same name."""
    library: Any = torch.library.Library("npu", "FRAGMENT")  # type: ignore[no-untyped-call]
    changes.callback(library._destroy)
    for name, schema in {**SCHEMAS, **TORCH_NPU_SCHEMAS}.items():
        packet, _, overload = name.partition(".")
        ours = getattr(getattr(torch.ops.ascend_moe, packet), overload or "default")
        library.define(f"{name}{schema}")
        library.impl(name, ours, "CompositeImplicitAutograd")
    for function, schema in _FUNCTIONS.items():
        library.define(f"{function.__name__}{schema}")
        library.impl(function.__name__, function, "CompositeImplicitAutograd")


def _autocast(
    enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
) -> torch.amp.autocast_mode.autocast:
    """torch_npu.npu.amp.autocast, which has another default dtype than torch's for CPUs."""
    return torch.amp.autocast_mode.autocast("cpu", dtype, enabled, cache_enabled)


def npu_format_cast(tensor: torch.Tensor, acl_format: int, **_: Any) -> torch.Tensor:
    """Return ``tensor``, of any shape, unchanged, whatever ``acl_format`` is: a CPU tensor has only one format."""
    return tensor


def get_npu_format(tensor: torch.Tensor) -> int:
    """Return 2 (ACL_FORMAT_ND, plain strides) for a ``tensor`` of any shape."""
    return 2


def npu_fusion_attention(*args: Any, **kwargs: Any) -> None:
    """Raise ArgumentError: the shim has no attention, but transformers imports this name if torch_npu can be imported.

    Args:
        args, kwargs: any.

    Raises:
        ArgumentError: always.
    """
    raise ArgumentError(
        "npu_fusion_attention: the shim of torch_npu has no attention; use torch's scaled_dot_product_attention",
        argument="npu_fusion_attention",
    )


@with_typed_errors
def npu_convert_weight_to_int4pack(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    """Pack int32 numbers of -8..7, ``(K, N)``, into int32 ``(K, N / 8)``, the first of eight in the lowest bits.

    Raises:
        ArgumentError: weight is not int32 of -8..7 with N a multiple of 8, or inner_k_tiles is not 0.

    Source: torch_npu ``npu_convert_weight_to_int4pack``, as vllm-ascend's W4A16 calls it.
    """
    need(inner_k_tiles == 0, "inner_k_tiles", "is {}; it must be 0", inner_k_tiles)
    need_dims("weight", weight, 2, dtypes=(torch.int32,))
    need(bool(((weight >= -8) & (weight <= 7)).all()), "weight", "must be -8..7, the range of int4")
    return pack_int4(weight.to(torch.int8))


@with_typed_errors
def npu_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | int | None = None,
) -> torch.Tensor:
    """Return ``(x1 @ x2 [+ int32 bias]) * scale [* pertoken_scale] [+ float bias]``, as `npu_grouped_matmul` does.

    Args:
        x1: ``(..., K)`` int8. x2: ``(K, N)`` int8, any strides.
        scale: ``(N,)`` or ``(1,)`` fp32 or bf16, or int64 that carries fp32 bits; ignored for int32 results.
        pertoken_scale: fp32, one value for each row of x1, or None: 1; ignored for int32 results.
        bias: ``(N,)`` int32 or float, or None.
        offset: must be None. output_dtype: bf16, fp16, fp32, or int32 (the sums, without scales); None raises.

    Returns:
        ``(..., N)`` of output_dtype.

    Raises:
        ArgumentError: a rule above is broken; int8 results and int4 exist on NPUs only.

    Source: torch_npu ``npu_quant_matmul``.
    """
    dtype = resolve_dtype(output_dtype, "output_dtype")
    floats = (torch.bfloat16, torch.float16, torch.float32)
    rule = "is {}; off the NPU it must be bf16, fp16, fp32 or int32"
    need(dtype in (*floats, torch.int32), "output_dtype", rule, dtype)
    need(offset is None, "offset", "is given, for int8 results, which are not supported; omit it")
    need_dtype("x1", x1, torch.int8)
    need(x1.dim() >= 2, "x1", "is {}; it must be at least 2-D", x1.shape)
    need_dims("x2", x2, 2, dtypes=(torch.int8,))
    need_shape("x2", x2, (x1.shape[-1], x2.shape[1]))
    rows, width = x1.reshape(-1, x1.shape[-1]), x2.shape[1]
    if bias is not None:
        need_shape("bias", bias.reshape(-1), (width,), dtypes=(torch.int32, *floats))
    scales: dict[str, Any] = {}
    if dtype != torch.int32:
        need_dtype("scale", scale, torch.float32, torch.bfloat16, torch.int64)
        need_shape("scale", scale.reshape(-1), (1,), (width,))
        scales["scale"] = [scale_of_bits(scale.reshape(-1)).expand(width)]
        if pertoken_scale is not None:
            need_shape("pertoken_scale", pertoken_scale.reshape(-1), (len(rows),), dtypes=(torch.float32,))
            scales["per_token_scale"] = [pertoken_scale.reshape(-1)]
    y = npu.npu_grouped_matmul(
        [rows], [x2], bias=None if bias is None else [bias.reshape(-1)], output_dtype=dtype, **scales
    )[0]
    return y.reshape(*x1.shape[:-1], width)


#: functions of torch_npu that are no operators of this package -> their schemas as torch.ops.npu's
_FUNCTIONS: dict[Callable[..., torch.Tensor], str] = {
    npu_format_cast: "(Tensor input, int acl_format, *, int? customize_dtype=None, int? input_dtype=None) -> Tensor",
    npu_convert_weight_to_int4pack: "(Tensor weight, int inner_k_tiles=0) -> Tensor",
    npu_quant_matmul: "(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None, "
    "Tensor? bias=None, int? output_dtype=None) -> Tensor",
}


# ---- devices


def _to_cpu(device: Any) -> Any:
    """ "cpu" for "npu", "npu:3" and a bare number, which torch takes for one of the accelerator; others as they are.

    A table of devices, as torch.load takes it, is one of CPUs then.
    """
    if isinstance(device, dict):
        return {before: _to_cpu(after) for before, after in device.items()}
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "npu" else device
    return "cpu" if isinstance(device, int) and not isinstance(device, bool) else device


def _on_cpu(function: Callable[..., Any], argument: str = "device", at: int | None = None) -> Callable[..., Any]:
    """``function``, whose device may be an NPU. ``at``: position in which it may be passed too.

    Pinned memory, which is for copies to an accelerator, is plain memory.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if argument in kwargs:
            kwargs[argument] = _to_cpu(kwargs[argument])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if at is not None and len(args) > at:
            args = (*args[:at], _to_cpu(args[at]), *args[at + 1 :])
        return function(*args, **kwargs)

    return run


class _CpuForNpu(type):
    """Replace a class of torch so that "npu" means "cpu"; isinstance, pickle and type tables see torch's class."""

    real: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("type", kwargs.get("device"))
        on_cpu = _to_cpu(given)
        return cls.real(*args, **kwargs) if on_cpu is given else cls.real(on_cpu)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)

    def __eq__(cls, other: object) -> bool:
        return other is cls.real or other is cls

    def __hash__(cls) -> int:
        return hash(cls.real)


def _standing_for(real: Any, name: str) -> Any:
    return _CpuForNpu(name, (), {"real": real, "__module__": "torch", "__qualname__": name})


def _change_devices(changes: _Changes) -> None:
    tensor, module = torch.Tensor, torch.nn.Module
    changes.set(torch, "device", _standing_for(torch.device, "device"))
    changes.set(torch, "Generator", _standing_for(torch.Generator, "Generator"))
    # torch caches this list for its modes, here before the functions are replaced
    listed = (each.__name__ for each in _device._device_constructors() if hasattr(torch, each.__name__))
    for name in (*_FACTORIES, *listed):
        changes.set(torch, name, _on_cpu(getattr(torch, name)))
    changes.set(torch, "load", _on_cpu(torch.load, "map_location", at=1))
    for name in _METHODS:
        changes.set(tensor, name, _on_cpu(getattr(tensor, name)))
    changes.set(tensor, "to", _on_cpu(tensor.to, at=1))
    changes.set(tensor, "npu", lambda self, device=None, non_blocking=False: self)
    changes.set(tensor, "pin_memory", lambda self, device=None: self)
    changes.set(tensor, "record_stream", lambda self, stream: None)
    changes.set(tensor, "is_npu", property(lambda self: self.device.type == "cpu"))
    changes.set(module, "npu", lambda self, device=None: self)
    parse: Any = torch._C._nn._parse_to
    changes.set(
        torch._C._nn, "_parse_to", lambda *args, **kwargs: _on_cpu(parse)(*map(_to_cpu, args[:1]), *args[1:], **kwargs)
    )
    for owner in (torch, torch.amp):
        changes.set(owner, "autocast", _on_cpu(torch.amp.autocast_mode.autocast, "device_type", at=0))
    for owner, name in (
        (torch, "is_autocast_enabled"),
        (torch, "get_autocast_dtype"),
        (torch.amp, "is_autocast_available"),
    ):
        changes.set(owner, name, _on_cpu(getattr(owner, name), "device_type", at=0))
    changes.set(torch.amp, "GradScaler", _on_cpu(torch.amp.GradScaler, at=0))
    changes.set(torch.random, "fork_rng", _fork_rng(torch.random.fork_rng))
    changes.set(torch.UntypedStorage, "npu", lambda self, device=None, non_blocking=False: self)
    changes.set(torch, "histc", _histc(torch.histc))
    changes.set(tensor, "histc", _histc(tensor.histc))


def _fork_rng(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.random.fork_rng that takes the generators of NPUs for the CPU's, which it always restores."""

    @functools.wraps(function)
    def run(devices: Any = None, *args: Any, device_type: str = "cuda", **kwargs: Any) -> Any:
        devices, device_type = ([], "cpu") if device_type == "npu" else (devices, device_type)
        return function(devices, *args, device_type=device_type, **kwargs)

    return run


def _histc(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.histc that also accepts integers, as on an NPU, and returns counts of their dtype."""

    @functools.wraps(function)
    def run(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.is_floating_point():
            return function(input, *args, **kwargs)
        return function(input.double(), *args, **kwargs).to(input.dtype)

    return run


# ---- process groups


class ProcessGroupHCCL:
    """Shim of torch_npu's class: its ``Options`` of HCCL groups are accepted and have no effect."""

    class Options:
        def __init__(self, *_: Any, **options: Any) -> None:
            self.hccl_config: dict[str, Any] = {}
            vars(self).update(options)


def _gloo(backend: Any) -> Any:
    """ "gloo" for "hccl", also in a list such as "cpu:gloo,npu:hccl"."""
    if not isinstance(backend, str) or "hccl" not in backend.lower():
        return backend
    if ":" not in backend:
        return "gloo"
    names: dict[str, str] = {}
    for pair in backend.lower().split(","):
        device, _, name = pair.partition(":")
        names.setdefault(_to_cpu(device), "gloo" if name == "hccl" else name)
    return ",".join(f"{device}:{name}" for device, name in names.items())


def _without_hccl(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    """init_process_group or new_group; the backend is its argument of this number."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], _gloo(args[position]), *args[position + 1 :])
        kwargs = {name: _gloo(value) if name == "backend" else value for name, value in kwargs.items()}
        if isinstance(kwargs.get("pg_options"), ProcessGroupHCCL.Options):
            kwargs["pg_options"] = None
        if getattr(kwargs.get("device_id"), "type", None) == "cpu":  # an NPU before
            kwargs["device_id"] = None
        return function(*args, **kwargs)

    return run


def _get_hccl_comm_name(self: Any, rank: int = 0, init_comm: bool = True) -> str:
    """Return `ascend_moe.comm_name` of this backend's group. The first call is collective."""
    cpu = torch.device("cpu")
    for group in list(distributed_c10d._world.pg_map):
        if cpu in group._device_types and group._get_backend(cpu) is self:
            return comm_name(group)
    text = "get_hccl_comm_name: this backend belongs to no live process group: use that of an existing group"
    raise ArgumentError(text, argument="self")


def _of_any_shape(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective of two tensors, of which HCCL compares only sizes and gloo shapes."""

    def flat(value: Any) -> Any:
        return value.view(-1) if isinstance(value, torch.Tensor) and value.is_contiguous() else value

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*map(flat, args), **{name: flat(value) for name, value in kwargs.items()})

    return run


def _change_groups(changes: _Changes) -> None:
    # The last two are newer torch's names of the first two.
    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single")
    for name in (name for name in names if hasattr(distributed_c10d, name)):
        function = _of_any_shape(getattr(distributed_c10d, name))
        changes.set(distributed_c10d, name, function)
        changes.set(dist, name, function)
    for name, position in (("init_process_group", 0), ("new_group", 2)):
        function = _without_hccl(getattr(distributed_c10d, name), position)
        changes.set(distributed_c10d, name, function)
        changes.set(dist, name, function)
    changes.set(dist, "ProcessGroupHCCL", ProcessGroupHCCL)
    changes.set(dist, "is_hccl_available", lambda: True)
    changes.set(distributed_c10d.Backend, "HCCL", "gloo")
    changes.set(torch._C._distributed_c10d.Backend, "get_hccl_comm_name", _get_hccl_comm_name)
