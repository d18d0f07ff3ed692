"""`ascend-moe twin`: the command `ascendc-twin` under this package's name."""

from __future__ import annotations

from ascendc_twin.cli import app as app
