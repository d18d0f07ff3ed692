"""The torch_npu adapter on the virtual NPU: an unmodified torch_npu wheel, npu tensors, end to end."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ascend_moe
from ascend_moe.native import library

pytestmark = pytest.mark.npu

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "npu_moe_layer.py"
CUST = Path("opp/op_api/lib/libcust_opapi.so")
DISPATCH, COMBINE = "AscendMoeDistributeDispatch", "AscendMoeDistributeCombine"
EVERY_CASE = (
    "bad_calls",
    "collective_errors",
    "skipped_by_cann",
    "empty_batches",
    "capture_and_replay",
    "patched",
    "wrong_devices",
    "not_blocking",
    "own_window_size",
    "another_current_device",
    "too_small",
    "refused_by_tiling",
    "timeouts",
)


def libraries() -> Path:
    return library.library_path("fast").parent / "vnpu"


def on_vnpu(
    command: list[str], *options: str, timeout: float = 280, **env: str | None
) -> subprocess.CompletedProcess[str]:
    """``ascend-moe vnpu OPTIONS -- COMMAND`` with the ranks' own tracebacks, within a time that ends."""
    environment = {**os.environ, "ASCEND_MOE_TIMEOUT_S": "60"}
    for name, value in env.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    words = [sys.executable, "-m", "ascend_moe", "vnpu", *options, "--", *command]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, env=environment, cwd=HERE, check=False
    )


def torchrun(world: int, *words: str) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(world), *words),
    ]


def run_cases(folder: Path, cases: tuple[str, ...], *options: str, **env: str | None) -> list[dict[str, Any]]:
    """Results of two ranks; a rank that raised ends the test with its traceback."""
    folder.mkdir(parents=True)
    report = folder / "report.jsonl"
    done = on_vnpu(
        torchrun(2, str(HERE / "npu_ranks.py"), str(folder), *cases),
        *("--no-verify", *options),  # the example has the wheel's files compared
        ASCEND_MOE_VNPU_REPORT=str(report),
        **env,
    )
    paths = [folder / f"{rank}.json" for rank in range(2)]
    assert all(path.is_file() for path in paths), done.stdout[-2000:] + done.stderr[-6000:]
    results: list[dict[str, Any]] = [json.loads(path.read_text()) for path in paths]
    for result in results:
        raised = [one["trace"] for one in result.values() if isinstance(one, dict) and "trace" in one]
        assert not raised, raised[0]
        assert set(result) == set(cases)
    assert done.returncode == 0, done.stderr[-6000:]
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    counts = {line["rank"]: line["launches"] for line in lines if line["launches"]}
    assert set(counts) == {"0", "1"}
    assert all(count[DISPATCH] > 10 and count[COMBINE] > 10 for count in counts.values())
    return results


@pytest.fixture(scope="module")
def a3(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every case on two ranks of an A3."""
    return run_cases(tmp_path_factory.mktemp("a3") / "out", EVERY_CASE)


def both(results: list[dict[str, Any]], case: str) -> list[Any]:
    return [result[case] for result in results]


# ---- the example, as a user runs it


def test_the_wheel_is_there() -> None:
    """These tests are for one pair of versions; without the wheel they fail, and never skip."""
    assert importlib.metadata.version("torch_npu") == "2.13.0"


def pasted_output() -> list[str]:
    """The comment at the end of the example, below "# Output:"."""
    lines = EXAMPLE.read_text().partition("\n# Output:\n")[2].splitlines()
    assert len(lines) == 8 and all(line.startswith("# ") for line in lines)
    return [line[2:] for line in lines]


@pytest.mark.parametrize("soc, server_type", [("Ascend910_9391", 1), ("Ascend910B3", 0)])
def test_example(soc: str, server_type: int, tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    # The wheel's files are compared with its RECORD before anything starts.
    done = on_vnpu(torchrun(4, str(EXAMPLE)), "--soc", soc, ASCEND_MOE_VNPU_REPORT=str(report))
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    said = [line for line in done.stdout.splitlines() if line.startswith(("V1", "V2", "rank"))]
    want = [line.replace("Ascend910_9391", soc) for line in pasted_output()]
    assert said == want
    # The kernels have run, on every rank, the one without tokens too; nothing else gave these tensors.
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    counted = {line["rank"]: line for line in lines if line["launches"]}
    assert set(counted) == {"0", "1", "2", "3"}
    for line in counted.values():
        assert line["launches"] == {DISPATCH: 4, COMBINE: 4} and line["skips"] == {}
        assert (line["soc"], line["server_type"]) == (soc, server_type)


def test_example_on_two_servers() -> None:
    """Two times 8 ranks of an A2, RDMA between them: V2's third tensor is another one there."""
    words = ("--no-verify", "--soc", "Ascend910B3", "--devices", "16")
    done = on_vnpu(torchrun(16, str(EXAMPLE)), *words, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert done.stdout.count(": PASS\n") == 16


def test_example_never_mentions_the_virtual_device() -> None:
    """The text is what an NPU's owner runs: only the line that shows how to start it names vnpu."""
    lines = [line for line in EXAMPLE.read_text().splitlines() if "vnpu" in line.lower()]
    assert lines == [line for line in lines if line.strip().startswith("ascend-moe vnpu -- torchrun")]
    assert len(lines) == 1


def copied_libraries(folder: Path) -> Path:
    shutil.copytree(libraries(), folder / "vnpu")
    return folder / "vnpu"


def test_missing_symbol(tmp_path: Path) -> None:
    """Without our aclnn symbol nothing answers in its place."""
    changed = copied_libraries(tmp_path)
    name, other = b"\0aclnnAscendMoeDistributeCombine\0", b"\0aclnnAscendMoeDistributeCombinX\0"
    data = (changed / CUST).read_bytes()
    assert data.count(name) >= 1
    (changed / CUST).write_bytes(data.replace(name, other))
    report = tmp_path / "report.jsonl"
    done = on_vnpu(
        torchrun(2, str(HERE / "npu_ranks.py"), str(tmp_path), "empty_batches"),
        "--no-verify",
        ASCEND_MOE_VNPU_LIBRARIES=str(changed),
        ASCEND_MOE_VNPU_REPORT=str(report),
    )
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for result in results:
        trace = result["empty_batches"]["trace"]
        assert "LibraryError: aclnnAscendMoeDistributeCombine is not among the operators" in trace, (
            done.stderr
        )
        assert "install the ascend_moe opp package" in trace
    assert all(COMBINE not in json.loads(line)["launches"] for line in report.read_text().splitlines())


def test_missing_operators(tmp_path: Path) -> None:
    changed = copied_libraries(tmp_path)
    (changed / CUST).unlink()
    done = on_vnpu([sys.executable, "-c", "print('ran')"], ASCEND_MOE_VNPU_LIBRARIES=str(changed))
    assert done.returncode != 0 and "ran" not in done.stdout
    assert "libcust_opapi.so" in done.stderr and "Traceback" not in done.stderr


def test_missing_wheel(tmp_path: Path) -> None:
    """A Python without torch_npu is refused before anything starts."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    own = str(Path(ascend_moe.__file__).resolve().parent.parent)
    path = own if not (Path(own) / "torch_npu").is_dir() else None
    words = [sys.executable, "-m", "ascend_moe", "vnpu", "--", str(tmp_path / "venv/bin/python"), "-c", "1"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment, **({"PYTHONPATH": path} if path else {})},
        cwd=HERE,
        check=False,
    )
    assert done.returncode != 0
    assert "torch" in done.stderr and "Traceback" not in done.stderr


# ---- errors


def test_bad_calls_say_what_they_say_on_cpu(a3: list[dict[str, Any]]) -> None:
    """Hundreds of spoilt calls: same type, same line, same details; a good call still works after each."""
    for found in both(a3, "bad_calls"):
        assert found["differ"] == []
        assert found["agreed"] > 900
        assert found["afterwards"] is None


def test_collective_errors(a3: list[dict[str, Any]]) -> None:
    for found in both(a3, "collective_errors"):
        assert found["cpu"]["type"] == "InvalidExpertId"
        assert "rank 1, token 1, k 1 has expert id 15" in found["cpu"]["text"]
        assert found["launch"] is None  # the kernel's finding is not known yet
        assert found["next"] == found["check"] == found["cpu"]
        for calm in ("again", "check after", "check twice", "works"):
            assert found[calm] is None, calm


def test_wrong_devices(a3: list[dict[str, Any]]) -> None:
    words = {
        "cpu tensors, hccl name": "is an HCCL communicator, whose windows are on NPUs",
        "npu tensors, gloo name": "has its windows in CPU memory, but the tensors are on an NPU",
        "npu tensors, unknown name": "npu_moe_distribute_dispatch: group_ep='nobody' names no live ",
        "npu tensors, c10d name": "use ascend_moe.comm_name(process_group)",
        "one on cpu": "expert_ids is on cpu, x on npu:",
        "x on cpu": "x is on cpu, expert_ids on npu:",
        "wrong world": "ep_world_size is 3, but the group of group_ep has 2 ranks",
        "wrong rank": "but this is rank",
    }
    for found in both(a3, "wrong_devices"):
        assert set(found) == set(words)
        for label, text in words.items():
            assert found[label]["type"] == "ArgumentError" and text in found[label]["text"], label
            assert "\n" not in found[label]["text"]


def test_window_too_small(a3: list[dict[str, Any]]) -> None:
    for found in both(a3, "too_small"):
        assert found["npu"] == found["cpu"]
        assert found["npu"]["type"] == "WindowTooSmall" and "HCCL_BUFFSIZE=448" in found["npu"]["text"]


def test_refused_by_tiling(a3: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(both(a3, "refused_by_tiling")):
        assert found["type"] == "AscendMoeError"
        assert f"rank {rank}: " in found["text"] and "failed with aclnn status 561002: " in found["text"]
        assert "HCCL_BUFFSIZE is no whole number of MiB" in found["text"] and "\n" not in found["text"]


def test_timeouts(a3: list[dict[str, Any]]) -> None:
    waited, late = both(a3, "timeouts")
    assert waited["check"]["type"] == "CommTimeout" and "missing: rank 1" in waited["check"]["text"]
    assert waited["later"] == waited["later check"] == waited["check"]
    assert late["check"]["type"] == "CommTimeout" and "found by rank 0" in late["check"]["text"]
    for found in (waited, late):
        assert found["closed"] and found["check after close"] is None and found["fresh group"] is None
        for when in ("check", "op after close"):
            assert "has failed for good: destroy its process group" in found[when]["text"], when


def test_killed_peer(tmp_path: Path) -> None:
    words = torchrun(2, "--monitor-interval", "5", str(HERE / "npu_ranks.py"), str(tmp_path), "killed_peer")
    done = on_vnpu(words, "--no-verify", ASCEND_MOE_TIMEOUT_S="60")
    assert (tmp_path / "0.json").is_file(), done.stderr[-6000:]
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["error"]["type"] == "PeerLost" and "rank 1 is lost" in found["error"]["text"]
    assert found["seconds"] < 20  # the deadline is 60 s


# ---- launches


def test_empty_batches_launch(a3: list[dict[str, Any]]) -> None:
    for found in both(a3, "empty_batches"):
        assert found == {"wrong": [], "launches": [4, 4]}


def test_cann_skips_what_has_only_empty_outputs(a3: list[dict[str, Any]]) -> None:
    assert both(a3, "skipped_by_cann") == [[0, 0], [0, 0]]


def test_capture_and_replay(a3: list[dict[str, Any]]) -> None:
    for found in both(a3, "capture_and_replay"):
        assert "run every op once before the capture" in found["cold"]["text"]
        assert found["wrong"] == []
        assert found["launches"] == [1, 1]
        assert found["bad replay"]["type"] == "InvalidExpertId"
        # Combine fails too, later in the same replay; the first cause is what is told.
        assert found["bad replay"]["text"].startswith("dispatch: rank 0, token 0, k 0 has expert id 12")
        assert found["afterwards"] is None


def test_inputs_and_memory(a3: list[dict[str, Any]]) -> None:
    for found in both(a3, "not_blocking"):
        assert found["wrong"] == []
        assert found["grown"] == 0
        assert "is not differentiable yet" in found["backward"]["text"]


def test_window_size_of_a_group(a3: list[dict[str, Any]]) -> None:
    for found in both(a3, "own_window_size"):
        assert (found["mib"], found["wrong"]) == (64, [])
        assert found["too small"]["type"] == "WindowTooSmall"
        fix = 'make the group with pg_options.hccl_config["hccl_buffer_size"] = 448 on all ranks'
        assert found["too small"]["text"].endswith(fix) and "export" not in found["too small"]["text"]


def test_the_tensors_device_counts(a3: list[dict[str, Any]]) -> None:
    assert both(a3, "another_current_device") == [[], []]


def test_patch_torch_npu(a3: list[dict[str, Any]]) -> None:
    for found in both(a3, "patched"):
        assert found["swapped"] == found["restored"] == [True] * 6
        assert found["torch.ops untouched"] is True and found["barrier"] is True
        assert found["sum"] < 0.05 and found["rms"] < 0.05
        assert found["wrong"] == []


# ---- other settings


@pytest.mark.parametrize(
    "options, env",
    [
        (("--soc", "Ascend910B3"), {}),
        ((), {"TASK_QUEUE_ENABLE": "2"}),
        ((), {"TASK_QUEUE_ENABLE": "0"}),
        ((), {"ASCEND_LAUNCH_BLOCKING": "1"}),
    ],
    ids=["A2", "queue 2", "no queue", "blocking"],
)
def test_other_settings(options: tuple[str, ...], env: dict[str, str], tmp_path: Path) -> None:
    cases = ("collective_errors", "empty_batches", "timeouts")
    results = run_cases(tmp_path / "out", cases, *options, **env)
    test_collective_errors(results)
    test_empty_batches_launch(results)
    test_timeouts(results)
