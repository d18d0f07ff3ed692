"""The algorithm that runs: what "auto" comes to, what is refused between servers, how a caller learns of it."""

from __future__ import annotations

import os

import failure_cases as cases
import pytest

import ascend_moe
from ascend_moe import errors
from ascend_moe.reference.cases import Case
from ascend_moe.validate.run import DevicePlace, run_case

SETTINGS = {
    "ASCEND_MOE_TIMEOUT_S": "5",
    "HCCL_BUFFSIZE": "1",
    "ASCEND_MOE_AIV_CORES": "3",
    "ASCEND_MOE_COMM_ALG": "direct",
}


def test_algorithm_of_returns_what_ran() -> None:
    def body(rank: int, group_ep: str) -> list[str]:
        place = DevicePlace(group_ep, 2, rank)
        found = [ascend_moe.algorithm_of(group_ep)]
        for comm_alg in ("window", "direct", "auto", "fullmesh_v2", "hierarchy", ""):
            cases.dispatch(place, 1, 2, comm_alg=comm_alg)
            found.append(ascend_moe.algorithm_of(group_ep))
        return found

    with ascend_moe.LocalCluster(2) as cluster:
        want = ["", "window", "direct", "direct", "window", "window", "direct"]
        assert cluster.run(body) == [want] * 2
    with pytest.raises(errors.ArgumentError):
        ascend_moe.algorithm_of("nobody's group")


@pytest.mark.parametrize("algorithm", ["window", "direct"])
def test_cores_that_synchronize_by_syncall_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone, or all; also where an op ends early. The next op finds the board as it was."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "4")
    seeds = iter(range(100))

    def body(rank: int, group_ep: str, seed: int) -> list[str]:
        if seed == 2:  # ranks may differ
            os.environ["ASCEND_MOE_CORE_BARRIER"] = "syncall" if rank == 0 else "blocks"
        place, wrong = DevicePlace(group_ep, 3, rank), []
        for contract in (1, 2):
            for ids in ("any", "bad", "hot"):
                case = Case("met", 3, contract=contract, batches="unequal", ids=ids, seed=seed)
                wrong += [result.text for result in run_case(place, case) if not result.ok]
        return wrong

    with ascend_moe.LocalCluster(3) as cluster:
        for barrier in ("syncall", "blocks", "syncall"):
            monkeypatch.setenv("ASCEND_MOE_CORE_BARRIER", barrier)
            seed = next(seeds)
            assert cluster.run(lambda rank, group_ep, seed=seed: body(rank, group_ep, seed)) == [[]] * 3
