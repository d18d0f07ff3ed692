"""Every set of bad arguments gets its typed error, in one line with the rule's numbers, and does no harm."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import bad_arguments
import pytest
import soak_rows
import torch
from bad_arguments import BS, OP, Bad, K
from soak_rows import Tally

import ascend_moe
from ascend_moe import comm
from ascend_moe.errors import AscendMoeError, CommError, WindowTooSmall
from ascend_moe.native import library

pytestmark = pytest.mark.asan


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_MOE_TIMEOUT_S", "5")
    monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    monkeypatch.setenv("ASCEND_MOE_AIV_CORES", "2")


class Calls:
    """Valid arguments of the four ops on one rank, and their known results."""

    def __init__(self, world: int, rank: int, group_ep: str) -> None:
        self.valid = bad_arguments.valid_calls(group_ep, world, rank)
        self.results = {op: self.run(op) for op in OP}
        x, weights = self.valid["dispatch"]["x"], self.valid["combine"]["expert_scales"]
        # No expert has changed the rows: every token comes back as often as its weights say.
        sums = sum(x.float() * weights[:, k, None] for k in range(K))
        assert torch.equal(self.results["combine"][0], sums.to(torch.bfloat16))
        assert torch.equal(self.results["combine_v2"][0], self.results["combine"][0])

    def run(self, op: str, **changes: Any) -> tuple[torch.Tensor, ...]:
        out = OP[op](**{**self.valid[op], **changes})
        return out if isinstance(out, tuple) else (out,)

    def still_right(self, op: str) -> bool:
        got, want = self.run(op), self.results[op]
        if len(got) == 1:
            return torch.equal(got[0], want[0])
        rows = int(want[4][-1])
        index = 3 * rows if op == "dispatch_v2" else BS * K
        ends = {0: rows, 2: index, 3: None, 4: None, 5: None}
        return all(torch.equal(got[i][:end], want[i][:end]) for i, end in ends.items())


def epoch(group_ep: str, world: int, rank: int) -> int:
    """The word in this rank's window that every op counts up."""
    layout = (ctypes.c_uint64 * 3)()
    library.lib().am_window_layout(world, layout)
    cluster = comm.threads.find(group_ep)
    assert cluster is not None and cluster._windows is not None
    return ctypes.c_uint32.from_address(cluster._windows._bases[rank] + layout[1] + 4).value


def faults(bad: Bad, error: BaseException | None, last: bool) -> Iterator[str]:
    """Returns what is wrong with the outcome of a bad call, in words."""
    if bad.raised_by == "last" and not last:
        if error is not None:
            yield f"raised {error!r} where nothing is wrong"
        return
    if type(error) is not bad.error:
        yield f"got {error!r}"
        return
    assert isinstance(error, AscendMoeError)
    text = str(error)
    if "\n" in text or len(text) > 400:
        yield f"not one line: {text!r}"
    for name, value in bad.fields.items():
        if getattr(error, name, None) != value:
            yield f".{name} is {getattr(error, name, None)!r}, not {value!r}: {text}"
    missing = [word for word in (*bad.words, bad.fields.get("argument", "")) if word not in text]
    if missing:
        yield f"{missing} not in {text!r}"


@pytest.mark.row("invalid arguments")
@pytest.mark.parametrize("world", soak_rows.pick([1, 2], [1, 2, 3, 4, 6]))
def test_every_set_has_its_error_and_a_valid_call_succeeds_after_it(world: int, tally: Tally) -> None:
    table = bad_arguments.table(world)
    assert len(table) >= 500

    def rank_body(rank: int, group_ep: str) -> list[str]:
        calls, last, found = Calls(world, rank, group_ep), rank == world - 1, []
        for number, bad in enumerate(table):
            before, error = epoch(group_ep, world, rank), None
            try:
                OP[bad.op](**bad.apply(calls.valid[bad.op], last))
            except CommError:
                raise  # the ranks are out of step: nothing that follows means anything
            except Exception as raised:
                error = raised
            found += [f"{bad.op}, {bad.label}: {fault}" for fault in faults(bad, error, last)]
            if bad.raised_by == "each" and epoch(group_ep, world, rank) != before:
                found.append(f"{bad.op}, {bad.label}: the window was touched")
            if (bad.raised_by != "each" or number % 16 == 0) and not calls.still_right(bad.op):
                found.append(f"{bad.op}, {bad.label} or one of 15 sets before: the valid call after it went wrong")
        return found

    with ascend_moe.LocalCluster(world) as cluster:
        for found in cluster.run(rank_body):
            assert not found, "\n".join(found)
    for bad in table:
        tally.count(bad.error.__name__)


def test_what_only_looks_unusual_works(group_ep: str) -> None:
    calls = Calls(1, 0, group_ep)
    x, counts = calls.valid["dispatch"]["x"], calls.valid["combine"]["ep_send_counts"]
    unusual: list[dict[str, Any]] = [
        {"x": torch._neg_view(-x)},
        {"ep_rank_id": False, "ep_world_size": True},
        {"group_tp": "anything"},
        {"x_active_mask": torch.ones(BS, dtype=torch.bool).expand(BS)},
        {"x_active_mask": torch.ones(1, 1, dtype=torch.bool).expand(BS, K)},
        {"global_bs": BS},
    ]
    for changes in unusual:
        got = calls.run("dispatch", **changes)
        rows = int(got[4][-1])
        assert torch.equal(got[0][:rows], calls.results["dispatch"][0][:rows]), changes
    combined: list[dict[str, Any]] = [
        {"tp_send_counts": torch.empty(1, dtype=torch.int32), "expand_scales": torch.empty(0)},
        {"ep_send_counts": torch.cat([counts, torch.full((9,), -7, dtype=torch.int32)])},
        {"group_list_type": 2, "tp_world_size": 1},
    ]
    for changes in combined:
        assert torch.equal(calls.run("combine", **changes)[0], calls.results["combine"][0]), changes


def test_meta_tensors_take_any_of_it_without_harm(group_ep: str) -> None:
    """Shape inference on nonsense raises typed errors or infers; sizes never overflow."""
    refused, calls = 0, Calls(1, 0, group_ep)
    for bad in bad_arguments.table(1):
        if "sparse" in bad.label:
            continue
        given = bad.apply(calls.valid[bad.op], last=True)
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        try:
            OP[bad.op](**given | {name: value.to("meta") for name, value in tensors.items()})
        except AscendMoeError as error:
            assert "\n" not in str(error)
            refused += 1
        except RuntimeError as error:
            # Sizes below zero, dtypes that no tensor has.
            assert "negative dimension" in str(error) or "dtype" in str(error), f"{bad.label}: {error}"
    assert calls.still_right("dispatch")
    assert refused > 100


# ---- windows that are too small


def test_window_that_no_buffsize_gives() -> None:
    """Said at once, without looking at any window, and without advice that cannot be followed."""
    rows, ids = torch.zeros(1, 16384), torch.zeros(1, 32, dtype=torch.int32)
    with pytest.raises(WindowTooSmall) as caught:
        OP["dispatch"](rows, ids, "any group", 64, 0, 1024, global_bs=64 * 4096)
    assert caught.value.needed_mib == 2 * 64 * 4096 * 16 * 16384 * 4 // 2**20
    assert caught.value.argument == "global_bs"
    assert "524288 MiB" in str(caught.value) and "at most 65535" in str(caught.value)
