"""The virtual NPU's built-in operators, called by an unmodified torch_npu: the same results as on the CPU."""

from __future__ import annotations

import ctypes
import re
from functools import partial
from typing import Any

import pytest
import torch
from conftest import Once
from vnpu_operator_cases import difference
from vnpu_process import HERE, checks_of, run

from ascend_moe.vnpu import library_folder
from ascend_moe.vnpu.operators import OPERATORS

pytestmark = pytest.mark.npu

CHECKS = HERE / "vnpu_operator_checks.py"
# How torch_npu hands work over: by a thread of its own (default), later still, at once, waiting each time.
MODES = {
    "queue": {},
    "late-queue": {"TASK_QUEUE_ENABLE": "2"},
    "no-queue": {"TASK_QUEUE_ENABLE": "0"},
    "blocking": {"ASCEND_LAUNCH_BLOCKING": "1"},
}
SLOW_MODES = [pytest.param(mode, marks=pytest.mark.nightly) for mode in MODES if mode != "queue"]


def every_case() -> Any:
    return run(HERE / "vnpu_operator_child.py").last_lines()[0]


def every_check(mode: str) -> Any:
    return run(CHECKS, env=MODES[mode]).last_lines()[0]


def wrong(found: dict[str, str]) -> dict[str, str]:
    return {name: problem for name, problem in found.items() if problem}


def test_torch_operators_give_what_they_give_on_the_cpu(once: Once) -> None:
    found = once("operator_cases", every_case)["found"]
    assert wrong(found) == {} and len(found) > 6000


def test_our_operators_are_torch_npus_there_and_give_what_they_give_on_the_cpu(once: Once) -> None:
    found = once("operator_cases", every_case)["calls"]
    # The virtual NPU has no CANN operator for one of them: its call ends at the aclnn symbol.
    for name in [name for name in found if name.startswith("npu_grouped_matmul_finalize_routing")]:
        assert "aclnnGroupedMatmulFinalizeRoutingV2" in found[name] and "libopapi.so" in found.pop(name)
    assert wrong(found) == {} and len(found) > 70


def test_gradients_are_torch_npus_or_refused(once: Once) -> None:
    gradients = once("operator_cases", every_case)["gradients"]
    for op in ("npu_swiglu", "npu_moe_token_permute"):
        on_npu, on_cpu = gradients[op]
        assert on_npu == pytest.approx(on_cpu, rel=1e-5) and on_npu[0] > 0
    # torch_npu has none of a grouped matmul; on the CPU it is differentiable.
    on_npu, on_cpu = gradients["npu_grouped_matmul"]
    assert on_npu.startswith("AscendMoeError: npu_grouped_matmul is not differentiable") and all(on_cpu)
    for raised in gradients["npu_dynamic_quant"]:
        assert raised.startswith("AscendMoeError: npu_dynamic_quant is not differentiable")


def test_the_comparison_sees_differences() -> None:
    one = [torch.ones(3, dtype=torch.bfloat16)]
    assert difference(one, [torch.ones(3, dtype=torch.bfloat16)]) == ""
    assert difference(one, [torch.tensor([1, 1, 1.0078125], dtype=torch.bfloat16)]) != ""
    for other in ([torch.ones(3)], [torch.ones(4, dtype=torch.bfloat16)], [1.05 * one[0]], []):
        assert difference(one, other, exact=False) != ""


def test_every_exported_operator_is_registered_and_the_other_way_round() -> None:
    path = library_folder() / "libopapi.so"
    exported = re.findall(rb"(?<=\0)(aclnn\w+)GetWorkspaceSize(?=\0)", path.read_bytes())
    assert {name.decode() for name in exported} == set(OPERATORS)
    library = ctypes.CDLL(str(path))
    for name in OPERATORS:
        assert hasattr(library, name) and hasattr(library, f"{name}GetWorkspaceSize"), name


def test_every_operator_is_called_by_torch_npu_in_these_tests(once: Once) -> None:
    # A wrong type in the table of entries shows only when torch_npu calls the entry.
    called = {*once("operator_cases", every_case)["called"], *checks(once, "queue")["called"]}
    # It looks for V4 to learn whether there is a grouped matmul, and then calls V5.
    assert set(OPERATORS) - called == {"aclnnGroupedMatmulV4"}


def checks(once: Once, mode: str) -> Any:
    return once(f"operator_checks_{mode}", partial(every_check, mode))


@pytest.mark.parametrize("mode", ["queue", *SLOW_MODES])
@pytest.mark.parametrize("name", checks_of(CHECKS))
def test_check(once: Once, name: str, mode: str) -> None:
    problem = checks(once, mode)["found"][name]
    assert not problem, problem
