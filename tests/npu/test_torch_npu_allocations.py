"""Our sizes and dtypes against what the C++ of the torch_npu 2.13.0 wheel allocates when it is run.

The C++ runs on the virtual NPU, with a libopapi whose functions do nothing (`opapi_standin`).
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from pathlib import Path
from typing import Any

import opapi_standin
import pytest
from torch_npu_cases import matrix
from vnpu_process import report_of

from ascend_moe.ops.schemas import SCHEMAS
from ascend_moe.vendor.schemas import VENDOR_SCHEMAS

pytestmark = pytest.mark.npu

NAMES = [*SCHEMAS, *VENDOR_SCHEMAS]
CASES = Counter(case.op for case in matrix())
CHILD = Path(__file__).with_name("torch_npu_allocations.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the process with torch_npu found. It fails, and never skips, without the wheel."""
    from ascend_moe import vnpu

    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None and spec.origin is not None, "torch_npu is not installed beside these tests"
    folder = tmp_path_factory.mktemp("allocations")
    environment = vnpu.environment()
    path = [str(opapi_standin.build(Path(spec.origin).parent, folder)), environment["LD_LIBRARY_PATH"]]
    target = folder / "report.json"
    return report_of(CHILD, target, {"LD_LIBRARY_PATH": os.pathsep.join(path)})


def outputs(report: dict[str, Any], probe: str, side: str = "cpp") -> list[list[Any]]:
    """[dtype, *shape] of every output."""
    found: list[list[Any]] = report["probes"][probe][side]["outputs"]
    return found


def agrees(case: dict[str, Any]) -> bool:
    cpp, ours = case["cpp"], case["ours"]
    if "raised" in ours:  # as torch_npu's Meta kernel; the C++ leaves many checks to aclnn
        return not case["refuses"]
    if case["refuses"]:
        return "raised" in cpp
    return cpp.get("outputs") == ours["outputs"] and cpp["devices"] == ["npu:0"]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_what_the_wheels_cpp_allocates(report: dict[str, Any], name: str) -> None:
    cases = [case for case in report["cases"] if case["op"] == name]
    assert len(cases) == CASES[name] >= 4
    wrong = [case for case in cases if not agrees(case)]
    assert not wrong, f"{len(wrong)} of {len(cases)}: {wrong[:3]}"
    assert any("outputs" in case["cpp"] for case in cases)


def test_only_float32_rows_go_beyond_torch_npu(report: dict[str, Any]) -> None:
    beyond = {(case["op"], case["refuses"]) for case in report["cases"] if case["refuses"]}
    assert {reason for _, reason in beyond} == {"float32 rows"}
    assert all(op.startswith("npu_moe_distribute_combine") for op, _ in beyond)


# ---- the contradictions of `torch_npu_contradictions`, seen from the C++

SAME = ("a", "a_v2", "b", "b_v2", "c", "c_fp16", "c_v2", "d", "e", "f", "j", "k", "l", "l_scales", "l_four")


@pytest.mark.parametrize("probe", [*SAME, "n_list", "p", "q", "s", "u", "w"])
def test_where_torch_npu_contradicts_itself_ours_is_its_cpp(report: dict[str, Any], probe: str) -> None:
    assert outputs(report, probe) == outputs(report, probe, "ours")


def test_contradiction_g_the_cpp_of_v1_takes_any_rank_too(report: dict[str, Any]) -> None:
    assert outputs(report, "g")[0] == ["bfloat16", 96, 64]
    for side in ("cpp", "ours"):
        assert "ep_rank_id" in report["probes"]["g_v2"][side]["raised"]


def test_contradiction_n_the_cpp_wants_a_group_type_too(report: dict[str, Any]) -> None:
    for probe in ("n", "n_tensor"):
        assert "Requires manual passing group_type" in report["probes"][probe]["cpp"]["raised"]


def test_contradiction_p_the_cpp_reads_the_group_list(report: dict[str, Any]) -> None:
    assert len(outputs(report, "p_tensor")) == 2


def test_contradiction_v_the_first_call_decides(report: dict[str, Any]) -> None:
    """All calls before had 16 experts; the range of active experts is kept from the first."""
    assert report["first call"] == [[16, 9], [16, 5], [16, 12]]
    assert outputs(report, "t")[2] == ["int64", 16] and outputs(report, "t", "ours")[2] == ["int64", 4]
