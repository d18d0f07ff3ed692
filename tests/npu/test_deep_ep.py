"""DeepEP's Buffer with NPU tensors, on HCCL of the virtual NPU."""

from __future__ import annotations

import pytest
from npu_runs import run

pytestmark = pytest.mark.npu


def test_a_buffer_works_on_hccl() -> None:
    run("deep_ep_ranks.py", world=2).must_pass()
