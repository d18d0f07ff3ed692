"""The SoCs and hardware costs of `ascendc_twin.soc`, with this package's error for other names."""

from __future__ import annotations

from ascendc_twin.soc import DEFAULT_SOC as DEFAULT_SOC
from ascendc_twin.soc import KINDS as KINDS
from ascendc_twin.soc import SOC_OF_SERIES as SOC_OF_SERIES
from ascendc_twin.soc import SOCS as SOCS
from ascendc_twin.soc import UB_KIB as UB_KIB
from ascendc_twin.soc import Cost as Cost
from ascendc_twin.soc import Soc as Soc
from ascendc_twin.soc import cost_table as cost_table_of
from ascendc_twin.soc import hardware_costs as hardware_costs

from ..errors import need_one_of


def soc(name: str) -> Soc:
    """Return the SoC of this name."""
    need_one_of("soc", name, SOCS)
    return SOCS[name]


def cost_table(name: str) -> dict[str, Cost]:
    """Return all costs of a SoC by name."""
    return cost_table_of(soc(name).name)
