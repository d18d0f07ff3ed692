#!/usr/bin/env python3
"""Public functions of asc-devkit's basic and advanced API, for twin/tests/test_vendor_table.py.

    python tools/vendor_names.py CHECKOUT > twin/tests/asc_devkit_names.txt

A line for each header and class: the header, the class (or a namespace in AscendC, or ``-``), and the functions that it
declares. Private members, constructors, operators and internal functions (``__name``) are left out.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

COMMENTS = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\[\[.*?\]\]'  # and strings, and attributes
LABEL = r"\b(?:public|private|protected)\s*:(?!:)"
TOKENS = re.compile(rf"#(?:[^\n\\]|\\.)*|[;{{}}]|{LABEL}|[^#;{{}}]+?(?={LABEL}|[#;{{}}]|\Z)", re.DOTALL)
# What stands before a declaration: heads of templates, and attributes with arguments.
ANGLES, PARENTHESES = r"<[^<>]*>", r"\([^()]*\)"
for _ in range(4):
    ANGLES, PARENTHESES = rf"<(?:[^<>]|{ANGLES})*>", rf"\((?:[^()]|{PARENTHESES})*\)"
HEADS = rf"\btemplate\s*{ANGLES}|\b__\w+__\s*{PARENTHESES}"
SCOPE = re.compile(r"\b(namespace|class|struct|union)\s+(?:\w+\s+)*?(\w+)\s*(?:final\s*)?(?::[^;]*)?$")


def functions(text: str) -> Iterator[tuple[str, str]]:
    """Class, or ``-``, and name of each public function that a header declares."""
    # What is inside: (kind of scope, its name, whether declarations are public). Branches of #if begin alike.
    scopes = [("namespace", "-", True)]
    branches: list[list[tuple[str, str, bool]]] = []
    declared = ""
    for token in TOKENS.findall(re.sub(COMMENTS, " ", text, flags=re.DOTALL)):
        kind, scope, public = scopes[-1]
        if token.startswith("#"):
            if re.match(r"#\s*if", token):
                branches.append([*scopes])
            elif re.match(r"#\s*el", token):
                scopes, declared = [*branches[-1]], ""
            elif re.match(r"#\s*endif", token):
                branches.pop()
        elif re.fullmatch(LABEL, token):
            scopes[-1] = (kind, scope, token.startswith("public"))
        elif token[0] not in ";{}":
            declared += token
        else:
            declared = re.sub(HEADS, " ", declared)
            name = re.match(r"[^(=]*?(?<![:~])\b(?!__|static_assert)(\w+)\s*\(", declared)
            function = re.search(r"\b(?:__aicore__|__simd_callee__|inline)\b", declared)
            if name and function and public and not re.search(rf"\b(?:friend|operator|{scope}\s*\()", declared):
                yield scope, name[1]
            opened = SCOPE.search(declared.strip())
            if token == "{" and opened is not None:
                inner = scope if opened[2] == "AscendC" else opened[2]
                scopes.append((opened[1], inner, opened[1] != "class" and kind != "body"))
            elif token == "{":
                scopes.append(("body", "", False))
            elif token == "}":
                scopes.pop()
            declared = ""


if __name__ == "__main__":
    include = Path(sys.argv[1]) / "include"
    for path in [*sorted((include / "basic_api").rglob("*.h")), *sorted((include / "adv_api").rglob("*.h"))]:
        found: dict[str, dict[str, None]] = {}
        skipped = "tiling" in path.name or "internal" in path.parts
        for scope, name in functions("" if skipped else path.read_text(errors="replace")):
            found.setdefault(scope, {})[name] = None
        for scope, names in found.items():
            print(path.relative_to(include).as_posix(), scope, *names)
