"""Tables of plain text, fit for a terminal and for an issue; versions of packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence


def table(rows: Sequence[Sequence[object]], indent: str = "  ") -> list[str]:
    """Lines of a table: columns two blanks apart, numbers to the right; the last one is never padded."""
    texts = [[_cell(cell) for cell in row] for row in rows]
    columns = max((len(row) for row in texts), default=0)
    widths = [max((len(row[i]) for row in texts if i < len(row)), default=0) for i in range(columns)]
    right = [all(isinstance(row[i], int) for row in rows if i < len(row) and row[i] != "") for i in range(columns)]
    lines = []
    for row in texts:
        cells = [
            cell.rjust(widths[i]) if right[i] else cell if i == columns - 1 else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def _cell(value: object) -> str:
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)


def installed_version(package: str) -> str:
    """Of a distribution; "" when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
