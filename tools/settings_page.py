"""Writes docs/settings.md from the table in ascend_moe/settings.py: `python tools/settings_page.py`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "settings.md"

HEAD = """# Environment variables

For everybody who runs `ascend_moe`: every environment variable that it reads. `ascend-moe doctor` checks the
values that are set, and warns of names that it does not know.

A variable is read when its value is needed, so a change counts from the next call or the next communicator
on. An empty value counts as not set. A bad value is an error that states the rule.

This page is made from `ascend_moe/settings.py` by `tools/settings_page.py`.
"""


def page() -> str:
    """The text of docs/settings.md."""
    from ascend_moe.settings import TABLE

    parts = [HEAD]
    for heading, group in TABLE.items():
        rows = [f"| `{setting.name}` | {setting.help} | {setting.shown} |" for setting in group]
        parts.append("\n".join([f"## {heading}", "", "| variable | meaning | default |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page())
