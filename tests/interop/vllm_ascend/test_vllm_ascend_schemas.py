"""vllm-ascend's operators have the schemas of the release, and are registered once."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from vllm_ascend_calls import C

from ascend_moe.errors import ArgumentError
from ascend_moe.interop import vllm_ascend
from ascend_moe.interop.vllm_ascend import schemas

# By release, the schemas as the compiled part of its wheel has them in its strings; white space is squeezed.
FACTS: dict[str, dict[str, str]] = {}
for line in (Path(__file__).parent / "schemas.txt").read_text().splitlines():
    of, schema = line.split("\t")
    FACTS.setdefault(of, {})[schema.partition("(")[0]] = schema


def test_schemas_are_the_wheels() -> None:
    assert list(FACTS) == schemas.RELEASES
    for release, facts in FACTS.items():
        known = schemas.of_release(release)
        for name, text in facts.items():
            assert torch._C.parse_schema(name + known.pop(name)) == torch._C.parse_schema(text), (release, name)
        assert all("." in name for name in known), release
    both = FACTS["0.23.0"] | FACTS["0.26.0"]
    for name, text in both.items():
        schema = str(getattr(C, name).default._schema).removeprefix("_C_ascend::")
        assert schema == str(torch._C.parse_schema(text)), name
    assert set(both) == set(vllm_ascend.OPS)


def test_the_oldest_release_in_a_process_of_its_own() -> None:
    script = f"""
import torch
from ascend_moe.interop import vllm_ascend
made = vllm_ascend.register("0.18.1")
for name, text in {FACTS["0.18.0"]!r}.items():
    schema = str(getattr(torch.ops._C_ascend, name).default._schema).removeprefix("_C_ascend::")
    assert schema == str(torch._C.parse_schema(text)) and name in made, name
assert not hasattr(torch.ops._C_ascend, "npu_swiglu_group_quant")
x, weight, group = torch.ones(2, 32, dtype=torch.int8), torch.ones(1, 32, 4, dtype=torch.int8), torch.tensor([2])
call = x, weight, torch.ones(1, 4) / 32, torch.ones(2), group
assert (torch.ops._C_ascend.grouped_matmul_swiglu_quant(*call)[0] == 127).all()
try:
    torch.ops._C_ascend.grouped_matmul_swiglu_quant(*call, swiglu_limit=1.0)
except RuntimeError as error:
    assert "swiglu_limit" in str(error), error
else:
    raise AssertionError
from ascend_moe import LocalCluster
def rank(rank, group):
    eye, x, ids = torch.eye(32)[None], torch.ones(2, 32), torch.zeros(2, 1, dtype=torch.int32)
    first, probs, out, rows = torch.cat([eye, eye], -1), torch.ones(2, 1), torch.empty(2, 32), torch.empty(1).int()
    torch.ops._C_ascend.dispatch_ffn_combine(x, [first], [eye], ids, [], [], probs, group, 64, out, rows)
    assert rows.tolist() == [2] and torch.allclose(out, torch.ones(1).sigmoid())
with LocalCluster(1) as cluster:
    cluster.run(rank)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize(
    ("version", "taken"),
    [
        ("0.18.0", "0.18.0"), ("0.22.1", "0.18.0"), ("0.23.0rc1", "0.23.0"), ("0.23.0.post1", "0.23.0"),
        ("0.25.0", "0.24.0"), ("0.26.0rc1", "0.26.0"), ("1.0", "0.26.0"), ("0.13.0", "0.18.0"), (None, "0.26.0"),
        ("0.1.dev1+g1234567", "0.26.0"),
    ],
)  # fmt: skip
def test_release(
    version: str | None, taken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def found(name: str) -> str:
        assert name == "vllm-ascend"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    with caplog.at_level("INFO", "ascend_moe"):
        assert vllm_ascend.register() == ()
    assert caplog.messages[-1].endswith(f"as vllm-ascend {taken} has them")
    assert ("is older than" in caplog.text) == (version == "0.13.0")
    assert schemas.choose("v0.23.0") == "0.23.0"
    with pytest.raises(ArgumentError, match=r"release is 'main'; it must be a release of vllm-ascend, such as 0.23.0"):
        vllm_ascend.register("main")


def test_register_twice_and_beside_others() -> None:
    assert vllm_ascend.register() == ()
    script = """
import torch
theirs = torch.library.Library("_C_ascend", "DEF")
theirs.define("moe_gating_top_k_hash(Tensor x) -> Tensor")
theirs.impl("moe_gating_top_k_hash", lambda x: x + 1, "CPU")
from ascend_moe.interop import vllm_ascend
made = vllm_ascend.register()
assert "moe_gating_top_k_hash" not in made and "moe_gating_top_k" in made, made
assert "npu_moe_init_routing_custom" not in made and vllm_ascend.register("0.18.0")[-1] == "npu_moe_init_routing_custom"
assert torch.ops._C_ascend.moe_gating_top_k_hash(torch.ones(1)) == 2
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
