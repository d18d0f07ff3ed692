"""The checked engine finds nothing in hierarchy, whatever core, rank or copy comes first."""

from __future__ import annotations

import pytest
from explored_programs import Worlds
from seen_schedules import OK, PEER_LOST, bits, seen

from ascend_moe import explore
from ascend_moe.errors import ArgumentError

CASES = [
    "w4,c2,l2,k2,b2,v2,r2,weights,DCDC,hierarchy",
    "w4,c1,l1,k2,b1,v2,r2,weights,DDCC,hierarchy,zero-rank",
    "w4,c3,l2,k3,b3,v2,r2,weights,DC,hierarchy,int8,comm_quant_mode:2,mask:token,s5",
    "w6,c1,l1,k2,b2,v2,r2,weights,DC,hierarchy,ids:mixed",
    "w6,c2,l1,k3,b4,u40,v2,r3,weights,DC,hierarchy,zero_expert_num:1,copy_expert_num:1,const_expert_num:1,h2,comm_quant_mode:2,p2,s4",
    "w4,c2,l2,k3,b3,v2,r2,weights,dcDC,hierarchy,stores,p1,s3",
    # A message that reaches one rank as another one: that rank's error, and no other rank's missing rows.
    "w4,c2,l2,k2,b1,u3,v2,tp_world_size:1,h3,s5004,r2,weights,mask:token,ids:mixed,unequal,DCDC,hierarchy,tail,fault:corrupted",
    # A rank makes its first call alone, which sends: those that it relays for fail, the others in their next op.
    "w4,c4,l2,k1,b3,u1,v2,tp_world_size:1,h3,s20001,r2,p1,fp32,ids:hot,unequal,dcDC,hierarchy,weights,tail,fault:absent",
    # A dispatch that all ranks refuse, and combines of it: no rank keeps records then.
    "w4,c2,l2,k2,b2,u1,v2,tp_world_size:1,s20014,r2,bf16,int8,ids:any,equal,DCDC,hierarchy,weights,tail,fault:ids",
    "w4,c2,l1,k3,b2,u3,v2,h2,s20098,r2,p2,fp32,mask:pair,ids:any,equal,DC,hierarchy,weights,tail,fault:overflow",
    # One rank alone runs hierarchy in the last op: its neighbour knows it from its message, the others from notes.
    "w4,c3,l1,k2,b1,u20,v2,h3,s97,r2,mask:token,ids:duplicates,unequal,DCDC,hierarchy,weights,stores,fault:algorithm",
    # Ranks that run window tell their neighbours by an item, which comes before rows of the next op.
    "w8,c2,l3,k6,b1,u2,v2,h2,s9495,r2,bf16,ids:hot,zero-rank,DDCC,hierarchy,weights,zero_expert_num:2,comm_quant_mode:2,tp_world_size:1,fault:algorithm",
    # Records behind the source indices that are too many; other counts than dispatch's; other ids than dispatch's.
    "w4,c2,l1,k2,b2,u3,v2,s20002,r2,p2,fp32,ids:duplicates,equal,DC,hierarchy,weights,stores,fault:source_index",
    "w4,c2,l1,k3,b2,u3,v2,expert_token_nums_type:0,tp_world_size:1,h2,s20062,r2,int8,mask:pair,ids:mixed,equal,DC,hierarchy,weights,tail,fault:counts",
    "w4,c4,l2,k1,b2,u20,v2,s20058,r2,p1,fp16,mask:pair,ids:duplicates,equal,dcDC,hierarchy,weights,comm_quant_mode:2,fault:routing",
]


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("schedules", [8, pytest.param(600, marks=pytest.mark.nightly)])
def test_no_schedule_finds_anything(text: str, schedules: int) -> None:
    case = explore.parse(text)
    assert explore.parse(str(case)) == case
    found = explore.campaign([case], schedules, 1, a_case=schedules)
    assert found.finding is None, found.finding


@pytest.mark.parametrize(
    "text", ["w4,v2,r1,weights", "w5,v2,r2,weights", "w4,v1,r2,weights", "w4,v2,r2", "w4,v2,weights"]
)
def test_a_case_that_hierarchy_cannot_run_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="hierarchy needs v2, weights"):
        explore.parse(f"{text},DC,hierarchy")


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 20))])
def test_a_forwarder_killed_at_every_step_is_named(worlds: Worlds, seed: int) -> None:
    """Rank 2 forwards for rank 0. Whoever misses what it has not passed on says so, and of which level."""
    case, world, victim = explore.parse("w4,c1,l1,k2,b2,u1,v2,r2,weights,DC,hierarchy,ids:distinct"), worlds(4), 2
    world.load(case, accepted=bits(OK, PEER_LOST))
    levels = set()
    for step in range(seen(world, seed, "random").steps + 1):
        found = seen(world, seed, "random", kill_rank=victim, kill_step=step)
        for rank in range(4):
            if rank == victim:
                continue
            errors, texts = found.errors[rank], found.texts[rank]
            assert errors in ([OK, OK], [OK, PEER_LOST], [PEER_LOST, PEER_LOST]), (step, rank, errors, texts)
            assert all(f"rank {victim} is lost" in text for text in texts if text), (step, texts)
            levels |= {text.partition(", in level ")[2][:1] for text in texts if text}
    assert {"1", "2"} <= levels


def test_who_does_not_differ_must_not_be_named(worlds: Worlds) -> None:
    """The positive control of these cases."""
    planned = worlds(4).load(explore.parse("w4,c1,l2,k2,b1,v2,r2,weights,D,hierarchy,fault:algorithm"))
    assert planned.fault is not None
    right = [[(outcome.error, outcome.words) for outcome in planned.fault.outcomes(call)[:1]] for call in planned.calls]
    assert not planned.fault.judge(right)
    for rank in range(4):
        error, words = right[rank][0]
        wrong = words[: words.rindex("rank")] + f"rank {rank}; it must be the same"
        assert f"rank {rank} raises" in planned.fault.judge([*right[:rank], [(error, wrong)], *right[rank + 1 :]])
