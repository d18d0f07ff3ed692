"""`ascend-moe run`: what it prints, what it refuses, and checks that notice what is wrong."""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import commands
import pytest
import torch
import transformers
import typer
from hf_models import LAYER, save, saved
from tiny_checkpoints import tiny

from ascend_moe import plan as planning
from ascend_moe import run, validate
from ascend_moe.checkpoint.config import moe_config
from ascend_moe.cli import root
from ascend_moe.moe_config import PRESETS, MoEConfig
from ascend_moe.run import report
from ascend_moe.run.check import verify
from ascend_moe.run.layers import RankRecord, RunSpec, default_text, needed_mib

CHECKS = 5
PHASES = {"router", "dispatch", "experts", "combine"}
nightly = pytest.mark.nightly


def invoke(*args: str) -> tuple[int, str]:
    """Exit code and all output of `ascend-moe`, its words one space apart and out of their boxes."""
    code, out, err = commands.said(*args)
    return code, " ".join(re.sub("[│╭╮╰╯─]", " ", out + err).split())


def run_json(*args: str, code: int = 0) -> dict[str, Any]:
    said = commands.said("run", "--preset", "tiny", "--json", *args)
    assert said.code == code, said
    found: dict[str, Any] = json.loads(said.out)
    return found


def form(report: str) -> list[str]:
    """The lines of a report without its numbers and blocks."""
    return [re.sub(r"[ ░▒▓█]+", " ", re.sub(r"\d[\d.]*", "0", line)).strip() for line in report.splitlines()]


# ---- a run that passes


@pytest.mark.parametrize("hidden, mib", [(512, 4), pytest.param(7168, 56, marks=nightly)])
def test_main_job_passes(hidden: int, mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default: a DeepSeek-V3 layer on 4 ranks. Only what the user must see, in 100 columns."""
    layer = PRESETS["deepseek-v3"]
    narrow = replace(layer, published=replace(layer.published, hidden_size=hidden))
    monkeypatch.setitem(PRESETS, "deepseek-v3", narrow)
    code, out, err = commands.said("run")
    assert code == 0 and err == "", out + err
    lines = out.splitlines()
    assert all(len(line.rstrip()) <= 100 for line in lines)
    assert lines[-1].startswith("PASS in ")
    assert sum(line.startswith("ok ") for line in lines) == CHECKS
    shape = "K 8, E 256 (64 per rank), sigmoid router, 4 of 8 groups, a shared expert"
    assert f"H {hidden}, {shape}" in out and "64 wide, the model's 2048" in out
    assert re.search(rf"HCCL_BUFFSIZE is \d+ MiB; any routing of these batches fits in {mib} MiB", out)
    assert [len(re.findall(rf"^ +rank {rank} ", out, re.MULTILINE)) for rank in range(4)] == [2] * 4
    assert all(phase in out for phase in PHASES)
    page = Path(__file__).resolve().parents[2] / "docs" / "start.md"
    if page.is_file():  # it shows lines of this output: numbers may be another machine's, the form must not
        block = page.read_text().partition("```\nRows from each rank")[2].partition("```")[0]
        shown = [line for line in form(f"Rows from each rank{block}") if line not in ("", "...")]
        printed = iter(form(out))
        assert len(shown) == 11 and all(line in printed for line in shown), shown


@pytest.mark.parametrize(
    "args",
    [
        ["--dtype", "fp32"],
        ["--ranks", "1"],
        ["--batch", "5,0,9,1", "--quant", "int8"],
        ["--dtype", "fp16", "--quant", "int8"],
        pytest.param(["--ranks", "16", "--batch", "5"], marks=nightly),
        pytest.param(["-p", "qwen3-30b", "--batch", "16", "--iterations", "1", "--ranks", "2"], marks=nightly),
        pytest.param(["-p", "mixtral", "--batch", "16", "--iterations", "1", "--ranks", "2"], marks=nightly),
    ],
    ids=" ".join,
)
def test_variants_pass(args: list[str]) -> None:
    code, output = invoke("run", "--preset", "tiny", *args)
    assert code == 0 and "PASS in" in output and output.count("bit for bit") == 2, output


@nightly
def test_processes_give_what_threads_give() -> None:
    args = ("--batch", "5,0,9,1", "--seed", "3", "--iterations", "2")
    threads, processes = (run_json(*args, "--backend", backend) for backend in ("threads", "processes"))
    assert processes["backend"] == "processes"
    same = ("tokens_per_expert", "rows", "window", "config", "dense_difference", "dense_rms", "checks")
    assert [processes[key] for key in same] == [threads[key] for key in same]


def test_json_is_consistent() -> None:
    found = run_json("--batch", "12,3,0,8")
    assert found["pass"] is True and found["batches"] == [12, 3, 0, 8]
    config = found["config"]
    by_rank = torch.tensor(found["tokens_per_expert"])
    assert by_rank.shape == (4, config["num_experts"])
    assert by_rank.sum(1).tolist() == [batch * config["top_k"] for batch in found["batches"]]
    assert by_rank.reshape(4, 4, -1).sum(2).tolist() == found["rows"]
    assert set(found["phase_ms"]) == PHASES
    assert all(value > 0 for value in found["phase_ms"].values())
    # Rows of 128 bf16: those of the busiest owner that come from other ranks, which it gives back.
    owned = by_rank.reshape(4, 4, -1).sum(2)
    assert found["window"]["used_mib"] == int((owned.sum(0) - owned.diag()).max()) * 256 / 2**20
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
    assert "the text has 10 bytes and is repeated 3 times" in other["about"]


def test_several_servers_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    monkeypatch.setenv("HCCL_BUFFSIZE", "8")
    code, output = invoke("run", "-p", "tiny", "--batch", "4")
    assert code == 0 and output.count("bit for bit") == 2, output
    assert (
        "ping-pong buffers of 3.5 MiB" in " ".join(output.split()) and "HCCL_BUFFSIZE is 8 MiB; any routing" in output
    ), output  # 1 is state


@pytest.mark.parametrize("args", [[], pytest.param(["--quant", "int8"], marks=nightly)], ids=["plain", "quant"])
def test_run_checks_a_layer_of_a_checkpoint(tmp_path: Path, args: list[str]) -> None:
    made = save("deepseek_v3", tmp_path / "model", dtype=torch.bfloat16)
    options = ["--checkpoint", str(made.directory), "--ranks", "2", "--batch", "9,0", *args]
    code, output = invoke("run", *options, "--layer", str(LAYER))
    assert code == 0 and "PASS in" in output and f"decoder layer {LAYER}" in output, output
    code, output = invoke("run", *options, "--layer", "0")
    assert code == 1 and "layer 0" in output and "layers with one: 1" in output and output.endswith("FAIL")


@pytest.mark.parametrize(
    ("name", "layer", "said"),
    [
        ("nemotron_h", 1, "activation relu2, hidden size 32; layers: 1 routed, 1 dense … H 16, K 3, E 8 (4 per rank)"),
        ("deepseek_v4", 0, "router deepseek_v4, activation swiglu, hidden size 32; layers: 1 routed, 1 hash BS … K 3"),
        ("longcat_flash", 1, "layers: 2 routed BS … H 32, K 5, E 8 (4 per rank) + 4 copy experts"),
        pytest.param(
            "gpt_oss", 1, "activation clipped_swiglu, hidden size 32; layers: 2 routed BS … K 2", marks=nightly
        ),
        pytest.param("llama4_text", 1, "router llama4, activation swiglu, hidden size 32 … K 1", marks=nightly),
    ],
)
def test_run_and_plan_take_layers_with_parts_of_their_own(name: str, layer: int, said: str) -> None:
    """Latent rows, biases, weighted inputs, ids by a table; plan says the width that travels, and the layers' kinds."""
    directory = str(saved(name).directory)
    code, output = invoke("run", "--checkpoint", directory, "--layer", str(layer), "-r", "2", "-b", "9,0", "-n", "1")
    assert code == 0 and "PASS in" in output, output
    code, output = invoke("plan", "--checkpoint", directory, "-r", "2")
    assert code == 0 and all(words in output for words in (*said.split(" … "), "fp32 rows")), output


@pytest.mark.parametrize(
    "kind", ["ModelSlim W4A8 by group", *(pytest.param(k, marks=nightly) for k in ("ModelSlim", "int4 by group"))]
)
def test_run_and_plan_take_quantised_experts(kind: str, tmp_path: Path) -> None:
    """int8 rows, as dispatch and combine of the reference have them; near the layer of the dequantised weights."""
    directory = str(tiny(kind).write(tmp_path))
    code, output = invoke("run", "--checkpoint", directory, "--layer", "0", "-r", "2", "-b", "9,5", "-n", "1")
    assert code == 0 and "PASS in" in output and "int8 rows, quantized experts" in output, output
    code, output = invoke("plan", "--checkpoint", directory, "-r", "2")
    assert code == 0 and "fp32 rows, sent as int8, contract" in output, output


def test_plan_of_a_checkpoint(tmp_path: Path) -> None:
    config = saved("gpt_oss").directory / "config.json"
    (tmp_path / "config.json").write_text(config.read_text().replace("float32", "bfloat16"))
    code, output = invoke("plan", "--checkpoint", str(tmp_path), "-r", "2")
    assert code == 0 and "layers: no files, not known" in output and "bf16 rows" in output, output
    code, output = invoke("plan", "--checkpoint", str(tmp_path), "-r", "2", "--json", "-")
    assert json.loads(output)["checkpoint"]["router"] == "softmax"
    (tmp_path / "config.json").write_text('{"model_type": "longcat_next"}')
    for options, said in (
        (["--topk", "2"], "'--topk': conflicts with --checkpoint, which sets this number"),
        (["--copy-expert-num", "2"], "'--copy-expert-num': conflicts with --checkpoint, which sets this number"),
        ([], "'--checkpoint': config.json has model_type 'longcat_next'; need one of"),
    ):
        code, output = invoke("plan", "--checkpoint", str(tmp_path), *options)
        assert code == 2 and said in " ".join(output.split()), output


# ---- what it refuses


def test_torchrun_is_not_for_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    code, output = invoke("run", "-p", "tiny")
    assert code == 2 and "run it without torchrun" in output
    code, output = invoke("--version")
    assert code == 0 and re.match(r"ascend_moe (\d|\(a source tree)", output)


@pytest.mark.parametrize("backend", ["threads", pytest.param("processes", marks=nightly)])
def test_an_error_of_the_ranks_is_printed_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    args = ("--batch", "1000", "-r", "2", "--backend", backend)
    code, output = invoke("run", "-p", "tiny", *args)
    assert code == 1 and output.endswith("FAIL"), output
    assert output.count("WindowTooSmall") == 1 and output.count("export HCCL_BUFFSIZE=") == 1
    found = run_json(*args, code=1)
    assert found["pass"] is False and "HCCL_BUFFSIZE=" in found["error"]


def quiet(stage: str, done: int, total: int) -> None:
    """No progress."""


def test_the_needed_window_counts_every_row_of_a_token() -> None:
    def needed(router: str, top_k: int, batch: int) -> int:
        config = MoEConfig(4096, 64, 8, top_k, router=router)
        return needed_mib(RunSpec(config, (batch, batch), torch.bfloat16, bytes(2 * batch)))

    assert needed("llama4", 4, 64) == needed("softmax", 1, 256) > needed("softmax", 1, 64)


# ---- checks that notice


@pytest.fixture(scope="module")
def finished() -> tuple[RunSpec, list[RankRecord]]:
    """A run of two ranks that is right."""
    batches = (7, 4)
    spec = RunSpec(PRESETS["tiny"].config(), batches, torch.bfloat16, default_text(), iterations=1)
    return spec, run.run_threads(spec, quiet)


def flip(tensor: torch.Tensor, row: int, column: int) -> None:
    tensor.view(torch.int16)[row, column] ^= 1


@pytest.mark.parametrize(
    "fault, caught",
    [
        (lambda record: None, []),
        (lambda record: flip(record.dispatched[0], 5, 17), [0]),
        (lambda record: record.dispatched[4][3:].add_(1), [0]),
        (lambda record: flip(record.out, 2, 0), [1]),
        (lambda record: record.expert_rows.zero_(), [1]),
        (lambda record: record.traffic["combine"].update(read_window_data=0), [2]),
        (lambda record: setattr(record, "steady", False), [3]),
        (lambda record: record.out.add_(1), [1, 4]),
    ],
)
def test_checks_notice(finished: tuple[RunSpec, list[RankRecord]], fault: Any, caught: list[int]) -> None:
    """Every check has faults of one rank that it, and it alone, must notice."""
    spec, records = finished[0], copy.deepcopy(finished[1])
    fault(records[1])
    outcome = verify(spec, records, quiet)
    assert [number for number, check in enumerate(outcome.checks) if not check.ok] == caught
    assert outcome.ok == (not caught)


@pytest.mark.parametrize(
    "name, config",
    [
        ("deepseek-v3", "DeepseekV3Config"),
        ("deepseek-v4-flash", "DeepseekV4Config"),
        ("glm-5", "GlmMoeDsaConfig"),
        ("gpt-oss-120b", "GptOssConfig"),
        ("longcat-flash", "LongcatFlashConfig"),
        ("minimax-m2", "MiniMaxM2Config"),
        ("mixtral", "MixtralConfig"),
        ("qwen3-30b", "Qwen3MoeConfig"),
        ("qwen3-next", "Qwen3NextConfig"),
    ],
)
def test_presets_are_the_models(name: str, config: str) -> None:
    values = getattr(transformers, config)().to_dict()
    if name == "qwen3-30b":
        values["norm_topk_prob"] = True  # as the published model sets it
    assert PRESETS[name].published == moe_config(values)


def test_an_option_has_one_name_everywhere() -> None:
    """By what it is called, its short name and the names of its values."""
    forms: dict[str, set[tuple[str, ...]]] = {}
    for command in root.COMMANDS:
        made = root.application(command)
        for option in typer.main.get_command(made).params:
            if option.name not in ("command", "help") and not option.name.endswith("_completion"):
                forms.setdefault(max(option.opts, key=len), set()).add(tuple(sorted(option.opts)))
    assert {name: seen for name, seen in forms.items() if len(seen) > 1} == {}
    assert forms["--batch"] == {("--batch", "-b")} and forms["--ranks"] == {("--ranks", "-r")}
    assert set(forms) >= {"--quant", "--comm-alg", "--dtype", "--json", "--plot", "--preset", "--soc", "--iterations"}
    others = {"--repeat", "--out-json", "--bs", "--ep", "--world", "--world-size", "--algorithm"} & set(forms)
    assert not others


@pytest.mark.parametrize("world", [4, 16, 64])
def test_a_heat_map_fits_into_80_columns(world: int) -> None:
    counts = torch.arange(world * 256).reshape(world, 256)
    lines = [line.plain for line in report.render(counts, 80)]
    assert max(map(len, lines)) <= 80
    totals = [sum(int(line.split()[-1]) for line in lines if line.startswith(f"  rank {r:<2}")) for r in range(world)]
    assert totals == counts.sum(1).tolist()
    sums = [line.split() for line in lines if line.startswith("  sum  ")]
    assert sum(int(words[-1]) for words in sums) == counts.sum()


# ---- what every command refuses

PREDICT = ["--ranks", "2,4", "--batch", "4", "--hidden", "512", "-k", "2", "-e", "8", "--cores", "4"]


@pytest.mark.parametrize(
    ("command", "argv", "text"),
    [
        ("bench", ["--preset", "gpt"], "--preset is 'gpt'"),
        ("bench", ["--batch", "8,x"], "'--batch': '8,x' is no list"),
        ("bench", ["--ranks", "3"], "divide the 256 experts"),
        ("bench", ["--methods", "ours,nccl"], "--methods contains 'nccl'"),
        ("bench", ["--sweep", "time"], "--sweep is 'time'"),
        ("bench", ["--batch", "99999"], "--batch is 99999; need 1..4096 tokens per rank"),
        ("bench", ["--json", "/nowhere/at/all.json"], "no folder"),
        ("run", ["--preset", "gpt-5"], "--preset is 'gpt-5'; need one of deepseek-v3"),
        ("run", ["--ranks", "3"], "--ranks: 3 ranks cannot share 256 experts evenly"),
        ("run", ["--batch", "many"], "--batch: 'many' is neither a number of tokens nor a list"),
        ("run", ["--batch", "1,2"], "--batch: '1,2' lists 2 ranks, there are 4"),
        ("run", ["--seed", str(2**63)], "'--seed'"),
        ("run", ["--dtype", "int4"], "--dtype is 'int4'; need one of bf16, fp16, fp32"),
        ("run", ["--backend", "mpi"], "--backend is 'mpi'; need one of threads, processes"),
        ("run", ["--checkpoint", "."], "'--layer': is required with --checkpoint"),
        ("run", ["--checkpoint", ".", "--layer", "1"], "--checkpoint: config.json does not exist"),
        ("run", ["--checkpoint", ".", "-p", "tiny"], "'--preset': conflicts with --checkpoint"),
        ("run", ["--text", "empty.txt"], "'--text': empty.txt is empty"),
        ("plan", ["--soc", "Ascend310P"], "--soc is 'Ascend310P'; need one of Ascend910B1"),
        ("plan", ["-b", "4", "--global-bs", "64"], "remove --batch"),
        ("plan", ["--global-bs", "65"], "multiple of the 16 ranks"),
        ("plan", ["--window", "-1"], "--window is -1; need 1..65535"),
        ("plan", ["--window", "0"], "--window is 0; need 1 or more, or leave the option out"),
        ("plan", ["--cores", "49"], "--cores is 49; Ascend910_9391 has 48"),
        ("predict", [*PREDICT, "--ranks", "eight"], "'--ranks': 'eight' is no list of integers"),
        ("predict", [*PREDICT, "--batch", "4097"], "BS = 4097"),
        ("predict", [*PREDICT, "--cores", "49"], "--cores is 49; Ascend910_9391 has 48"),
        ("validate", ["--device", "gpu"], "--device is 'gpu'; need one of auto, npu, cpu"),
        ("validate", ["--device", "npu"], "--device: there is no NPU: torch_npu is not installed"),
        ("validate", ["--dtype", ","], "--dtype is ''; need one of bf16, fp16, fp32"),
        ("validate", ["--ranks", "385"], "--ranks is 385; need 1..384"),
        ("validate", ["--times"], "'--times': needs --bringup: give both"),
        ("trace", ["-p", "tiny", "--ranks", "400", "--soc", "Ascend910_9391"], "ep_world_size is 400"),
        ("explore", ["--case", "zzz"], "--case: 'zzz' is not part of a case"),
        ("validate", ["--comm-alg", "push"], "--comm-alg is 'push'; need one of auto, window, direct, hierarchy"),
        ("bench", ["--comm-alg", "hierarchy"], "hierarchy works between servers; the ranks of bench share one"),
        ("run", ["--checkpoint", ".", "--layer", "1", "--topk", "2"], "'--topk': conflicts with --checkpoint"),
        ("run", ["-k", "999", "-r", "1"], "--topk is 999; a token of --preset deepseek-v3 chooses among 128 of 256"),
        ("run", ["-e", "8"], "--experts is 8; --preset deepseek-v3 has 8 groups of experts: pass a multiple of 8, at"),
        ("hang", ["/dev/zero", "/dev/zero"], "/dev/zero does not begin with a control block"),
        ("trace", ["-p", "tiny", "--out", "/dev/full"], "'--out' /dev/full: is a link or no regular file"),
        ("bench", ["--json", "link"], "is a link or no regular file"),
        ("trace", ["-p", "tiny", "--soc", "H100"], "--soc is 'H100'"),
        ("trace", ["-p", "tiny", "--comm-alg", "ring"], "--comm-alg is 'ring'; need one of auto, window"),
        ("trace", ["-p", "tiny", "--comm-alg", "hierarchy"], "predict it with --soc Ascend910B3 (A2) and --ranks 16"),
        ("trace", ["-p", "tiny", "-n", "0"], "--iterations is 0; it must be at least 1"),
        ("hang", ["--layout", "cann"], "--layout is 'cann'; need one of ascend_moe, cann-v1, cann-v2"),
    ],
)
def test_wrong_options_are_reported(
    command: str, argv: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, with the value as it was given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "link").symlink_to("empty.txt")
    monkeypatch.setattr(validate, "_npu", lambda: (None, "torch_npu is not installed"))
    code, out, err = commands.said(command, *argv)
    assert (code, out) == (2, "") and err.startswith(f"ascend-moe {command}: ") and err.count("\n") == 1, err
    assert text in err


@pytest.mark.parametrize(
    "line",
    ["explore -n 10000000", pytest.param("run --backend processes --iterations 1000", marks=nightly)],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_and_its_ranks(line: str, number: int) -> None:
    """Ctrl-C, which its ranks get too, and `kill`, which they do not. Ctrl-C with one line."""
    words = line.split()
    command = [sys.executable, "-m", "ascend_moe", *words]
    own = {name: value for name, value in os.environ.items() if name != "ASCEND_MOE_LIBRARY"}  # explore has another
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "env": own}
    # What a shell starts in the background ignores SIGINT, and so does all that it starts.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **pipes, start_new_session=True, preexec_fn=heed) as process:
        # Past its imports: it has opened the kernels, or has had time enough to.
        maps, late = Path(f"/proc/{process.pid}/maps"), time.monotonic() + 20
        while time.monotonic() < late and not re.search(r"libascend_moe(_checked|_timed)?\.so", maps.read_text()):
            time.sleep(0.2)
        time.sleep(2)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        try:
            _, said = process.communicate(timeout=30)  # until the ranks have ended too
        finally:
            process.kill()
    before = said.removesuffix(f"ascend-moe {words[0]}: interrupted\n")  # what it began, where stderr is no terminal
    assert (process.returncode, before == said) == (128 + number, number == signal.SIGTERM), said
    assert before.count("\n") <= 1 and before.startswith(f"ascend-moe {words[0]}: " * bool(before))


# ---- what commands have in common


def test_a_file_that_cannot_be_written_or_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    path = tmp_path / "numbers.json"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda file, *_, **__: refuse(file))
        assert commands.said("plan", "--json", str(path))[::2] == (
            2,
            f"ascend-moe plan: {path}: No space left on device\n",
        )
    assert not [*tmp_path.iterdir()]
    (tmp_path / "config.json").touch()
    for name in ("read_text", "read_bytes"):
        monkeypatch.setattr(Path, name, lambda file, **_: refuse(file))
    assert "config.json cannot be read: [Errno 28]" in invoke("plan", "--checkpoint", str(tmp_path))[1]


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "missing", "/own/file"), OSError("no memory")])
def test_an_error_of_the_program_has_a_traceback(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "plan", Mock(side_effect=error))
    with pytest.raises(OSError, match=r"missing|no memory"):
        commands.said("plan", "--json", "numbers.json")


@pytest.mark.parametrize("option", ["--install-completion", "--show-completion"])
@pytest.mark.parametrize("command", root.COMMANDS)
def test_no_command_offers_completion(command: str, option: str) -> None:
    """Its scripts would complete a program of the command's name, which there is not."""
    code, out, err = commands.said(command, option)
    assert code == 2 and out == "" and f"No such option: {option}" in err


@pytest.mark.parametrize("words", ["", *root.COMMANDS, "twin build", "twin list"])
def test_a_flag_has_no_type_in_the_help(words: str) -> None:
    code, out, _ = commands.said(*words.split(), "--help")
    assert code == 0 and "--help" in out and "<bool>" not in out


@pytest.mark.parametrize(("algorithm", "share"), [("window", 0), ("direct", 0), ("hierarchy", 0), ("hierarchy", 2)])
def test_comm_alg_is_what_the_ops_run(algorithm: str, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one server hierarchy is window. The variable is as before."""
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))
    options = f"--iterations 1 --batch 3,0,2,3 -k 3 -e 8 --hidden 64 --comm-alg {algorithm}"
    found = run_json(*options.split())
    names = {name for of_rank in found["algorithms"] for name in of_rank.values()}
    assert found["pass"] and names == {algorithm if share or algorithm != "hierarchy" else "window"}
    assert os.environ.get("ASCEND_MOE_COMM_ALG") is None
    assert [found["config"][name] for name in ("top_k", "num_experts", "hidden_size")] == [3, 8, 64]


# ---- hostile values

FUZZED = {
    "run": (["-p", "tiny", "--iterations", "1", "--batch", "2"], ["--ranks", "--batch", "--seed", "--layer"]),
    "doctor": ([], ["--ranks", "--batch", "--experts", "--window", "--cores", "--group"]),
    "hang": (["--layout", "cann-v1", "/nothing", "/nothing"], ["--experts", "--layout"]),
    "plan": ([], ["--ranks", "--batch", "--global-bs", "--hidden", "-k", "-e", "--window", "--cores"]),
    "validate": (["--device", "cpu", "-r", "1", "--extra", "0", "--dtype", "bf16"], ["--ranks", "--seed", "--extra"]),
    "bench": (["--methods", "nothing"], ["--ranks", "--batch", "-n"]),
    "trace": (["-p", "tiny", "--iterations", "1"], ["--ranks", "--batch", "--seed", "-e", "-k", "--hidden"]),
    "predict": (PREDICT, ["--ranks", "--batch", "--hidden", "-k", "-e", "--cores"]),
    "explore": (["--case", "w2,c2,l1,k1,b1,u1,DCDC", "-n", "1"], ["--seed", "--preemptions", "--case", "--replay"]),
    "twin": (["list"], ["/etc/passwd"]),
    "vnpu": (["--devices", "0"], ["--devices"]),
    "shim": ([], ["--nothing"]),
}
HOSTILE = ["-1", "0", *map(str, (2**31, 2**62, 2**63 - 1, 2**64)), "9" * 30, "²", "", "nan", "-5:1", f"{10**11}:1"]


@pytest.mark.parametrize("command", root.COMMANDS)
def test_no_value_makes_a_traceback(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every command with every hostile value: a result or a refusal. Any other exception fails the test."""
    monkeypatch.setattr(validate, "_npu", lambda: (None, "torch_npu is not installed"))
    monkeypatch.chdir(tmp_path)
    base, options = FUZZED[command]
    for option in options:
        for value in HOSTILE:
            said = commands.said(command, *base, option, value)
            assert said.code in (0, 1, 2, 3) and "Traceback" not in said.err, (option, value, said)
