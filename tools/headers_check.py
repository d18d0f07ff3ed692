#!/usr/bin/env python3
"""Compiles every kernel entry x tiling key x dtype, or op_host, against CANN's real headers, to objects.

DIR is a CANN toolkit with its CPU-debug library (8.1) or an asc-devkit checkout (9.x); what the latter
expects of that library is declared in headers_check_shim.h. Tiling keys are found the way CANN's op
compiler finds them: as text, in the preprocessed entry. A control with a float -> int8 Cast must not compile.

With --host every source of op_host is compiled against a toolkit's headers, a definition, tiling or shape
source in the three ways of CANN's build; a control that calls what no header has must not compile.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "tools" / "headers_check_shim.h"
NAMES = ("distribute_dispatch", "distribute_combine", "probe", "one_card")
ENTRIES = [ROOT / "op_kernel" / f"ascend_moe_{name}.cpp" for name in NAMES]
DTYPES = ("bfloat16_t", "half", "float")
FLAGS = ["-std=c++17", "-fmax-errors=5", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter"]
FLAGS += ["-DASCENDC_CPU_DEBUG=1", "-D__CCE_AICORE__=220", "-D__DAV_C220__", "-DASCENDC_DUMP=0"]
FLAGS += ["-include", str(SHIM)]

CONTROL = """
#include "kernel_operator.h"
extern "C" __global__ __aicore__ void control(GM_ADDR) {
    AscendC::TPipe pipe;
    AscendC::TBuf<> buf;
    pipe.InitBuffer(buf, 1024);
    AscendC::LocalTensor<float> from = buf.Get<float>();
    AscendC::LocalTensor<CONTROL> to = buf.Get<CONTROL>();
    AscendC::Cast(to, from, AscendC::RoundMode::CAST_RINT, 64);
}
"""

# asc-devkit describes tiling structs of its high-level API with macros, of which its build makes this header.
TILING_MACROS = """
#pragma once
#define BEGIN_TILING_DATA_DEF(name) struct name {
#define TILING_DATA_FIELD_DEF(type, name) type name = 0
#define TILING_DATA_FIELD_DEF_ARR(type, size, name) type name[size] = {}
#define TILING_DATA_FIELD_DEF_STRUCT(type, name) type name
#define END_TILING_DATA_DEF }
#define REGISTER_TILING_DATA_CLASS(op, name)
#define optiling AscendC::tiling
"""


class CheckError(Exception):
    """Raised with a message for the user."""


@dataclass(frozen=True)
class HeaderSet:
    """A set of AscendC headers with its compiler options."""

    name: str
    includes: list[Path]
    defines: list[str]
    generated: dict[str, str] = field(default_factory=dict)  # headers that its own build makes: name -> text


@dataclass(frozen=True)
class Job:
    """One object that must have a symbol. ``way``: what tells it from others of its source."""

    source: Path
    way: str
    symbol: str
    added: tuple[str, ...] = ()


def toolkit_roots(directory: Path) -> Iterator[Path]:
    """DIR itself, or the toolkit in it: latest/ of an install, Ascend/ascend-toolkit/* of a checkout."""
    yield directory
    for pattern in ("latest", "ascend-toolkit/*", "Ascend/ascend-toolkit/*"):
        yield from sorted(directory.glob(pattern))


def find_toolkit(directory: Path) -> HeaderSet | None:
    """CANN 8.1: the API headers of one architecture, and the CPU-debug library's."""
    for root in toolkit_roots(directory):
        cpu_library = root / "tools/tikicpulib/lib/include"
        for api in [*sorted(root.glob("*-linux/ascendc/include")), root / "compiler/ascendc/include"]:
            basic = api / "basic_api"
            if (basic / "kernel_operator.h").is_file() and (cpu_library / "stub_def.h").is_file():
                includes = [cpu_library, basic, basic / "interface", basic / "impl", api / "highlevel_api"]
                includes += [root / "include", *sorted(root.glob("*-linux/include"))]
                return HeaderSet(f"CANN toolkit {root.name}", includes, ["-D__CCE_KT_TEST__=1"])
    return None


def find_devkit(directory: Path) -> HeaderSet | None:
    """asc-devkit: without the CPU-debug library, which is another project, and without generated headers."""
    for root in (directory, directory / "asc"):
        if not ((root / "include/kernel_operator.h").is_file() and (root / "impl/basic_api").is_dir()):
            continue
        parts = ("", "include", "include/basic_api", "include/utils", "impl", "impl/basic_api")
        library = ("stub_def", "stub_fun", "simt_stub", "kernel_fp16", "kernel_bf16", "kernel_print_lock")
        generated = {f"{name}.h": f'#include "{SHIM}"\n' for name in library}
        generated["register/tilingdata_base.h"] = "#pragma once\n"
        tilings = sorted((root / "include/adv_api").rglob("*tilingdata.h"))
        generated["kernel_tiling/kernel_tiling.h"] = (
            TILING_MACROS
            + "".join(f'#include "{header}"\n' for header in tilings)
            + "#undef optiling\nusing namespace AscendC::tiling;\n"
        )
        defines = ["-D__NPU_ARCH__=2201", "-D__DAV_C220_VEC__", "-D__DAV_VEC__"]
        defines += ["-DASCEND_MOE_WITHOUT_CPU_LIBRARY"]
        return HeaderSet(f"asc-devkit {root.name}", [root / part for part in parts], defines, generated)
    return None


def tiling_keys(entry: Path, text: str) -> list[int]:
    """The keys in a preprocessed entry; the op compiler takes digits, it evaluates no constant."""
    keys: set[int] = set()
    for operand in re.findall(r"g_tilingKey == \( ?(.*?) ?\)", text):
        if not re.fullmatch(r"(0|[1-9]\d*)U?L?", operand):
            raise CheckError(
                f"{entry.name}: TILING_KEY_IS({operand}) does not end up as a decimal literal, "
                "so the op compiler finds no key; use a literal or a macro"
            )
        keys.add(int(operand.rstrip("UL")))
    return sorted(keys)


class Compiler:
    """Compiles with one header set, into one scratch directory; messages in plain ASCII."""

    def __init__(self, headers: HeaderSet, flags: Sequence[str], scratch: Path) -> None:
        self.scratch = scratch
        generated = scratch / "generated"
        for name, text in headers.generated.items():
            (generated / name).parent.mkdir(parents=True, exist_ok=True)
            (generated / name).write_text(text)
        self.command = [*flags, *headers.defines]
        self.command += [f"-isystem{path}" for path in (generated, *headers.includes)]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "LC_ALL": "C"}
        return subprocess.run([*self.command, *arguments], capture_output=True, text=True, env=environment)

    def object(self, source: Path, name: str, symbol: str, *added: str) -> tuple[int, str]:
        """Return the size of the object with this symbol, or 0, and the compiler's messages."""
        target = self.scratch / f"{name}.o"
        result = self.run("-c", str(source), "-o", str(target), *added)
        if result.returncode != 0:
            return 0, result.stderr
        code = target.read_bytes()
        if symbol.encode() not in code:
            return 0, f"{source.name}: the object has no symbol {symbol}\n"
        return len(code), result.stderr

    def check_control(self, text: str, right: str, wrong: str, rejected: str) -> None:
        """With one definition the text compiles and with the other it does not, or this proves nothing."""
        source = self.scratch / "control.cpp"
        source.write_text(text)
        size, log = self.object(source, "control", "", f"-DCONTROL={right}")
        if not size:
            raise CheckError(f"the control with {right} does not compile:\n{log}")
        size, log = self.object(source, "control", "", f"-DCONTROL={wrong}")
        if size or not re.search(rejected, log):
            raise CheckError(f"the control's {wrong} was not rejected:\n{log}")
        print(f"control: {right} compiles, {wrong} does not")


def read_entry(compiler: Compiler, entry: Path) -> tuple[list[int], str, str]:
    """Tiling keys, kernel type and tiling struct, by the op compiler's own patterns."""
    result = compiler.run("-E", "-D__CHECK_FEATURE_AT_PRECOMPILE", "-DDTYPE_X=half", str(entry))
    if result.returncode != 0:
        raise CheckError(f"{entry.name} does not preprocess:\n{result.stderr}")
    lines = [line for line in result.stdout.splitlines() if not line.startswith("#")]
    text = re.sub(r"\s+", " ", " ".join(lines))  # g++ breaks lines inside macros of system headers
    if not re.search(rf"\b{entry.stem}\b\s*\(", text):
        raise CheckError(f"{entry.name} has no function {entry.stem}, which the op compiler looks for")
    keys = tiling_keys(entry, text)
    kernel = re.findall(r"__enable_feature_for_compile_default\s*=\s*(\w+)\s*;", text)
    struct = re.findall(r"__enable_custom_tiling\s*([\w:]+)\s*=\s*default\s*;", text)
    macros = ("TILING_KEY_IS", "KERNEL_TASK_TYPE_DEFAULT", "REGISTER_TILING_DEFAULT")
    for macro, found in zip(macros, (keys, kernel, struct), strict=True):
        if not found:
            raise CheckError(f"{entry.name} has no {macro}")
    return keys, kernel[0], struct[0]


def entry_jobs(compiler: Compiler, entries: Sequence[Path]) -> Iterator[Job]:
    """One binary of the op a tiling key and dtype, with the two definitions that the op compiler adds."""
    for entry in entries:
        if not entry.is_file():
            raise CheckError(f"no kernel entry {entry}")
        keys, kernel_type, tiling_struct = read_entry(compiler, entry)
        print(f"{entry.name}: tiling keys {keys}, {kernel_type}, {tiling_struct}")
        dtypes = DTYPES if "DTYPE_X" in entry.read_text() else DTYPES[:1]
        for key in keys:
            symbol = f"{entry.stem}_{key}_tilingkey"
            added = (f"-DTILING_KEY_VAR={key}UL", f"-D{entry.stem}={symbol}")
            for dtype in dtypes:
                yield Job(entry, f"{key} {dtype}", symbol, (f"-DDTYPE_X={dtype}", *added))


def compile_all(compiler: Compiler, jobs: Iterable[Job], threads: int, strict: bool) -> int:
    """Print a row an object, and messages; how many failed. ``strict``: a warning of ours is a failure."""

    def compiled(job: Job) -> tuple[Job, float, int, str]:
        start = time.monotonic()
        name = f"{job.source.stem}_{job.way.replace(' ', '_')}"
        size, log = compiler.object(job.source, name, job.symbol, *job.added)
        return job, time.monotonic() - start, size, log

    total, logs, warnings = 0, dict[Job, str](), set[str]()
    with ThreadPoolExecutor(threads) as pool:
        for job, seconds, size, log in pool.map(compiled, list(jobs)):
            ours = {line for line in log.splitlines() if ": warning: " in line and str(ROOT) in line}
            total, warnings = total + 1, warnings | ours
            if not size or (strict and ours):
                logs[job] = log
            outcome = "FAILED" if job in logs else f"{size} B"
            print(f"{job.source.name:44} {job.way:22} {outcome:>10} {seconds:8.1f} s", flush=True)
    for log in {job.source: log for job, log in reversed(logs.items())}.values():
        print(log, file=sys.stderr)  # the first of each source: the others mostly repeat it
    for line in sorted(warnings):
        print(line, file=sys.stderr)
    print(f"{total - len(logs)} of {total} objects compiled")
    return len(logs)


# ---- op_host

# For op_build, for the library of tiling functions, for that of prototypes.
WAYS = {"definition": (), "tiling": ("-DOP_TILING_LIB",), "prototype": ("-DOP_PROTO_LIB",)}
ACLNN = "aclnn/acl_meta.h"
HOST_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-fmax-errors=5"]
HOST_FLAGS += [f"-I{ROOT / folder}" for folder in ("op_host", "op_kernel")]
HOST_CONTROL = """
#include "cann/tiling.h"
ge::graphStatus Control(gert::TilingContext* context) { return context->CONTROL(1); }
"""


def find_host_toolkit(directory: Path) -> HeaderSet | None:
    """A CANN toolkit: include/ of one architecture, and the tiling API beside it."""
    for root in toolkit_roots(directory):
        for include in [*sorted(root.glob("*-linux/include")), root / "include"]:
            if (include / "register/op_def_registry.h").is_file():
                api = "ascendc/include/highlevel_api"
                tiling = [path for path in (include.parent / api, root / "compiler" / api) if path.is_dir()]
                includes = [include, include / "experiment/platform", *tiling]
                # As the toolkit's own project template has it.
                return HeaderSet(f"CANN toolkit {root.name}", includes, ["-D_GLIBCXX_USE_CXX11_ABI=0"])
    return None


def host_jobs(scratch: Path) -> Iterator[Job]:
    """Every source of op_host, and the one that is made; a new one that nothing here knows is an error."""
    for source in sorted((ROOT / "op_host").glob("*.cpp")):
        if re.fullmatch(r"ascend_moe_[a-z_]+", source.stem) is None:
            raise CheckError(f"{source.name}: not named ascend_moe_<op>.cpp, as its op is")
        symbol = "".join(word.capitalize() for word in source.stem.split("_"))
        for way, added in WAYS.items():
            yield Job(source, way, symbol, added)
    made = scratch / "op_api"
    subprocess.run([sys.executable, ROOT / "tools/op_description.py", "aclnn", made], check=True)
    includes = (f"-I{ROOT / 'op_host/op_api'}", f"-I{made}")
    yield Job(made / "aclnn_ascend_moe.cpp", "op_api", "aclnnAscendMoeProbeGetWorkspaceSize", includes)


def check_kernels(options: argparse.Namespace, directory: Path, scratch: Path) -> int:
    """The kernel entries; how many objects failed."""
    headers = find_toolkit(directory) or find_devkit(directory)
    if headers is None:
        raise CheckError(
            f"no AscendC headers in {directory}: expected a CANN toolkit (*-linux/ascendc/include and "
            "tools/tikicpulib) or an asc-devkit checkout (include/kernel_operator.h and impl/basic_api)"
        )
    print(f"headers: {headers.name} in {directory}")
    compiler = Compiler(headers, [options.compiler, *FLAGS], scratch)
    compiler.check_control(CONTROL, "half", "int8_t", r"error: .*Cast")
    jobs = entry_jobs(compiler, options.entry or ENTRIES)
    return compile_all(compiler, jobs, options.jobs, strict=False)


def check_host(options: argparse.Namespace, directory: Path, scratch: Path) -> int:
    """The sources of op_host; how many objects failed, or had a warning about ours."""
    headers = find_host_toolkit(directory)
    if headers is None:
        raise CheckError(f"no host headers in {directory}: expected a CANN toolkit (*-linux/include/register)")
    types = "CANN's" if any((path / ACLNN).is_file() for path in headers.includes) else "our own"
    print(f"host headers: {headers.name}; types of the aclnn entry points: {types}")
    compiler = Compiler(headers, [options.compiler, *HOST_FLAGS], scratch)
    rejected = "error: .*has no member named 'SetTilingKeys'"
    compiler.check_control(HOST_CONTROL, "SetTilingKey", "SetTilingKeys", rejected)
    return compile_all(compiler, host_jobs(scratch), options.jobs, strict=True)


def main() -> int:
    """The command line; 0 when everything compiled."""
    parser = argparse.ArgumentParser(description="Compiles kernels or op_host against CANN's real headers.")
    parser.add_argument("directory", metavar="DIR", type=Path, help="CANN toolkit or asc-devkit")
    parser.add_argument("--host", action="store_true", help="op_host instead of the kernels")
    parser.add_argument("--entry", type=Path, action="append", help="an entry instead of this project's")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--compiler", default="g++")
    options = parser.parse_args()
    name, check_all = ("host-headers-check", check_host) if options.host else ("headers-check", check_kernels)
    try:
        with tempfile.TemporaryDirectory(prefix="headers-check-") as scratch:
            failed = check_all(options, options.directory.resolve(), Path(scratch))
    except (CheckError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    print(f"{name}: {'FAIL' if failed else 'PASS'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
