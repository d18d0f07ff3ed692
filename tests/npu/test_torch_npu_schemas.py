"""Schemas and Meta kernels against those of the torch_npu 2.13.0 wheel, asked in a process of its own.

One process answers all questions (`torch_npu_child`), on the virtual NPU, so that the wheel can be imported
without CANN. Where torch_npu contradicts itself, ours follows its C++ (`torch_npu_contradictions`).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch_npu_cases import matrix
from torch_npu_contradictions import CONTRADICTIONS, PROBES
from vnpu_process import report_of

from ascend_moe.ops.schemas import SCHEMAS
from ascend_moe.vendor.schemas import ABSENT, VENDOR_SCHEMAS

pytestmark = pytest.mark.npu

NAMES = [*SCHEMAS, *VENDOR_SCHEMAS]
CASES = Counter(case.op for case in matrix())
CHILD = Path(__file__).with_name("torch_npu_child.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the process with torch_npu found. It fails, and never skips, without the wheel."""
    target = tmp_path_factory.mktemp("torch_npu") / "report.json"
    return report_of(CHILD, target)


def test_the_wheel_is_the_one_compared_with(report: dict[str, Any]) -> None:
    assert report["version"].partition("+")[0] == "2.13.0" == report["torch"].partition("+")[0]


# ---- schemas


@pytest.mark.parametrize("name", NAMES)
def test_schema_is_the_wheels(report: dict[str, Any], name: str) -> None:
    theirs, ours = report["schemas"][name]
    assert theirs.startswith(f"npu::{name}(") and ours == f"ascend_moe::{theirs.removeprefix('npu::')}"


@pytest.mark.parametrize("name", sorted({name.partition(".")[0] for name in NAMES}))
def test_overloads_are_the_wheels(report: dict[str, Any], name: str) -> None:
    theirs, ours = report["overloads"][name]
    assert theirs == ours and "default" in ours
    assert {f"{name}.{one}" if one != "default" else name for one in ours} <= set(NAMES)


def test_no_operator_of_the_family_is_missing(report: dict[str, Any]) -> None:
    theirs = {name.removeprefix("npu::") for name in report["all"] if name.startswith("npu::")}
    ours = {name.removeprefix("ascend_moe::") for name in report["all"] if name.startswith("ascend_moe::")}
    family = {name for name in theirs if name.startswith(("npu_moe_distribute", "_npu_distribute"))}
    assert len(family) == 6 and family <= ours
    assert {name.partition(".")[0] for name in NAMES} == ours <= theirs


# ---- Meta and FakeTensor


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


@pytest.mark.parametrize("mode", ["meta", "fake", "fake npu"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_the_wheels(report: dict[str, Any], name: str, mode: str) -> None:
    cases = [case for case in report["cases"] if case["op"] == name]
    assert len(cases) == CASES[name] >= 4
    wrong = [
        (case["call"], case["known"], case[mode])
        for case in cases
        if differences(case[mode]) != {int(index) for index in case["known"]}
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)}: {wrong[:3]}"
    assert any("outputs" in case[mode]["ours"] for case in cases)


def test_only_named_contradictions_are_left_out_of_the_matrix(report: dict[str, Any]) -> None:
    used = {letter for case in report["cases"] for letter in case["known"].values()}
    assert used == set("astuw") and used <= set(CONTRADICTIONS)


def test_ours_names_the_operator_and_the_argument(report: dict[str, Any]) -> None:
    for case in [*report["cases"], *report["probes"].values()]:
        raised = case["meta"]["ours"].get("raised")
        if raised:
            assert raised.startswith(f"ArgumentError: {case['op'].partition('.')[0]}: "), raised


# ---- where torch_npu contradicts itself: what its Meta kernel says, and that ours is what its C++ allocates


def outputs(report: dict[str, Any], probe: str, side: str = "ours") -> list[list[Any]]:
    """[dtype, *shape] of every output."""
    found: list[list[Any]] = report["probes"][probe]["meta"][side]["outputs"]
    return found


def raised(report: dict[str, Any], probe: str, side: str = "theirs") -> str:
    return str(report["probes"][probe]["meta"][side]["raised"])


def test_every_contradiction_has_its_test() -> None:
    tests = {name.split("_")[2] for name in globals() if name.startswith("test_contradiction_")}
    assert tests == set(CONTRADICTIONS) - {"v"}  # that one shows in the C++ alone: test_torch_npu_allocations
    assert {name.split("_")[0] for name in PROBES} <= tests


@pytest.mark.parametrize("probe", ["a", "a_v2"])
def test_contradiction_a_expand_scales(report: dict[str, Any], probe: str) -> None:
    assert outputs(report, probe, "theirs")[6] == ["float32", 0]
    assert outputs(report, probe)[6] == ["float32", 96]


def test_contradiction_b_shared_expert_x(report: dict[str, Any]) -> None:
    assert "unexpected keyword argument 'shared_expert_x'" in raised(report, "b")
    assert outputs(report, "b") == outputs(report, "b_v2", "theirs") == [["bfloat16", 6, 64]]


def test_contradiction_c_int32_rows(report: dict[str, Any]) -> None:
    for probe, dtype in (("c", "bfloat16"), ("c_fp16", "float16"), ("c_v2", "bfloat16")):
        assert outputs(report, probe, "theirs") == [["int32", 6, 64]]
        assert outputs(report, probe) == [[dtype, 6, 64]]


def test_contradiction_d_scales_without_quantisation(report: dict[str, Any]) -> None:
    assert outputs(report, "d", "theirs")[1] == ["float32", 96, 64]
    assert outputs(report, "d")[1] == ["float32", 96]


def test_contradiction_e_shard_type_of_v2(report: dict[str, Any]) -> None:
    # A = 6 * 8 * min(3, 4), L = 24 / 8.
    theirs, ours = outputs(report, "e", "theirs"), outputs(report, "e")
    assert (theirs[0], theirs[3], theirs[4]) == (["bfloat16", 0, 64], ["int64", 1], ["int32", 8])
    assert (ours[0], ours[3], ours[4]) == (["bfloat16", 144, 64], ["int64", 3], ["int32", 24])


def test_contradiction_f_meta_asks_the_device(report: dict[str, Any]) -> None:
    assert raised(report, "f") == "RuntimeError: a device was asked"
    assert outputs(report, "f")[4] == ["int32", 8 * 2 + 48 * 2 * 4 * 1]


def test_contradiction_g_rank_outside_of_the_group(report: dict[str, Any]) -> None:
    assert outputs(report, "g", "theirs")[0] == ["bfloat16", 96, 64]
    assert "ep_rank_id should be in" in raised(report, "g_v2")
    for probe in ("g", "g_v2"):
        assert "ep_rank_id is 99, it must be in 0..15" in raised(report, probe, "ours")


def test_contradiction_h_split_operators_are_not_in_the_wheel(report: dict[str, Any]) -> None:
    assert report["present"] == [] and len(ABSENT) == 4
    assert not [name for name in report["all"] if name.partition("::")[2] in ABSENT]


def test_contradiction_i_no_output_is_none(report: dict[str, Any]) -> None:
    for side in ("theirs", "ours"):
        assert outputs(report, "a", side)[1] == ["float32", 96]
        assert len(outputs(report, "a", side)) == 7


def test_contradiction_j_rows_of_a_shared_rank(report: dict[str, Any]) -> None:
    batch, world, shared_ranks = 6, 8, 2
    documented, coded = batch // shared_ranks, batch * world // shared_ranks
    assert outputs(report, "j")[0] == outputs(report, "j", "theirs")[0] == ["bfloat16", coded, 64]
    assert documented != coded


def test_contradiction_k_assist_info_holds_every_pair(report: dict[str, Any]) -> None:
    # 7 experts on 8 ranks: no local one, so A is 0; BS*K = 24.
    assert outputs(report, "k")[2] == outputs(report, "k", "theirs")[2] == ["int32", 24]
    assert outputs(report, "k")[0] == ["bfloat16", 0, 64]


def test_contradiction_l_ep_recv_counts_grow_with_expert_scales_only(report: dict[str, Any]) -> None:
    for probe, size in (("l", 16), ("l_scales", 16 + 48 * 2 * 4 * 1), ("l_four", 16)):
        assert outputs(report, probe)[4] == outputs(report, probe, "theirs")[4] == ["int32", size]


def test_contradiction_m_dtypes_of_dispatch_v2(report: dict[str, Any]) -> None:
    for schema in report["schemas"]["npu_moe_distribute_dispatch_v2"]:
        assert "int? y_dtype=None, int? x_dtype=None, int? scales_dtype=None" in schema


def test_contradiction_n_the_default_group_type(report: dict[str, Any]) -> None:
    """Ours takes the default where it decides nothing, and refuses it beside a group_list tensor, as C++."""
    for schema in report["schemas"]["npu_grouped_matmul"]:
        assert "int? group_type=None" in schema
    for probe in ("n", "n_tensor"):
        assert "group_type only supports -1, 0 and 2, but got None" in raised(report, probe)
    assert outputs(report, "n") == [["float32", 4, 10]]
    assert "group_type is None" in raised(report, "n_tensor", "ours")
    assert outputs(report, "n_list") == outputs(report, "n_list", "theirs") == [["float32", 4, 10]]


def test_contradiction_o_defaults_and_names_of_the_yaml(report: dict[str, Any]) -> None:
    for schema in report["schemas"]["npu_grouped_matmul_swiglu_quant_v2"]:
        assert "int? dequant_dtype=6," in schema
    for schema in report["schemas"]["npu_swiglu"]:
        assert "(Tensor input, int dim=-1)" in schema


def test_contradiction_p_one_output_a_group(report: dict[str, Any]) -> None:
    assert outputs(report, "p", "theirs") == outputs(report, "p_tensor", "theirs") == [["float32", 4, 10]]
    assert outputs(report, "p") == [["float32", 1, 10], ["float32", 3, 10]]
    assert "sizes would depend on its values" in raised(report, "p_tensor", "ours")


def test_contradiction_q_softmax_of_three_dimensions(report: dict[str, Any]) -> None:
    assert outputs(report, "q", "theirs")[2] == ["float32", 2, 3]
    assert outputs(report, "q")[2] == ["float32", 2, 3, 16]


def test_contradiction_r_a_meta_kernel_prints(report: dict[str, Any]) -> None:
    answers = report["probes"]["r"]["meta"]
    assert answers["theirs"]["printed"] == "None\n" and answers["ours"]["printed"] == ""
    assert answers["ours"]["outputs"][0] == ["float32", 14, 8]


def test_contradiction_s_output_dtype_of_the_list_overload(report: dict[str, Any]) -> None:
    assert all("ScalarType? output_dtype=None" in s for s in report["schemas"]["npu_grouped_matmul.List"])
    assert "is not supported for now" in raised(report, "s")
    assert outputs(report, "s") == [["bfloat16", 4, 10]]


def test_contradiction_t_expert_tokens_that_are_not_asked_for(report: dict[str, Any]) -> None:
    assert outputs(report, "t", "theirs")[2] == ["int64"]
    assert outputs(report, "t")[2] == ["int64", 4]


def test_contradiction_u_scale_of_static_quantisation(report: dict[str, Any]) -> None:
    assert outputs(report, "u", "theirs")[3] == ["float32"]
    assert outputs(report, "u")[3] == ["float32", 14]


def test_contradiction_w_activate_dim(report: dict[str, Any]) -> None:
    assert outputs(report, "w", "theirs") == [["int8", 2, 6], ["float32", 2]]
    assert outputs(report, "w") == [["int8", 4, 3], ["float32", 4]]
