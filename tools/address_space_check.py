#!/usr/bin/env python3
"""Finds mixed-up GM, UB and host pointers in the kernels, which g++ cannot see.

clang reads every kernel entry over the twin's headers with __gm__ and __ubuf__ as real address spaces, as
the device compiler does. clang lets a C-style cast drop an address space, so casts in op_kernel are also
read as text: a cast to a pointer names its space. Every mistake of the control must be reported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "op_kernel"
DTYPES = ("bfloat16_t", "half", "float")
SPACES = ["-D__gm__=__attribute__((address_space(1)))", "-D__ubuf__=__attribute__((address_space(2)))"]

# (T*)p and reinterpret_cast<T*>(p); what stands before "(" tells a cast from a call or a declaration.
CASTS = re.compile(
    r"(?<![\w>\]])\(([^()]*\*\s*(?:const)?\s*)\)\s*[\w(&]"
    r"|\w+_cast\s*<([^;{}()]*\*\s*(?:const)?\s*)>\s*\("
)
COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

# MISTAKE 0 is right; every other number is a mistake that g++ cannot see. clang accepts LEXICAL_MISTAKE too.
CONTROL = r"""
#include "kernel_operator.h"

struct Table {
    uint32_t rank;
    uint64_t windows[4];
};
inline uint32_t ByReference(const uint32_t& value) { return value; }
inline void TakePlain(const float*) {}

extern "C" __global__ __aicore__ void control(GM_ADDR context, GM_ADDR x) {
    __gm__ Table* table = reinterpret_cast<__gm__ Table*>(context);
    AscendC::GlobalTensor<float> row;
    row.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(x));
    const uint32_t rank = table->rank;
    GM_ADDR window = reinterpret_cast<GM_ADDR>(table->windows[rank]);
    (void)window;
    (void)ByReference(rank);
#if MISTAKE == 1  // a GM address in a plain pointer
    uint8_t* plain = x;
    (void)plain;
#elif MISTAKE == 2  // the qualifier dropped by a cast
    float* plain = reinterpret_cast<float*>(x);
    (void)plain;
#elif MISTAKE == 3  // a tensor's GM address given to a function that takes host memory
    TakePlain(row.GetPhyAddr());
#elif MISTAKE == 4  // a struct copied out of GM
    Table copy = *table;
    (void)copy;
#elif MISTAKE == 5  // a GM word bound to a plain reference
    (void)ByReference(table->rank);
#elif MISTAKE == 6  // a UB address used as a GM address
    __ubuf__ float* ub = nullptr;
    row.SetGlobalBuffer(ub);
#elif MISTAKE == 7  // LEXICAL_MISTAKE: a C-style cast drops the qualifier silently
    float* plain = (float*)x;
    (void)plain;
#endif
}
"""


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
    mistakes = [int(number) for number in re.findall(r"#(?:el)?if MISTAKE == (\d+)", CONTROL)]
    lexical = int(re.findall(r"MISTAKE == (\d+)  // LEXICAL_MISTAKE", CONTROL)[0])
    with tempfile.TemporaryDirectory(prefix="address-space-") as folder:
        source = Path(folder) / "control.cpp"
        source.write_text(CONTROL)
        if right := check_syntax(clang, source, "-DMISTAKE=0"):
            raise CheckError(f"the control without a mistake does not pass:\n{right}")
        for mistake in mistakes:
            log = check_syntax(clang, source, f"-DMISTAKE={mistake}")
            if mistake != lexical and "error:" not in log:
                raise CheckError(f"mistake {mistake} of the control was not reported by {clang}")
        if len(list(bare_casts(source))) != 2:  # one of each form: mistakes 2 and 7
            raise CheckError("casts of the control that drop the address space were not found")
    print(f"control: all {len(mistakes)} mistakes reported")


def check_kernels(clang: str) -> int:
    """Print what was read and what is wrong; the number of failures."""
    entries = sorted(KERNELS.glob("ascend_moe_*.cpp"))
    plan = [(entry, dtype) for entry in entries for dtype in DTYPES]
    failures = 0
    with ThreadPoolExecutor(2) as pool:
        logs = pool.map(lambda item: check_syntax(clang, item[0], f"-DDTYPE_X={item[1]}"), plan)
        for (entry, dtype), log in zip(plan, logs, strict=True):
            print(f"{entry.name:40} {dtype:10} {'FAILED' if log else 'ok'}\n{log}".rstrip(), flush=True)
            failures += bool(log)
    sources = sorted([*KERNELS.rglob("*.h"), *entries])
    casts = [finding for source in sources for finding in bare_casts(source)]
    print("\n".join([f"{len(sources)} files read for casts, {len(casts)} findings", *casts]))
    return failures + len(casts)


def main() -> int:
    clang = find_clang()
    if clang is None:
        print("address-space-check: skipped, no clang++ found (set CLANGXX to name one)")
        return 0
    try:
        check_control(clang)
        failures = check_kernels(clang)
    except (CheckError, OSError) as error:
        print(f"address-space-check: {error}", file=sys.stderr)
        return 1
    print(f"address-space-check: {'FAIL' if failures else 'PASS'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
