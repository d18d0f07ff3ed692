"""Building kernels: what is exported, cached and refused; the command line; calls that do not fit."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from third_party_runs import HALF, Swap, kernels, tiling
from twin_oracle import TWIN, compiler
from typer.testing import CliRunner

import ascendc_twin
from ascendc_twin.cli import app
from ascendc_twin.entries import find_entries
from ascendc_twin.errors import ArgumentError, LibraryError, TwinBuildError, TwinFault

# `ascendc_twin.build` is the function; this is its module.
build_module = importlib.import_module("ascendc_twin.compiling")

COUNT = """
#include "kernel_operator.h"
{body}
extern "C" __global__ __aicore__ void {name}(GM_ADDR out, int32_t step, GM_ADDR tiling) {{
    GET_TILING_DATA_WITH_STRUCT(uint64_t, first, tiling);
    const int64_t core = AscendC::GetBlockIdx();
    ((__gm__ int64_t*)out)[core] = static_cast<int64_t>(first) + core * step;
}}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, which shares the compiled runtime with the session's."""
    compiler()
    build_module.runtime_objects("fast")
    monkeypatch.setenv("ASCENDC_TWIN_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"


def source(folder: Path, name: str = "count", body: str = "") -> Path:
    path = folder / f"{name}.cpp"
    path.write_text(COUNT.format(name=name, body=body))
    return path


# ---- entries ----


def test_entries_are_found_with_their_parameters() -> None:
    text = """
    template <class T> __twin_entry__ void no(unsigned char* x);
    extern "C" __twin_entry__ void declared(uint8_t* x);
    extern "C" __twin_entry__ __attribute__((aligned(8))) void first(uint8_t* x, const uint8_t *y, int n) {
    extern "C" { __twin_entry__ void second(void) { } }
    __twin_entry__ void third(uint8_t* x, uint8_t* y, float scale) { }
    __twin_entry__ void fourth(uint8_t* x, uint8_t* y, const uint8_t* z, uint64_t n) { }
    """
    found = find_entries(text)
    symbols = {"first": "first", "second": "second", "third": "", "fourth": "_Z6fourthPhS_PKhm"}
    assert {entry.name: entry.symbol for entry in found} == symbols
    kinds = [(parameter.name, parameter.kind) for parameter in found[0].parameters]
    assert kinds == [("x", "pointer"), ("y", "pointer"), ("n", "integer")]
    assert found[2].parameters[2].kind == "other"


# ---- build and cache ----


def test_a_second_build_compiles_nothing_and_a_changed_header_builds_anew(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The entry is one of C++, with a mangled name. Lines say that it is compiled where that takes long, else none."""
    header = tmp_path / "step.h"
    path = source(tmp_path, body='#include "step.h"')
    text = path.read_text().replace("static_cast<int64_t>(first)", "kFirst")
    path.write_text(text.replace('extern "C"', ""))
    for first, patience in ((1, 0.0), (7, 600.0)):
        monkeypatch.setattr(build_module, "PATIENCE", patience)
        header.write_text(f"constexpr int64_t kFirst = {first};\n")
        out = np.zeros(2, np.int64)
        ascendc_twin.load(path, includes=[tmp_path]).launch("count", [out, 1], tiling(0, 0), 2)
        assert out.tolist() == [first, first + 1]
    assert [text.partition(" engine")[0] for text in caplog.messages] == [
        f"ascendc_twin: {word} count.cpp for the fast" for word in ("compiles", "compiled")
    ]
    monkeypatch.setattr(build_module, "_compile", lambda *_: pytest.fail("compiled again"))
    assert ascendc_twin.build(path, includes=[tmp_path]).is_relative_to(cache)
    for other in ({"defines": ["SOMETHING=1"]}, {"debug": True}):
        with pytest.raises(pytest.fail.Exception):
            ascendc_twin.build(path, includes=[tmp_path], **other)


def test_several_sources_make_one_library(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "link.so").symlink_to("elsewhere")
    (tmp_path / "k.checked.so").symlink_to("elsewhere")
    for name in ("link.so", "k.so"):
        with pytest.raises(ArgumentError, match=r"output .* is a link or no regular file, and is not replaced"):
            ascendc_twin.build(source(tmp_path, "one"), output=tmp_path / name, engine="both")
    library = ascendc_twin.build([source(tmp_path, "one"), source(tmp_path, "two")], output=tmp_path / "out" / "k.so")
    assert library == tmp_path / "out" / "k.so"
    opened = ascendc_twin.load(library)
    assert opened.names == ["one", "two"]
    assert opened.parameters("two") == ["out", "step", "tiling"]
    exported = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in exported.splitlines()}
    assert {"one", "two"} <= names
    assert all(name.startswith("twin_") for name in names - {"one", "two"}), names
    with pytest.raises(ArgumentError, match="no library of the checked engine next to it"):
        opened.launch("one", [np.zeros(1, np.int64), 1], tiling(0, 0), mode="checked")


@pytest.mark.parametrize(
    "call,said",
    [
        ("AscendC::Frobnicate(1);", "Frobnicate"),
        ("KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);", "vector cores only"),
        ("GET_TILING_DATA(data, tiling);", "REGISTER_TILING_DEFAULT"),
    ],
)
def test_what_the_twin_does_not_know_is_named(cache: Path, tmp_path: Path, call: str, said: str) -> None:
    path = source(tmp_path)
    path.write_text(path.read_text().replace("    GET_TILING", f"    {call}\n    GET_TILING"))
    with pytest.raises(TwinBuildError, match=said) as caught:
        ascendc_twin.build(path)
    first = str(caught.value).splitlines()[0]
    assert first.startswith("count.cpp does not compile:") and "error:" in first
    assert caught.value.source == str(path)


def test_what_is_no_source_or_no_library_is_refused(cache: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "none.cpp", tmp_path / "no.so"
    path.write_text('#include "kernel_operator.h"\nvoid helper() {}\n')
    other.write_bytes(b"no library")
    torch_library = Path(torch.__file__).parent / "lib" / "libshm.so"
    for error, said, call in [
        (TwinBuildError, "no kernel entry", lambda: ascendc_twin.build(path)),
        (ArgumentError, r"there is no source .*absent\.cpp", lambda: ascendc_twin.build(tmp_path / "absent.cpp")),
        (ArgumentError, "engine is fast, checked, timed or both", lambda: ascendc_twin.build(path, engine="slow")),
        (LibraryError, "cannot be loaded", lambda: ascendc_twin.load(other)),
        (ArgumentError, "engine is one of fast, checked, timed", lambda: ascendc_twin.load(path, engine="slow")),
        (ArgumentError, "there is no library", lambda: ascendc_twin.load(tmp_path / "absent.so")),
        (LibraryError, "has no function twin_abi: build it with", lambda: ascendc_twin.load(torch_library)),
    ]:
        with pytest.raises(error, match=said):
            call()


@pytest.mark.nightly
def test_the_command_builds_and_lists(tmp_path: Path) -> None:
    path, library = source(tmp_path), tmp_path / "c.so"
    build = ["build", str(path), "-D", "UNUSED=1", "-I", str(tmp_path), "-o", str(library)]
    made = CliRunner().invoke(app, build)
    assert made.exit_code == 0, made.output
    assert made.output.splitlines() == [str(library), "  count(out, step, tiling)"]
    out = np.zeros(2, np.int64)
    for mode in ("fast", "checked"):
        ascendc_twin.load(library).launch("count", [out, 5], tiling(1, 0), 2, mode=mode)
        assert out.tolist() == [1, 6]
        out[:] = 0
    path.write_text(path.read_text().replace("GetBlockIdx", "GetBlockIndex"))
    made = CliRunner().invoke(app, build)
    assert made.exit_code == 1
    assert "GetBlockIndex" in made.output and "error:" in made.output


# ---- calls ----


def test_tiling_of_every_kind_is_the_same_bytes() -> None:
    add, packed, words = kernels("add_custom", HALF), tiling(64, 32), np.array([64, 32], np.uint32)
    kinds = [packed, bytearray(packed), words, (ctypes.c_uint32 * 2)(64, 32), torch.from_numpy(words.view("u1"))]
    for data in kinds:
        x = np.ones(64, np.float16)
        add.launch("add_custom", [x, x, x, None], data, 2, 1)
        assert (x == 2).all()


def test_calls_that_do_not_fit_the_entry() -> None:
    add, x = kernels("add_custom", HALF), np.ones(64, np.float16)
    good, data, two = [x, x, x, None], tiling(64, 32), ascendc_twin.Windows(2)
    strided, transposed = np.ones((8, 16), np.float16)[:, ::2], torch.ones(8, 16).half().t()
    for said, args, *call in (
        (r"add_custom\(x, y, z, workspace, tiling\) takes 5 arguments, 3 args", good[:3], data, 2),
        (r"arg 1 \(y\) is not contiguous", [x, strided, x, None], data, 2),
        (r"arg 1 \(y\) is not a contiguous CPU tensor", [x, transposed, x, None], data, 2),
        (r"arg 2 \(z\) is a float", [x, x, 1.5, None], data, 2),
        (r"arg 1 \(y\) overlaps arg 0 \(x\) in part", [x[:48], x[16:], x[:48], None], data, 2),
        ("tiling is a list", good, [64, 32], 2),
        ("block_dim is 65", good, data, 65),
        ("with windows of 2 ranks, args is a list of 2 lists", good, data, 2, 1, two),
        ("3 tilings for 2 ranks", [good, good], [data] * 3, 2, 1, two),
    ):
        with pytest.raises(ArgumentError, match=said):
            add.launch("add_custom", args, *call)
    with pytest.raises(ArgumentError, match=r"no kernel 'sub_custom'; it has add_custom"):
        add.launch("sub_custom", good, data, 2, 1)
    with pytest.raises(ArgumentError, match=r"mode is one of fast, checked, timed, not .slow."):
        add.launch("add_custom", good, data, 2, 1, mode="slow")
    assert (x == 1).all()


def test_faults_name_kernel_rank_finding_and_argument() -> None:
    x = np.ones(64, np.float16)
    with pytest.raises(TwinFault) as caught:
        kernels("add_custom", HALF).launch("add_custom", [x, x[:40].copy(), x, None], tiling(64, 64), 1, 1)
    fault = caught.value
    assert (fault.kernel, fault.rank, fault.finding) == ("add_custom", 0, "out of bounds")
    assert str(fault) == (
        'add_custom: out of bounds: 128 bytes at byte 0 of GM "arg 1 (y)", which has 80, at add_custom.cpp:50'
        " (rank 0, core 0)"
    )


def test_a_rank_that_fails_ends_the_others() -> None:
    """Rank 1 has fewer rows than its tiling says; rank 0 waits for its flags."""
    swap, windows = Swap(2, 2, 480, np.uint8), ascendc_twin.Windows(2, data_bytes=4096, flags_in_data=True)
    swap.args[1][0] = swap.args[1][0][:1]
    call = (swap.args, swap.chunk_tilings(), 2, 0, windows)
    with pytest.raises(TwinFault, match=r"out of bounds: .* \"arg 0 \(x\)\", .*\(rank 1") as caught:
        kernels("chunk_exchange").launch("chunk_exchange", *call, timeout_s=20)
    assert caught.value.rank == 1


# ---- the README's example


@pytest.mark.nightly
def test_the_example_of_the_readme(tmp_path: Path) -> None:
    compiler()
    kernel, program, printed = re.findall(r"```(?:cpp|python|)\n(.*?)```", (TWIN / "README.md").read_text(), re.DOTALL)[
        :3
    ]
    (tmp_path / "add.cpp").write_text(kernel)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert done.stdout == printed
    fixed = kernel.replace("    DataCopy(out", "    PipeBarrier<PIPE_ALL>();\n    DataCopy(out")
    (tmp_path / "add.cpp").write_text(fixed)
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert "no finding" in done.stdout
