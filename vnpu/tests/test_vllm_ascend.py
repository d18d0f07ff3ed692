"""Unmodified vLLM and vllm-ascend generate on the virtual NPU what transformers generates in fp32, within bf16's error.

`make test-vllm-ascend` runs these in an environment that has both.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from npu_runs import HERE, left_behind, traces
from vllm_prompts import PROMPTS

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("vllm_ascend") is None, reason="make test-vllm-ascend has vllm-ascend"),
]

# Of router logits: so far apart are those of the last chosen expert and the next at every token of every model.
MARGIN = 0.1
# How far a log-probability may be from that of transformers in fp32, by the precision of products.
BF16, INT8, LATENT_INT8 = 0.1, 0.2, 0.3


class Row(NamedTuple):
    """What to run, what its log must show, and how far a log-probability may be from that in fp32."""

    model: str
    options: dict[str, Any]
    log: tuple[str, ...] = ()
    series: str = "A2"
    limit: float = BF16


EAGER = {
    "dtype": "bfloat16",
    "max_model_len": 384,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,  # so that long prompts come in parts
    "gpu_memory_utilization": 0.02,
    "num_gpu_blocks_override": 64,
    "enforce_eager": True,
}
TWO = {**EAGER, "tensor_parallel_size": 2, "enable_expert_parallel": True}
METHOD = r"MoE comm method selected: .*method=MoECommType.{}"
REPLACED = r"ASCEND_MOE_PATCH=1: replaced .*\bnpu_moe_distribute_dispatch_v2\b.* in torch_npu"
ALL_GATHER = (METHOD.format("ALLGATHER"),)
MC2 = (METHOD.format("MC2"), METHOD.format("ALLTOALL"), REPLACED)
W8A8 = {"quantization": "ascend"}
ACCEPTED = r"METRIC vllm:spec_decode_num_accepted_tokens [1-9]"
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
ROWS = {
    "qwen3": Row("Qwen3Moe", EAGER),
    "qwen3-all-gather": Row("Qwen3Moe", TWO, ALL_GATHER),
    "qwen3-mc2": Row("Qwen3Moe", TWO, MC2, "A3"),
    "qwen3-w8a8": Row("Qwen3MoeW8A8", {**EAGER, **W8A8}, limit=INT8),
    "qwen3-w8a8-mc2": Row("Qwen3MoeW8A8", {**TWO, **W8A8}, MC2, "A3", INT8),
    "deepseek-v2": Row("DeepseekV2", EAGER),
    "deepseek-v2-all-gather": Row("DeepseekV2", TWO, ALL_GATHER),
    "deepseek-v2-mc2": Row("DeepseekV2", TWO, MC2, "A3"),
    "deepseek-v2-w8a8": Row("DeepseekV2W8A8", {**EAGER, **W8A8}, limit=LATENT_INT8),
    "deepseek-v2-w8a8-mc2": Row("DeepseekV2W8A8", {**TWO, **W8A8}, MC2, "A3", LATENT_INT8),
    "deepseek-v3-mtp": Row("DeepseekV3", {**EAGER, **MTP}, (ACCEPTED,)),
}
for name, eager, mode, kind in (
    ("qwen3-piecewise", "qwen3", "PIECEWISE", "PIECEWISE"),
    ("qwen3-full", "qwen3", "FULL_DECODE_ONLY", "FULL"),
    ("qwen3-mc2-full", "qwen3-mc2", "FULL_DECODE_ONLY", "FULL"),
    ("qwen3-w8a8-full", "qwen3-w8a8", "FULL_DECODE_ONLY", "FULL"),
    ("deepseek-v2-full", "deepseek-v2", "FULL_DECODE_ONLY", "FULL"),
    ("deepseek-v2-w8a8-full", "deepseek-v2-w8a8", "FULL_DECODE_ONLY", "FULL"),
):
    graphs = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4]}
    options = {**ROWS[eager].options, "enforce_eager": False, "compilation_config": graphs}
    log = (rf"Capturing a aclgraph on \({kind},", "Replaying aclgraph", *ROWS[eager].log)
    ROWS[name] = ROWS[eager]._replace(options=options, log=log)


def on_vnpu(*words: str, series: str = "A2", **env: str) -> dict[str, Any]:
    """Arguments of `subprocess.run` for a script of this folder or a command of the environment on the virtual NPU.

    Imports of torchvision succeed.
    """
    path = os.pathsep.join([str(HERE / "vllm_site"), os.environ.get("PYTHONPATH", "")])
    first, *arguments = words
    command = (
        [sys.executable, str(HERE / first)] if first.endswith(".py") else [str(Path(sys.executable).with_name(first))]
    )
    soc = {"A2": "Ascend910B3", "A3": "Ascend910_9391"}[series]
    start = [sys.executable, "-m", "ascend_moe", "vnpu", "--no-verify", "--soc", soc, "--"]
    changed = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VNPU_TEST_SERIES": series, "ASCEND_MOE_PATCH": "1", **env}
    return {"args": [*start, *command, *arguments], "env": {**os.environ, **changed}}


@contextmanager
def running(log: Path, command: dict[str, Any]) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """A command that does not end by itself. Yields a function that waits for a text in its log; ends all processes."""
    with log.open("wb") as file:
        process = subprocess.Popen(**command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    def shows(pattern: str) -> subprocess.Popen[bytes]:
        end = time.monotonic() + 1000
        while not re.search(pattern, text := log.read_text(errors="replace")):
            assert process.poll() is None and time.monotonic() < end, f"{pattern!r} is not in {text[-8000:]}"
            time.sleep(0.5)
        return process

    try:
        yield shows
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # the resource tracker stays, and removes shared memory
            time.sleep(5)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def models(*words: str) -> str:
    done = subprocess.run(**on_vnpu("vllm_models.py", *words), capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model_of(folders: Path, name: str) -> Path:
    folder = folders / name
    if not folder.exists():
        models("write", str(folder), name)
    return folder


def generation(folder: Path, row: Row, script: str = "vllm_generate.py", **env: str) -> dict[str, Any]:
    workers = "tensor_parallel_size" in row.options
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if workers else "0",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "ASCEND_MOE_LOG": "debug",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        **env,
    }
    return on_vnpu(script, str(folder), json.dumps(row.options), series=row.series, **env)


class Generated(NamedTuple):
    """Of the prompts together, again, and one by one: each token with log-probabilities by token; and the log.

    The rounds need not be the same: sums over other batches may be rounded otherwise.
    """

    rounds: list[list[list[tuple[int, dict[str, float]]]]]
    cached: list[list[int]]  # tokens of each prompt that the prefix cache had
    log: str


@functools.cache
def generate(folders: Path, name: str) -> Generated:
    row = ROWS[name]
    file = folders / f"{name}.results"
    command = generation(model_of(folders, row.model), row, VNPU_TEST_RESULTS=str(file))
    done = subprocess.run(**command, capture_output=True, text=True, timeout=1000)
    found = file.read_text() if file.exists() else ""
    rounds, cached = (
        [json.loads(text) for text in re.findall(rf"^{word} (.*)$", found, re.M)] for word in ("ROUND", "CACHED")
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0 and len(rounds) == len(cached) == 3, text[-8000:]
    return Generated(rounds, cached, text)


@pytest.mark.parametrize("name", ROWS)
def test_log_probabilities_are_those_of_transformers(name: str, folders: Path) -> None:
    row, made = ROWS[name], generate(folders, name)
    assert [[len(part) for part in tokens] for tokens in made.rounds] == [[16] * len(PROMPTS)] * 3
    found = json.loads(models("compare", str(model_of(folders, row.model)), str(folders / f"{name}.results")))
    worst, least = max(distance for distance, _ in found), min(margin for _, margin in found)
    print(f"{name}: {worst:.3f}, margin {least:.2f}")
    assert worst <= row.limit and least >= MARGIN, sorted(found)[-12:]
    for pattern in row.log:
        assert re.search(pattern, made.log), pattern
    for prompt, count in zip(PROMPTS, made.cached[1], strict=True):
        pages = len(prompt) // 128 - ("speculative_config" in row.options)  # with a draft the last one does not count
        assert count == max(pages, 0) * 128


@pytest.mark.parametrize(("name", "eager"), [("qwen3-full", "qwen3"), ("qwen3-mc2-full", "qwen3-mc2")])
def test_graphs_generate_the_tokens_of_eager(name: str, eager: str, folders: Path) -> None:
    """One prompt after the other: which prompts come together is a matter of time, and so is rounding."""
    found, want = ([[step[0] for step in steps] for steps in generate(folders, row).rounds[2]] for row in (name, eager))
    assert found == want


def test_mc2_calls_this_package_s_operators_on_every_rank(folders: Path) -> None:
    log = generate(folders, "qwen3-mc2").log
    counted = []
    for rank in range(2):
        line = rf" DEBUG ascend_moe: rank {rank}: call (\d+), npu_moe_distribute_(\w+)_v2 on \S+: .* returned"
        calls = re.findall(line, log)
        assert calls == [(str(i + 1), ("dispatch", "combine")[i % 2]) for i in range(len(calls))], calls[:9]
        counted.append(len(calls))
    steps = 15 * len(PROMPTS)  # of the prompts that come alone, each with two layers
    assert counted[0] == counted[1] >= 4 * steps


def test_without_this_package_s_operators_the_error_names_cann_s(folders: Path, tmp_path: Path) -> None:
    row = ROWS["qwen3-mc2"]
    command = generation(model_of(folders, row.model), row, ASCEND_MOE_PATCH="0")
    with running(tmp_path / "log", command) as shows:  # vLLM's processes go on after the error
        shows("RuntimeError: aclnnMoeDistributeDispatchV2 or .* not in libopapi.so")


def test_compare_names_faults_planted_into_vllm_ascend_s_fused_moe(folders: Path) -> None:
    """On rank 1, whose first token is the last of three; rank 0 names them too."""
    row, file = ROWS["qwen3-mc2"], folders / "compared"
    given = {"script": "vllm_compare.py", "VNPU_TEST_RESULTS": str(file)}
    command = generation(model_of(folders, row.model), row, **given)
    done = subprocess.run(**command, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    found = {fault: ranks for fault, _, ranks in (line.partition(" ") for line in file.read_text().splitlines())}
    wanted: dict[str, dict[str, Any] | None] = {
        "right": None,
        "weight": {"stage": "parameters", "expert": 9, "element": 7 * 1024 + 9},
        "id": {"stage": "ids", "token": 0, "element": 1},
        "scale": {"stage": "scales", "token": 0, "element": 2},
        "order": {"stage": "experts", "element": 32},  # those before it are 0 in these models
    }
    for fault, want in wanted.items():
        for steps, named in json.loads(found[fault]):
            assert steps == 1 and (want and {**named, **want, "rank": 1}) == named, (fault, named)


def test_server_completes_prompts_as_the_offline_run(folders: Path, tmp_path: Path) -> None:
    name, before = "qwen3", traces()
    alone = [[token for token, _ in steps] for steps in generate(folders, name).rounds[2]]
    options, folder = tmp_path / "options.yaml", str(model_of(folders, ROWS[name].model))
    options.write_text(json.dumps({key.replace("_", "-"): value for key, value in ROWS[name].options.items()}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = "vllm", "serve", folder, "--config", str(options), "--host", "127.0.0.1", "--port", str(port)
    with running(tmp_path / "log", on_vnpu(*words)) as shows:
        server = shows("Application startup complete")
        for prompt, want in zip(PROMPTS, alone, strict=True):
            body = {"model": folder, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            connection = HTTPConnection("127.0.0.1", port, timeout=300)
            text = json.dumps({**body, "return_token_ids": True})
            connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
            answer = json.load(connection.getresponse())
            connection.close()
            assert answer["choices"][0]["token_ids"] == want
        server.send_signal(signal.SIGINT)
        server.wait(120)
        end = time.monotonic() + 60
        with pytest.raises(ProcessLookupError):  # the engine ends with it
            while time.monotonic() < end:
                os.killpg(server.pid, 0)
                time.sleep(0.2)
    assert not left_behind(before)
