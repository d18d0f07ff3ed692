"""Installs the shim of torch_npu for one test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ascend_moe.shim import torch_npu as shim


@pytest.fixture
def torch_npu() -> Iterator[Any]:
    shim.install(quiet=True)
    try:
        yield __import__("torch_npu")
    finally:
        shim.uninstall()
