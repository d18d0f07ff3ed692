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
        obj.docstring.value = text.replace("][", "]\\[")  # "sums over [expert][rank]" is no link
