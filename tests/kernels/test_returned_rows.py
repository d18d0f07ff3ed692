"""V2's window combine: missing rows are named, and no row of an earlier op is ever taken for one of this op."""

from __future__ import annotations

import failure_cases as cases
import pytest
import torch
from failure_cases import Caught, caught

import ascend_moe
from ascend_moe.errors import RoutingMismatch
from ascend_moe.validate.run import DevicePlace

WORLD, SEED = 3, 3  # inputs that give every rank some rows


SETTINGS = {"ASCEND_MOE_TIMEOUT_S": "5", "HCCL_BUFFSIZE": "1", "ASCEND_MOE_COMM_ALG": "window"}
pytestmark = pytest.mark.parametrize("cores", [1, 3, 13])


def test_of_several_missing_rows_the_first_is_named() -> None:
    """All rows of rank 1 name the last pair of their source: what it misses it says in order of token and k.

    The others get their sums, and so does everybody afterwards.
    """

    def body(rank: int, group_ep: str) -> tuple[Caught, dict[int, list[tuple[int, int]]]]:
        place, missing = DevicePlace(group_ep, WORLD, rank), dict[int, list[tuple[int, int]]]()
        for _ in range(2):  # good rows of earlier ops lie in both halves
            cases.round_trip(place, SEED, 2)
            cases.dispatch(place, SEED, 2)
        cases.round_trip(place, SEED, 2)
        sent = [tensor.clone() for tensor in cases.dispatch(place, SEED, 2)]
        rows = int(sent[4][WORLD * cases.LOCAL - 1])
        source_indices = sent[2][: 3 * rows].view(rows, 3)
        for source in range(WORLD):
            own = source_indices[:, 0] == source
            pairs = sorted((token, k) for _, token, k in source_indices[own].tolist())
            if rank == 1 and pairs:
                source_indices[own] = torch.tensor([source, *pairs[-1]], dtype=source_indices.dtype)
                missing[source] = pairs[:-1]
        found = caught(cases.combine, place, tuple(sent), SEED, 2)
        if found.error is None:
            cases.check_combine(place, found.value, SEED)
        cases.round_trip(place, SEED, 2)
        return found, missing

    with ascend_moe.LocalCluster(WORLD) as cluster:
        results = cluster.run(body)
    missing = results[1][1]
    assert max(map(len, missing.values())) > 1
    for rank, (found, _) in enumerate(results):
        if not missing.get(rank):
            assert found.error is None
            continue
        assert isinstance(found.error, RoutingMismatch)
        token, k = missing[rank][0]
        assert (found.error.rank, found.error.token, found.error.k) == (rank, token, k), found.error
        assert f"the row of token {token}, k {k} of rank {rank}, " in str(found.error)


def test_other_pairs_with_the_same_counts() -> None:
    """Combine is given the ids of two tokens exchanged, one of which dispatch did not route."""
    experts, hidden = 2 * WORLD, 64

    def body(rank: int, group_ep: str) -> Caught:
        ids = torch.full((4, 2), -1, dtype=torch.int32)
        ids[0, 1] = (2 * rank + 3) % experts
        x = torch.full((4, hidden), float(rank + 1), dtype=torch.bfloat16)
        common = {"group_ep": group_ep, "ep_world_size": WORLD, "ep_rank_id": rank, "moe_expert_num": experts}
        scales = torch.ones(4, 2)
        for _ in range(4):  # every slot has had a good row
            full = torch.stack([torch.arange(4) % experts, (torch.arange(4) + 1) % experts], 1).to(torch.int32)
            sent = ascend_moe.npu_moe_distribute_dispatch_v2(x, full, **common)
            ascend_moe.npu_moe_distribute_combine_v2(sent[0], full, sent[2], sent[4], scales, **common)
        sent = ascend_moe.npu_moe_distribute_dispatch_v2(x, ids, **common)
        given = ids[[2, 1, 0, 3]].contiguous() if rank == 0 else ids
        args = (sent[0], given, sent[2], sent[4], scales)
        return caught(ascend_moe.npu_moe_distribute_combine_v2, *args, **common)

    with ascend_moe.LocalCluster(WORLD) as cluster:
        first, *others = cluster.run(body)
    assert all(found.error is None for found in others)
    assert isinstance(first.error, RoutingMismatch)
    assert (first.error.rank, first.error.token, first.error.k) == (0, 2, 1)
