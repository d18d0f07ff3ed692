"""Has what ranks do in the tests of lost ranks: layers until one is lost, and layers after that, each checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import failure_cases

import ascend_moe
from ascend_moe.comm import rendezvous
from ascend_moe.comm.place import Place
from ascend_moe.errors import AscendMoeError, CommError, PeerLost
from ascend_moe.validate.run import DevicePlace


@dataclass
class Survived:
    """What a rank has gone through: the ranks that were left each time, and the place where it goes on."""

    alive: list[list[int]]
    place: Place
    error: str
    layers: int


def layers(place: Place, count: int, first: int = 0) -> int:
    """Dispatch and combine of so many layers, every one compared with the reference; the number of them."""
    here = DevicePlace(place.group_ep, place.world, place.rank)
    for number in range(first, first + count):
        failure_cases.round_trip(here, number % 5, 1 + number % 2)
    return count


def go_on(place: Place, count: int, timeout: float | None = None) -> Survived:
    """Layers on a group that loses ranks: agrees, shrinks and goes on until ``count`` layers have followed a loss."""
    past: list[list[int]] = []
    error = ""
    for _ in range(place.world):
        try:
            done = layers(place, count if past else 10**6)
            return Survived(past, place, error, done)
        except CommError as lost:
            error = error or type(lost).__name__
        while True:
            past.append(ascend_moe.agree(place.group_ep, timeout))
            try:
                place = ascend_moe.shrink(place.group_ep, past[-1], timeout)
                break
            except PeerLost:  # one more
                continue
    raise AssertionError(f"more ranks are lost than there were: {past}")


def results_of(lost: BaseException, alive: list[int]) -> dict[int, Any]:
    """What the functions of these ranks have returned, where LocalCluster.run has raised ``lost`` of another one."""
    raised = {rank: f"{type(error).__name__}: {error}" for rank, error in lost.others.items()}  # type: ignore[attr-defined]
    results: dict[int, Any] = lost.results  # type: ignore[attr-defined]
    assert sorted(results) == alive, f"ranks {sorted(results)} have returned, not {alive}; the others raised {raised}"
    return results


# ---- in rank processes


def go_on_here(count: int, timeout: float | None = None) -> Survived:
    return go_on(Place.of(), count, timeout)


def layers_at(name: str, count: int, first: int = 0) -> int:
    return layers(Place.of(name or None), count, first)


def agree_and_shrink(name: str = "", timeout: float | None = None) -> tuple[list[int], Place]:
    place = Place.of(name or None)
    alive = ascend_moe.agree(place.group_ep, timeout)
    return alive, ascend_moe.shrink(place.group_ep, alive, timeout)


def shrink_that_fails(name: str, here: bool) -> tuple[str, list[int], int]:
    """How a shrink ends whose windows do not open on one rank, ``here`` or elsewhere; who agrees then; files left."""
    place = Place.of(name or None)
    opened = rendezvous.Communicator  # type: ignore[attr-defined]

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(24, "too many open files")

    alive = ascend_moe.agree(place.group_ep)
    files = opened_files()
    if here:
        rendezvous.Communicator = refused  # type: ignore[attr-defined]
    try:
        ascend_moe.shrink(place.group_ep, alive)
        return "nothing", [], 0
    except AscendMoeError as error:
        text, left = f"{type(error).__name__}: {error}", opened_files() - files
        return text, ascend_moe.agree(place.group_ep), left
    finally:
        rendezvous.Communicator = opened  # type: ignore[attr-defined]


def opened_files() -> int:
    return len(os.listdir("/proc/self/fd"))
