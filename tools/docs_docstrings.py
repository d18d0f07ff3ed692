"""An extension of griffe: the package's docstrings as mkdocstrings reads them."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Makes of this package's docstrings what griffe's parser and Markdown read as meant."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = obj.docstring.value
        # A list of arguments may go on in the next lines, deeper: "x, y,\n    z: as there".
        while True:
            joined = re.sub(r"(?m)^( *(?:\w+, )*\w+,)\n +(?=(?:\w+, )*\w+[,:])", r"\1 ", text)
            if joined == text:
                break
            text = joined
        names = {each.name.lstrip("*") for each in getattr(obj, "parameters", [])}
        text = re.sub(r"(?ms)^Args:\n.*?(?=\n\n|\Z)", lambda section: _a_line_each(section[0], names), text)
        obj.docstring.value = text.replace("][", "]\\[")  # "sums over [expert][rank]" is no link


def _a_line_each(section: str, names: set[str]) -> str:
    """Begins a line where the next argument is described in the line of another: "x: (T, H). ids: (T, K)"."""

    def begun(match: re.Match[str]) -> str:
        return f".\n    {match[1]}: " if names.issuperset(match[1].split(", ")) else match[0]

    return re.sub(r"\.\s+((?:\w+, )*\w+): ", begun, section)
