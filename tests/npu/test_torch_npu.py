"""Schemas, sizes and dtypes against those of the torch_npu 2.13.0 wheel: its Meta kernels and its C++.

One process answers all questions (`torch_npu_child`), on the virtual NPU with a libopapi whose functions do
nothing. Where torch_npu contradicts itself, ours follows its C++ (`torch_npu_cases.PROBES`).
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import Once
from torch_npu_cases import PROBES, Answer, matrix
from vnpu_process import HERE, run

from ascend_moe import vnpu
from ascend_moe.ops.schemas import ABSENT, SCHEMAS, VENDOR_SCHEMAS

pytestmark = pytest.mark.npu

NAMES = [*SCHEMAS, *VENDOR_SCHEMAS]
CASES = Counter(case.op for case in matrix())


def build_opapi(folder: str) -> None:
    """A libopapi.so whose every function does nothing and returns 0, of the names torch_npu looks up."""
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None and spec.origin is not None, "torch_npu is not installed beside these tests"
    text = (Path(spec.origin).parent / "lib" / "libtorch_npu.so").read_bytes()
    operators = {name.decode() for name in re.findall(rb"\0(aclnn[A-Z]\w+)(?=\0)", text)}
    operators = {name.removesuffix("GetWorkspaceSize") for name in operators}
    assert len(operators) > 500
    kinds = ("Tensor", "Scalar", "TensorList", "ScalarList", "IntArray", "BoolArray", "FloatArray")
    names = {f"acl{verb}{kind}" for verb in ("Create", "Destroy") for kind in (*kinds, "AclOpExecutor")}
    names |= operators | {f"{name}GetWorkspaceSize" for name in operators}
    source = Path(folder, "standin.c")
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names)))
    target = str(source.with_name("libopapi.so"))
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O0", str(source), "-o", target], check=True)


def ask() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        build_opapi(folder)
        path = os.pathsep.join([folder, vnpu.environment()["LD_LIBRARY_PATH"]])
        return run(HERE / "torch_npu_child.py", env={"LD_LIBRARY_PATH": path}).last_lines()[0]


@pytest.fixture(scope="module")
def report(once: Once) -> Any:
    return once("torch_npu", ask)


def test_the_wheel_is_the_one_compared_with(report: Any) -> None:
    assert [version.partition("+")[0] for version in report["versions"]] == ["2.13.0"] * 2


# ---- schemas


@pytest.mark.parametrize("name", NAMES)
def test_schema_is_the_wheels(report: Any, name: str) -> None:
    theirs, ours = report["schemas"][name]
    assert theirs.startswith(f"npu::{name}(") and ours == f"ascend_moe::{theirs.removeprefix('npu::')}"


def test_operators_and_overloads_are_the_wheels(report: Any) -> None:
    spaces = [{name.partition("::")[2] for name in report["all"] if name.startswith(f"{space}::")}
              for space in ("npu", "ascend_moe")]  # fmt: skip
    theirs, ours = spaces
    family = {name for name in theirs if name.startswith(("npu_moe_distribute", "_npu_distribute"))}
    assert len(family) == 6 and family <= ours
    assert {name.partition(".")[0] for name in NAMES} == ours <= theirs
    assert report["present"] == [] and len(ABSENT) == 4 and not ours & set(ABSENT)
    for name, (their, our) in report["overloads"].items():
        assert their == our and "default" in our
        assert {f"{name}.{one}" if one != "default" else name for one in our} <= set(NAMES)


# ---- sizes and dtypes of outputs


def differences(answers: dict[str, Any]) -> set[int]:
    """Indices of outputs that differ in dtype or shape; -1 where one side raised, -2 for another number."""
    theirs, ours = answers["theirs"], answers["ours"]
    if "raised" in theirs or "raised" in ours:
        return set() if "raised" in theirs and "raised" in ours else {-1}
    if len(theirs["outputs"]) != len(ours["outputs"]):
        return {-2}
    assert theirs["devices"] == ours["devices"]
    pairs = enumerate(zip(theirs["outputs"], ours["outputs"], strict=True))
    return {index for index, (one, other) in pairs if one != other}


def agrees(case: dict[str, Any], side: str) -> bool:
    """Ours with torch_npu's Meta kernel, but for the known contradictions, or with its C++."""
    if side != "cpp":
        return differences(case[side]) == {int(index) for index in case["known"]}
    cpp, ours = case["cpp"], case["meta"]["ours"]
    if "raised" in ours:  # as torch_npu's Meta kernel; the C++ leaves many checks to aclnn
        return not case["refuses"]
    if case["refuses"]:
        return "raised" in cpp
    return cpp.get("outputs") == ours["outputs"] and cpp["devices"] == ["npu:0"]


@pytest.mark.parametrize("side", ["meta", "fake", "cpp"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_the_wheels(report: Any, name: str, side: str) -> None:
    cases = [case for case in report["cases"] if case["op"] == name]
    assert len(cases) == CASES[name] >= 4
    wrong = [(case["call"], case["known"], case[side]) for case in cases if not agrees(case, side)]
    assert not wrong, f"{len(wrong)} of {len(cases)}: {wrong[:3]}"
    assert any("outputs" in case["meta"]["ours"] and "outputs" in case["cpp"] for case in cases)


def test_what_differs_from_the_wheel_is_known(report: Any) -> None:
    """Contradictions of its Meta kernels, and float32 rows, which its combine does not take."""
    assert {letter for case in report["cases"] for letter in case["known"].values()} == set("astuw")
    beyond = {(case["op"], case["refuses"]) for case in report["cases"] if case["refuses"]}
    assert {reason for _, reason in beyond} == {"float32 rows"}
    assert all(op.startswith("npu_moe_distribute_combine") for op, _ in beyond)


def test_ours_names_the_operator_and_the_argument(report: Any) -> None:
    for case in [*report["cases"], *report["probes"].values()]:
        raised = case["meta"]["ours"].get("raised")
        if raised:
            assert raised.startswith(f"ArgumentError: {case['op'].partition('.')[0]}: "), raised


def matches(found: dict[str, Any], wanted: Answer) -> bool:
    if isinstance(wanted, str):
        return wanted in found.get("raised", "")
    outputs = found.get("outputs")
    if outputs is None or isinstance(wanted, list):
        return outputs == wanted
    return all(outputs[index] == output for index, output in wanted.items())


@pytest.mark.parametrize("name", PROBES)
def test_where_torch_npu_contradicts_itself(report: Any, name: str) -> None:
    probe, found = PROBES[name], report["probes"][name]
    theirs, ours, cpp = found["meta"]["theirs"], found["meta"]["ours"], found["cpp"]
    assert matches(theirs, probe.theirs), f"{probe.why}: {theirs}"
    assert matches(ours, probe.ours), f"{probe.why}: {ours}"
    if probe.cpp is not None:
        assert matches(cpp, probe.cpp), f"{probe.why}: {cpp}"
    elif name != "r":
        assert cpp["outputs"] == ours["outputs"], probe.why


def test_its_meta_kernel_prints_and_its_cpp_keeps_its_first_calls_experts(report: Any) -> None:
    answers = report["probes"]["r"]["meta"]
    assert answers["theirs"]["printed"] == "None\n" and answers["ours"]["printed"] == ""
    sizes = [
        (case["cpp"]["outputs"][2][1], case["meta"]["ours"]["outputs"][2][1])
        for case in report["expert tokens"]
    ]
    first = sizes[0][0]
    assert sizes == [(first, 9), (first, 5), (first, 12)]
    assert len(report["probes"]["p_tensor"]["cpp"]["outputs"]) == 2
