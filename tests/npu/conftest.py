"""One run of a child process serves all tests of a session, also those of other test processes."""

from __future__ import annotations

import fcntl
import functools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

Once = Callable[[str, Callable[[], Any]], Any]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """``once(name, make)``: what ``make`` returns, as JSON has it; if it fails, all tests fail."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    @functools.cache
    def read(name: str, make: Callable[[], Any]) -> Any:
        path = folder / f"once-{name}.json"
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                try:
                    made = {"result": make()}
                except AssertionError as error:
                    made = {"failed": str(error)}
                path.write_text(json.dumps(made))
        found = json.loads(path.read_text())
        assert "failed" not in found, found["failed"]
        return found["result"]

    return read
