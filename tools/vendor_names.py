#!/usr/bin/env python3
"""Public functions of asc-devkit's basic and advanced API, for twin/tests/test_vendor_table.py.

    python tools/vendor_names.py CHECKOUT > twin/tests/asc_devkit_names.txt

A line for each header and class: the header, the class (or a namespace in AscendC, or ``-``), and the functions that it
declares. Private members, constructors, operators and internal functions (``__name``) are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("include/basic_api", "include/adv_api")
SCOPE = re.compile(r"\b(namespace|class|struct|union)\s+(?:\w+\s+)*?(\w+)\s*(?:final\s*)?(?::[^;]*)?$")
BALANCED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"


def plain(text: str) -> str:
    """The source without comments, strings and attributes."""
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\[\[.*?\]\]', " ", text, flags=re.DOTALL)


def without_templates(text: str) -> str:
    """A declaration without its template<...> heads and the arguments of its attributes."""
    text = re.sub(rf"\b__\w+__\s*{BALANCED}", " ", text)
    while (head := re.search(r"\btemplate\s*<", text)) is not None:
        depth, at = 1, head.end()
        while depth and at < len(text):
            depth += {"<": 1, ">": -1}.get(text[at], 0)
            at += 1
        text = text[: head.start()] + text[at:]
    return text


def function_of(text: str) -> str:
    """The function that a declaration declares, or ``""``."""
    if not re.search(r"\b(__aicore__|__simd_callee__|inline)\b", text) or re.search(r"\b(friend|operator)\b", text):
        return ""
    name = re.match(r"[^(=]*?((?:~|::\s*)?\b\w+)\s*\(", without_templates(text))
    return "" if name is None or re.match(r"__|~|::|static_assert$", name[1]) else name[1]


def functions(text: str) -> Iterator[tuple[str, str]]:
    """Class, or ``-``, and name of each public function that a header declares."""
    # What is inside: (kind of scope, its name, whether declarations are public). Branches of #if begin alike.
    scopes: list[tuple[str, str, bool]] = [("namespace", "-", True)]
    branches: list[list[tuple[str, str, bool]]] = []
    declared = ""
    for token in re.findall(
        r"#(?:[^\n\\]|\\.)*|[;{}]|\b(?:public|private|protected)\s*:(?!:)|[^#;{}]+?(?=\b(?:public|"
        r"private|protected)\s*:(?!:)|[#;{}]|\Z)",
        plain(text),
        re.DOTALL,
    ):
        if token.startswith("#"):
            if re.match(r"#\s*if", token):
                branches.append([*scopes])
            elif re.match(r"#\s*el", token) and branches:
                scopes, declared = [*branches[-1]], ""
            elif re.match(r"#\s*endif", token) and branches:
                branches.pop()
            continue
        kind, scope, public = scopes[-1]
        if token[0] not in ";{}":
            label = re.fullmatch(r"(public|private|protected)\s*:", token)
            if label is not None:
                scopes[-1] = (kind, scope, label[1] == "public")
            else:
                declared += token
            continue
        if kind != "body" and token != "}" and public and (name := function_of(declared)) and name != scope:
            yield scope, name
        if token == "{":
            opened = SCOPE.search(without_templates(declared).strip())
            if opened is None:
                scopes.append(("body", "", False))
            else:
                inner = scope if opened[2] == "AscendC" else opened[2]
                scopes.append((opened[1], inner, opened[1] != "class" and kind != "body"))
        elif token == "}" and len(scopes) > 1:
            scopes.pop()
        declared = ""


def main(checkout: Path) -> None:
    found: dict[tuple[str, str], dict[str, None]] = {}
    for folder in FOLDERS:
        for path in sorted((checkout / folder).rglob("*.h")):
            header = path.relative_to(checkout / "include").as_posix()
            if "tiling" in path.name or "/internal/" in header:
                continue
            for scope, name in functions(path.read_text(errors="replace")):
                found.setdefault((header, scope), {})[name] = None
    for (header, scope), names in found.items():
        print(header, scope, *names)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
