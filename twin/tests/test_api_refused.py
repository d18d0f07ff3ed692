"""Checks what the twin's API refuses to compile, its table of names, controls of the engines behind other tests."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
from twin_calls import clean, library, run
from twin_oracle import INCLUDE, TWIN, syntax_errors

from ascendc_twin.compiling import vendor_headers_directory

PRELUDE = """
#include "kernel_operator.h"
using namespace AscendC;
void Kernel() {
    TPipe pipe;
    TBuf<> buf;
    pipe.InitBuffer(buf, 1024);
    LocalTensor<float> f = buf.Get<float>();
    LocalTensor<half> h = buf.Get<half>();
    LocalTensor<bfloat16_t> bf = buf.Get<bfloat16_t>();
    LocalTensor<int8_t> i1 = buf.Get<int8_t>();
    LocalTensor<uint8_t> u1 = buf.Get<uint8_t>();
    LocalTensor<int16_t> i2 = buf.Get<int16_t>();
    LocalTensor<uint16_t> u2 = buf.Get<uint16_t>();
    LocalTensor<int32_t> i4 = buf.Get<int32_t>();
    LocalTensor<uint32_t> u4 = buf.Get<uint32_t>();
    uint64_t bits[2] = {1, 0}, kept = 0;
    (void)bits, (void)kept;
    (void)f, (void)h, (void)bf, (void)i1, (void)u1, (void)i2, (void)u2, (void)i4, (void)u4;
"""
LEGAL = """
    Cast(h, f, RoundMode::CAST_RINT, 8);
    Duplicate(bf, bfloat16_t(), 16);
    PipeBarrier<PIPE_V>();
    SetAtomicAdd<float>();
    (void)(Cast<float, int32_t, RoundMode::CAST_CEIL>(1.5f) + Cast(Cast(1.5f)));
    static_assert(AlignUp(33, 32) == 64 && DivCeil(33, 32) == 2);
    (void)(ToFloat(ToBfloat16(1.5f)) + ScalarGetSFFValue<1>(8));
}
"""

# Call -> what the compiler must say.
REFUSED = {
    # element types that A2/A3 do not have
    "Add(bf, bf, bf, 8);": "Add: element type",
    "Div(i4, i4, i4, 8);": "Div: element type",
    "Abs(i4, i4, 8);": "Abs: element type",
    "Sqrt(i4, i4, bits, 1, {1, 1, 8, 8});": "Sqrt: element type",
    "And(i4, i4, i4, 8);": "And: element type",
    "Not(u4, u4, 8);": "Not: element type",
    "AddRelu(i4, i4, i4, 8);": "AddRelu: element type",
    "FusedMulAdd(i4, i4, i4, 8);": "FusedMulAdd: half and float only",
    "Axpy(h, f, 1.0f, 8);": "Axpy: (half, half)",
    "MulAddDst(i4, i4, i4, 8);": "MulAddDst: (half, half)",
    "Duplicate(i1, static_cast<int8_t>(1), 8);": "Duplicate: 16- and 32-bit",
    "Copy(u1, u1, 8, 1, {1, 1, 8, 8});": "Copy: 16- and 32-bit",
    "Brcb(u1, u1, 1, {1, 8});": "Brcb: 16- and 32-bit",
    "Cast(i1, f, RoundMode::CAST_RINT, 8);": "Cast: no such conversion",
    "PipeBarrier<PIPE_S>();": "PipeBarrier",
    "(void)(bf.GetValue(0) + bf.GetValue(1));": "no match for",
    "(void)(bf.GetValue(0) < bf.GetValue(1));": "no match for",
    "bfloat16_t x = 1.0f;": "conversion from",
    "float x = bf.GetValue(0);": "cannot convert",
    "(void)static_cast<bfloat16_t>(h.GetValue(0));": "bfloat16_t",
    "(void)static_cast<half>(bf.GetValue(0));": "half",
    "ReduceSum(i4, i4, i4, 8);": "ReduceSum: half and float only",
    "ReduceMax(i4, i4, i4, 8);": "half and float only",
    "WholeReduceSum(i4, i4, 8, 1, 1, 1, 8);": "half and float only",
    "Sum(i4, i4, u1, SumParams{1, 8, 8});": "Sum: half and float only",
    "Compare(u1, u4, u4, CMPMODE::EQ, 64);": "half, float, or int32_t",
    "Compare(u2, f, f, CMPMODE::EQ, 64);": "int8_t or uint8_t",
    "Select(i4, u1, i4, i4, SELMODE::VSEL_CMPMASK_SPR, 64);": "Select: half and float only",
    "Select(f, i1, f, f, SELMODE::VSEL_CMPMASK_SPR, 64);": "mask tensor's type is unsigned",
    "GatherMask(f, f, u2, true, 8, {1, 1, 8, 8}, kept);": "uint16_t for 16-bit elements",
    "GatherMask(u1, u1, static_cast<uint8_t>(1), false, 0, {1, 1, 8, 8}, kept);": "16- and 32-bit",
    "Gather(u1, u1, u4, 0, 8);": "Gather: 16- and 32-bit",
    "Gatherb(f, f, u4, 1, {1, 8});": "Gatherb: uint16_t and uint32_t only",
    "CreateVecIndex(u4, 0u, 8);": "half, float, int16_t, int32_t",
    "Sort32(i4, i4, u4, 1);": "half and float only",
    "Extract(i4, u4, i4, 1);": "Extract: half and float only",
    "SetAtomicAdd<uint32_t>();": "SetAtomicAdd",
    # scalars of another type, argument lists that no form has
    "Adds(f, f, 1, 8);": "Adds",
    "Duplicate(f, 1, 8);": "Duplicate",
    "Add<float, false>(f, f, f, 8);": "Add",
    "Add(f, h, h, 8);": "Add",
    "ShiftRight(i4, i4, 1, 8, true, 1);": "ShiftRight",
    "CreateVecIndex(buf.Get<float>(), 0.0f, 8, 1, 1, 8);": "CreateVecIndex",
    # other names: test_vendor_table.py has those that are refused by name
    "MicroAPI::RegTensor<float> reg;": "RegTensor: the emulator does not model it",
    "LocalTensor<int4b_t> i;": "int4b_t: the emulator does not model it",
    "GlobalTensor<int4b_t> i;": "int4b_t: the emulator does not model it",
    "NoSuchCall(f);": "NoSuchCall",
    # template arguments out of range
    "CrossCoreSetFlag<3, PIPE_MTE3>(0);": "modes 0, 1 and 2",
    "CrossCoreSetFlag<0, PIPE_ALL>(0);": "PIPE_V, PIPE_MTE2 or PIPE_MTE3",
    "TQue<TPosition::VECIN, 1>().EnQue<TPosition::GM, TPosition::VECIN>(f);": "does not model it with two",
    "(void)ScalarGetSFFValue<2>(1);": "looks for 0 or 1",
    "(void)ScalarCast<float, int32_t, RoundMode::CAST_TRUNC>(1.0f);": "ScalarCast",
    "SetPadValue<half, TPosition::VECCALC>(half(0));": "VECIN, VECOUT or MAX",
    "Select<float, SELMODE::VSEL_TENSOR_TENSOR_MODE>(f, f, f, 1, {});": "VSEL_CMPMASK_SPR only",
    "ReducePairElem<ReduceType::MAX>(f, f, 8, 1, 1, 1, 8);": "SUM only",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Returns what the compiler says about each call. All are in one file; each pretends to be a file of its own."""
    head, body = PRELUDE.split("void Kernel() {")
    functions = [f"void Legal() {{{body}\n{LEGAL}"]
    for i, call in enumerate(REFUSED):
        functions.append(f'void Kernel{i}() {{{body}\n#line 1 "call_{i}"\n{call}\n}}\n')
    texts: dict[int, str] = {}
    current = -1
    for line in syntax_errors(head + "".join(functions), tmp_path_factory.mktemp("refused")).splitlines():
        named = re.match(r"(?:In file included from )?call_(\d+):1", line)
        current = int(named[1]) if named else current
        texts[current] = texts.get(current, "") + line + "\n"
    return texts


@pytest.mark.parametrize("which", range(len(REFUSED)), ids=list(REFUSED))
def test_refused_by_name(which: int, said: dict[int, str]) -> None:
    call, wanted = list(REFUSED.items())[which]
    assert "error: " in said.get(which, "") and wanted in said[which], call


def test_what_surrounds_the_refused_calls_compiles(tmp_path: Path) -> None:
    assert syntax_errors(PRELUDE + LEGAL, tmp_path) == ""


# ---- include names of other people's kernels ----


VENDOR = vendor_headers_directory()
NAMES = sorted(
    path.relative_to(VENDOR).as_posix()
    for path in VENDOR.rglob("*.h")
    if "#error" not in path.read_text() and path.name != "template_argument.h"
)
ALONE = random.Random(1).sample(NAMES, 40)


@pytest.mark.parametrize("names", [NAMES, *(pytest.param([name], marks=pytest.mark.nightly) for name in ALONE)])
def test_vendor_headers_forward(names: list[str], tmp_path: Path) -> None:
    """Every name of the table compiles, all in one file and some alone, and declares its part of the API."""
    code = "".join(f'#include "{name}"\n' for name in names) + "using Tensor = AscendC::LocalTensor<float>;\n"
    if any("hccl" in name for name in names):
        code += "using Server = AscendC::Hccl<>;\n"
    if len(names) > 1:
        assert len(names) > 30 and {"basic_api/kernel_tensor.h", "lib/sort/sort.h", "kernel_tpipe.h"} < {*names}
        code += """#include "kernel_tiling/kernel_tiling.h"
        struct Tiling { Mc2InitTiling init; Mc2CcTiling cc; AscendC::tiling::Mc2CcTiling more; uint64_t n; };
        static_assert(sizeof(Mc2InitTiling) == 64 && sizeof(Mc2CcTiling) == 280 && sizeof(Tiling) == 632);
        """
    assert syntax_errors(code, tmp_path, "-I", str(VENDOR)) == ""


# ---- the table of supported calls ----


def listed(section: str) -> list[str]:
    """The names in backquotes in the tables of one section of the twin's README."""
    text = (TWIN / "README.md").read_text()
    part = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert part is not None, section
    rows = [line for line in part[1].splitlines() if line.startswith("|")]
    return re.findall(r"`(\w+)`", "\n".join(row.split("|")[2] for row in rows))


HEADERS = "\n".join(path.read_text() for path in sorted(INCLUDE.rglob("*.h")))


def test_supported_calls_exist() -> None:
    names = listed("Calls")
    assert len(names) > 150
    missing = [name for name in names if not re.search(rf"[\s(,:]{name}[\s(<,){{]", HEADERS)]
    assert missing == []


# ---- the audit ----


@pytest.mark.parametrize(
    ("which", "finding"),
    [
        (0, ""),
        (1, "writes what it does not declare"),
        (2, "declares a write that it does not make"),
        (3, "depends on what it does not declare"),
    ],
)
def test_the_audit_finds_wrong_declarations(which: int, finding: str) -> None:
    if which == 0:
        clean("sorting", "canary", [0])
        return
    with pytest.raises(AssertionError, match=finding):
        run("sorting", "canary", [which])
    library("sorting", "audit").audit_clear()


# ---- one call, one instruction ----


def test_a_call_of_uneven_repeats_is_one_instruction() -> None:
    """Each repeat reads what the one before has written: no hazard within the call."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-50, 50, 2048).astype(np.float32) for _ in range(2))
    blocks = b.reshape(-1, 8)
    want = a[:64].copy()
    for repeat in range(3):
        want += blocks[17 * repeat : 17 * repeat + 16 : 2].ravel()
    for engine in ("audit", "checked", "fast"):
        got = clean("sorting", "chain", [], a, b, engine=engine)
        assert np.array_equal(got.view(np.float32)[:64], want), engine
    assert sum(line.startswith("Add ") for line in run("sorting", "chain", [], a, b).log) == 1
