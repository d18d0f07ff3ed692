"""Which tests a run without `-m` takes, and how many it leaves to other lanes. A plugin of every session."""

from __future__ import annotations

from typing import Any

import pytest

EVERY_CHANGE = "not nightly and not mutants"
LEFT_OUT = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    if not config.option.markexpr:
        config.option.markexpr = EVERY_CHANGE
    config.stash[LEFT_OUT] = 0


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            item.config.stash[LEFT_OUT] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["nightly"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of xdist ended. All of them collect, and leave out, the same tests."""
    left_out = getattr(node, "workeroutput", {}).get("nightly", 0)
    node.config.stash[LEFT_OUT] = max(node.config.stash[LEFT_OUT], left_out)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.stash[LEFT_OUT]:
        terminalreporter.write_line(f"{config.stash[LEFT_OUT]} tests left to `make nightly`")
