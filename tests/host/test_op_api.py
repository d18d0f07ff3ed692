"""The aclnn entry points as they are made, executed over a recording shim of what CANN generates below them;
and that definition, aclnn and kernel entries agree in names and order."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from op_host_calls import definition, flags, run
from twin_oracle import compiler

from ascend_moe.native.library import native_source_root as source_root

OPS = ("DistributeDispatch", "DistributeCombine", "Probe", "OneCard")
NULL_ARGUMENT = 161001
FROM_BELOW = 4321
AICPU, MTE = 0, 1


# What CANN generates below the entry points; here it records every argument, texts beside the numbers.
BELOW = """
#include <cstdint>
#include <cstring>
extern "C" {
int64_t probe_arguments[64];
char probe_texts[64][32];
int probe_count = 0, probe_launches = 0, probe_server_type = -1, probe_server_type_at_launch = -1;
const char* probe_soc = nullptr;
}
static void Record(int64_t number) { probe_arguments[probe_count++] = number; }
static void Record(const void* pointer) { Record(static_cast<int64_t>(reinterpret_cast<intptr_t>(pointer))); }
static void Record(const char* text) {
    strncpy(probe_texts[probe_count++], text == nullptr ? "(null)" : text, sizeof(probe_texts[0]) - 1);
}
template <typename... Arguments>
static int32_t RecordAll(Arguments... arguments) {
    probe_count = 0;
    memset(probe_texts, 0, sizeof(probe_texts));
    (Record(arguments), ...);
    return 4321;
}
#ifndef OP_API_OLD_BASE
extern "C" void NnopbaseSetHcclServerType(void*, int type) { probe_server_type = type; }
extern "C" const char* aclrtGetSocName() { return probe_soc; }
#endif
"""
BELOW_OP = """
extern "C" int32_t aclnnInnerAscendMoe{op}GetWorkspaceSize({parameters}) {{ return RecordAll({names}); }}
extern "C" int32_t aclnnInnerAscendMoe{op}(void* a, uint64_t b, void* c, void* d) {{
    ++probe_launches;
    probe_server_type_at_launch = probe_server_type;
    return RecordAll(a, static_cast<int64_t>(b), c, d);
}}
"""


def make(folder: Path) -> Path:
    """The entry points and their header, in ``folder``, as a build makes them."""
    tool = source_root() / "tools/op_description.py"
    subprocess.run([sys.executable, "-S", str(tool), "aclnn", str(folder)], check=True)
    return folder


def build(*defines: str) -> Any:
    """The entry points without CANN's headers, over a shim of what CANN generates."""
    below = BELOW
    for op in OPS:
        known = definition(f"AscendMoe{op}")
        kinds = ["const void*"] * len(known.inputs)
        kinds += [{"int": "int64_t", "text": "const char*"}[kind] for kind, _ in known.attributes.values()]
        kinds += ["const void*"] * (len(known.outputs) + 2)
        names = [f"a{number}" for number in range(len(kinds))]
        pairs = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, names, strict=True))
        below += BELOW_OP.format(op=op, parameters=pairs, names=", ".join(names))
    with tempfile.TemporaryDirectory(prefix="op-api-") as scratch:
        source, target = Path(scratch, "below.cpp"), f"{scratch}/op_api.so"
        source.write_text(below)
        made = make(Path(scratch))
        options = [flag for flag in flags() if flag != "-fvisibility=hidden"]
        options += [f"-I{scratch}", f"-I{source_root() / 'op_host/op_api'}"]
        files = [str(source), str(made / "aclnn_ascend_moe.cpp")]
        run([compiler(), *options, *defines, "-shared", "-Wl,-z,noexecstack", "-o", target, *files])
        return ctypes.CDLL(target)


@pytest.fixture(scope="module")
def library() -> Any:
    return build()


def camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda letter: "_" + letter[0].lower(), name).lstrip("_")


def parameters(text: str, function: str) -> list[tuple[str, str]]:
    """(type, name) of every parameter of a declaration."""
    match = re.search(rf"\b{function}\s*\(([^()]*)\)", text)
    assert match, function
    found = [re.fullmatch(r"\s*(.*?)\s*(\w+)\s*", part) for part in match[1].split(",")]
    return [(match[1], match[2]) for match in found if match]


def read(path: str) -> str:
    return (source_root() / path).read_text()


@pytest.mark.parametrize("op", OPS)
def test_aclnn_and_kernel_entry_have_the_definitions_order(op: str, tmp_path: Path) -> None:
    """Inputs, attributes, outputs, workspace size, executor: what the generated inner function has, too."""
    known = definition(f"AscendMoe{op}")
    expected = [
        ("const aclTensor*", camel(name) + ("" if name in known.required else "Optional")) for name in known.inputs
    ]
    kinds = {"int": "int64_t", "text": "const char*"}
    expected += [(kinds[kind], camel(name)) for name, (kind, _) in known.attributes.items()]
    expected += [("const aclTensor*", camel(name) + "Out") for name in known.outputs]
    expected += [("uint64_t*", "workspaceSize"), ("aclOpExecutor**", "executor")]
    header = (make(tmp_path) / "aclnn_ascend_moe.h").read_text()
    assert parameters(header, f"aclnnAscendMoe{op}GetWorkspaceSize") == expected

    # The kernel's entry: inputs, outputs, workspace, tiling, as the op compiler passes them.
    entry = f"ascend_moe_{snake(op)}"
    found = parameters(read(f"op_kernel/{entry}.cpp"), entry)
    assert {kind for kind, _ in found} == {"GM_ADDR"}
    assert [snake(name) for _, name in found[:-2]] == [*known.inputs, *known.outputs]
    assert [name for _, name in found[-2:]] == ["workspaceGM", "tilingGM"]


def test_nothing_of_ours_shadows_cann(tmp_path: Path) -> None:
    """All registered op types and exported symbols carry the prefix."""
    for path in [*(source_root() / "op_host").rglob("*.*"), *make(tmp_path).glob("*.*")]:
        text = path.read_text()
        for symbol in re.findall(r"\baclnn[A-Z]\w+(?=\s*\()", text):
            assert re.match(r"aclnn(Inner)?AscendMoe", symbol), (path, symbol)
        for op_type in re.findall(r"OP_ADD\((\w+)", text):
            assert op_type.startswith("AscendMoe"), (path, op_type)


def arguments(op: str) -> dict[str, Any]:
    """A different number for every argument of phase one, so that none can take another's place unseen."""
    known = definition(f"AscendMoe{op}")
    kinds = {camel(name): "tensor" for name in known.inputs}
    kinds |= {camel(name): kind for name, (kind, _) in known.attributes.items()}
    kinds |= dict.fromkeys([*(camel(name) + "Out" for name in known.outputs), "workspaceSize", "executor"], "")
    values: dict[str, Any] = {}
    for at, (name, kind) in enumerate(kinds.items()):
        number = {"int": ctypes.c_int64(7000 + at), "text": f"text {at}".encode()}
        values[name] = number.get(kind, ctypes.c_void_p(0x1000 + at))
    return values


def phase_one(library: Any, op: str, values: dict[str, Any]) -> int:
    return int(getattr(library, f"aclnnAscendMoe{op}GetWorkspaceSize")(*values.values()))


def recorded(library: Any) -> Iterator[int | bytes]:
    numbers = (ctypes.c_int64 * 64).in_dll(library, "probe_arguments")
    texts = ((ctypes.c_char * 32) * 64).in_dll(library, "probe_texts")
    for i in range(ctypes.c_int.in_dll(library, "probe_count").value):
        yield texts[i].value or numbers[i]


@pytest.mark.parametrize("op", OPS)
def test_phase_one_hands_everything_on(library: Any, op: str) -> None:
    values = arguments(op)
    assert phase_one(library, op, values) == FROM_BELOW
    expected = [value if isinstance(value, bytes) else value.value for value in values.values()]
    assert list(recorded(library)) == expected


@pytest.mark.parametrize("op", OPS)
def test_phase_one_refuses_null(library: Any, op: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Refuses what is missing, by name; what is optional may be null, and a text then is empty."""
    values, required = arguments(op), set(map(camel, definition(f"AscendMoe{op}").required))
    for name, value in values.items():
        if isinstance(value, ctypes.c_int64):
            continue
        status = phase_one(library, op, values | {name: None})
        ctypes.CDLL(None).fflush(None)
        message = capfd.readouterr().err
        if name in required or name.endswith("Out") or name in ("workspaceSize", "executor"):
            assert status == NULL_ARGUMENT, name
            assert f"{name} is null, it is required" in message
        else:
            assert (status, message) == (FROM_BELOW, ""), name
            assert "(null)" not in map(str, recorded(library))


def launch(library: Any, op: str) -> int:
    function = getattr(library, f"aclnnAscendMoe{op}")
    place = ctypes.c_void_p
    return int(function(place(0x11), ctypes.c_uint64(22), place(0x33), place(0x44)))


@pytest.mark.parametrize(
    ("soc", "server"), [(b"Ascend910B3", AICPU), (b"Ascend910_9391", MTE), (b"Ascend910_9362", MTE), (None, MTE)]
)
@pytest.mark.parametrize("op", OPS)
def test_phase_two_sets_the_server_type_first(library: Any, op: str, soc: bytes | None, server: int) -> None:
    """Of ops with a group; one card has none."""
    ctypes.c_char_p.in_dll(library, "probe_soc").value = soc
    ctypes.c_int.in_dll(library, "probe_server_type").value = -1
    assert launch(library, op) == FROM_BELOW
    assert ctypes.c_int.in_dll(library, "probe_server_type_at_launch").value == (-1 if op == "OneCard" else server)
    assert list(recorded(library)) == [0x11, 22, 0x33, 0x44]


def test_an_op_base_without_server_types_still_launches() -> None:
    library = build("-DOP_API_OLD_BASE")
    assert [launch(library, op) for op in OPS] == [FROM_BELOW] * len(OPS)
    assert ctypes.c_int.in_dll(library, "probe_launches").value == len(OPS)


def test_headers_stand_alone(tmp_path: Path) -> None:
    """Each header of the entry points compiles as the only include; they fit together."""
    folder = source_root() / "op_host/op_api"
    for header in [*make(tmp_path).glob("*.h"), *folder.glob("*.h")]:
        source = tmp_path / "alone.cpp"
        source.write_text(f'#include "{header.name}"\n')
        run([compiler(), *flags(), f"-I{tmp_path}", f"-I{folder}", "-fsyntax-only", str(source)])
