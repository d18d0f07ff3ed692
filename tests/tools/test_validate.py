"""`ascend-moe validate`: passes on sound ranks, says where it is wrong, as threads and under torchrun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
import torch

import ascend_moe
from ascend_moe import errors, validate
from ascend_moe.cli import validate as validate_cli
from ascend_moe.reference.cases import Case, Place
from ascend_moe.validate import devices
from ascend_moe.validate import run as validate_run
from ascend_moe.validate.cases import matrix
from ascend_moe.validate.run import BAD

FEW = [
    Case("plain", 2, ids="distinct", batch=5),
    Case("int8", 2, quant="int8", contract=2, batches="zero rank", batch=5),
    Case("bad", 2, ids="bad", batch=5),
]
FEW_V2 = [Case("plain", 2, ids="distinct", batch=5, contract=2)]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "64")
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "10")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("world", [1, 3])
def test_everything_passes(world: int) -> None:
    outcome = validate.threads(world)
    assert outcome.ok, validate.text(outcome)
    assert len({one.rank for one in outcome.results}) == world
    # One line of errors for each bad call, faulty routing, and a sound call at the end.
    bad = sum(one.least_world <= world for one in BAD)
    assert sum(one.op == "errors" and one.rank == 0 for one in outcome.results) >= bad + 1
    assert "PASS: " in validate.text(outcome)


def test_matrix_has_what_it_promises() -> None:
    cases = matrix(4)
    for name, values in {
        "dtype": {"bf16", "fp16", "fp32"},
        "quant": {"none", "int8", "smooth"},
        "contract": {1, 2},
        "mask": {"none", "prefix", "token", "pair", "nobody"},
        "ids": {"distinct", "any", "minus", "hot", "duplicates", "mixed", "bad", "overflow"},
        "batches": {"equal", "global_bs", "unequal", "zero rank", "one rank only", "no tokens"},
        "nums_type": {0, 1},
        "tp": {0, 1},
        "shared": {0, 2, 3},
        "odd": {False, True},
        "tail": {False, True},
    }.items():
        assert {getattr(case, name) for case in cases} >= values, name
    modes = {(case.contract, case.dtype, case.quant) for case in cases}
    assert len(modes) == 18
    assert len(matrix(4, extra=3)) == len(matrix(4, extra=0)) + 3
    assert {case.dtype for case in matrix(2, dtypes=("bf16",))} == {"bf16"}


def wrong(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[..., Any]) -> None:
    """An operator that does something else on rank 1."""
    sound = getattr(ascend_moe, name)

    def op(*args: Any, **kwargs: Any) -> Any:
        out = sound(*args, **kwargs)
        rank = kwargs["ep_rank_id"] if not args else args[4] if "dispatch" in name else args[7]
        return change(out) if rank == 1 else out

    monkeypatch.setattr(ascend_moe, name, op)


def flip(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.clone()
    if len(rows):
        rows.view(torch.uint8)[-1, -1] ^= 1
    return rows


def bad_results(cases: list[Case]) -> list[Any]:
    return [one for one in validate.threads(2, cases).results if not one.ok]


def test_one_wrong_bit_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, "npu_moe_distribute_combine", flip)
    outcome = validate.threads(2, FEW)
    bad = [one for one in outcome.results if not one.ok]
    # Also the sound call after all errors.
    assert not outcome.ok and {(one.op, one.rank) for one in bad} == {("combine", 1), ("errors", 1)}
    said = validate.text(outcome)
    assert "combine on rank 1: token 4" in said and "FAIL: " in said
    assert outcome.as_dict()["wrong"][0]["rank"] == 1


def test_wrong_counts_and_missing_errors_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch, "npu_moe_distribute_dispatch_v2", lambda out: (*out[:3], out[3] + 1, *out[4:]))
    bad = bad_results(FEW)
    assert {(one.op, one.mode, one.rank) for one in bad} == {("dispatch", "V2 bf16 int8", 1)}
    assert "expert_token_nums" in bad[0].text
    real = ascend_moe.npu_moe_distribute_dispatch

    def op(*args: Any, **kwargs: Any) -> Any:
        return None if kwargs.get("quant_mode") == 7 else real(*args, **kwargs)

    monkeypatch.setattr(ascend_moe, "npu_moe_distribute_dispatch", op)
    bad = bad_results([])
    assert {one.case for one in bad} == {"quant_mode 7"} and "raised nothing" in bad[0].text


@pytest.mark.parametrize(
    ("world", "share"),
    [(4, 2), *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((2, 1), (3, 1), (3, 2)))],
)
def test_several_servers_pass(world: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As between A2 servers: V2's third tensor is expand_idx there and compared as that; the text says so."""
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))
    outcome = validate.threads(world, matrix(world, extra=4))
    assert outcome.ok, validate.text(outcome)
    said = validate.text(outcome)
    assert f"several servers (ranks a server: {share})" in said and "begins with expand_idx" in said
    assert outcome.as_dict()["ranks_per_server"] == share


@pytest.mark.parametrize(
    ("share", "named"),
    [("0", "assist_info_for_combine, the triple of row 0"), ("1", "expand_idx[1] (token 0, k 1")],
)
def test_a_wrong_third_tensor_is_found(share: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", share)
    assert ("expand_idx" in validate.text(validate.threads(2, FEW_V2))) == (share == "1")
    real_dispatch, real_combine = validate_run.dispatch, validate_run.combine
    good: dict[int, torch.Tensor] = {}

    def dispatch(place: Place, case: Case, **changes: Any) -> Any:
        sent = list(real_dispatch(place, case, **changes))
        if place.rank == 1 and case.contract == 2:
            good[place.rank], sent[2] = sent[2], sent[2].clone()
            sent[2][1] += 1
        return tuple(sent)

    def combine(place: Place, case: Case, rows: Any, sent: Any, **changes: Any) -> Any:
        if place.rank in good and case.contract == 2:
            sent = (*sent[:2], good[place.rank], *sent[3:])
        return real_combine(place, case, rows, sent, **changes)

    monkeypatch.setattr(validate_run, "dispatch", dispatch)
    monkeypatch.setattr(validate_run, "combine", combine)
    outcome = validate.threads(2, FEW_V2)
    bad = [one for one in outcome.results if not one.ok]
    assert {(one.op, one.rank, one.case) for one in bad} == {("dispatch", 1, "plain")}
    said = validate.text(outcome)
    assert named in bad[0].text and "dispatch, V2 bf16, plain, rank 1:" in said and "Case(" not in said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.ArgumentError("rank 1 has had enough", argument="x"), "rank 1 stopped after"),
        # torch_npu raises plain RuntimeErrors with CANN's codes.
        (RuntimeError("call aclnnAscendMoeDistributeDispatch failed, error code is 561002"), "561002"),
    ],
)
def test_a_rank_that_stops_fails_and_nothing_hangs(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = validate_run.dispatch

    def dispatch(place: Place, case: Case, **changes: Any) -> Any:
        if place.rank == 1 and case.name == "int8":
            raise error
        return real(place, case, **changes)

    monkeypatch.setattr(validate_run, "dispatch", dispatch)
    outcome = validate.threads(2, FEW)
    assert not outcome.ok and len(outcome.stopped) == 2
    text = validate.text(outcome)
    assert said in text and str(error) in text and "FAIL" in text
    assert not validate.Outcome(2, "cpu", 0, 0.0, []).ok, "no results are no pass"


# ---- the command


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-r", "2", "--extra", "0", "--device", "cpu"]
    assert commands.run("validate", argv) == 0
    said = capsys.readouterr().out
    assert "cpu, 2 ranks as threads" in said and "dispatch  V2 bf16 int8 smooth" in said
    assert "InvalidExpertId" in said and said.isascii()
    wrong(monkeypatch, "npu_moe_distribute_combine_v2", flip)
    assert commands.run("validate", [*argv, "--dtypes", "bf16", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and {one["rank"] for one in found["wrong"]} == {1}
    assert {one["mode"] for one in found["counts"] if one["wrong"]} >= {"V2 bf16", "V2 bf16 int8"}


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--dtypes", "fp8"], "'fp8' is none of bf16, fp16, fp32"),
        (["--device", "gpu"], "device is 'gpu'; need one of auto, npu, cpu"),
        (["--device", "npu"], "there is no NPU: torch_npu is not installed"),
        (["--ranks", "65"], "--ranks 65 must be in 1..64"),
        (["-r", "0"], "--ranks 0 must be in 1..64"),
        (["-r", "0", "--bringup"], "--ranks 0 must be in 1..64"),
    ],
)
def test_command_refuses(
    argv: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "_npu", lambda: (None, "torch_npu is not installed"))
    assert commands.run("validate", argv) == 2
    assert text in capsys.readouterr().err
    assert devices.find("auto").kind == "cpu"


def start(command: list[str], cwd: Path, **env: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **env}, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.parametrize("share", ["0", pytest.param("1", marks=pytest.mark.nightly)])
def test_under_torchrun(tmp_path: Path, share: str) -> None:
    head = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv = ["-m", "ascend_moe", "validate", "--device", "cpu", "--extra", "0", "--dtypes", "bf16"]
    done = start([*head, *argv], tmp_path, ASCEND_MOE_RANKS_PER_SERVER=share)
    said = done.communicate(timeout=200)[0]
    assert done.returncode == 0, said
    assert "cpu, 2 processes, gloo" in said and said.count("PASS: ") == 1
    assert ("several servers (ranks a server: 1)" in said) == (share == "1")


@pytest.mark.nightly
def test_ranks_run_this_package_and_no_other_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ascend_moe").mkdir()
    (tmp_path / "ascend_moe" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)
    argv = ["validate", "--device", "cpu", "--extra", "0", "--dtypes", "fp32"]
    assert validate_cli.torchrun(2, argv, {}) == 0


@pytest.mark.nightly
def test_two_servers_by_the_script_of_the_examples(tmp_path: Path) -> None:
    """Both on this machine, without NPUs."""
    script = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "servers.sh"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    env = {"SERVERS": "2", "RANKS": "1", "DEVICE": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env["PYTHON"] = sys.executable
    servers = [start(["bash", str(script)], tmp_path, **env, SERVER=str(number)) for number in range(2)]
    said = [server.communicate(timeout=240)[0] for server in servers]
    assert [server.returncode for server in servers] == [0, 0], said
    assert "cpu, 2 processes, gloo" in said[0] and "PASS: " in said[0] and "PASS" not in said[1]


def test_without_typer_and_rich(tmp_path: Path) -> None:
    """The machine that has torch and nothing else: every command says what to install."""
    for name in ("typer", "rich", "click"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}', name={name!r})\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    for argv, start_of_text in (
        (["--help"], "ascend-moe needs typer, which is not installed: pip install 'ascend_moe[cli]'"),
        (["plan"], "ascend-moe plan needs typer, which is not installed: pip install 'ascend_moe[cli]'"),
    ):
        done = start([sys.executable, "-m", "ascend_moe", *argv], tmp_path, PYTHONPATH=path)
        said = done.communicate(timeout=200)[0]
        assert done.returncode == 1 and said.startswith(start_of_text) and said.count("\n") == 1, said
