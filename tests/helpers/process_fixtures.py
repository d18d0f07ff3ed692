"""Fixtures for tests with rank processes: a test module that imports them has them in all its tests."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator

import pytest
from rank_processes import Ranks


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Started, and its descriptors open, before any are counted."""
    with Ranks(1):
        pass


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test leaves /dev/shm, this process's descriptors and its children as they were."""
    gc.collect()
    before = (shared_memory(), len(os.listdir("/proc/self/fd")), multiprocessing.active_children())
    yield
    gc.collect()
    assert (shared_memory(), len(os.listdir("/proc/self/fd")), multiprocessing.active_children()) == before


def shared_memory() -> list[str]:
    """Names in /dev/shm, without those that torch and Python make for programs beside us."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith(("torch_", "sem.", "psm_")))
