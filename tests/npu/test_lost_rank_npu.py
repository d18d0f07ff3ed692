"""A rank is killed on the virtual NPU, and the others go on with an HCCL communicator of their own."""

from __future__ import annotations

import signal

import pytest
from npu_runs import LAST_LINE, run
from test_validate_npu import A2, A3

pytestmark = pytest.mark.npu


@pytest.mark.parametrize(
    ("soc", "victim", "how", "hosts"),
    [
        (A3, 1, (), "aaaa"),
        pytest.param(A2, 3, (), "aaaa", marks=pytest.mark.nightly),
        pytest.param(A3, 0, ("late",), "aaaa", marks=pytest.mark.nightly),
        (A2, 3, ("uneven",), "aabb"),
    ],
)
def test_three_of_four_ranks_go_on(soc: str, victim: int, how: tuple[str, ...], hosts: str) -> None:
    """Also where one more comes late; between servers, where as many are left on each, the others leave one out."""
    env = {"ASCEND_MOE_TIMEOUT_S": "4", "HCCL_BUFFSIZE": "8", "HOSTS": hosts}
    ended = run("survivor_ranks.py", str(victim), "20", *how, world=4, soc=soc, devices=4, env=env)
    for rank, code in enumerate(ended.codes):
        text = f"rank {rank}: {code}\n{ended.stdout[rank]}\n{ended.stderr[rank][-4000:]}"
        assert code == (-signal.SIGKILL if rank == victim else 0), text
        assert rank == victim or ended.stdout[rank].endswith(f"{LAST_LINE}\n"), text
