"""Compares asc-devkit's public functions with the twin's: each is implemented, or refused by name with a sentence."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

import pytest
from twin_oracle import INCLUDE, TWIN, syntax_errors

import ascendc_twin
from ascendc_twin.errors import TwinBuildError

# Written by tools/vendor_names.py: header, class or namespace or "-", functions.
NAMES = [line.split() for line in (Path(__file__).parent / "asc_devkit_names.txt").read_text().splitlines()]
# The groups of the table in twin/README.md, by the beginning of a header's path.
GROUPS = {
    r"basic_api/kernel_(tensor|tpipe)": "Tensors, queues, TPipe",
    r"basic_api/kernel_operator_(vec|proposal)": "Vector calls",
    r"basic_api/kernel_operator_(data_copy|set_atomic|atomic)": "Copies, atomics",
    r"basic_api/(core_mng|kernel_operator_(mm|fixpipe|conv2d|gemm))": "Cube cores",
    r"basic_api/reg_compute": "Register programming",
    r"basic_api/": "Order, caches, scalars, system",
    r"adv_api/(hccl|hcomm)": "Communication",
    r"adv_api/(matmul|conv)": "Advanced: matmul, convolution",
    r"adv_api/math": "Advanced: math",
    r"adv_api/": "Advanced: others",
}
OBJECTS = {
    "LocalTensor": "LocalTensor<float>",
    "GlobalTensor": "GlobalTensor<float>",
    "LocalMemAllocator": "LocalMemAllocator<>",
    "TQueBind": "TQueBind<TPosition::VECIN, TPosition::VECCALC, 1>",
    "TBuf": "TBuf<>",
    "TPipe": "TPipe",
    "TQueSync": "TQueSync<PIPE_V, PIPE_S>",
    "Hccl": "Hccl<>",
}
REFUSED = (INCLUDE / "twin" / "api" / "refused.h").read_text()


@functools.cache
def listed(macro: str) -> dict[str, str]:
    """The names of the lists in refused.h that match, and the macros of their reasons, if these stand beside them."""
    lists = re.findall(rf"#define {macro}\(X\)((?:.*\\\n)+.*)", REFUSED)
    return dict(re.findall(r'X\((\w+)(?:, (\w+|"[^"]*"))?\)', "".join(lists)))


def use(scope: str, name: str, number: int) -> str:
    """A declaration that compiles if the twin has the name."""
    if scope in OBJECTS:
        kind = OBJECTS[scope]
        return f"namespace {{ struct Use{number} : {kind} {{ using {kind.partition('<')[0]}::{name}; }}; }}"
    full = {"-": name, "RegTensor": "Reg::RegTensor", "Reg": f"Reg::{name}"}.get(scope, scope)
    return f"namespace use{number} {{ using AscendC::{full}; }}"


def is_refused(scope: str, name: str) -> bool:
    if scope in OBJECTS:
        return name in listed(f"TWIN_MEMBERS_{scope}")
    if scope in ("Reg", "RegTensor"):
        return True
    return scope in listed("TWIN_CLASSES\\w*") or (scope == "-" and name in listed("TWIN_CALLS_(?!REG)\\w*"))


def test_no_public_function_is_missing_and_the_readme_counts_them(tmp_path: Path) -> None:
    every = [(header, scope, name) for header, scope, *names in NAMES for name in names]
    assert len(every) > 700
    uses = [use(scope, name, i) for i, (_, scope, name) in enumerate(every)]
    code = '#include "kernel_operator.h"\nusing namespace AscendC;\n#line 1 "uses"\n' + "\n".join(uses)
    missing = re.findall(r"^uses:(\d+):.*error", syntax_errors(code, tmp_path, "-fmax-errors=0"), re.MULTILINE)
    assert [every[int(line) - 1] for line in missing] == []
    counts: dict[str, Counter[bool]] = {group: Counter() for group in GROUPS.values()}
    for header, scope, name in every:
        group = next(group for pattern, group in GROUPS.items() if re.match(pattern, header))
        counts[group][is_refused(scope, name)] += 1
    rows = [f"| {group} | {count.total()} | {count[False]} | {count[True]} |" for group, count in counts.items()]
    refused = sum(count[True] for count in counts.values())
    rows.append(f"| all | {len(every)} | {len(every) - refused} | {refused} |")
    page = (TWIN / "README.md").read_text()
    assert [row for row in rows if row not in page] == [], "\n".join(rows)


def test_each_refused_name_is_one_error_with_its_sentence(tmp_path: Path) -> None:
    uses = {name: f"AscendC::{name}(1);" for name in listed("TWIN_CALLS_(?!REG)\\w*")}
    uses |= {f"Reg {name}": f"AscendC::MicroAPI::{name}(1);" for name in listed("TWIN_CALLS_REG")}
    uses |= {name: f"AscendC::{name}();" for name in listed("TWIN_CLASSES")}
    uses |= {name: f"AscendC::{name}<float>();" for name in listed("TWIN_CLASSES_T")}
    uses |= {name: f"AscendC::{name}<1>();" for name in listed("TWIN_CLASSES_V")}
    for scope, kind in OBJECTS.items():
        uses |= {f"{scope} {name}": f"{kind}().{name}(1);" for name in listed(f"TWIN_MEMBERS_{scope}")}
    uses |= {
        "a Fixpipe": "Fixpipe<3>(1);",
        "b Fixpipe": "Fixpipe<float, 3>(1);",
        "c Fixpipe": "(void)int(Fixpipe<float, half, 3, 4>());",
    }
    lines = [f"void Use{i}() {{ {use} }}" for i, use in enumerate(uses.values())]
    code = '#include "kernel_operator.h"\nusing namespace AscendC;\n#line 1 "uses"\n' + "\n".join(lines)
    said = syntax_errors(code, tmp_path, "-fmax-errors=0")
    assert len(uses) > 300 and len(re.findall(": error: ", said)) == len(uses)
    for line, name in enumerate(uses, 1):
        where = said.index(f"uses:{line}:")
        assert re.search(
            rf"static assertion failed: {name.split()[-1]}: the emulator does not model", said[where:][:600]
        ), name


def test_a_kernels_own_function_of_a_refused_name_is_called(tmp_path: Path) -> None:
    own = "int64_t Floor(int64_t x) { return x; } template <class T> T Mean(T x) { return x; }"
    code = f"{own} using namespace AscendC; auto f(LocalTensor<float> a) {{ return Floor(3) + Mean(a).GetSize(); }}"
    assert syntax_errors(f'#include "kernel_operator.h"\n{code}', tmp_path) == ""


def test_the_error_of_a_build_is_the_line_of_the_call(tmp_path: Path) -> None:
    source = tmp_path / "cube.cpp"
    source.write_text(
        '#include "kernel_operator.h"\nusing namespace AscendC;\ntemplate <class T> void Work(T a) {\n'
        '    Mmad(a, a);\n}\nextern "C" __global__ __aicore__ void k(GM_ADDR x) { Work(x); Unknown(x); }\n'
    )
    with pytest.raises(
        TwinBuildError, match=r"cube.cpp does not compile: \S*cube.cpp:4: Mmad: the emulator does not model cube"
    ):
        ascendc_twin.build(source)
