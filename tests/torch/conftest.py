"""A group of one rank in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

import ascend_moe


@pytest.fixture
def group_ep() -> Iterator[str]:
    """The name of the default group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ascend_moe.comm_name()
    ascend_moe.close("0")
    if dist.is_initialized():
        dist.destroy_process_group()
