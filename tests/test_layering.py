"""Dependencies point one way, kernels stay device code, the reference stands alone. Read off the sources."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ascend_moe
from ascend_moe import _lib, communicator, native

ROOT = _lib.native_source_root()
KERNEL, HOST, TWIN, OPS = (
    ROOT / name for name in ("op_kernel", "op_host", "ascend_moe/csrc/twin", "ascend_moe/csrc/ops")
)
PACKAGE = Path(ascend_moe.__file__).resolve().parent

# ---- C++ ----


def sources(folder: Path) -> list[Path]:
    found = [path for path in sorted(folder.rglob("*")) if path.suffix in (".h", ".cpp", ".S")]
    assert found, f"no sources in {folder}"
    return found


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


def named(*folders: Path) -> set[str]:
    """What `#include "..."` may say for the headers of these folders."""
    return {path.name for folder in folders for path in folder.glob("*.h")}


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
POLLS = {"moe_distribute_late.h", "moe_distribute_wait.h", "ascend_moe_probe.h"}
POLLING = r"\b(GetSystemCycle|MOE_POLL_HINT|TWIN_(?!PHASE\b)\w+)\b"


def kernel_offences(name: str, text: str) -> list[str]:
    text = code(text)
    found = [f"{name}: {what}" for pattern, what in OFFENCES.items() if re.search(pattern, text)]
    if name not in POLLS and re.search(POLLING, text):
        found.append(f"{name}: polls")
    allowed = named(KERNEL) | {"kernel_operator.h", "<cstdint>"}
    # HCCL's server is no part of kernel_operator.h, and its header has moved between toolkits.
    if name == "moe_distribute_rdma.h":
        allowed |= {"lib/hccl/hccl.h", "adv_api/hccl/hccl.h"}
    return found + [f"{name}: includes {header}" for header in includes(text) if header not in allowed]


def test_kernels_are_device_code() -> None:
    found = [offence for path in sources(KERNEL) for offence in kernel_offences(path.name, path.read_text())]
    assert not found


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
        '#include "twin/core.h"',
        '#include "moe_distribute_plan.h"',
    ],
)
def test_kernel_offences_are_seen(line: str) -> None:
    sound = "// std:: double\nstatic constexpr uint32_t kOne = 1;\nconst float half = 0.5f;  // static int\n"
    assert not kernel_offences("moe_distribute_sum.h", sound)
    assert kernel_offences("moe_distribute_sum.h", f"{sound}{line}\n")


def test_the_wait_polls() -> None:
    assert re.search(POLLING, code((KERNEL / "moe_distribute_wait.h").read_text()))


def test_the_protocol_stands_alone() -> None:
    """The window's geometry is plain arithmetic: host checks and kernels read the same file."""
    assert includes((KERNEL / "moe_distribute_window.h").read_text()) == ["<cstdint>"]


CANN_SIDE = (
    r"moe_distribute_cann_(call|def|functions|infershape|log|platform|tiling)\.h"
    r"|ascend_moe_distribute_\w+\.cpp|(aclnn_)?ascend_moe_\w+\.(h|cpp)"
)


def test_host_rules_know_no_backend() -> None:
    """CANN's headers are for its own side of op_host alone, and that side is for nobody else."""
    cann = {path for path in sources(HOST) if re.fullmatch(CANN_SIDE, path.name)}
    assert {path.suffix for path in cann} == {".h", ".cpp"}
    allowed = named(HOST, KERNEL) - {path.name for path in cann}
    for path in sources(HOST):
        ours = [header for header in includes(path.read_text()) if not header.startswith("<")]
        assert path in cann or set(ours) <= allowed, f"{path.name} includes {set(ours) - allowed}"
        # CANN has a namespace ops, too.
        twin = r"\btwin::|\bTWIN_" if path in cann else r"\b(twin|ops)::|\bTWIN_"
        assert not re.search(twin, code(path.read_text())), f"{path.name} uses the twin"
    # Tiling data and the wire protocol come from the kernels, their bodies do not.
    bodies = {
        "moe_distribute_dispatch.h",
        "moe_distribute_combine.h",
        "ascend_moe_probe.h",
        "moe_distribute_base.h",
        "kernel_operator.h",
    }
    assert not [path.name for path in sources(HOST) if bodies & set(includes(path.read_text()))]


def test_the_twin_knows_no_op() -> None:
    headers = {path.name for path in TWIN.rglob("*.h")}
    for path in sources(TWIN):
        text = path.read_text()
        ours = [header for header in includes(text) if not header.startswith("<")]
        foreign = [header for header in ours if Path(header).name not in headers]
        assert not foreign, f"{path.name} includes {foreign}"
        assert not re.search(r"\b(moe|ops)::|moe_distribute", code(text)), f"{path.name} names an op"


def test_launchers_stand_on_the_others() -> None:
    models = OPS.parent / "models"  # kernels for the timed engine alone, on top of the shipped ones' headers
    for path in sources(models):
        assert set(includes(path.read_text())) <= named(models, KERNEL) | {
            "kernel_operator.h",
            "twin/qualifiers.h",
            "<cstdint>",
        }
    allowed = named(OPS, HOST, KERNEL, models)
    for path in sources(OPS):
        ours = [header for header in includes(path.read_text()) if not header.startswith(("<", "twin/"))]
        assert set(ours) <= allowed, f"{path.name} includes {set(ours) - allowed}"


def test_includes_of_the_op_have_no_cycle() -> None:
    graph = {path.name: includes(path.read_text()) for folder in (KERNEL, HOST) for path in sources(folder)}
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"cycle: {' -> '.join([*above, name])}"
        if name in graph and name not in done:
            for other in graph[name]:
                walk(other, (*above, name))
            done.add(name)

    for name in graph:
        walk(name, ())


# ---- Python ----

# From the bottom up. A module imports its own level and what is below; families of one level do not meet.
# What is not named here is on top: command line, examples, adapters.
LEVELS: list[dict[str, tuple[str, ...]]] = [
    {"words": ("errors", "schemas", "vendor_schemas", "vendor_ops", "experts_dtype", "liveness", "tuning")},
    {"library": ("_lib", "_cache", "compiled", "npu_adapter_build")},
    {
        "comm": (
            "lent",
            "communicator",
            "local_cluster",
            "lent_compiled",
            "board",
            "link",
            "rendezvous",
            "verdicts",
            "comm",
        )
    },
    {"ops": ("native", "ops", "ops_compiled", "npu_adapter", "npu_runtime", "npu_launch")},
    {"routing": ("routing",), "experts": ("experts", "experts_*"), "dispatchers": ("dispatchers",)},
    {"layer": ("layer",), "vendor": ("ops_*",)},
    {"checkpoint": ("checkpoint", "checkpoint_*", "presets"), "npu": ("npu", "npu_patch")},
]
TOP = len(LEVELS)


def place(module: str) -> tuple[int, str]:
    """Level and family of a module of the package, by its first name."""
    first = module.split(".")[0]
    exact = [
        (level, family)
        for level, families in enumerate(LEVELS)
        for family, members in families.items()
        if first in members
    ]
    prefixed = [
        (level, family)
        for level, families in enumerate(LEVELS)
        for family, members in families.items()
        for member in members
        if member.endswith("*") and first.startswith(member[:-1])
    ]
    return next(iter(exact + prefixed), (TOP, first))


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its name below it; the package itself is ''."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if "_src" in parts or "csrc" in parts:
            continue
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    assert len(found) > 20
    return found


def imports(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Absolute names of what a module imports, lazily or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if name in packages(known) else name.split(".")[:-1]
                up = package[: len(package) - (node.level - 1)]
                base = ".".join(part for part in ["ascend_moe", *up, base] if part)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                inside = base.startswith("ascend_moe") and whole.removeprefix("ascend_moe.") in known
                yield whole if inside else base


def packages(known: set[str]) -> set[str]:
    return {""} | {name.rpartition(".")[0] for name in known if "." in name}


def own_imports() -> dict[str, set[str]]:
    """Which modules of the package each one imports; the package itself is ''."""
    trees = modules()
    found = {}
    for name, tree in trees.items():
        names = {one for one in imports(name, tree, set(trees)) if one.split(".")[0] == "ascend_moe"}
        found[name] = {one.removeprefix("ascend_moe").removeprefix(".") for one in names}
    return found


def upward(graph: dict[str, set[str]]) -> list[str]:
    found = []
    for name, targets in graph.items():
        if name in ("", "__main__") or name.split(".")[0] == "reference":
            continue
        level, family = place(name)
        for target in targets:
            below, other = place(target) if target else (TOP, "the package")
            sideways = below == level and other != family and level < TOP
            if target.split(".")[0] == "reference":
                if level < TOP:
                    found.append(f"{name} imports the reference")
            elif below > level or sideways:
                found.append(f"{name} imports {target or 'the package'}")
    return found


def test_python_layers() -> None:
    assert not upward(own_imports())


@pytest.mark.parametrize(
    "name, target",
    [
        ("comm", "ops"),
        ("ops", "layer"),
        ("routing", "experts"),
        ("experts_quant", "dispatchers.base"),
        ("dispatchers.rows", "reference.rows"),
        ("errors", ""),
        ("layer", "cli"),
        ("checkpoint", "npu"),
    ],
)
def test_upward_imports_are_seen(name: str, target: str) -> None:
    assert upward({name: {target}})


def test_every_layer_is_there() -> None:
    """A renamed module must not slip through as one of the top."""
    names = {name.split(".")[0] for name in modules()}
    for families in LEVELS:
        for members in families.values():
            assert [member for member in members if not member.endswith("*") and member not in names] == []


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
    text = code((KERNEL / "moe_distribute_window.h").read_text()) + code(
        (KERNEL / "moe_distribute_context.h").read_text()
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
    assert constants["kMaxCores"] == native.MAX_CORES
    assert (constants["kOpDispatch"], constants["kOpCombine"]) == (native.OP_DISPATCH, native.OP_COMBINE)
