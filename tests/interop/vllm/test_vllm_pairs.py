"""`ascend-moe vllm-pairs` prints the matrix, tries a pair for real, and sees one that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import commands
import pytest
from vllm_parts import KINDS, each_kind

from ascend_moe import vllm_pairs as trial
from ascend_moe.interop import vllm


def test_the_matrix() -> None:
    fits = {(way, "batched" if way == "batched" else "standard") for way in KINDS}
    made = vllm.compatibility()
    assert {(each.prepare_finalize, each.experts) for each in made if not each.reason} == fits and len(made) == 8
    said = commands.said("vllm-pairs")
    assert said.code == 0 and said.out.count("fits") == 4 and all(kind in said.out for kind in KINDS)
    found = json.loads(commands.said("vllm-pairs", "--json").out)
    assert {(each["prepare_finalize"], each["experts"]) for each in found if each["fits"]} == fits
    assert "mc2 gives standard rows" in next(each["reason"] for each in found if each["reason"])


@each_kind
def test_the_command_tries_a_pair(kind: str, tmp_path: Path) -> None:
    experts = "batched" if kind == "batched" else "standard"
    words = ["vllm-pairs", "--pf-type", kind, "--experts-type", experts, "--batch", "6,0", "--ranks", "2"]
    trace = tmp_path / "trace.json"
    said = commands.said(*words, "--profile", str(trace))
    assert said.code == 0 and said.out.count("ok ") == 2 and "PASS" in said.out, said
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names or "aten::matmul" in names
    assert list(tmp_path.iterdir()) == [trace]
    found = json.loads(commands.said(*words, "--quant", "int8", "--json").out)
    assert found["ok"] and found["equal"] and found["quantized"] and 0 < found["difference"] < found["tolerance"]


def test_the_command_says_why_a_pair_does_not_fit() -> None:
    words = ("vllm-pairs", "--pf-type", "mc2", "--experts-type", "batched")
    said = commands.said(*words)
    assert said.code == 1 and "do not fit: mc2 gives standard rows, batched experts take batched rows" in said.out
    said = commands.said(*words, "--json")
    assert said.code == 1 and json.loads(said.out)["reason"]


@pytest.mark.parametrize("wrong", ["bits", "values"])
def test_the_command_sees_a_wrong_pair(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    name = "_three_calls" if wrong == "bits" else "_dense"
    right = getattr(trial, name)
    monkeypatch.setattr(trial, name, lambda *args: right(*args) * 1.0625)
    said = commands.said("vllm-pairs", "--pf-type", "mc2", "--experts-type", "standard", "--batch", "4")
    assert said.code == 1 and said.out.count("FAIL") == 2 and said.out.count("ok ") == 1, said
