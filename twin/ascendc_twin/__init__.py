"""AscendC vector kernels on a CPU: an emulator with a race checker, for unmodified kernel sources.

    import ascendc_twin

    kernels = ascendc_twin.load("add_custom.cpp", defines=["DTYPE_X=half"])
    kernels.launch("add_custom", [x, y, z], tiling, block_dim=8)

    result = kernels.explore("add_custom", [x, y, z], tiling, block_dim=2, schedules=200)
    assert result.ok, result.text

If kernels access the windows of other ranks, pass ``windows=ascendc_twin.Windows(world)``, and as args a list per rank.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import ArgumentError, LibraryError, TwinBuildError, TwinError, TwinFault
    from .kernels import Exploration, Kernels, LaunchResult, Member, Timing, Windows, build, load

__all__ = [
    "ArgumentError",
    "Exploration",
    "Kernels",
    "LaunchResult",
    "LibraryError",
    "Member",
    "Timing",
    "TwinBuildError",
    "TwinError",
    "TwinFault",
    "Windows",
    "build",
    "load",
]


# PEP 562: `ascendc_twin.cache` serves programs that start without numpy.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = ".errors" if name.endswith("Error") or name == "TwinFault" else ".kernels"
    return getattr(importlib.import_module(module, __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
