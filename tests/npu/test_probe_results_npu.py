"""The default algorithm on the virtual NPU, which counts as an NPU here: window until a bring-up has passed."""

from __future__ import annotations

import pytest
from npu_runs import run
from test_validate_npu import A2, A3

pytestmark = pytest.mark.npu


@pytest.mark.parametrize("soc", [A3, pytest.param(A2, marks=pytest.mark.nightly)])
def test_the_default_follows_the_verdict(soc: str) -> None:
    run("probe_result_ranks.py", world=2, soc=soc, env={"ASCEND_MOE_PROVEN": ""}, devices=2).must_pass()
