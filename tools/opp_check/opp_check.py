#!/usr/bin/env python3
"""Build the operator package with CANN's CMake functions and compare it with a package of the standard template.

    python tools/opp_check/opp_check.py ASC_DEVKIT [--host-headers TOOLKIT] [--soc NAME,NAME] [--keep DIR]

ASC_DEVKIT is a checkout of CANN's asc-devkit: its cmake/asc is what a toolkit of CANN 9.1 installs. A scratch
folder becomes a toolkit of these functions, headers, empty libraries, and shims of three programs that only a
toolkit has: op_build, the kernels' compiler, makeself (beside this file). build.sh runs in it as a user runs it,
through find_package(ASC) to the packed .run. The template is a project with one operator and the calls that CANN's
own example makes. Headers are this project's shim for CANN's, or those of a toolkit, e.g. 8.1.
Exit code 1: a build failed, or the trees differ where they must not; 2: no such folders.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(ROOT / "tools"))

import asc_opc  # noqa: E402
import headers_check  # noqa: E402
import op_description  # noqa: E402
from op_build import snake  # noqa: E402

VENDOR = "ascend_moe"
SOCS = ("ascend910b", "ascend910_93")
SHARED = ("exe_graph", "register", "tiling_api", "nnopbase", "ascendcl", "acl_rt", "mmpa", "graph")
STATIC = ("rt2_registry",)
SHIM = ROOT / "vnpu/cann_shim/cann_shim"
SECONDS = 1800

TEMPLATE = {
    "CMakeLists.txt": """cmake_minimum_required(VERSION 3.16)
project(template CXX)
set(CMAKE_CXX_STANDARD 17)
find_package(ASC REQUIRED)
npu_op_package(${vendor_name} TYPE RUN CONFIG INSTALL_PATH ${CMAKE_BINARY_DIR})
add_subdirectory(op_host)
add_subdirectory(op_kernel)
""",
    "op_host/CMakeLists.txt": """set(ops ${CMAKE_CURRENT_SOURCE_DIR}/add_custom.cpp)
npu_op_code_gen(SRC ${ops} PACKAGE ${vendor_name} OUT_DIR ${ASCEND_AUTOGEN_PATH})
file(GLOB entries ${ASCEND_AUTOGEN_PATH}/aclnn_*.cpp)
file(GLOB prototypes ${ASCEND_AUTOGEN_PATH}/op_proto.cc)
set_source_files_properties(${entries} ${prototypes} PROPERTIES GENERATED TRUE)
npu_op_library(cust_opapi ACLNN ${entries})
npu_op_library(cust_optiling TILING ${ops})
npu_op_library(cust_op_proto GRAPH ${ops} ${prototypes})
npu_op_package_add(${vendor_name} LIBRARY cust_opapi cust_optiling cust_op_proto)
""",
    "op_host/add_custom.cpp": "int nothing;\n",
    "op_kernel/CMakeLists.txt": """set(base ${CMAKE_CURRENT_SOURCE_DIR})
npu_op_kernel_library(ascendc_kernels SRC_BASE ${base} TILING_LIBRARY cust_optiling)
npu_op_package_add(${vendor_name} LIBRARY ascendc_kernels)
""",
    "op_kernel/add_custom.cpp": '#include "kernel_operator.h"\n',
}
TEMPLATE_OP = {
    "op": "AddCustom",
    "input_desc": [{"name": "x", "param_type": "required", "format": ["ND"], "type": ["fp16"]}],
    "output_desc": [{"name": "y", "param_type": "required", "format": ["ND"], "type": ["fp16"]}],
    "attr": [{"name": "n", "param_type": "optional", "type": "int", "default_value": 1}],
}

# Files of the standard package that ours replaces, and files that only ours has, with the reason.
REPLACED = {r"op_api/include/aclnn_<op>\.h": "its entry points are declared in aclnn_ascend_moe.h"}
OWN = {
    r"op_api/include/\w+\.h": "the entry points and their types",
    r"op_impl/ai_core/tbe/ascend_moe_impl/dynamic/ascend_moe/[\w/]+\.h": "headers of the kernels",
}


class CheckError(Exception):
    """Raised if a build fails or a package is wrong."""


@dataclass(frozen=True)
class Toolkit:
    """The scratch folder that looks like an installed toolkit."""

    home: Path
    headers: str

    def environment(self, ops: Path) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ASCEND", "CMAKE_"))}
        launchers = {name: os.environ[name] for name in ("CMAKE_CXX_COMPILER_LAUNCHER",) if name in os.environ}
        path = f"{self.home / 'bin'}:{os.environ['PATH']}"
        own = {"ASCEND_HOME_PATH": str(self.home), "OPP_CHECK_OPS": str(ops), "PATH": path, "LC_ALL": "C"}
        return {**kept, **launchers, **own}


def make_toolkit(home: Path, devkit: Path, host_headers: Path | None) -> Toolkit:
    """CANN's CMake functions, headers, empty libraries and the shims."""
    functions = home / "compiler/tikcpp/ascendc_kernel_cmake"
    shutil.copytree(devkit / "cmake/asc", functions)
    (home / "lib64/cmake").mkdir(parents=True)
    shutil.copy(devkit / "cmake/asc/asc-config.cmake", home / "lib64/cmake")
    programs = {
        home / "tools/opbuild/op_build": HERE / "op_build.py",
        home / "bin/asc_opc": HERE / "asc_opc.py",
        functions / "fwk_modules/util/makeself/makeself.sh": HERE / "makeself.sh",
    }
    for place, source in programs.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)
    (functions / "fwk_modules/util/makeself/makeself-header.sh").write_text("")
    compiler = home / "compiler/ccec_compiler/bin/bisheng"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\nexit 1\n")  # build.sh looks whether it is there; asc_opc would call it
    compiler.chmod(0o755)
    (home / "compiler/version.info").write_text("Version=9.1.0\n")
    for name in SHARED:
        run(["g++", "-shared", "-o", f"{home}/lib64/lib{name}.so", "-x", "c++", "/dev/null"])
    for name in STATIC:
        run(["ar", "rc", f"{home}/lib64/lib{name}.a"])
    return Toolkit(home, add_headers(home, host_headers))


def add_headers(home: Path, host_headers: Path | None) -> str:
    """Install the headers of the host side; return their description."""
    if host_headers is None:
        text = (ROOT / "vnpu/cann_shim/CMakeLists.txt").read_text()
        for name in re.findall(r"^  (\S+\.h)\)?$", text, flags=re.MULTILINE):
            path = home / "include" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f'#include "{SHIM}.h"\n')
        # Its functions are hidden: each library of the package takes them from an archive.
        (home / "lib64/libregister.so").unlink()
        flags = [
            "-std=c++17",
            "-fPIC",
            "-D_GLIBCXX_USE_CXX11_ABI=0",
            *(f"-I{ROOT / folder}" for folder in ("op_host", "op_kernel")),
        ]
        run(["g++", *flags, f"-I{home}/include", "-c", f"{SHIM}.cpp", "-o", f"{home}/cann_shim.o"])
        run(["ar", "rc", f"{home}/lib64/libregister.a", f"{home}/cann_shim.o"])
        return "this project's shim"
    found = headers_check.find_host_toolkit(host_headers)
    if found is None:
        raise CheckError(f"no host headers in {host_headers}: expected a CANN toolkit (*-linux/include/register)")
    (home / "include").symlink_to(found.includes[0])
    for directory in found.includes[2:]:
        link = home / "compiler/ascendc/include/highlevel_api"
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(directory)
    return found.name


def run(command: list[str], **options: object) -> str:
    """The output of a command.

    Raises:
        CheckError: it failed; the text is the end of its output.
    """
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": SECONDS}
    done = subprocess.run(command, **both, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise CheckError(f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return str(done.stdout)


# ---- two packages


def our_package(toolkit: Toolkit, scratch: Path, socs: tuple[str, ...]) -> Path:
    """Built by build.sh."""
    ops = scratch / "ours.json"
    ops.write_text(json.dumps(op_description.describe(op_description.DESCRIPTION.read_text())))
    command = ["bash", str(ROOT / "build.sh"), f"--soc={','.join(socs)}", f"--build-dir={scratch / 'ours'}"]
    text = run([*command, f"--vendor_name={VENDOR}"], env=toolkit.environment(ops))
    return Path(re.findall(r"^build.sh: package: (.*)$", text, flags=re.MULTILINE)[0])


def template_package(toolkit: Toolkit, scratch: Path, socs: tuple[str, ...]) -> Path:
    """Return the template package of one operator, with the calls of CANN's example."""
    ops, source, out = scratch / "template.json", scratch / "template/project", scratch / "template/out"
    ops.write_text(json.dumps([TEMPLATE_OP]))
    for name, text in TEMPLATE.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    given = {
        "CMAKE_BUILD_TYPE": "Release",
        "vendor_name": VENDOR,
        "ASCEND_COMPUTE_UNIT": ";".join(socs),
        "ASCEND_CANN_PACKAGE_PATH": str(toolkit.home),
        "ASC_DIR": str(toolkit.home / "lib64/cmake"),
    }
    env = toolkit.environment(ops)
    command = ["cmake", "-G", "Unix Makefiles", "-S", str(source), "-B", str(out)]
    run([*command, *(f"-D{name}={value}" for name, value in given.items())], env=env)
    for target in ("binary", "package"):
        run(["cmake", "--build", str(out), "--target", target], env=env)
    return next(out.glob("custom_opp_*.run"))


def unpacked(package: Path, folder: Path) -> Path:
    folder.mkdir()
    with tarfile.open(package) as archive:
        archive.extractall(folder, filter="data")
    return folder


# ---- what is in them


def tree(folder: Path, ops: list[str]) -> set[str]:
    """Return the files relative to the vendor's folder, with <op> for operators and <hash> for hashes of binaries."""
    found = set()
    for path in folder.rglob("*"):
        if path.is_dir():
            continue
        name = path.relative_to(folder).as_posix().removeprefix(f"packages/vendors/{VENDOR}/")
        for op in ops:
            name = re.sub(rf"\b({op}_[0-9a-f]{{32}})\b", "<op>_<hash>", name)
            name = re.sub(rf"(?<![a-z]){snake(op)}(?![a-z])", "<op>", name)
        found.add(name)
    return found


def compare(ours: set[str], template: set[str]) -> Iterator[str]:
    """Return unexpected differences."""
    for name in sorted(template - ours):
        if not any(re.fullmatch(pattern, name) for pattern in REPLACED):
            yield f"{name} is in the template's package, not in ours"
    for name in sorted(ours - template):
        if not any(re.fullmatch(pattern, name) for pattern in OWN):
            yield f"{name} is in our package, not in the template's"


def incomplete(folder: Path, ops: list[str], socs: tuple[str, ...]) -> Iterator[str]:
    """Return what the package lacks: entry points, binaries of each operator and SoC, kernel headers."""
    vendor = folder / "packages/vendors" / VENDOR
    library = vendor / "op_api/lib/libcust_opapi.so"
    symbols = run(["nm", "-D", "--defined-only", str(library)])
    for op in ops:
        for name in (f"aclnn{op}", f"aclnn{op}GetWorkspaceSize"):
            if not re.search(rf" T {name}$", symbols, flags=re.MULTILINE):
                yield f"{library.name} exports no {name}"
    tbe = vendor / "op_impl/ai_core/tbe"
    for soc in socs:
        info = json.loads((tbe / f"config/{soc}/aic-{soc}-ops-info.json").read_text())
        for op in ops:
            if op not in info:
                yield f"{op} is not in aic-{soc}-ops-info.json"
            listed = json.loads((tbe / f"kernel/config/{soc}/{snake(op)}.json").read_text())["binList"]
            for entry in listed:
                if not (tbe / "kernel" / entry["binInfo"]["jsonFilePath"]).is_file():
                    yield f"{entry['binInfo']['jsonFilePath']} is listed and missing"
            if not listed:
                yield f"{op} has no binary for {soc}"
    sources = tbe / f"{VENDOR}_impl/dynamic"
    for kernel in sorted(sources.glob("*.cpp")):
        missing = asc_opc.missing_header(kernel)
        if missing:
            yield f"{kernel.name}: {missing} is not in the package"


def installed(folder: Path) -> Iterator[str]:
    """Run CANN's install.sh as a user who may not write into the toolkit, and return errors."""
    with tempfile.TemporaryDirectory(prefix="opp-check-") as scratch:  # that user may be unable to enter `folder`
        package, place, cann = (Path(scratch) / name for name in ("package", "opp", "opp.cann"))
        shutil.copytree(folder, package, symlinks=True)
        place.mkdir()
        cann.mkdir(mode=0o555)
        command = ["bash", "install.sh", "--quiet", f"--install-path={place}"]
        if os.getuid() == 0:  # root may write anywhere
            os.chmod(scratch, 0o755)
            run(["chown", "-R", "nobody", str(package), str(place)])
            command = ["setpriv", "--reuid=nobody", "--clear-groups", *command]
        run(command, cwd=package, env={**os.environ, "ASCEND_OPP_PATH": str(cann), "HOME": str(place)})
        want = {path.relative_to(folder / "packages") for path in (folder / "packages").rglob("*") if path.is_file()}
        for name in sorted(want - {path.relative_to(place) for path in place.rglob("*") if path.is_file()}):
            yield f"install.sh does not install {name}"


def check(toolkit: Toolkit, scratch: Path, socs: tuple[str, ...]) -> list[str]:
    """Build both packages, print their trees side by side, and return errors."""
    ours, template = our_package(toolkit, scratch, socs), template_package(toolkit, scratch, socs)
    folder, other = unpacked(ours, scratch / "ours.tree"), unpacked(template, scratch / "template.tree")
    ops = [str(op["op"]) for op in json.loads((scratch / "ours.json").read_text())]
    trees = tree(folder, ops), tree(other, [str(TEMPLATE_OP["op"])])
    marks = {(True, True): "both", (True, False): "ours", (False, True): "template"}
    for name in sorted(trees[0] | trees[1]):
        print(f"{marks[name in trees[0], name in trees[1]]:8}  {name}")
    return [*compare(*trees), *incomplete(folder, ops, socs), *installed(folder)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Our operator package, built with CANN's own CMake functions.")
    parser.add_argument("devkit", metavar="ASC_DEVKIT", type=Path)
    parser.add_argument("--host-headers", metavar="TOOLKIT", type=Path, help="a CANN toolkit, e.g. 8.1")
    parser.add_argument("--soc", default=",".join(SOCS))
    parser.add_argument("--keep", metavar="DIR", type=Path, help="a new folder for what is built")
    options = parser.parse_args()
    if not (options.devkit / "cmake/asc/fwk_modules/func.cmake").is_file():
        print(f"opp-check: {options.devkit} has no cmake/asc: give a checkout of CANN's asc-devkit", file=sys.stderr)
        return 2
    scratch = options.keep or Path(tempfile.mkdtemp(prefix="opp-check-"))
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        headers = options.host_headers and options.host_headers.resolve()
        toolkit = make_toolkit(scratch / "cann", options.devkit.resolve(), headers)
        print(f"opp-check: {options.soc} on {platform.machine()}, host headers: {toolkit.headers}")
        wrong = check(toolkit, scratch, tuple(options.soc.split(",")))
    except (CheckError, headers_check.CheckError, OSError) as error:
        wrong = [str(error)]
    finally:
        if options.keep is None:
            shutil.rmtree(scratch)
    for line in wrong:
        print(f"opp-check: {line}", file=sys.stderr)
    print(f"opp-check: {'FAIL' if wrong else 'PASS'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
