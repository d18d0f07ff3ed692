"""Rows of a device's window begin at multiples of 512 bytes where it has the room, else of 32, as on CPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import op_runs
import pytest
import torch
from failure_windows import State

from ascend_moe import LocalCluster, plan
from ascend_moe.plan import Request
from ascend_moe.reference.cases import Case

WORLD, SMALL_MIB = 2, 1
ALGORITHMS = ("window", "direct")
# Rows of 160 bytes, several in a chunk; of 32 bytes, so many that a MiB has no room for 512 each.
ROOM = Case(world=WORLD, local=2, topk=2, batch=9, units=5, cores=3, batches="unequal", ids="any", seed=3)
FULL = Case(world=WORLD, local=2, topk=2, batch=1100, units=1, cores=3, ids="any", seed=4)
CASES = {
    "room": ROOM,
    "room, int8 both ways": replace(ROOM, quant_mode=2, comm_quant_mode=2),
    "room, weights": replace(ROOM, weights=True, quant_mode=2, smooth=True),
    "room, many cores": replace(ROOM, cores=9, local=5, topk=4),
    "room, rows in parts": replace(ROOM, dtype="fp32", units=2045, batch=12, topk=1),
    "full": FULL,
    "full, int8 both ways": replace(FULL, quant_mode=2, comm_quant_mode=2),
}


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[int, LocalCluster]]:
    with pytest.MonkeyPatch.context() as device:
        device.setenv("ASCEND_MOE_CONTEXT", "a3")
        with LocalCluster(WORLD, window_mib=SMALL_MIB) as small, LocalCluster(WORLD, window_mib=8) as large:
            yield {SMALL_MIB: small, 8: large}


def request_of(case: Case, algorithm: str, window_mib: int) -> Request:
    kinds = {name: getattr(case, name) for name in ("quant_mode", "comm_quant_mode", "smooth", "weights")}
    contract = f"v{case.contract}"
    sizes = (case.world, case.world * case.local, case.topk, case.hidden, case.batch)
    return Request(
        *sizes, dtype=case.dtype, contract=contract, comm_alg=algorithm, cores=case.cores,
        window_mib=window_mib, **kinds,
    )  # fmt: skip


def units(request: Request) -> list[int]:
    """What rows of dispatch and of combine begin at multiples of."""
    return [op.tiling["row_unit"] for op in plan.plan(request).ops.values()]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_results_and_bytes(name: str, contract: int, algorithm: str, clusters: dict[int, LocalCluster]) -> None:
    case = replace(CASES[name], contract=contract)
    mib = SMALL_MIB if name.startswith("full") else 8
    assert units(request_of(case, algorithm, mib)) == [32 if name.startswith("full") else 512] * 2
    assert op_runs.check(case, op_runs.run(clusters[mib], case))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("context", ["a3", "table"])
def test_rows_lie_at_multiples_with_nothing_between(
    context: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dispatch stores the bytes of rows alone: direct a row a token, window a row a pair with its source_index."""
    monkeypatch.setenv("ASCEND_MOE_CONTEXT", context)
    case = replace(ROOM, contract=2, batches="equal", ids="distinct")
    written = case.units * 32 + (32 if algorithm == "window" else 0)
    unit = 512 if context == "a3" else written  # without gaps
    with LocalCluster(WORLD, window_mib=SMALL_MIB) as cluster:
        for _ in range(2):  # the second finds poison, in the other half
            sent = cluster.run(lambda rank, group_ep: op_runs.dispatch(case, rank, group_ep))
            states = [State.of(cluster, rank) for rank in range(WORLD)]
            half, size = states[0].half(states[0].epoch)
            found = ctypes.string_at(half, size)
            states[0].poison(states[0].epoch + 1)
        rows = case.inputs[0].x if algorithm == "direct" else sent[0][0]
        wanted = {row.view(torch.uint8).numpy().tobytes() for row in rows[: len(found)]}
    first = next(at for at in range(0, size, 512) if found[at : at + case.units * 32] in wanted)
    places = [at for at in range(first, size, unit) if found[at : at + case.units * 32] in wanted]
    assert len(places) >= case.batch
    for at in places:
        assert found[at + written : at + unit] == b"\xff" * (unit - written)
