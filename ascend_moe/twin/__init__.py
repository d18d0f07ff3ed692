"""Runs unmodified AscendC kernels on the CPU.

    from ascend_moe import twin

    kernels = twin.load("add_custom.cpp", defines=["DTYPE_X=half"])
    kernels.launch("add_custom", [x, y, z], tiling, block_dim=8)

    result = kernels.explore("add_custom", [x, y, z], tiling, block_dim=2, schedules=200)
    assert result.ok, result.text

Kernels that talk to their peers' windows: ``twin.Windows(world)``, one list of arguments a rank.
"""

from __future__ import annotations

from .build import build
from .kernels import Exploration, Kernels, Outcome, load
from .windows import Member, Windows

__all__ = ["Exploration", "Kernels", "Member", "Outcome", "Windows", "build", "load"]
