"""Dependencies point one way, kernels stay device code, the reference stands alone. Read off the sources."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

import ascend_moe
from ascend_moe.comm import communicator
from ascend_moe.native import library
from ascend_moe.ops import calls

ROOT = library.native_source_root()
PACKAGE = Path(ascend_moe.__file__).resolve().parent

# ---- C++: a folder includes itself and the folders named beside it ----

HOST_SEES = ("op_kernel/protocol", "op_kernel/probe")
FOLDERS: dict[str, tuple[str, ...]] = {
    "op_kernel/protocol": (),
    "op_kernel/common": ("op_kernel/protocol",),
    "op_kernel/window": ("op_kernel/common", "op_kernel/protocol"),
    "op_kernel/direct": ("op_kernel/common", "op_kernel/protocol"),
    "op_kernel/probe": ("op_kernel/common", "op_kernel/protocol"),
    "op_kernel": ("op_kernel/window", "op_kernel/direct", "op_kernel/probe"),
    "op_host/rules": ("op_host", *HOST_SEES),
    "op_host/cann": ("op_host", "op_host/rules", *HOST_SEES),
    "op_host": ("op_host/cann", "op_host/rules", *HOST_SEES),
    "op_host/op_api": (),
    "twin": (),
    # op_kernel: the entries, compiled once a dtype
    "csrc/abi": (
        "twin",
        "csrc/engines",
        "op_host",
        "op_host/rules",
        "op_kernel",
        "op_kernel/common",
        *HOST_SEES,
    ),
    "csrc/engines": ("csrc/abi", "twin", "op_host/rules", "op_kernel/protocol"),
    "csrc/engines/models": ("twin", "op_kernel/common", "op_kernel/protocol"),
    "csrc/torch": ("csrc/abi", "op_host/rules", "op_kernel/protocol"),
    "csrc/npu": ("csrc/torch", "op_host/rules", "op_kernel/protocol"),
    "vnpu": ("twin", "csrc/abi", "op_host", "op_host/cann", "op_host/op_api", "op_host/rules", *HOST_SEES),
}
# Folders of the include path, as the build sets it.
INCLUDE_PATH = ("op_kernel", "op_host", "twin/include", "csrc", "vnpu", "vnpu/cann_standin")


def sources(*folders: str) -> list[Path]:
    """Every C++ file below these folders of the tree, or of all of ``FOLDERS``."""
    tops = folders or sorted({name.split("/")[0] for name in FOLDERS})
    paths = [path for top in tops for path in sorted((ROOT / top).rglob("*"))]
    found = [path for path in paths if path.suffix in (".h", ".cpp", ".S")]
    assert found, f"no sources in {tops}"
    return found


def code(text: str) -> str:
    """Without comments and the contents of strings."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r'(?<!include )"(?:\\.|[^"\\\n])*"', '""', text)


def includes(text: str) -> list[str]:
    """``<name>`` for the system's headers, ``name`` for ours."""
    found = re.findall(r'^\s*#\s*include\s*(<[^>]+>|"[^"]+")', text, flags=re.MULTILINE)
    return [name.strip('"') for name in found]


def folder_of(path: Path) -> str:
    """The longest name of ``FOLDERS`` that the path lies under."""
    name = path.relative_to(ROOT).as_posix()
    return max((folder for folder in FOLDERS if name.startswith(folder + "/")), key=len)


def header(path: Path, include: str) -> Path | None:
    """The file of the tree that an include means; None for a header of the vendor's or the system's."""
    for place in (path.parent, *(ROOT / folder for folder in INCLUDE_PATH)):
        target = Path(os.path.normpath(place / include))
        if target.is_file():
            return target
    return None


def stands_for_vendor(target: Path) -> bool:
    """kernel_operator.h, register/op_def_registry.h ...: on an NPU these are CANN's own headers."""
    own = target.is_relative_to(ROOT / "twin/include/twin")
    return target.is_relative_to(ROOT / "twin/include") and not own


def wrong_includes(path: Path, text: str) -> list[str]:
    """Includes of a file that leave the folders its own may see."""
    folder = folder_of(path)
    wrong = []
    for include in includes(text):
        target = None if include.startswith("<") else header(path, include)
        if target is None or stands_for_vendor(target):
            continue
        if folder_of(target) not in (folder, *FOLDERS[folder]):
            wrong.append(f"{path.relative_to(ROOT)} includes {target.relative_to(ROOT)}")
    return wrong


def test_folders_include_what_lies_below() -> None:
    assert not [wrong for path in sources() for wrong in wrong_includes(path, path.read_text())]


@pytest.mark.parametrize(
    "file, include",
    [
        ("op_kernel/direct/dispatch.h", "../window/dispatch.h"),
        ("op_kernel/protocol/window.h", "../common/base.h"),
        ("op_host/rules/plan.h", "../cann/tiling.h"),
        ("twin/include/twin/api/copy.h", "protocol/window.h"),
        ("csrc/torch/x.cpp", "twin/engine/launch.h"),
    ],
)
def test_wrong_includes_are_seen(file: str, include: str) -> None:
    assert wrong_includes(ROOT / file, f'#include "{include}"\n')


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the way round


def test_includes_have_no_circle() -> None:
    graph = {}
    for path in sources():
        targets = [header(path, include) for include in includes(path.read_text())]
        graph[str(path)] = {str(target) for target in targets if target}
    assert_no_circle(graph)


def test_circles_are_seen() -> None:
    assert_no_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    with pytest.raises(graphlib.CycleError):
        assert_no_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})


# ---- kernels are device code ----

OFFENCES = {
    r"\bstd::": "std:: in device code",
    r"\bstatic\b(?!\s+(constexpr|__aicore__))": "a static variable",
    r"\bthread_local\b": "thread_local",
    r"\bvirtual\b": "virtual",
    r"\bdouble\b": "double",
    r"(?<![\w.])\d+\.\d*(?![\dfF])": "a double literal",
    r"\b(throw|try|catch)\b": "an exception",
    r"\b(new|delete|malloc|free|dynamic_cast|typeid)\b": "the heap or RTTI",
    r"\b(printf|PRINTF|assert)\s*\(": "output",
    r"\bfor\s*\(\s*;\s*;|\bwhile\s*\(\s*(true|1)\s*\)": "an endless loop",
}
# Only the wait, and the probe of what it stands on, may look at the clock or say that they poll.
POLLS = {"common/wait.h", "probe/probe.h"}
POLLING = r"\b(GetSystemCycle|MOE_POLL_HINT|TWIN_(?!PHASE\b)\w+)\b"
# HCCL's server is no part of kernel_operator.h, and its header has moved between toolkits.
VENDOR = {"kernel_operator.h", "<cstdint>", "lib/hccl/hccl.h", "adv_api/hccl/hccl.h"}


def kernel_offences(path: Path, text: str) -> list[str]:
    name = path.relative_to(ROOT / "op_kernel").as_posix()
    text = code(text)
    offences = [f"{name}: {what}" for pattern, what in OFFENCES.items() if re.search(pattern, text)]
    if name not in POLLS and re.search(POLLING, text):
        offences.append(f"{name}: polls")
    for include in includes(text):
        ours = (path.parent / include).resolve().is_relative_to(ROOT / "op_kernel")
        if include not in VENDOR and (include.startswith("<") or not ours):
            offences.append(f"{name}: includes {include}")
    return offences + wrong_includes(path, text)


def test_kernels_are_device_code() -> None:
    kernels = sources("op_kernel")
    assert not [offence for path in kernels for offence in kernel_offences(path, path.read_text())]


@pytest.mark.parametrize(
    "line",
    [
        "uint32_t n = std::min(a, b);",
        "static uint32_t calls = 0;",
        "  static const int kTable[] = {1};",
        "virtual void Run();",
        "double s = 1;",
        "const float half = 0.5;",
        "throw 1;",
        "int* p = new int[4];",
        "while (true) {}",
        "for (;;) {}",
        "const int64_t now = AscendC::GetSystemCycle();",
        "TWIN_POLL_HINT();",
        "#include <algorithm>",
        '#include "twin/engine/core.h"',
        '#include "../../op_host/rules/plan.h"',
    ],
)
def test_kernel_offences_are_seen(line: str) -> None:
    path = ROOT / "op_kernel/window/sum.h"
    sound = "// std:: double\nstatic constexpr uint32_t kOne = 1;\nconst float half = 0.5f;  // static int\n"
    assert not kernel_offences(path, sound)
    assert kernel_offences(path, f"{sound}{line}\n")


def test_the_wait_polls_and_the_protocol_stands_alone() -> None:
    assert re.search(POLLING, code((ROOT / "op_kernel/common/wait.h").read_text()))
    assert includes((ROOT / "op_kernel/protocol/window.h").read_text()) == ["<cstdint>"]


def test_host_rules_know_no_backend_and_the_twin_no_op() -> None:
    """CANN's headers are for its own side of op_host alone."""
    names = {"rules": r"\b(twin|ops)::|\bTWIN_", "cann": r"\btwin::|\bTWIN_"}  # CANN has a namespace ops, too
    for path in sources("op_host"):
        text = path.read_text()
        side = "rules" if folder_of(path) == "op_host/rules" else "cann"
        ours = [include for include in includes(text) if not include.startswith("<")]
        assert side == "cann" or all(header(path, include) for include in ours), (
            f"{path.name} includes {ours}"
        )
        assert not re.search(names[side], code(text)), f"{path.name} uses the twin"
    for path in sources("twin"):
        assert not re.search(r"\b(moe|ops)::|moe_distribute", code(path.read_text())), f"{path} names an op"


# ---- Python: a folder, or a module of the root, imports what is named beside it and all below that ----

LAYERS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "settings": ("errors",),
    "_text": ("errors",),
    "_autoload": ("errors",),
    "_torch_npu": ("errors",),
    "native": ("settings",),
    "comm": ("native",),
    "ops": ("comm", "_torch_npu"),
    "routing": ("_torch_npu",),
    "experts": ("_torch_npu",),
    "vendor": ("ops", "experts", "routing"),
    "dispatchers": ("ops",),
    "layer": ("dispatchers", "experts", "vendor"),
    "npu": ("dispatchers", "experts", "vendor"),
    "timeline": ("comm",),
    "": ("_autoload", "layer", "npu", "timeline"),  # the public names
    "checkpoint": ("layer",),
    "reference": (),
    "plan": ("ops", "_text"),
    "timed": ("plan", "timeline"),
    "twin": ("native",),
    "vnpu": ("vendor", "plan"),
    "explore": ("ops", "reference"),
    "validate": ("", "reference", "twin", "plan", "vnpu"),
    "doctor": ("plan", "vnpu"),
    "demo": ("", "checkpoint", "plan", "reference", "vnpu"),
    "bench": ("", "checkpoint", "plan", "reference", "timed"),
    "cli": ("checkpoint", "validate", "doctor", "demo", "bench", "explore", "timed", "_text"),
    "__main__": ("cli",),
}


def below(unit: str) -> set[str]:
    """Everything that a folder may import: what its row names, and what those rows name."""
    return {unit}.union(*(below(name) for name in LAYERS[unit]))


def unit(name: str) -> str:
    """The folder or module of the root that a module lies in; '' is the package itself."""
    return f"{name}.".split(".")[1]


@functools.cache
def modules() -> dict[str, ast.Module]:
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["ascend_moe", *path.relative_to(PACKAGE).with_suffix("").parts]
        if "_src" not in parts:
            trees[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    assert len(trees) > 20
    return trees


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Absolute names of what a module imports, at its head or in a function."""
    is_package = any(other.startswith(f"{name}.") for other in modules())
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in modules() else base


def offences(name: str, tree: ast.Module) -> list[str]:
    """Imports of what is not below, and looks at sys.modules, which are imports that no table sees."""
    own = [target for target in imports(name, tree) if target.split(".")[0] == "ascend_moe"]
    found = [f"{name} imports {target}" for target in own if unit(target) not in below(unit(name))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "modules" and ast.unparse(node) == "sys.modules":
            found.append(f"{name}:{node.lineno} looks at sys.modules")
    return found


def test_python_layers() -> None:
    assert {unit(name) for name in modules()} == set(LAYERS), "the table and the package differ"
    # _autoload asks whether torch came before it.
    assert not [
        offence
        for name, tree in modules().items()
        for offence in offences(name, tree)
        if not (name == "ascend_moe._autoload" and offence.endswith("sys.modules"))
    ]


def test_python_has_no_circles() -> None:
    known = set(modules())
    assert_no_circle({name: known.intersection(imports(name, tree)) for name, tree in modules().items()})


@pytest.mark.parametrize(
    "name, text",
    [
        ("comm.threads", "from ascend_moe import ops"),
        ("ops.calls", "def late():\n    from ascend_moe.layer import MoELayer"),
        ("routing", "from . import experts"),
        ("experts.quant", "from ..dispatchers.base import Dispatcher"),
        ("dispatchers.rows", "import ascend_moe.reference.rows"),
        ("errors", "import ascend_moe"),
        ("layer", "from . import cli"),
        ("checkpoint.files", "from ascend_moe.validate import cases"),
        ("comm", "import sys\nx = sys.modules.get('ascend_moe.ops')"),
    ],
)
def test_upward_imports_and_lookups_are_seen(name: str, text: str) -> None:
    assert offences(f"ascend_moe.{name}", ast.parse(text))
    assert not offences(f"ascend_moe.{name}", ast.parse("from ascend_moe.errors import ArgumentError"))


def test_the_reference_stands_alone() -> None:
    for name, tree in modules().items():
        if unit(name) == "reference":
            used = {target.split(".")[0] for target in imports(name, tree)}
            assert used <= {"ascend_moe", "numpy", "torch", *sys.stdlib_module_names}, name


# ---- the protocol's numbers are in one file ----


def header_constants() -> dict[str, int]:
    """Every `constexpr uint32_t kName = literal;` of the wire protocol."""
    files = [ROOT / "op_kernel" / name for name in ("protocol/window.h", "common/contexts.h")]
    found = {}
    for line in re.findall(
        r"constexpr u?int\d+_t ([^;]+);", "".join(code(path.read_text()) for path in files)
    ):
        for name, literal in re.findall(r"(k\w+) = (0x[0-9A-Fa-f]+|\d+)u?(?=\s*(?:,|$|\|))", line):
            found[name] = int(literal, 0)
    return found


def test_numbers_of_the_protocol_are_not_typed_again() -> None:
    constants = header_constants()
    magics = {value: name for name, value in constants.items() if value > 0xFFFF}
    known = {"kControlMagic", "kStatusMagic", "kAbortMagic", "kRecordMagic", "kWindowTableMagic"}
    assert known <= set(magics.values())
    for name, tree in modules().items():
        numbers = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        typed = [magics[number] for number in numbers if type(number) is int and number in magics]
        assert not typed, f"{name} retypes {typed}"
    assert constants["kMaxWorld"] == communicator.MAX_WORLD
    assert constants["kMaxCores"] == calls.MAX_CORES
    assert (constants["kOpDispatch"], constants["kOpCombine"]) == (calls.OP_DISPATCH, calls.OP_COMBINE)
