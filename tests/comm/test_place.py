"""A place is checked where it is made, whatever it is made of, and gives the ops their three keywords."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import pytest

from ascend_moe import LocalCluster, dispatchers
from ascend_moe.comm.place import Place
from ascend_moe.errors import ArgumentError


@pytest.mark.parametrize(
    ("given", "argument", "text"),
    [
        (("g", 2, 2), "rank", "rank is 2; it must be 0..1, one of the 2 ranks of group 'g'"),
        (("g", 2, -1), "rank", "rank is -1; it must be 0..1"),
        (("g", 0, 0), "world", "world is 0; it must be a number of ranks, at least 1"),
        (("g", 2.0, 0), "world", "world is 2.0"),
        (("g", 2, "0"), "rank", "rank is '0'"),
        ((2, 0, "g"), "group_ep", "group_ep is a int; it must be a group's name"),
    ],
)
def test_a_place_that_cannot_be_is_refused(given: Any, argument: str, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Place(*given)
    assert caught.value.argument == argument and text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given", [("g", 2, 2), ("g", 0, 2), ("g", "2", 0), ("g", True, 0), ("g", 2), (), ("g", 2, 0, 1)]
)
def test_a_tuple_that_is_no_place_names_the_argument(given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^ep_group is .*\(name, W, rank\)") as caught:
        Place.of(given, "ep_group")
    assert caught.value.argument == "ep_group"


def test_a_place_is_made_of_a_place_a_tuple_and_a_name() -> None:
    @dataclass(frozen=True)
    class Wider(Place):
        device: str = "cpu"

    with LocalCluster(2) as cluster:

        def body(rank: int, name: str) -> None:
            place = Place.of(name)
            assert place == Place(name, 2, rank) == Place.of((name, 2, rank)) == Place.of(place)
            wider = Wider.of(place, device="npu")
            assert isinstance(wider, Wider) and (wider.rank, wider.device) == (rank, "npu")
            assert place.arguments(moe_expert_num=4) == {
                "group_ep": name, "ep_world_size": 2, "ep_rank_id": rank, "moe_expert_num": 4,
            }  # fmt: skip
            with pytest.raises(FrozenInstanceError):
                place.rank = 0  # type: ignore[misc]
            for kind in dispatchers.KINDS:
                assert dispatchers.make_dispatcher(kind, place, 4).place == place

        cluster.run(body)
        with pytest.raises(ArgumentError, match="is a LocalCluster's: call it in the thread of a rank"):
            Place.of(cluster.name)


def test_kinds_of_dispatchers_take_their_own_options_alone() -> None:
    place = Place("nobody", 1, 0)
    with pytest.raises(ArgumentError, match="kind is 'pplx'; need one of mc2, alltoall, allgather"):
        dispatchers.make_dispatcher("pplx", place, 2)
    with pytest.raises(ArgumentError, match="zero_copy is True, not supported by kind 'allgather'"):
        dispatchers.make_dispatcher("allgather", place, 2, zero_copy=True)
    with pytest.raises(ArgumentError, match="'nobody' names no live group"):
        dispatchers.make_dispatcher("alltoall", place, 2)
    with LocalCluster(2) as cluster:

        def other_size(rank: int, name: str) -> None:
            with pytest.raises(ArgumentError, match="has 2 ranks, and this is rank"):
                dispatchers.make_dispatcher("alltoall", Place(name, 3, rank), 3)

        cluster.run(other_size)
