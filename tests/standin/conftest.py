"""Installs the stand-in of torch_npu for one test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ascend_moe.standin import torch_npu as standin


@pytest.fixture
def stand_in() -> Iterator[Any]:
    standin.install(quiet=True)
    try:
        yield __import__("torch_npu")
    finally:
        standin.uninstall()
