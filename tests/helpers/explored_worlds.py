"""Draws the cases that explore tests run, and tells what no run may find."""

from __future__ import annotations

from collections.abc import Callable

from ascend_moe import explore
from ascend_moe.explore import World

#: What a case is changed to, by what it then explores.
MODES = {
    "window": {"algorithm": "window"},
    "servers": {"algorithm": "window", "servers": 1},
    "direct": {"algorithm": "direct"},
    "mixed": {"algorithm": "mixed"},
    "registered": {"algorithm": "direct", "rows": "registered"},
    "roles": {"algorithm": "direct", "list_cores": 2, "cores": 4},
}


def assert_nothing_found(result: explore.Result) -> None:
    assert result.finding is None, result.finding.line()


Worlds = Callable[[int], World]
