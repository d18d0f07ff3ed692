#!/usr/bin/env python3
"""Finds mixed-up GM, UB and host pointers in the kernels, which g++ cannot see.

clang reads every kernel entry over the twin's headers with __gm__ and __ubuf__ as real address spaces, as
the device compiler does. clang lets a C-style cast drop an address space, so casts in op_kernel are also
read as text: a cast to a pointer names its space. The control is address_space_control.cpp, whose every
mistake must be reported.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "op_kernel"
CONTROL = ROOT / "tools" / "address_space_control.cpp"
DTYPES = ("bfloat16_t", "half", "float")
SPACES = ["-D__gm__=__attribute__((address_space(1)))", "-D__ubuf__=__attribute__((address_space(2)))"]

# (T*)p and reinterpret_cast<T*>(p); what stands before "(" tells a cast from a call or a declaration.
CASTS = re.compile(
    r"(?<![\w>\]])\(([^()]*\*\s*(?:const)?\s*)\)\s*[\w(&]"
    r"|\w+_cast\s*<([^;{}()]*\*\s*(?:const)?\s*)>\s*\("
)
COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class CheckError(Exception):
    """One line for the user."""


def find_clang() -> str | None:
    """clang++, or the newest clang++-N; $CLANGXX is taken as it is."""
    named = os.environ.get("CLANGXX")
    if named:
        return named
    versions = (f"clang++-{version}" for version in range(30, 9, -1))
    return next((name for name in ("clang++", *versions) if shutil.which(name)), None)


def check_syntax(clang: str, source: Path, *defines: str) -> str:
    """The messages of clang; empty when the source is right."""
    includes = [f"-I{ROOT / path}" for path in ("twin/include", "op_kernel")]
    command = [clang, "-std=c++17", "-fsyntax-only", "-fno-color-diagnostics", *SPACES, *includes, *defines]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True)
    if result.returncode != 0:
        return result.stderr or f"{clang} ended with {result.returncode}"
    return ""


def bare_casts(source: Path) -> Iterator[str]:
    """Casts to a pointer that names no address space, as file:line: text."""
    text = COMMENTS.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), source.read_text())
    for match in CASTS.finditer(text):
        target = match.group(1) or match.group(2)
        if "__gm__" not in target and "__ubuf__" not in target:
            line = text.count("\n", 0, match.start()) + 1
            yield f"{source}:{line}: cast to '{target.strip()}' names no address space (__gm__ or __ubuf__)"


def check_control(clang: str) -> None:
    """Mistake 0 passes and all others are reported, or this check proves nothing."""
    mistakes = [int(number) for number in re.findall(r"#(?:el)?if MISTAKE == (\d+)", CONTROL.read_text())]
    lexical = int(re.findall(r"MISTAKE == (\d+)  // LEXICAL_MISTAKE", CONTROL.read_text())[0])
    if right := check_syntax(clang, CONTROL, "-DMISTAKE=0"):
        raise CheckError(f"the control without a mistake does not pass:\n{right}")
    for mistake in mistakes:
        log = check_syntax(clang, CONTROL, f"-DMISTAKE={mistake}")
        if mistake != lexical and "error:" not in log:
            raise CheckError(f"mistake {mistake} of {CONTROL.name} was not reported by {clang}")
    if len(list(bare_casts(CONTROL))) != 2:  # one of each form: mistakes 2 and 7
        raise CheckError(f"casts that drop the address space in {CONTROL.name} were not found")
    print(f"control: all {len(mistakes)} mistakes of {CONTROL.name} reported")


def check_kernels(clang: str, entries: list[Path], jobs: int) -> int:
    """Prints what was read and what is wrong; the number of failures."""
    plan = [(entry, dtype) for entry in entries for dtype in DTYPES]
    failures = 0
    with ThreadPoolExecutor(jobs) as pool:
        logs = pool.map(lambda item: check_syntax(clang, item[0], f"-DDTYPE_X={item[1]}"), plan)
        for (entry, dtype), log in zip(plan, logs, strict=True):
            print(f"{entry.name:40} {dtype:10} {'FAILED' if log else 'ok'}", flush=True)
            failures += bool(log)
            if log:
                print(log, file=sys.stderr)
    sources = sorted({path for entry in entries for path in entry.parent.rglob("*.h")} | set(entries))
    casts = [finding for source in sources for finding in bare_casts(source)]
    print(f"{len(sources)} files read for casts, {len(casts)} findings")
    for finding in casts:
        print(finding, file=sys.stderr)
    return failures + len(casts)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--entry", type=Path, action="append", help="a kernel entry instead of all in op_kernel"
    )
    parser.add_argument("--require", action="store_true", help="fail where clang++ is missing")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    clang = find_clang()
    if clang is None:
        verdict = "FAIL" if options.require else "skipped"
        print(f"address-space-check: {verdict}, no clang++ found (set CLANGXX to name one)")
        return 1 if options.require else 0
    try:
        check_control(clang)
        entries = options.entry or sorted(KERNELS.glob("ascend_moe_*.cpp"))
        if not entries:
            raise CheckError(f"no kernel entry in {KERNELS}")
        failures = check_kernels(clang, entries, options.jobs)
    except (CheckError, OSError) as error:
        print(f"address-space-check: {error}", file=sys.stderr)
        return 1
    print(f"address-space-check: {'FAIL' if failures else 'PASS'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
