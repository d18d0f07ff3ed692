"""Opens the worlds of explored cases."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
from explored_programs import Worlds

from ascend_moe.explore import World


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """One world a size, kept between cases."""
    with contextlib.ExitStack() as opened:
        yield functools.cache(lambda size: opened.enter_context(World(size)))
