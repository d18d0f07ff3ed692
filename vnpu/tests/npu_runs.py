"""Runs on the virtual NPU: scripts of checks, the processes that run them, and what these leave behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ascend_vnpu

HERE = Path(__file__).resolve().parent
FOLDERS = (HERE, HERE.parents[1] / "tests" / "npu")  # of scripts
SECONDS = 280.0  # a machine with more ranks than cores
# The default of the ops is direct, as on an NPU that has passed the bring-up; test_validate_npu.py has the others.
PROVEN = {"ASCEND_MOE_PROVEN": "all"}
LAST_LINE = "every check has passed"


# ---- in a process with torch_npu

ORDER: list[str] = []  # the names of all aclnn functions that were called
# Operators that model_checks.py, serving_checks.py and tests/npu/moe_operator_checks.py call; all others are called by
# operator_checks.py.
PARTS = {
    "models": "aclnn(Foreach|Fla|FusedInfer|QuantMatmul|TransQuant|WeightQuant|Dropout|NLLLoss|ConstantPad|NpuFormat|"
    "GroupedMatmulWeightNz|LayerNormBackward|RmsNormGrad|MseLoss|Amp)",
    "serving": "(atb|Atb|aclnn(InterleaveRope|KvRmsNormRope|AttentionUpdate|TransposeBatch|Scatter(Pa|Nd)|GatherPa|"
    "AddRmsNormDynamic))",
    "moe": "aclnn(Moe|GroupedMatmul|SwiGlu|ClippedSwiglu|DynamicQuant|DequantSwiglu)",
}
# torch_npu looks for these to learn whether there is a grouped matmul or a log_sigmoid, and then calls V5 or Forward.
NEVER_CALLED = {"aclnnGroupedMatmulV4", "aclnnLogSigmoid"}
NEVER_CALLED_BY_2_10 = {  # that one computes them on the CPU
    *("aclnnInplaceCeil", "aclnnLeftShift", "aclnnLeftShifts", "aclnnRightShift", "aclnnRepeatInterleaveTensor"),
    "aclnnMoeGatingTopKV2",
}


def record_operators() -> None:
    from ascend_vnpu import operators  # not for those that start processes only

    run_one = operators.run

    def recorded(name: str, address: int, count: int) -> str:
        ORDER.append(name)
        return run_one(name, address, count)

    operators.run = recorded


def unexpected(part: str) -> set[str]:
    """Return the operators of a part that torch_npu has not called, or has called although it never does."""
    from ascend_vnpu import operators

    older = torch.__version__.startswith("2.10.")
    mine = {name for name in operators.OPERATORS if part_of(name) == part}
    return (mine - set(ORDER)) ^ (mine & (NEVER_CALLED | NEVER_CALLED_BY_2_10 if older else NEVER_CALLED))


def part_of(name: str) -> str:
    return next((part for part, pattern in PARTS.items() if re.match(pattern, name)), "plain")


@contextmanager
def raises(pattern: str, kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """The block, or waiting for what it has started, raises an error of this kind that matches."""
    try:
        yield
        torch.npu.synchronize()
    except kind as error:
        assert re.search(pattern, str(error)), f"{pattern!r} is not in {error}"
    else:
        raise AssertionError(f"nothing was raised; expected {pattern!r}")


def mixed(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def near(found: torch.Tensor, want: torch.Tensor, limit: float = 1e-5) -> None:
    gap = float((found.detach().cpu().float() - want.detach().float()).abs().max())
    assert gap <= limit, f"{gap} is over {limit}"


def run_checks(names: Iterable[str] = ()) -> None:
    """Runs the script's functions check_*, or these. The first that raises ends the process: others may wait for it."""
    script = vars(sys.modules["__main__"])
    try:
        for name in names or [name for name in script if name.startswith("check_")]:
            script[name]()
        print(LAST_LINE, flush=True)
    except Exception:
        print(f"{name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        sys.exit(1)


# ---- in a test


@dataclass(frozen=True)
class RankOutputs:
    """Exit codes and texts of the ranks of a run, in rank order."""

    codes: tuple[int, ...]
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]

    def must_pass(self, last_line: str = LAST_LINE) -> None:
        for rank, code in enumerate(self.codes):
            text = f"rank {rank} ended with {code}:\n{self.stdout[rank]}\n{self.stderr[rank][-6000:]}"
            assert code == 0 and self.stdout[rank].endswith(f"{last_line}\n"), text


def run(
    script: str, *arguments: str, world: int = 1, env: Mapping[str, str] | None = None, **device: Any
) -> RankOutputs:
    """Runs a file of `FOLDERS`, or a text as ``python -c``, as ``world`` ranks on the virtual NPU.

    Each gets RANK, WORLD_SIZE and STORE, a path for the group's store. ``device``: soc and devices.
    """
    words = ["-c", script]
    if script.endswith(".py"):
        words = [str(next(folder / script for folder in FOLDERS if (folder / script).is_file()))]
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            place = {"RANK": str(rank), "WORLD_SIZE": str(world), "STORE": f"{folder}/store"}
            base = {**os.environ, "ASCEND_MOE_TIMEOUT_S": "60", **PROVEN, **place}
            own = {**ascend_vnpu.environment(base=base, **device), **(env or {})}
            pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            processes.append(subprocess.Popen([sys.executable, *words, *arguments], env=own, **pipes))
        try:
            texts = [process.communicate(timeout=SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    codes = tuple(process.returncode for process in processes)
    return RankOutputs(codes, tuple(out for out, _ in texts), tuple(err for _, err in texts))


def launch(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """``ascend-moe vnpu WORDS``, as a user types it."""
    return subprocess.run(
        [sys.executable, "-m", "ascend_moe", "vnpu", *words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "ASCEND_MOE_TIMEOUT_S": "60", **PROVEN, **env},
    )


def traces() -> set[str]:
    """Names that a run could leave on this machine: in /dev/shm. All other memory has no name."""
    return set(os.listdir("/dev/shm"))


def left_behind(before: set[str], seconds: float = 60.0) -> set[str]:
    """New traces that stay. Those of runs beside this one go away when their runs end."""
    new = traces() - before
    end = time.monotonic() + seconds
    while new and time.monotonic() < end:
        time.sleep(0.2)
        new &= traces()
    return new
