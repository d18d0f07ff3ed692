"""Which ranks share a server: what host names, settings and torchrun's variable say, and how ranks agree on it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from ascend_moe.comm.records import Records
from ascend_moe.errors import ArgumentError, AscendMoeError, CommTimeout, ConfigMismatch
from ascend_moe.native.probe_results import ONE_SERVER, SEVERAL_SERVERS
from ascend_moe.ops import npu_servers
from ascend_moe.ops.npu_servers import ServerRecord, agreed, agreed_proven, refuse_super_pods, topology

SETTING = "ASCEND_MOE_RANKS_PER_SERVER"


def posts(hosts: Sequence[str], **facts: Any) -> list[ServerRecord]:
    """Returns the posts of ranks on these hosts; a fact is a value, or a list with one for each rank."""
    each = {name: value if isinstance(value, list) else [value] * len(hosts) for name, value in facts.items()}
    plain = {
        "machine": "",
        "ranks_per_server": 0,
        "local_world": 0,
        "intra_node_stores": 0,
        "rdma_flags": 0,
        "proven": {},
    }
    return [
        ServerRecord(host=host, **plain | {name: values[rank] for name, values in each.items()})
        for rank, host in enumerate(hosts)
    ]


def size_of(made: Sequence[ServerRecord], rank: int = 0, ranks: Sequence[int] | None = None, job: int = 0) -> int | str:
    """Returns what one rank concludes: the number, or the error's text. ``ranks`` of the job: all by default."""
    try:
        return agreed("g", rank, made, ranks or range(len(made)), job or len(made))
    except AscendMoeError as error:
        assert "\n" not in str(error) and "group 'g'" in str(error)
        return (
            f"{type(error).__name__} {error.details['argument' if 'argument' in error.details else 'field']}: {error}"
        )


def on(*counts: int) -> list[str]:
    return [f"host{at}" for at, count in enumerate(counts) for _ in range(count)]


# ---- super-pods of A3


def test_a_group_on_several_super_pods_is_refused_with_canns_numbers() -> None:
    """Ranks that do not say where they are count to none."""
    for same in (["", "", "", ""], ["1", "1", "", "1"]):
        refuse_super_pods("g", posts(on(4), super_pod=same))
    with pytest.raises(ArgumentError) as raised:
        refuse_super_pods("g", posts(on(2, 2), super_pod=["", "0", "0", "7"]))
    said = str(raised.value)
    assert raised.value.argument == "group_ep" and "\n" not in said
    assert "group 'g': HCCL_LOGIC_SUPERPOD_ID is 0 on rank 1 and 7 on rank 3: nothing here carries rows from" in said
    canns = "W in 16..256 and a multiple of 16, H 1024..7168 in steps of 32, BS to 256, K to 16, L to 24, E to 512, "
    assert f"{canns}W*L to 512, equal batches, no mask of pairs, no special experts" in said
    assert "`ascend-moe plan --super-pods 2`" in said and "create one group per super-pod" in said


# ---- host names


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (on(3, 5), "3 of its 8 ranks are on 'host0' (from rank 0 on), 5 on 'host1' (from rank 3 on)"),
        (on(2, 2, 1), "2 of its 5 ranks are on 'host0' (from rank 0 on), 1 on 'host2' (from rank 4 on)"),
        (["a", "a", "b", "b", "c", "b"], "ranks 2 and 5 are on 'b', but rank 4 between them is on 'c'"),
    ],
)
def test_other_servers_are_refused_by_name(hosts: list[str], text: str) -> None:
    """The same on all ranks, whatever torchrun says of its own."""
    for local in (0, [hosts.count(host) for host in hosts]):
        made = posts(hosts, local_world=local)
        said = {size_of(made, rank) for rank in range(len(hosts))}
        assert len(said) == 1 and f"ArgumentError group_ep: group 'g': {text}" in said.pop()


def test_modules_of_8_devices_are_servers_as_hccl_counts_them() -> None:
    """A host of 16 NPUs is two servers for a group that has ranks in both modules, and only then."""
    both = posts(on(16), module=[0] * 8 + [1] * 8)
    assert [size_of(both, rank) for rank in range(16)] == [8] * 16 and topology(both) == SEVERAL_SERVERS
    for alike in (posts(on(8), module=1), posts(on(8, 8), module=[0] * 8 + [1] * 8)):
        assert size_of(alike) == 8
    uneven = size_of(posts(on(6), module=[0, 0, 0, 0, 1, 1]))
    assert "4 of its 6 ranks are on 'host0, module 0' (from rank 0 on), 2 on 'host0, module 1'" in str(uneven)
    by_setting = [size_of(posts(on(16), module=[0] * 8 + [1] * 8, ranks_per_server=share)) for share in (8, 4, 16)]
    assert by_setting[:2] == [8, 4]
    text = "ASCEND_MOE_RANKS_PER_SERVER is 16, but ranks 0 and 8 are on 'host0, module 0' and 'host0, module 1': HCCL"
    assert text in str(by_setting[2])


def test_drawn_servers_are_accepted_where_ranks_fit() -> None:
    """Accepted exactly where rank r is on the server r // n for some n that divides W; the setting says the same."""
    dice, accepted = random.Random(5), 0
    for _ in range(1000):
        world, servers_ = dice.randrange(1, 17), dice.randrange(1, 5)
        if dice.random() < 0.5:
            share = dice.randrange(1, world + 1)
            hosts = [f"h{rank // share}" for rank in range(world)]
        else:
            hosts = [f"h{dice.randrange(servers_)}" for _ in range(world)]
        wanted = [
            share
            for share in range(1, world + 1)
            if world % share == 0
            and [hosts.index(host) for host in hosts] == [rank // share * share for rank in range(world)]
        ]
        assert len(wanted) <= 1
        found = size_of(posts(hosts), dice.randrange(world))
        assert found == wanted[0] if wanted else "ArgumentError" in str(found), (hosts, found)
        accepted += bool(wanted)
        if wanted:  # torchrun says the same, and a group that has a part of the ranks may have fewer of a server
            assert size_of(posts(hosts, local_world=wanted[0])) == wanted[0]
            assert size_of(posts(hosts, local_world=wanted[0] + 1), job=2 * world) == wanted[0]
        share = dice.randrange(1, 2 * world)
        by_setting = size_of(posts(hosts, ranks_per_server=share))  # whatever the host names
        assert (
            by_setting == min(share, world) if share >= world or world % share == 0 else "Argument" in str(by_setting)
        )
    assert 170 < accepted < 830


# ---- what else is known of servers


def test_one_name_for_two_machines_is_found() -> None:
    """Bare servers are often all called localhost: the boot id, or torchrun's count, tells them apart.

    That fewer ranks have a name than were started there counts in a group of the whole job: others need not have all.
    """
    text = str(size_of(posts(["localhost"] * 8, machine=[*["b0"] * 4, *["b1"] * 4]), 5))
    assert "ConfigMismatch host name: ranks 0 and 4 of group 'g' both have the host name 'localhost'" in text
    assert f"export {SETTING} on all ranks" in text
    text = str(size_of(posts(["localhost"] * 8, local_world=4), 5))
    assert "ConfigMismatch LOCAL_WORLD_SIZE: LOCAL_WORLD_SIZE is 4 on rank 0 of group 'g', but 8 of its 8 ranks" in text
    assert size_of(posts(["localhost"] * 8, local_world=4, ranks_per_server=4, machine=[*["b0"] * 4, *["b1"] * 4])) == 4
    made = posts(on(4, 4), local_world=8)
    text = "LOCAL_WORLD_SIZE is 8 on rank 0 of group 'g', but 4 of its 8 ranks have its host name 'host0'"
    assert text in str(size_of(made)) and size_of(made, job=16) == 4


@pytest.mark.parametrize(
    ("name", "field"),
    [
        (SETTING, "ranks_per_server"),
        ("ASCEND_MOE_INTRA_NODE_STORES", "intra_node_stores"),
        ("ASCEND_MOE_RDMA_FLAGS", "rdma_flags"),
    ],
)
def test_settings_that_differ_are_named_on_every_rank(name: str, field: str) -> None:
    made = posts(on(4, 4), **{field: [4 if field == "ranks_per_server" else 1] * 5 + [0] * 3})
    for rank in range(8):
        with pytest.raises(ConfigMismatch) as caught:
            agreed("g", rank, made, range(8), 8)
        error = caught.value
        ours, theirs = (getattr(made[side], field) for side in (rank, error.rank))  # type: ignore[attr-defined]
        assert error.details == {"field": name, "rank": 5 if rank < 5 else 0, "ours": ours, "theirs": theirs}
        where = f"{ours} on rank {rank}, {theirs} on rank {error.details['rank']}"
        assert f"{name} differs in group 'g': {where}: export one value" in str(error)


@pytest.mark.parametrize("hosts", [on(4), on(2, 2)])
def test_probe_results_that_differ_are_named_on_every_rank(hosts: list[str]) -> None:
    """Only what was found for this group's topology has to agree."""
    where = ONE_SERVER if len(set(hosts)) == 1 else SEVERAL_SERVERS
    other = SEVERAL_SERVERS if where == ONE_SERVER else ONE_SERVER
    made = posts(hosts, proven=[{where: "data before flag,pull", other: str(rank)} for rank in range(4)])
    assert {agreed_proven("g", rank, made) for rank in range(4)} == {frozenset({"data before flag", "pull"})}
    made = posts(hosts, proven=[*[{where: "pull"}] * 3, {}])
    for rank in range(4):
        with pytest.raises(ConfigMismatch) as caught:
            agreed_proven("g", rank, made)
        ours, theirs, at = ("pull", "", 3) if rank < 3 else ("", "pull", 0)
        details = {"field": "ASCEND_MOE_PROVEN", "rank": at, "ours": ours, "theirs": theirs}
        assert caught.value.details == details
        text = f"in group 'g' ({where.replace('-', ' ')}): {ours or 'nothing'} on rank {rank}, {theirs or 'nothing'} on"
        assert text in str(caught.value) and "`ascend-moe validate --bringup` on all ranks at once" in str(caught.value)
    assert agreed_proven("g", 0, posts(hosts, proven={})) == frozenset()


def test_two_machines_of_one_name_are_several_servers() -> None:
    assert topology(posts(on(3))) == ONE_SERVER
    assert topology(posts(on(3), machine=["a", "a", "b"])) == topology(posts(on(1, 1))) == SEVERAL_SERVERS


def test_the_setting_counts_ranks_of_the_job() -> None:
    """One value for all groups: of 16 ranks on two servers of 8."""
    for ranks, share in (
        ([0, 1, 2, 3, 8, 9, 10, 11], 4),
        ([4, 5, 6, 7], 4),
        ([7, 8], 1),
        (range(16), 8),
        ([0, 2, 9, 15], 2),
    ):
        assert size_of(posts(["?"] * len(ranks), ranks_per_server=8), ranks=ranks, job=16) == share
        by_name = posts([f"s{rank // 8}" for rank in ranks], local_world=8)
        assert size_of(by_name, ranks=ranks, job=16) == share  # as host names do
    mixed = str(size_of(posts(["?"] * 3, ranks_per_server=8), ranks=[6, 7, 8], job=16))
    assert (
        "2 of its 3 ranks are on 'server 0' (from rank 0 on), 1 on 'server 1'" in mixed and f"{SETTING} is 8" in mixed
    )


# ---- how ranks tell each other


def join(store: Any, made: Sequence[ServerRecord], there: Sequence[int], timeout: float = 10) -> list[Any]:
    """Returns what the ranks that are there find, each on a thread: host names, or the error."""

    def body(rank: int) -> Any:
        time.sleep(0.01 * (rank * 7 % 3))
        records = Records(store, None, "servers", rank, made[rank], f"rank {rank}")
        try:
            return [post.host for post in npu_servers._exchange(records, len(made), timeout)]
        except CommTimeout as error:
            return error

    with ThreadPoolExecutor(len(there)) as pool:
        return list(pool.map(body, there))


@pytest.mark.parametrize("before", [False, True])
def test_a_rank_that_does_not_come_is_named(before: bool) -> None:
    """Also where its post of an earlier group is there, over which all ranks join anew."""
    store, hosts = dist.HashStore(), on(2, 2)
    for number in range(3 if before else 0):
        earlier = [f"{number}-{rank}" for rank in range(4)]
        assert join(store, posts(earlier), range(4)) == [earlier] * 4
    for error in join(store, posts(hosts), [0, 1, 3], timeout=0.5):
        assert isinstance(error, CommTimeout) and error.details["phase"] == "open"
        assert 2 in error.details["ranks"] and "did not report their host within 0.5 s" in str(error)
        if not before:
            assert (error.rank, error.ranks) == (2, [2])
