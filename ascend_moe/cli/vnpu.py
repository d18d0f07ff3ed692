"""`ascend-moe vnpu`: the command `ascend-vnpu` under this package's name."""

from __future__ import annotations

from ascend_vnpu.cli import app as app
