"""The table of environment variables: complete, and the only place of their names."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import ascend_moe
import ascend_vnpu
from ascend_moe import settings
from ascend_moe.errors import ArgumentError, LibraryError
from ascend_moe.native import library

ROOT = library.native_source_root()
PACKAGE, VNPU = (Path(package.__file__).resolve().parent for package in (ascend_moe, ascend_vnpu))
CMAKE = "native/build.py"  # names of CMake's options, one of which is a variable's too


def test_names_are_in_the_table_and_spelt_nowhere_else() -> None:
    """Variables that C++ reads, and names in Python's code, docstrings and error texts."""
    read = set()
    for folder in ("csrc", "twin", "vnpu"):
        for path in (ROOT / folder).rglob("*.[ch]*"):
            read.update(re.findall(r'getenv\("(\w+)"', path.read_text()))
    ours = {name for name in read if name.startswith(settings.PREFIX)}
    assert "ASCEND_MOE_VNPU_REPORT" in ours and ours <= settings.NAMES
    for path in sorted([*PACKAGE.rglob("*.py"), *VNPU.rglob("*.py")]):
        if path == PACKAGE / CMAKE or "_src" in path.parts:
            continue
        named = set(re.findall(r"\bASCEND_MOE_[A-Z0-9_]+[A-Z0-9]\b", path.read_text()))
        macros = {name for name in named if "_TILING_KEY_" in name or name == "ASCEND_MOE_MUTANT"}
        assert named <= settings.NAMES | macros, path
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        spelt = [f"{path}:{node.lineno} {node.value}" for node in nodes if node.value in settings.NAMES]
        assert path == PACKAGE / "settings.py" or not spelt


def test_the_algorithms_are_those_of_the_operators() -> None:
    (names,) = re.findall(r"names\[\] = \{(.*?)\};", (ROOT / "op_host/rules/args.h").read_text(), re.DOTALL)
    known = set(re.findall(r'"([a-z0-9_]+)"', names))
    assert set(settings.COMM_ALG.rule.removeprefix("one of ").split(", ")) == known


@pytest.mark.parametrize(
    "setting, text, value",
    [
        *((settings.HCCL_BUFFSIZE, *row) for row in (("512", 512), (" 7 ", 7), (" ", settings.DEFAULT_WINDOW_MIB))),
        (settings.TIMEOUT_S, "1.5", 1.5),
        (settings.REGISTERED_MIB, "0", 0),
        (settings.REGISTERED_MIB, "", None),
        (settings.CACHE, "/somewhere", Path("/somewhere")),
        (settings.CONTEXT, "a2", "a2"),
        (settings.ENGINE, "", "fast"),
    ],
)
def test_values_are_parsed(
    setting: settings.Setting[Any], text: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting.name, text)
    assert setting.get() == value
    assert setting.is_set() == bool(text.strip())


BAD = [
    *((settings.HCCL_BUFFSIZE, text) for text in ("0", "-1", "65536", "1.5", "2e2", "0x10", "1_0", "२")),
    *((settings.REGISTERED_MIB, text) for text in ("-1", "0.5", "65536", "many")),
    *((settings.TIMEOUT_S, text) for text in ("0", "-3", "nan", "inf", "soon")),
    *((settings.AIV_CORES, "65"), (settings.RANKS_PER_SERVER, "-1"), (settings.RDMA_FLAGS, "yes")),
    *((settings.CONTEXT, "a4"), (settings.ISA, "foo"), (settings.FORWARD, "2")),
]


@pytest.mark.parametrize("setting, text", BAD)
def test_bad_values_are_refused_by_name(
    setting: settings.Setting[Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting.name, text)
    with pytest.raises(ArgumentError) as raised:
        setting.get()
    assert str(raised.value) == f"{setting.name}={text} must be {setting.rule}"
    assert raised.value.argument == setting.name
    with pytest.raises(ArgumentError, match=f"^window_mib={re.escape(text)} must be") as raised:
        setting.value_of(text, "window_mib")
    assert raised.value.argument == "window_mib"
    monkeypatch.setenv(settings.ENGINE.name, "quick")
    with pytest.raises(LibraryError, match="ASCEND_MOE_ENGINE=quick is no engine: set it to one of fast, ch"):
        settings.ENGINE.get()


def test_a_setting_is_back_after_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("7", ""):
        monkeypatch.setenv(settings.TIMEOUT_S.name, before)
        for within in ("9", ""):
            with settings.TIMEOUT_S.within(within):
                assert settings.TIMEOUT_S.text() == (within or before)
            assert settings.TIMEOUT_S.text() == before


def test_every_setting_is_in_the_table() -> None:
    defined = {value.name for value in vars(settings).values() if isinstance(value, settings.Setting)}
    assert defined == settings.NAMES
    for group in settings.TABLE.values():
        for setting in group:
            assert setting.help and "\n" not in setting.help and setting.shown and setting.rule, setting
