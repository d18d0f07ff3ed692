"""One source tree that holds many mutants: a number says at run time which of them a function runs.

The body of a function in which a mutant makes an edit becomes

    { if (mutants::Is(7)) { the body with mutant 7's edits } else { the body as it is } }

so edits of different mutants may overlap, declare what they like, and return where they like. What a mutant changes
outside of the bodies of functions (types, constants, members) cannot be chosen at run time: it has a build of its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

VARIABLE = "ASCEND_MOE_MUTANT"  # in the environment of a process that opens a switched library
SELECT = "am_mutant"  # the library's function that takes another number
HEADER = f"""
#pragma once
#include <cstdlib>
namespace mutants {{
inline int chosen = std::getenv("{VARIABLE}") != nullptr ? std::atoi(std::getenv("{VARIABLE}")) : 0;
constexpr bool Is(int number) {{ return !__builtin_is_constant_evaluated() && chosen == number; }}
}}  // namespace mutants
extern "C" __attribute__((visibility("default"), used)) inline void {SELECT}(int number) {{ mutants::chosen = number; }}
"""

_SKIPPED = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M
)
_SCOPE = re.compile(r"\b(?:namespace|class|struct|union)\b[^()]*$|\bextern \x01+\s*$")


def bodies(text: str) -> list[tuple[int, int]]:
    """Where the bodies of all functions begin and end, without their braces; those inside of others left out."""
    # Comments, strings and directives hold no braces and no semicolons; every place stays where it is.
    bare = _SKIPPED.sub(lambda match: "\x01" * len(match[0]), text)
    found, stack, begin = [], list[str](), 0
    for match in re.finditer(r"[{};]", bare):
        at, outside = match.start(), all(kind == "scope" for kind in stack)
        if match[0] == "{":
            header = bare[begin:at]
            scope = outside and _SCOPE.search(header)
            function = outside and not scope and ")" in header and not header.rstrip().endswith("=")
            stack.append("scope" if scope else "function" if function else "other")
            if function:
                start = at + 1
        elif match[0] == "}" and stack.pop() == "function":
            found.append((start, at))
        if all(kind == "scope" for kind in stack):
            begin = at + 1
    return found


def _pieces(text: str) -> tuple[list[str], list[str]]:
    """Returns what lies outside of the bodies of functions, and the bodies: one fewer."""
    outside, inside, at = list[str](), list[str](), 0
    for begin, end in bodies(text):
        outside.append(text[at:begin])
        inside.append(text[begin:end])
        at = end
    return [*outside, text[at:]], inside


def _words(texts: Sequence[str]) -> list[list[str]]:
    return [text.split() for text in texts]


def _changed(text: str, mutated: str) -> dict[int, str] | None:
    """By number, the bodies that differ; None when something else does."""
    (outside, inside), (other, theirs) = _pieces(text), _pieces(mutated)
    if _words(outside) != _words(other):
        return None
    pairs = enumerate(zip(inside, theirs, strict=True))
    return {number: new for number, (old, new) in pairs if old != new}


class Switched:
    """The texts of some files, by path, and the mutants that are added to them."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._pieces = {file: _pieces(text) for file, text in texts.items()}
        self._texts = texts
        # By file and number of the function: its bodies, by number of the mutant.
        self._bodies = defaultdict[tuple[str, int], dict[int, str]](dict)

    def add(self, number: int, mutated: Mapping[str, str]) -> bool:
        """Adds a mutant, whose files are ``mutated``. False: it changes more than bodies of functions."""
        changes = {file: _changed(self._texts[file], text) for file, text in mutated.items()}
        if None in changes.values():
            return False
        for file, changed in changes.items():
            for function, body in (changed or {}).items():
                self._bodies[file, function][number] = body
        return True

    def texts(self) -> dict[str, str]:
        """The files with all mutants in them."""
        made = {}
        for file, (outside, inside) in self._pieces.items():
            chosen = [self._switch(self._bodies.get((file, at), {}), body) for at, body in enumerate(inside)]
            made[file] = "".join(part for pair in zip(outside, [*chosen, ""], strict=True) for part in pair)
        return made

    @staticmethod
    def _switch(mutated: Mapping[int, str], body: str) -> str:
        branches = "".join(f" if (mutants::Is({number})) {{{text}}} else" for number, text in mutated.items())
        return f"{branches} {{{body}}} " if branches else body
