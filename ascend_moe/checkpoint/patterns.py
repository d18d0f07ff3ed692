"""Regular expressions from a downloaded config, matched in bounded time.

Python's ``re`` backtracks: ``(.+)+zzz$`` takes time exponential in the length of a name. Here a pattern runs once over
all names together. The names form one text, and a set of positions in the text is an int with a bit per position. A
character of the pattern moves the set forward by one where the text has it; ``*`` of a character is one addition (its
carry runs through the characters); ``*`` of a group repeats until the set is stable. The work is counted, and a config
that needs more than ``MOST_WORK`` is refused; the limit is equal on every rank.

Supported is the part of ``re`` that published checkpoints use: characters, classes, groups, alternatives, repetitions,
``^`` and ``$``, and lookaheads at the start. Everything else is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

from ascend_moe.errors import need

MOST_WORK = 10_000_000  # kilobits of sets, approximately: one or two seconds
LONGEST = 10_000  # characters of a pattern
MOST_REPEATED = 1000  # {1000}
DEEPEST = 50  # groups in groups
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\\[])*\]|\(\?[:!=]|\{\d+(?:,\d*)?\}|.", re.DOTALL)
_REPEATED = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_Step = Callable[[int], int]  # from a set of positions to the positions after the match


class Names:
    """A list of names for matching patterns; it counts the work of all patterns against MOST_WORK.

    Args:
        names: without line feeds.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.text = "".join(f"{name}\n" for name in self.names)
        self.ends = self.places("\n".__eq__)
        self.starts = (self.ends << 1 | 1) & ((1 << len(self.text)) - 1)
        self._work = 0
        self._masks: dict[str, int] = {}

    def matching(self, pattern: str) -> set[str]:
        """Return the names for which ``re.match(pattern, name)`` is true.

        Raises:
            ArgumentError: the pattern is not supported, or this object's patterns took more than MOST_WORK together.
        """
        return self.reached(_Pattern(self, pattern).run())

    def reached(self, places: int) -> set[str]:
        """Return the names with a position in ``places``, where bit i is character i of all names joined."""
        bits = f"{places:b}"[::-1].ljust(len(self.text), "0")
        there, start = set(), 0
        for name in self.names:
            if "1" in bits[start : start + len(name) + 1]:
                there.add(name)
            start += len(name) + 1
        return there

    def places(self, fits: Callable[[str], object]) -> int:
        """Return the set of positions, as bits, of the characters for which ``fits`` is true."""
        table = {ord(each): "1" if fits(each) else "0" for each in set(self.text)}
        return int(self.text.translate(table)[::-1] or "0", 2)

    def mask(self, token: str) -> int:
        """Return the set of positions, as bits, that match ``token``: a character, an escape, a class or a dot."""
        self.work(1 if token in self._masks else 100)
        if token not in self._masks:
            fits = re.compile(token).match if len(token) > 1 or token == "." else token.__eq__
            self._masks[token] = self.places(fits) & ~self.ends
        return self._masks[token]

    def work(self, steps: int = 1) -> None:
        """Count ``steps`` passes over all names; raise ArgumentError beyond MOST_WORK."""
        self._work += steps * (1 + len(self.text) // 1000)
        rule = "has patterns in quantization_config that take too long to match: simplify them"
        need(self._work <= MOST_WORK, "directory", rule)


class _Pattern:
    """One pattern: a parser whose functions return steps on sets of positions."""

    def __init__(self, names: Names, pattern: str) -> None:
        self._names, self._pattern, self._depth = names, pattern, 0
        self._need(len(pattern) <= LONGEST, f"more than {LONGEST} characters")
        self._left = _TOKEN.findall(pattern)[::-1]

    def run(self) -> int:
        """Return the positions after a match that starts at the beginning of a name."""
        starts, ahead = self._names.starts, False
        while self._next() in ("^", "(?!", "(?="):
            kind = self._left.pop()
            if kind != "^":
                ahead = True
                found = self._names.reached(self._group()[0](starts))
                wanted = [(name in found) == (kind == "(?=") for name in self._names.names]
                lengths = zip(wanted, self._names.names, strict=True)
                flags = "".join(f"{int(there)}{'0' * len(name)}" for there, name in lengths)
                starts &= int(flags[::-1] or "0", 2)
        step, _ = self._sequence() if ahead else self._alternatives()
        self._need(self._next() != "|", "a lookahead of one of several alternatives")
        self._need(not self._left, "a ) without a (")
        return step(starts)

    def _need(self, supported: bool, part: str) -> None:
        rule = "has the pattern {!r:.80} in quantization_config; {} is not supported"
        need(supported, "directory", rule, self._pattern, part)

    def _next(self) -> str:
        return self._left[-1] if self._left else ""

    def _group(self) -> tuple[_Step, bool]:
        self._depth += 1
        self._need(self._depth <= DEEPEST, f"a group in {DEEPEST} others")
        found = self._alternatives()
        self._need(self._next() == ")", "a ( without a )")
        self._left.pop()
        self._depth -= 1
        return found

    def _alternatives(self) -> tuple[_Step, bool]:
        """Return the step of alternatives, and whether it repeats a group."""
        branches = [self._sequence()]
        while self._next() == "|":
            self._left.pop()
            branches.append(self._sequence())
        step = branches[0][0] if len(branches) == 1 else lambda at: reduce(or_, [branch(at) for branch, _ in branches])
        return step, any(loops for _, loops in branches)

    def _sequence(self) -> tuple[_Step, bool]:
        parts: list[tuple[_Step, bool]] = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeated())
        steps = [step for step, _ in parts]

        def step(places: int) -> int:
            for each in steps:
                if not places:
                    break
                places = each(places)
            return places

        return step, any(loops for _, loops in parts)

    def _repeated(self) -> tuple[_Step, bool]:
        token = self._left.pop()
        loops, mask = False, None
        if token in ("(", "(?:"):
            self._need(self._next() != "?", "(? other than (?:, and (?! and (?= at the start,")
            step, loops = self._group()
        elif token in ("^", "$"):
            border = self._names.starts if token == "^" else self._names.ends
            step = lambda places: places & border  # noqa: E731
        else:
            mask = self._mask(token)
            step = self._character(mask)
        if self._next() not in _REPEATED and self._next()[:1] != "{":
            return step, loops
        self._need(token not in ("^", "$"), f"{self._next()} after {token}")
        least, most = self._counts(self._left.pop())
        if self._next() == "?":
            self._left.pop()  # greedy or lazy: only whether there is a match counts
        self._need(self._next() not in _REPEATED and self._next()[:1] != "{", f"{self._next()} after a repetition")
        if mask is not None and most is None:
            return self._run(step, mask, least), loops
        if (least, most) != (0, 1):
            self._need(not loops, "a repeated group in a repeated group")
            loops = mask is None
        return self._loop(step, least, most), loops

    def _mask(self, token: str) -> int:
        plain = len(token) == 1 and token not in "*+?{[()\\"
        escaped = token[0] == "\\" and len(token) == 2 and (not token[1].isalnum() or token[1] in "dwsDWS")
        self._need(plain or escaped or (token[0] == "[" and len(token) > 1), token)
        if token[0] == "[":
            self._need(re.search(r"--|&&|~~|\|\|", token) is None, token)
            try:
                re.compile(token)
            except re.error:
                self._need(False, token)
        return self._names.mask(token)

    def _counts(self, token: str) -> tuple[int, int | None]:
        if token in _REPEATED:
            return _REPEATED[token]
        self._need(len(token) > 2, token)
        least, comma, most = token[1:-1].partition(",")
        counts = int(least), int(most) if most else None if comma else int(least)
        most_of = MOST_REPEATED if counts[1] is None else counts[1]
        self._need(counts[0] <= most_of <= MOST_REPEATED, token)
        return counts

    def _character(self, mask: int) -> _Step:
        def step(places: int) -> int:
            self._names.work()
            return (places & mask) << 1

        return step

    def _run(self, step: _Step, mask: int, least: int) -> _Step:
        """Match a character ``least`` or more times: the carry of an addition runs through its positions."""

        def run(places: int) -> int:
            for _ in range(least):
                places = step(places)
            self._names.work()
            return (((places & mask) + mask) ^ mask) | places

        return run

    def _loop(self, step: _Step, least: int, most: int | None) -> _Step:
        def loop(places: int) -> int:
            for _ in range(least):
                places = step(places)
                if not places:
                    return 0
            reached = new = places
            count = least
            while new and (most is None or count < most):
                new = step(new) & ~reached
                reached |= new
                count += 1
            return reached

        return loop
