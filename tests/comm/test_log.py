"""Checks what the package logs, and the last calls of a rank beside an error about one that is missed."""

from __future__ import annotations

import logging
import random
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import ascend_moe
from ascend_moe.errors import AscendMoeError, CommTimeout, PeerLost
from ascend_moe.native.binding import RecordedCall
from ascend_moe.ops import recorder

WORLD, EXPERTS, HIDDEN = 2, 4, 64
KEPT = 200  # calls, as docs/debugging.md says


def trip(rank: int, group_ep: str, tokens: int = 3, comm_alg: str = "") -> None:
    x, ids = (
        torch.ones(tokens, HIDDEN, dtype=torch.bfloat16),
        torch.arange(tokens, dtype=torch.int32)[:, None] % EXPERTS,
    )
    place = (group_ep, WORLD, rank)
    sent = ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, *place, EXPERTS, comm_alg=comm_alg)
    weights = torch.ones(tokens, 1)
    ascend_moe.npu_moe_distribute_combine_v2(
        sent[0], ids, sent[2], sent[4], weights, *place, EXPERTS, comm_alg=comm_alg
    )


def texts(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level and record.name == "ascend_moe"]


def test_windows_and_algorithms_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ascend_moe")
    with ascend_moe.LocalCluster(WORLD, window_mib=4) as cluster:
        for algorithm in ("direct", "direct", "window", ""):
            cluster.run(trip, comm_alg=algorithm)
    logged = texts(caplog, logging.INFO)
    assert {record.rank for record in caplog.records} == {0, 1}  # type: ignore[attr-defined]
    for rank in range(WORLD):
        own = [text for text in logged if text.startswith(f"ascend_moe: rank {rank}: ")]
        assert sum("opened the windows" in text and "2 ranks, 4 MiB" in text for text in own) == 1
        assert sum(text.endswith("dispatch on group " + cluster.name + " runs direct") for text in own) in (1, 2)
        assert sum(text.endswith("combine on group " + cluster.name + " runs window") for text in own) == 1


def test_debug_has_every_call(caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(3)
    sizes = [draw.randrange(0, 6) for _ in range(6)]
    caplog.set_level(logging.DEBUG, "ascend_moe")
    with ascend_moe.LocalCluster(WORLD, window_mib=4) as cluster:
        for tokens in sizes:
            cluster.run(trip, tokens=tokens)
    for rank in range(WORLD):
        own = [text for text in texts(caplog, logging.DEBUG) if f"rank {rank}:" in text]
        found = [
            re.search(r"call (\d+), npu_moe_distribute_(\w+)_v2 on (\w+).*, epoch (\d+): .*; \d+ µs, returned$", text)
            for text in own
        ]
        assert [match and (int(match[1]), match[2], match[3], int(match[4])) for match in found] == [
            (number + 1, ("dispatch", "combine")[number % 2], cluster.name, number + 1)
            for number in range(2 * len(sizes))
        ]
        assert all(f"x bfloat16 ({tokens}, {HIDDEN})" in own[2 * at] for at, tokens in enumerate(sizes))


def test_a_lost_peer_leaves_the_last_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_CALLS", str(tmp_path))
    seen: list[AscendMoeError] = []

    def body(rank: int, group_ep: str) -> None:
        for _ in range(KEPT // 2 + 3):
            trip(rank, group_ep)
        if rank == 1:
            raise ValueError("gone")
        for _ in range(2):
            with pytest.raises(PeerLost) as raised:
                trip(rank, group_ep, tokens=5)
            seen.append(raised.value)

    with ascend_moe.LocalCluster(WORLD, window_mib=4) as cluster, pytest.raises(ValueError, match="gone"):
        cluster.run(body)
    (path,) = tmp_path.iterdir()  # one file, though the error was raised twice
    assert all(
        str(error).endswith(f"; the last calls of rank 0: {path}") and error.calls == str(path) for error in seen
    )
    lines = path.read_text().splitlines()
    assert cluster.name in lines[0] and len(lines) == 1 + KEPT
    assert "x bfloat16 (5, 64)" in lines[-1] and "PeerLost: " in lines[-1] and lines[-2].endswith(", returned")
    epoch = re.search(r", epoch (\d+): ", lines[-1])
    assert epoch and int(epoch[1]) == 2 * (KEPT // 2 + 3) + 1 and f"at epoch {epoch[1]}" in lines[-1]


def test_a_call_whose_group_is_gone_still_leaves_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_CALLS", str(tmp_path))
    call = RecordedCall(1, 2**40, 7, 3, 5000, "npu_moe_distribute_dispatch_v2", "first", "", "x bfloat16 (2, 64)")
    recorder.failed(CommTimeout("rank 1 did not arrive"), call)
    (path,) = tmp_path.iterdir()
    head, line = path.read_text().splitlines()
    assert "rank 3 on group first" in head
    assert line.endswith("on first: x bfloat16 (2, 64); 5 µs, CommTimeout: rank 1 did not arrive")
    monkeypatch.setenv("ASCEND_MOE_CALLS", str(path))
    recorder.failed(late := CommTimeout("rank 1 did not arrive"), call)
    assert re.search(rf"rank 3: not written: {path}/.*: Not a directory \(ASCEND_MOE_CALLS\)$", str(late))


def test_a_refused_call_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Also one that never came to a communicator; one that only looks for shapes is no call."""
    caplog.set_level(logging.DEBUG, "ascend_moe")
    x, ids = torch.ones(2, HIDDEN, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(AscendMoeError):
        ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, "nobody", 2, 1, 4)
    with pytest.raises(TypeError):
        ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, "nobody", 2, 1, 4, no_such=1)  # type: ignore[call-arg]
    ascend_moe.npu_moe_distribute_dispatch_v2(x.to("meta"), ids.to("meta"), "nobody", 2, 1, 4)
    (text,) = texts(caplog, logging.DEBUG)
    assert "rank 1: call 0, npu_moe_distribute_dispatch_v2 on nobody" in text
    assert "x bfloat16 (2, 64), expert_ids int32 (2, 1); " in text and "ArgumentError: " in text


def test_calls_keep_no_tensors() -> None:
    def body(rank: int, group: str) -> list[weakref.ref[torch.Tensor]]:
        x, ids = torch.ones(2, HIDDEN, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int32)
        with pytest.raises(AscendMoeError):
            ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, group, 1, 0, 1, quant_mode=9)
        sent = ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, group, 1, 0, 1)
        return [weakref.ref(tensor) for tensor in (x, ids, *sent)]

    with ascend_moe.LocalCluster(1, window_mib=1) as cluster:
        (kept,) = cluster.run(body)
        assert len(kept) == 9 and not any(reference() is not None for reference in kept)


def test_the_variable_brings_records_to_stderr() -> None:
    program = (
        "import os, torch, ascend_moe\n"
        "def call(rank, group):\n"
        "    x, ids = torch.ones(2, 64, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int32)\n"
        "    ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, group, 1, 0, 1)\n"
        "def run():\n"
        "    with ascend_moe.LocalCluster(1, window_mib=1) as cluster:\n"
        "        cluster.run(call)\n"
        "run()\n"
        "print('quiet', flush=True)\n"
        "os.environ['ASCEND_MOE_LOG'] = 'debug'\n"
        "run(); run()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert done.stdout == "quiet\n"
    assert [sum(word in line for line in lines) for word in ("opened the windows", "µs, returned", "runs ")] == [
        2,
        2,
        2,
    ]
    assert all("ascend_moe: rank 0: " in line for line in lines)
