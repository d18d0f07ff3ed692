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
import ascend_vnpu
import ascendc_twin
from ascend_moe.native import library

ROOT = library.native_source_root()
PACKAGE = Path(ascend_moe.__file__).resolve().parent

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"  # an installation has no pages


def rows_of(head: str, text: str | None = None) -> dict[str, tuple[str, ...]]:
    """A table of the page: name -> the names that it may import or include. ``head``: of its first column."""
    lines = (PAGE.read_text() if text is None else text).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"| {head} |"))
    found: dict[str, tuple[str, ...]] = {}
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        row = re.fullmatch(r"\| `([\w/]+)` \| [^|]+ \| (nothing|`[\w/]+`(?:, `[\w/]+`)*) \|", line)
        assert row is not None, f"{PAGE.name}: no row of a folder: {line}"
        assert row[1] not in found, f"{PAGE.name}: a second row of {row[1]}"
        found[row[1]] = tuple(re.findall(r"`([\w/]+)`", row[2]))
    unknown = {name for seen in found.values() for name in seen} - set(found)
    assert found and not unknown, f"{PAGE.name}: rows name {unknown}, which have no row"
    return found


# ---- C++: a folder includes itself and the folders named beside it ----

FOLDERS = rows_of("tree")
# Folders of the include path, as the build sets it.
INCLUDE_PATH = ("op_kernel", "op_host", "twin/include", "csrc", "vnpu", "vnpu/cann_shim")


# The toolkit's and the system's headers that kernels may include; HCCL's has moved between toolkits.
KERNEL_HEADERS = {"kernel_operator.h", "<cstdint>", "lib/hccl/hccl.h", "adv_api/hccl/hccl.h"}
# What no file below a folder may contain, outside comments and strings.
FORBIDDEN = [
    ("op_kernel", r"\bstd::"),
    ("op_kernel", r"\bstatic\b(?!\s+(constexpr|__aicore__))"),
    ("op_kernel", r"\b(thread_local|virtual|double|throw|try|catch)\b"),
    ("op_kernel", r"(?<![\w.])\d+\.\d*(?![\dfF])"),  # a double literal
    ("op_kernel", r"\b(new|delete|malloc|free|dynamic_cast|typeid)\b"),
    ("op_kernel", r"\b(printf|PRINTF|assert)\s*\("),
    ("op_kernel", r"\bfor\s*\(\s*;\s*;|\bwhile\s*\(\s*(true|1)\s*\)"),  # an endless loop
    ("op_kernel", r"\b(GetSystemCycle|MOE_POLL_HINT|TWIN_(?!PHASE\b)\w+)\b"),  # polling
    ("op_host/rules", r"\b(twin|ops)::|\bTWIN_"),
    ("op_host", r"\btwin::|\bTWIN_"),
    ("twin", r"\b(moe|ops)::|moe_distribute"),
]
# Only the waits, stamps, and the probe of what waits stand on, may look at the clock or say that they poll.
POLLS = {
    f"op_kernel/common/{name}.h" for name in ("aborts", "base", "exchange", "core_barrier", "core_group", "status_wait")
}
POLLS |= {f"op_kernel/probe/{name}.h" for name in ("probe", "shared")}


@functools.cache
def sources() -> dict[str, str]:
    """Every C++ file below ``FOLDERS``: its text by its name in the tree."""
    tops = {name.split("/")[0] for name in FOLDERS}
    paths = [path for top in sorted(tops) for path in sorted((ROOT / top).rglob("*"))]
    texts = {path.relative_to(ROOT).as_posix(): path for path in paths if path.suffix in (".h", ".cpp", ".S")}
    assert {name.split("/")[0] for name in texts} == tops
    return {name: path.read_text() for name, path in texts.items()}


def code(text: str) -> str:
    """Without comments and the contents of strings."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    return re.sub(r'(?<!include )"(?:\\.|[^"\\\n])*"', '""', text)


def targets(name: str, text: str) -> dict[str, str]:
    """include -> the file of the tree that it means; "" for headers of the system's and of CANN's."""
    found = {}
    for include in re.findall(r'^\s*#\s*include\s*(<[^>]+>|"[^"]+")', text, flags=re.MULTILINE):
        places = [os.path.dirname(name), *INCLUDE_PATH]
        files = [os.path.normpath(f"{place}/{include.strip(chr(34))}") for place in places]
        target = next((file for file in files if (ROOT / file).is_file()), "")
        vendors = re.match(r"twin/include/(?!twin/)", target)
        found[include.strip('"')] = "" if vendors else target
    return found


def folder_of(name: str) -> str:
    """The longest name of ``FOLDERS`` that the file lies under."""
    return max((folder for folder in FOLDERS if name.startswith(f"{folder}/")), key=len)


def cpp_offences(name: str, text: str) -> list[str]:
    """Includes that leave the folders a file may see, and what its folder forbids."""
    folder = folder_of(name)
    wrong = []
    for include, target in targets(name, text).items():
        if target:
            sound = folder_of(target) in (folder, *FOLDERS[folder])
        elif name.startswith("op_kernel/"):
            sound = include in KERNEL_HEADERS
        else:  # CANN's headers are for its own side of op_host alone
            sound = folder != "op_host/rules" or include.startswith("<")
        if not sound:
            wrong.append(f"{name} includes {include}")
    text = code(text)
    for top, pattern in FORBIDDEN:
        polls = "GetSystemCycle" in pattern and name in POLLS
        if name.startswith(f"{top}/") and not polls and (found := re.search(pattern, text)):
            wrong.append(f"{name} has {found[0]!r}")
    return wrong


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the way round


def test_every_folder_of_kernels_host_and_binding_has_a_row() -> None:
    tops = ("op_kernel", "op_host", "csrc")
    there = {os.path.dirname(name) for name in sources() if name.startswith(tops)}
    assert there == {name for name in FOLDERS if name.startswith(tops)}


def test_cpp_folders_hold_what_they_may() -> None:
    assert not [offence for name, text in sources().items() for offence in cpp_offences(name, text)]
    assert all(re.search(r"\b(GetSystemCycle|MOE_POLL_HINT)\b", code(sources()[name])) for name in POLLS)
    assert list(targets("op_kernel/protocol/window.h", sources()["op_kernel/protocol/window.h"])) == ["<cstdint>"]
    assert_no_circle({name: set(targets(name, text).values()) - {""} for name, text in sources().items()})
    units: dict[str, set[str]] = {}  # a header and the .cpp of its name are one
    for name, text in sources().items():
        unit_name, _ = os.path.splitext(name)
        seen = {os.path.splitext(target)[0] for target in targets(name, text).values() if target}
        units.setdefault(unit_name, set()).update(seen - {unit_name})
    assert_no_circle(units)
    with pytest.raises(graphlib.CycleError):
        assert_no_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})


@pytest.mark.parametrize(
    "name, line",
    [
        ("op_kernel/direct/dispatch.h", '#include "../window/dispatch.h"'),
        ("op_host/rules/plan.h", '#include "register/op_def_registry.h"'),
        ("twin/include/twin/api/copy.h", '#include "protocol/window.h"'),
        ("op_host/cann/tiling.h", "TWIN_POLL_HINT();"),
        *(
            ("op_kernel/window/combine_indexed.h", line)
            for line in (
                *("#include <algorithm>", "static int calls = 0;", "float x = 0.5;", "for (;;) {}"),
                "AscendC::GetSystemCycle();",
            )
        ),
    ],
)
def test_cpp_offences_are_seen(name: str, line: str) -> None:
    sound = "// std:: double moe::\nstatic constexpr uint32_t kOne = 1;\nconst float x = 0.5f;  // static\n"
    assert not cpp_offences(name, sound)
    assert cpp_offences(name, f"{sound}{line}\n")


# ---- Python: a folder, or a module of the root, imports what is named beside it and all below that ----

LAYERS = rows_of("folder or module")


def below(unit: str) -> set[str]:
    """Everything that a folder may import: what its row names, and what those rows name."""
    return {unit}.union(*(below(name) for name in LAYERS[unit]))


def unit(name: str) -> str:
    """The folder or module of the root that a module lies in, or the package itself."""
    return f"{name}.".split(".")[1] or "ascend_moe"


@functools.cache
def modules() -> dict[str, ast.Module]:
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["ascend_moe", *path.relative_to(PACKAGE).with_suffix("").parts]
        if "_src" not in parts:
            trees[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return trees


def imports(name: str, tree: ast.Module) -> Iterator[str]:
    """Absolute names of what a module imports, at its head or in a function."""
    is_package = PACKAGE.parent.joinpath(*name.split(".")).is_dir()
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and (target := called(node, tree)):
            yield target
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in modules() else base


def called(node: ast.Call, tree: ast.Module) -> str:
    """The module of this package that ``importlib.import_module`` or ``__import__`` is called with, else ''."""
    given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "name")]
    if not given or ast.unparse(node.func).rpartition(".")[2] not in ("import_module", "__import__"):
        return ""
    argument = given[0]
    constants = {
        target.id: each.value
        for each in tree.body
        if isinstance(each, ast.Assign)
        for target in each.targets
        if isinstance(target, ast.Name)
    }
    argument = constants.get(argument.id, argument) if isinstance(argument, ast.Name) else argument
    parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
    start = parts[0].value if isinstance(parts[0], ast.Constant) else ""
    if str(start).startswith("."):
        return "ascend_moe.relative"  # not to be told from here: no folder has this name
    return str(start) if str(start).split(".")[0] == "ascend_moe" else ""  # with a dot at its end: some module there


def run(tree: ast.Module) -> ast.Module:
    """The module without what only a type checker reads, which makes no circle of imports."""
    read = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    return ast.Module(read, [])


def python_offences(name: str, tree: ast.Module) -> list[str]:
    """Imports of what is not below, and looks at sys.modules, which are imports that no table sees."""
    own = [target for target in imports(name, tree) if target.split(".")[0] == "ascend_moe"]
    found = [f"{name} imports {target}" for target in own if unit(target) not in below(unit(name))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "modules" and ast.unparse(node) == "sys.modules":
            found.append(f"{name}:{node.lineno} looks at sys.modules")
    return found


def other_packages(folder: Path) -> dict[str, set[str]]:
    """Packages beside Python's own that each module below a package's folder imports, its own left out."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        packages = {target.split(".")[0] for target in imports(name, ast.parse(path.read_text()))}
        found[path.relative_to(folder).as_posix()] = packages - {folder.name, *sys.stdlib_module_names}
    return found


def test_the_emulators_package_stands_alone() -> None:
    """It imports numpy, for its command typer, and nothing of the operators or of torch."""
    found = other_packages(Path(ascendc_twin.__file__).parent)
    assert set().union(*found.values()) == {"numpy", "typer"}


def test_the_virtual_npu_takes_the_operator_package_through_one_module() -> None:
    found = other_packages(Path(ascend_vnpu.__file__).parent)
    assert [name for name, packages in found.items() if "ascend_moe" in packages] == ["package.py"]
    assert set().union(*found.values()) == {"ascend_moe", "torch", "typer"}
    users = {name for name, packages in other_packages(PACKAGE).items() if "ascend_vnpu" in packages}
    assert {name.split("/")[0] for name in users} == {"cli", "doctor", "shim", "torch_npu_ops", "validate"}


# Other packages that a module imports where it is asked for something of theirs.
ELSEWHERE = {"matplotlib": "bench", "mpi4py": "bench", "torch_npu": "npu"}


def test_what_the_commands_import_is_in_the_extra_cli() -> None:
    """Every import of another package, wherever in a module it stands."""
    others = set().union(*other_packages(PACKAGE).values()) - {"ascend_vnpu", "ascendc_twin"}
    declared = {}
    for name in ("dependencies", "cli", "bench", "npu"):
        listed = re.search(rf"^{name} = (\[.*\])", (PAGE.parents[1] / "pyproject.toml").read_text(), re.MULTILINE)
        declared[name] = {re.split("[>;\\[]", word)[0] for word in re.findall('"([^"]*)"', listed[1] if listed else "")}
    assert {"rich", "safetensors", "torch", "typer"} <= others
    missing = [name for name in others - set(ELSEWHERE) if name not in declared["dependencies"] | declared["cli"]]
    missing += [name for name, extra in ELSEWHERE.items() if name not in declared[extra]]
    assert missing == []


def test_python_folders_import_only_what_lies_below() -> None:
    assert {unit(name) for name in modules()} == set(LAYERS), "the table and the package differ"
    found = [offence for name, tree in modules().items() for offence in python_offences(name, tree)]
    # _autoload asks whether torch came before it; interop and shim put modules there that stand in for
    # other systems'.
    modules_table = r"ascend_moe\.(_autoload|(interop|shim)\.[\w.]+):.*sys\.modules"
    assert not [offence for offence in found if not re.match(modules_table, offence)]
    known = set(modules())
    assert_no_circle({name: known.intersection(imports(name, run(tree))) for name, tree in modules().items()})
    for name, tree in modules().items():
        if unit(name) == "reference":
            used = {target.split(".")[0] for target in imports(name, tree)}
            assert used <= {"ascend_moe", "numpy", "torch", *sys.stdlib_module_names}, name
        if unit(name) == "interop":  # a module that serves a system does not import it when it is imported
            head = ast.Module([node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
            used = {target.split(".")[0] for target in imports(name, head)}
            assert used <= {"ascend_moe", "torch", *sys.stdlib_module_names}, name


@pytest.mark.parametrize(
    "name, text",
    [
        ("comm.threads", "from ascend_moe import ops"),
        ("routers.topk", "from .. import experts"),
        ("experts.quant", "from ..dispatchers.base import Dispatcher"),
        ("dispatchers.rows", "import ascend_moe.reference.rows"),
        ("comm", "import sys\nx = sys.modules.get('ascend_moe.ops')"),
        ("ops.calls", "import importlib\nNAME = 'ascend_moe.layer'\nimportlib.import_module(NAME)"),
        (
            "permute",
            "from importlib import import_module\ndef late(name):\n    import_module(f'ascend_moe.interop.{name}')",
        ),
        ("layer", "import importlib\nimportlib.import_module('..ops', __package__)"),
    ],
)
def test_upward_imports_and_lookups_are_seen(name: str, text: str) -> None:
    assert python_offences(f"ascend_moe.{name}", ast.parse(text))
    assert not python_offences(f"ascend_moe.{name}", ast.parse("from ascend_moe.errors import ArgumentError"))
