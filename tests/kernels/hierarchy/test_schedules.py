"""The checked engine finds nothing in hierarchy, whatever core, rank or copy comes first."""

from __future__ import annotations

import pytest

from ascend_moe import explore
from ascend_moe.errors import ArgumentError

CASES = [
    "w4,c2,l2,k2,b2,v2,r2,weights,DCDC,hierarchy",
    "w4,c1,l1,k2,b1,v2,r2,weights,DDCC,hierarchy,zero-rank",
    "w4,c3,l2,k3,b3,v2,r2,weights,DC,hierarchy,int8,coded,mask:token,s5",
    "w6,c1,l1,k2,b2,v2,r2,weights,DC,hierarchy,ids:mixed",
    "w6,c2,l1,k3,b4,u40,v2,r3,weights,DC,hierarchy,special:1-1-1,h2,coded,p2,s4",
    "w4,c2,l2,k3,b3,v2,r2,weights,dcDC,hierarchy,near,p1,s3",
    # A message that reaches one rank as another one: that rank's error, and no other rank's missing rows.
    "w4,c2,l2,k2,b1,u3,v2,t1,h3,s5004,r2,weights,mask:token,ids:mixed,unequal,DCDC,hierarchy,tail,fault:spoilt",
]


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("schedules", [12, pytest.param(600, marks=pytest.mark.nightly)])
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
