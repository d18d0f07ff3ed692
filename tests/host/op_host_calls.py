"""Calls for op_host's tiling and shape functions, run through the shim of CANN; built once a session."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from twin_oracle import compiler

from ascend_moe.native.build import cache_directory, digest_of
from ascend_moe.native.library import native_source_root as source_root
from ascend_moe.ops import calls as native

HERE = Path(__file__).resolve().parent
TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.float64: 11,
    torch.int64: 9,
    torch.bool: 12,
    torch.bfloat16: 27,
}
DTYPE_OF = {code: dtype for dtype, code in TYPES.items()}
OP_TYPES = {native.OP_DISPATCH: "AscendMoeDistributeDispatch", native.OP_COMBINE: "AscendMoeDistributeCombine"}
PROBE_TYPE = "AscendMoeProbe"  # of the bring-up; its calls are no CallSpec
ONE_CARD_TYPE = "AscendMoeOneCard"  # as the probe
ALL_TYPES = (*OP_TYPES.values(), PROBE_TYPE, ONE_CARD_TYPE)
A2, A3 = "Ascend910B3", "Ascend910_9391"
CONTEXT_A3, CONTEXT_A2 = 1, 2
GROUP = "hccl_ep_group_0"
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@functools.cache
def cann_headers() -> Path:
    """A folder with the headers that vnpu/cann_shim/CMakeLists.txt writes under CANN's names."""
    listed = re.search(r"set\(am_cann_headers([^)]*)\)", (source_root() / "vnpu/cann_shim/CMakeLists.txt").read_text())
    assert listed
    folder = Path(tempfile.mkdtemp(prefix="cann-headers-"))
    atexit.register(shutil.rmtree, folder)
    for name in listed[1].split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('#include "cann_shim.h"\n')
    return folder


def flags() -> list[str]:
    root = source_root()
    directories = [cann_headers(), root / "vnpu" / "cann_shim", root / "op_host", root / "op_kernel"]
    return ["-std=c++17", "-O0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"] + [
        f"-I{directory}" for directory in directories
    ]


@functools.cache
def probe() -> Any:
    """The library of op_host_probe.cpp. Fails, never skips, where op_host does not compile."""
    root = source_root()
    sources = [
        HERE / "op_host_probe.cpp",
        root / "vnpu/cann_shim/cann_shim.cpp",
        *sorted((root / "op_host").glob("*.cpp")),
    ]
    assert len(sources) == 6, f"op_host has {len(sources) - 2} sources, 4 are known"
    read = [path for folder in ("op_host", "op_kernel", "vnpu/cann_shim") for path in (root / folder).rglob("*.*")]
    texts = [path.read_text() for path in sorted({*read, *sources})]
    made = cache_directory() / "tests" / f"op-host-{digest_of(compiler(), *texts)}.so"
    if not made.exists():  # of these sources: any process may have made it
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
            objects = [f"{scratch}/{source.stem}.o" for source in sources]
            commands = [
                [compiler(), *flags(), "-c", str(source), "-o", target]
                for source, target in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(run, commands))
            run([compiler(), "-shared", "-Wl,-z,noexecstack", "-o", f"{scratch}/probe.so", *objects])
            Path(f"{scratch}/probe.so").rename(made)
    library = ctypes.CDLL(str(made))
    for name in ("probe_spec_bytes", "probe_head_bytes", "probe_head_cc"):
        getattr(library, name).restype = ctypes.c_uint64
    return library


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Definition:
    """An op definition as CANN would read it."""

    inputs: list[str]
    outputs: list[str]
    required: set[str]  # inputs and attributes
    types: dict[str, tuple[int, ...]]
    formats: dict[str, int]
    attributes: dict[str, tuple[str, str]]  # name: ("int" | "text", default), in order
    configs: dict[tuple[str, str], str]
    groups: list[str]
    graph: str  # what a GE graph is told: "0 <json>" when it is refused


@functools.cache
def definition(op_type: str) -> Definition:
    text = ctypes.create_string_buffer(1 << 16)
    assert probe().probe_definition(op_type.encode(), text, ctypes.c_uint64(len(text))), op_type
    lines = text.value.decode().splitlines()
    rows: dict[str, list[list[str]]] = {kind: [] for kind in ("input", "output", "attribute", "config", "group")}
    for kind, *row in (line.split(" ") for line in lines):
        rows.setdefault(kind, []).append(row)
    tensors = [*rows["input"], *rows["output"]]
    return Definition(
        [row[0] for row in rows["input"]],
        [row[0] for row in rows["output"]],
        {row[0] for row in [*rows["input"], *rows["attribute"]] if row[1] == "1"},
        {row[0]: tuple(map(int, row[3:])) for row in tensors},
        {row[0]: int(row[2]) for row in tensors},
        {row[0]: (row[2], row[3]) for row in rows["attribute"]},
        {(row[0], row[1]): row[2] for row in rows["config"]},
        [row[0] for row in rows["group"]],
        next(line.removeprefix("graph ") for line in lines if line.startswith("graph ")),
    )


@dataclass(frozen=True)
class OpCall:
    """One call of an op, by the names of its definition."""

    op: int
    contract: int
    tensors: Shapes
    attributes: Mapping[str, int | str]
    soc: str = A3
    cores: int = 48
    group: str = GROUP

    @property
    def op_type(self) -> str:
        return OP_TYPES[self.op]

    def changed(self, **changes: Any) -> OpCall:
        """With other attributes (numbers, texts) or tensors (a dtype and a shape; None: absent)."""
        parts = {name: value for name, value in changes.items() if value is None or isinstance(value, tuple)}
        tensors = {name: value for name, value in {**self.tensors, **parts}.items() if value is not None}
        others = {name: value for name, value in changes.items() if name not in parts}
        return replace(self, tensors=tensors, attributes={**self.attributes, **others})

    def text(self) -> bytes:
        """For the probe."""
        known = definition(self.op_type)
        assert set(self.tensors) <= set(known.inputs), self.tensors
        assert set(self.attributes) <= set(known.attributes), self.attributes
        lines = [f"op {self.op_type}", f"soc {self.soc}", f"cores {self.cores}"]
        for name in known.inputs:
            dtype, shape = self.tensors.get(name, (None, ()))
            lines.append(" ".join(map(str, ("input", TYPES[dtype] if dtype else "-", *shape))))
        values: dict[str, int | str] = {"group_ep": self.group, "contract": self.contract, **self.attributes}
        for name, (kind, default) in known.attributes.items():
            lines.append(f"{'number' if kind == 'int' else 'text'} {values.get(name, default)}")
        return "\n".join(lines).encode()

    def spec(self, window_mib: int, deadline_micros: int) -> Any:
        """The CallSpec that Python makes of the same call, with op_host's rules for SoCs written out here."""
        known = definition(self.op_type)
        integers = {name: default for name, (kind, default) in known.attributes.items() if kind == "int"}
        names = {name: int(self.attributes.get(name, default)) for name, default in integers.items()}
        renamed = {"expand_idx": "assist_info_for_combine"} if self.contract == 2 else {}
        shapes = tuple((renamed.get(name, name), *given) for name, given in self.tensors.items())
        comm_alg = str(self.attributes.get("comm_alg", ""))
        if comm_alg in ("", "auto"):  # CANN's tiling knows no outcome of a bring-up
            comm_alg = "window"
        spec = native.describe(self.op, self.contract, self.group, comm_alg, shapes, names)
        a2 = self.soc == A2
        spec.context_kind = CONTEXT_A2 if a2 else CONTEXT_A3
        spec.ranks_per_server = names["ranks_per_server"] if a2 else 0
        spec.comm_world, spec.comm_rank = names["ep_world_size"], names["ep_rank_id"]
        spec.window_mib = window_mib - 1 if a2 else window_mib
        spec.cores, spec.deadline_micros = self.cores, deadline_micros
        return spec


@dataclass(frozen=True)
class Tiled:
    """Holds what a tiling function, or the twin's plan, made of a call."""

    data: bytes = b""
    key: int = 0
    cores: int = 0
    schedule_mode: int = 0
    workspaces: int = 0
    workspace: int = 0
    aicpu_blocks: int = 0
    error: str = ""


def _tiled(function: Any, argument: Any) -> Tiled:
    data, error = (ctypes.c_uint8 * 8192)(), ctypes.create_string_buffer(1024)
    numbers = (ctypes.c_uint64 * 7)()
    size = ctypes.c_uint64
    if not function(argument, data, size(len(data)), numbers, error, size(len(error))):
        return Tiled(error=error.value.decode())
    return Tiled(bytes(data[: numbers[0]]), *numbers[1:7])


def tile(call: OpCall | str) -> Tiled:
    """op_host's tiling function, through the shim; also for a call in the probe's own words."""
    return _tiled(probe().probe_tile, call.encode() if isinstance(call, str) else call.text())


def plan(call: OpCall, window_mib: int = 200, deadline_micros: int = 20_000_000, **fields: int) -> Tiled:
    """The twin's plan of the same call. The deadline is conftest's ASCEND_MOE_TIMEOUT_S; ``fields``: of the spec."""
    spec = call.spec(window_mib, deadline_micros)
    for name, value in fields.items():
        setattr(spec, name, value)
    assert ctypes.sizeof(spec) == probe().probe_spec_bytes()
    return _tiled(probe().probe_plan, ctypes.byref(spec))


def shapes(call: OpCall | str) -> list[tuple[torch.dtype, tuple[int, ...]]] | str:
    """op_host's shape and type functions; their error."""
    out, text = ctypes.create_string_buffer(4096), call.encode() if isinstance(call, str) else call.text()
    ok = probe().probe_shapes(text, out, ctypes.c_uint64(len(out)))
    if not ok:
        return out.value.decode()
    rows = [[int(word) for word in line.split()] for line in out.value.decode().splitlines()]
    return [(DTYPE_OF[row[0]], tuple(row[1:])) for row in rows]
