"""torch_npu's operators of MoE layers, vllm-ascend's and DeepEP's on the virtual NPU; schemas as the wheel has them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from npu_runs import run
from test_vnpu import MODES

import ascend_vnpu

pytestmark = pytest.mark.npu


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_moe_operators_give_what_the_cpu_gives(mode: dict[str, str]) -> None:
    run("moe_operator_checks.py", env=mode).must_pass()


def test_operators_of_vllm_ascend_captured_routing_and_int4_experts() -> None:
    run("vllm_ascend_checks.py").must_pass()


def test_a_deep_ep_buffer_works_on_hccl() -> None:
    run("deep_ep_ranks.py", world=2).must_pass()


def test_schemas_and_outputs_are_the_wheels(tmp_path: Path) -> None:
    """With a libopapi.so whose every function does nothing and returns 0, of the names torch_npu looks up."""
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None and spec.origin is not None, "torch_npu is not installed beside these tests"
    text = (Path(spec.origin).parent / "lib" / "libtorch_npu.so").read_bytes()
    operators = {name.decode() for name in re.findall(rb"\0(aclnn[A-Z]\w+)(?=\0)", text)}
    operators = {name.removesuffix("GetWorkspaceSize") for name in operators}
    assert len(operators) > 500
    kinds = ("Tensor", "Scalar", "TensorList", "ScalarList", "IntArray", "BoolArray", "FloatArray")
    names = {f"acl{verb}{kind}" for verb in ("Create", "Destroy") for kind in (*kinds, "AclOpExecutor")}
    names |= operators | {f"{name}GetWorkspaceSize" for name in operators}
    source = tmp_path / "mock.c"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names)))
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O0", str(source), "-o"]
    subprocess.run([*command, str(tmp_path / "libopapi.so")], check=True)
    path = os.pathsep.join([str(tmp_path), ascend_vnpu.environment()["LD_LIBRARY_PATH"]])
    run("wheel_checks.py", env={"LD_LIBRARY_PATH": path}).must_pass()


def test_without_cann_the_package_still_imports() -> None:
    """torch_npu is installed and there is no CANN: importing this package first must not fail."""
    env = {k: v for k, v in os.environ.items() if k not in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "LD_LIBRARY_PATH")}
    text = "import ascend_moe, os; print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    outcome = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True)
    assert outcome.stdout == "0\n", outcome.stderr
