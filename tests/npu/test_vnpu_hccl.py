"""HCCL of the virtual NPU through torch.distributed: results, windows, errors that name ranks, no traces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from vnpu_process import HERE, Outcome, left_behind, run, traces

pytestmark = pytest.mark.npu

RANKS = HERE / "vnpu_hccl_ranks.py"
REDUCED_TYPES = ("float32", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64")
MOVED_TYPES = ("float32", "bfloat16", "int64", "int8", "bool")
OPS = ("sum", "prod", "max", "min")


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    before = traces()
    yield
    assert not left_behind(before)


def ranks(case: str, world: int, folder: Path, **env: str) -> Outcome:
    settings = {"ASCEND_MOE_TIMEOUT_S": "90", **env}
    store = str(folder / f"{case}-store")
    return run(RANKS, case, store, world=world, env=settings, through_launcher=False)


def good(case: str, world: int, folder: Path, **env: str) -> Outcome:
    outcome = ranks(case, world, folder, **env).must_pass()
    assert all(text.endswith("done\n") for text in outcome.stdout), outcome.stdout
    return outcome


def failures(outcome: Outcome, *which: int) -> list[tuple[float, str]]:
    """Seconds and text of the error that these ranks caught."""
    found = []
    for rank in which:
        match = re.search(r"^failed (\S+) (.*)$", outcome.stdout[rank], re.MULTILINE)
        assert match and outcome.codes[rank] == 0, (rank, outcome.stdout[rank], outcome.stderr[rank][-3000:])
        found.append((float(match[1]), match[2]))
    return found


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return good("everything", 3, tmp_path_factory.mktemp("hccl")).stdout


def test_reductions(everything: tuple[str, ...]) -> None:
    wanted = [f"all_reduce {dtype} {op}" for dtype in REDUCED_TYPES for op in OPS]
    wanted += [f"reduce_scatter_tensor {op}" for op in OPS]
    wanted += [f"every {dtype} {op}" for dtype in ("float16", "bfloat16") for op in OPS]
    for text in everything:
        assert not [what for what in wanted if f"ok {what}\n" not in text], text
    assert all(f"ok reduce {op}\n" in everything[2] for op in OPS)


def test_types_refused_by_torch_npu_itself(everything: tuple[str, ...]) -> None:
    """Its own list has no fp64, which libhccl.so here reduces (test_functions_called_directly)."""
    refused = {line for line in everything[0].splitlines() if line.startswith("refused")}
    assert {line.split()[1] for line in refused} == {"float64"}, refused
    assert all("Unsupported data type at::kDouble" in line for line in refused)


def test_movements(everything: tuple[str, ...]) -> None:
    kinds = ("broadcast", "all_gather_into_tensor", "all_to_all_single")
    wanted = [f"{kind} {dtype}" for dtype in MOVED_TYPES for kind in kinds]
    wanted += [
        "all_to_all_single unequal",
        "all_to_all",
        "batch_isend_irecv",
        "isend irecv",
        "lists",
        "scatter",
        "barrier",
    ]
    for rank, text in enumerate(everything):
        missing = [what for what in [*wanted, *(["send recv"] * (rank > 0))] if f"ok {what}\n" not in text]
        assert not missing, text


def test_functions_called_directly(everything: tuple[str, ...]) -> None:
    wanted = [f"HcclAllReduce fp64 {op}" for op in OPS]
    wanted += ["HcclAllGatherV", "HcclReduceScatterV", "HcclAlltoAllVC"]
    for text in everything:
        assert not [what for what in wanted if f"ok {what}\n" not in text], text


def test_data_larger_than_the_window(tmp_path: Path) -> None:
    """HCCL_BUFFSIZE=1: in pieces; the data areas are overwritten, header and state are not."""
    outcome = good("windows", 2, tmp_path, HCCL_BUFFSIZE="1")
    for text in outcome.stdout:
        assert text.count("larger than the window") == 4 and "ok poisoned" in text


def test_groups_of_different_sizes(tmp_path: Path) -> None:
    outcome = good("groups", 3, tmp_path, HCCL_BUFFSIZE="3")
    assert [text.count("ok group of") for text in outcome.stdout] == [2, 3, 2]


def test_graph_with_a_collective(tmp_path: Path) -> None:
    for text in good("graph", 2, tmp_path).stdout:
        assert text.count("ok replay") == 3


def test_different_collectives_are_an_error_on_every_rank(tmp_path: Path) -> None:
    for _, text in failures(ranks("mismatch", 3, tmp_path), 0, 1, 2):
        assert "ranks call different collectives" in text
        assert re.search(r"rank 1 calls Broadcast\(count 8, fp32, root 0\)", text)
        assert re.search(r"rank [02] calls AllReduce\(count 8, fp32, sum\)", text)


def test_different_sizes_are_an_error(tmp_path: Path) -> None:
    for _, text in failures(ranks("sizes", 2, tmp_path), 0, 1):
        assert "rank 0 calls AllReduce(count 8, fp32, sum)" in text
        assert "rank 1 calls AllReduce(count 9, fp32, sum)" in text


def test_killed_rank_is_noticed_within_two_seconds(tmp_path: Path) -> None:
    outcome = ranks("killed", 3, tmp_path)
    assert outcome.codes[1] == -9
    for seconds, text in failures(outcome, 0, 2):
        assert seconds < 2 and re.search(r"rank 1 \(process \d+.*is gone: it exited or was killed", text), (
            text
        )


def test_late_rank_is_named_at_the_deadline(tmp_path: Path) -> None:
    outcome = ranks("late", 2, tmp_path, ASCEND_MOE_TIMEOUT_S="8")
    seconds, text = failures(outcome, 0)[0]
    assert 8 <= seconds < 11 and "waited 8 s for rank 1" in text and "which is alive" in text, text


def test_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    seconds, text = failures(ranks("absent", 2, tmp_path, HCCL_CONNECT_TIMEOUT="8"), 0)[0]
    assert 8 <= seconds < 11 and "waited for rank(s) 1, which never came" in text, text


def test_unequal_windows_are_refused(tmp_path: Path) -> None:
    for _, text in failures(ranks("unequal_windows", 2, tmp_path), 0, 1):
        assert "rank 0 has windows of 2 MiB, rank 1 of 3 MiB" in text, text
