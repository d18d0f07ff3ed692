"""Rules of the hardware: each fires and is named, on both engines; its near miss never does.

The checked engine finds every missing edge under every schedule.
"""

from __future__ import annotations

import ctypes
import functools
import re

import pytest
from twin_oracle import INCLUDE, TWIN, native_library

LATE, RANDOM, LAZY, PCT = 0, 1, 2, 3
SCHEDULES = [(LATE, 0), *((policy, seed) for policy in (RANDOM, LAZY, PCT) for seed in range(8))]


@functools.cache
def opened(engine: str) -> ctypes.CDLL:
    library = ctypes.CDLL(str(native_library("rule_kernels", engine)))
    for function in ("rules", "run_rule", *(("hazards", "run_hazard") if engine == "checked" else ())):
        getattr(library, function).restype = ctypes.c_char_p
    return library


def expectations(text: bytes) -> list[tuple[str, str, list[str]]]:
    """Name, finding or "", pieces of what is said."""
    rows = [line.split("|") for line in text.decode().splitlines()]
    assert len(rows) > 50
    return [(name, finding, details) for name, finding, *details in rows]


@pytest.mark.asan
@pytest.mark.parametrize("engine", ["fast", "checked"])
def test_every_rule_is_kept_or_found_broken(engine: str) -> None:
    library = opened(engine)
    for name, finding, details in expectations(library.rules()):
        text = library.run_rule(name.encode()).decode()
        if not finding:
            assert text == "", name
            continue
        assert text.startswith(f"{finding}: ") and all(detail in text for detail in details), (name, text)
        assert "\n" not in text and (engine == "checked" or "(rank 5, core " in text)
        assert "rule_kernels.cpp:" in text, (name, text)


def says(name: str, policy: int, seed: int, unordered: bool) -> str:
    run = opened("checked").run_hazard
    return run(name.encode(), policy, ctypes.c_uint64(seed), int(unordered)).decode()


def test_a_missing_edge_is_found_under_every_schedule_and_a_near_miss_never() -> None:
    """Stores of one core to one rank in order make up for a missing drain; in any order they do not."""
    for name, finding, details in expectations(opened("checked").hazards()):
        for policy, seed in SCHEDULES:
            if finding == "" or name.endswith("_unordered"):
                assert says(name, policy, seed, unordered=False) == "", (name, policy, seed)
                text = says(name, policy, seed, unordered=True)
            else:
                text = says(name, policy, seed, unordered=seed % 2 == 1)
            if finding == "":
                assert text == "", (name, policy, seed)
                continue
            assert text.startswith(f"{finding}: "), (name, policy, seed, text)
            assert "\n" not in text and "rule_kernels.cpp:" in text
            if finding in ("missing pipe synchronisation", "same-pipe hazard"):
                assert text.count("rule_kernels.cpp:") >= 3  # both accesses, and the place of the second
            if policy == LATE:
                assert all(detail in text for detail in details), (name, text)


def test_the_readme_has_each_rule_with_its_source() -> None:
    """The README's table has the rules of fault.h alone, and each rule that is an error names a document of CANN."""
    table = (INCLUDE / "twin" / "engine" / "fault.h").read_text().replace("\\\n", " ")
    rules = re.findall(r"X\(k\w+, k(Warning|Error), ((?:\"[^\"]*\"\s*)+),\s*((?:\"[^\"]*\"\s*)+)\)", table)
    assert len(rules) == table.count("X(k") > 10
    rows = []
    for level, what, source in rules:
        rule, text = (re.sub(r'"\s*"?', "", part).strip() for part in (what, source))
        assert level == "Warning" or ".md: " in text, rule
        rows.append((rule, level.lower(), text))
    page = (TWIN / "README.md").read_text()
    assert rows == re.findall(r"^\| (.*?) \| (warning|error) \| (.*?) \| .* \|$", page, re.MULTILINE)
