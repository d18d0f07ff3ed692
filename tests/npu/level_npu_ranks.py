"""A rank of two simulated servers of an A2 whose calls run comm_alg "hierarchy", until one is killed."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from npu_rank import GLOO, NPU, RANK, WORLD, everyone
from npu_runs import raises, run_checks

import ascend_moe
from ascend_moe import comm, reference
from ascend_moe.call import SpecialExperts
from ascend_moe.errors import ArgumentError, ConfigMismatch, PeerLost
from ascend_moe.ops import npu_communicator
from ascend_moe.reference.cases import Case, legal
from ascend_moe.validate import bringup, probes
from ascend_moe.validate.probes_kernel import Npu
from ascend_moe.validate.run import DevicePlace
from ascend_moe.validate.run import combine as op_combine
from ascend_moe.validate.run import dispatch as op_dispatch

SHARE = int(os.environ["ASCEND_MOE_RANKS_PER_SERVER"])
HCCL_CHOICE = {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}

PLACE, OTHER = everyone(), everyone()
CASE = legal(Case("two servers", WORLD, local=2, topk=4, batch=5, units=4, share=SHARE, batches="unequal", seed=1))
CODED = replace(
    CASE, quant_mode=2, comm_quant_mode=2, ids="mixed", mask="pair", shared=2, **SpecialExperts(1, 1, 1).given, seed=2
)
ONE_LEVEL = replace(CASE, share=0)


def by_torch_npu(op: str, place: DevicePlace, case: Case, values: dict[str, Any]) -> Any:
    """The call that a program written for torch_npu makes."""
    return getattr(torch_npu, f"npu_moe_distribute_{op}_v2")(**values)


def trip(case: Case, place: DevicePlace = PLACE, **changes: Any) -> tuple[str, str]:
    """Both ops, each against the reference; returns what they ran."""
    sent = op_dispatch(place, case, call=by_torch_npu, **changes)
    ascend_moe.check()
    first, want = comm.algorithm_of(place.group_ep), case.dispatched()
    facts = {"rank": RANK, "contract": "v2", "exact_shapes": True, "ranks_per_server": 0 if case.share else SHARE}
    report = reference.validate("dispatch", sent, want[RANK], **facts)
    assert report.ok, report.text
    rows = case.rows_of(want)
    summed = op_combine(place, case, rows[RANK], sent, call=by_torch_npu, **changes)
    ascend_moe.check()
    report = reference.validate("combine", summed, case.combined(rows, want)[RANK], rank=RANK)
    assert report.ok and summed.device == NPU, report.text
    return first, comm.algorithm_of(place.group_ep)


def check_the_probes_of_the_path_pass() -> None:
    """Items of BatchWrite, and the two levels, each through the operator package, in a group with its links."""
    probes.ROUNDS = 3
    for probe in probes.KERNEL_PROBES:
        if probe.name in (bringup.BATCH, bringup.TWO_LEVELS):
            found = probe.on(Npu(OTHER if probe.name == bringup.BATCH else PLACE))
            assert found.status == probes.PASS and "not applicable" not in found.detail, found


def check_torch_npus_names_give_the_reference() -> None:
    with ascend_moe.patch_torch_npu():
        assert trip(CASE, comm_alg="hierarchy") == ("hierarchy", "hierarchy")


def check_hccls_variables_select_it() -> None:
    """A call that names an algorithm, or ASCEND_MOE_COMM_ALG, goes before them."""
    os.environ.update(HCCL_CHOICE)
    with ascend_moe.patch_torch_npu():
        assert trip(CODED, comm_alg="") == ("hierarchy", "hierarchy")
        os.environ["ASCEND_MOE_COMM_ALG"] = "window"
        assert trip(ONE_LEVEL, OTHER, comm_alg="") == ("window", "window")
    for name in (*HCCL_CHOICE, "ASCEND_MOE_COMM_ALG"):
        del os.environ[name]


def check_a_group_keeps_its_links() -> None:
    """A call that needs others is refused with both, before anything is sent; neither group has taken harm."""
    stores, rdma = (npu_communicator.LINKS[which] for which in (True, False))
    for place, case, needs, has in ((PLACE, ONE_LEVEL, rdma, stores), (OTHER, CASE, stores, rdma)):
        text = re.escape(f"was opened for {has}, this call needs {needs}: HCCL keeps") + ".*use a second process group"
        with raises(text, ArgumentError):
            op_dispatch(place, case, comm_alg="hierarchy" if case is CASE else "window")
    with ascend_moe.patch_torch_npu():
        assert trip(CASE, comm_alg="hierarchy") == ("hierarchy", "hierarchy")
        assert trip(ONE_LEVEL, OTHER, comm_alg="window") == ("window", "window")


def check_ranks_that_need_other_links_are_named() -> None:
    """Nobody waits in HCCL for ranks that make other links."""
    place = everyone()
    differs = 1 if RANK == 0 else 0
    with raises(f"the first op of group .* needs .* on rank {RANK}, .* on rank {differs}: pass", ConfigMismatch):
        op_dispatch(place, CASE, comm_alg="window" if RANK == 0 else "hierarchy")


def check_stores_where_hccl_maps_nothing_are_found() -> None:
    """A launch by RDMA alone whose kernel stores within its server ends with the window's name; no rank goes on."""
    place = everyone()
    op_dispatch(place, ONE_LEVEL, comm_alg="window")
    ascend_moe.check()
    npu_communicator._stores.clear()  # nothing refuses it
    npu_communicator.close(place.group_ep)
    said, texts = "", [""] * WORLD
    try:
        op_dispatch(place, CASE, comm_alg="hierarchy")
        torch.npu.synchronize()
        ascend_moe.check(place.group_ep)
    except RuntimeError as error:  # of this rank's kernel, or about the rank whose kernel it was
        said = str(error)
    dist.all_gather_object(texts, said, group=GLOO)
    found = r"load or store .* of rank \d: HCCL has linked that rank by RDMA, its window is not mapped"
    assert all(texts) and any(re.search(found, text) for text in texts), texts


def lose_rank_2() -> None:
    """The rank of its own server waits for it, and so does rank 0 for its items; all name it, again and again."""
    dist.barrier(GLOO)
    if RANK == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with ascend_moe.patch_torch_npu():
        for _ in range(2):
            try:
                op_dispatch(PLACE, CASE, call=by_torch_npu, comm_alg="hierarchy")
                ascend_moe.check()
            except PeerLost as error:
                assert error.rank == 2 and "rank 2 is lost" in str(error), error
            else:
                raise AssertionError("nobody misses rank 2")
    assert time.monotonic() - start < 20  # the deadline is 60 s
    print("the lost rank is named", flush=True)
    os._exit(0)  # the collectives of the others would never end


if __name__ == "__main__":
    run_checks()
    lose_rank_2()
