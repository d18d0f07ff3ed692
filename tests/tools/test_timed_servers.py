"""Servers of A2 on the timed engine: rows go by BatchWrite, and are the reference's when they get there."""

from __future__ import annotations

from dataclasses import replace

import commands
import pytest
import torch
from timed_inputs import reference_inputs

import ascend_moe.reference as ref
from ascend_moe.errors import ArgumentError
from ascend_moe.plan import Request
from ascend_moe.timed import ALGORITHMS, predict
from ascend_moe.timed.costs import cost_table
from ascend_moe.timed.world import TimedWorld

SOC = "Ascend910B1"
TWO = Request(
    ranks=4, experts=16, topk=4, hidden=2048, batch=9, quant=True, soc=SOC, cores=6, ranks_per_server=2
)
COSTS = {name: one.value for name, one in cost_table(SOC).items()} | {"ranks_per_server": 2}


@pytest.mark.parametrize("quant", [False, True])
@pytest.mark.parametrize("contract", ["v1", "v2"])
@pytest.mark.parametrize("share", [1, 2, 3])
def test_results_are_the_references(share: int, contract: str, quant: bool) -> None:
    request = replace(TWO, ranks_per_server=share, contract=contract, quant=quant)
    ranks = range(request.ranks)
    with TimedWorld(request, "window", 5, payload=True) as world:
        sent = world.run("dispatch", COSTS | {"ranks_per_server": share}, events=100_000)
        inputs = reference_inputs(world)
        want = ref.dispatch(inputs, moe_expert_num=16, quant_mode=2 if quant else 0, global_bs=0)
        for one, found in zip(want, world.outputs["dispatch"], strict=True):
            rows = len(one.expand_x)
            assert torch.equal(found[0][:rows], one.expand_x)
            if one.dynamic_scales is not None:
                assert torch.equal(found[1][:rows], one.dynamic_scales)
            assert torch.equal(found[2][: one.expand_idx.numel()], one.expand_idx)
            assert torch.equal(found[4], one.ep_recv_counts)
        world.run("combine", COSTS)
        rows = [world.inputs["combine"][rank]["expand_x"][: len(want[rank].expand_x)] for rank in ranks]
        for one, found in zip(
            ref.combine(inputs, rows, want, moe_expert_num=16, global_bs=0),
            world.outputs["combine"],
            strict=True,
        ):
            assert torch.equal(found[0], one)
    items = [event for event in sent.events if event.name == "BatchWrite"]
    far = {(a, b) for a in ranks for b in ranks if a // share != b // share}
    assert {(event.rank, event.peer) for event in items} == far  # one item a rank of another server
    assert len(items) == len(far)


def test_the_nic_is_what_links_servers() -> None:
    usual = predict(TWO)
    assert usual.dispatch.link_use["nic out"] > 0
    assert "nic out" not in predict(replace(TWO, ranks_per_server=4)).dispatch.link_use
    rows = TWO.batch * TWO.topk * (TWO.hidden + 32) / 2  # of a rank, half of them to the other server
    with TimedWorld(TWO, "window", 0, payload=False) as world:
        links = world.run("dispatch", COSTS).links
    carried = sum(size for name, _, size, _ in links if name == "nic out")
    assert carried == pytest.approx(TWO.ranks * rows, rel=0.3)
    for name, factor in (("nic_gbps", 1 / 16), ("nic_latency_ns", 4)):
        slow = predict(TWO, costs={name: COSTS[name] * factor})
        assert slow.dispatch_us > usual.dispatch_us
        assert slow.combine_us > usual.combine_us


def test_waiting_for_another_server_is_waiting_for_its_status() -> None:
    """However the waiting core's looks fall: the path goes back over the NIC to whoever sent the item."""
    late = 100_000.0
    for latency in (late, late + 500, late + 1_000, late + 1_500):
        found = predict(TWO, events=100_000, costs={"nic_latency_ns": latency})
        for op in (found.dispatch, found.combine):
            assert op.pipes["status"] > latency / 1e3
            assert sum(op.spent.values()) == pytest.approx(op.us, rel=1e-4)
            waits = [event for event in op.events if event.name == "wait"]
            assert waits
            assert all(event.flow for event in waits)


def test_leaving_rows_where_they_are_changes_no_time() -> None:
    without, moved = (predict(TWO, payload=payload) for payload in (False, True))
    assert (without.dispatch_us, without.combine_us) == (moved.dispatch_us, moved.combine_us)


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"window"}))
def test_other_algorithms_are_refused(algorithm: str) -> None:
    with pytest.raises(ArgumentError, match=r"RDMA.*'window'"):
        predict(TWO, algorithm=algorithm)


def test_the_command_takes_what_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--bs", "4", "--hidden", "512", "-k", "2", "-e", "16", "--cores", "4"]
    assert commands.run("predict", ["--soc", SOC, "--ep", "8,16", *small]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert [name for ep, name in (row for row in rows if len(row) == 2) if ep == "8"] == list(ALGORITHMS)
    assert [name for ep, name in (row for row in rows if len(row) == 2) if ep == "16"] == ["window"]
