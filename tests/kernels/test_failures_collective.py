"""Checks what ranks tell each other: another configuration and bad ids are raised everywhere, and pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import failure_cases as cases
import pytest
import torch
from failure_cases import HIDDEN, LOCAL, TOPK, Caught, caught, opened
from soak_rows import Tally

import ascend_moe
from ascend_moe.errors import ConfigMismatch, RoutingMismatch
from ascend_moe.native.windows import ranks_per_server
from ascend_moe.validate.run import DevicePlace

pytestmark = [pytest.mark.asan, pytest.mark.tsan]


#: Algorithm, ranks, ranks a server.
GROUPS = [("window", 2, 0), ("direct", 2, 0), ("window", 3, 0), ("direct", 3, 0), ("window", 3, 1)]


@pytest.fixture(scope="module", params=GROUPS, ids=str)
def cluster(request: pytest.FixtureRequest) -> Iterator[ascend_moe.LocalCluster]:
    """One communicator for all tests of a group: none of these errors may spoil it."""
    algorithm, world, share = request.param
    with opened(world, algorithm, share, timeout_s=5, cores=3) as cluster:
        yield cluster


@dataclass(frozen=True)
class Odd:
    """One rank's call differs: which field, and the values there and elsewhere. All have ``setting``."""

    op: str
    changes: dict[str, Any]
    field: str
    usual: Any
    odd: Any
    setting: dict[str, Any] = field(default_factory=dict)


def plain(op: str, batch: int = 2, topk: int = TOPK, hidden: int = HIDDEN, experts: int = 0) -> dict[str, Any]:
    """Arguments that keep all rules, without masks: no pair is routed."""
    ids = torch.full((batch, topk), -1, dtype=torch.int32)
    rows = torch.ones(batch, hidden, dtype=torch.bfloat16)
    if op.startswith("dispatch"):
        return {"x": rows, "expert_ids": ids}
    index = "expand_idx" if op == "combine" else "assist_info_for_combine"
    counts = torch.zeros(experts, dtype=torch.int32)
    filled = torch.zeros(3 * batch * topk, dtype=torch.int32)[: batch * topk if op == "combine" else None]
    return {"expand_x": rows, "expert_ids": ids, index: filled, "ep_send_counts": counts} | {
        "expert_scales": torch.ones(batch, topk)
    }


def call(place: DevicePlace, op: str, batch: int = 2, topk: int = TOPK, hidden: int = HIDDEN, **changes: Any) -> Any:
    op, dtype = changes.pop("called", op), changes.pop("dtype", None)
    experts = changes.get("moe_expert_num", place.world * LOCAL)
    arguments = {**plain(op, batch, topk, hidden, experts), **cases.arguments(place), **changes}
    if dtype is not None:
        rows = "x" if op.startswith("dispatch") else "expand_x"
        arguments[rows] = arguments[rows].to(dtype)
    return getattr(ascend_moe, f"npu_moe_distribute_{op}")(**arguments)


def odd_calls(world: int) -> list[Odd]:
    found = []
    experts, smooth = world * LOCAL, torch.ones(world * LOCAL, HIDDEN)
    few, many = 4 * world, 8 * world
    for op in ("dispatch", "dispatch_v2", "combine", "combine_v2"):
        v2 = op.endswith("_v2")
        found += [
            Odd(op, {"hidden": 2 * HIDDEN}, "H", HIDDEN, 2 * HIDDEN),
            Odd(op, {"topk": TOPK + 1}, "K", TOPK, TOPK + 1),
            Odd(op, {"moe_expert_num": 2 * experts}, "E", experts, 2 * experts),
            Odd(op, {"moe_expert_num": 6 * experts}, "E", experts, 6 * experts),
            Odd(op, {"batch": 3}, "maxBS", 2, 3),
            Odd(op, {"batch": 0}, "maxBS", 2, 0),
            Odd(op, {"global_bs": 2 * world}, "global_bs", 0, 2 * world),
            Odd(op, {"global_bs": many}, "global_bs", few, many, {"global_bs": few}),
            Odd(op, {"dtype": torch.float16}, "dtype", "bfloat16", "float16"),
            Odd(op, {"dtype": torch.float32}, "dtype", "bfloat16", "float32"),
        ]
        other = op.removesuffix("_v2") if v2 else f"{op}_v2"
        found.append(Odd(op, {"called": other}, "contract", *("v2", "v1") if v2 else ("v1", "v2")))
        kinds = ("dispatch", "combine") if op.startswith("dispatch") else ("combine", "dispatch")
        found.append(Odd(op, {"called": op.replace(*kinds)}, "op", *kinds))
        if v2 and not ranks_per_server():
            window = {"comm_alg": "window"}
            found.append(Odd(op, {"comm_alg": "direct"}, "comm_alg", "window", "direct", window))
        if op.startswith("combine"):
            found.append(Odd(op, {"comm_quant_mode": 2}, "comm_quant_mode", 0, 2))
        if op.startswith("dispatch"):
            found.append(Odd(op, {"expert_scales": torch.ones(2, TOPK)}, "expert_scales", "None", "given"))
            quant = {"quant_mode": 2}
            found.append(Odd(op, quant, "quant_mode", 0, 2))
            found.append(Odd(op, {**quant, "scales": smooth}, "quant_mode", 0, 2))
            found.append(Odd(op, {"scales": smooth}, "scales", "None", "given", quant))
            no_scales = Odd(op, {"scales": None}, "scales", "given", "None")
            found.append(replace(no_scales, setting={**quant, "scales": smooth}))
    return found


def outcomes(cluster: ascend_moe.LocalCluster, fn: Callable[[DevicePlace], Any]) -> list[Caught]:
    """By rank, what fn(place) did."""
    world = cluster.world_size
    return cluster.run(lambda rank, name: caught(fn, DevicePlace(name, world, rank)))


def assert_usable(cluster: ascend_moe.LocalCluster) -> None:
    for contract in (1, 2):
        done = outcomes(cluster, lambda place, c=contract: cases.round_trip(place, 1, c))
        assert [outcome.value for outcome in done] == ["right"] * cluster.world_size, [
            outcome.error for outcome in done
        ]


def assert_mismatch(found: list[Caught], guilty: int, field: str, usual: Any, odd: Any) -> None:
    """Every rank names field, values and a rank on the other side, soon after the last has called."""
    last_call = max(outcome.began for outcome in found)
    for rank, one in enumerate(found):
        error = one.error
        assert type(error) is ConfigMismatch, f"rank {rank}: {error!r}, {one.value!r}"
        peer = (0 if guilty else 1) if rank == guilty else guilty
        values = (odd, usual) if rank == guilty else (usual, odd)
        assert (error.field, error.rank, error.ours, error.theirs) == (field, peer, *values), str(error)
        text = str(error)
        assert "\n" not in text and field in text and f"rank {peer}" in text
        assert str(usual) in text and str(odd) in text
        assert field != "maxBS" or f"largest batch, here {len(found) * max(usual, odd)}" in text
        assert one.ended - last_call < 1


# ---- configurations that differ


@pytest.mark.row("configuration mismatch")
def test_ranks_that_differ_are_named_with_field_and_values(cluster: ascend_moe.LocalCluster, tally: Tally) -> None:
    """Also when the odd rank comes late: all hear of it at once."""
    for number, odd in enumerate(odd_calls(cluster.world_size)):
        guilty = number % cluster.world_size

        def body(place: DevicePlace, odd: Odd = odd, guilty: int = guilty) -> Caught:
            changes = odd.changes if place.rank == guilty else {}
            time.sleep(0.1 * (odd.field == "op" and place.rank == guilty))
            return caught(call, place, odd.op, **{**odd.setting, **changes})

        found = [outcome.value for outcome in outcomes(cluster, body)]
        assert_mismatch(found, guilty, odd.field, odd.usual, odd.odd)
        assert_usable(cluster)
        tally.count(odd.field)


@pytest.mark.parametrize("op", ["dispatch", "dispatch_v2", "combine", "combine_v2"])
def test_every_rank_reports_the_global_bs_of_the_largest_batch(cluster: ascend_moe.LocalCluster, op: str) -> None:
    for batches in ((4, 2, 3), (2, 3, 4), (2, 4, 3), (3, 3, 0)):
        largest = max(batches[: cluster.world_size])

        def body(place: DevicePlace, batches: tuple[int, ...] = batches) -> Any:
            return call(place, op, batch=batches[place.rank])

        for rank, one in enumerate(outcomes(cluster, body)):
            if len({*batches[: cluster.world_size]}) == 1:
                assert one.error is None
                continue
            assert type(one.error) is ConfigMismatch, repr(one)
            assert f"largest batch, here {cluster.world_size * largest}" in str(one.error), f"rank {rank}: {one.error}"
            assert largest in (one.error.ours, one.error.theirs)
        assert_usable(cluster)


def test_what_may_differ_between_ranks(cluster: ascend_moe.LocalCluster) -> None:
    """Cores, masks, the kind of expert_token_nums, the name of an algorithm: each rank's own affair."""

    def body(place: DevicePlace) -> int:
        odd = place.rank == 0
        mask = torch.ones(2, TOPK, dtype=torch.bool) if odd else None
        extra = {"x_active_mask": mask, "expert_token_nums_type": int(odd), "tp_world_size": int(odd)}
        return int(call(place, "dispatch_v2", **extra, comm_alg="fullmesh_v1" if odd else "window")[4][-1])

    assert [outcome.value for outcome in outcomes(cluster, body)] == [0] * cluster.world_size


# ---- routing


def test_a_configuration_counts_before_bad_ids(cluster: ascend_moe.LocalCluster) -> None:
    def body(place: DevicePlace) -> Any:
        ids = torch.full((2, TOPK), -2 if place.rank == 0 else -1, dtype=torch.int32)
        return call(place, "dispatch", expert_ids=ids, hidden=96 if place.rank == 1 else 48)

    found = outcomes(cluster, body)
    assert_mismatch(found, 1, "H", 48, 96)
    assert_usable(cluster)


@pytest.mark.row("op order")
@pytest.mark.parametrize("op", ["combine", "combine_v2"])
def test_combine_without_a_dispatch(cluster: ascend_moe.LocalCluster, op: str) -> None:
    """Without routed pairs it gives zeros; with some it says that their rows have not come."""

    def body(place: DevicePlace) -> Any:
        assert not call(place, op).any()
        ids = plain(op, experts=place.world * LOCAL)["expert_ids"]
        ids[0, 0] = 1
        return call(place, op, expert_ids=ids)

    for outcome in outcomes(cluster, body):
        assert type(outcome.error) is RoutingMismatch, repr(outcome)
    assert_usable(cluster)
