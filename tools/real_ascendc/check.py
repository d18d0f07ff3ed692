#!/usr/bin/env python3
"""Run the kernels with CANN's real AscendC implementation and compare them with the twin and the reference.

DEVKIT is a checkout of asc-devkit, whose headers are used as they are; TOOLS one of asc-tools, of which come the
types half and bfloat16_t and the checks that AscendC makes of every call. The instructions below both, which CANN
keeps closed, are our models (intrinsics.h). A rank is a process and each of its cores one more; all GM is one file.
Every case is a program of explore: dispatches and combines on a small world, bit for bit. Three broken kernels must
be found, or this proves nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ascend_moe.call import SpecialExperts
from ascend_moe.explore import draws, program
from ascend_moe.explore.engine import OpCall, Options, World
from ascend_moe.reference.cases import BATCHES, DTYPES, IDS, MASKS, QUANTS
from ascend_moe.settings import MAX_WORLD

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import headers_check  # noqa: E402
import op_description  # noqa: E402

# ---- building


CPP_DTYPES = {"bf16": "bfloat16_t", "fp16": "half", "fp32": "float"}
ENTRIES = {op: f"ascend_moe_distribute_{op}.cpp" for op in ("dispatch", "combine")}
MASK_HEADER = """#pragma once
#include <cstdint>
uint8_t ModelFactoryGetMaskMode();
uint64_t ModelFactoryGetMaskHigh();
uint64_t ModelFactoryGetMaskLow();
"""
LOG_HEADER = """#pragma once
#define dlog_error(...) ((void)0)
#define dlog_debug(...) ((void)0)
#define dlog_info(...) ((void)0)
#define dlog_warn(...) ((void)0)
"""


@dataclass(frozen=True)
class Broken:
    """A kernel with a mistake: ``old``, which is in ``file`` exactly once, becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    found: str  # what the runner or the comparison says


CONTROLS = (
    Broken(
        "a sum is rounded down, not to the nearest",
        "common/weighted_sum.h",
        "AscendC::Cast(out_, sum_, AscendC::RoundMode::CAST_RINT, elements_)",
        "AscendC::Cast(out_, sum_, AscendC::RoundMode::CAST_FLOOR, elements_)",
        r"combine of rank \d+: .*differs",
    ),
    Broken(
        "an Add reaches past its buffer",
        "common/weighted_sum.h",
        "AscendC::Add(sum_, sum_, value, elements_)",
        "AscendC::Add(sum_, sum_, value, elements_ + 1024)",
        r"Failed to .*Add|tensor size",
    ),
    Broken(
        "an event that nobody waits for",
        "common/base.h",
        "    AscendC::WaitFlag<event>(id);\n",
        "",
        r"event \d+ of pipes",
    ),
)


def declaration(file: str) -> str:
    """The declaration of a kernel entry, as its source has it."""
    found = re.search(r'extern "C" [^{;]*', (ROOT / "op_kernel" / file).read_text())
    if found is None:
        raise headers_check.CheckError(f'op_kernel/{file} has no extern "C" entry')
    return found[0].strip() + ";\n"


class Builder:
    """Makes runners: the entries of one dtype, our models and asc-tools' checks in one program."""

    def __init__(self, devkit: Path, tools: Path, scratch: Path, compiler: str, jobs: int) -> None:
        headers, debug = headers_check.find_devkit(devkit), tools / "cpudebug"
        if headers is None:
            raise headers_check.CheckError(f"no AscendC headers in {devkit}: expected a checkout of asc-devkit")
        if not (debug / "src/api_check").is_dir():
            raise headers_check.CheckError(f"no cpudebug/src/api_check in {tools}: expected a checkout of asc-tools")
        self.scratch, self.compiler, self.jobs = scratch, compiler, jobs
        # asc-tools has what headers_check's shim stands for.
        generated = {name: text for name, text in headers.generated.items() if str(headers_check.SHIM) not in text}
        generated["stub_fun.h"] = f'#include "{HERE / "intrinsics.h"}"\n'
        generated["model/model_factory_mask.h"], generated["dlog_pub.h"] = MASK_HEADER, LOG_HEADER
        generated["entries.h"] = "".join(map(declaration, ENTRIES.values()))
        for name, text in generated.items():
            (scratch / "generated" / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / "generated" / name).write_text(text)
        folders = [scratch / "generated", debug / "include", *headers.includes]
        folders += [debug / "src/api_check", debug / "src/api_check/inc"]
        self.command = [*([] if shutil.which("ccache") is None else ["ccache"]), compiler, "-std=c++17", "-O1", "-w"]
        self.command += ["-ffp-contract=off", "-D__CCE_AICORE__=220", "-D__DAV_C220__", "-DASCENDC_CPU_DEBUG=1"]
        self.command += ["-DASCENDC_DUMP=0", "-D__ASCENDC_INCLUDE_INTERNAL_HEADERS__", "-DNO_COSIM"]
        self.command += [flag for flag in headers.defines if "WITHOUT_CPU_LIBRARY" not in flag]
        self.command += [f"-isystem{folder}" for folder in folders] + ["-include", str(HERE / "core.h")]
        sources = [*sorted((debug / "src/api_check").glob("*.cpp")), debug / "src/acl_stub/kernel_fp16.cpp"]
        work = [(source, f"check_{source.stem}", ()) for source in sources]
        self.common = self._objects([*work, (HERE / "runtime.cpp", "runtime", ("-DREAL_RUNTIME",))])

    def _objects(self, work: Sequence[tuple[Path, str, tuple[str, ...]]]) -> list[Path]:
        def compiled(job: tuple[Path, str, tuple[str, ...]]) -> Path:
            source, name, added = job
            target = self.scratch / f"{name}.o"
            command = [*self.command, *added, "-c", str(source), "-o", str(target)]
            result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
            if result.returncode != 0:
                errors = [line for line in result.stderr.splitlines() if "error" in line]
                raise headers_check.CheckError(f"{source.name} does not compile:\n" + "\n".join(errors[:5]))
            return target

        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(compiled, work))

    def runner(self, dtype: str, kernels: Path = ROOT / "op_kernel", name: str = "") -> Path:
        """The program that runs jobs of this dtype."""
        define, target = (f"-DDTYPE_X={CPP_DTYPES[dtype]}",), self.scratch / f"run_{dtype}{name}"
        work = [(kernels / file, f"{op}_{dtype}{name}", define) for op, file in ENTRIES.items()]
        subprocess.run([self.compiler, *self.common, *self._objects(work), "-o", str(target)], check=True)
        return target

    def broken(self, control: Broken, number: int) -> Path:
        """A runner of kernels with a mistake."""
        folder = self.scratch / f"broken{number}"
        shutil.copytree(ROOT / "op_kernel", folder, dirs_exist_ok=True)
        text = (folder / control.file).read_text()
        if text.count(control.old) != 1:
            raise headers_check.CheckError(f"control: {control.file} has not exactly once: {control.old}")
        (folder / control.file).write_text(text.replace(control.old, control.new))
        return self.runner("bf16", folder, f"_broken{number}")


# ---- jobs: core.h has their layout

BASE = 0x200000000000
PAGE = 4096
STATE = 1 << 20
INPUT, OUTPUT, SHARED = range(3)
RECORD_BYTES = 256
TABLE_MAGIC = 0x57494E44
FLAGS, ARGUMENTS = 16, 24
POISONS = (0x7F, 0xFF, 0xA5)
DISPATCH, COMBINE, *_ = op_description.operators(op_description.DESCRIPTION.read_text())
INFO_WORDS = ("op", "key", "cores", "type", "workspace", "window", "tiling", "transport", "algorithm")


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    if tensor.numel() == 0:
        return b""
    elements = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    return bytes(elements.view(torch.uint8).numpy().tobytes())


def values(data: bytes, dtype: torch.dtype) -> bytes:
    """Return the bytes of a tensor with all NaNs equal, because instructions do not specify their bits."""
    if not dtype.is_floating_point or not data:
        return data
    tensor = torch.frombuffer(bytearray(data), dtype=dtype)
    return raw(torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor))


class Job:
    """A planned program as a file that a runner maps, and the results in it."""

    def __init__(self, world: World, poison: int, errors: Sequence[tuple[int, str]] | None = None) -> None:
        """``errors``: (code, message) of every op on the twin, which must be the same here; None: outputs must be."""
        assert world.program is not None
        self.errors = errors
        self.library, self.size, self.poison = world.library, world.size, poison
        self.calls = world.program.calls
        self.parts: list[tuple[int, bytes]] = []
        self.end, self.places = PAGE, dict[int, int]()
        self.data, self.window = world.window_bytes, 2 * world.window_bytes  # the registered area lies behind the data
        self.windows = [self._room(self.window + STATE) for _ in range(self.size)]  # and the state area behind both
        self.parts += [(window, bytes([poison]) * self.window) for window in self.windows]
        context = self._a2 if world.program.program.servers else self._table
        contexts = [context(rank) for rank in range(self.size)]
        self.context_bytes, self.contexts = len(contexts[0]), [self._put(data) for data in contexts]
        self.registered = [0] * self.size
        self.records = list[int]()
        steps = [self._step(call) for call in self.calls]
        at = self._put(b"".join(steps))
        self._write(0, struct.pack("<6Q", self.end, self.size, BASE and at, len(steps), poison, 60))

    def _room(self, size: int) -> int:
        at = self.end
        self.end = (at + size + 511) // 512 * 512 + 512  # nobody's 512 bytes behind each
        return at

    def _write(self, at: int, data: bytes) -> None:
        self.parts.append((at, data))

    def _put(self, data: bytes) -> int:
        at = self._room(len(data))
        self._write(at, data)
        return at

    def _addresses(self, count: int, offset: int = 0) -> list[int]:
        return [BASE + window + offset for window in self.windows] + [0] * (count - self.size)

    def _table(self, rank: int) -> bytes:
        """WindowTable of op_kernel/common/contexts.h."""
        head = struct.pack("<4I2Q", TABLE_MAGIC, rank, self.size, 0, self.window, STATE)
        areas = (*self._addresses(MAX_WORLD), *self._addresses(MAX_WORLD, self.window))
        return head + struct.pack(f"<{2 * MAX_WORLD}Q", *areas)

    def _a2(self, rank: int) -> bytes:
        """A2Context of op_kernel/common/contexts.h: all ranks on one server."""
        head = struct.pack("<2Q2IQ", 0, 0, rank, self.size, self.window + STATE)
        return head + struct.pack("<32Q", *self._addresses(32)) + bytes(32 * 8 + 8328 + 8 + 8)

    def _tensor(self, tensor: torch.Tensor | None, output: bool) -> int:
        """Return the address of a tensor; an output of one op may be an input of the next."""
        if tensor is None or tensor.numel() == 0:
            return 0
        if tensor.data_ptr() not in self.places:
            data = raw(tensor)
            place = self._put(bytes([self.poison]) * len(data) if output else data)
            self.places[tensor.data_ptr()] = place
        return self.places[tensor.data_ptr()]

    def _register(self, call: OpCall) -> None:
        """Copy a combine's rows into a block of their rank's registered area, as explore does."""
        rows = call.inputs["expand_x"]
        at = self.windows[call.rank] + self.data + self.registered[call.rank]
        self.registered[call.rank] += (rows.nbytes + 511) // 512 * 512
        assert self.registered[call.rank] <= self.window - self.data
        self._write(at, raw(rows))
        self.places[rows.data_ptr()] = at

    def _step(self, call: OpCall) -> bytes:
        if call.registered and call.inputs["expand_x"].numel():
            self._register(call)
        words = (ctypes.c_uint64 * len(INFO_WORDS))()
        self.library.am_plan_info(ctypes.c_void_p(call.plan), words, ctypes.c_uint64(len(INFO_WORDS)))
        info = dict(zip(INFO_WORDS, words, strict=True))
        tiling = ctypes.create_string_buffer(info["tiling"])
        self.library.am_plan_tiling(ctypes.c_void_p(call.plan), tiling, ctypes.c_uint64(info["tiling"]))
        ranges, arguments = list[bytes](), list[int]()

        def add(name: str, at: int, size: int, kind: int) -> None:
            arguments.append(BASE + at if at else 0)
            if at:
                ranges.append(struct.pack("<3Q24s", BASE + at, BASE + at + size, kind, name.encode()[:23]))

        dispatch = "dispatch" in call.name
        for row in op_description.accepted((DISPATCH if dispatch else COMBINE).inputs):
            tensor = call.inputs.get(row.v2_name, call.inputs.get(row.name))
            add(row.name, self._tensor(tensor, False), 0 if tensor is None else tensor.nbytes, INPUT)
        for number, tensor in enumerate(call.outputs):
            add(f"output {number}", self._tensor(tensor, True), tensor.nbytes, OUTPUT)
        self.records.append(self._put(bytes(RECORD_BYTES)))
        add("error_record", self.records[-1], RECORD_BYTES, OUTPUT)
        workspace = self._put(bytes([self.poison]) * info["workspace"]) if info["workspace"] else 0
        add("workspace", workspace, info["workspace"], OUTPUT)
        add("tiling", self._put(tiling.raw), info["tiling"], INPUT)
        add("context", self.contexts[call.rank], self.context_bytes, INPUT)
        given = arguments + [0] * (ARGUMENTS - len(arguments))
        for rank, window in enumerate(self.windows):
            add(f"window of rank {rank}", window, self.window + STATE, SHARED)
        at = self._put(b"".join(ranges))
        head = (call.rank, 1 if dispatch else 2, info["key"], info["cores"], BASE + self.contexts[call.rank])
        return struct.pack(f"<{8 + ARGUMENTS + FLAGS}Q", *head, at, len(ranges), call.registered, *given, *[0] * FLAGS)

    def run(self, runner: Path) -> list[str]:
        """Return differences from the twin, the reference or the rules."""
        with tempfile.NamedTemporaryFile(prefix="real-ascendc-") as file:
            os.truncate(file.fileno(), (self.end + PAGE - 1) // PAGE * PAGE)
            with mmap.mmap(file.fileno(), 0) as memory:
                for at, data in self.parts:
                    memory[at : at + len(data)] = data
                said, code = _run([str(runner), file.name], 180)
                if code != 0:
                    lines = [line for line in said.splitlines() if line.strip()]
                    return lines or [f"the runner ended with {code}"]
                return [text for number in range(len(self.calls)) for text in self._compare(memory, number)]

    def _compare(self, memory: mmap.mmap, number: int) -> Iterator[str]:
        call = self.calls[number]
        who = f"{call.name.rsplit('distribute_')[-1]} of rank {call.rank}"
        record = struct.unpack("<64i", memory[self.records[number] : self.records[number] + RECORD_BYTES])
        text = ctypes.create_string_buffer(1024)
        if any(record):
            self.library.am_error_message((ctypes.c_int32 * 64)(*record), text, 1024)
        found_error, twin_error = text.value.decode(), self.errors[number][1] if self.errors else ""
        if found_error != twin_error or (self.errors and not found_error):
            yield f"{who}: says {found_error or 'nothing'!r}, the twin {twin_error or 'nothing'!r}"
        if self.errors:
            return
        for output, expected in call.expected.items():
            dtype, size = expected.dtype, expected.nbytes
            if size == 0:
                continue
            at = self.places[call.outputs[output].data_ptr()]
            want, found = values(raw(expected), dtype), values(bytes(memory[at : at + size]), dtype)
            for name, other in (("reference", want), ("twin", values(raw(call.outputs[output])[:size], dtype))):
                if found != other:
                    first = next(i for i in range(len(want)) if found[i] != other[i])
                    yield f"{who}: output {output} differs from the {name} from byte {first} of {len(want)} on"


def _run(command: Sequence[str], seconds: float) -> tuple[str, int]:
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            return process.communicate(timeout=seconds)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0] + f"no end within {seconds} s\n", -1


# ---- cases


SPECIAL = ((0, 0, 0), (1, 2, 0), (0, 0, 2), (2, 1, 1), (0, 0, 0))  # zero, copy and const experts


def matrix() -> Iterator[program.Program]:
    """Every dtype, algorithm, quantization and contract, on two worlds each; the other options go by turns."""
    modes = itertools.product(DTYPES, ("window", "direct"), QUANTS, (1, 2), (False, True))
    for number, (dtype, algorithm, quant, contract, larger) in enumerate(modes):
        turn = number + 3 * (number // 4)  # no option depends on contract and world, which are the last two bits
        world = 3 + turn % 2 if larger else 2
        rows = program.ROWS[turn % 3] if algorithm == "direct" else "own"
        yield program.Program(
            world=world, cores=2 + turn % 3, local=1 + turn % 3, topk=2, batch=4 + number % 5, units=1 + turn % 4,
            dtype=dtype, **QUANTS[quant], contract=contract, seed=number, algorithm=algorithm, sequence="DCDC",
            weights=turn % 2 == 0, plain=turn % 4 == 1, mask=MASKS[turn % len(MASKS)], ids=IDS[number % len(IDS)],
            batches=BATCHES[number % 4], expert_token_nums_type=turn // 2 % 2, tp_world_size=turn // 4 % 2,
            shared=(0, 2, 3)[turn % 3] if contract == 2 else 0,
            rows=rows, odd=turn % 6 == 5,
            comm_quant_mode=2 if turn % 2 == 1 and dtype != "fp32" and rows == "own" else 0,
            **SpecialExperts(*SPECIAL[turn % len(SPECIAL)])._asdict() if contract == 2 else {}, alphas=1 + turn % 2,
            servers=world if algorithm == "window" and larger == (contract == 1) else 0,
        )  # fmt: skip


# Sizes at which a kernel takes another path: segments by vectors (W a multiple of 8), rows read once for several
# experts of a rank, rows with tails in a ring of their own (8 cores and more), lists by one core and rows by the
# others, lists of several chunks, one core, no pair at all.
LARGER = (
    "w8,c2,l2,k2,b3,u1,v1,s1,bf16,none,equal,DC,direct",
    "w8,c2,l5,k3,b4,u2,v2,s2,fp16,int8,mask:pair,unequal,DC,direct",
    "w8,c2,l3,k3,b4,u3,v2,s3,bf16,smooth,ids:duplicates,DC,window,weights",
    "w2,c8,l3,k3,b4,u1,v2,m2,bf16,int8,s4,DC,direct",
    "w2,c9,l3,k4,b5,u2,v2,m1,fp16,int8,mask:pair,s2,DC,direct",
    "w1,c8,l4,k3,b9,u1,v2,m2,fp32,none,s3,DC,direct",
    "w1,c3,l2,k2,b64,u1,v1,m2,bf16,none,ids:hot,DC,direct",
    "w3,c4,l4,k8,b65,u2,v1,s5,bf16,int8,ids:zipf,unequal,DC,direct,weights",
    "w4,c4,l8,k8,b33,u33,v2,s6,fp16,none,mask:token,equal,DC,direct",
    "w2,c4,l2,k4,b130,u3,v1,s7,fp32,smooth,ids:hot,unequal,DC,window",
    "w2,c1,l8,k16,b33,u1,v1,s8,bf16,none,ids:distinct,equal,DC,direct",
    "w2,c5,l2,k2,b3,u256,v1,s9,bf16,int8,equal,DC,direct",
    "w2,c5,l2,k2,b3,u256,v2,s10,fp16,smooth,equal,DC,window",
    "w2,c4,l2,k2,b3,u1,v2,no-tokens,mask:token,m3,DC,direct",
    "w2,c3,l1,k1,b3,u2,v1,one-rank-only,ids:none,DCDC,mixed",
    "w3,c3,l2,k2,b5,u2,v1,s11,fp16,DC,window",
    "w3,c3,l2,k2,b5,u2,v1,s12,bf16,DDCC,mixed,plain",
    "w2,c2,l2,k2,b5,u2,v1,s13,bf16,DCDC,direct,registered",
    "w3,c3,l2,k3,b5,u3,v2,s14,fp16,int8,DCDC,direct,partly",
    "w3,c2,l2,k2,b4,u2,v1,r3,s15,bf16,int8,DCDC,window",
    "w2,c3,l1,k2,b5,u2,v2,r2,s16,fp32,none,mask:pair,DC,window",
    "w2,c8,l3,k3,b40,u2,v2,s17,bf16,int8,ids:distinct,equal,DC,window,weights",
    "w2,c9,l4,k4,b37,u65,v1,s18,fp32,smooth,ids:any,equal,DC,window,weights",
    "w1,c12,l8,k3,b70,u3,v2,s19,fp16,int8,ids:hot,mask:token,equal,DC,window,weights",
    "w2,c8,l3,k4,b20,u65,v2,s20,bf16,int8,equal,DC,window,weights,comm_quant_mode:2,zero_expert_num:1,copy_expert_num:1,const_expert_num:2",
    "w2,c9,l3,k4,b20,u3,v2,s21,fp16,none,mask:token,unequal,DC,direct,comm_quant_mode:2,zero_expert_num:2,copy_expert_num:3,const_expert_num:1,alphas",
    "w3,c2,l2,k2,b6,u2,v1,s22,bf16,none,unequal,DCDC,window,comm_quant_mode:2",
)


def drawn(count: int) -> Iterator[program.Program]:
    """Programs that explore draws, every fourth with NaN, infinities and denormals."""
    for seed in range(count):
        yield replace(draws.draw(1000 + seed), odd=seed % 4 == 3)


def every(count: int) -> Iterator[tuple[program.Program, bool]]:
    """All cases, ``count`` of them drawn, and whether a fault is planted."""
    yield from ((case, False) for case in (*matrix(), *map(program.parse, LARGER), *drawn(count)))
    yield from ((program.parse(text), True) for text in FAULTY)


# What a table counts beside the modes: by its name, the cases that have it.
FEATURES: dict[str, Callable[[program.Program], bool]] = {
    "a shared expert": lambda case: case.shared > 0,
    "a mask": lambda case: case.mask != "none",
    "ids of -1": lambda case: any(bool((inputs.expert_ids == -1).any()) for inputs in case.inputs),
    "A2's context": lambda case: case.servers > 0,
    "int8 return": lambda case: case.returns_int8,
    "special experts": lambda case: sum(case.special) > 0,
    "registered rows": lambda case: case.rows != "own",
    "a rank without tokens": lambda case: 0 in case.batch_sizes,
    "NaN and infinities": lambda case: case.odd,
}


def table(results: Sequence[tuple[program.Program, bool]]) -> Iterator[str]:
    """By mode and dtype: how many cases are equal, of how many; then how many have an option."""
    yield f"{'algorithm, quantization, contract':36}" + "".join(f"{dtype:>12}" for dtype in DTYPES)
    groups = defaultdict[tuple[str, str, int], defaultdict[str, list[bool]]](lambda: defaultdict(list))
    for case, good in results:
        groups[case.algorithm, case.quant, case.contract][case.dtype].append(good)
    for (algorithm, quant, contract), by_dtype in sorted(groups.items()):
        counts = [f"{sum(by_dtype[dtype])} of {len(by_dtype[dtype])}" for dtype in DTYPES]
        yield f"{f'{algorithm}, {quant}, V{contract}':36}" + "".join(f"{text:>12}" for text in counts)
    cases = [case for case, _ in results]
    yield "among them: " + ", ".join(f"{sum(map(has, cases))} with {name}" for name, has in FEATURES.items())


# A dispatch in which one id of one rank is no expert: every rank must tell the same error as on the twin.
FAULTY = tuple(
    f"w{world},c{cores},l2,k2,b6,u2,v{contract},s{seed},{dtype},equal,ids:distinct,D,{algorithm}"
    for seed, (world, cores, contract, dtype, algorithm) in enumerate(
        (
            *((2, 3, 1, "bf16", "window"), (3, 2, 2, "fp16", "window")),
            *((2, 2, 2, "fp32", "direct"), (4, 3, 1, "bf16", "direct")),
        )
    )
)
WRONG_ID, WRONG_PLACE = 4096, 5


def run_case(case: program.Program, runner: Path, poison: int, faulty: bool = False) -> list[str]:
    """Run a program on the checked twin, then over real AscendC."""
    with World(case.world, window_mib=program.window_mib(case)) as world:
        planned = world.load(case, accepted=0xFFFFFFFF if faulty else 1, compare=False)
        if faulty:
            planned.calls[case.seed % case.world].inputs["expert_ids"].view(-1)[WRONG_PLACE] = WRONG_ID
        result = world.run(case.seed, 1, Options(vary_epoch=False))
        if result.failed:
            return [f"the twin itself: {result.kind.decode()}: {result.message.decode()}"]
        return Job(world, poison, world.errors() if faulty else None).run(runner)


def run_controls(builder: Builder, controls: Sequence[Broken]) -> int:
    """How many broken kernels were found."""
    count = 0
    case = program.parse("w2,c2,l2,k2,b6,u3,v1,s7,bf16,equal,DC")
    for number, control in enumerate(controls):
        differences = run_case(case, builder.broken(control, number), POISONS[0])
        found = [line for line in differences if re.search(control.found, line)]
        count += bool(found)
        said = f"found: {found[0]}" if found else f"NOT FOUND {differences[:3]}"
        print(f"control: {control.name}: {said}", flush=True)
    return count


def main() -> int:
    """The command line; 0 when every case is equal and every broken kernel was found."""
    parser = argparse.ArgumentParser(description="Runs the kernels over CANN's real AscendC implementation.")
    parser.add_argument("devkit", type=Path, help="a checkout of asc-devkit")
    parser.add_argument("tools", type=Path, help="a checkout of asc-tools")
    parser.add_argument("--case", action="append", help="a program as explore writes it, instead of all")
    parser.add_argument("--drawn", type=int, default=60, help="programs that explore draws, beside the matrix")
    parser.add_argument("--dtype", choices=tuple(DTYPES), action="append", help="of the cases; default all")
    parser.add_argument("--no-controls", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--build", type=Path, help="a folder for what is compiled; default: one that is removed")
    options = parser.parse_args()
    start = time.monotonic()
    cases = [(program.parse(text), False) for text in options.case or ()] or list(every(options.drawn))
    cases = [(case, faulty) for case, faulty in cases if case.dtype in (options.dtype or DTYPES)]
    try:
        with tempfile.TemporaryDirectory(prefix="real-ascendc-") as scratch:
            build = (options.build or Path(scratch)).resolve()
            builder = Builder(options.devkit.resolve(), options.tools.resolve(), build, options.compiler, options.jobs)
            runners = {dtype: builder.runner(dtype) for dtype in {case.dtype: 0 for case, _ in cases}}
            print(f"built for {', '.join(runners)} in {time.monotonic() - start:.0f} s", flush=True)
            results = list[tuple[program.Program, bool]]()
            for number, (case, faulty) in enumerate(cases):
                differences = run_case(case, runners[case.dtype], POISONS[number % len(POISONS)], faulty)
                results.append((case, not differences))
                for text in [f"{'faulty ' if faulty else ''}case {case}", *differences][: 9 if differences else 0]:
                    print(text, flush=True)
            print(*table(results), sep="\n", flush=True)
            controls = () if options.no_controls else CONTROLS
            found = run_controls(builder, controls)
    except (headers_check.CheckError, OSError) as error:
        print(f"real-ascendc: {error}", file=sys.stderr)
        return 1
    equal = sum(good for _, good in results)
    passed = equal == len(results) and found == len(controls)
    print(
        f"real-ascendc: {'PASS' if passed else 'FAIL'}: {equal} of {len(results)} cases equal to the twin and to the "
        f"reference, {found} of {len(controls)} broken kernels found, {time.monotonic() - start:.0f} s"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
