"""Kernel sources with all mutants taken out as text: what a build without the macro must equal."""

from __future__ import annotations

import re

_IF = re.compile(r"if constexpr \(")


def elide(source: str) -> str:
    """Each ``if constexpr`` about mutants becomes the branch taken without them; lines keep their numbers."""
    at = 0
    while (found := _IF.search(source, at)) is not None:
        closing = _closing(source, found.end() - 1)
        condition = source[found.end() : closing]
        if "IsMutant(" not in condition:
            at = found.end()
            continue
        then_start = closing + 1 + len(re.match(r"\s*", source[closing + 1 :])[0])  # type: ignore[index]
        then_end = end = _statement_end(source, then_start)
        other = ""
        if source.startswith(" else ", then_end):
            end = _statement_end(source, then_end + len(" else "))
            other = source[then_end + len(" else ") : end]
        taken = source[then_start:then_end] if _holds(condition) else other
        lines = source.count("\n", found.start(), end) - taken.count("\n")
        # What stands behind the statement keeps its line; so does the taken branch when it is the last one.
        before, after = ("", "\n" * lines) if _holds(condition) else ("\n" * lines, "")
        source = source[: found.start()] + before + taken + after + source[end:]
        at = found.start()
    return re.sub(r"<IsMutant\([\w:]+\)>", "<false>", source)


def _holds(condition: str) -> bool:
    plain = re.sub(r"IsMutant\([\w:]+\)", "False", condition).replace("!", " not ").replace("||", " or ")
    return bool(eval(plain.replace("&&", " and "), {}))


def _closing(source: str, opening: int) -> int:
    """Where the bracket at ``opening`` is closed."""
    depth = 0
    for at in range(opening, len(source)):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(source[at], 0)
        if depth == 0:
            return at
    raise ValueError(f"no end of the bracket at {opening}")


def _statement_end(source: str, start: int) -> int:
    """Past a block, a statement, or an if with all its branches, that begins at ``start``."""
    if source[start] == "{":
        return _closing(source, start) + 1
    if source.startswith("if ", start):
        after = _closing(source, source.index("(", start)) + 1
        end = _statement_end(source, after + len(re.match(r"\s*", source[after:])[0]))  # type: ignore[index]
        return _statement_end(source, end + len(" else ")) if source.startswith(" else ", end) else end
    at = start
    while source[at] != ";":
        at = _closing(source, at) + 1 if source[at] in "({" else at + 1
    return at + 1
