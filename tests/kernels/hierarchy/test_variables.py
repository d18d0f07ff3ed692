"""HCCL_INTRA_PCIE_ENABLE=1 and HCCL_INTRA_ROCE_ENABLE=0 ask for hierarchy where nothing is named, as in CANN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import op_runs
import pytest
import torch

import ascend_moe
from ascend_moe import LocalCluster
from ascend_moe.dispatchers import MC2Dispatcher
from ascend_moe.errors import ArgumentError
from ascend_moe.reference.cases import Case
from ascend_moe.validate.run import DevicePlace
from ascend_moe.validate.run import combine as op_combine
from ascend_moe.validate.run import dispatch as op_dispatch

CASE = Case(world=4, local=2, topk=3, contract=2, weights=True, share=2)
NAMED = "HCCL_INTRA_PCIE_ENABLE=1 and HCCL_INTRA_ROCE_ENABLE=0"


def run(monkeypatch: pytest.MonkeyPatch, share: int, pcie: str = "1", roce: str = "0", comm_alg: str = "") -> set[str]:
    """Which algorithms the two ops of ``CASE`` run that say "" or ``comm_alg``, after a comparison of the sums."""
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", str(share))
    monkeypatch.setenv("HCCL_INTRA_PCIE_ENABLE", pcie)
    monkeypatch.setenv("HCCL_INTRA_ROCE_ENABLE", roce)

    def body(rank: int, group_ep: str) -> tuple[torch.Tensor, torch.Tensor, str, str]:
        place = DevicePlace(group_ep, CASE.world, rank)
        sent = op_dispatch(place, CASE, comm_alg=comm_alg)
        first, rows = ascend_moe.algorithm_of(group_ep), op_runs.expert_rows(CASE, rank, sent)
        result = op_combine(place, CASE, rows, sent, comm_alg=comm_alg)
        return rows, result, first, ascend_moe.algorithm_of(group_ep)

    with LocalCluster(CASE.world, window_mib=8) as cluster:
        runs = cluster.run(body)
    found = {name for _, _, *names in runs for name in names}
    case = replace(CASE, share=2 if "hierarchy" in found else 0)
    for rank, want in enumerate(case.combined([rows for rows, *_ in runs], case.dispatched())):
        op_runs.check_combine(rank, runs[rank][1], want)
    return found


def test_they_select_it_between_servers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, 2) == {"hierarchy"}
    assert run(monkeypatch, 0) == run(monkeypatch, 4) == {"direct"}  # auto
    assert run(monkeypatch, 2, roce="1") == run(monkeypatch, 2, pcie="0") == run(monkeypatch, 2, roce="") == {"window"}


def test_what_is_named_goes_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, 2, comm_alg="window") == run(monkeypatch, 2, comm_alg="auto") == {"window"}
    for name in ("window", "auto"):
        monkeypatch.setenv("ASCEND_MOE_COMM_ALG", name)
        assert run(monkeypatch, 2) == {"window"}
    monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "hierarchy")
    assert run(monkeypatch, 2, pcie="0") == {"hierarchy"}


def test_errors_name_them_and_what_overrules_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count from the next call on, also where an equal call ran before."""
    monkeypatch.setenv("ASCEND_MOE_RANKS_PER_SERVER", "2")
    case = replace(CASE, share=0, weights=False)
    refused: list[tuple[Case, dict[str, Any], str]] = [
        (replace(case, contract=1), {}, "comm_alg"),
        (case, {}, "expert_scales"),
        (replace(case, weights=True, quant_mode=2, smooth=True), {}, "scales"),
        (replace(case, weights=True), {"performance_info": torch.zeros(4, dtype=torch.int64)}, "performance_info"),
    ]

    def body(rank: int, group_ep: str) -> None:
        place = DevicePlace(group_ep, case.world, rank)
        for other, changes, argument in refused:
            with pytest.raises(ArgumentError, match=NAMED) as raised:
                op_dispatch(place, other, **changes)
            assert raised.value.argument == argument
            assert "ASCEND_MOE_COMM_ALG=window overrules them" in str(raised.value)
        x = case.inputs[rank].x.clone().requires_grad_()
        with pytest.raises(ArgumentError, match="has no gradient"):
            op_dispatch(place, replace(CASE, share=0), x=x)
        assert MC2Dispatcher(group_ep, case.world, rank, case.experts).weighs_first

    with LocalCluster(case.world, window_mib=8) as cluster:
        first = cluster.run(lambda rank, group_ep: op_dispatch(DevicePlace(group_ep, 4, rank), case)[4])
        monkeypatch.setenv("HCCL_INTRA_PCIE_ENABLE", "1")
        monkeypatch.setenv("HCCL_INTRA_ROCE_ENABLE", "0")
        cluster.run(body)
        monkeypatch.setenv("ASCEND_MOE_COMM_ALG", "window")
        again = cluster.run(lambda rank, group_ep: op_dispatch(DevicePlace(group_ep, 4, rank), case)[4])
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
