"""Dependencies point one way, kernels stay device code, the reference stands alone. Read off the sources."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import ascend_moe
from ascend_moe.comm import communicator
from ascend_moe.native import library
from ascend_moe.ops import calls

ROOT = library.native_source_root()
PACKAGE = Path(ascend_moe.__file__).resolve().parent

# ---- C++: a folder includes itself and the folders named beside it ----

FOLDERS: dict[str, tuple[str, ...]] = {
    "op_kernel/protocol": (),
    "op_kernel/common": ("op_kernel/protocol",),
    "op_kernel/window": ("op_kernel/common", "op_kernel/protocol"),
    "op_kernel/direct": ("op_kernel/common", "op_kernel/protocol"),
    "op_kernel/probe": ("op_kernel/common", "op_kernel/protocol"),
    "op_kernel": ("op_kernel/window", "op_kernel/direct", "op_kernel/probe"),
    "op_host/rules": ("op_host", "op_kernel/protocol", "op_kernel/probe"),
    "op_host/cann": ("op_host", "op_host/rules", "op_kernel/protocol", "op_kernel/probe"),
    "op_host": ("op_host/cann", "op_host/rules", "op_kernel/protocol", "op_kernel/probe"),
    "op_host/op_api": (),
    "twin": (),
    "csrc/abi": (
        "twin",
        "op_kernel",  # the entries, compiled once a dtype
        "op_host",
        "op_kernel/common",
        "op_host/rules",
        "op_kernel/protocol",
        "op_kernel/probe",
        "csrc/engines",
    ),
    "csrc/engines": ("csrc/abi", "csrc/engines/models", "twin", "op_host/rules", "op_kernel/protocol"),
    "csrc/engines/models": ("twin", "op_kernel/common", "op_kernel/protocol"),
    "csrc/torch": ("csrc/npu", "op_host/rules", "op_kernel/protocol"),
    "csrc/npu": ("op_host/rules", "op_kernel/protocol"),
    "vnpu": (
        "twin",
        "csrc/abi",
        "op_host",
        "op_host/cann",
        "op_host/op_api",
        "op_host/rules",
        "op_kernel/protocol",
        "op_kernel/probe",
    ),
}
# Folders of the include path, as the build sets it.
INCLUDE_PATH = (
    "op_kernel",
    "op_host",
    "twin/include",
    "csrc",
    "vnpu",
    "vnpu/cann_standin",
    "vnpu/cann_standin/include",
)


def sources(folder: str = "") -> list[Path]:
    """Every C++ file below a folder of the tree, or of all of ``FOLDERS``."""
    tops = [folder] if folder else sorted({name.split("/")[0] for name in FOLDERS})
    paths = [
        path
        for top in tops
        for path in sorted((ROOT / top).rglob("*"))
        if path.suffix in (".h", ".cpp", ".S")
    ]
    assert paths, f"no sources in {tops}"
    return paths


def code(text: str) -> str:
    """Without comments and the contents of strings."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r'(?<!include )"(?:\\.|[^"\\\n])*"', '""', text)


def includes(text: str) -> list[str]:
    """``<name>`` for the system's headers, ``name`` for ours."""
    return [
        match.strip('"')
        for match in re.findall(r'^\s*#\s*include\s*(<[^>]+>|"[^"]+")', text, flags=re.MULTILINE)
    ]


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
    stand_in = target.is_relative_to(ROOT / "vnpu/cann_standin/include")
    return stand_in or (target.is_relative_to(ROOT / "twin/include") and not own)


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


def test_includes_have_no_circle() -> None:
    graph = {
        path: {target for include in includes(path.read_text()) if (target := header(path, include))}
        for path in sources()
    }
    assert not circles(graph)


def circles(graph: Mapping[object, set[object]]) -> list[str]:
    """Every way back to where it began, once."""
    ways: list[str] = []
    done: set[object] = set()

    def walk(node: object, above: tuple[object, ...]) -> None:
        if node in above:
            ways.append(" -> ".join(map(str, (*above[above.index(node) :], node))))
        elif node not in done:
            for target in graph.get(node, ()):
                walk(target, (*above, node))
            done.add(node)

    for node in graph:
        walk(node, ())
    return ways


def test_circles_are_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


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
    foreign = [
        include
        for include in includes(text)
        if include not in VENDOR
        and (
            include.startswith("<")
            or not (path.parent / include).resolve().is_relative_to(ROOT / "op_kernel")
        )
    ]
    return offences + [f"{name}: includes {include}" for include in foreign] + wrong_includes(path, text)


def test_kernels_are_device_code() -> None:
    assert not [
        offence for path in sources("op_kernel") for offence in kernel_offences(path, path.read_text())
    ]


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


def test_the_wait_polls() -> None:
    assert re.search(POLLING, code((ROOT / "op_kernel/common/wait.h").read_text()))


def test_the_protocol_stands_alone() -> None:
    """The window's geometry is plain arithmetic: host checks and kernels read the same file."""
    assert includes((ROOT / "op_kernel/protocol/window.h").read_text()) == ["<cstdint>"]


def test_host_rules_know_no_backend() -> None:
    """CANN's headers are for its own side of op_host alone."""
    for path in sources("op_host"):
        text = path.read_text()
        cann = folder_of(path) != "op_host/rules"
        ours = [include for include in includes(text) if not include.startswith("<")]
        assert cann or all(header(path, include) for include in ours), f"{path.name} includes {ours}"
        # CANN has a namespace ops, too.
        twin = r"\btwin::|\bTWIN_" if cann else r"\b(twin|ops)::|\bTWIN_"
        assert not re.search(twin, code(text)), f"{path.name} uses the twin"


def test_the_twin_knows_no_op() -> None:
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


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name below it; the package itself is ''."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if "_src" not in parts:
            trees[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    assert len(trees) > 20
    return trees


def imports(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Absolute names of what a module imports, at its head or in a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                is_package = name == "" or any(other.startswith(f"{name}.") for other in known)
                package = name.split(".") if is_package else name.split(".")[:-1]
                up = package[: len(package) - (node.level - 1)]
                base = ".".join(part for part in ["ascend_moe", *up, base] if part)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                inside = base.startswith("ascend_moe") and whole.removeprefix("ascend_moe.") in known
                yield whole if inside else base


def own_imports() -> dict[str, set[str]]:
    """Which modules of the package each module imports."""
    trees = modules()
    graph = {}
    for name, tree in trees.items():
        names = {target for target in imports(name, tree, set(trees)) if target.split(".")[0] == "ascend_moe"}
        graph[name] = {target.removeprefix("ascend_moe").removeprefix(".") for target in names}
    return graph


def upward(graph: Mapping[str, set[str]]) -> list[str]:
    return [
        f"{name or 'the package'} imports {target or 'the package'}"
        for name, targets in graph.items()
        for target in sorted(targets)
        if target.split(".")[0] not in below(name.split(".")[0])
    ]


def module_lookups(name: str, tree: ast.Module) -> list[str]:
    """Looks at sys.modules: imports that no table sees. _autoload asks whether torch came before it."""
    if name == "_autoload":
        return []
    return [
        f"{name}:{node.lineno} looks at sys.modules"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "modules"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    ]


def test_python_layers() -> None:
    assert {name.split(".")[0] for name in modules()} == set(LAYERS), "the table and the package differ"
    assert not upward(own_imports())


def test_python_has_no_circles() -> None:
    assert not circles({name: set(targets) for name, targets in own_imports().items()})


def test_no_module_is_looked_up() -> None:
    assert not [lookup for name, tree in modules().items() for lookup in module_lookups(name, tree)]


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
    ],
)
def test_upward_imports_are_seen(name: str, text: str) -> None:
    known = set(modules())
    targets = {
        target.removeprefix("ascend_moe").removeprefix(".")
        for target in imports(name, ast.parse(text), known)
    }
    assert upward({name: targets})


def test_lookups_are_seen() -> None:
    assert module_lookups("comm", ast.parse("import sys\nx = sys.modules.get('ascend_moe.ops')"))


def test_the_reference_stands_alone() -> None:
    trees = modules()
    for name in [name for name in trees if name.split(".")[0] == "reference"]:
        for one in imports(name, trees[name], set(trees)):
            first = one.split(".")[0]
            inside = one.startswith("ascend_moe.reference")
            assert inside or first in ("numpy", "torch") or first in sys.stdlib_module_names, (
                f"{name} imports {one}"
            )


def functions(tree: ast.Module) -> dict[str, str]:
    """Functions of more than a few expressions, by what they do whatever they and their docstrings say."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if sum(1 for part in body for _ in ast.walk(part)) >= 25:
                found[" ".join(ast.dump(part) for part in body)] = node.name
    return found


def test_the_reference_shares_no_code() -> None:
    trees = modules()
    mine: dict[str, str] = {}
    for name in trees:
        if name.split(".")[0] == "reference":
            mine.update(functions(trees[name]))
    assert len(mine) > 15
    for name, tree in trees.items():
        if name.split(".")[0] != "reference":
            copied = [mine[body] for body in functions(tree) if body in mine]
            assert not copied, f"{name} has the reference's {copied}"


# ---- the protocol's numbers are in one file ----


def header_constants() -> dict[str, int]:
    """Every `constexpr uint32_t kName = literal;` of the wire protocol."""
    text = "".join(
        code((ROOT / "op_kernel" / name).read_text()) for name in ("protocol/window.h", "common/contexts.h")
    )
    found = {}
    for line in re.findall(r"constexpr u?int\d+_t ([^;]+);", text):
        for name, literal in re.findall(r"(k\w+) = (0x[0-9A-Fa-f]+|\d+)u?(?=\s*(?:,|$|\|))", line):
            found[name] = int(literal, 0)
    return found


def test_magic_numbers_are_not_typed_again() -> None:
    constants = header_constants()
    magics = {value: name for name, value in constants.items() if value > 0xFFFF}
    assert {"kControlMagic", "kStatusMagic", "kAbortMagic", "kRecordMagic", "kWindowTableMagic"} <= set(
        magics.values()
    )
    for name, tree in modules().items():
        typed = [
            magics[node.value]
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and type(node.value) is int and node.value in magics
        ]
        assert not typed, f"{name} retypes {typed}"


def test_limits_that_python_states_are_the_protocols() -> None:
    constants = header_constants()
    assert constants["kMaxWorld"] == communicator.MAX_WORLD
    assert constants["kMaxCores"] == calls.MAX_CORES
    assert (constants["kOpDispatch"], constants["kOpCombine"]) == (calls.OP_DISPATCH, calls.OP_COMBINE)
