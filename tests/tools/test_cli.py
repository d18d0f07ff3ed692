"""`ascend-moe run` as its user runs it: what it prints, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ascend_moe.cli.root import app

CHECKS = 5


def invoke(*args: str) -> tuple[int, str]:
    """Exit code and all output of `ascend-moe`, its words one space apart and out of their boxes."""
    result = CliRunner().invoke(app, args)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())


def run_json(*args: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["run", "--preset", "tiny", "--json", *args])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def ascend_moe(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ascend_moe", *args],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )


def form(report: str) -> list[str]:
    """The lines of a report without its numbers and blocks."""
    return [re.sub(r"[ ░▒▓█]+", " ", re.sub(r"\d[\d.]*", "0", line)).strip() for line in report.splitlines()]


# ---- a run that passes


def test_main_job_passes(tmp_path: Path) -> None:
    """The default: a DeepSeek-V3 layer on 4 ranks. Only what the user must see, in 100 columns."""
    done = ascend_moe("run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line.rstrip()) <= 100 for line in lines)
    assert lines[-1].startswith("PASS in ")
    assert sum(line.startswith("ok ") for line in lines) == CHECKS
    assert "H 7168, K 8, E 256 (64 a rank), sigmoid router, 4 of 8 groups, a shared expert" in done.stdout
    assert "64 wide, the model's 2048" in done.stdout
    assert re.search(r"HCCL_BUFFSIZE is \d+ MiB; any routing of these batches fits in 57 MiB", done.stdout)
    assert [len(re.findall(rf"^ +rank {rank} ", done.stdout, re.MULTILINE)) for rank in range(4)] == [2] * 4
    assert all(phase in done.stdout for phase in ("router", "dispatch", "experts", "combine"))
    assert done.stderr == ""
    readme = Path(__file__).resolve().parents[2] / "README.md"
    if readme.is_file():  # it shows lines of this output: numbers may be another machine's, the form must not
        block = readme.read_text().partition("```\nRows from each rank")[2].partition("```")[0]
        shown = [line for line in form(f"Rows from each rank{block}") if line not in ("", "...")]
        printed = iter(form(done.stdout))
        assert len(shown) == 11 and all(line in printed for line in shown), shown


@pytest.mark.parametrize(
    "args",
    [
        ["--quant"],
        ["--dtype", "fp16"],
        ["--dtype", "fp32"],
        ["--ranks", "1"],
        ["--ranks", "16", "--batch", "5"],
        ["--batch", "5,0,9,1", "--quant"],
        ["--dtype", "fp16", "--quant"],
    ],
    ids=" ".join,
)
def test_variants_pass(args: list[str]) -> None:
    code, output = invoke("run", "--preset", "tiny", *args)
    assert code == 0 and "PASS in" in output and output.count("bit for bit") == 2, output


def test_several_servers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    code, output = invoke("run", "-p", "tiny", "--ranks", "4", "--batch", "8")
    assert code == 0 and "PASS in" in output and output.count("bit for bit") == 2, output


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen3-30b", "mixtral"])
def test_presets_pass(name: str) -> None:
    code, output = invoke("run", "-p", name, "--batch", "16", "--iterations", "1", "--ranks", "2")
    assert code == 0 and "PASS in" in output, output


def test_json_is_consistent() -> None:
    found = run_json("--batch", "12,3,0,8")
    assert found["pass"] is True and found["batches"] == [12, 3, 0, 8]
    config = found["config"]
    by_rank = torch.tensor(found["tokens_per_expert"])
    assert by_rank.shape == (4, config["num_experts"])
    assert by_rank.sum(1).tolist() == [batch * config["top_k"] for batch in found["batches"]]
    assert by_rank.reshape(4, 4, -1).sum(2).tolist() == found["rows"]
    assert set(found["phase_ms"]) == {"router", "dispatch", "experts", "combine"}
    assert all(value > 0 for value in found["phase_ms"].values())
    # Rows of 128 bf16: with a triple's 32 bytes at the busiest owner, or back at the source with most tokens.
    busiest = int(by_rank.reshape(4, 4, -1).sum((0, 2)).max())
    assert found["window"]["used_mib"] == max(busiest * (256 + 32), 12 * 4 * 256) / 2**20
    assert len(found["checks"]) == CHECKS and all(check["ok"] for check in found["checks"])
    assert 0 < found["dense_difference"] < found["dense_tolerance"] * 10
    assert found["reference_difference"] == 0


def test_seed_and_text_decide(tmp_path: Path) -> None:
    first = run_json("--batch", "8")
    assert run_json("--batch", "8")["tokens_per_expert"] == first["tokens_per_expert"]
    assert run_json("--batch", "8", "--seed", "1")["tokens_per_expert"] != first["tokens_per_expert"]
    own = tmp_path / "own.txt"
    own.write_bytes(bytes(range(100, 110)))
    other = run_json("--batch", "8", "--text", str(own))
    assert other["tokens_per_expert"] != first["tokens_per_expert"]
    assert "the text has 10 bytes and is read 3 times" in other["about"]


@pytest.mark.parametrize("args", [[], ["--quant"]], ids=["plain", "quant"])
def test_checkpoint(tmp_path: Path, args: list[str]) -> None:
    from hf_models import LAYER, save

    saved = save("deepseek_v3", tmp_path / "model", dtype=torch.bfloat16)
    options = ["--checkpoint", str(saved.directory), "--ranks", "2", "--batch", "9,0", *args]
    code, output = invoke("run", *options, "--layer", str(LAYER))
    assert code == 0 and "PASS in" in output and f"decoder layer {LAYER}" in output, output
    code, output = invoke("run", *options, "--layer", "0")
    assert code == 1 and "layer 0" in output and "layers with one: 1" in output and output.endswith("FAIL")


# ---- what it refuses


@pytest.mark.parametrize(
    "args, said",
    [
        (
            ["--preset", "gpt-5"],
            "'--preset' preset is 'gpt-5'; need one of deepseek-v3, qwen3-30b, mixtral, tiny",
        ),
        (["--ranks", "3"], "'--ranks' 3 ranks cannot share 256 experts evenly"),
        (["--ranks", "0"], "'--ranks'"),
        (["--batch", "many"], "'--batch' 'many' is neither a number of tokens nor a list"),
        (["--batch", "-3"], "'--batch'"),
        (["--batch", "1,2"], "'--batch' '1,2' lists 2 ranks, there are 4"),
        (["--batch", "0"], "'--batch' batches are (0, 0, 0, 0); need 0..4096"),
        (["--batch", "4097"], "need 0..4096"),
        (["--dtype", "int4"], "'--dtype' 'int4' is none of bf16, fp16, fp32"),
        (["--layer", "2"], "'--layer' it counts the layers of a checkpoint"),
        (["--checkpoint", "."], "'--layer' say which decoder layer"),
        (["--checkpoint", ".", "--layer", "1"], "'--checkpoint' config.json does not exist"),
        (["--checkpoint", ".", "-p", "tiny"], "'--preset' the numbers come from --checkpoint"),
        (["--text", "absent.txt"], "'--text'"),
        (["--text", "empty.txt"], "'--text' empty.txt is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options(args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    code, output = invoke("run", *args)
    assert code == 2
    assert said in output.replace("': ", "' "), output


def test_torchrun_is_not_for_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    code, output = invoke("run", "-p", "tiny")
    assert code == 2 and "leave out torchrun" in output


def test_missing_typer_is_named(tmp_path: Path) -> None:
    code = "import sys; sys.modules['typer'] = None; from ascend_moe.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    said = "ascend-moe needs typer, which is not installed: pip install 'ascend_moe[cli]'"
    assert done.stderr.splitlines()[0] == said and done.stdout == ""


def test_help_and_version() -> None:
    code, output = invoke("run", "--help")
    assert code == 0
    for option in (
        "--preset",
        "--checkpoint",
        "--batch",
        "--quant",
        "--json",
    ):
        assert option in output
    code, output = invoke("--version")
    assert code == 0 and re.match(r"ascend_moe (\d|\(a source tree)", output)


# ---- runs that go wrong


def test_an_error_of_the_ranks_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    code, output = invoke("run", "-p", "tiny", "--batch", "1000", "-r", "2")
    assert code == 1 and output.endswith("FAIL"), output
    assert output.count("WindowTooSmall") == 1 and output.count("export HCCL_BUFFSIZE=") == 1
    result = CliRunner().invoke(app, ["run", "-p", "tiny", "--batch", "1000", "-r", "2", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["pass"] is False and "HCCL_BUFFSIZE=" in found["error"]
