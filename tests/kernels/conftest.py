"""Variables of tests of the kernels, and the worlds of explored cases."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
from explored_programs import Worlds

from ascend_moe.explore import World
from ascend_moe.native.plans import ALGORITHMS


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """One world a size, kept between cases."""
    with contextlib.ExitStack() as opened:
        yield functools.cache(lambda size: opened.enter_context(World(size)))


@pytest.fixture
def algorithm() -> str:
    """The algorithm of a test that is parametrized with it."""
    return ""


@pytest.fixture
def cores() -> int:
    """AIV cores a rank of a test that is parametrized with them."""
    return 0


@pytest.fixture(autouse=True)
def settings(request: pytest.FixtureRequest, algorithm: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the module's ``SETTINGS``, and of the test's algorithm and cores."""
    values = dict(getattr(request.module, "SETTINGS", {}))
    values |= {"ASCEND_MOE_COMM_ALG": algorithm} if algorithm in ALGORITHMS[1:] else {}
    values |= {"ASCEND_MOE_AIV_CORES": str(cores)} if cores else {}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
