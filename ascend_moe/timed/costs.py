"""What the hardware costs, as the timed engine takes it: one table, every figure with its source.

``data/soc_costs.json`` has the figures by series (A2, A3) and by SoC; cores and servers are those of ``soc``.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..errors import ArgumentError
from ..plan.soc import Soc, soc

KINDS = ("published", "assumed", "fitted")


@dataclass(frozen=True)
class Cost:
    """One figure. ``kind``: published (``source`` says where), assumed (``source`` says why), fitted."""

    name: str
    value: float
    kind: str
    source: str


@functools.cache
def read_data(name: str) -> Any:
    """A JSON file of the package's data folder."""
    return json.loads(
        resources.files("ascend_moe").joinpath("data").joinpath(name).read_text(encoding="utf-8")
    )


def known_socs() -> list[str]:
    """Names of the SoCs that the table has."""
    return list(read_data("soc_costs.json")["socs"])


def cost_table(name: str) -> dict[str, Cost]:
    """Every figure of a SoC by name."""
    document = read_data("soc_costs.json")
    if name not in document["socs"]:
        raise ArgumentError(
            f"no costs of SoC {name!r}; need one of {', '.join(document['socs'])}", argument="soc"
        )
    chip: Soc = soc(name)
    figures = document["series"][chip.series] | document["socs"][name]
    table = {key: Cost(key, float(one["value"]), one["kind"], one["source"]) for key, one in figures.items()}
    table["ranks_per_server"] = Cost(
        "ranks_per_server", chip.ranks_per_server, "published", "ascend_moe/plan/soc.py: dies of one server"
    )
    return table


def fitted_names() -> list[str]:
    """The free parameters: figures of kind "fitted", the same for all SoCs."""
    series = read_data("soc_costs.json")["series"]
    return sorted(
        {key for figures in series.values() for key, one in figures.items() if one["kind"] == "fitted"}
    )
