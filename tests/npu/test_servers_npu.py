"""Several servers on the virtual NPU: ranks that take themselves to be on other hosts, and go on without one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from npu_runs import LAST_LINE, run
from test_validate_npu import A2, A3, on_vnpu, read

pytestmark = pytest.mark.npu
# Before CANN 8.3 they link a server by memory; they also select hierarchy, which V1 does not have.
OLD_STORES = {
    "HCCL_INTRA_PCIE_ENABLE": "1",
    "HCCL_INTRA_ROCE_ENABLE": "0",
    "ASCEND_MOE_COMM_ALG": "window",
    "ASCEND_MOE_INTRA_NODE_STORES": "1",
}
BY_RANK = """
import os, socket
if "RANK" in os.environ:
    socket.gethostname = lambda: os.environ["HOSTS"][int(os.environ["RANK"])]
"""


@pytest.mark.parametrize(
    ("soc", "hosts", "settings"),
    [
        (A2, "aabb", {}),
        pytest.param(A3, "aabb", {}, marks=pytest.mark.nightly),
        pytest.param(A2, "aaaabbbb", {}, marks=pytest.mark.nightly),
        pytest.param(A2, "aabb", {"ASCEND_MOE_INTRA_NODE_STORES": "1"}, marks=pytest.mark.nightly),
        pytest.param(A2, "aabb", {"ASCEND_MOE_VNPU_CANN": "8.1"}, marks=pytest.mark.nightly),  # no names for links
        pytest.param(A2, "aabb", {"ASCEND_MOE_VNPU_CANN": "8.1", **OLD_STORES}, marks=pytest.mark.nightly),
    ],
)
def test_ranks_on_two_hosts(soc: str, hosts: str, settings: dict[str, str]) -> None:
    """Each link mode of HCCL: RDMA alone, stores within a server, and either as HCCL had them before CANN 8.3."""
    env = {"HOSTS": hosts, **settings}
    run("server_ranks.py", world=len(hosts), soc=soc, env=env, devices=len(hosts)).must_pass()


def test_hierarchy_between_two_servers() -> None:
    """It gives the reference by torch_npu's names; a killed rank is named by all others."""
    env = {"ASCEND_MOE_RANKS_PER_SERVER": "2", "ASCEND_MOE_PROVEN": ""}  # by which "auto" is window
    outcome = run("level_npu_ranks.py", world=4, soc=A2, env=env, devices=4)
    assert outcome.codes == (0, 0, -9, 0), outcome.stderr
    for rank, said in enumerate(outcome.stdout):
        assert LAST_LINE in said and said.endswith("the lost rank is named\n") == (rank != 2), outcome.stderr[rank]


@pytest.mark.parametrize("hosts", ["aa", pytest.param("ab", marks=pytest.mark.nightly)])
def test_an_a2_whose_state_a_broadcast_has_overwritten(hosts: str) -> None:
    env = {"HOSTS": hosts, "HCCL_BUFFSIZE": "8", "ASCEND_MOE_TIMEOUT_S": "10"}
    check = "ops_work_on_a_group_whose_state_was_overwritten"
    run("server_ranks.py", check, world=2, soc=A2, env=env, devices=2).must_pass()


@pytest.mark.parametrize(
    ("share", "right"), [("4", False), pytest.param("2", True, marks=pytest.mark.nightly)], ids=["one", "two"]
)
def test_bringup_asks_for_host_names_first(share: str, right: bool, tmp_path: Path) -> None:
    """Ranks of two hosts that are said to share a server: no probe is launched."""
    (tmp_path / "sitecustomize.py").write_text(BY_RANK)
    report = tmp_path / "report"
    env = {"HOSTS": "aabb", "ASCEND_MOE_RANKS_PER_SERVER": share, "ASCEND_MOE_VNPU_REPORT": str(report)}
    code, printed = on_vnpu(A2, "validate", "--bringup", "--json", devices=4, python_path=tmp_path, **env)
    first, *others = read(printed)["probes"]
    lines = report.read_text().splitlines() if report.is_file() else []  # a process that launches nothing has none
    launched = [json.loads(line)["launches"] for line in lines]
    assert first["name"] == "servers"
    if right:
        assert first["status"] == "PASS" and "2 ranks per server, 2 server(s), 2 host name(s)" in first["detail"]
        assert {other["status"] for other in others if other["name"] != "cycle rate"} == {"PASS"}, printed
        assert any("AscendMoeProbe" in line for line in launched)
    else:
        names = "ranks 0 and 2 should share a server (4 ranks per server), but their host names are a and b"
        assert code == 1 and first["status"] == "FAIL" and names in first["detail"]
        assert {other["status"] for other in others} == {"SKIPPED"}
        assert not any("AscendMoeProbe" in line for line in launched)  # nor has a rank cleared its state area
        assert len(others) == 19


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
