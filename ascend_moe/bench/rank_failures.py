"""Why a run ended: which rank was the first to fail, and what it left behind."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from ascend_moe.bench.board import Board
from ascend_moe.comm.liveness import describe_process, process_stat
from ascend_moe.errors import AscendMoeError

_LAST_WORDS = 2000
_SETTLE_S = 0.05  # notes of ranks that failed at the same moment
_MPIEXEC_S = 5.0  # until mpiexec has ended the other ranks and said which was first

Processes = Sequence["subprocess.Popen[bytes]"]


class RankFailed(AscendMoeError):
    """A rank raised, died or stood still. ``.rank``; ``.trace`` where it raised something unexpected."""


def failure(mpi: bool, folder: Path, board: Board, processes: Processes) -> RankFailed:
    """What the first rank to fail left behind, or how it died; ``processes``: the ranks, or mpiexec."""
    if mpi:
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[0].wait(_MPIEXEC_S)
    else:
        time.sleep(_SETTLE_S)
    notes = {int(path.stem[5:]): json.loads(path.read_text()) for path in folder.glob("error*.json")}
    said = (folder / "output").read_text(errors="replace").strip()[-_LAST_WORDS:]
    # A rank that dies takes others along: their notes tell of that, not of the cause.
    died = _named_by_mpiexec(said, board) if mpi else _dead(processes)
    silent = [(rank, how) for rank, how in died if rank not in notes]
    if silent:
        rank, how = silent[0]
        return RankFailed(f"rank {rank} of the benchmark {how}", rank=rank, trace=said)
    if notes:
        rank = min(notes, key=lambda one: float(notes[one]["at"]))
        note = notes[rank]
        trace = "" if note["expected"] else note["trace"]
        return RankFailed(f"rank {rank}: {note['kind']}: {note['text']}", rank=rank, trace=trace)
    return RankFailed(f"mpiexec ended with exit code {processes[0].poll()}", rank=None, trace=said)


def _dead(processes: Processes) -> list[tuple[int, str]]:
    codes = [(rank, process.poll()) for rank, process in enumerate(processes)]
    return [(rank, _how(code)) for rank, code in codes if code not in (None, 0)]


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _named_by_mpiexec(said: str, board: Board) -> list[tuple[int, str]]:
    """mpiexec's words have process ids; the ranks told theirs at the start."""
    pids = [board.pid(rank) for rank in range(board.world)]
    named = [int(pid) for pid in re.findall(r"PID\s+(\d+)", said)]
    killed = re.search(r"\(signal (\d+)\)", said)
    how = _how(-int(killed[1])) if killed else "died"
    return [(pids.index(pid), how) for pid in named if pid in pids]


def stalled(board: Board, steps: list[int], seconds: float) -> RankFailed:
    """No rank has gone on for so long: a stopped one is to blame, else the one that is behind."""
    stopped = [rank for rank in range(board.world) if _state(board.pid(rank)) == "T"]
    behind = stopped or [rank for rank, step in enumerate(steps) if step == min(steps)]
    what = "did not start" if min(steps) == 0 else "did not go on"
    seen = describe_process(board.pid(behind[0]))
    text = f"rank {behind[0]} of the benchmark {what} for {seconds:.0f} s: {seen}"
    return RankFailed(text, rank=behind[0], ranks=behind)


def _state(pid: int) -> str:
    stat = process_stat(pid) if pid > 0 else None
    return stat.state if stat else ""
