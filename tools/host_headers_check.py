#!/usr/bin/env python3
"""Compiles every source of op_host against CANN's real host headers, unchanged, to objects.

DIR is a CANN toolkit (8.1), which has all of them, or an asc-devkit checkout (9.x). For the latter they come
from three projects: name a checkout of metadef as well (--metadef), and a toolkit or a directory that has
securec.h and platform/platform_infos_def.h (--base). An op's source is compiled in the three ways
in which CANN's build compiles it. A control that calls what no header has must not compile.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from headers_check import CheckError, Compiler, HeaderSet, toolkit_roots

ROOT = Path(__file__).resolve().parent.parent
# For op_build, for the library of tiling functions, for that of prototypes.
WAYS = {"definition": [], "tiling": ["-DOP_TILING_LIB"], "prototype": ["-DOP_PROTO_LIB"]}
ACLNN = "aclnn/acl_meta.h"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-fmax-errors=5"]
FLAGS += [f"-I{ROOT / folder}" for folder in ("op_host", "op_kernel")]
CONTROL = """
#include "cann/tiling.h"
ge::graphStatus Control(gert::TilingContext* context) { return context->CONTROL(1); }
"""


@dataclass(frozen=True)
class Job:
    """One object."""

    source: Path
    way: str
    symbol: str  # that it must have


def include_folders(directory: Path) -> Iterator[tuple[Path, Path]]:
    """The toolkits in a directory with their folders of headers: of one architecture, or of all."""
    for root in toolkit_roots(directory):
        for include in [*sorted(root.glob("*-linux/include")), root / "include"]:
            yield root, include


def find_toolkit(directory: Path) -> HeaderSet | None:
    """A CANN toolkit: include/ of one architecture, and the tiling API beside it."""
    for root, include in include_folders(directory):
        if (include / "register/op_def_registry.h").is_file():
            api = "ascendc/include/highlevel_api"
            tiling = [path for path in (include.parent / api, root / "compiler" / api) if path.is_dir()]
            includes = [include, include / "experiment/platform", *tiling]
            # As the toolkit's own project template has it.
            return HeaderSet(f"CANN toolkit {root.name}", includes, ["-D_GLIBCXX_USE_CXX11_ABI=0"])
    return None


def tiling_structs(header: Path) -> str:
    """The plain structs that asc-devkit's build makes of a header with tiling macros."""
    found = re.findall(
        r"BEGIN_TILING_DATA_DEF\((Mc2\w*Tiling)\)\s*TILING_DATA_FIELD_DEF_ARR\(uint8_t, (\d+), (\w+)\);",
        header.read_text(),
    )
    if len(found) != 2:
        raise CheckError(f"{header} does not describe Mc2InitTiling and Mc2CcTiling as bytes any more")
    structs = "".join(
        f"struct {name} {{ uint8_t {field}[{size}] = {{}}; }};\n" for name, size, field in found
    )
    return f"#pragma once\n#include <cstdint>\n{structs}"


def find_devkit(directory: Path, metadef: Path | None, base: Path | None) -> HeaderSet | None:
    """asc-devkit with metadef, and single headers of other projects."""
    for root in (directory, directory / "asc"):
        tiling = root / "include/adv_api/hccl/hccl_tilingdata.h"
        if not tiling.is_file():
            continue
        if metadef is None or not (metadef / "inc/external/asc/register/op_def_registry.h").is_file():
            raise CheckError(
                "asc-devkit has no op definition headers: name a metadef checkout with --metadef "
                "(it has inc/external/asc/register/op_def_registry.h)"
            )
        generated = {
            "kernel_tiling/kernel_tiling.h": tiling_structs(tiling),
            # Of the runtime's platform library; op_host uses nothing of it.
            "platform/soc_spec.h": "#pragma once\n#include <cstdint>\nenum class NpuArch : uint32_t;\n",
        }
        for name in (
            "securec.h",
            "securectype.h",
            "platform/platform_infos_def.h",
            "platform/platform_info_def.h",
        ):
            generated[name] = find_header(base, name).read_text()
        parts = ("inc/external/asc", "inc/external", "inc", "pkg_inc", "pkg_inc/base")
        includes = [*(metadef / part for part in parts), root / "include", root / "include/utils", root]
        # metadef's own way to do without the graph engine's headers.
        defines = ["-DNO_OPERATOR_IMPL"]
        return HeaderSet(f"asc-devkit {root.name} and metadef {metadef.name}", includes, defines, generated)
    return None


def find_header(base: Path | None, name: str) -> Path:
    """A header that neither asc-devkit nor metadef has, by its name in an install."""
    directories = [] if base is None else [base]
    for _, include in include_folders(base) if base is not None else ():
        directories += [include, include / "experiment/platform"]
    for directory in directories:
        if (directory / name).is_file():
            return directory / name
    raise CheckError(f"no {name}: name a toolkit, or a directory that has it, with --base")


def check(compiler: Compiler, job: Job) -> tuple[Job, int, str]:
    """Size of the object, 0 where it has not compiled as it must; messages."""
    size, log = compiler.object(
        job.source, f"{job.source.stem}_{job.way}", job.symbol, *WAYS.get(job.way, [])
    )
    ours = [line for line in log.splitlines() if str(ROOT) in line and ": warning: " in line]
    return (job, 0, "\n".join(ours)) if size and ours else (job, size, log)


def jobs() -> Iterator[Job]:
    """Every source of op_host; a new one that nothing here knows is an error."""
    for source in sorted((ROOT / "op_host").glob("*.cpp")):
        if re.fullmatch(r"ascend_moe_[a-z_]+", source.stem) is None:
            raise CheckError(f"{source.name}: not named ascend_moe_<op>.cpp, as its op is")
        for way in WAYS:
            yield Job(source, way, "".join(word.capitalize() for word in source.stem.split("_")))
    yield Job(ROOT / "op_host/op_api/aclnn_ascend_moe.cpp", "op_api", "aclnnAscendMoeProbeGetWorkspaceSize")


def main() -> int:
    """The command line; 0 when everything compiled without a warning of ours."""
    parser = argparse.ArgumentParser(description="Compiles op_host against CANN's host headers.")
    parser.add_argument("directory", metavar="DIR", type=Path, help="CANN toolkit or asc-devkit")
    parser.add_argument("--metadef", type=Path, help="metadef checkout, with asc-devkit")
    parser.add_argument(
        "--base", type=Path, help="toolkit or directory with securec.h and platform/, with asc-devkit"
    )
    parser.add_argument(
        "--include", type=Path, action="append", default=[], help="more headers, searched last"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--compiler", default="g++")
    options = parser.parse_args()
    try:
        directory = options.directory.resolve()
        headers = find_toolkit(directory) or find_devkit(directory, options.metadef, options.base)
        if headers is None:
            raise CheckError(
                f"no host headers in {directory}: expected a CANN toolkit (*-linux/include/register) or an "
                "asc-devkit checkout (include/adv_api/hccl)"
            )
        headers = replace(headers, includes=[*headers.includes, *options.include])
        types = "CANN's" if any((path / ACLNN).is_file() for path in headers.includes) else "our own"
        print(f"host headers: {headers.name}; types of the aclnn entry points: {types}")
        with tempfile.TemporaryDirectory(prefix="host-headers-") as scratch:
            compiler = Compiler(headers, [options.compiler, *FLAGS], Path(scratch))
            rejected = "error: .*has no member named 'SetTilingKeys'"
            compiler.check_control(CONTROL, "SetTilingKey", "SetTilingKeys", rejected)
            with ThreadPoolExecutor(options.jobs) as pool:
                results = list(pool.map(lambda job: check(compiler, job), jobs()))
    except (CheckError, OSError) as error:
        print(f"host-headers-check: {error}", file=sys.stderr)
        return 1
    for job, size, log in results:
        print(f"{job.source.name:44} {job.way:10} {f'{size} B' if size else 'FAILED':>10}")
        if not size:
            print(log, file=sys.stderr)
    failed = sum(not size for _, size, _ in results)
    print(f"{len(results) - failed} of {len(results)} objects compiled without a warning")
    print(f"host-headers-check: {'FAIL' if failed else 'PASS'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
