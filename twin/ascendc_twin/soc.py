"""The supported SoCs: their properties, and the hardware costs that the timed engine assumes.

Core counts are vector_core_cnt and ai_core_cnt in the platform_config ini files of CANN 8.1.RC1. The costs are in
``data/soc_costs.json``, each with its source.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import need

UB_KIB = 192  # of every AIV core of both series


@dataclass(frozen=True)
class Soc:
    """An NPU by its name in ``npu-smi`` and CANN; on A3 one of the two dies of a package. Each runs one rank.

    ``series``: A2 (Ascend910B, servers joined by RDMA) or A3 (Ascend910_93, one supernode). ``aiv``, ``aic``: its
    vector and cube cores.
    """

    name: str
    series: str
    aiv: int
    aic: int
    ranks_per_server: int

    @property
    def window_holds_state(self) -> bool:
        """Whether the state area (flags) is the last MiB of the data window, as on A2; on A3 it has its own window."""
        return self.series == "A2"


SOCS: dict[str, Soc] = {
    soc.name: soc
    for soc in (
        Soc("Ascend910B1", "A2", 48, 24, 8),
        Soc("Ascend910B2", "A2", 48, 24, 8),
        Soc("Ascend910B3", "A2", 40, 20, 8),
        Soc("Ascend910B4", "A2", 40, 20, 8),
        Soc("Ascend910_9391", "A3", 48, 24, 16),
        Soc("Ascend910_9392", "A3", 48, 24, 16),
        Soc("Ascend910_9381", "A3", 48, 24, 16),
        Soc("Ascend910_9382", "A3", 48, 24, 16),
        Soc("Ascend910_9372", "A3", 40, 20, 16),
        Soc("Ascend910_9362", "A3", 40, 20, 16),
    )
}
DEFAULT_SOC = "Ascend910_9391"
SOC_OF_SERIES = {"A2": "Ascend910B3", "A3": DEFAULT_SOC}  # the default of each series


def soc_named(name: str) -> Soc:
    """Return the SoC of this name, or raise ArgumentError."""
    need(name in SOCS, f"soc is one of {', '.join(SOCS)}, not {name!r}", "soc")
    return SOCS[name]


# ---- costs

KINDS = ("published", "assumed")


@dataclass(frozen=True)
class Cost:
    """One hardware cost. ``kind``: published or assumed; ``source``: where it is published, or why it is assumed."""

    name: str
    value: float
    kind: str
    source: str


@functools.cache
def hardware_costs() -> Any:
    """Return ``data/soc_costs.json`` parsed: costs by series (under "series") and by SoC (under "socs")."""
    return json.loads((Path(__file__).parent / "data" / "soc_costs.json").read_text(encoding="utf-8"))


def cost_table(name: str) -> dict[str, Cost]:
    """Return cost name -> `Cost` of a SoC; raise ArgumentError if there is no such SoC."""
    document = hardware_costs()
    chip = soc_named(name)
    figures = document["series"][chip.series] | document["socs"][name]
    table = {key: Cost(key, float(one["value"]), one["kind"], one["source"]) for key, one in figures.items()}
    table["ranks_per_server"] = Cost(
        "ranks_per_server", chip.ranks_per_server, "published", "ascendc_twin/soc.py: dies of one server"
    )
    return table


def costs_of(name: str, replaced: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return cost name -> value of a SoC; values in ``replaced`` take the place of its own.

    Raises:
        ArgumentError: there is no such SoC or cost, or a value is negative or infinite.
    """
    values = {key: cost.value for key, cost in cost_table(name).items()}
    for key, value in (replaced or {}).items():
        need(key in values, f"costs has {key!r}; the costs are {', '.join(values)}", "costs")
        need(0 <= value < float("inf"), f"costs: {key} is {value}; it must be at least 0 and finite", "costs")
    return values | dict(replaced or {})
